//! Tests of steps whose masks are bounded.

use std::collections::HashMap;

use super::tests::{Rig, config, prompt};
use crate::EngineConfig;

fn rig(constrained: u32, masks: usize) -> Rig {
    let mut rig = Rig::new(EngineConfig { max_num_seqs: 16, max_model_len: 256, ..config() }, 256);
    rig.scheduler.bound_masks(masks);
    rig.add(prompt(0, 3), 40, 0);
    rig.step();
    rig.constrained = true;
    for family in 1..=constrained {
        rig.add(prompt(family, 3), 40, 0);
    }
    rig
}

fn ids(shares: &[(u64, usize, bool)]) -> Vec<u64> {
    shares.iter().map(|share| share.0).collect()
}

#[test]
fn sequences_with_masks_take_turns_beside_others() {
    let mut rig = rig(5, 4);
    assert_eq!(ids(&rig.step()), [0, 1], "a quarter is for those that are admitted");
    assert_eq!(ids(&rig.step()), [0, 1, 2]);
    (0..3).for_each(|_| drop(rig.step()));
    let mut served: HashMap<u64, usize> = HashMap::new();
    for _ in 0..30 {
        let step = ids(&rig.step());
        assert!(step.contains(&0), "what needs no mask is in every step: {step:?}");
        assert_eq!(step.len(), 4, "one without a mask, and three quarters of the masks: {step:?}");
        step.into_iter().for_each(|id| *served.entry(id).or_default() += 1);
    }
    assert_eq!(served[&0], 30);
    assert!((1..=5).all(|id| served[&id] == 18), "{served:?}");
}

#[test]
fn masks_are_not_bounded_without_others() {
    let mut rig = rig(5, 4);
    while rig.scheduler.sequences().any(|(_, sequence)| sequence.id == 0) {
        rig.step();
    }
    assert_eq!(rig.step().len(), 5);
    rig.constrained = false;
    rig.add(prompt(9, 3), 10, 0);
    assert_eq!(rig.step().len(), 6, "no sequence without a mask ran before");
    assert_eq!(rig.step().len(), 4);
}

#[test]
fn masks_beyond_their_bound_do_not_keep_others_waiting() {
    let mut rig = rig(9, 2);
    rig.constrained = false;
    rig.add(prompt(10, 3), 10, 0);
    let first = ids(&rig.step());
    assert_eq!(first, [0, 1, 10], "the prompt behind those that need masks is computed at once");
}

#[test]
fn a_prompt_of_several_steps_needs_no_mask_before_its_end() {
    let mut rig = rig(1, 2);
    rig.add(prompt(20, 60), 10, 0);
    assert_eq!(rig.step(), [(0, 1, true), (1, 3, true), (2, 28, false)]);
    assert_eq!(rig.step(), [(0, 1, true), (1, 1, true), (2, 30, false)]);
    let steps = [rig.step(), rig.step()];
    assert!(
        steps.iter().any(|step| step.contains(&(2, 2, true)) && step.len() == 2),
        "its first token takes a turn: {steps:?}"
    );
}
