//! Drafts of a sequence's next tokens, which a step verifies: what followed the latest tokens where they occurred
//! before.

use crate::kv::TokenHistory;

/// Settings of speculation with n-grams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speculation {
    /// Maximum number of drafts of a sequence in a step, at least 1.
    pub tokens: usize,
    /// Length of the shortest n-gram that is looked up, at least 1.
    pub lookup_min: usize,
    /// Length of the longest n-gram that is looked up, at least `lookup_min`.
    pub lookup_max: usize,
}

/// Number of occurrences of which the longest is taken.
const CANDIDATES: usize = 16;

/// Share of drafts that are accepted, as long as it is not known.
const ACCEPTANCE: f64 = 0.6;

/// Weight of a new observation of the share.
const RATE: f64 = 0.125;

/// Number of tokens after which a sequence that no longer drafts tries again.
const REST: u32 = 64;

/// Occurrences of n-grams in the tokens of a sequence. A new token costs a constant time.
#[derive(Debug, Default)]
struct Occurrences {
    /// Position after the latest n-gram with each hash; 0 if there is none.
    heads: Vec<u32>,
    /// For each position: the position before it with the same hash; 0 if there is none.
    previous: Vec<u32>,
}

impl Occurrences {
    /// Reserves the memory for `limit` tokens.
    fn reserve(&mut self, limit: usize) {
        if self.heads.is_empty() {
            self.heads.resize(limit.next_power_of_two(), 0);
            self.previous.reserve_exact(limit);
        }
    }

