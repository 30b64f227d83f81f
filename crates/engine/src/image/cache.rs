//! The encoder cache: which images are in which rows of the executor's media cache, and who needs them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::rows::FreeRows;
use super::{ImageHash, ImageInput, ImageSpan, PromptImage};
use crate::{InjectedTokens, PlannedImage, StepId, StepPlan};

/// Images of a sequence, and those whose encoder output it holds.
#[derive(Debug, Default)]
pub(crate) struct SequenceImages {
    all: Arc<[PromptImage]>,
    /// Indices of the images held. Between two steps, that is at most the one which the computed tokens end in.
    held: Range<usize>,
}

impl SequenceImages {
    pub(crate) fn new(all: Arc<[PromptImage]>) -> Self {
        Self { all, held: 0..0 }
    }

    pub(crate) fn all(&self) -> &Arc<[PromptImage]> {
        &self.all
    }

    /// Returns the images held.
    pub(crate) fn held(&self) -> impl Iterator<Item = &PromptImage> {
        self.all[self.held.clone()].iter()
    }

    /// Returns the indices of the images with tokens in a range of positions.
    fn within(&self, tokens: &Range<usize>) -> Range<usize> {
        overlapping(&self.all, tokens)
    }

    /// Returns the image with a token at a position.
    fn at(&self, position: usize) -> Option<&PromptImage> {
        self.within(&(position..position + 1)).next().map(|index| &self.all[index])
    }
}

/// Returns the indices of the images with tokens in a range of positions.
pub(crate) fn overlapping(images: &[PromptImage], tokens: &Range<usize>) -> Range<usize> {
    if tokens.is_empty() {
        return 0..0;
    }
    let first = images.partition_point(|image| image.span.end() as usize <= tokens.start);
    let end = images.partition_point(|image| (image.span.start as usize) < tokens.end);
    first..end
}

/// The grid is part of the key, so an image never takes the rows of one of another size.
type Key = (ImageHash, u32, u32);

fn key(image: &PromptImage) -> Key {
    let ImageSpan { rows, cols, .. } = image.span;
    (image.hash, rows, cols)
}

struct Entry {
    media: Vec<Range<u32>>,
    /// Number of times that sequences hold the image.
    references: u32,
    /// Step that encodes or has encoded the image.
    step: StepId,
    /// Input of the encoder, until the plan takes it.
    input: Option<Arc<ImageInput>>,
    /// Key in [`ImageCache::idle`], if there are no references.
    idle: u64,
}

/// Encoded images by content. Images without references stay until their rows are needed.
pub(crate) struct ImageCache {
    rows: FreeRows,
    total: usize,
    /// Whether the tokens of an image see each other.
    seen_whole: bool,
    entries: HashMap<Key, Entry>,
    /// Images without references, the one released first first.
    idle: BTreeMap<u64, Key>,
    /// Number of tokens of the images without references.
    idle_tokens: usize,
    /// Number of releases, which orders them.
    releases: u64,
    /// Step being planned.
    step: StepId,
    /// Number of tokens that it may still encode.
    budget: usize,
    /// An image did not fit the step. No other is encoded in it, so that the image finds room in a later one.
    full: bool,
    /// Latest step that has completed.
    completed: StepId,
    /// Images that the step being planned encodes.
    planned: Vec<Key>,
    /// Numbers of images looked up and found since [`ImageCache::take_lookups`].
    lookups: (u64, u64),
}

impl ImageCache {
    /// Creates an empty cache of `tokens` rows. `seen_whole` is that of [`ImageSpec`](super::ImageSpec).
    pub(crate) fn new(tokens: usize, seen_whole: bool) -> Self {
        Self {
            rows: FreeRows::new(tokens),
            total: tokens,
            seen_whole,
            entries: HashMap::new(),
            idle: BTreeMap::new(),
            idle_tokens: 0,
            releases: 0,
            step: 0,
            budget: 0,
            full: false,
            completed: 0,
            planned: Vec::new(),
            lookups: (0, 0),
        }
    }

    /// Begins the plan of a step that encodes at most `budget` tokens.
    pub(crate) fn begin(&mut self, step: StepId, budget: usize) {
        self.planned.clear();
        (self.step, self.budget, self.full) = (step, budget, false);
    }

