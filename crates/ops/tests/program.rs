//! Tests of storage sizes, the builder's checks and the cost model against figures computed by hand.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may panic, as it may")]

use octavo_ops::cost::{Cost, ElementBytes, Peaks, StepPricer, StepShape, op_cost, step_cost};
use octavo_ops::*;
use proptest::prelude::*;

const VOCAB: usize = 10;
const H: usize = 8;
const INNER: usize = 12;
const HEADS: HeadShape = HeadShape::new(4, 2, 2);

fn part(tensor: &str, rows: usize) -> WeightPart {
    WeightPart { tensor: tensor.into(), rows, storage: StorageType::F32, slab: None }
}

/// Builds one Llama-like layer. `edit` may corrupt an op before it is pushed.
fn build(edit: impl Fn(&mut Op)) -> Result<Program, ProgramError> {
    let mut b = ProgramBuilder::new("tiny", VOCAB);
    let x = b.buffer("x", Rows::Tokens, H);
    let y = b.buffer("y", Rows::Tokens, H);
    let qkv = b.buffer("qkv", Rows::Tokens, HEADS.qkv_cols());
    let q = b.buffer("q", Rows::Tokens, HEADS.q_cols());
    let o = b.buffer("o", Rows::Tokens, HEADS.q_cols());
    let gate_up = b.buffer("gate_up", Rows::Tokens, 2 * INNER);
    let h = b.buffer("h", Rows::Tokens, INNER);
    let last = b.buffer("last", Rows::Sampled, H);
    let normed = b.buffer("normed", Rows::Sampled, H);
    let logits = b.buffer("logits", Rows::Sampled, VOCAB);
    let table = b.weight("embed", H, vec![part("embed", VOCAB)]);
    let norm = b.weight("norm", H, vec![part("norm", 1)]);
    let qkv_w = b.weight("qkv", H, vec![part("q", 8), part("k", 4), part("v", 4)]);
    let qk_norm = b.weight("qk_norm", HEADS.dim, vec![part("qk_norm", 1)]);
    let bias = b.weight("bias", 1, vec![part("bq", 8), part("bk", 4), part("bv", 4)]);
    let out_w = b.weight("out", H, vec![part("out", H)]);
    let gate_up_w = b.weight("gate_up", H, vec![part("gate", INNER), part("up", INNER)]);
    let down_w = b.weight("down", INNER, vec![part("down", H)]);
    let group = b.kv_group(KvGroup { layers: vec![HEADS], scales: vec![], window: None });
    let norm_op = |input, add, out| {
        Op::Norm(NormOp {
            kind: NormKind::Rms,
            weight: norm,
            bias: None,
            eps: 1e-5,
            unit_offset: false,
            input,
            add,
            out,
        })
    };
    let linear = |weight, bias, input, add, out| Op::Linear(Linear { weight, bias, scale: 1.0, input, add, out });
    let rope = Rope { style: RopeStyle::NeoX, inv_freq: vec![1.0], magnitude: 1.0, streams: vec![] };
    let norm_qk = QkNorm { q: qk_norm, k: qk_norm, eps: 1e-6, unit_offset: false };
    let (heads, layer) = (HEADS, 0);
    let mut ops = vec![
        Op::Embed(Embed { table, ids: EmbedIds::Tokens, scale: 1.0, add: false, out: x }),
        norm_op(x, None, y),
        linear(qkv_w, Some(bias), y, None, qkv),
        Op::QkvPost(QkvPost {
            input: qkv,
            out: q,
            heads,
            norm: Some(norm_qk),
            rope: Some(rope),
            kv: KvPlace::Cache { group, layer },
        }),
        Op::PagedAttention(PagedAttention {
            q,
            out: o,
            heads,
            scale: 0.7,
            window: None,
            spans: false,
            softcap: None,
            sinks: None,
            group,
            layer,
        }),
        linear(out_w, None, o, None, y),
        norm_op(y, Some(Residual::Before(x)), y),
        linear(gate_up_w, None, y, None, gate_up),
        Op::Glu(Glu { kind: GluKind::Silu, input: gate_up, out: h }),
        linear(down_w, None, h, Some(x), x),
        Op::GatherRows { input: x, out: last },
        norm_op(last, None, normed),
        Op::Logits(Logits { weight: table, input: normed, out: logits, scale: 1.0, softcap: None }),
        Op::Sample { logits },
    ];
    ops.iter_mut().for_each(edit);
    ops.into_iter().for_each(|op| b.push(op));
    b.finish()
}

