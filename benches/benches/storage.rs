//! Measures the storage types of quantised weights and the adapters of the CPU backend beside each other: `cargo bench -p
//! octavo-benches --bench storage -- [THREADS [SECONDS [ISA]]]`.
//!
//! Models that differ only in the storage type of their matrices compute the same steps by turns. Each type is compared with
//! bf16, and those that do not come from GGUF with the type of GGUF that has as many bits: the printed ratio is that of speeds,
//! so 1 is as fast. Then a dense model and a mixture of experts compute steps of 32 sequences by turns without adapters, with one
//! for all and with eight. A ratio is the median over the rounds, with the least and the most of them. Every kind of step is
//! repeated for `SECONDS` (45), on `THREADS` threads (all cores), with the instruction set `ISA` (the best one).

use std::collections::HashMap;
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use octavo_backend_cpu::{CpuBackend, CpuConfig};
use octavo_ops::testing::{PagedBatches, TestRng, TinyExperts, TinyModel};
use octavo_ops::{AdapterSource, Backend, HeadShape, LoraMatrices, Program, SiteId, SiteKind, StepBatch, StorageType};

/// Storage types that do not come from GGUF, each with the type of GGUF that has as many bits.
const TWINS: [(StorageType, StorageType); 7] = [
    (StorageType::Nf4, StorageType::Q4_0),
    (StorageType::Fp4, StorageType::Q4_0),
    (StorageType::Nvfp4, StorageType::Q4_0),
    (StorageType::Mxfp4, StorageType::Q4_0),
    (StorageType::Int4, StorageType::Q4_0),
    (StorageType::F8E4M3, StorageType::Q8_0),
    (StorageType::Int8, StorageType::Q8_0),
];

/// Numbers of sequences that decode, and of the tokens of a prompt.
const DECODED: [usize; 3] = [1, 4, 32];
const PROMPT: usize = 256;

