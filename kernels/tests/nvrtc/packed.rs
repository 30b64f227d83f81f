//! Checks of the targets of a pack that are not [`Chip::CHECKED`]: what is special of sm_75, and in the long checks that every kernel
//! compiles for every target, with each major release of the compiler.

use octavo_kernels::manifest::{self, Chip, Instance, PACKED, Target};
use octavo_kernels::nvrtc::Nvrtc;
use octavo_kernels::sources::{self, Source};
use octavo_kernels::usage;

use crate::{Program, code, compile, tools};

/// Returns the jobs of a target: its sources with all of their instances.
fn jobs(target: Target) -> Vec<(Target, Source, Vec<Instance>)> {
    let instances = manifest::all(target.chip());
    let of_source = |source: Source| {
        let own = instances.iter().filter(|instance| instance.source == source).cloned().collect();
        (target, source, own)
    };
    manifest::sources(&instances).into_iter().map(of_source).collect()
}

/// Bytes of a thread that a kernel may keep in memory instead of registers on a chip for which it was not tuned, if its release permits
/// no more on others.
const MOST_SPILLED: u32 = 80;

/// Fails if a kernel keeps more bytes of a thread in memory instead of registers.
fn check_spills(program: &Program, most: u32) {
    let used = usage::from_log(&program.compiled.log);
    assert_eq!(used.len(), program.instances.len(), "{}", program.source.path);
    let spilled: Vec<_> = used.iter().filter(|(_, usage)| usage.stack.max(usage.spills) > most).collect();
    assert!(spilled.is_empty(), "{}: {spilled:?}", program.chip.arch());
}

#[test]
fn turing_multiplies_by_its_own_instruction() {
    let Some(nvrtc) = tools::nvrtc() else { return };
    let tensor = [sources::GEMM_MMA, sources::EXPERT_MMA, sources::ATTENTION_PREFILL];
    let jobs: Vec<_> = jobs(Target::Code(Chip::SM_75)).into_iter().filter(|job| tensor.contains(&job.1)).collect();
    assert_eq!(jobs.len(), tensor.len());
    for program in compile(&nvrtc, jobs) {
        check_spills(&program, program.release().most_spilled);
        let Some(text) = program.text() else { return };
        for (kernel, code) in code::instructions(text) {
            let mut multiplications = code.iter().filter(|mnemonic| mnemonic.starts_with("HMMA")).peekable();
            assert!(multiplications.peek().is_some(), "{kernel}");
            assert!(multiplications.all(|mnemonic| mnemonic == "HMMA.1688.F32"), "{kernel} on sm_75");
        }
    }
}

/// Compiles everything for the targets of a pack that a compiler has and whose code is not checked, as all of it is in the long checks.
fn check_targets(nvrtc: &Nvrtc, lacks: &[Chip]) {
    for target in PACKED.split(',').map(|arch| Target::parse(arch).expect("a target")) {
        assert_eq!(nvrtc.supports(target.chip()), !lacks.contains(&target.chip()), "{}", target.arch());
        let is_checked = matches!(target, Target::Code(chip) if Chip::CHECKED.contains(&chip));
        if is_checked || !nvrtc.supports(target.chip()) {
            continue;
        }
        let programs = compile(nvrtc, jobs(target));
        if matches!(target, Target::Code(_)) {
            programs.iter().for_each(|program| check_spills(program, program.release().most_spilled.max(MOST_SPILLED)));
        }
    }
}

#[test]
#[ignore = "it takes many minutes"]
fn every_other_target_of_a_pack_compiles() {
    if let Some(nvrtc) = tools::nvrtc() {
        check_targets(&nvrtc, &[]);
    }
}

#[test]
#[ignore = "it takes many minutes"]
fn every_other_target_of_a_pack_compiles_with_the_next_release() {
    if let Some(nvrtc) = tools::nvrtc_13() {
        check_targets(&nvrtc, &[Chip::SM_70]);
    }
}