fn tiny() -> Program {
    build(|_| {}).unwrap()
}

fn spoil(edit: impl Fn(&mut Op)) -> String {
    build(edit).unwrap_err().to_string()
}

#[test]
fn storage_sizes_are_those_of_the_formats() {
    let of_256 = |s: StorageType| s.bytes_for(256).unwrap();
    let sizes = StorageType::ALL.map(of_256);
    assert_eq!(sizes[..7], [1024, 512, 512, 144, 160, 176, 192]);
    assert_eq!(sizes[7..14], [272, 84, 110, 144, 176, 210, 136]);
    assert_eq!(sizes[14..], [176, 144, 136, 152, 296, 288, 144, 144]);
    assert_eq!(StorageType::Q4_0.bytes_for(48), None, "half a block");
    assert_eq!(StorageType::Q6K.bytes_for(128), None);
    assert_eq!(StorageType::F32.bytes_for(usize::MAX), None, "overflow");
    assert_eq!(StorageType::Q4K.bytes_for(0), Some(0));
    assert_eq!(StorageType::Q4K.to_string(), "Q4_K");
    let scales = [0, 1, 2, 127, 128, 254].map(|exponent| 2.0 * f64::from(e8m0_halved(exponent)));
    assert_eq!(scales, [-127, -126, -125, 0, 1, 127].map(|power| 2f64.powi(power)));
}

#[test]
fn an_order_has_an_input_for_each_column() {
    let error = spoil(|op| {
        if let Op::Glu(Glu { input, out, .. }) = *op {
            *op = Op::GatherColumns(GatherColumns { order: WeightId(1), input, out });
        }
    });
    assert_eq!(error, "op 8 (GatherColumns): the size of the order is 8, expected 12");
}

#[test]
fn a_sound_program_passes() {
    let program = tiny();
    assert_eq!(program.forward_ops().len(), program.ops.len() - 1);
    let parameters = 80 + 8 + 16 * 8 + 2 + 16 + 64 + 24 * 8 + 96;
    assert_eq!(program.parameters(), parameters);
    assert_eq!(program.weight_bytes(), 4 * parameters);
    assert_eq!(program.kv_groups[0].elements_per_token(), 8);
}

#[test]
fn the_scale_of_an_nvfp4_matrix_is_kept_once_for_a_row() {
    let part = |storage, rows| WeightPart { storage, ..part("part", rows) };
    let parts = vec![part(StorageType::Nvfp4, 6), part(StorageType::Q4_0, 2)];
    let weight = Weight { name: "both".into(), rows: 8, cols: 128, parts };
    assert_eq!(weight.bytes(), 6 * 4 * 22 + 2 * 4 * 18);
    assert_eq!(weight.kept_bytes(), 6 * (4 * 18 + 4) + 2 * 4 * 18);
}

#[test]
fn the_builder_reports_the_first_defect() {
    let message = spoil(|op| {
        if let Op::Linear(l) = op {
            l.input = BufferId(6);
        }
    });
    assert_eq!(message, "op 2 (Linear) reads buffer 'h' before any op writes it");
}

#[test]
fn the_builder_checks_sizes() {
    let message = spoil(|op| {
        if let Op::Glu(g) = op {
            g.out = BufferId(0);
        }
    });
    assert_eq!(message, "op 8 (Glu): the size of the input is 24, expected 16");
    let message = spoil(|op| {
        if let Op::Linear(l) = op {
            l.bias = l.bias.map(|_| WeightId(1));
        }
    });
    assert_eq!(message, "op 2 (Linear): the size of the bias is 8, expected 16");
    for residual in [Residual::Before, Residual::After] {
        let message = spoil(|op| match op {
            Op::Norm(n) if n.add.is_some() => n.add = Some(residual(BufferId(2))),
            _ => {}
        });
        assert_eq!(message, "op 6 (Norm): the size of the residual is 16, expected 8");
    }
}

