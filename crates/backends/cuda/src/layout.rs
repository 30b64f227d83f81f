//! Content of the arena and the size of each part.

use std::borrow::Cow;

use octavo_kernels::manifest::Dtype;
use octavo_kernels::params::{KV_BLOCK, MAX_HEAD_SIZE, MAX_LATENT_SIZE, SamplingParams, SamplingRow};
use octavo_kernels::parts::PARTED_CTAS;
use octavo_kernels::plan::{PrefillTile, most_splits};
use octavo_ops::{BackendError, BufferId, HeadShape, KvGroup, Op, Program, ProgramKind, Rope, Rows, Values};

use crate::CudaConfig;
use crate::arena::{Plan, Region};
use crate::counts::CountsRoom;
use crate::experts::{RoutingRegions, is_routing};
use crate::float8::SIDE;
use crate::libraries::cublaslt::{self, bucket};
use crate::linear::{ROUNDED_ROWS, Setting};
use crate::lora::Adapted;
use crate::lower::block_elements;
use crate::step::StepShape;
use crate::tables::change_words;
use crate::unsupported;
use crate::weights::{Placed, place};

/// Number of words per row of a step for the lists of `Sample`: biases, forbidden tokens and tokens to report. It is an
/// average over the rows.
const LIST_WORDS: usize = 1024;

/// Number of tokens that a row of `Sample` may report beside its own, as an average over the rows of a step.
const REPORTED: usize = 32;

/// Sizes of a backend in the form in which they are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) tokens: usize,
    pub(crate) sequences: usize,
    /// Number of rows that reach the head.
    pub(crate) rows: usize,
    /// Number of rows whose hidden state is returned.
    pub(crate) pooled: usize,
    pub(crate) positions: usize,
}

impl Limits {
    /// Returns the sizes for a program. One that samples nothing may return a vector of every token.
    pub(crate) fn new(config: &CudaConfig, program: &Program) -> Self {
        let tokens = config.max_num_batched_tokens.max(1);
        let (rows, pooled) = match program.kind() {
            ProgramKind::Decoder => (config.max_rows.max(1), config.max_rows.max(1)),
            ProgramKind::Encoder | ProgramKind::Embedder => (0, tokens),
        };
        let (sequences, positions) = (config.max_num_seqs.max(1), config.max_model_len.max(1));
        Self { tokens, sequences, rows, pooled, positions }
    }

    /// Returns the number of entries in a row of a block table.
    pub(crate) fn table_stride(&self) -> usize {
        self.positions.div_ceil(KV_BLOCK)
    }

    /// Returns the number of splits of decode attention for this number of sequences.
    pub(crate) fn splits(&self, sequences: usize) -> usize {
        sequences * most_splits(self.positions)
    }

    /// Returns the shape of the largest step.
    pub(crate) fn largest_step(&self, program: &Program) -> StepShape {
        StepShape {
            tokens: self.tokens,
            sequences: self.sequences,
            sampled: self.rows,
            pooled: self.pooled,
            reduced: if program.reduces_rows() { self.pooled } else { 0 },
            typed: if program.token_types() > 0 { self.tokens } else { 0 },
            spanned: if program.has_spans() { self.tokens } else { 0 },
            groups: kv_groups(program).len(),
            media: if program.media_columns() > 0 { self.tokens } else { 0 },
            merged: self.tokens / program.merge(),
            tapped: if has_taps(program) { self.tokens } else { 0 },
            channels: patch_cols(program),
            adapted: match program.sites.is_empty() {
                true => Default::default(),
                false => [self.tokens, self.rows].map(|rows| Adapted { rows, tiles: rows }),
            },
            streams: program.position_streams(),
            tiles: self.tokens / PrefillTile::LEAST_QUERIES as usize + self.sequences,
            splits: self.splits(self.sequences),
        }
    }

