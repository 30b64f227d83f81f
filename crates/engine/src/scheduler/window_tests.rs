//! Tests of KV groups with windows.

use super::tests::{Rig, config, prompt};
use crate::{EngineConfig, KvKind, PassedBlocks};

#[test]
fn blocks_that_a_window_has_passed_are_told_once() {
    let limits = EngineConfig { max_num_batched_tokens: 8, ..config() };
    let mut rig = Rig::with_groups(limits, 40, &[KvKind::Full, KvKind::Window(5)]);
    rig.add(prompt(1, 20), 5, 0);
    let mut told = Vec::new();
    while !rig.scheduler.is_idle() {
        let first = rig.step().first().map(|_| rig.plan.sequences[0].first_position);
        told.extend(rig.plan.passed.drain(..).map(|passed| (first, passed)));
    }
    let passed = |position, blocks| (Some(position), PassedBlocks { seat: 0, group: 1, blocks });
    // The token at position p sees those from p − 4 on.
    assert_eq!(told, [passed(8, 0..1), passed(16, 1..3), passed(20, 3..4)]);
}

#[test]
fn the_blocks_of_a_hit_begin_with_the_window() {
    let limits = EngineConfig { max_num_batched_tokens: 20, ..config() };
    let mut rig = Rig::with_groups(limits, 40, &[KvKind::Full, KvKind::Window(5)]);
    rig.add(prompt(1, 20), 5, 0);
    rig.step();
    rig.step();
    rig.add(prompt(1, 17), 1, 0);
    rig.step();
    assert_eq!(rig.plan.sequences[1].first_position, 16);
    let [full, window] = &rig.plan.tables[..] else { panic!("{:?}", rig.plan.tables) };
    assert_eq!(rig.plan.blocks[full.blocks.clone()][..4], [1, 2, 3, 4]);
    assert_eq!(rig.plan.blocks[window.blocks.clone()][..4], [0, 0, 0, 9]);
    assert_eq!(rig.plan.passed, [], "a sequence that joins has told nothing");
}

#[test]
fn sequences_with_windows_need_few_blocks_however_long_they_are() {
    let limits = EngineConfig { max_num_batched_tokens: 8, max_model_len: 1000, watermark: 0.0, ..config() };
    // A window and a step have 15 tokens, which lie in at most five blocks.
    let mut rig = Rig::with_groups(limits, 10, &[KvKind::Window(8)]);
    for family in 0..2 {
        rig.add(prompt(family, 200), 100, 0);
    }
    let mut most = 0;
    while !rig.scheduler.is_idle() {
        rig.step();
        most = most.max(rig.scheduler.running());
    }
    assert_eq!((most, rig.scheduler.take_preempted()), (2, 0));
}
