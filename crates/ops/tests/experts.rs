//! Programs with mixtures of experts: their rules and their cost.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use octavo_ops::cost::{Cost, ElementBytes, StepPricer, StepShape, op_cost, step_cost};
use octavo_ops::testing::{MemoryWeights, TinyExperts, TinyModel};
use octavo_ops::{
    BufferId, Embed, EmbedIds, ExpertGroups, ExpertLinear, GroupScore, Op, Program, ProgramBuilder, ProgramError,
    Route, RouteScores, Rows, Slab, StepBatch, StorageType, WeightPart, WeightSource,
};

const TOKENS: usize = 50;
const H: usize = 8;
const E: usize = 4;
const K: usize = 2;
const N: usize = 3;

/// The parameters of a program that a test may spoil.
struct Parts {
    chosen: usize,
    experts: usize,
    groups: Option<ExpertGroups>,
    rows: Vec<usize>,
    out: Rows,
    routing: Option<BufferId>,
}

impl Default for Parts {
    fn default() -> Self {
        let out = Rows::Routed(K);
        Self { chosen: K, experts: E, groups: None, rows: vec![N; E], out, routing: None }
    }
}

/// Builds an embedding, a router and the product of experts. The end of the program is missing.
fn build(parts: &Parts) -> (ProgramBuilder, Op) {
    let mut b = ProgramBuilder::new("experts", TOKENS);
    let part = |tensor: &str, rows| WeightPart { tensor: tensor.into(), rows, storage: StorageType::F32, slab: None };
    let x = b.buffer("x", Rows::Tokens, H);
    let routing = b.routing("routing", parts.chosen);
    let out = b.buffer("out", parts.out, N);
    let table = b.weight("embed", H, vec![part("embed", TOKENS)]);
    let router = b.weight("router", H, vec![part("router", E)]);
    let weight = b.weight("experts", H, parts.rows.iter().map(|&rows| part("experts", rows)).collect());
    b.push(Op::Embed(Embed { table, ids: EmbedIds::Tokens, scale: 1.0, add: false, out: x }));
    b.push(Op::Route(Route {
        weight: router,
        bias: None,
        site: None,
        correction: None,
        scores: RouteScores::Softmax,
        groups: parts.groups,
        normalise: true,
        scale: 1.0,
        input: x,
        out: routing,
    }));
    let routing = parts.routing.unwrap_or(routing);
    let linear = ExpertLinear { weight, bias: None, experts: parts.experts, input: x, routing, out };
    (b, Op::ExpertLinear(linear))
}

fn defect(parts: &Parts) -> String {
    let (mut b, op) = build(parts);
    b.push(op);
    match b.finish() {
        Err(error) => error.to_string(),
        Ok(_) => unreachable!("the program has no end"),
    }
}

#[test]
fn the_builder_checks_experts() {
    assert_eq!(defect(&Parts::default()), "a decoder program ends with Sample", "all else is well");
    assert_eq!(defect(&Parts { chosen: 5, ..Parts::default() }), "op 1 (Route): 5 of 4 experts are chosen");
    let groups = Some(ExpertGroups { count: 4, kept: 1, score: GroupScore::Best });
    assert!(defect(&Parts { groups, ..Parts::default() }).starts_with("op 1 (Route): 2 of 4 experts are chosen from"));
    let groups = Some(ExpertGroups { count: 3, kept: 3, score: GroupScore::Best });
    assert!(
        defect(&Parts { groups, ..Parts::default() }).contains("are chosen from"),
        "four experts are no three groups"
    );
    let uneven = Parts { rows: vec![2, 4, 2, 4], ..Parts::default() };
    assert_eq!(defect(&uneven), "op 2 (ExpertLinear): the parts of weight 'experts' are not those of 4 equal matrices");
    let message = defect(&Parts { experts: 2, rows: vec![N; 2], ..Parts::default() });
    assert_eq!(message, "op 2 (ExpertLinear): 2 experts, the router has Some(4)");
    let message = defect(&Parts { out: Rows::Tokens, ..Parts::default() });
    assert_eq!(message, "op 2 (ExpertLinear): buffer 'out' has T rows, expected 2T");
    let message = defect(&Parts { routing: Some(BufferId(0)), ..Parts::default() });
    assert_eq!(message, "op 2 (ExpertLinear): buffer 'x' has numbers, expected experts");
}

fn model(count: usize, chosen: usize) -> TinyModel {
    TinyModel {
        experts: Some(TinyExperts { count, chosen, shared: true, ..TinyExperts::default() }),
        ..TinyModel::default()
    }
}

fn program(count: usize, chosen: usize) -> Program {
    model(count, chosen).build().unwrap().0
}