#[test]
fn the_builder_checks_rows() {
    let message = spoil(|op| match op {
        Op::Norm(n) if n.input == BufferId(7) => n.out = BufferId(0),
        _ => {}
    });
    assert_eq!(message, "op 11 (Norm): buffer 'x' has T rows, expected R");
    let message = spoil(|op| {
        if let Op::Logits(l) = op {
            l.input = BufferId(0);
        }
    });
    assert_eq!(message, "op 12 (Logits): buffer 'x' has T rows, expected R");
}

#[test]
fn the_builder_checks_heads() {
    let heads = |op: &mut Op, f: &dyn Fn(&mut QkvPost)| {
        if let Op::QkvPost(q) = op {
            f(q);
        }
    };
    assert!(spoil(|op| heads(op, &|q| q.kv = KvPlace::Cache { group: 0, layer: 1 })).contains("layer 1: HeadShape"));
    assert!(spoil(|op| heads(op, &|q| q.kv = KvPlace::Cache { group: 1, layer: 0 })).contains("does not match None"));
    let long = |q: &mut QkvPost| q.rope.iter_mut().for_each(|r| r.inv_freq = vec![1.0; 2]);
    assert!(spoil(|op| heads(op, &long)).contains("a rotary embedding of 4 elements in heads of 2"));
    let wide = |q: &mut QkvPost| q.norm.iter_mut().for_each(|n| n.q = WeightId(1));
    assert!(spoil(|op| heads(op, &wide)).contains("norms of [8, 2] elements, expected 2 each or [8, 4]"));
    let message = spoil(|op| {
        if let Op::PagedAttention(a) = op {
            a.window = Some(0);
        }
    });
    assert!(message.contains("a window of no tokens"));
    let message = spoil(|op| {
        if let Op::PagedAttention(a) = op {
            a.sinks = Some(WeightId(1));
        }
    });
    assert_eq!(message, "op 4 (PagedAttention): the size of the sinks is 8, expected 4");
}

#[test]
fn the_builder_checks_activations() {
    let with = |alpha, limit| {
        let edit = |op: &mut Op| {
            if let Op::Glu(glu) = op {
                glu.kind = GluKind::ClampedSwiglu { alpha, limit };
            }
        };
        build(edit).map_err(|error| error.to_string())
    };
    assert!(with(1.702, 7.0).is_ok() && with(1.702, f32::INFINITY).is_ok());
    for (alpha, limit) in [(1.0, 0.0), (1.0, -7.0), (1.0, f32::NAN), (f32::NAN, 7.0)] {
        let message = with(alpha, limit).unwrap_err();
        assert!(message.starts_with("op 8 (Glu): the activation has the factor"), "{message}");
    }
    let mut b = ProgramBuilder::new("no gate", VOCAB);
    let x = b.buffer("x", Rows::Tokens, H);
    let table = b.weight("embed", H, vec![part("embed", VOCAB)]);
    b.push(Op::Embed(Embed { table, ids: EmbedIds::Tokens, scale: 1.0, add: false, out: x }));
    b.push(Op::Act(Act { kind: GluKind::ClampedSwiglu { alpha: 1.0, limit: 7.0 }, input: x, out: x }));
    assert_eq!(b.finish().unwrap_err().to_string(), "op 1 (Act): ClampedSwiglu needs a gate");
}

