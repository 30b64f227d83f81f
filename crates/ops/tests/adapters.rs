//! Cost of adapters.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use octavo_ops::cost::{AdaptedRows, ElementBytes, StepPricer, StepShape, op_cost, step_cost};
use octavo_ops::testing::{TinyExperts, TinyModel};
use octavo_ops::{Lora, Op, SiteKind, StepBatch};

/// Three sequences, of which the first and the last have adapters: 1, 2 and 4 tokens.
fn batch() -> StepBatch {
    StepBatch {
        token_ids: vec![0; 7],
        query_start: vec![0, 1, 3, 7],
        seq_lens: vec![5, 2, 4],
        sampled_rows: vec![0, 2, 6],
        adapters: vec![2, 0, 2],
        ..StepBatch::default()
    }
}

/// A model with five experts, of which a token uses two.
fn with_experts() -> TinyModel {
    TinyModel { experts: Some(TinyExperts::default()), ..TinyModel::default() }
}

#[test]
fn a_step_is_priced_with_the_rank_that_is_given() {
    for (model, adapters) in [
        (TinyModel::default(), vec![]),
        (TinyModel::default(), vec![2, 0, 2]),
        (TinyModel::default(), vec![1, 3, 2]),
        (with_experts(), vec![]),
        (with_experts(), vec![1, 3, 2]),
    ] {
        let (plain, _) = model.build().unwrap();
        let program = plain.clone().with_adapters();
        let size = ElementBytes::HALF;
        let batch = StepBatch { adapters, ..batch() };
        let shape = StepShape::from_batch(&batch);
        let without = step_cost(&plain, &shape, size);
        assert_eq!(step_cost(&program, &shape, size), without, "no rank");
        let adapted = AdaptedRows { rank: 8, ..shape.adapted };
        let cost = step_cost(&program, &StepShape { adapted, ..shape.clone() }, size);
        let pricer = StepPricer::new(&program, size);
        assert_eq!(pricer.clone().with_rank(8).price(&batch), cost);
        assert_eq!(pricer.price(&batch), without);
        assert_eq!(cost == without, batch.adapters.is_empty());
    }
}

#[test]
fn the_matrices_of_an_adapter_count_once_and_its_products_for_each_row() {
    let (program, _) = TinyModel::default().build().unwrap();
    let program = program.with_adapters();
    let adapted = AdaptedRows { rank: 8, ..AdaptedRows::from_batch(&batch()) };
    assert_eq!(adapted, AdaptedRows { tokens: 5, sampled: 2, adapters: 1, rank: 8 });
    let step = StepShape { adapted, ..StepShape::from_batch(&batch()) };
    let price = |lora: &Lora| op_cost(&program, &Op::Lora(*lora), &step, ElementBytes::HALF);
    let of = |kind: SiteKind| {
        let mut loras = program.ops.iter().filter_map(|op| match op {
            Op::Lora(lora) if program.sites[lora.site.0].kind == kind => Some(lora),
            _ => None,
        });
        loras.next().expect("a site")
    };
    let site = of(SiteKind::Linear);
    let (mut inputs, mut outputs) = (0, 0);
    for [rows, cols] in program.site_parts(site.site) {
        (inputs, outputs) = (inputs + cols as u64, outputs + rows as u64);
    }
    let cost = price(site);
    assert_eq!((cost.weight_bytes, cost.flops), (2 * 8 * (inputs + outputs), 5 * 2 * 8 * (inputs + outputs)));
    // The head has the rows that reach it, a table of embeddings a column for each token.
    let [rows, cols] = program.site_parts(of(SiteKind::Head).site)[0].map(|size| size as u64);
    assert_eq!(price(of(SiteKind::Head)).flops, 2 * 2 * 8 * (rows + cols));
    let [rows, _] = program.site_parts(of(SiteKind::Embedding).site)[0].map(|size| size as u64);
    let cost = price(of(SiteKind::Embedding));
    assert_eq!((cost.weight_bytes, cost.flops), (2 * 8 * rows + 5 * 2 * 8, 5 * 2 * 8 * rows));
}

#[test]
fn the_matrices_of_the_experts_that_are_used_count_for_each_adapter() {
    let (program, _) = with_experts().build().unwrap();
    let program = program.with_adapters();
    let price = |adapters: Vec<u32>, kind: SiteKind| {
        let batch = StepBatch { adapters, ..batch() };
        let adapted = AdaptedRows { rank: 8, ..AdaptedRows::from_batch(&batch) };
        let step = StepShape { adapted, ..StepShape::from_batch(&batch) };
        let size = ElementBytes::HALF;
        let site = |op: &Op| match op {
            Op::Lora(lora) => Some(lora.site),
            Op::Route(route) => route.site,
            _ => None,
        };
        let op = program.ops.iter().find(|op| site(op).is_some_and(|site| program.sites[site.0].kind == kind)).unwrap();
        let without = StepShape { adapted: AdaptedRows::default(), ..step.clone() };
        let cost = op_cost(&program, op, &step, size) - op_cost(&program, op, &without, size);
        let parts = program.site_parts(site(op).unwrap());
        let each = program.parts_each(site(op).unwrap());
        let numbers: usize = parts[..each].iter().map(|[rows, cols]| rows + cols).sum();
        (cost.weight_bytes, cost.flops, numbers as u64)
    };
    // Five tokens of one adapter use all five experts; ten pairs.
    let (bytes, flops, numbers) = price(vec![2, 0, 2], SiteKind::Experts(5));
    assert_eq!((bytes, flops), (2 * 8 * 5 * numbers, 2 * 8 * 10 * numbers));
    // Of three adapters with two or three tokens each, three or four experts, with their own matrices; 14 pairs.
    let (bytes, flops, numbers) = price(vec![1, 3, 2], SiteKind::Experts(5));
    assert_eq!((bytes, flops), (2 * 8 * 3 * 4 * numbers, 2 * 8 * 14 * numbers));
    // A router is a product like others.
    let (bytes, flops, numbers) = price(vec![2, 0, 2], SiteKind::Router);
    assert_eq!((bytes, flops), (2 * 8 * numbers, 2 * 8 * 5 * numbers));
}
