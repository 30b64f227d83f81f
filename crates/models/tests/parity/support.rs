//! Runs one sequence through a checkpoint's program.

use std::path::{Path, PathBuf};

use octavo_backend_candle::CandleBackend;
use octavo_backend_cpu::{ActivationBits, CpuBackend, CpuConfig, Isa};
use octavo_models::{Checkpoint, build_program};
use octavo_ops::testing::in_each_group;
use octavo_ops::{AdapterSource, Backend, BlockTables, Op, Program, Rope, StepBatch, WeightSource};
use safetensors::SafeTensors;

const BLOCK: usize = 16;

/// Returns a path under `models/testdata`.
pub(crate) fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata").join(name)
}

/// Opens a checkpoint of the test data: a directory, or the GGUF file in it.
pub(crate) fn checkpoint(name: &str) -> Checkpoint {
    let gguf = testdata(name).join("model.gguf");
    Checkpoint::open(if gguf.exists() { gguf } else { testdata(name) }.as_path()).unwrap()
}

/// Returns the little-endian words of a tensor.
pub(crate) fn words<T>(file: &SafeTensors<'_>, name: &str, convert: impl Fn([u8; 4]) -> T) -> Vec<T> {
    file.tensor(name).unwrap().data().chunks_exact(4).map(|w| convert([w[0], w[1], w[2], w[3]])).collect()
}

/// PyTorch's results for a tiny checkpoint.
pub(crate) struct Golden {
    pub(crate) ids: Vec<u32>,
    /// Logits, `[tokens, V]`.
    pub(crate) logits: Vec<f32>,
}

impl Golden {
    pub(crate) fn read(name: &str) -> Self {
        Self::read_file(&testdata(name).join("golden.safetensors"))
    }

    pub(crate) fn read_file(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        Self { ids: words(&file, "input_ids", u32::from_le_bytes), logits: words(&file, "logits", f32::from_le_bytes) }
    }
}

/// A loaded model with one sequence in its cache, in blocks that are out of order.
pub(crate) struct Session {
    backend: Box<dyn Backend>,
    groups: usize,
    blocks: usize,
    past: usize,
    defect: Option<Defect>,
    /// Adapter of the sequence, as in [`StepBatch::adapters`].
    adapter: u32,
}

/// A defect that every comparison must detect.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Defect {
    /// Windows are one token too wide.
    WideWindow,
    /// Windows are one token too narrow.
    NarrowWindow,
    /// The positions of all rows but the first step's are one too high.
    Position,
    /// The base of rotary embeddings is twice what it should be.
    RotaryBase,
}

impl Defect {
    pub(crate) const ALL: [Self; 4] = [Self::WideWindow, Self::NarrowWindow, Self::Position, Self::RotaryBase];

    /// Returns whether a defect changes anything for a program and a sequence of this length.
    pub(crate) fn applies(self, program: &Program, len: usize) -> bool {
        let mut ops = program.ops.clone();
        match self {
            Self::WideWindow | Self::NarrowWindow => ops.iter_mut().filter_map(window).any(|window| *window < len),
            Self::Position | Self::RotaryBase => ops.iter_mut().any(|op| rotary(op).is_some()),
        }
    }

    /// Changes a program as the defect would.
    pub(crate) fn put_into(self, program: &mut Program) {
        match self {
            Self::WideWindow => change_windows(program, |window| window + 1),
            Self::NarrowWindow => change_windows(program, |window| window - 1),
            Self::Position => {}
            Self::RotaryBase => {
                for Rope { inv_freq, .. } in program.ops.iter_mut().filter_map(rotary) {
                    let pairs = inv_freq.len() as f64;
                    for (pair, frequency) in inv_freq.iter_mut().enumerate() {
                        *frequency *= 2f64.powf(-(pair as f64) / pairs);
                    }
                }
            }
        }
    }
}

fn change_windows(program: &mut Program, change: impl Fn(usize) -> usize) {
    program.kv_groups.iter_mut().for_each(|group| group.window = group.window.map(&change));
    program.ops.iter_mut().filter_map(window).for_each(|window| *window = change(*window));
}

/// Returns the window of an op.
fn window(op: &mut Op) -> Option<&mut usize> {
    match op {
        Op::PagedAttention(op) => op.window.as_mut(),
        Op::SegmentAttention(op) => op.window.as_mut(),
        _ => None,
    }
}

/// Returns the rotary embedding of an op.
fn rotary(op: &mut Op) -> Option<&mut Rope> {
    match op {
        Op::QkvPost(op) => op.rope.as_mut(),
        Op::LatentPost(op) => Some(&mut op.rope),
        _ => None,
    }
}

impl Session {
    /// Creates a session on the candle backend, the reference.
    pub(crate) fn new(checkpoint: &Checkpoint, capacity: usize) -> Self {
        Self::on(Box::new(CandleBackend::new()), checkpoint, capacity, None)
    }

    /// Creates a session on the CPU backend with an instruction set that the machine supports.
    pub(crate) fn on_cpu(isa: Isa, checkpoint: &Checkpoint, capacity: usize) -> Self {
        Self::on(Box::new(cpu(isa, ActivationBits::Twelve)), checkpoint, capacity, None)
    }

    /// Loads the program and allocates blocks for `capacity` tokens.
    pub(crate) fn on(
        backend: Box<dyn Backend>,
        checkpoint: &Checkpoint,
        capacity: usize,
        defect: Option<Defect>,
    ) -> Self {
        let mut program: Program = build_program(checkpoint).unwrap();
        if let Some(defect) = defect {
            defect.put_into(&mut program);
        }
        Self { defect, ..Self::load(backend, &program, checkpoint, capacity) }
    }