#[test]
fn attention_reads_what_was_written_and_sample_is_last() {
    let mut b = ProgramBuilder::new("early", VOCAB);
    let x = b.buffer("x", Rows::Tokens, H);
    let table = b.weight("embed", H, vec![part("embed", VOCAB)]);
    let group = b.kv_group(KvGroup { layers: vec![HEADS], scales: vec![], window: Some(4) });
    b.push(Op::Embed(Embed { table, ids: EmbedIds::Tokens, scale: 1.0, add: false, out: x }));
    let attention = PagedAttention {
        q: x,
        out: x,
        heads: HEADS,
        scale: 1.0,
        window: Some(4),
        spans: false,
        softcap: None,
        sinks: None,
        group,
        layer: 0,
    };
    b.push(Op::PagedAttention(attention));
    let message = b.finish().unwrap_err().to_string();
    assert_eq!(message, "PagedAttention reads KV group 0, layer 0 before any op writes it");

    let mut b = ProgramBuilder::new("endless", VOCAB);
    let x = b.buffer("x", Rows::Tokens, H);
    let table = b.weight("embed", H, vec![part("embed", VOCAB)]);
    b.push(Op::Embed(Embed { table, ids: EmbedIds::Tokens, scale: 1.0, add: false, out: x }));
    assert_eq!(b.finish().unwrap_err().to_string(), "a decoder program ends with Sample");
}

#[test]
fn the_builder_refuses_weights_that_cannot_be() {
    let finish = |declare: &dyn Fn(&mut ProgramBuilder)| {
        let mut b = ProgramBuilder::new("odd", VOCAB);
        declare(&mut b);
        b.finish().unwrap_err().to_string()
    };
    assert_eq!(finish(&|b| _ = b.weight("w", 4, vec![])), "weight 'w' has no parts");
    let q4 = WeightPart { tensor: "t".into(), rows: 1, storage: StorageType::Q4_0, slab: None };
    let message = finish(&|b| _ = b.weight("w", 40, vec![q4.clone()]));
    assert_eq!(message, "tensor 't': rows of 40 elements do not fill Q4_0 blocks of 32");
    let message = finish(&|b| _ = b.weight("w", 1 << 40, vec![part("t", 1 << 40)]));
    assert_eq!(message, "weight 'w' of 1099511627776 columns is too large");
    let message = finish(&|b| _ = b.weight("w", 1, vec![part("t", usize::MAX), part("u", 2)]));
    assert_eq!(message, "weight 'w' of 1 columns is too large");
}

#[test]
fn sizes_of_heads_saturate() {
    let heads = HeadShape::new(usize::MAX, usize::MAX, 2);
    assert_eq!((heads.q_cols(), heads.qkv_cols()), (usize::MAX, usize::MAX));
}

