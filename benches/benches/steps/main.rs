//! Measures how fast the CPU backend computes the steps of a model, and the share of each kind of op: `cargo bench
//! --workspace --bench steps -- [MODEL [CONTEXT [ISA [SEQUENCES...]]]]`.
//!
//! Prints the load time, the prompt tokens per second of a prefill in chunks of 512, and decode steps of several
//! sequences (1, 8 and 32) that each have `CONTEXT` tokens (512). Below each it prints the ops by kind and shape,
//! compared with the machine's roofline limit. If the model has an encoder of images, it is measured on square images of
//! 256, 512 and 1024 pixels. A folder without weights, as those of `models/shapes`, gets dummy weights.
//! `OCTAVO_CPU_ACTIVATION_BITS=12` has the effect of `--cpu-activation-bits 12`. An `ISA` of `auto` selects the best available; `MODEL` defaults to the default model.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use octavo_backend_cpu::probe::{Limits, ProbeConfig};
use octavo_backend_cpu::{ActivationBits, CpuBackend, CpuConfig};
use octavo_bench::roofline::StepLayout;
use octavo_benches::peers::roof::Need;
use octavo_models::{Checkpoint, EncodedImage, ImageGrid, VisionConfig, build_programs};
use octavo_ops::cost::{ElementBytes, StepShape};
use octavo_ops::dummy::DummyWeights;
use octavo_ops::{Backend, Channel, EncodeBatch, Op, Program, StepBatch, WeightSource};

const BLOCK: usize = 16;
const CHUNK: usize = 512;
const DECODE_STEPS: usize = 16;
const PREFILLS: usize = 4;
const SEQUENCES: [usize; 3] = [1, 8, 32];

/// Sides of images in pixels.
const IMAGES: [usize; 3] = [256, 512, 1024];

/// Number of times that an image is encoded.
const ENCODINGS: usize = 3;