#[test]
fn experts_cost_what_they_read() {
    let program = program(16, 2);
    let (hidden, inner) = (24u64, 40u64);
    let find = |name: &str| program.ops.iter().find(|op| op.name() == name).unwrap();
    let cost = |name, tokens| op_cost(&program, find(name), &StepShape::prefill(tokens), ElementBytes::F32);
    let an_expert = 4 * 2 * inner * hidden;
    // One token uses two experts; a hundred use all.
    assert_eq!(cost("ExpertLinear", 1).weight_bytes, 2 * an_expert);
    assert_eq!(cost("ExpertLinear", 100).weight_bytes, 16 * an_expert);
    assert_eq!(cost("ExpertLinear", 3).flops, 2 * (3 * 2) * 2 * inner * hidden);
    assert_eq!(cost("ExpertLinear", 0), Cost::default());
    let route = cost("Route", 3);
    assert_eq!((route.weight_bytes, route.written_bytes), (4 * 16 * hidden, 8 * 3 * 2));
    let sum = cost("ExpertSum", 3);
    assert_eq!((sum.flops, sum.written_bytes), (2 * 3 * 2 * hidden, 4 * 3 * hidden));
    assert_eq!(cost("GateRows", 3).activation_bytes, 4 * (3 + 2 * 3 * inner));
}

#[test]
fn a_step_with_experts_is_priced_as_the_sum_of_its_ops() {
    let program = program(12, 3);
    let pricer = StepPricer::new(&program, ElementBytes::HALF);
    for tokens in [1, 2, 3, 7, 40] {
        let mut batch = StepBatch::with_capacity(64, 1, 4, 1);
        batch.token_ids = vec![0; tokens];
        batch.query_start = vec![0, tokens as u32];
        batch.seq_lens = vec![tokens as u32];
        let expected = step_cost(&program, &StepShape::from_batch(&batch), ElementBytes::HALF);
        assert_eq!(pricer.price(&batch), expected, "{tokens} tokens");
    }
    let weights: u64 = program.weights.iter().map(octavo_ops::Weight::bytes).sum();
    // The embedding table is not read as a whole, unless as the head.
    assert!(pricer.fixed().weight_bytes <= weights, "every expert once");
}

#[test]
fn weights_in_bf16_cost_what_a_backend_keeps() {
    let mut program = program(12, 3);
    let step = StepShape::prefill(7);
    let bytes = |program: &Program, eight_bf16| {
        step_cost(program, &step, ElementBytes { eight_bf16, ..ElementBytes::HALF }).weight_bytes
    };
    assert_eq!(bytes(&program, 12), bytes(&program, 16), "weights in f32");
    program.weights.iter_mut().flat_map(|weight| &mut weight.parts).for_each(|part| part.storage = StorageType::BF16);
    // Rows have a multiple of eight elements.
    assert_eq!(4 * bytes(&program, 12), 3 * bytes(&program, 16));
}

#[test]
fn a_slab_is_a_part_of_its_tensor() {
    let mut weights = MemoryWeights::default();
    weights.insert("all", vec![3, 2, 2], &(0..12).map(|x| x as f32).collect::<Vec<_>>());
    let part = |index, count, rows| WeightPart {
        tensor: "all".into(),
        rows,
        storage: StorageType::F32,
        slab: Some(Slab { index, count }),
    };
    let second = part(1, 3, 2).read(2, &weights).unwrap();
    let numbers: Vec<f32> = second.bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!((second.shape, numbers), (vec![2, 2], vec![4.0, 5.0, 6.0, 7.0]));
    for wrong in [part(3, 3, 2), part(0, 2, 3), part(0, 4, 2), part(0, 3, 1)] {
        let error = wrong.read(2, &weights).unwrap_err().to_string();
        assert!(error.contains("its shape is [3, 2, 2]"), "{error}");
    }
    let slabs =
        TinyModel { experts: Some(TinyExperts { slabs: true, ..TinyExperts::default() }), ..TinyModel::default() };
    let (program, weights) = slabs.build().unwrap();
    let with_slabs = program.weights.iter().flat_map(|w| &w.parts).filter(|part| part.slab.is_some()).count();
    assert_eq!(with_slabs, 2 * 5 * 3, "two layers of five experts with gate, up and down");
    assert!(weights.tensor("0.experts.gate_up.0.all").is_ok());
}

#[test]
fn a_router_has_one_error_for_each_defect() {
    let (mut b, op) = build(&Parts::default());
    let Op::ExpertLinear(linear) = &op else { unreachable!("it was built so") };
    b.push(Op::ExpertLinear(ExpertLinear { routing: BufferId(2), ..linear.clone() }));
    let error = b.finish().unwrap_err();
    assert!(matches!(error, ProgramError::ReadBeforeWrite { .. }), "{error}");
}