    /// Returns the sizes for images of at most `patches` patches, which are encoded one by one.
    pub(crate) fn of_images(patches: usize) -> Self {
        Self { tokens: patches, sequences: 1, rows: 0, pooled: 0, positions: patches }
    }

    /// Returns the number of blocks of keys and values that an encoder's step needs, in which each sequence has blocks of
    /// its own.
    pub(crate) fn step_blocks(&self) -> usize {
        let sequences = self.sequences.min(self.tokens);
        (self.tokens + (KV_BLOCK - 1) * sequences) / KV_BLOCK
    }

    /// Returns the maximum number of rows of a kind.
    pub(crate) fn most(&self, program: &Program, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.tokens,
            Rows::Routed(experts) => self.tokens * experts,
            Rows::Merged => self.tokens / program.merge(),
            Rows::Sampled => self.rows,
            Rows::Pooled => self.pooled,
        }
    }

    /// Returns the number of rows of a buffer, including surplus rows computed by cuBLASLt.
    fn rows_of(&self, program: &Program, rows: Rows) -> u64 {
        u64::from(bucket(u32::try_from(self.most(program, rows)).unwrap_or(u32::MAX / 2)))
    }
}

/// Regions of the arena: the weights come first.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Weights by [`octavo_ops::WeightId`].
    pub(crate) weights: Vec<Placed>,
    /// Size of the weights in bytes.
    pub(crate) weight_bytes: u64,
    /// Buffers by [`octavo_ops::BufferId`].
    pub(crate) buffers: Vec<Region>,
    /// Distinct rotary embeddings.
    pub(crate) ropes: Vec<RopeTables>,
    /// Block of the step.
    pub(crate) step: Region,
    /// Block tables by KV group and seat, and their changes.
    pub(crate) tables: (Region, Region),
    /// Dequantised values of a weight.
    pub(crate) values: Region,
    /// Rounded activations and their scales.
    pub(crate) rounded: (Region, Region),
    /// Those of gated activations of few rows, which a product writes while it reads others.
    pub(crate) gated: (Region, Region),
    /// Partial results of decode attention, their sums, and the tickets.
    pub(crate) partial: (Region, Region, Region),
    /// Workspace of cuBLASLt, and sums of the parts of products whose inputs are divided.
    pub(crate) workspace: Region,
    /// Tickets of the tiles of such products.
    pub(crate) part_tickets: Region,
    /// Patches of an encoder, in bytes.
    pub(crate) patches: Region,
    /// Keys and values of an encoder.
    pub(crate) step_kv: Region,
    pub(crate) sampling: Sampling,
    /// Experts of each token, by [`octavo_ops::BufferId`] of a routing.
    pub(crate) routings: Vec<(BufferId, RoutingRegions)>,
    /// Memory of all regions.
    pub(crate) plan: Plan,
}

/// Tables of a rotary embedding on the device.
#[derive(Clone, Debug)]
pub(crate) struct RopeTables {
    pub(crate) rope: Rope,
    /// Cosines, `[positions, pairs]`.
    pub(crate) cosine: Region,
    pub(crate) sine: Region,
    /// Index of the positions that rotate each pair, `[pairs]`; `None` if the first rotate all.
    pub(crate) streams: Option<Region>,
}

/// Regions of `Sample`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sampling {
    /// Logits after bias, masks and penalties.
    pub(crate) adjusted: Region,
    /// Number of rows for which there is scratch memory.
    pub(crate) room: usize,
    /// Scratch memory of the kernels that is zero between steps.
    pub(crate) zeroed: Region,
    /// Other scratch memory of the kernels.
    pub(crate) scratch: Region,
    /// Rows and lists, in the form in which they are copied.
    pub(crate) input: Region,
    /// Tokens and reported log-probabilities, in the form in which they are copied back.
    pub(crate) output: Region,
    /// Counts of penalties and their changes.
    pub(crate) counts: (Region, Region),
    pub(crate) counts_room: CountsRoom,
}

