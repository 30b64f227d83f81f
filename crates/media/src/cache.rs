//! Processed images, bounded in bytes, and the names that clients gave them.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::identity::Identity;
use crate::loader::ProcessedImage;
use crate::patches::Patches;

/// Memory of an entry beside its patches.
const OVERHEAD: u64 = 512;
/// Memory of a view beside its patches.
const VIEW_OVERHEAD: u64 = size_of::<Patches>() as u64;

/// The most names that are remembered.
const MAX_NAMES: usize = 1 << 16;

/// The images that were used last, by the digest of their identity.
#[derive(Debug)]
pub(crate) struct Cache {
    capacity: u64,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    images: HashMap<[u8; 32], (u64, Arc<ProcessedImage>)>,
    /// Keys by the time of their last use.
    used: BTreeMap<u64, [u8; 32]>,
    /// Counts uses.
    clock: u64,
    bytes: u64,
    /// The digests of the images with these names.
    names: HashMap<[u8; 32], [u8; 32]>,
    /// Names in the order in which they were first given.
    named: VecDeque<[u8; 32]>,
}

impl Cache {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, entries: Mutex::default() }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, key: &[u8; 32]) -> Option<Arc<ProcessedImage>> {
        let entries = &mut *self.entries();
        let (used, image) = entries.images.get_mut(key)?;
        entries.used.remove(used);
        entries.clock += 1;
        *used = entries.clock;
        entries.used.insert(entries.clock, *key);
        Some(Arc::clone(image))
    }

    /// Adds an image and removes those that were not used for the longest time. An image that exceeds the capacity is not
    /// added.
    pub(crate) fn insert(&self, image: &Arc<ProcessedImage>) {
        let (key, size) = (image.identity.digest(), size(image));
        if size > self.capacity {
            return;
        }
        let entries = &mut *self.entries();
        entries.clock += 1;
        let replaced = entries.images.insert(key, (entries.clock, Arc::clone(image)));
        entries.used.insert(entries.clock, key);
        entries.bytes += size;
        if let Some((used, image)) = replaced {
            entries.used.remove(&used);
            entries.bytes -= self::size(&image);
        }
        while entries.bytes > self.capacity && entries.evict() {}
    }

    /// Removes the image that was unused for the longest time. Returns `false` if there is none.
    pub(crate) fn evict(&self) -> bool {
        self.entries().evict()
    }

    /// Gives an image a name, which stood for another one before, perhaps.
    pub(crate) fn name(&self, name: [u8; 32], image: &Identity) {
        let entries = &mut *self.entries();
        if entries.names.insert(name, image.digest()).is_none() {
            entries.named.push_back(name);
        }
        if entries.named.len() > MAX_NAMES
            && let Some(oldest) = entries.named.pop_front()
        {
            entries.names.remove(&oldest);
        }
    }

    /// The digest of the image with a name.
    pub(crate) fn named(&self, name: &[u8; 32]) -> Option<[u8; 32]> {
        self.entries().names.get(name).copied()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.entries().bytes
    }
}

impl Entries {
    fn evict(&mut self) -> bool {
        let Some((_, key)) = self.used.pop_first() else { return false };
        if let Some((_, image)) = self.images.remove(&key) {
            self.bytes -= size(&image);
        }
        true
    }
}

fn size(image: &ProcessedImage) -> u64 {
    image.views.bytes() + image.views.patches().len() as u64 * VIEW_OVERHEAD + OVERHEAD
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::RgbImage;
    use crate::processor::tests::processor;
    use crate::views::{Tiles, Views};

    fn image(name: usize, cells: usize) -> Arc<ProcessedImage> {
        let processor = processor();
        let (width, height) = (processor.layout.cell() * cells, processor.layout.cell());
        let pixels = RgbImage::from_raw(width, height, vec![name as u8; width * height * 3]);
        let identity = Identity::new("m", &processor, name.to_string().as_bytes());
        let patches = Patches::cut(&pixels, processor.layout, processor.normalize);
        Arc::new(ProcessedImage::new(identity, Views::new(vec![patches], Tiles::default()), None))
    }

    #[test]
    fn the_image_that_was_unused_for_longest_leaves_first() {
        let images: Vec<_> = (0..4).map(|name| image(name, 1)).collect();
        let cache = Cache::new(3 * size(&images[0]));
        let has = |i: usize| cache.get(&images[i].identity.digest()).is_some();
        images[..3].iter().for_each(|image| cache.insert(image));
        assert!(has(0));
        cache.insert(&images[3]);
        assert_eq!([0, 1, 2, 3].map(has), [true, false, true, true]);
        cache.insert(&image(9, 100));
        assert_eq!([0, 1, 2, 3].map(has), [true, false, true, true], "an image larger than the cache");
        cache.insert(&image(0, 2));
        assert!(has(0), "an image can be replaced");
        assert!(cache.bytes() <= 3 * size(&images[0]));
    }

    #[test]
    fn ten_thousand_images_take_no_more_than_the_capacity() {
        let one = size(&image(0, 1));
        let cache = Cache::new(10 * one);
        for name in 0..10_000 {
            cache.insert(&image(name, 1 + name % 3));
            assert!(cache.bytes() <= 10 * one);
        }
        let entries = cache.entries();
        assert_eq!(entries.images.len(), entries.used.len());
        assert_eq!(entries.bytes, entries.images.values().map(|(_, image)| size(image)).sum::<u64>());
    }

    #[test]
    fn the_oldest_names_are_forgotten() {
        let cache = Cache::new(0);
        let key = |number: usize| Identity::new("m", &processor(), &number.to_le_bytes());
        for number in 0..=MAX_NAMES {
            cache.name(key(number).digest(), &key(0));
        }
        cache.name(key(1).digest(), &key(7));
        assert_eq!(
            [0, 1, 2].map(|n| cache.named(&key(n).digest())),
            [None, Some(key(7).digest()), Some(key(0).digest())]
        );
        let entries = cache.entries();
        assert_eq!((entries.names.len(), entries.named.len()), (MAX_NAMES, MAX_NAMES));
    }

    #[test]
    fn images_are_evicted_on_demand() {
        let cache = Cache::new(1 << 20);
        cache.insert(&image(1, 1));
        assert!(cache.evict() && !cache.evict());
        assert_eq!(cache.bytes(), 0);
    }
}