#[test]
fn costs_are_those_worked_out_by_hand() {
    let program = tiny();
    // The step has three rows of one sequence that then has 5 keys, and a decode that then has 7 keys; both are
    // sampled.
    let step = StepShape { tokens: 4, sampled: 2, sequences: vec![(3, 5), (1, 7)], ..StepShape::default() };
    let cost = |op: usize| op_cost(&program, &program.ops[op], &step, ElementBytes::F32);
    // The arguments are the bytes of weights, KV and activations, the bytes written and the FLOPs.
    let expect = |weight_bytes, kv_bytes, activation_bytes, written_bytes, flops| Cost {
        weight_bytes,
        kv_bytes,
        activation_bytes,
        written_bytes,
        flops,
    };
    assert_eq!(cost(0), expect(4 * 32, 0, 4 * 32, 4 * 32, 0), "Embed reads the rows of its tokens");
    assert_eq!(cost(1), expect(32, 0, 2 * 4 * 32, 4 * 32, 4 * 32), "Norm");
    assert_eq!(cost(6), expect(32, 0, 4 * 4 * 32, 2 * 4 * 32, 5 * 32), "Norm with a residual, read and written");
    let mut after = program.ops[6].clone();
    if let Op::Norm(norm) = &mut after {
        (norm.add, norm.out) = (norm.add.map(|residual| Residual::After(residual.buffer())), BufferId(0));
    }
    let after = op_cost(&program, &after, &step, ElementBytes::F32);
    assert_eq!(after, expect(32, 0, 3 * 4 * 32, 4 * 32, 5 * 32), "Norm whose output is added, written once");
    assert_eq!(cost(2), expect(16 * 8 * 4 + 64, 0, 4 * (32 + 64), 4 * 64, 2 * 4 * 16 * 8), "Linear with a bias");
    assert_eq!(cost(9), expect(96 * 4, 0, 4 * 4 * (12 + 8 + 8), 4 * 4 * 8, 2 * 4 * 96), "Linear that adds");
    assert_eq!(cost(3), expect(16, 4 * 8 * 4, 4 * 4 * (16 + 8), 4 * 8 * 4 + 4 * 4 * 8, 4 * 12 * 7), "QkvPost");
    // The pairs are 3 + 4 + 5 and 7; the keys are 5 and 7.
    assert_eq!(cost(4), expect(0, 12 * 8 * 4, 4 * 4 * 16, 4 * 4 * 8, 4 * 19 * 8), "PagedAttention");
    let mut sinks = program.ops[4].clone();
    if let Op::PagedAttention(a) = &mut sinks {
        a.sinks = Some(WeightId(3));
    }
    let sinks = |step| op_cost(&program, &sinks, step, ElementBytes::F32).weight_bytes;
    assert_eq!((sinks(&step), sinks(&StepShape { tokens: 0, ..step.clone() })), (8, 0), "the sinks are read once");
    assert_eq!(cost(8), expect(0, 0, 4 * 4 * (24 + 12), 4 * 4 * 12, 6 * 48), "Glu");
    assert_eq!(cost(10), expect(0, 0, 2 * 2 * 32, 2 * 32, 0), "GatherRows");
    let gather = Op::GatherColumns(GatherColumns { order: WeightId(1), input: BufferId(0), out: BufferId(1) });
    let gather = op_cost(&program, &gather, &step, ElementBytes::F32);
    assert_eq!(gather, expect(32, 0, 2 * 4 * 32, 4 * 32, 0), "GatherColumns reads its order");
    assert_eq!(cost(12), expect(320, 0, 2 * 32 + 2 * 40, 2 * 40, 2 * 2 * 80), "Logits");
    let half = op_cost(&program, &program.ops[12], &step, ElementBytes::HALF);
    assert_eq!(half.activation_bytes, 2 * 16 + 2 * 40, "logits are f32");
    let mut total = Cost::default();
    (0..program.ops.len()).for_each(|op| total += cost(op));
    assert_eq!(step_cost(&program, &step, ElementBytes::F32), total);
    assert_eq!(total.bytes(), total.weight_bytes + total.kv_bytes + total.activation_bytes);
    assert_eq!(total.read_bytes() + total.written_bytes, total.bytes());
}

#[test]
fn a_step_is_priced_as_the_sum_of_its_ops() {
    let windowed = |window| {
        let mut program = tiny();
        for op in &mut program.ops {
            if let Op::PagedAttention(a) = op {
                a.window = window;
            }
        }
        program
    };
    let programs = [windowed(None), windowed(Some(1)), windowed(Some(4)), pooling(Rows::Sampled).unwrap()];
    for program in programs {
        for size in [ElementBytes::F32, ElementBytes::HALF] {
            let pricer = StepPricer::new(&program, size);
            // Sequences are `(query rows, keys)`; then come the numbers of sampled and pooled rows.
            for (sequences, sampled, pooled) in
                [(&[(1, 1)][..], 1, 0), (&[(3, 5), (1, 7)], 2, 0), (&[(6, 6), (1, 3), (2, 9)], 0, 2), (&[(4, 4)], 4, 1)]
            {
                let mut batch = StepBatch::with_capacity(16, 4, 4, 1);
                batch.query_start.push(0);
                for &(queries, keys) in sequences {
                    batch.token_ids.extend(vec![0; queries]);
                    batch.query_start.push(batch.token_ids.len() as u32);
                    batch.seq_lens.push(keys as u32);
                }
                batch.sampled_rows.extend(vec![0; sampled]);
                batch.pooled_rows.extend(vec![0; pooled]);
                let expected = step_cost(&program, &StepShape::from_batch(&batch), size);
                assert_eq!(pricer.price(&batch), expected, "{sequences:?}");
            }
        }
    }
}