    /// Returns the numbers of images looked up and found since the last call.
    pub(crate) fn take_lookups(&mut self) -> (u64, u64) {
        std::mem::take(&mut self.lookups)
    }

    /// Returns the most tokens from `first` on, up to `tokens`, after which a step may end: it may end anywhere unless the
    /// tokens of an image see each other.
    pub(crate) fn uncut(&self, images: &SequenceImages, first: usize, tokens: usize) -> usize {
        let next = images.at(first + tokens).filter(|_| self.seen_whole);
        match next.map(|image| image.span.start as usize) {
            Some(start) if start < first + tokens => start.saturating_sub(first),
            _ => tokens,
        }
    }

    /// Returns the fewest tokens from `first` on after which a step may end: more than one in an image whose tokens see each
    /// other.
    pub(crate) fn least(&self, images: &SequenceImages, first: usize) -> usize {
        images.at(first).filter(|_| self.seen_whole).map_or(1, |image| image.span.end() as usize - first)
    }

    /// Makes a sequence hold the images of its tokens at `first..first + tokens`, and plans to encode those that are
    /// not in memory. Returns the number of tokens up to the first image that cannot be had in this step, all if there
    /// is none.
    pub(crate) fn acquire(&mut self, images: &mut SequenceImages, first: usize, tokens: usize) -> usize {
        for index in images.within(&(first..first + tokens)) {
            if images.held.contains(&index) {
                continue;
            }
            let image = &images.all[index];
            if !self.hold(image) {
                return (image.span.start as usize).saturating_sub(first);
            }
            let start = if images.held.is_empty() { index } else { images.held.start };
            images.held = start..index + 1;
        }
        tokens
    }

    /// Counts a reference to an image, which is encoded in this step if it is not in memory. Returns `false` if it
    /// cannot be had in this step.
    fn hold(&mut self, image: &PromptImage) -> bool {
        let key = key(image);
        if let Some(entry) = self.entries.get_mut(&key) {
            // An image that a step in flight encodes is not there if that step fails. The sequences of the step end
            // with it, and no other depends on it.
            if entry.step > self.completed && entry.step != self.step {
                return false;
            }
            if entry.references == 0 {
                self.idle.remove(&entry.idle);
                self.idle_tokens -= tokens(&key);
            }
            entry.references += 1;
            self.lookups.0 += 1;
            self.lookups.1 += 1;
            return true;
        }
        let Some(media) = self.take_rows(tokens(&key)) else {
            self.full = true;
            return false;
        };
        let input = Some(image.input.clone());
        self.entries.insert(key, Entry { media, references: 1, step: self.step, input, idle: 0 });
        self.planned.push(key);
        self.lookups.0 += 1;
        true
    }

    /// Takes rows for an image, if the budget allows it, and evicts images without references.
    fn take_rows(&mut self, tokens: usize) -> Option<Vec<Range<u32>>> {
        if self.full || tokens > self.budget || tokens > self.rows.len() + self.idle_tokens {
            return None;
        }
        while self.rows.len() < tokens {
            let (_, key) = self.idle.pop_first()?;
            self.idle_tokens -= self::tokens(&key);
            self.remove(&key);
        }
        self.budget -= tokens;
        self.rows.take(tokens)
    }

    /// Removes an image that is not among the idle ones.
    fn remove(&mut self, key: &Key) {
        if let Some(entry) = self.entries.remove(key) {
            self.rows.give_back(&entry.media);
        }
    }

    /// Releases the images of a sequence that end before or at a position.
    pub(crate) fn release_until(&mut self, images: &mut SequenceImages, position: usize) {
        while let Some(image) = images.held.clone().next().and_then(|index| images.all.get(index))
            && image.span.end() as usize <= position
        {
            let key = key(image);
            images.held.start += 1;
            self.let_go(key);
        }
    }

    /// Releases all images of a sequence.
    pub(crate) fn release(&mut self, images: &mut SequenceImages) {
        self.release_until(images, usize::MAX);
    }