/// Number of steps over which the median time of each op is taken.
const PROFILES: usize = 9;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test` also builds and runs benches, but only for their smoke tests; this one has none.
    let Some(at) = arguments.iter().position(|argument| argument == "--bench") else { return ExitCode::SUCCESS };
    arguments.remove(at);
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Vec<String>) -> Result<(), Box<dyn Error>> {
    let mut arguments = arguments.into_iter();
    let path = arguments.next().map_or_else(octavo_models::testing::default_model, PathBuf::from);
    let context: usize = arguments.next().map_or(Ok(512), |text| text.parse())?;
    let isa = arguments.next().filter(|isa| isa != "auto").map(|text| text.parse()).transpose()?;
    let mut sequences = arguments.map(|text| text.parse()).collect::<Result<Vec<usize>, _>>()?;
    if sequences.is_empty() {
        sequences.extend(SEQUENCES);
    }
    let most = sequences.iter().copied().max().unwrap_or(1);

    let shape_only = path.is_dir() && !path.read_dir()?.flatten().any(|file| is_weights(&file.path()));
    let checkpoint = if shape_only { Checkpoint::open_without_weights(&path)? } else { Checkpoint::open(&path)? };
    let programs = build_programs(&checkpoint)?;
    let program = programs.decoder;
    let twelve = std::env::var("OCTAVO_CPU_ACTIVATION_BITS").is_ok_and(|bits| bits == "12");
    let activations = if twelve { ActivationBits::Twelve } else { ActivationBits::Eight };
    let mut backend = CpuBackend::new(CpuConfig { isa, activations, ..CpuConfig::default() })?;
    let limits = Limits::measure(&ProbeConfig::default())?;
    println!(
        "{} kernels, {} threads; {:.1} GB/s of reads",
        backend.isa(),
        backend.threads(),
        limits.read_bandwidth / 1e9
    );
    for (unit, peak) in &limits.peaks {
        println!("{}: {:.2} T operations/s", unit.name(), peak / 1e12);
    }
    let started = Instant::now();
    load(&checkpoint, &program, |source| backend.load(&program, source, &mut |_| {}))?;
    println!("load: {:.2} s, weights of {} MB", started.elapsed().as_secs_f64(), backend.weight_bytes() / 1_000_000);
    let blocks_each = (context + DECODE_STEPS + 1).div_ceil(BLOCK);
    backend.allocate_kv(BLOCK, 1 + most * blocks_each * program.kv_groups.len())?;

    let mut bench = Bench { program, backend, limits, blocks_each };
    bench.prefill(context)?;
    for sequences in sequences {
        bench.decode(sequences, context)?;
    }
    if let (Some(encoder), Some(vision)) = (programs.encoder, &checkpoint.config().vision) {
        load(&checkpoint, &encoder, |source| bench.backend.load_encoder(&encoder, source, &mut |_| {}))?;
        for side in IMAGES {
            bench.encode(&encoder, vision, side)?;
        }
    }
    Ok(())
}

fn is_weights(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}

/// Loads a program with the weights of the checkpoint, or with dummy weights if it has none.
fn load<T>(checkpoint: &Checkpoint, program: &Program, load: impl FnOnce(&dyn WeightSource) -> T) -> T {
    if checkpoint.is_dummy() { load(&DummyWeights::new(program)) } else { load(checkpoint) }
}

struct Bench {
    program: Program,
    backend: CpuBackend,
    limits: Limits,
    blocks_each: usize,
}

impl Bench {
    /// Returns the sizes of elements in memory.
    fn elements(&self) -> ElementBytes {
        self.backend.device_profile().elements
    }

    fn prefill(&mut self, context: usize) -> Result<(), Box<dyn Error>> {
        // The first prefill touches the memory.
        let mut times = Vec::new();
        for _ in 0..=PREFILLS {
            let mut time = Duration::ZERO;
            for start in (0..context).step_by(CHUNK) {
                time += self.step(&self.batch(1, start, CHUNK.min(context - start)))?;
            }
            times.push(time);
        }
        let (median, least) = spread(&mut times[1..]);
        let speed = |seconds: f64| context as f64 / seconds;
        println!("\nprefill of {context} tokens: {:.0} tokens/s, at best {:.0}", speed(median), speed(least));
        let last = (context - 1) / CHUNK * CHUNK;
        println!("its last step, of {} tokens:", context - last);
        self.ops(&self.batch(1, last, context - last))
    }

    fn decode(&mut self, sequences: usize, context: usize) -> Result<(), Box<dyn Error>> {
        let mut times = Vec::new();
        for step in 0..=DECODE_STEPS {
            times.push(self.step(&self.batch(sequences, context + step, 1))?);
        }
        let (median, least) = spread(&mut times[1..]);
        let batch = self.batch(sequences, context, 1);
        let need = Need::of_ops(
            &self.program,
            self.program.forward_ops(),
            &StepShape::from_batch(&batch),
            self.elements(),
            &self.limits,
        );
        println!(
            "\ndecode of {sequences}: {:.1} ms a step, at best {:.1}; {:.1} tokens/s; {:.0} % of the machine's limits",
            median * 1e3,
            least * 1e3,
            sequences as f64 / median,
            100.0 * need.seconds / median
        );
        self.ops(&batch)
    }

    /// Encodes a square image.
    fn encode(&mut self, encoder: &Program, vision: &VisionConfig, side: usize) -> Result<(), Box<dyn Error>> {
        let cells = side / vision.patch_size / vision.merge_size * vision.merge_size;
        let grid = ImageGrid { rows: cells, cols: cells };
        let tokens = vision.image_tokens(grid).ok_or("the encoder takes no such image")?;
        self.backend.allocate_media(tokens)?;
        let patches: Vec<u8> = (0..cells * cells * vision.patch_elements()).map(|i| (i * 131 % 251) as u8).collect();
        let store_rows: Vec<u32> = (0..tokens as u32).collect();
        let channels = vec![Channel { shift: 127.5, divisor: 127.5 }; 3];
        let mut batch = EncodeBatch { channels, ..EncodeBatch::default() };
        vision.fill(&[EncodedImage { grid, patches: &patches, store_rows: &store_rows }], &mut batch)?;
        let mut times = Vec::new();
        for _ in 0..=ENCODINGS {
            let started = Instant::now();
            self.backend.encode(&batch)?;
            times.push(started.elapsed());
        }
        let (median, least) = spread(&mut times[1..]);
        let need =
            Need::of_ops(encoder, &encoder.ops, &StepShape::encode(&[cells * cells]), self.elements(), &self.limits);
        println!(
            "\nimage of {side}x{side}, {} patches, {tokens} tokens: {:.1} ms, at best {:.1}; {:.0} GFLOP, {:.0} GFLOP/s; \
             {:.0} % of the machine's limits",
            cells * cells,
            median * 1e3,
            least * 1e3,
            need.float / 1e9,
            need.float / median / 1e9,
            100.0 * need.seconds / median
        );
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch) -> Result<Duration, Box<dyn Error>> {
        let started = Instant::now();
        self.backend.forward(batch)?;
        Ok(started.elapsed())
    }

    /// Prints a table of the times of a step's ops, by kind and shape, the slowest first.
    fn ops(&mut self, batch: &StepBatch) -> Result<(), Box<dyn Error>> {
        let (shape, all) = (StepShape::from_batch(batch), self.program.forward_ops());
        let mut kinds: Vec<OpGroup> = Vec::new();
        let mut kind_of: Vec<usize> = Vec::new();
        for (index, op) in all.iter().enumerate() {
            let name = name(&self.program, op);
            let kind = kinds.iter().position(|kind| kind.name == name).unwrap_or_else(|| {
                kinds.push(OpGroup { name, ops: Vec::new(), times: Vec::new() });
                kinds.len() - 1
            });
            kinds[kind].ops.push(index);
            kind_of.push(kind);
        }
        kinds.push(OpGroup { name: "angles".into(), ops: Vec::new(), times: Vec::new() });
        for _ in 0..PROFILES {
            kinds.iter_mut().for_each(|kind| kind.times.push(Duration::ZERO));
            for (op, time) in self.backend.profile(batch)? {
                let kind = op.map_or(kinds.len() - 1, |op| kind_of[op]);
                *kinds[kind].times.last_mut().expect("one was just added") += time;
            }
        }
        let mut rows: Vec<(f64, &OpGroup)> = kinds.iter_mut().map(|kind| (spread(&mut kind.times).0, &*kind)).collect();
        rows.sort_by(|a, b| b.0.total_cmp(&a.0));
        let total: f64 = rows.iter().map(|row| row.0).sum();
        println!("{:<32} {:>5} {:>9} {:>6} {:>7} {:>8}", "op", "count", "ms", "%", "GB/s", "limit %");
        for (seconds, kind) in rows {
            let ops = kind.ops.iter().map(|&op| &all[op]);
            let need = Need::of_ops(&self.program, ops, &shape, self.elements(), &self.limits);
            println!(
                "{:<32} {:>5} {:>9.3} {:>6.1} {:>7.1} {:>8.1}",
                kind.name,
                kind.ops.len(),
                seconds * 1e3,
                100.0 * seconds / total,
                need.bytes / seconds / 1e9,
                100.0 * need.seconds / seconds
            );
        }
        Ok(())
    }

    /// Returns a batch of `rows` tokens from position `start` of each sequence, the last of which is sampled.
    fn batch(&self, sequences: usize, start: usize, rows: usize) -> StepBatch {
        let vocab_size = self.program.vocab_size;
        let (groups, streams) = (self.program.kv_groups.len(), self.program.position_streams());
        let layout = StepLayout { groups, streams, block_size: BLOCK, blocks_each: self.blocks_each, vocab_size };
        layout.batch(sequences, start, rows)
    }
}

/// Ops of the same kind and shape.
struct OpGroup {
    name: String,
    /// Indices of the ops.
    ops: Vec<usize>,
    /// Total time of these ops, by step.
    times: Vec<Duration>,
}

/// Returns an op's name, with the shape and the storage types of its weight.
fn name(program: &Program, op: &Op) -> String {
    let weight = match op {
        Op::Linear(op) => op.weight,
        Op::Logits(op) => op.weight,
        _ => return op.name().into(),
    };
    let weight = &program.weights[weight.0];
    let mut name = format!("{} {}x{}", op.name(), weight.rows, weight.cols);
    let mut storages: Vec<_> = weight.parts.iter().map(|part| part.storage).collect();
    storages.dedup();
    for storage in storages {
        write!(name, " {storage}").expect("a string takes all");
    }
    name
}

/// Returns median and minimum in seconds.
fn spread(times: &mut [Duration]) -> (f64, f64) {
    times.sort_unstable();
    (times[times.len() / 2].as_secs_f64(), times[0].as_secs_f64())
}