const BLOCK: usize = 16;
const RANK: usize = 16;
const ADAPTERS: usize = 8;
const LEAST_ROUNDS: usize = 5;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test` also builds and runs benches, but only for their smoke tests; this one has none.
    let Some(at) = arguments.iter().position(|argument| argument == "--bench") else { return ExitCode::SUCCESS };
    arguments.remove(at);
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let threads = arguments.first().map(|text| text.parse()).transpose()?;
    let seconds = arguments.get(1).map_or(Ok(45), |text| text.parse())?;
    let isa = arguments.get(2).map(|text| text.parse()).transpose()?;
    let config = CpuConfig { threads, isa, ..CpuConfig::default() };
    let budget = Duration::from_secs(seconds);
    types(config, budget)?;
    adapters(config, budget, None)?;
    // Of each token, four experts are as large as the dense MLP.
    let experts = TinyExperts { count: 32, chosen: 4, ..TinyExperts::default() };
    adapters(config, budget, Some(experts))
}

/// Compares the storage types.
fn types(config: CpuConfig, budget: Duration) -> Result<(), Box<dyn Error>> {
    let storages: Vec<_> = StorageType::ALL.into_iter().filter(|&storage| is_compared(storage)).collect();
    let model = |&storage: &StorageType| Loaded::new(config, storage, None);
    let mut models = storages.iter().map(model).collect::<Result<Vec<_>, _>>()?;
    println!("{} kernels, {} threads", models[0].backend.isa(), models[0].backend.threads());
    for sequences in DECODED {
        let steps = models.iter_mut().map(|model| model.decode(sequences)).collect::<Result<Vec<_>, _>>()?;
        let rounds = take_turns(budget, |index| models[index].time(&steps[index], 4), storages.len())?;
        print(&format!("decode of {sequences}"), &storages, &rounds);
    }
    let steps: Vec<_> = models.iter_mut().map(|model| model.prompt(PROMPT)).collect();
    let rounds = take_turns(budget, |index| models[index].time(&steps[index], 1), storages.len())?;
    print(&format!("prompt of {PROMPT}"), &storages, &rounds);
    Ok(())
}

/// Compares steps with adapters to those without.
fn adapters(config: CpuConfig, budget: Duration, experts: Option<TinyExperts>) -> Result<(), Box<dyn Error>> {
    let kind = if experts.is_some() { "experts" } else { "dense" };
    let mut model = Loaded::new(config, StorageType::Q4_1, experts)?;
    let mut rng = TestRng(5);
    model.backend.allocate_adapters(ADAPTERS, RANK)?;
    for slot in 0..ADAPTERS {
        model.backend.set_adapter(slot, &Adapter::new(&model.program, &mut rng))?;
    }
    let sequences = 32;
    let base = model.decode(sequences)?;
    let with = |slots: u32| StepBatch {
        adapters: (0..sequences as u32).map(|sequence| 1 + sequence % slots).collect(),
        ..base.clone()
    };
    let steps = [base.clone(), with(1), with(ADAPTERS as u32)];
    let rounds = take_turns(budget, |index| model.time(&steps[index], 4), steps.len())?;
    println!("{kind}, decode of {sequences} with adapters of rank {RANK}");
    for (name, index) in [("one adapter", 1), ("eight adapters", 2)] {
        println!("  {name:<14} {}", Spread::of(rounds.iter().map(|round| round[0] / round[index])));
    }
    Ok(())
}

/// Measures each of `count` models in rounds, in a drawn order: a model that follows a larger one finds less in the caches. Returns
/// seconds by round and model.
fn take_turns(
    budget: Duration,
    mut measure: impl FnMut(usize) -> Result<f64, Box<dyn Error>>,
    count: usize,
) -> Result<Vec<Vec<f64>>, Box<dyn Error>> {
    for index in 0..count {
        measure(index)?;
    }
    let (begun, mut rounds) = (Instant::now(), Vec::new());
    let (mut rng, mut order) = (TestRng(4), (0..count).collect::<Vec<_>>());
    while rounds.len() < LEAST_ROUNDS || begun.elapsed() < budget {
        let mut seconds = vec![0.0; count];
        for at in 0..count {
            order.swap(at, at + rng.below(count - at));
            seconds[order[at]] = measure(order[at])?;
        }
        rounds.push(seconds);
    }
    Ok(rounds)
}

/// Selects bf16 and the quantised types.
fn is_compared(storage: StorageType) -> bool {
    !matches!(storage, StorageType::F32 | StorageType::F16)
}

fn print(title: &str, storages: &[StorageType], rounds: &[Vec<f64>]) {
    println!("{title}, {} rounds", rounds.len());
    let at = |storage| storages.iter().position(|known| *known == storage).unwrap_or_default();
    for (index, &storage) in storages.iter().enumerate() {
        let ratio = |other| Spread::of(rounds.iter().map(|round| round[at(other)] / round[index]));
        let best = rounds.iter().map(|round| round[index]).fold(f64::MAX, f64::min) * 1e3;
        let twin = TWINS.iter().find(|(known, _)| *known == storage);
        let twin = twin.map(|&(_, twin)| format!(", {} of {twin}", ratio(twin))).unwrap_or_default();
        println!("  {storage:<8} {best:.2} ms at best, {} of BF16{twin}", ratio(StorageType::BF16));
    }
}

/// Median, least and most.
struct Spread([f64; 3]);

impl Spread {
    fn of(ratios: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = ratios.collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let last = sorted.len() - 1;
        Self([sorted[last / 2], sorted[0], sorted[last]])
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [median, least, most] = self.0;
        write!(f, "{median:.2} ({least:.2} to {most:.2})")
    }
}

/// A model with random weights, larger than the caches.
struct Loaded {
    program: Program,
    backend: CpuBackend,
    batches: PagedBatches,
}

impl Loaded {
    fn new(config: CpuConfig, storage: StorageType, experts: Option<TinyExperts>) -> Result<Self, Box<dyn Error>> {
        let model = TinyModel {
            vocab_size: 1024,
            hidden: 1536,
            inner: if experts.is_some() { 1024 } else { 4096 },
            experts,
            heads: HeadShape::new(24, 8, 64),
            layers: vec![0; 4],
            storage,
            ..TinyModel::default()
        };
        let (program, weights) = model.build()?;
        let program = program.with_adapters();
        let mut backend = CpuBackend::new(config)?;
        backend.load(&program, &weights, &mut |_| {})?;
        let blocks = 512;
        backend.allocate_kv(BLOCK, blocks)?;
        let batches = PagedBatches::for_program(&program, BLOCK, blocks, &mut TestRng(1));
        Ok(Self { program, backend, batches })
    }

    /// Computes the prompts of some sequences and returns a step in which each decodes a token.
    fn decode(&mut self, sequences: usize) -> Result<StepBatch, Box<dyn Error>> {
        let mut rng = TestRng(2);
        let added: Vec<_> = (0..sequences).map(|_| self.batches.add(rng.tokens(17, 1024))).collect();
        let parts = |count: usize| added.iter().map(|&sequence| (sequence, count)).collect::<Vec<_>>();
        self.backend.forward(&self.batches.step(&parts(16)))?;
        Ok(self.batches.step(&parts(1)))
    }

    /// Returns a step that computes a prompt.
    fn prompt(&mut self, tokens: usize) -> StepBatch {
        let sequence = self.batches.add(TestRng(3).tokens(tokens, 1024));
        let mut batch = self.batches.step(&[(sequence, tokens)]);
        batch.sampled_rows.drain(..tokens - 1);
        batch.pooled_rows.clear();
        batch
    }

    /// Returns the seconds of a step.
    fn time(&mut self, batch: &StepBatch, repetitions: u32) -> Result<f64, Box<dyn Error>> {
        let begun = Instant::now();
        for _ in 0..repetitions {
            self.backend.forward(batch)?;
        }
        Ok(begun.elapsed().as_secs_f64() / f64::from(repetitions))
    }
}

/// An adapter for every projection, in numbers that bf16 holds.
struct Adapter(HashMap<(SiteId, usize), [Vec<f32>; 2]>);

impl Adapter {
    fn new(program: &Program, rng: &mut TestRng) -> Self {
        let mut draw = |count: usize| -> Vec<f32> {
            (0..count).map(|_| f32::from_bits((rng.signed() / 100.0).to_bits() & 0xffff_0000)).collect()
        };
        let mut matrices = HashMap::new();
        let is_projection = |kind| matches!(kind, SiteKind::Linear | SiteKind::Experts(_));
        let sites = program.sites.iter().enumerate().filter(|(_, site)| is_projection(site.kind));
        for id in sites.map(|(index, _)| SiteId(index)) {
            for (part, [rows, cols]) in program.site_parts(id).into_iter().enumerate() {
                matrices.insert((id, part), [draw(RANK * cols), draw(rows * RANK)]);
            }
        }
        Self(matrices)
    }
}

impl AdapterSource for Adapter {
    fn matrices(&self, site: SiteId, part: usize) -> Option<LoraMatrices<'_>> {
        let [a, b] = self.0.get(&(site, part))?;
        Some(LoraMatrices { rank: RANK, scaling: 2.0, a, b })
    }

    fn rank(&self) -> usize {
        RANK
    }
}