    fn let_go(&mut self, key: Key) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        entry.references -= 1;
        if entry.references > 0 {
            return;
        }
        // An image that did not fit may fit now.
        self.full = false;
        if entry.input.is_some() {
            // The step being planned does without it.
            self.remove(&key);
            self.budget += tokens(&key);
        } else {
            self.releases += 1;
            entry.idle = self.releases;
            self.idle.insert(self.releases, key);
            self.idle_tokens += tokens(&key);
        }
    }

    /// Writes the images that the step being planned encodes.
    pub(crate) fn write_encoded(&mut self, plan: &mut StepPlan) {
        let mut planned = std::mem::take(&mut self.planned);
        for key in planned.drain(..) {
            // An image that was given up is not there, or planned anew.
            if let Some(entry) = self.entries.get_mut(&key)
                && let Some(image) = entry.input.take()
            {
                plan.encode.push(PlannedImage { image, media: entry.media.clone() });
            }
        }
        self.planned = planned;
    }

    /// Writes the rows that the tokens of a sequence at `tokens` take. The sequence must hold their images.
    pub(crate) fn write_injected(&self, images: &SequenceImages, tokens: Range<usize>, plan: &mut StepPlan) {
        for image in &images.all[images.within(&tokens)] {
            let Some(entry) = self.entries.get(&key(image)) else {
                debug_assert!(false, "a planned sequence does not hold its image");
                continue;
            };
            let mut position = image.span.start as usize;
            for run in &entry.media {
                let end = position + run.len();
                let (from, until) = (position.max(tokens.start), end.min(tokens.end));
                if from < until {
                    let row = |at: usize| run.start + (at - position) as u32;
                    plan.injected.push(InjectedTokens { position: from as u32, media: row(from)..row(until) });
                }
                position = end;
            }
        }
    }

    /// Records that a step has completed.
    pub(crate) fn complete(&mut self, step: StepId) {
        self.completed = self.completed.max(step);
    }

    /// Forgets the images that a failed step was to encode. Its sequences must have ended.
    pub(crate) fn withdraw(&mut self, step: StepId) {
        let failed = |(_, entry): &(&Key, &Entry)| entry.step == step;
        let keys: Vec<Key> = self.entries.iter().filter(failed).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(entry) = self.entries.get(&key) {
                debug_assert_eq!(entry.references, 0, "a sequence outside the step holds its image");
                if self.idle.remove(&entry.idle).is_some() {
                    self.idle_tokens -= tokens(&key);
                }
            }
            self.remove(&key);
        }
        self.complete(step);
    }

    /// Checks that every row is free or of one image, and that the references are those of the sequences.
    pub(crate) fn check<'a>(&self, sequences: impl Iterator<Item = &'a SequenceImages>) -> Result<(), String> {
        let taken: usize = self.entries.keys().map(tokens).sum();
        if taken + self.rows.len() != self.total {
            return Err(format!("{taken} rows taken, {} free of {}", self.rows.len(), self.total));
        }
        let mut held: HashMap<Key, u32> = HashMap::new();
        for image in sequences.flat_map(SequenceImages::held) {
            *held.entry(key(image)).or_default() += 1;
        }
        let wrong = |(key, entry): &(&Key, &Entry)| held.get(*key).copied().unwrap_or(0) != entry.references;
        if let Some((key, entry)) = self.entries.iter().find(wrong) {
            return Err(format!("image {} counts {} references", key.0, entry.references));
        }
        if let Some(lost) = held.keys().find(|key| !self.entries.contains_key(*key)) {
            return Err(format!("image {} is held but not in memory", lost.0));
        }
        let idle = self.entries.values().filter(|entry| entry.references == 0);
        let tokens: usize = self.idle.values().map(tokens).sum();
        if (self.idle.len(), self.idle_tokens) != (idle.count(), tokens) {
            return Err(format!("{} idle images of {} tokens", self.idle.len(), self.idle_tokens));
        }
        Ok(())
    }
}

