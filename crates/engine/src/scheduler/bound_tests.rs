//! Tests of steps that are bounded in time and of the fair policy.

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;

use super::tests::{Rig, config, prompt};
use super::*;
use crate::clock::UnitCost;
use crate::{ClientId, SamplingParams};

/// A clock by which a step takes a second, each token a second and each row that reaches the head a second.
fn clock(seconds: u64) -> Option<StepClock> {
    Some(StepClock::new(Box::new(UnitCost), Some(Duration::from_secs(seconds))))
}

fn bounded(config: EngineConfig, seconds: u64) -> Rig {
    let mut rig = Rig::new(config, 64);
    rig.clock = clock(seconds);
    rig
}

fn fair() -> EngineConfig {
    EngineConfig { policy: SchedulingPolicy::Fair, ..config() }
}

#[test]
fn a_prompt_is_cut_where_the_time_ends() {
    let mut rig = bounded(config(), 21);
    rig.add(prompt(1, 30), 5, 0);
    assert_eq!(rig.step(), [(0, 20, false)], "20 tokens and the step itself");
    assert_eq!(rig.step(), [(0, 10, true)]);
}

#[test]
fn scored_rows_take_time() {
    let mut rig = bounded(config(), 41);
    let scored = SamplingParams { prompt_logprobs: Some(1), ..SamplingParams::default() };
    rig.add_with(prompt(1, 40), scored, 0);
    assert_eq!(rig.step(), [(0, 20, false)], "each token is a row, too");
}

#[test]
fn a_step_makes_progress_however_short_it_must_be() {
    let mut rig = bounded(config(), 1);
    rig.add(prompt(1, 30), 2, 0);
    assert_eq!(rig.step(), [(0, LEAST_CHUNK, false)]);
    assert_eq!(rig.step(), [(0, 14, true)]);
    assert_eq!(rig.step(), [(0, 1, true)]);
    assert!(rig.scheduler.is_idle());
}

#[test]
fn single_tokens_come_before_chunks() {
    let mut rig = bounded(config(), 25);
    rig.add(prompt(1, 60), 4, 0);
    assert_eq!(rig.step(), [(0, 24, false)]);
    rig.add(prompt(2, 3), 5, 0);
    assert_eq!(rig.step(), [(1, 3, true), (0, 20, false)], "the first was in the step before");
    assert_eq!(rig.step(), [(1, 1, true), (0, 16, true)]);
}

#[test]
fn sequences_without_room_take_turns() {
    let mut rig = bounded(config(), 5);
    for family in 0..4 {
        rig.add(prompt(family, 1), 20, 0);
    }
    let steps: Vec<Vec<u64>> = (0..4).map(|_| rig.step().iter().map(|share| share.0).collect()).collect();
    assert_eq!(steps, [[0, 1], [2, 3], [0, 1], [2, 3]]);
}

#[test]
fn a_client_with_little_work_comes_first() {
    let mut rig = bounded(fair(), 25);
    rig.client = ClientId(1);
    rig.add(prompt(1, 61), 2, 0);
    assert_eq!(rig.step(), [(0, 24, false)]);
    rig.client = ClientId(2);
    rig.add(prompt(2, 4), 3, 0);
    assert_eq!(rig.step(), [(1, 4, true), (0, 19, false)]);
    assert_eq!(rig.step(), [(1, 1, true), (0, 18, true)]);
    rig.client = ClientId(3);
    rig.add(prompt(3, 2), 1, 0);
    assert_eq!(rig.step(), [(2, 2, true), (1, 1, true), (0, 1, true)]);
}

#[test]
fn many_sequences_of_one_client_share_its_turn() {
    let mut rig = bounded(EngineConfig { max_num_seqs: 8, ..fair() }, 7);
    rig.client = ClientId(1);
    for family in 0..6 {
        rig.add(prompt(family, 1), 40, 0);
    }
    rig.client = ClientId(2);
    rig.add(prompt(9, 1), 40, 0);
    let mut served: HashMap<u64, usize> = HashMap::new();
    for _ in 0..30 {
        rig.step().iter().for_each(|share| *served.entry(share.0).or_default() += 1);
    }
    assert!(served[&6] >= 29, "the client with one sequence has it in every step but the first: {served:?}");
    assert!((0..6).all(|id| served[&id] >= 9), "{served:?}");
}

#[test]
fn a_client_with_all_seats_makes_way() {
    let mut rig = Rig::new(fair(), 64);
    rig.client = ClientId(1);
    for family in 0..6 {
        rig.add(prompt(family, 4), 40, 0);
    }
    assert_eq!(rig.step().len(), 4);
    rig.client = ClientId(2);
    rig.add(prompt(7, 4), 40, 0);
    let shares = rig.step();
    assert_eq!(shares[0], (6, 4, true), "{shares:?}");
    assert_eq!((shares.len(), rig.scheduler.take_preempted()), (4, 1));
    // Its second sequence takes a seat too; then both clients have two.
    rig.add(prompt(8, 4), 40, 0);
    rig.add(prompt(9, 4), 40, 0);
    (0..6).for_each(|_| drop(rig.step()));
    assert_eq!(rig.scheduler.take_preempted(), 1, "no client takes more than its part");
}

#[test]
fn a_client_that_returns_has_saved_nothing() {
    let mut clients = Clients::default();
    clients.enter(ClientId(1));
    clients.charge(ClientId(1), 50.0);
    clients.enter(ClientId(2));
    assert_eq!(clients.rank(ClientId(2)), clients.rank(ClientId(1)));
    clients.charge(ClientId(1), 10.0);
    clients.leave(ClientId(2));
    clients.enter(ClientId(2));
    assert_eq!(clients.rank(ClientId(2)), clients.rank(ClientId(1)));
    clients.leave(ClientId(1));
    clients.leave(ClientId(2));
    assert_eq!(clients.counts(), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn steps_keep_the_time_and_every_sequence_ends(
        lives in prop::collection::vec((1..50u32, 1..12u32, 0..3u128, any::<bool>()), 1..12),
        seconds in 1..40u64,
        policy in prop::sample::select(vec![SchedulingPolicy::Fcfs, SchedulingPolicy::Priority, SchedulingPolicy::Fair]),
        blocks in 16..40usize,
    ) {
        let mut rig = Rig::new(EngineConfig { policy, ..config() }, blocks);
        rig.clock = clock(seconds);
        for (family, &(len, max_tokens, client, scored)) in lives.iter().enumerate() {
            rig.client = ClientId(client);
            let prompt_logprobs = scored.then_some(0);
            let params = SamplingParams { max_tokens, prompt_logprobs, ..SamplingParams::default() };
            rig.add_with(prompt(family as u32, len), params, family as i64 % 3);
        }
        let mut steps = 0;
        while !rig.scheduler.is_idle() {
            steps += 1;
            prop_assert!(steps < 20_000, "a sequence starves");
            let (shares, record) = rig.plan();
            prop_assert!(!shares.is_empty(), "a step does nothing");
            let took = rig.clock.as_ref().map_or(0.0, |clock| clock.seconds(&record.work));
            let least = shares.len() == 1 && shares[0].1 <= LEAST_CHUNK;
            prop_assert!(took <= seconds.max(5) as f64 || least, "{took} of {seconds} seconds for {shares:?}");
            rig.retire(&record);
        }
    }
}
