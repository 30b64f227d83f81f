//! Property tests of the work that the engine does: it is bounded by what an ideal engine would do.

use std::collections::HashSet;
use std::time::Duration;

use proptest::prelude::*;

use super::tests::{Rig, both_depths, ids, read, request, tokens};
use crate::mock::{FailurePoint, MockConfig, MockFailure};
use crate::{ClientId, EngineConfig, FinishReason, KvKind, Request, SamplingParams, SchedulingPolicy};

const BLOCK: usize = 16;

#[test]
fn the_sequences_of_a_request_compute_its_prompt_once() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock.clone(), EngineConfig::default());
        let prompt: Vec<u32> = (0..200).collect();
        let mut streams: Vec<_> =
            (0..8).map(|seed| rig.submit(&prompt, &SamplingParams { seed, temperature: 1.0, ..tokens(1) })).collect();
        rig.run();
        assert_eq!(rig.counters.computed_tokens(), 200 + 7 * 8, "each computes its last 8 tokens, which fill no block");
        assert_eq!(rig.counters.steps(), 2);
        for (seed, stream) in streams.iter_mut().enumerate() {
            let params = SamplingParams { seed: seed as u64, temperature: 1.0, ..tokens(1) };
            assert_eq!(ids(&read(stream).0), mock.expected_output(&prompt, &params, 2048));
        }
    });
}

#[test]
fn sequences_that_read_what_a_failed_step_was_to_write_end_with_it() {
    let failure = MockFailure { step: 1, at: FailurePoint::Wait, fatal: false };
    let mock = MockConfig { max_in_flight: 2, failures: vec![failure], ..MockConfig::default() };
    let mut rig = Rig::new(mock.clone(), EngineConfig::default());
    let prompt: Vec<u32> = (0..40).collect();
    let mut lost = [rig.submit(&prompt, &tokens(4)), rig.submit(&prompt, &tokens(4))];
    rig.manual.turn();
    let mut other = rig.submit(&[7; 20], &tokens(4));
    rig.run();
    for stream in &mut lost {
        let (events, _) = read(stream);
        assert!(matches!(events.last().unwrap().finish, Some(FinishReason::Error(_))));
    }
    assert_eq!(ids(&read(&mut other).0), mock.expected_output(&[7; 20], &tokens(4), 2048));
    let mut again = rig.submit(&prompt, &tokens(4));
    rig.run();
    let (events, _) = read(&mut again);
    assert_eq!((events[0].cached_tokens, ids(&events)), (Some(0), mock.expected_output(&prompt, &tokens(4), 2048)));
}

/// A prompt of `len` tokens of a family: prompts of one family share all tokens up to the shorter length, prompts of
/// different ones their first `common`.
fn prompt(family: u32, common: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| if at < common { at } else { 1 + family * 300 + at }).collect()
}

/// Number of tokens that an engine computes which computes each block of a prompt once: all blocks that are full, and
/// what each prompt has beyond the blocks that it may take from the cache.
fn ideal(prompts: &[Vec<u32>]) -> usize {
    let mut blocks: HashSet<&[u32]> = HashSet::new();
    let mut rest = 0;
    for prompt in prompts {
        let shared = (prompt.len() - 1) / BLOCK * BLOCK;
        blocks.extend((BLOCK..=shared).step_by(BLOCK).map(|end| &prompt[..end]));
        rest += prompt.len() - shared;
    }
    blocks.len() * BLOCK + rest
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn each_prefix_is_computed_once(
        lives in prop::collection::vec((0..3u32, 1..150u32, 1..6u32, 0..12usize, 0..3u128, -2..2i64), 1..14),
        common in 0..60u32,
        (depth, seats, budget) in (1..=2usize, 1..9usize, 20..200usize),
        policy in prop::sample::select(vec![SchedulingPolicy::Fcfs, SchedulingPolicy::Priority, SchedulingPolicy::Fair]),
        kv_groups in prop::sample::select(vec![
            vec![KvKind::Full],
            vec![KvKind::Window(20)],
            vec![KvKind::Window(40), KvKind::Full, KvKind::Window(7)],
        ]),
        (max_step, threshold) in (prop::option::of((1..200_000u64).prop_map(Duration::from_nanos)), 0..40usize),
    ) {
        let mock = MockConfig { max_in_flight: depth, kv_groups, ..MockConfig::default() };
        let config = EngineConfig {
            max_num_seqs: seats,
            max_num_batched_tokens: budget,
            long_prefill_token_threshold: threshold,
            max_step,
            policy,
            ..EngineConfig::default()
        };
        let mut rig = Rig::new(mock, config);
        let prompts: Vec<_> = lives.iter().map(|&(family, len, ..)| prompt(family, common, len)).collect();
        let mut streams = Vec::new();
        for turn in 0..12 {
            for (life, prompt) in lives.iter().zip(&prompts).filter(|(life, _)| life.3 == turn) {
                let request = Request {
                    client: ClientId(life.4),
                    priority: life.5,
                    ..request(prompt, &SamplingParams { ignore_eos: true, ..tokens(life.2) })
                };
                streams.push(rig.manual.submit(request).unwrap());
            }
            rig.manual.turn();
        }
        rig.run();
        // Where the fair policy preempts, what a sequence had of an unfinished block is computed again.
        let decoded: usize = lives.iter().map(|life| life.2 as usize - 1).sum();
        let again = rig.metric("num_preemptions_total") as usize * (BLOCK + 1);
        let computed = rig.counters.computed_tokens() as usize;
        let bound = ideal(&prompts) + decoded;
        prop_assert!(computed <= bound + again, "{computed} tokens computed, {bound} are necessary");
    }
}
