//! Tests of prefixes that sequences share as soon as they are planned.

use super::tests::{Rig, config, prompt};
use super::*;
use crate::{InputToken, SamplingParams};

#[test]
fn a_prefix_is_found_by_the_step_after_the_one_that_computes_it() {
    let mut rig = Rig::new(config(), 64);
    let keys = [rig.add(prompt(1, 9), 5, 0), rig.add(prompt(1, 9), 5, 0)];
    let (shares, first) = rig.plan();
    assert_eq!(shares, [(0, 9, true)], "the second waits for the prefix");
    let (shares, second) = rig.plan();
    assert_eq!(shares, [(0, 1, true), (1, 1, true)], "the first step is still in flight");
    assert_eq!(rig.plan.tokens[0], InputToken::Drawn { row: 0 });
    assert_eq!(rig.plan.sequences[1].first_position, 8);
    let table = |key| rig.scheduler.sequences.get(key).unwrap().kv.tables[0].clone();
    let [one, other] = keys.map(table);
    assert_eq!(one[..2], other[..2]);
    assert_eq!(rig.plan.blocks, [other[0], other[1], other[2]], "the first sequence has no new block");
    rig.retire(&first);
    rig.retire(&second);
}

#[test]
fn those_that_share_nothing_pass_and_keep_their_order_when_blocks_run_out() {
    let mut rig = Rig::new(config(), 16);
    rig.add(prompt(1, 20), 40, 0);
    let second = rig.add(prompt(1, 20), 40, 0);
    let third = rig.add(prompt(2, 8), 40, 0);
    assert_eq!(rig.step(), [(0, 20, true), (2, 8, true)]);
    assert_eq!(rig.step(), [(0, 1, true), (2, 1, true), (1, 4, true)]);
    while rig.scheduler.running() == 3 {
        rig.step();
    }
    let preemptions = |key| rig.scheduler.sequences.get(key).unwrap().preemptions;
    assert_eq!((preemptions(second), preemptions(third)), (0, 1), "the last submitted makes way");
}

#[test]
fn a_prefix_in_chunks_is_computed_once() {
    // The chunks end inside blocks.
    let mut rig = Rig::new(EngineConfig { long_prefill_token_threshold: 7, ..config() }, 64);
    rig.add(prompt(1, 40), 1, 0);
    rig.add(prompt(1, 40), 1, 0);
    let mut computed = 0;
    while !rig.scheduler.is_idle() {
        computed += rig.step().iter().map(|share| share.1).sum::<usize>();
    }
    assert_eq!(computed, 40 + 4, "the last block of the second is its own");
}

#[test]
fn a_running_sequence_takes_what_others_have_computed() {
    let mut rig = Rig::new(EngineConfig { long_prefill_token_threshold: 8, ..config() }, 64);
    let scored = SamplingParams { prompt_logprobs: Some(0), max_tokens: 1, ..SamplingParams::default() };
    rig.add_with(prompt(1, 40), scored, 0);
    rig.add(prompt(1, 40), 1, 0);
    assert_eq!(rig.step(), [(0, 8, false), (1, 8, false)], "nobody waits for a prompt that is scored");
    assert_eq!(rig.step(), [(0, 8, false), (1, 8, false)], "and each of its rows is computed");
    let third = rig.add(prompt(1, 40), 1, 0);
    assert_eq!(rig.step(), [(0, 8, false), (1, 8, false)], "the third waits for the second");
    rig.scheduler.remove(rig.scheduler.running[1]);
    assert_eq!(rig.step(), [(0, 8, false), (2, 8, false)]);
    assert_eq!(rig.scheduler.sequences.get(third).unwrap().cached_tokens, 24);
    // Another one holds the whole prefix in the meantime, and the third is ahead of the first no longer.
    while rig.scheduler.sequences.get(third).is_some() {
        rig.step();
    }
    rig.add(prompt(1, 40), 1, 0);
    assert_eq!(rig.step().last(), Some(&(3, 4, true)));
}

#[test]
fn what_a_failed_step_was_to_write_is_not_found() {
    let mut rig = Rig::new(config(), 64);
    let first = rig.add(prompt(1, 9), 5, 0);
    let second = rig.add(prompt(1, 9), 5, 0);
    let other = rig.add(prompt(2, 9), 5, 0);
    rig.plan();
    rig.plan();
    rig.scheduler.remove(first);
    rig.scheduler.remove(other);
    assert_eq!(rig.scheduler.withdraw(1), [second], "its prefix is not there");
    rig.scheduler.remove(second);
    rig.add(prompt(1, 9), 5, 0);
    assert_eq!(rig.step(), [(3, 9, true)]);
}

#[test]
fn an_unfinished_block_of_a_sequence_that_ends_keeps_nobody_waiting() {
    let mut rig = Rig::new(EngineConfig { long_prefill_token_threshold: 2, ..config() }, 64);
    let first = rig.add(prompt(1, 9), 5, 0);
    rig.add(prompt(1, 9), 5, 0);
    assert_eq!(rig.step(), [(0, 2, false)]);
    assert_eq!(rig.step(), [(0, 2, false)]);
    assert_eq!(rig.step(), [(0, 2, false)], "the second waits for the second block");
    rig.scheduler.remove(first);
    assert_eq!(rig.step(), [(1, 5, true)], "alone it has no threshold");
}
