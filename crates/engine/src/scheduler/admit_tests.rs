//! Tests of admission.

use proptest::prelude::*;

use super::tests::{Rig, config, prompt};
use super::*;
use crate::{Adapter, SamplingParams};

fn scored() -> SamplingParams {
    SamplingParams { prompt_logprobs: Some(0), max_tokens: 1, ..SamplingParams::default() }
}

#[test]
fn blocks_that_an_admitted_prompt_still_needs_are_reserved() {
    let mut rig =
        Rig::new(EngineConfig { max_num_batched_tokens: 20, long_prefill_token_threshold: 8, ..config() }, 16);
    rig.add(prompt(1, 40), 1, 0);
    rig.add(prompt(2, 28), 1, 0);
    rig.add(prompt(3, 24), 1, 0);
    assert_eq!(rig.step(), [(0, 8, false)], "10 blocks and 7 are more than 16");
    rig.scheduler.remove(rig.scheduler.waiting.first(&rig.scheduler.clients).unwrap());
    assert_eq!(rig.step(), [(0, 8, false), (2, 8, false)], "10 blocks and 6 are not");
}

#[test]
fn admission_leaves_head_room_unless_nothing_runs() {
    let mut rig = Rig::new(EngineConfig { watermark: 0.25, ..config() }, 16);
    let first = rig.add(prompt(1, 32), 30, 0);
    rig.add(prompt(2, 20), 30, 0);
    assert_eq!(rig.step(), [(0, 32, true)]);
    assert_eq!(rig.step(), [(0, 1, true)], "9 + 5 of 16 blocks would leave two free");
    rig.scheduler.remove(first);
    rig.add(prompt(3, 56), 8, 0);
    assert_eq!(rig.step(), [(1, 20, true)]);
    rig.scheduler.remove(rig.scheduler.running[0]);
    assert_eq!(rig.step(), [(2, 32, false)], "14 of 16 blocks, alone");
}

#[test]
fn a_head_that_does_not_fit_is_not_looked_up_again_until_it_may() {
    let mut rig = Rig::new(config(), 16);
    let first = rig.add(prompt(1, 30), 30, 0);
    rig.step();
    rig.add(prompt(2, 40), 10, 0);
    rig.step();
    let lookups = rig.scheduler.kv.lookups;
    (0..9).for_each(|_| drop(rig.step()));
    assert_eq!(rig.scheduler.kv.lookups, lookups, "a token is no lookup either");
    rig.scheduler.remove(first);
    assert_eq!(rig.step(), [(1, 32, false)]);
}

#[test]
fn many_scored_prompts_leave_others_their_share() {
    let limits = EngineConfig { max_num_seqs: 16, max_num_batched_tokens: 200, max_model_len: 400, ..config() };
    let mut rig = Rig::new(limits, 8000);
    for family in 0..256 {
        rig.add_with(prompt(family, 100), scored(), 0);
    }
    rig.step();
    let chats: Vec<_> = (0..8).map(|number| rig.add(prompt(300 + number, 10), 5, 0)).collect();
    let prompts = rig.step().into_iter().filter(|share| share.0 >= 256 && (share.1, share.2) == (10, true));
    assert_eq!(prompts.count(), 8, "they have seats and tokens at once");
    (0..4).for_each(|_| drop(rig.step()));
    assert!(chats.iter().all(|&key| rig.scheduler.sequences.get(key).is_none()), "a token a step");
}

#[test]
fn a_sequence_without_a_slot_for_its_adapter_lets_others_pass() {
    let mut rig = Rig::new(EngineConfig { max_model_len: 512, ..config() }, 512);
    let adapters = [1, 2, 3].map(|number| Adapter::new(number, format!("a{number}"), "test", ()));
    let add = |rig: &mut Rig, adapter: Option<usize>, family, tokens| {
        rig.adapter = adapter.map(|index| adapters[index].clone());
        rig.add(prompt(family, 8), tokens, 0)
    };
    let [first, ..] = [0, 1, 2].map(|index| add(&mut rig, Some(index), index as u32, 100));
    add(&mut rig, None, 4, 100);
    assert_eq!(rig.step(), [(0, 8, true), (1, 8, true), (3, 8, true)], "the mock has two slots");
    let told = |rig: &Rig| rig.plan.adapters.iter().map(|change| change.adapter.number()).collect::<Vec<_>>();
    assert_eq!(told(&rig), [1, 2]);
    assert_eq!(rig.plan.joined.iter().map(|joined| joined.adapter).collect::<Vec<_>>(), [Some(0), Some(1), None]);
    rig.step();
    assert!(told(&rig).is_empty());
    rig.scheduler.remove(first);
    assert_eq!(rig.step().last(), Some(&(2, 8, true)));
    assert_eq!(told(&rig), [3]);
    assert_eq!(rig.plan.joined[0].adapter, Some(0));
    assert_eq!(rig.scheduler.take_adapter_names().unwrap()[0].len(), 2);
    assert_eq!(rig.scheduler.take_adapter_names(), None, "nothing has changed");
}