    /// Returns the hash of the `size` tokens before a position, as an index of `heads`.
    fn hash(&self, history: &TokenHistory, position: usize, size: usize) -> usize {
        let tokens = history.span(position - size..position);
        let hash = tokens
            .iter()
            .fold(0u64, |hash, token| (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
        hash as usize & (self.heads.len() - 1)
    }

    /// Adds the n-grams that end before the last token.
    fn extend(&mut self, history: &TokenHistory, size: usize) {
        for position in self.previous.len()..history.len() {
            let before = if position < size {
                0
            } else {
                let hash = self.hash(history, position, size);
                std::mem::replace(&mut self.heads[hash], position as u32)
            };
            self.previous.push(before);
        }
    }

    /// Returns the position after the longest of the latest occurrences of the last tokens.
    fn find(&self, history: &TokenHistory, least: usize, most: usize) -> Option<usize> {
        let end = history.len();
        let mut candidate = self.heads[self.hash(history, end, least)] as usize;
        let mut best = (least - 1, None);
        for _ in 0..CANDIDATES {
            if candidate == 0 || best.0 == most {
                break;
            }
            let alike = |back: &usize| history.token(candidate - back) == history.token(end - back);
            let length = (1..=most.min(candidate)).take_while(alike).count();
            if length > best.0 {
                best = (length, Some(candidate));
            }
            candidate = self.previous[candidate] as usize;
        }
        best.1
    }
}

/// Drafts of a sequence, and how well they have done.
#[derive(Debug)]
pub(crate) struct Drafter {
    settings: Speculation,
    occurrences: Occurrences,
    /// Drafts that the step being planned or in flight verifies.
    drafts: Vec<u32>,
    /// Average share of drafts that were accepted.
    acceptance: f64,
    /// Number of steps since the last one with drafts.
    rested: u32,
}

impl Drafter {
    pub(crate) fn new(settings: Speculation) -> Self {
        Self { settings, occurrences: Occurrences::default(), drafts: Vec::new(), acceptance: ACCEPTANCE, rested: 0 }
    }

    pub(crate) fn drafts(&self) -> &[u32] {
        &self.drafts
    }

    pub(crate) fn clear(&mut self) {
        self.drafts.clear();
    }

    /// Returns the number of drafts that are worth their cost, at most `most`: a draft costs `cost` times what a token
    /// costs without drafts.
    pub(crate) fn worth(&mut self, cost: f64, most: usize) -> usize {
        if self.rested >= REST {
            self.acceptance = self.acceptance.max(ACCEPTANCE);
        }
        let gains = std::iter::successors(Some(self.acceptance), |gain| Some(gain * self.acceptance));
        let drafts = gains.take(most.min(self.settings.tokens)).take_while(|gain| *gain > cost).count();
        self.rested = if drafts > 0 { 0 } else { self.rested.saturating_add(1) };
        drafts
    }

    /// Drafts at most `most` tokens that may follow `history`, of a sequence of at most `limit` tokens.
    pub(crate) fn propose(&mut self, history: &TokenHistory, most: usize, limit: usize) {
        let Speculation { lookup_min, lookup_max, .. } = self.settings;
        self.drafts.clear();
        if most == 0 || history.len() <= lookup_min {
            return;
        }
        self.drafts.reserve(self.settings.tokens);
        self.occurrences.reserve(limit);
        self.occurrences.extend(history, lookup_min);
        let Some(start) = self.occurrences.find(history, lookup_min, lookup_max) else { return };
        for position in start..start + most {
            // What repeats itself goes on with its own drafts.
            let token = match position.checked_sub(history.len()) {
                None => history.token(position),
                Some(draft) => self.drafts[draft],
            };
            self.drafts.push(token);
        }
    }

    /// Keeps the first `count` drafts.
    pub(crate) fn truncate(&mut self, count: usize) {
        self.drafts.truncate(count);
    }

    /// Returns the number of drafts that equal the tokens drawn in their places.
    pub(crate) fn accepted(&self, drawn: impl Iterator<Item = u32>) -> usize {
        self.drafts.iter().zip(drawn).take_while(|(draft, drawn)| **draft == *drawn).count()
    }

    /// Records that a step has accepted the first `accepted` drafts.
    pub(crate) fn verified(&mut self, accepted: usize) {
        // Drafts after the first that failed tell nothing.
        let told = self.drafts.len().min(accepted + 1);
        if told > 0 {
            self.acceptance += RATE * (accepted as f64 / told as f64 - self.acceptance);
        }
        self.drafts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(prompt: &[u32], output: &[u32]) -> TokenHistory {
        TokenHistory { prompt: prompt.into(), output: output.to_vec() }
    }

    fn settings(lookup: (usize, usize)) -> Speculation {
        Speculation { tokens: 8, lookup_min: lookup.0, lookup_max: lookup.1 }
    }

    fn drafts(tokens: &[u32], lookup: (usize, usize), most: usize) -> Vec<u32> {
        let mut drafter = Drafter::new(settings(lookup));
        drafter.propose(&history(tokens, &[]), most, 100);
        drafter.drafts().to_vec()
    }

    #[test]
    fn the_longest_occurrence_wins_then_the_latest() {
        let tokens = [1, 2, 3, 9, 1, 2, 3, 7, 8, 1, 2, 3];
        assert_eq!(drafts(&tokens, (2, 3), 4), [7, 8, 1, 2]);
        assert_eq!(drafts(&[4, 1, 2, 5, 6, 1, 2, 7, 4, 1, 2], (2, 3), 2), [5, 6], "three tokens are alike");
        assert_eq!(drafts(&tokens, (4, 5), 4), [0u32; 0], "four tokens never are");
        assert_eq!(drafts(&[5, 5, 5, 5], (1, 3), 4), [5, 5, 5, 5], "a repetition goes on");
        assert_eq!(drafts(&[1, 2], (2, 2), 4), [0u32; 0]);
        assert_eq!(drafts(&[3, 1, 2, 3], (1, 1), 5), [1, 2, 3, 1, 2]);
    }

    /// Compares the drafts after every token with those of a search through all tokens.
    #[test]
    fn occurrences_are_found_as_the_sequence_grows() {
        let mut state = 1u64;
        let mut all = history(&[1, 0, 1], &[]);
        let mut drafter = Drafter::new(settings((2, 4)));
        for _ in 0..300 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            all.output.push((state >> 62) as u32);
            drafter.propose(&all, 1, 400);
            let tokens: Vec<u32> = all.span(0..all.len()).iter().collect();
            let n = tokens.len();
            let latest = (2..n).rev().filter(|&end| tokens[end - 2..end] == tokens[n - 2..]).take(CANDIDATES);
            let alike = |end: usize| (1..=4.min(end)).take_while(|back| tokens[end - back] == tokens[n - back]).count();
            let best =
                latest.fold((1, None), |best, end| if alike(end) > best.0 { (alike(end), Some(end)) } else { best });
            assert_eq!(drafter.drafts().first(), best.1.map(|end| &tokens[end]), "{tokens:?}");
        }
    }

    #[test]
    fn drafts_are_worth_their_cost_or_rest() {
        let mut drafter = Drafter::new(settings((1, 1)));
        assert_eq!(drafter.worth(0.0, 3), 3);
        assert_eq!(drafter.worth(0.0, 30), 8);
        assert_eq!(drafter.worth(0.3, 8), 2, "0.6 and 0.36 exceed the cost");
        assert_eq!(drafter.worth(0.7, 8), 0);
        for _ in 0..40 {
            drafter.drafts = vec![1, 2];
            assert_eq!(drafter.accepted([3, 2].into_iter()), 0);
            drafter.verified(0);
        }
        // One step without drafts has passed.
        for _ in 1..REST {
            assert_eq!(drafter.worth(0.1, 8), 0);
        }
        assert!(drafter.worth(0.1, 8) > 0, "it tries again");
        for _ in 0..40 {
            drafter.drafts = vec![1, 2];
            assert_eq!(drafter.accepted([1, 2, 7].into_iter()), 2);
            drafter.verified(2);
        }
        assert_eq!(drafter.worth(0.9, 8), 8);
    }
}
