//! Programs with latent attention: their rules and their cost.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use octavo_ops::cost::{Cost, ElementBytes, StepPricer, StepShape, op_cost, step_cost};
use octavo_ops::dummy::DummyWeights;
use octavo_ops::testing::{TinyLatent, TinyModel};
use octavo_ops::{
    Embed, EmbedIds, HeadLinear, HeadShape, KvGroup, LatentPost, Op, PagedAttention, Program, ProgramBuilder, Rope,
    RopeStyle, Rows, StepBatch, StorageType, Values, WeightPart, WeightSource,
};

const TOKENS: usize = 50;
const HEADS: usize = 3;
const RANK: usize = 6;
const ROTATED: usize = 4;
const CONTENT: usize = 5;

/// The parameters of a program that a test may spoil.
struct Parts {
    heads: HeadShape,
    q_cols: usize,
    /// Rows of the matrix of each head.
    rows: Vec<usize>,
    rotary_dim: usize,
    norm: usize,
    posts: bool,
}

impl Default for Parts {
    fn default() -> Self {
        Self {
            heads: HeadShape::latent(HEADS, RANK, ROTATED),
            q_cols: HEADS * (CONTENT + ROTATED),
            rows: vec![RANK; HEADS],
            rotary_dim: ROTATED,
            norm: RANK,
            posts: true,
        }
    }
}

/// Returns the first defect of a program whose end is missing.
fn defect(parts: &Parts) -> String {
    let mut b = ProgramBuilder::new("latent", TOKENS);
    let part = |tensor: &str, rows| WeightPart { tensor: tensor.into(), rows, storage: StorageType::F32, slab: None };
    b.kv_group(KvGroup { layers: vec![parts.heads], scales: vec![], window: None });
    let mut buffer = |name: &str, cols| b.buffer(name, Rows::Tokens, cols);
    let [x, kv, q] = [buffer("x", parts.q_cols), buffer("kv", RANK + ROTATED), buffer("q", HEADS * (RANK + ROTATED))];
    let out = buffer("out", HEADS * RANK);
    let [embed, latents] = [("x", parts.q_cols), ("kv", RANK + ROTATED)]
        .map(|(name, cols)| b.weight(name, cols, vec![part(name, TOKENS)]));
    let weight = b.weight("heads", CONTENT, parts.rows.iter().map(|&rows| part("heads", rows)).collect());
    let norm = b.weight("norm", parts.norm, vec![part("norm", 1)]);
    b.push(Op::Embed(Embed { table: embed, ids: EmbedIds::Tokens, scale: 1.0, add: false, out: x }));
    b.push(Op::Embed(Embed { table: latents, ids: EmbedIds::Tokens, scale: 1.0, add: false, out: kv }));
    b.push(Op::HeadLinear(HeadLinear { weight, heads: HEADS, input: x, out: q }));
    let inv_freq = vec![1.0; parts.rotary_dim / 2];
    let rope = Rope { style: RopeStyle::GptJ, inv_freq, magnitude: 1.0, streams: vec![] };
    let heads = parts.heads;
    if parts.posts {
        b.push(Op::LatentPost(LatentPost { q: x, kv, out: q, heads, norm, eps: 1e-6, rope, group: 0, layer: 0 }));
    }
    let (window, softcap, sinks) = (None, None, None);
    b.push(Op::PagedAttention(PagedAttention {
        q,
        out,
        heads,
        scale: 1.0,
        window,
        spans: false,
        softcap,
        sinks,
        group: 0,
        layer: 0,
    }));
    b.finish().unwrap_err().to_string()
}

