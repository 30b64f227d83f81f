//! Tests of encoder programs: the builder's checks, the cost by hand, and batches.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may panic, as it may")]

use octavo_ops::cost::{Cost, ElementBytes, StepShape, op_cost, step_cost};
use octavo_ops::*;

const K: usize = 12;
const H: usize = 8;
const OUT: usize = 6;
const MERGE: usize = 2;
const HEADS: HeadShape = HeadShape::new(2, 2, 4);

/// Builds an encoder of one layer. `edit` may corrupt an op before it is pushed.
fn build(edit: impl Fn(&mut Op)) -> Result<Program, ProgramError> {
    let mut b = ProgramBuilder::encoder("tiny", MERGE);
    let part =
        |tensor: &str, rows| vec![WeightPart { tensor: tensor.into(), rows, storage: StorageType::F32, slab: None }];
    let patches = b.buffer("patches", Rows::Tokens, K);
    let x = b.buffer("x", Rows::Tokens, H);
    let qkv = b.buffer("qkv", Rows::Tokens, HEADS.qkv_cols());
    let q = b.buffer("q", Rows::Tokens, H);
    let merged = b.buffer("merged", Rows::Merged, MERGE * H);
    let out = b.buffer("out", Rows::Merged, OUT);
    let patch = b.weight("patch", K, part("patch", H));
    let table = b.weight("table", H, part("table", 9));
    let qkv_w = b.weight("qkv", H, part("qkv", HEADS.qkv_cols()));
    let out_w = b.weight("out", MERGE * H, part("out", OUT));
    let linear = |weight, input, out| Op::Linear(Linear { weight, bias: None, scale: 1.0, input, add: None, out });
    let rope = Rope { style: RopeStyle::NeoX, inv_freq: vec![1.0, 1.0], magnitude: 1.0, streams: vec![0, 1] };
    let kv = KvPlace::Step;
    let mut ops = vec![
        Op::Patches { out: patches },
        linear(patch, patches, x),
        Op::EmbedTaps(EmbedTaps { table, out: x }),
        linear(qkv_w, x, qkv),
        Op::QkvPost(QkvPost { input: qkv, out: q, heads: HEADS, norm: None, rope: Some(rope), kv }),
        Op::SegmentAttention(SegmentAttention { q, out: x, heads: HEADS, scale: 0.5, window: None }),
        Op::Act(Act { kind: GluKind::Gelu, input: x, out: x }),
        Op::MergeRows(MergeRows { input: x, out: merged, kind: MergeKind::Concatenated }),
        linear(out_w, merged, out),
        Op::StoreRows { input: out, column: OUT },
    ];
    ops.iter_mut().for_each(edit);
    ops.into_iter().for_each(|op| b.push(op));
    b.finish()
}

fn spoil(edit: impl Fn(&mut Op)) -> String {
    build(edit).unwrap_err().to_string()
}

#[test]
fn a_sound_encoder_passes() {
    let program = build(|_| {}).unwrap();
    assert_eq!((program.kind(), program.merge(), program.position_streams()), (ProgramKind::Encoder, MERGE, 2));
    assert_eq!((program.media_columns(), program.forward_ops().len()), (2 * OUT, 10));
    assert_eq!(program.step_kv(), KvGroup { layers: vec![HEADS], scales: vec![], window: None });
}

#[test]
fn the_builder_reports_what_an_encoder_lacks_or_cannot_have() {
    let kv = KvPlace::Cache { group: 0, layer: 0 };
    let cached = spoil(|op| {
        if let Op::QkvPost(q) = op {
            q.kv = kv;
        }
    });
    assert_eq!(cached, "op 4 (QkvPost) has no meaning in an encoder");
    let other = spoil(|op| {
        if let Op::SegmentAttention(a) = op {
            a.heads.kv = 1;
        }
    });
    assert!(other.starts_with("SegmentAttention reads keys of HeadShape { q: 2, kv: 1, dim: 4,"), "{other}");
    let narrow = spoil(|op| {
        if let Op::MergeRows(m) = op {
            m.input = BufferId(0);
        }
    });
    assert_eq!(narrow, "op 7 (MergeRows): the size of the output is 16, expected 24");
    let mean = spoil(|op| {
        if let Op::MergeRows(m) = op {
            m.kind = MergeKind::Mean;
        }
    });
    assert_eq!(mean, "op 7 (MergeRows): the size of the output is 16, expected 8");
    let unmerged = spoil(|op| {
        if let Op::StoreRows { input, .. } = op {
            *input = BufferId(1);
        }
    });
    assert_eq!(unmerged, "op 9 (StoreRows): buffer 'x' has T rows, expected M");
    assert_eq!(
        ProgramBuilder::encoder("empty", 1).finish().unwrap_err().to_string(),
        "an encoder program stores rows or returns hidden states"
    );
    let mut decoder = ProgramBuilder::new("decoder", 10);
    let out = decoder.buffer("patches", Rows::Tokens, K);
    decoder.push(Op::Patches { out });
    assert_eq!(decoder.finish().unwrap_err().to_string(), "op 0 (Patches) has no meaning in a decoder");
}

#[test]
fn the_cost_of_an_encoder_is_that_computed_by_hand() {
    let program = build(|_| {}).unwrap();
    // Two images of 4 and 6 patches; activations of 2 bytes.
    let step = StepShape::encode(&[4, 6]);
    let cost = |index: usize| op_cost(&program, &program.ops[index], &step, ElementBytes::HALF);
    let patches = cost(0);
    assert_eq!((patches.activation_bytes, patches.written_bytes), (10 * 12 * 3, 10 * 12 * 2));
    let taps = cost(2);
    assert_eq!((taps.weight_bytes, taps.flops), (4 * 10 * 8 * 4, 8 * 10 * 8));
    let attention = cost(5);
    assert_eq!(attention.flops, 4 * (16 + 36) * 8);
    assert_eq!((attention.kv_bytes, attention.activation_bytes), (10 * 2 * 8 * 2, 2 * 10 * 8 * 2));
    let merged = cost(8);
    assert_eq!(merged.flops, 2 * 5 * 6 * 16, "half as many rows");
    assert_eq!(cost(9), Cost { activation_bytes: 2 * 5 * 6 * 2, written_bytes: 5 * 6 * 2, ..Cost::default() });
    let mut sum = Cost::default();
    (0..10).for_each(|index| sum += cost(index));
    assert_eq!(step_cost(&program, &step, ElementBytes::HALF), sum);
}

#[test]
fn each_segment_owns_blocks_of_its_own() {
    let mut batch = EncodeBatch::default();
    batch.push_segment(20);
    batch.push_segment(3);
    batch.push_segment(16);
    batch.rows.positions = vec![7; 39];
    let mut step = StepBatch { seq_lens: vec![9], slot_mapping: vec![vec![1]], ..StepBatch::default() };
    assert_eq!(batch.rows.in_own_blocks(16, &mut step), 4);
    assert_eq!(step.block_tables, [BlockTables::from_iter([vec![0, 1], vec![2], vec![3]])]);
    let slots: Vec<u32> = (0..20).chain(32..35).chain(48..64).collect();
    assert_eq!(step.slot_mapping, [slots]);
    assert_eq!((step.query_start, step.seq_lens), (vec![0, 20, 23, 39], vec![20, 3, 16]));
    assert_eq!((step.token_ids, step.positions), (vec![0; 39], vec![7; 39]));
}
