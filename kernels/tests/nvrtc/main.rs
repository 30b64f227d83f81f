//! Checks that every instance of the manifest compiles for every chip by every release of the compiler, uses the resources in the
//! release's budget, and multiplies by the intended instruction. Needs the packages of `tests/requirements.txt`, but no GPU.

mod checked;
mod code;
mod committed;
mod contraction;
mod figures;
mod issue;
mod packed;
mod residency;
mod tools;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use octavo_kernels::manifest::{self, Chip, Instance, Target};
use octavo_kernels::nvrtc::{Compiled, Nvrtc};
use octavo_kernels::sources::{self, Source};
use octavo_kernels::usage::{self, Usage};

use committed::{Committed, Table};

/// Number of programs that are compiled at once.
const THREADS: usize = 2;

/// Usage of each instance.
type Budget = Table<Usage>;

/// A release of NVRTC, with what is known of the programs that it compiles.
pub(crate) struct Release {
    /// Major and minor number.
    version: (u32, u32),
    /// Finds it.
    open: fn() -> Option<Nvrtc>,
    /// Those of [`Chip::CHECKED`] that it does not know.
    lacks: &'static [Chip],
    /// Bytes of a thread that a kernel may keep in memory instead of registers. Packs and images are of the first release, and the
    /// budget of the other names the few kernels in which it does.
    most_spilled: u32,
    /// Resources of each instance.
    budget: Committed,
    /// Digests of the programs that have been checked.
    checked: Committed,
    /// The programs that are to be checked.
    programs: OnceLock<Vec<Program>>,
}

/// The release whose machine code is that of predictions, and the next one.
static RELEASES: [Release; 2] = [
    Release {
        version: (12, 9),
        open: tools::nvrtc,
        lacks: &[],
        most_spilled: 0,
        budget: Committed {
            name: "budget.toml",
            head: "# Resources of each instance, as NVRTC 12.9 compiles it. `tests/nvrtc` compares every instance with this file. After an intended\n\
                   # change, run OCTAVO_WRITE_BUDGET=1 cargo test -p octavo-kernels --test nvrtc and review the difference.\n\
                   # registers: of a thread. shared: static shared memory of a CTA in bytes. No instance spills or has a stack.\n",
        },
        checked: Committed {
            name: "checked.toml",
            head: "# Digests of the programs whose figures are those of budget.toml and code.toml. `tests/nvrtc` compiles the others, and all of\n\
                   # them with OCTAVO_ALL_KERNELS=1. OCTAVO_WRITE_BUDGET=1 writes those that it compiles, as with budget.toml.\n",
        },
        programs: OnceLock::new(),
    },
    Release {
        version: (13, 5),
        open: tools::nvrtc_13,
        lacks: &[Chip::SM_70],
        most_spilled: 24,
        budget: Committed {
            name: "budget-13.toml",
            head: "# Resources of each instance, as NVRTC 13.5 compiles it. They are those of budget.toml.\n",
        },
        checked: Committed {
            name: "checked-13.toml",
            head: "# Digests of the programs whose figures are those of budget-13.toml, as in checked.toml.\n",
        },
        programs: OnceLock::new(),
    },
];

impl Release {
    /// Returns the chips for which it compiles.
    fn chips(&self) -> impl Iterator<Item = Chip> {
        Chip::CHECKED.into_iter().filter(|chip| !self.lacks.contains(chip))
    }

    /// Returns the programs that are to be checked, compiled once for all tests; none without a compiler.
    fn programs(&self) -> &[Program] {
        self.programs.get_or_init(|| {
            let Some(nvrtc) = (self.open)() else { return Vec::new() };
            assert_eq!(nvrtc.version(), self.version, "the budget is of another release");
            let mut jobs = Vec::new();
            for chip in Chip::CHECKED {
                assert_eq!(nvrtc.supports(chip), !self.lacks.contains(&chip), "{}", chip.arch());
            }
            let known = self.checked.read();
            for chip in self.chips() {
                let instances = manifest::all(chip);
                for source in manifest::sources(&instances) {
                    let own: Vec<_> = instances.iter().filter(|i| i.source == source).cloned().collect();
                    if checked::is_wanted(self, &known, chip, source, &own) {
                        jobs.push((Target::Code(chip), source, own));
                    }
                }
            }
            compile(&nvrtc, jobs)
        })
    }

    /// Returns whether a kernel keeps more values in memory instead of registers than it may.
    fn spills(&self, usage: &Usage) -> bool {
        usage.stack.max(usage.spills) > self.most_spilled
    }

    /// Returns the resources of all compiled instances.
    fn found(&self) -> Budget {
        let mut found = Budget::new();
        for program in self.programs() {
            let used = usage::from_log(&program.compiled.log);
            let names: Vec<_> = program.instances.iter().map(|i| i.name.as_str()).collect();
            assert_eq!(used.len(), names.len(), "{}: {used:?}", program.source.path);
            let of_chip = found.entry(program.chip.arch()).or_default();
            for (name, usage) in used {
                assert!(names.contains(&name.as_str()), "{name} is no instance");
                of_chip.insert(name, usage);
            }
        }
        found
    }
}

