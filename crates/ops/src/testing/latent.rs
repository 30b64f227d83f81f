//! Latent attention in random models, and its meaning in f64.

use proptest::prelude::*;

use super::TinyModel;
use super::math::{Rows as Values, dot, normalise, rotate};
use super::model::Build;
use super::suite::models;
use crate::{
    BufferId, HeadLinear, HeadShape, LatentPost, NormKind, Op, Residual, Rope, RopeStyle, Rows, StorageType, WeightId,
};

/// Sizes of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TinyLatent {
    /// Number of elements R of the latent.
    pub rank: usize,
    /// Number of elements P of a head that are rotated; even.
    pub rotated: usize,
    /// Number of elements C of a head that are not rotated.
    pub content: usize,
    /// Number of elements of a value.
    pub value: usize,
    /// Number of columns of the low-rank form of the queries, if they have one.
    pub query_rank: Option<usize>,
}

impl TinyLatent {
    /// Returns a model with this attention of so many heads.
    pub fn model(self, heads: usize, model: TinyModel) -> TinyModel {
        let (style, streams) = model.rope.map_or((RopeStyle::GptJ, Vec::new()), |rope| (rope.style, rope.streams));
        let pairs = self.rotated / 2;
        let inv_freq = (0..pairs).map(|i| 0.3f64.powi(i as i32)).collect();
        let streams = if streams.is_empty() { streams } else { streams.into_iter().cycle().take(pairs).collect() };
        let rope = Some(Rope { style, inv_freq, magnitude: 1.0, streams });
        let heads = HeadShape::latent(heads, self.rank, self.rotated);
        TinyModel { heads, latent: Some(self), spans: false, rope, ..model }
    }
}

impl Build<'_> {
    /// Appends the latent attention of a layer.
    pub(super) fn latent_attention(
        &mut self,
        index: usize,
        group: usize,
        latent: &TinyLatent,
        x: BufferId,
        y: BufferId,
    ) {
        let TinyLatent { rank, rotated, content, value, query_rank } = *latent;
        let heads = self.model.heads;
        let mut buffer = |name: &str, cols| self.builder.buffer(format!("{name}.{index}"), Rows::Tokens, cols);
        let [q, kv] = [buffer("q", heads.q * (content + rotated)), buffer("kv", rank + rotated)];
        let [query, values] = [buffer("query", heads.q_cols()), buffer("values", heads.q * value)];
        match query_rank.map(|cols| buffer("q_low", cols)) {
            Some(low) => {
                self.linear(&format!("{index}.q_a"), &[self.cols(low)], x, None, low);
                self.norm(&format!("{index}.q_a"), low, None::<Residual>, low);
                self.linear(&format!("{index}.q_b"), &[self.cols(q)], low, None, q);
            }
            None => self.linear(&format!("{index}.q"), &[self.cols(q)], x, None, q),
        }
        self.linear(&format!("{index}.kv"), &[rank, rotated], x, None, kv);
        self.head_linear(&format!("{index}.k_b"), [rank, content], q, query);
        let norm = self.vector(&format!("{index}.latent_norm"), rank);
        let rope = self.model.rope.clone().expect("a latent model has one");
        let layer = self.layer_of(index, group);
        let post = LatentPost { q, kv, out: query, heads, norm, eps: 1e-6, rope, group, layer };
        self.builder.push(Op::LatentPost(post));
        let attended = self.attend(index, group, query);
        self.head_linear(&format!("{index}.v_b"), [value, rank], attended, values);
        self.block_end(&format!("{index}.out"), values, None, y);
    }

    /// Appends a product with a matrix of `rows` by `cols` for each head.
    fn head_linear(&mut self, name: &str, [rows, cols]: [usize; 2], input: BufferId, out: BufferId) {
        let heads = self.model.heads.q;
        let weight: WeightId = self.matrix(name, &vec![rows; heads], cols, 1.5);
        self.builder.push(Op::HeadLinear(HeadLinear { weight, heads, input, out }));
    }
}

/// Returns the rows of [`HeadLinear`], with zeros in the columns that hold no result.
pub(super) fn head_linear(op: &HeadLinear, input: &Values, weight: &Values, cols: usize) -> Values {
    let (rows, width) = (weight.len() / op.heads, cols / op.heads);
    let row = |x: &Vec<f64>| {
        let heads = x.chunks(x.len() / op.heads).zip(weight.chunks(rows));
        let products = heads.flat_map(|(x, matrix)| {
            let product = matrix.iter().map(move |w| dot(&x[..w.len()], w));
            product.chain(std::iter::repeat(0.0)).take(width)
        });
        products.collect()
    };
    input.iter().map(row).collect()
}

/// Returns the queries of [`LatentPost`], and its rows of the cache. `position` returns the position of a row in a stream.
pub(super) fn latent_post(
    op: &LatentPost,
    (q, kv, out): (&Values, &Values, &Values),
    norm: &[f64],
    position: impl Fn(usize, usize) -> u32,
) -> (Values, Values) {
    let (mut queries, mut keys) = (out.clone(), Values::new());
    for (row, queries) in queries.iter_mut().enumerate() {
        let width = q[row].len() / op.heads.q;
        for (query, q) in queries.chunks_mut(op.heads.dim).zip(q[row].chunks(width)) {
            let (_, rotated) = query.split_at_mut(op.rank());
            rotated.copy_from_slice(&q[width - op.rotated()..]);
            rotate(rotated, &op.rope, |stream| position(row, stream));
        }
        let (latent, key) = kv[row].split_at(op.rank());
        let mut key = key.to_vec();
        rotate(&mut key, &op.rope, |stream| position(row, stream));
        let latent = normalise(NormKind::Rms, latent, norm, None, op.eps, false);
        keys.push([latent, key].concat());
    }
    (queries, keys)
}

/// Generates models with latent attention and odd sizes.
pub fn models_with_latents() -> impl Strategy<Value = TinyModel> {
    // A norm over few columns may amplify rounding errors a hundredfold.
    let sizes = (8usize..40, 1usize..6, 1usize..20, 1usize..20, proptest::option::of(8usize..20));
    (models(), sizes, 1usize..7).prop_map(|(model, (rank, pairs, content, value, query_rank), heads)| {
        TinyLatent { rank, rotated: 2 * pairs, content, value, query_rank }.model(heads, model)
    })
}

/// Returns a model whose heads have rows of whole super-blocks.
pub fn latents_of_blocks(storage: StorageType) -> TinyModel {
    let latent = TinyLatent { rank: 256, rotated: 32, content: 256, value: 64, query_rank: Some(256) };
    latent.model(3, TinyModel::of_blocks(storage))
}

/// Returns one layer with the head sizes of DeepSeek-V2 and so many heads.
pub fn real_latents(heads: usize) -> TinyModel {
    let model = TinyModel { hidden: 64, layers: vec![0], ..TinyModel::default() };
    TinyLatent { rank: 512, rotated: 64, content: 128, value: 128, query_rank: None }.model(heads, model)
}
