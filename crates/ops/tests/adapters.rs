//! Cost of adapters.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use octavo_ops::cost::{AdaptedRows, ElementBytes, StepPricer, StepShape, op_cost, step_cost};
use octavo_ops::testing::TinyModel;
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

#[test]
fn a_step_is_priced_with_the_rank_that_is_given() {
    let (plain, _) = TinyModel::default().build().unwrap();
    let program = plain.clone().with_adapters();
    let size = ElementBytes::HALF;
    for adapters in [vec![], vec![2, 0, 2], vec![1, 3, 2]] {
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