impl Layout {
    /// Creates the layout of a program.
    pub(crate) fn new(program: &Program, setting: &Setting, limits: &Limits) -> Result<Self, BackendError> {
        let dtype = setting.dtype;
        let mut plan = Plan::default();
        let weights = place(program, setting, &mut plan)?;
        let weight_bytes = plan.bytes();
        let buffers = buffers(program, dtype, limits, &mut plan);
        let routings = routings(program, limits, &mut plan);
        let ropes = ropes(program, limits, &mut plan);
        let words = |words: usize| (words * size_of::<u32>()) as u64;
        let step = plan.take(words(limits.largest_step(program).words()));
        let (groups, seats, stride) = (kv_groups(program).len(), limits.sequences, limits.table_stride());
        let tables = plan.take(words(groups * seats * stride));
        let tables = (tables, plan.take(words(change_words(groups, seats, stride))));
        let (values, widest) = quantised(program, &weights);
        let values = plan.take(values.saturating_mul(dtype.bytes() as u64));
        // Few rows are rounded in blocks of 32, with two numbers each; any number of rows to FP8, with one number each or for each
        // 128 elements.
        let rows = if setting.rounds_to_fp8() { limits.rows_of(program, Rows::Tokens) } else { 0 };
        let codes = plan.take(rows.max(ROUNDED_ROWS) * widest);
        let of_rows = rows * if setting.multiplies_fp8_by_library() { widest.div_ceil(SIDE as u64) } else { 1 };
        let of_blocks = ROUNDED_ROWS * widest / 32 * 2;
        let scales = plan.take(of_rows.max(of_blocks) * size_of::<f32>() as u64);
        let gated = (plan.take(ROUNDED_ROWS * widest), plan.take(of_blocks * size_of::<f32>() as u64));
        let (elements, heads) = attention(program)?;
        let splits = limits.splits(limits.sequences) as u64;
        let floats = size_of::<f32>() as u64;
        let partial = (
            plan.take(splits * elements * floats),
            plan.take(splits * heads * 2 * floats),
            plan.take(limits.sequences as u64 * heads * size_of::<u32>() as u64),
        );
        let workspace = plan.take(if dtype == Dtype::F32 { 0 } else { cublaslt::WORKSPACE });
        let part_tickets = plan.take(if dtype == Dtype::F32 { 0 } else { words(PARTED_CTAS as usize) });
        let patches = plan.take((limits.tokens as u64).saturating_mul(patch_cols(program) as u64));
        let step_kv = block_elements(&program.step_kv()).saturating_mul(dtype.bytes() as u64);
        let step_kv = plan.take(step_kv.saturating_mul(limits.step_blocks() as u64));
        let counts_room = CountsRoom::new(program.vocab_size, limits);
        let sampling = Sampling {
            adjusted: plan.take(limits.rows as u64 * logits_stride(program.vocab_size) * floats),
            room: limits.rows,
            zeroed: plan.take((limits.rows * SamplingParams::ZEROED_BYTES) as u64),
            scratch: plan.take((limits.rows * SamplingParams::scratch_bytes(program.vocab_size)) as u64),
            input: plan.take(words(sampling_words(program.vocab_size, limits.rows))),
            output: plan.take(words(limits.rows * (5 + 2 * REPORTED))),
            counts: (plan.take(words(counts_room.words())), plan.take(words(counts_room.change_words()))),
            counts_room,
        };
        Ok(Self {
            weights,
            weight_bytes,
            buffers,
            ropes,
            step,
            tables,
            values,
            rounded: (codes, scales),
            gated,
            partial,
            workspace,
            part_tickets,
            patches,
            step_kv,
            sampling,
            routings,
            plan,
        })
    }
}

/// Returns the number of elements from one row of logits to the next.
pub(crate) fn logits_stride(vocab_size: usize) -> u64 {
    (vocab_size as u64).next_multiple_of(4)
}