#[test]
fn a_sequence_without_a_slot_is_not_starved() {
    let mut rig = Rig::new(EngineConfig { max_model_len: 64, ..config() }, 512);
    let adapters = [1, 2, 3].map(|number| Adapter::new(number, "a", number.to_string(), ()));
    let mut next = 0;
    let mut add = |rig: &mut Rig, adapter: usize| {
        rig.adapter = Some(adapters[adapter].clone());
        next += 1;
        rig.add(prompt(next, 4), 3, 0);
        u64::from(next - 1)
    };
    add(&mut rig, 0);
    add(&mut rig, 1);
    rig.step();
    let waits = add(&mut rig, 2);
    let served = (0..200).position(|turn| {
        // Requests with the adapters that have slots keep coming.
        add(&mut rig, turn % 2);
        rig.step().iter().any(|share| share.0 == waits)
    });
    assert!(served.is_some_and(|turns| (60..80).contains(&turns)), "{served:?}");
}

#[test]
fn a_prompt_that_waits_for_rows_to_score_keeps_nobody_waiting_and_is_next() {
    let mut rig = Rig::new(EngineConfig { max_model_len: 8192, max_num_batched_tokens: 300, ..config() }, 8192);
    rig.add_with(prompt(1, 8000), scored(), 0);
    rig.add_with(prompt(2, 80), scored(), 0);
    rig.step();
    let mut passed = 0;
    while rig.scheduler.waiting() == 1 && passed < 200 {
        let other = rig.add(prompt(10 + passed, 4), 1, 0);
        rig.step();
        if rig.scheduler.sequences.get(other).is_some() {
            break;
        }
        passed += 1;
    }
    assert_eq!(passed, 8000 / 64 - 1, "until the first has been scored");
    assert_eq!((rig.scheduler.running(), rig.scheduler.waiting()), (1, 0), "the first has ended in that step");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// An admitted prompt finds its blocks: only output is preempted.
    #[test]
    fn prompts_are_never_preempted(
        lengths in prop::collection::vec(1..60u32, 1..20),
        (budget, threshold, blocks) in (4..40usize, 0..20usize, 16..40usize),
        policy in prop::sample::select(vec![SchedulingPolicy::Fcfs, SchedulingPolicy::Priority]),
        caching in any::<bool>(),
    ) {
        let limits = EngineConfig {
            max_num_seqs: 8,
            max_num_batched_tokens: budget,
            long_prefill_token_threshold: threshold,
            enable_prefix_caching: caching,
            policy,
            ..config()
        };
        let mut rig = Rig::new(limits, blocks);
        for (family, &length) in lengths.iter().enumerate() {
            rig.add(prompt(family as u32 / 3, length), 1, family as i64 % 4);
        }
        while !rig.scheduler.is_idle() {
            rig.step();
        }
        prop_assert_eq!(rig.scheduler.take_preempted(), 0);
    }

    /// Output may be preempted, but each preemption lets an older sequence end: sequences do not throw each other out in
    /// turn.
    #[test]
    fn preemptions_are_bounded(
        lives in prop::collection::vec((1..40u32, 1..24u32), 1..20),
        (budget, blocks) in (4..40usize, 16..40usize),
    ) {
        let mut rig = Rig::new(EngineConfig { max_num_seqs: 8, max_num_batched_tokens: budget, ..config() }, blocks);
        for (family, &(length, max_tokens)) in lives.iter().enumerate() {
            rig.add(prompt(family as u32, length), max_tokens, 0);
        }
        while !rig.scheduler.is_idle() {
            rig.step();
        }
        let preempted = rig.scheduler.take_preempted() as usize;
        prop_assert!(preempted <= 2 * lives.len(), "{preempted} preemptions of {} sequences", lives.len());
    }
}
