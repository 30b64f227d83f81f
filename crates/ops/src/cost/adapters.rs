//! Cost of adapters.

use super::{Cost, ElementBytes};
use crate::{Lora, Op, Program, Rows, SiteKind, StepBatch};

/// What a step's adapters add to. The numbers are 0 if no sequence has an adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdaptedRows {
    /// Number of tokens whose sequences have an adapter.
    pub tokens: usize,
    /// Number of such rows that reach the head.
    pub sampled: usize,
    /// Number of different adapters.
    pub adapters: usize,
    /// Rank with which adapters are priced. A batch does not say it.
    pub rank: usize,
}

impl AdaptedRows {
    /// Returns the rows of a batch, without a rank.
    pub fn from_batch(batch: &StepBatch) -> Self {
        if batch.adapters.is_empty() {
            return Self::default();
        }
        let is_first = |&(s, adapter): &(usize, &u32)| *adapter != 0 && !batch.adapters[..s].contains(adapter);
        Self {
            tokens: batch.adapted(Rows::Tokens).count(),
            sampled: batch.adapted(Rows::Sampled).count(),
            adapters: batch.adapters.iter().enumerate().filter(is_first).count(),
            rank: 0,
        }
    }
}

/// Price of an adapter's matrices, and of a row that has one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Price {
    adapter: Cost,
    row: Cost,
}

impl Price {
    fn cost(self, rows: usize, adapters: usize) -> Cost {
        let mut cost = self.row * rows as u64;
        if rows > 0 {
            cost += self.adapter * adapters as u64;
        }
        cost
    }
}

/// Prices of all sites of a program for adapters of rank 1: those of the rows of a step, and those that reach the head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AdapterPrices {
    kinds: [Price; 2],
    /// Parts of the prices that do not grow with the rank.
    outputs: [Cost; 2],
}

impl AdapterPrices {
    pub(super) fn new(program: &Program, size: ElementBytes) -> Self {
        let mut prices = Self::default();
        for op in &program.ops {
            let Op::Lora(lora) = op else { continue };
            let kind = usize::from(program.buffers[lora.out.0].rows == Rows::Sampled);
            let (price, output) = site(program, lora, size);
            prices.kinds[kind].adapter += price.adapter;
            prices.kinds[kind].row += price.row;
            prices.outputs[kind] += output;
        }
        prices
    }

    /// Returns the cost of a step's adapters.
    pub(super) fn cost(&self, adapted: AdaptedRows) -> Cost {
        let mut total = Cost::default();
        if adapted.rank == 0 {
            return total;
        }
        for (kind, rows) in [adapted.tokens, adapted.sampled].into_iter().enumerate() {
            total += self.kinds[kind].cost(rows, adapted.adapters) * adapted.rank as u64;
            total += self.outputs[kind] * rows as u64;
        }
        total
    }
}

/// Returns the price of a site for adapters of rank 1, and the cost of reading a row's input and changing its output.
fn site(program: &Program, lora: &Lora, size: ElementBytes) -> (Price, Cost) {
    let parts = program.site_parts(lora.site);
    let (inputs, outputs) = parts.iter().fold((0, 0), |(k, n), [rows, cols]| (k + *cols as u64, n + *rows as u64));
    let element = size.activation;
    // Products with a table of embeddings read one of its columns for each token.
    let (numbers, row_bytes, input) = match program.sites[lora.site.0].kind {
        SiteKind::Embedding => (outputs, element, 0),
        SiteKind::Linear | SiteKind::Head => (inputs + outputs, 0, parts.first().map_or(0, |[_, cols]| *cols as u64)),
    };
    let row = Cost { weight_bytes: row_bytes, flops: 2 * numbers, ..Cost::default() };
    let adapter = Cost { weight_bytes: numbers * element, ..Cost::default() };
    let written_bytes = outputs * element;
    let output = Cost { activation_bytes: input * element + 2 * written_bytes, written_bytes, ..Cost::default() };
    (Price { adapter, row }, output)
}

/// Returns the cost of an op.
pub(super) fn lora(program: &Program, lora: &Lora, adapted: AdaptedRows, size: ElementBytes) -> Cost {
    let kind = usize::from(program.buffers[lora.out.0].rows == Rows::Sampled);
    let (price, output) = site(program, lora, size);
    let mut prices = AdapterPrices::default();
    (prices.kinds[kind], prices.outputs[kind]) = (price, output);
    prices.cost(adapted)
}