fn tokens(&(_, rows, cols): &Key) -> usize {
    rows as usize * cols as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images(spans: &[(u32, u32)]) -> SequenceImages {
        let image = |&(start, cols): &(u32, u32)| {
            let input = Arc::new(ImageInput { rows: 0, cols: 0, patches: Box::new([0u8; 0]) });
            PromptImage { span: ImageSpan { start, rows: 1, cols }, hash: ImageHash([start as u8; 32]), input }
        };
        SequenceImages::new(spans.iter().map(image).collect())
    }

    #[test]
    fn a_share_holds_the_images_of_its_tokens() {
        let mut cache = ImageCache::new(10, false);
        cache.begin(1, 10);
        let mut sequence = images(&[(2, 4), (6, 3), (12, 4)]);
        assert_eq!(cache.acquire(&mut sequence, 4, 0), 0);
        assert_eq!(sequence.held().count(), 0, "no token, no image");
        assert_eq!(cache.acquire(&mut sequence, 0, 20), 12, "the third does not fit beside the others");
        assert_eq!(sequence.held().count(), 2);
        assert_eq!(cache.check([&sequence].into_iter()), Ok(()));
        let mut plan = StepPlan::default();
        cache.write_encoded(&mut plan);
        cache.write_injected(&sequence, 4..8, &mut plan);
        let injected: Vec<_> = plan.injected.iter().map(|run| (run.position, run.media.clone())).collect();
        assert_eq!((plan.encode.len(), injected), (2, vec![(4, 2..4), (6, 4..6)]));
        cache.release_until(&mut sequence, 8);
        assert_eq!(sequence.held().count(), 1, "the second image goes on");
        cache.release_until(&mut sequence, 9);
        cache.complete(1);
        cache.begin(2, 10);
        assert_eq!(cache.acquire(&mut sequence, 9, 11), 11, "the others make way");
        cache.release(&mut sequence);
        assert_eq!(cache.check([&sequence].into_iter()), Ok(()));
    }

    #[test]
    fn a_step_does_not_end_in_an_image_that_is_seen_whole() {
        let sequence = images(&[(2, 4), (6, 3)]);
        let ends = |seen_whole| {
            let cache = ImageCache::new(10, seen_whole);
            let uncut = |first, tokens| cache.uncut(&sequence, first, tokens);
            let shares = [uncut(0, 1), uncut(0, 2), uncut(0, 3), uncut(0, 6), uncut(0, 8), uncut(2, 3), uncut(7, 1)];
            (shares, [0, 2, 4, 6, 8, 9].map(|first| cache.least(&sequence, first)))
        };
        assert_eq!(ends(true), ([1, 2, 2, 6, 6, 0, 0], [1, 4, 2, 3, 1, 1]));
        assert_eq!(ends(false), ([1, 2, 3, 6, 8, 3, 1], [1; 6]));
    }

    #[test]
    fn an_image_given_up_in_its_own_step_costs_no_budget() {
        let mut cache = ImageCache::new(8, false);
        cache.begin(1, 8);
        let (mut first, mut second) = (images(&[(0, 8)]), images(&[(1, 5)]));
        assert_eq!(cache.acquire(&mut first, 0, 3), 3);
        assert_eq!(cache.acquire(&mut second, 0, 3), 1);
        cache.release(&mut first);
        assert_eq!(cache.acquire(&mut second, 0, 3), 3);
        let mut plan = StepPlan::default();
        cache.write_encoded(&mut plan);
        assert_eq!(plan.encode.len(), 1);
        assert_eq!(cache.check([&first, &second].into_iter()), Ok(()));
    }

    /// A sequence that is not admitted after all lets its images go, and then others must be able to go on.
    #[test]
    fn an_image_that_is_let_go_makes_room() {
        let mut cache = ImageCache::new(8, false);
        let (mut first, mut second) = (images(&[(0, 8), (9, 4)]), images(&[(1, 5)]));
        cache.begin(1, 8);
        assert_eq!(cache.acquire(&mut first, 0, 8), 8);
        cache.write_encoded(&mut StepPlan::default());
        cache.release(&mut first);
        cache.complete(1);
        cache.begin(2, 8);
        assert_eq!(cache.acquire(&mut first, 0, 13), 9, "there is no room beside the first image");
        cache.release(&mut first);
        assert_eq!(cache.acquire(&mut second, 0, 6), 6);
        assert_eq!(cache.check([&first, &second].into_iter()), Ok(()));
    }
}