#[test]
fn the_builder_checks_latent_attention() {
    assert_eq!(defect(&Parts::default()), "a decoder program ends with Sample", "all else is well");
    let message = defect(&Parts { rows: vec![5, 7, 6], ..Parts::default() });
    assert_eq!(message, "op 2 (HeadLinear): the parts of weight 'heads' are not those of 3 equal matrices");
    let message = defect(&Parts { rows: vec![11; HEADS], ..Parts::default() });
    assert_eq!(message, "op 2 (HeadLinear): an output of 30 columns for 3 heads of at least 11");
    let message = defect(&Parts { q_cols: 28, ..Parts::default() });
    assert_eq!(message, "op 2 (HeadLinear): an input of 28 columns for 3 heads of at least 5");
    let message = defect(&Parts { rotary_dim: 2, ..Parts::default() });
    assert_eq!(message, "op 3 (LatentPost): a rotary embedding of 2 elements beside a latent, not 4");
    assert!(defect(&Parts { norm: 5, ..Parts::default() }).contains("the norm's weight"));
    assert_eq!(
        defect(&Parts { posts: false, ..Parts::default() }),
        "PagedAttention reads KV group 0, layer 0 before any op writes it"
    );
    let own = HeadShape { values: Values::Own, ..HeadShape::latent(HEADS, RANK, ROTATED) };
    assert!(defect(&Parts { heads: own, norm: own.dim, ..Parts::default() }).ends_with("no part of the keys"));
    let whole = HeadShape { values: Values::Prefix(RANK + ROTATED), ..own };
    let message = defect(&Parts { heads: whole, norm: own.dim, ..Parts::default() });
    assert!(message.ends_with("is no latent that all heads share"), "{message}");
}

fn program() -> Program {
    let latent = TinyLatent { rank: 16, rotated: 4, content: 12, value: 10, query_rank: None };
    latent.model(3, TinyModel::default()).build().unwrap().0
}

#[test]
fn the_cache_has_one_row_that_all_heads_read() {
    let program = program();
    assert_eq!(program.kv_groups[0].elements_per_token(), 2 * 20, "two layers");
    let find = |name: &str| program.ops.iter().find(|op| op.name() == name).unwrap();
    let cost = |name, step: &StepShape| op_cost(&program, find(name), step, ElementBytes::HALF);
    let decode = StepShape::decode(1, 100);
    let attention = cost("PagedAttention", &decode);
    assert_eq!((attention.kv_bytes, attention.flops), (2 * 100 * 20, 2 * 100 * 3 * (20 + 16)));
    assert_eq!(attention.activation_bytes, 2 * 3 * (20 + 16));
    let post = cost("LatentPost", &decode);
    assert_eq!((post.kv_bytes, post.weight_bytes), (2 * 20, 4 * 16));
    assert_eq!(post.activation_bytes, 2 * (20 + 2 * 3 * 4), "the latent, and the rotated columns twice");
    let keys = cost("HeadLinear", &decode);
    assert_eq!((keys.weight_bytes, keys.flops), (4 * 3 * 16 * 12, 2 * 3 * 16 * 12));
    assert_eq!(keys.activation_bytes, 2 * 3 * (12 + 16), "the columns that are used");
    assert_eq!(cost("HeadLinear", &StepShape::default()), Cost::default());
}

#[test]
fn a_step_is_priced_as_the_sum_of_its_ops() {
    let program = program();
    let pricer = StepPricer::new(&program, ElementBytes::HALF);
    for tokens in [1, 2, 7, 40] {
        let mut batch = StepBatch::with_capacity(64, 1, 4, 1);
        batch.token_ids = vec![0; tokens];
        batch.query_start = vec![0, tokens as u32];
        batch.seq_lens = vec![tokens as u32 + 9];
        let expected = step_cost(&program, &StepShape::from_batch(&batch), ElementBytes::HALF);
        assert_eq!(pricer.price(&batch), expected, "{tokens} tokens");
    }
}

#[test]
fn dummy_weights_of_the_latent_s_norm_are_around_one() {
    let weights = DummyWeights::new(&program());
    let centre = |name: &str| weights.rule(name).map(|rule| rule.centre);
    assert_eq!((centre("0.latent_norm"), centre("0.k_b.0")), (Some(1.0), Some(0.0)));
}
