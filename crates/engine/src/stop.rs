//! Conditions under which a sequence ends by itself.

use crate::{FinishReason, RepetitionDetection, SamplingParams};

/// Returns the reason why `token`, just sampled, ends its sequence. `full` means that no further token fits.
///
/// End of sequence takes precedence over stop ids, and both over length. `min_tokens` is not checked here, because it
/// keeps these ids from being sampled. Repetition has the lowest precedence.
pub(crate) fn stop_reason(params: &SamplingParams, token: u32, full: bool) -> Option<FinishReason> {
    if !params.ignore_eos && params.eos_token_ids.contains(&token) {
        Some(FinishReason::Stop { token: None })
    } else if params.stop_token_ids.contains(token) {
        Some(FinishReason::Stop { token: Some(token) })
    } else if full {
        Some(FinishReason::Length)
    } else {
        None
    }
}

/// Detects whether an output repeats itself, token by token, at the cost of one comparison per pattern size.
#[derive(Debug)]
pub(crate) struct RepetitionDetector {
    /// Length of the shortest pattern, in tokens.
    shortest: usize,
    /// Number of consecutive occurrences, at least 2.
    min_count: usize,
    /// Length of the run of tokens, up to the latest, that equal the token one pattern size earlier; for each pattern
    /// size from the shortest.
    runs: Vec<u32>,
}

impl RepetitionDetector {
    /// Creates a detector; `None` if the rule can never apply.
    pub(crate) fn new(rule: RepetitionDetection) -> Option<Self> {
        let RepetitionDetection { max_pattern_size, min_pattern_size, min_count } = rule;
        let shortest = min_pattern_size.max(1);
        let sizes = (max_pattern_size.checked_sub(shortest)? as usize).checked_add(1)?;
        (min_count >= 2).then(|| Self {
            shortest: shortest as usize,
            min_count: min_count as usize,
            runs: vec![0; sizes],
        })
    }

    /// Returns whether `output` now ends with enough repetitions of a pattern. Must be called after every token.
    pub(crate) fn push(&mut self, output: &[u32]) -> bool {
        let Some((last, before)) = output.split_last() else { return false };
        let mut repeats = false;
        for (run, size) in self.runs.iter_mut().zip(self.shortest..=before.len()) {
            *run = if before[before.len() - size] == *last { run.saturating_add(1) } else { 0 };
            // The first occurrence is the one that the others repeat.
            repeats |= *run as usize >= size.saturating_mul(self.min_count - 1);
        }
        repeats
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rules_apply_in_order() {
        let mut params = SamplingParams {
            eos_token_ids: vec![1, 2],
            stop_token_ids: vec![2, 3].into(),
            ..SamplingParams::default()
        };
        let eos = Some(FinishReason::Stop { token: None });
        assert_eq!(stop_reason(&params, 1, true), eos);
        assert_eq!(stop_reason(&params, 2, false), eos, "end of sequence before stop ids");
        assert_eq!(
            stop_reason(&params, 3, true),
            Some(FinishReason::Stop { token: Some(3) }),
            "stop ids before length"
        );
        assert_eq!(stop_reason(&params, 4, true), Some(FinishReason::Length));
        assert_eq!(stop_reason(&params, 4, false), None);

        params.ignore_eos = true;
        assert_eq!(stop_reason(&params, 1, false), None);
        assert_eq!(stop_reason(&params, 2, false), Some(FinishReason::Stop { token: Some(2) }));
    }

    fn rule(min_pattern_size: u32, max_pattern_size: u32, min_count: u32) -> RepetitionDetection {
        RepetitionDetection { max_pattern_size, min_pattern_size, min_count }
    }

    /// Returns the number of tokens after which the output first repeats itself.
    fn detected(rule: RepetitionDetection, output: &[u32]) -> Option<usize> {
        let mut detector = RepetitionDetector::new(rule)?;
        (1..=output.len()).find(|&end| detector.push(&output[..end]))
    }

    #[test]
    fn a_pattern_must_come_often_enough_in_a_row() {
        let abc = [1, 2, 3, 1, 2, 3, 1, 2, 3];
        assert_eq!(detected(rule(1, 4, 3), &abc), Some(9));
        assert_eq!(detected(rule(3, 3, 2), &abc), Some(6));
        assert_eq!(detected(rule(1, 2, 2), &abc), None, "too short a pattern");
        assert_eq!(detected(rule(4, 9, 2), &abc), None, "too long a pattern");
        assert_eq!(detected(rule(1, 3, 4), &abc), None, "too seldom");
        assert_eq!(detected(rule(0, 3, 3), &[9, 9, 9]), Some(3), "0 means 1");
        assert_eq!(detected(rule(2, 2, 2), &[9, 9, 9, 9]), Some(4), "a pattern may repeat itself");
        assert_eq!(detected(rule(1, 1, 2), &[1, 2, 1, 2]), None, "something is in between");
    }

    #[test]
    fn a_rule_that_cannot_apply_is_none() {
        for off in [rule(0, 0, 2), rule(1, 4, 1), rule(1, 4, 0), rule(5, 4, 2)] {
            assert!(RepetitionDetector::new(off).is_none(), "{off:?}");
        }
        assert_eq!(detected(rule(1, 1, u32::MAX), &[1; 99]), None);
    }

    proptest! {
        #[test]
        fn as_the_definition_says(
            output in prop::collection::vec(0..3u32, 0..60),
            (shortest, longest, count) in (0..5u32, 0..9u32, 0..5u32),
        ) {
            let rule = rule(shortest, longest, count);
            let repeats = |tokens: &[u32]| {
                let tail = |size: usize| tokens.len().checked_sub(size * count as usize).map(|start| &tokens[start..]);
                let same = |size: usize| tail(size).is_some_and(|tail| tail.chunks(size).all(|c| *c == tail[..size]));
                count >= 2 && (shortest.max(1)..=longest).any(|size| same(size as usize))
            };
            prop_assert_eq!(detected(rule, &output), (1..=output.len()).find(|&end| repeats(&output[..end])));
        }
    }
}