/// A source with its instances, compiled for a chip.
struct Program {
    /// Release of the compiler.
    version: (u32, u32),
    chip: Chip,
    source: Source,
    instances: Vec<Instance>,
    compiled: Compiled,
    text: OnceLock<Option<String>>,
}

impl Program {
    /// Returns the release of its compiler.
    fn release(&self) -> &'static Release {
        RELEASES.iter().find(|release| release.version == self.version).expect("a release with a budget")
    }

    /// Returns the machine code as text, disassembled once for all tests; `None` without a disassembler.
    fn text(&self) -> Option<&str> {
        let disassembled = || {
            let name = format!("{}-{}-{:?}", self.chip.arch(), self.source.path.replace('/', "-"), self.version);
            Some(tools::disassemble(&tools::nvdisasm(self.chip)?, &name, &self.compiled.code))
        };
        self.text.get_or_init(disassembled).as_deref()
    }
}

/// Returns the programs that the first release has compiled, whose machine code is that of predictions.
fn programs() -> &'static [Program] {
    RELEASES[0].programs()
}

/// Compiles sources with their instances, each for a target, on [`THREADS`] threads.
fn compile(nvrtc: &Nvrtc, jobs: Vec<(Target, Source, Vec<Instance>)>) -> Vec<Program> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                while let Some((target, source, instances)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let text = manifest::program(*source, instances);
                    let compiled = nvrtc
                        .compile(source.path, &text, *target)
                        .unwrap_or_else(|e| panic!("{} for {}: {e}", source.path, target.arch()));
                    let (source, instances, text) = (*source, instances.clone(), OnceLock::new());
                    let (version, chip) = (nvrtc.version(), target.chip());
                    let program = Program { version, chip, source, instances, compiled, text };
                    done.lock().expect("no panic").push(program);
                }
            });
        }
    });
    done.into_inner().expect("no panic")
}

/// Returns the resources of each instance as the first release compiles it.
fn budget() -> Budget {
    RELEASES[0].budget.read()
}

#[test]
fn every_instance_keeps_its_budget() {
    for release in &RELEASES {
        let (found, version) = (release.found(), release.version);
        if found.is_empty() {
            continue;
        }
        release.budget.compare(&found);
        for (chip, instances) in &found {
            let spilled: Vec<_> = instances.iter().filter(|(_, usage)| release.spills(usage)).collect();
            assert!(
                spilled.is_empty(),
                "{chip}, {version:?}: kernels keep values in memory, not in registers: {spilled:?}"
            );
        }
    }
}

/// Returns the maximum shared memory of a CTA in bytes.
fn shared_limit(chip: Chip) -> usize {
    match chip {
        Chip::SM_70 => 96 << 10,
        Chip::SM_89 => 99 << 10,
        _ => 227 << 10,
    }
}

#[test]
fn every_instance_can_be_launched() {
    for release in &RELEASES {
        let found = release.found();
        for program in release.programs() {
            for instance in &program.instances {
                check_launch(program.chip, instance, &found[&program.chip.arch()][&instance.name]);
            }
        }
    }
}

/// Fails if a multiprocessor does not hold the CTAs of an instance that it should.
fn check_launch(chip: Chip, instance: &Instance, used: &Usage) {
    // Registers are allocated in units of eight.
    let registers = used.registers.next_multiple_of(8) * instance.threads;
    assert!(registers <= 65536 && instance.threads <= 1024, "{}: {registers} registers", instance.name);
    let shared = used.shared as usize + instance.dynamic_shared;
    assert!(shared <= shared_limit(chip), "{}: {shared} bytes of shared memory", instance.name);
    assert!(used.shared <= 48 << 10, "{}: static shared memory is at most 48 KiB", instance.name);
    let resident = instance.resident.max(1);
    assert!(resident * registers <= 65536, "{}: {resident} times {registers} registers", instance.name);
    // The system takes a little of each CTA's memory.
    let shared = (shared + (1 << 10)) * resident as usize;
    assert!(shared <= shared_limit(chip) + (1 << 10), "{}: {shared} bytes of shared memory", instance.name);
}

/// Returns the tensor-core instruction that an instance should use on a chip.
fn tensor_instruction(instance: &Instance) -> Option<&'static str> {
    let calls = |wrapper: &str| instance.source.text.contains(wrapper);
    // This header has the loop that multiplies.
    let tiled = calls("#include \"tiles.h\"");
    if instance.source == sources::GEMM_F8 {
        instance.name.starts_with("gemm").then_some("QMMA.16832.F32.E4M3.E4M3")
    } else if calls("mma_m8n8k4_") {
        Some("HMMA.884.F32.F32")
    } else if tiled || calls("mma_m16n8k16(") {
        // Decode attention widens a cache in e4m3 to f16.
        let is_f16 = instance.source == sources::ATTENTION_DECODE && instance.name.ends_with("_e4m3");
        let is_bf16 = instance.name.contains("bf16") && !is_f16;
        Some(if is_bf16 { "HMMA.16816.F32.BF16" } else { "HMMA.16816.F32" })
    } else {
        None
    }
}