/// Returns the number of words of the rows of `Sample` with their lists and a mask for each.
fn sampling_words(vocab_size: usize, rows: usize) -> usize {
    rows * (size_of::<SamplingRow>() / size_of::<u32>() + vocab_size.div_ceil(32) + LIST_WORDS)
}

/// Returns whether `Logits` writes the buffer, which is in f32.
pub(crate) fn is_logits(program: &Program, buffer: usize) -> bool {
    program.ops.iter().any(|op| matches!(op, Op::Logits(op) if op.out.0 == buffer))
}

fn buffers(program: &Program, dtype: Dtype, limits: &Limits, plan: &mut Plan) -> Vec<Region> {
    let region = |(index, buffer): (usize, &octavo_ops::Buffer)| {
        let row = match is_logits(program, index) {
            _ if is_routing(program, index) => 0,
            true => logits_stride(buffer.cols).saturating_mul(size_of::<f32>() as u64),
            false => (buffer.cols as u64).saturating_mul(dtype.bytes() as u64),
        };
        plan.take(row.saturating_mul(limits.rows_of(program, buffer.rows)))
    };
    program.buffers.iter().enumerate().map(region).collect()
}

fn routings(program: &Program, limits: &Limits, plan: &mut Plan) -> Vec<(BufferId, RoutingRegions)> {
    let tokens = limits.rows_of(program, Rows::Tokens);
    let indices = (0..program.buffers.len()).filter(|&index| is_routing(program, index));
    indices.map(|index| (BufferId(index), RoutingRegions::new(program, index, tokens, plan))).collect()
}

fn ropes(program: &Program, limits: &Limits, plan: &mut Plan) -> Vec<RopeTables> {
    let mut ropes: Vec<RopeTables> = Vec::new();
    for op in &program.ops {
        let Some(rope) = op.rope() else { continue };
        if !ropes.iter().any(|known| known.rope == *rope) {
            let pairs = rope.inv_freq.len();
            let bytes = (limits.positions * pairs * size_of::<f32>()) as u64;
            let (cosine, sine) = (plan.take(bytes), plan.take(bytes));
            let streams = (!rope.streams.is_empty()).then(|| plan.take((pairs * size_of::<u32>()) as u64));
            ropes.push(RopeTables { rope: rope.clone(), cosine, sine, streams });
        }
    }
    ropes
}

/// Returns the number of elements of the largest quantised part, and the maximum number of columns.
fn quantised(program: &Program, weights: &[Placed]) -> (u64, u64) {
    let (mut most, mut widest) = (0, 0);
    for (weight, placed) in program.weights.iter().zip(weights) {
        let Placed::Matrix(parts) = placed else { continue };
        for part in parts.iter().filter(|part| part.quant.is_some()) {
            most = most.max(part.rows as u64 * weight.cols as u64);
            widest = widest.max(weight.cols as u64);
        }
    }
    (most, widest)
}

/// Returns the KV groups of a program: those of the cache, or the memory of the step of an encoder.
pub(crate) fn kv_groups(program: &Program) -> Cow<'_, [KvGroup]> {
    match program.kind() {
        ProgramKind::Encoder => Cow::Owned(vec![program.step_kv()]),
        ProgramKind::Decoder | ProgramKind::Embedder => Cow::Borrowed(&program.kv_groups),
    }
}

/// Returns the number of elements of a patch; 0 if the program has none.
pub(crate) fn patch_cols(program: &Program) -> usize {
    let cols = |op: &Op| match op {
        Op::Patches { out } => Some(program.buffers[out.0].cols),
        _ => None,
    };
    program.ops.iter().find_map(cols).unwrap_or(0)
}

/// Returns whether patches have learned positions.
pub(crate) fn has_taps(program: &Program) -> bool {
    program.ops.iter().any(|op| matches!(op, Op::EmbedTaps(_)))
}

