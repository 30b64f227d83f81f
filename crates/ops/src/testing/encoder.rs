//! Random encoders of images, and their batches.

use super::model::Build;
use super::{MemoryWeights, TestRng, TinyModel};
use crate::{
    Act, BufferId, Channel, EmbedTaps, EncodeBatch, KvPlace, MergeKind, MergeRows, Op, Program, ProgramBuilder,
    ProgramError, QkvPost, Rows, SegmentAttention, TAPS, Tap,
};

/// Number of channels of a patch.
const CHANNELS: usize = 3;

/// Shape of a random encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct TinyEncoder {
    /// Sizes and options of the layers; what only a decoder has is ignored.
    pub layers: TinyModel,
    /// Number of elements of a channel of a patch.
    pub patch: usize,
    /// Number of rows that are merged to one.
    pub merge: usize,
    /// How they become one.
    pub merge_kind: MergeKind,
    /// Number of learned positions.
    pub positions: usize,
    /// Hidden size of the decoder.
    pub out: usize,
    /// Number of parts of `out` columns of the media cache: the last layer's, then those of the first layers.
    pub parts: usize,
}

impl TinyEncoder {
    /// Returns the program and its weights.
    pub fn build(&self) -> Result<(Program, MemoryWeights), ProgramError> {
        let m = &self.layers;
        let mut b = Build::with(m, ProgramBuilder::encoder("tiny encoder", self.merge));
        let patches = b.builder.buffer("patches", Rows::Tokens, CHANNELS * self.patch);
        let x = b.builder.buffer("x", Rows::Tokens, m.hidden);
        let y = b.builder.buffer("y", Rows::Tokens, m.hidden);
        b.builder.push(Op::Patches { out: patches });
        b.linear("patch", &[m.hidden], patches, None, x);
        let table = b.matrix("positions", &[self.positions], m.hidden, 1.0);
        b.builder.push(Op::EmbedTaps(EmbedTaps { table, out: x }));
        for layer in 0..m.layers.len() {
            self.layer(&mut b, layer, x, y);
            if layer + 1 < self.parts {
                let merged = self.merged(&mut b, layer + 1, x);
                b.norm(&format!("{layer}.merger"), merged, None, merged);
                self.project(&mut b, layer + 1, merged);
            }
        }
        b.norm("last", x, None, y);
        let merged = self.merged(&mut b, 0, y);
        self.project(&mut b, 0, merged);
        b.done()
    }

    fn layer(&self, b: &mut Build<'_>, layer: usize, x: BufferId, y: BufferId) {
        let (m, heads) = (&self.layers, self.layers.heads);
        let mut buffer = |name: &str, cols| b.builder.buffer(format!("{name}.{layer}"), Rows::Tokens, cols);
        let [qkv, q, o] =
            [("qkv", heads.qkv_cols()), ("q", heads.q_cols()), ("o", heads.q_cols())].map(|(n, c)| buffer(n, c));
        let hidden = buffer("h", m.inner);
        b.norm(&format!("{layer}.in"), x, None, y);
        b.linear(&format!("{layer}.qkv"), &[heads.q_cols(), heads.kv_cols(), heads.kv_cols()], y, None, qkv);
        let rope = m.rope.clone();
        b.builder.push(Op::QkvPost(QkvPost { input: qkv, out: q, heads, norm: None, rope, kv: KvPlace::Step }));
        let scale = 1.0 / (heads.dim as f32).sqrt();
        b.builder.push(Op::SegmentAttention(SegmentAttention { q, out: o, heads, scale, window: None }));
        b.linear(&format!("{layer}.out"), &[m.hidden], o, Some(x), x);
        b.norm(&format!("{layer}.mid"), x, None, y);
        b.linear(&format!("{layer}.up"), &[m.inner], y, None, hidden);
        b.builder.push(Op::Act(Act { kind: m.glu, input: hidden, out: hidden }));
        b.linear(&format!("{layer}.down"), &[m.hidden], hidden, Some(x), x);
    }

    fn merged(&self, b: &mut Build<'_>, part: usize, input: BufferId) -> BufferId {
        let kind = self.merge_kind;
        let cols = kind.cols(b.cols(input), self.merge);
        let out = b.builder.buffer(format!("merged.{part}"), Rows::Merged, cols);
        b.builder.push(Op::MergeRows(MergeRows { input, out, kind }));
        out
    }

    /// Appends the two products that follow a merge, and the store.
    fn project(&self, b: &mut Build<'_>, part: usize, input: BufferId) {
        let inner = b.builder.buffer(format!("inner.{part}"), Rows::Merged, self.layers.inner);
        let acted = b.builder.buffer(format!("acted.{part}"), Rows::Merged, self.layers.inner);
        let out = b.builder.buffer(format!("out.{part}"), Rows::Merged, self.out);
        b.linear(&format!("merger.{part}.0"), &[self.layers.inner], input, None, inner);
        b.builder.push(Op::Act(Act { kind: self.layers.glu, input: inner, out: acted }));
        b.linear(&format!("merger.{part}.1"), &[self.out], acted, None, out);
        b.builder.push(Op::StoreRows { input: out, column: part * self.out });
    }

    /// Returns a batch of random images of the given numbers of merged rows. An image is a function of its seed.
    /// `store_rows` are its rows of the media cache, image after image.
    pub fn batch(&self, images: &[(u64, usize)], store_rows: Vec<u32>) -> EncodeBatch {
        let channels = (0..CHANNELS).map(|c| Channel { shift: 100.0 + c as f32, divisor: 60.0 + 9.0 * c as f32 });
        let mut batch = EncodeBatch { channels: channels.collect(), store_rows, ..EncodeBatch::default() };
        let streams = self.layers.rope.as_ref().map_or(1, |rope| 1 + rope.streams.iter().max().copied().unwrap_or(0));
        let mut positions = vec![Vec::new(); streams];
        for &(seed, merged) in images {
            let mut rng = TestRng(seed);
            let count = merged * self.merge;
            batch.push_segment(count);
            for stream in &mut positions {
                stream.extend((0..count).map(|_| rng.below(9) as u32));
            }
            batch.patches.extend((0..count * CHANNELS * self.patch).map(|_| rng.below(256) as u8));
            let mut tap = || Tap { row: rng.below(self.positions) as u32, weight: rng.signed() };
            batch.taps.extend((0..count).map(|_| -> [Tap; TAPS] { std::array::from_fn(|_| tap()) }));
        }
        batch.rows.positions = positions.concat();
        batch
    }
}
