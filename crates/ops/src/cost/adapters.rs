//! Cost of adapters.

use super::{Cost, ElementBytes};
use crate::{Lora, LoraInput, Op, Program, Route, Rows, SiteId, SiteKind, StepBatch, expected_experts};

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

/// Price of what adapters add to the products of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExpertPrice {
    experts: usize,
    chosen: usize,
    /// Price of an adapter's matrices for one expert, and of a row of a token and one of its experts.
    price: Price,
    output: Cost,
}

/// Prices of all sites of a program for adapters of rank 1: those of the rows of a step, and those that reach the head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AdapterPrices {
    kinds: [Price; 2],
    /// Parts of the prices that do not grow with the rank.
    outputs: [Cost; 2],
    /// Grouped by the number of experts and that of the chosen ones.
    experts: Vec<ExpertPrice>,
}

impl AdapterPrices {
    pub(super) fn new(program: &Program, size: ElementBytes) -> Self {
        let mut prices = Self::default();
        for op in &program.ops {
            prices.add(program, op, size);
        }
        prices
    }

    /// Adds the price of an op's site, if it has one.
    fn add(&mut self, program: &Program, op: &Op, size: ElementBytes) {
        let (id, out, routing) = match op {
            Op::Lora(Lora { site, out, input: LoraInput::Experts { routing, .. }, .. }) => {
                (*site, *out, Some(*routing))
            }
            Op::Lora(lora) => (lora.site, lora.out, None),
            Op::Route(Route { site: Some(site), out, .. }) => (*site, *out, None),
            _ => return,
        };
        let (price, output) = site(program, id, size);
        let (SiteKind::Experts(experts), Some(routing)) = (program.sites[id.0].kind, routing) else {
            let kind = usize::from(program.buffers[out.0].rows == Rows::Sampled);
            self.kinds[kind].adapter += price.adapter;
            self.kinds[kind].row += price.row;
            self.outputs[kind] += output;
            return;
        };
        let chosen = program.buffers[routing.0].cols;
        match self.experts.iter_mut().find(|known| (known.experts, known.chosen) == (experts, chosen)) {
            Some(known) => {
                known.price.adapter += price.adapter;
                known.price.row += price.row;
                known.output += output;
            }
            None => self.experts.push(ExpertPrice { experts, chosen, price, output }),
        }
    }

    /// Returns the cost of a step's adapters.
    pub(super) fn cost(&self, adapted: AdaptedRows) -> Cost {
        let AdaptedRows { tokens, sampled, adapters, rank } = adapted;
        let mut total = Cost::default();
        if rank == 0 {
            return total;
        }
        for (kind, rows) in [tokens, sampled].into_iter().enumerate() {
            total += self.kinds[kind].cost(rows, adapters) * rank as u64;
            total += self.outputs[kind] * rows as u64;
        }
        for &ExpertPrice { experts, chosen, price, output } in &self.experts {
            // Each adapter has its own matrices for the experts that its tokens are expected to use.
            let used = expected_experts(experts, chosen, tokens.div_ceil(adapters.max(1))) as usize;
            total += price.cost(tokens * chosen, used * adapters) * rank as u64;
            total += output * (tokens * chosen) as u64;
        }
        total
    }
}

/// Returns the price of a site for adapters of rank 1, and the cost of reading a row's input and changing its output. If the
/// site has experts, they are those of one expert.
fn site(program: &Program, id: SiteId, size: ElementBytes) -> (Price, Cost) {
    let mut parts = program.site_parts(id);
    parts.truncate(program.parts_each(id));
    let (inputs, outputs) = parts.iter().fold((0, 0), |(k, n), [rows, cols]| (k + *cols as u64, n + *rows as u64));
    let element = size.activation;
    // Products with a table of embeddings read one of its columns for each token.
    let (numbers, row_bytes, input) = match program.sites[id.0].kind {
        SiteKind::Embedding => (outputs, element, 0),
        SiteKind::Linear | SiteKind::Head | SiteKind::Router | SiteKind::Experts(_) => {
            (inputs + outputs, 0, parts.first().map_or(0, |[_, cols]| *cols as u64))
        }
    };
    let row = Cost { weight_bytes: row_bytes, flops: 2 * numbers, ..Cost::default() };
    let adapter = Cost { weight_bytes: numbers * element, ..Cost::default() };
    let written_bytes = outputs * element;
    let output = Cost { activation_bytes: input * element + 2 * written_bytes, written_bytes, ..Cost::default() };
    (Price { adapter, row }, output)
}

/// Returns the cost of what adapters add at an op's site; none if it has no site.
pub(super) fn at_site(program: &Program, op: &Op, adapted: AdaptedRows, size: ElementBytes) -> Cost {
    let mut prices = AdapterPrices::default();
    prices.add(program, op, size);
    prices.cost(adapted)
}