/// Returns the maximum numbers of elements of the output and of heads of q in a layer with a cache.
fn attention(program: &Program) -> Result<(u64, u64), BackendError> {
    let (mut elements, mut heads) = (0, 0);
    for HeadShape { dim, values, .. } in kv_groups(program).iter().flat_map(|group| &group.layers) {
        let largest = if *values == Values::Own { MAX_HEAD_SIZE } else { MAX_LATENT_SIZE };
        if *dim > largest {
            return Err(unsupported(format!("heads of {dim} elements")));
        }
    }
    for shape in program.kv_groups.iter().flat_map(|group| &group.layers) {
        elements = elements.max(shape.out_cols() as u64);
        heads = heads.max(shape.q as u64);
    }
    Ok((elements, heads))
}

#[cfg(test)]
mod tests {
    use octavo_kernels::manifest::{CacheType, Chip};

    use super::*;

    #[test]
    fn splits_grow_with_the_context() {
        let (program, _) = octavo_ops::testing::TinyModel::default().build().unwrap();
        let limits = |max_model_len| {
            let config = CudaConfig { max_model_len, ..crate::config::tests::config() };
            Limits::new(&config, &program)
        };
        assert_eq!([1, 1000, 40_960, 1 << 20].map(|len| limits(len).splits(2)), [2, 16, 64, 1024]);
        assert_eq!(limits(100).table_stride(), 7);
    }

    #[test]
    fn every_division_into_texts_has_its_blocks() {
        for (tokens, sequences) in [(1, 1), (16, 1), (17, 1), (3, 8), (40, 8), (64, 8)] {
            let limits = Limits { tokens, sequences, rows: 0, pooled: tokens, positions: tokens };
            // All but one text begin a block with a single token, which takes most blocks.
            let others = sequences.min(tokens) - 1;
            let most = others + (tokens - others).div_ceil(KV_BLOCK);
            assert!((most..=most + 1).contains(&limits.step_blocks()), "{tokens} tokens of {sequences} texts");
        }
    }

    /// Returns the programs of a model whose configuration alone is in `models/shapes`.
    fn programs(shape: &str) -> octavo_models::Programs {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../models/shapes").join(shape);
        let checkpoint = octavo_models::Checkpoint::open_shape(&folder).unwrap();
        octavo_models::build_programs(&checkpoint).unwrap()
    }

    /// The numbers of `deploy/ovh/mks.md`: the memory of Qwen3-VL 8B with images in a context of 8192 tokens.
    #[test]
    fn the_memory_of_a_model_with_images_is_as_documented() {
        const CONTEXT: usize = 8192;
        let octavo_models::Programs { decoder, encoder } = programs("qwen3-vl-8b");
        let encoder = encoder.unwrap();
        let config = CudaConfig {
            max_model_len: CONTEXT,
            max_num_batched_tokens: 2048,
            max_num_seqs: 256,
            max_rows: 512,
            ..crate::config::tests::config()
        };
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let setting = Setting {
                chip: Chip::SM_90,
                dtype,
                cache: CacheType::Activation,
                batch_invariant: false,
                fp8_inputs: false,
                tune: false,
            };
            let text = Layout::new(&decoder, &setting, &Limits::new(&config, &decoder)).unwrap();
            let images = Layout::new(&encoder, &setting, &Limits::of_images(4 * CONTEXT)).unwrap();
            let row = decoder.media_columns() as u64 * dtype.bytes() as u64;
            let found = [
                text.weight_bytes,
                text.plan.bytes() - text.weight_bytes,
                images.weight_bytes,
                images.plan.bytes() - images.weight_bytes,
                CONTEXT as u64 * row,
            ];
            assert_eq!(found.map(|bytes| bytes >> 20), [15_623, 1054, 1100, 1311, 256], "MiB, {dtype:?}");
        }
    }
}