/// Returns whether an instance streams memory, so that it must load 16 bytes at once.
fn streams(instance: &Instance) -> bool {
    // A thread dequantises 32 codes of 2 bits, which are 8 bytes.
    let short = ["dequantize_q2_k", "dequantize_q3_k"].iter().any(|name| instance.name.starts_with(name));
    [sources::GEMV, sources::GEMV_FUSED, sources::QUANTIZED].contains(&instance.source)
        && !instance.name.starts_with("quantize_")
        && !short
}

#[test]
fn machine_code_is_what_was_meant() {
    for program in RELEASES.iter().flat_map(Release::programs) {
        let Some(text) = program.text() else { continue };
        let instructions = code::instructions(text);
        for instance in &program.instances {
            check_code(instance, program.chip, &instructions[&instance.name]);
        }
    }
}

fn check_code(instance: &Instance, chip: Chip, code: &[String]) {
    let context = format!("{} on {}", instance.name, chip.arch());
    // The four steps of Volta's instruction count as one.
    let is_tensor = |c: &&String| {
        // Minima are multiplied in TF32.
        let is_of_minima = instance.source == sources::GEMM_SKINNY_QUANT && c.starts_with("HMMA.1684.F32.TF32");
        (c.starts_with("HMMA") || c.starts_with("QMMA")) && !is_of_minima
    };
    let tensor: Vec<_> = code.iter().filter(is_tensor).map(|c| c.split(".STEP").next()).collect();
    match tensor_instruction(instance) {
        Some(meant) => assert!(
            !tensor.is_empty() && tensor.iter().all(|found| *found == Some(meant)),
            "{context}: {tensor:?}, not {meant}"
        ),
        None => assert!(tensor.is_empty(), "{context}: {tensor:?}"),
    }
    if streams(instance) {
        assert!(
            code.iter().any(|c| c.starts_with("LDG.E") && c.contains(".128")),
            "{context} has no load of 16 bytes: {code:?}"
        );
    }
    if instance.name.starts_with("mmvq") {
        assert!(code.iter().any(|c| c.starts_with("IDP.4A")), "{context} multiplies no four bytes at once");
    }
    let with_matrices = [sources::GEMM_MMA, sources::GEMM_SKINNY, sources::EXPERT_MMA, sources::ATTENTION_DECODE];
    let loads_matrices = with_matrices.contains(&instance.source) || instance.name.starts_with("gemm_f8");
    if loads_matrices {
        assert!(code.iter().any(|c| c.starts_with("LDSM")), "{context} has no ldmatrix");
    }
    if loads_matrices || instance.source == sources::GEMM_SKINNY_QUANT {
        assert!(code.iter().any(|c| c.starts_with("LDGSTS.E.BYPASS")), "{context} does not copy behind its back");
    }
    let is_e4m3 = instance.name.ends_with("_e4m3");
    if instance.source == sources::ATTENTION_DECODE_VOLTA {
        // A lane loads eight elements of a key at once.
        let wide = if is_e4m3 { ".64" } else { ".128" };
        let step = |c: &[String]| count(c, "LDG.E", wide) >= 4 && count(c, "SHFL", "") >= 12;
        assert!(stretches(code).any(step), "{context}: branches part the loads, or the shuffles, of a step");
    }
    if instance.source == sources::ATTENTION_PREFILL {
        // Each thread copies 32 bytes of codes at least.
        let least = if is_e4m3 { 2 } else { 4 };
        assert!(
            stretches(code).any(|c| count(c, "LDGSTS", ".128") >= least),
            "{context}: branches part the copies of a tile"
        );
    }
    if instance.source == sources::ATTENTION_LATENT {
        // Keys in e4m3 pass through registers on their way to shared memory.
        let (copy, wide) = if is_e4m3 { ("LDG.E", ".64") } else { ("LDGSTS", ".128") };
        let lookups = if is_e4m3 { 8 } else { 4 };
        let tile = |c: &[String]| count(c, copy, wide) >= 4 && count(c, "LDG.E", "") >= lookups;
        assert!(stretches(code).any(tile), "{context}: branches part the lookups of a tile");
    }
}

/// Returns the stretches of code without a branch.
fn stretches(code: &[String]) -> impl Iterator<Item = &[String]> {
    code.split(|instruction| instruction.starts_with("BRA"))
}

/// Counts the instructions of a kind.
fn count(code: &[String], start: &str, part: &str) -> usize {
    code.iter().filter(|c| c.starts_with(start) && c.contains(part)).count()
}
