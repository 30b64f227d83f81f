//! How fast the CPU backend runs a model: `backend_speed MODEL [CONTEXT [ISA [SEQUENCES...]]]`.
//!
//! Prints the time to load, prompt tokens a second of a prefill in chunks of 512, and the tokens a second of decode steps
//! of so many sequences (1, 8 and 32) that each have `CONTEXT` tokens (512). An `ISA` of `auto` is the best there is.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use octavo_backend_cpu::{CpuBackend, CpuConfig};
use octavo_models::{Checkpoint, build_program};
use octavo_ops::{Backend, BlockTables, Program, StepBatch};

const BLOCK: usize = 16;
const CHUNK: usize = 512;
const DECODE_STEPS: usize = 16;
const PREFILLS: usize = 4;
const SEQUENCES: [usize; 3] = [1, 8, 32];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: backend_speed MODEL [CONTEXT [ISA [SEQUENCES...]]]")?;
    let context: usize = arguments.next().map_or(Ok(512), |text| text.parse())?;
    let isa = arguments.next().filter(|isa| isa != "auto").map(|text| text.parse()).transpose()?;
    let mut sequences = arguments.map(|text| text.parse()).collect::<Result<Vec<usize>, _>>()?;
    if sequences.is_empty() {
        sequences.extend(SEQUENCES);
    }
    let most = sequences.iter().copied().max().unwrap_or(1);

    let started = Instant::now();
    let checkpoint = Checkpoint::open(Path::new(&path))?;
    let program = build_program(&checkpoint)?;
    let mut backend = CpuBackend::new(CpuConfig { isa, threads: None })?;
    println!("{} kernels, {} threads", backend.isa(), backend.threads());
    backend.load(&program, &checkpoint, &mut |_| {})?;
    println!("load: {:.2} s, weights of {} MB", started.elapsed().as_secs_f64(), backend.weight_bytes() / 1_000_000);

    let blocks_each = (context + DECODE_STEPS + 1).div_ceil(BLOCK);
    backend.allocate_kv(BLOCK, &vec![1 + most * blocks_each; program.kv_groups.len()])?;
    let mut run = |sequences: usize, start: usize, rows: usize| -> Result<Duration, Box<dyn Error>> {
        let batch = batch(&program, sequences, start, rows, blocks_each);
        let started = Instant::now();
        backend.forward(&batch)?;
        Ok(started.elapsed())
    };
    // The first of them touches the memory.
    let mut prefills = Vec::new();
    for _ in 0..=PREFILLS {
        let mut prefill = Duration::ZERO;
        for start in (0..context).step_by(CHUNK) {
            prefill += run(1, start, CHUNK.min(context - start))?;
        }
        prefills.push(prefill);
    }
    let (median, least) = spread(&mut prefills[1..]);
    let speed = |seconds: f64| context as f64 / seconds;
    println!("prefill of {context} tokens: {:.0} tokens/s, at best {:.0}", speed(median), speed(least));
    for sequences in sequences {
        let mut steps = Vec::new();
        for step in 0..=DECODE_STEPS {
            steps.push(run(sequences, context + step, 1)?);
        }
        let (median, least) = spread(&mut steps[1..]);
        let speed = sequences as f64 / median;
        println!(
            "decode of {sequences}: {:.1} ms a step, at best {:.1}; {speed:.1} tokens/s",
            median * 1e3,
            least * 1e3
        );
    }
    Ok(())
}

/// Median and least, in seconds.
fn spread(times: &mut [Duration]) -> (f64, f64) {
    times.sort_unstable();
    (times[times.len() / 2].as_secs_f64(), times[0].as_secs_f64())
}

/// `rows` tokens from position `start` of each sequence, the last of which is sampled.
fn batch(program: &Program, sequences: usize, start: usize, rows: usize, blocks_each: usize) -> StepBatch {
    let groups = program.kv_groups.len();
    let block = |s: usize, index: usize| (1 + s * blocks_each + index) as u32;
    let slot = |s: usize, p: usize| block(s, p / BLOCK) * BLOCK as u32 + (p % BLOCK) as u32;
    let tokens = (0..sequences).flat_map(|s| (start..start + rows).map(move |p| (s, p)));
    let slots: Vec<u32> = tokens.clone().map(|(s, p)| slot(s, p)).collect();
    let ids = (0..sequences).flat_map(|s| (0..blocks_each).map(move |index| block(s, index))).collect();
    StepBatch {
        token_ids: tokens.clone().map(|(s, p)| ((s * 131 + p * 17) % program.vocab_size) as u32).collect(),
        positions: tokens.map(|(_, p)| p as u32).collect(),
        slot_mapping: vec![slots; groups],
        block_tables: vec![BlockTables { stride: blocks_each, ids }; groups],
        query_start: (0..=sequences).map(|s| (s * rows) as u32).collect(),
        seq_lens: vec![(start + rows) as u32; sequences],
        sampled_rows: (1..=sequences).map(|s| (s * rows - 1) as u32).collect(),
        slots: (0..sequences as u32).collect(),
        pooled_rows: vec![],
    }
}