    /// Loads a program with weights and allocates blocks for `capacity` tokens.
    pub(crate) fn load(
        mut backend: Box<dyn Backend>,
        program: &Program,
        weights: &dyn WeightSource,
        capacity: usize,
    ) -> Self {
        backend.load(program, weights, &mut |_| {}).unwrap();
        let (groups, blocks) = (program.kv_groups.len(), capacity.div_ceil(BLOCK));
        backend.allocate_kv(BLOCK, groups * blocks + 1).unwrap();
        Self { backend, groups, blocks, past: 0, defect: None, adapter: 0 }
    }

    /// Gives the sequence an adapter, in the second of three slots.
    pub(crate) fn with_adapter(mut self, adapter: &dyn AdapterSource) -> Self {
        self.backend.allocate_adapters(3, adapter.rank()).unwrap();
        self.backend.set_adapter(1, adapter).unwrap();
        self.adapter = 2;
        self
    }

    /// Starts a new sequence. Its predecessor's stale keys stay in the cache, where nothing may read them.
    pub(crate) fn restart(&mut self) {
        self.past = 0;
    }

    /// Runs `tokens` as the sequence's next rows and returns the logits of all of them, `[tokens, V]`.
    pub(crate) fn forward(&mut self, tokens: &[u32]) -> Vec<f32> {
        self.forward_rows(tokens, &(0..tokens.len() as u32).collect::<Vec<_>>())
    }

    /// Does the same and returns the logits of some rows, ascending.
    pub(crate) fn forward_rows(&mut self, tokens: &[u32], rows: &[u32]) -> Vec<f32> {
        let (start, end) = (self.past, self.past + tokens.len());
        assert!(end <= self.blocks * BLOCK);
        let shift = u32::from(start > 0 && self.defect == Some(Defect::Position));
        // The blocks are in reverse order, so that a backend that ignored the table would read the wrong keys.
        let table: Vec<u32> = (1..=self.blocks as u32).rev().collect();
        let slot = |position: usize| table[position / BLOCK] * BLOCK as u32 + (position % BLOCK) as u32;
        let slots: Vec<u32> = (start..end).map(slot).collect();
        let mut batch = StepBatch {
            token_ids: tokens.to_vec(),
            positions: (start as u32 + shift..end as u32 + shift).collect(),
            slot_mapping: vec![slots],
            block_tables: vec![BlockTables::from_iter([table])],
            query_start: vec![0, tokens.len() as u32],
            seq_lens: vec![end as u32],
            sampled_rows: rows.to_vec(),
            pooled_rows: (0..tokens.len() as u32).collect(),
            seats: vec![0],
            adapters: vec![self.adapter],
            ..StepBatch::default()
        };
        in_each_group(&mut batch, self.groups, self.blocks, BLOCK);
        self.backend.forward(&batch).unwrap();
        self.past = end;
        self.backend.logits().unwrap()
    }

    /// Returns the hidden states of the last rows, `[tokens, H]`.
    pub(crate) fn embeddings(&mut self) -> Vec<f32> {
        let mut out = Vec::new();
        self.backend.embeddings(&mut out).unwrap();
        out
    }
}

/// A backend that is compared.
pub(crate) struct Device {
    pub(crate) name: &'static str,
    pub(crate) backend: Box<dyn Backend>,
    /// Instruction set of the CPU backend.
    pub(crate) isa: Option<Isa>,
}

impl Device {
    /// Returns the candle backend, and the CPU backend with each instruction set that this machine supports.
    pub(crate) fn all() -> Vec<Self> {
        let candle = Self { name: "candle", backend: Box::new(CandleBackend::new()), isa: None };
        let on_cpu = |isa: Isa| {
            let backend = Box::new(cpu(isa, ActivationBits::Twelve));
            Self { name: isa.name(), backend, isa: Some(isa) }
        };
        std::iter::once(candle).chain(instruction_sets().map(on_cpu)).collect()
    }
}

/// Returns the CPU backend with an instruction set that the machine supports. Wrong products show best with 12 bits.
pub(crate) fn cpu(isa: Isa, activations: ActivationBits) -> CpuBackend {
    CpuBackend::new(CpuConfig { isa: Some(isa), activations, ..CpuConfig::default() }).unwrap()
}

/// Returns the instruction sets that this machine supports and prints those it does not.
pub(crate) fn instruction_sets() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| {
        if !isa.is_available() {
            eprintln!("SKIPPED: this machine has no {isa}");
        }
        isa.is_available()
    })
}

/// Returns the largest difference relative to the largest reference value.
pub(crate) fn relative_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    // `max` would drop a NaN.
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    worst.fold(0f32, |m, d| if d.is_nan() || d > m { d } else { m }) / scale
}

/// Returns the root mean square of the differences relative to that of the reference values.
pub(crate) fn mean_difference(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let difference = squares(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    (difference / squares(&mut expected.iter().copied())).sqrt()
}

/// Two tests for each checkpoint, by the functions of the module that calls: `check`, and `sees_defects`, which is of what the
/// first would detect.
macro_rules! golden_tests {
    ($($test:ident: $name:literal;)*) => {
        $(
            #[test]
            fn $test() {
                check($name);
            }
        )*

        mod defects {
            $(
                #[test]
                fn $test() {
                    super::sees_defects($name);
                }
            )*
        }
    };
}

pub(crate) use golden_tests;