#[test]
fn the_window_bounds_what_attention_reads() {
    let mut program = tiny();
    for op in &mut program.ops {
        if let Op::PagedAttention(a) = op {
            a.window = Some(4);
        }
    }
    let step = StepShape { tokens: 4, sequences: vec![(3, 5), (1, 7)], ..StepShape::default() };
    let cost = op_cost(&program, &program.ops[4], &step, ElementBytes::F32);
    // Positions 2, 3 and 4 see 3, 4 and 4 keys, five different ones together; position 6 sees 4.
    assert_eq!((cost.flops, cost.kv_bytes), (4 * 15 * 8, 9 * 8 * 4));
    let head = op_cost(&program, &program.ops[12], &step, ElementBytes::F32);
    assert_eq!(head, Cost::default(), "no row reaches the head");
}

/// Builds a head with rows that are returned beside the sampled ones. The logits read rows of kind `from`.
fn pooling(from: Rows) -> Result<Program, ProgramError> {
    let mut b = ProgramBuilder::new("pooling", VOCAB);
    let x = b.buffer("x", Rows::Tokens, H);
    let pooled = b.buffer("pooled", Rows::Pooled, H);
    let embedding = b.buffer("embedding", Rows::Pooled, H);
    let last = b.buffer("last", Rows::Sampled, H);
    let logits = b.buffer("logits", Rows::Sampled, VOCAB);
    let table = b.weight("embed", H, vec![part("embed", VOCAB)]);
    let weight = b.weight("norm", H, vec![part("norm", 1)]);
    b.push(Op::Embed(Embed { table, ids: EmbedIds::Tokens, scale: 1.0, add: false, out: x }));
    b.push(Op::GatherRows { input: x, out: pooled });
    let (kind, bias, eps, unit_offset, add) = (NormKind::Rms, None, 1e-5, false, None);
    b.push(Op::Norm(NormOp { kind, weight, bias, eps, unit_offset, input: pooled, add, out: embedding }));
    b.push(Op::GatherRows { input: x, out: last });
    let input = if from == Rows::Pooled { embedding } else { last };
    b.push(Op::Logits(Logits { weight: table, input, out: logits, scale: 1.0, softcap: None }));
    b.push(Op::Sample { logits });
    b.finish()
}

#[test]
fn pooled_rows_are_returned_and_never_reach_the_head() {
    let program = pooling(Rows::Sampled).unwrap();
    assert_eq!(program.embedding().map(|id| program.buffers[id.0].name.as_str()), Some("embedding"));
    assert_eq!(tiny().embedding(), None);
    let message = pooling(Rows::Pooled).unwrap_err().to_string();
    assert!(message.contains("buffer 'embedding' has E rows, expected R"), "{message}");
    let step =
        |pooled| StepShape { tokens: 4, sampled: 0, pooled, sequences: vec![(3, 5), (1, 7)], ..StepShape::default() };
    let cost = |pooled, op: usize| op_cost(&program, &program.ops[op], &step(pooled), ElementBytes::F32);
    assert_eq!((cost(0, 1), cost(0, 2), cost(2, 4)), Default::default(), "no rows, no cost");
    assert_eq!((cost(2, 1).activation_bytes, cost(2, 2).weight_bytes, cost(2, 2).flops), (128, 32, 4 * 16));
}

#[test]
fn the_roofline_is_the_slower_of_memory_and_arithmetic() {
    let cost = Cost { weight_bytes: 100, kv_bytes: 50, activation_bytes: 50, flops: 1000, ..Cost::default() };
    assert_eq!(cost.roofline_seconds(100.0, 1000.0), 2.0);
    assert_eq!(cost.roofline_seconds(1000.0, 100.0), 10.0);
    // Activations may stay in caches, so they do not count.
    assert_eq!(cost.bound_seconds(&Peaks { bandwidth: 100.0, flops: 1000.0 }), 1.5);
    assert_eq!(cost.bound_seconds(&Peaks { bandwidth: 1000.0, flops: 100.0 }), 10.0);
}

fn batch() -> StepBatch {
    StepBatch {
        pooled_lens: vec![],
        token_types: vec![],
        seen_ends: vec![],
        token_ids: vec![1, 2, 3, 4],
        positions: vec![0, 1, 2, 9],
        slot_mapping: vec![vec![16, 17, 18, 41]],
        block_tables: vec![BlockTables::from_iter([vec![1], vec![3, 2]])],
        query_start: vec![0, 3, 4],
        seq_lens: vec![3, 10],
        sampled_rows: vec![2, 3],
        pooled_rows: vec![2],
        seats: vec![0, 1],
        adapters: vec![],
        injected: vec![],
    }
}

#[test]
fn a_batch_knows_its_sequences() {
    let mut batch = batch();
    assert_eq!((batch.tokens(), batch.sequences()), (4, 2));
    assert_eq!((batch.query_range(0), batch.query_range(1)), (0..3, 3..4));
    assert_eq!(batch.tables(0).row(1), [3, 2]);
    assert_eq!(
        StepShape::from_batch(&batch),
        StepShape { tokens: 4, sampled: 2, pooled: 1, sequences: vec![(3, 3), (1, 10)], ..StepShape::default() }
    );
    let memory = batch.token_ids.as_ptr();
    batch.clear();
    assert_eq!((batch.tokens(), batch.sequences(), batch.slot_mapping.len()), (0, 0, 1));
    batch.token_ids.push(1);
    assert_eq!(batch.token_ids.as_ptr(), memory, "its memory is kept");
}

proptest! {
    /// Checks that the number of query-key pairs does not depend on the chunks of a prompt.
    #[test]
    fn chunks_cost_the_same_attention(tokens in 1usize..60, chunk in 1usize..20, window in proptest::option::of(1usize..30)) {
        let mut program = tiny();
        for op in &mut program.ops {
            if let Op::PagedAttention(a) = op {
                a.window = window;
            }
        }
        let flops = |step: &StepShape| op_cost(&program, &program.ops[4], step, ElementBytes::F32).flops;
        let chunks = (0..tokens).step_by(chunk).map(|start| {
            let end = (start + chunk).min(tokens);
            flops(&StepShape { tokens: end - start, sequences: vec![(end - start, end)], ..StepShape::default() })
        });
        prop_assert_eq!(chunks.sum::<u64>(), flops(&StepShape::prefill(tokens)));
    }

    #[test]
    fn storage_is_proportional_to_blocks(blocks in 0usize..10_000, index in 0usize..StorageType::ALL.len()) {
        let storage = StorageType::ALL[index];
        let bytes = storage.bytes_for(blocks * storage.block_elements());
        prop_assert_eq!(bytes, Some(blocks * storage.block_bytes()));
    }
}

#[test]
fn scales_of_keys_and_values_are_positive_and_those_of_all_layers() {
    let error = |heads: HeadShape, scales: &[(f32, f32)]| {
        let mut b = ProgramBuilder::new("test", 10);
        let scales = scales.iter().map(|&(key, value)| KvScales { key, value }).collect();
        b.kv_group(KvGroup { layers: vec![heads; 2], scales, window: None });
        b.finish().unwrap_err().to_string()
    };
    let rule = "a KV group of 2 layers with the scales of 1";
    assert_eq!(error(HEADS, &[(1.0, 1.0)]), rule);
    assert_eq!(error(HEADS, &[(1.0, 1.0), (0.5, 0.0)]), "keys and values with the scales 0.5 and 0");
    assert_eq!(error(HEADS, &[(f32::NAN, 1.0), (1.0, 1.0)]), "keys and values with the scales NaN and 1");
    let latent = HeadShape::latent(4, 16, 8);
    assert_eq!(error(latent, &[(1.0, 1.0), (0.5, 1.0)]), "values with the scale 1, of keys with the scale 0.5");
}
