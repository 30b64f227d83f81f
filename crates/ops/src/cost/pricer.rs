//! Prices of a program for steps of any shape.

use super::adapters::AdapterPrices;
use super::{AdaptedRows, Cost, ElementBytes, Sight, StepShape, attention_flops, expert_bytes, step_cost};
use crate::{Op, Program, StepBatch, expected_experts};

/// Prices of a program, summed ahead of time: pricing a step is one pass over its sequences and allocates nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPricer {
    /// Cost of tokens, sampled, pooled and injected rows: the fixed part and the part per row.
    rows: [(Cost, Cost); 4],
    /// Layers grouped by the keys that a query sees.
    attention: Vec<AttentionPrice>,
    /// Weights of experts, grouped by their number and that of the chosen ones.
    experts: Vec<ExpertPrice>,
    adapters: AdapterPrices,
    /// Rank with which adapters are priced.
    rank: usize,
}

/// Weights of experts. Their bytes are not linear in the number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ExpertPrice {
    experts: usize,
    chosen: usize,
    bytes_an_expert: u64,
}

/// Groups the weights of experts by the number of tokens that uses them.
fn expert_prices(program: &Program, size: ElementBytes) -> Vec<ExpertPrice> {
    let mut prices: Vec<ExpertPrice> = Vec::new();
    for op in &program.ops {
        let Op::ExpertLinear(l) = op else { continue };
        let (experts, chosen) = (l.experts, program.buffers[l.routing.0].cols);
        let at = prices.iter().position(|p| (p.experts, p.chosen) == (experts, chosen)).unwrap_or_else(|| {
            prices.push(ExpertPrice { experts, chosen, bytes_an_expert: 0 });
            prices.len() - 1
        });
        prices[at].bytes_an_expert += expert_bytes(program, l, size);
    }
    prices
}

/// Returns the expected size of the weights of experts that a step of `tokens` tokens reads.
fn experts_read(prices: &[ExpertPrice], tokens: usize) -> u64 {
    prices.iter().map(|p| p.bytes_an_expert * expected_experts(p.experts, p.chosen, tokens)).sum()
}

/// Cost of attention for the layers whose queries see the same keys, without their activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AttentionPrice {
    sight: Sight,
    flops_a_pair: u64,
    bytes_a_key: u64,
}

impl StepPricer {
    /// Creates the prices of a program with these element sizes.
    pub fn new(program: &Program, size: ElementBytes) -> Self {
        let experts = expert_prices(program, size);
        let price = |[tokens, sampled, pooled, injected]: [usize; 4]| {
            let shape = StepShape { tokens, sampled, pooled, injected, ..StepShape::default() };
            let mut cost = step_cost(program, &shape, size);
            cost.weight_bytes -= experts_read(&experts, tokens);
            cost
        };
        // Without sequences there is no attention, so the cost without experts is linear in the rows; the first row also
        // reads the weights.
        let rows = std::array::from_fn(|kind| {
            let [one, two] = [1, 2].map(|count| price(std::array::from_fn(|k| if k == kind { count } else { 0 })));
            let each = two - one;
            (one - each, each)
        });
        let mut attention: Vec<AttentionPrice> = Vec::new();
        for op in &program.ops {
            let (sight, heads) = match op {
                Op::PagedAttention(op) => (Sight::Causal(op.window), op.heads),
                Op::SegmentAttention(op) => (Sight::Both(op.window), op.heads),
                _ => continue,
            };
            let at = attention.iter().position(|known| known.sight == sight).unwrap_or_else(|| {
                attention.push(AttentionPrice { sight, flops_a_pair: 0, bytes_a_key: 0 });
                attention.len() - 1
            });
            attention[at].flops_a_pair += attention_flops(heads);
            attention[at].bytes_a_key += heads.cache_cols() as u64 * size.kv;
        }
        Self { rows, attention, experts, adapters: AdapterPrices::new(program, size), rank: 0 }
    }

    /// Prices adapters with this rank. Without a rank, they cost nothing.
    pub fn with_rank(self, rank: usize) -> Self {
        Self { rank, ..self }
    }

    /// Returns the cost that a step with tokens and sampled rows has whatever their number. It counts the weights of all
    /// experts, as if the step used them all: their number is not a sum over the sequences of a step.
    pub fn fixed(&self) -> Cost {
        let mut fixed = self.rows[0].0;
        fixed += self.rows[1].0;
        fixed.weight_bytes += self.experts.iter().map(|p| p.bytes_an_expert * p.experts as u64).sum::<u64>();
        fixed
    }

    /// Returns the cost of tokens without attention, beyond [`StepPricer::fixed`].
    pub fn of_tokens(&self, tokens: usize) -> Cost {
        self.rows[0].1 * tokens as u64
    }

    /// Returns the cost of rows that reach the head, beyond [`StepPricer::fixed`].
    pub fn of_rows(&self, rows: usize) -> Cost {
        self.rows[1].1 * rows as u64
    }

    /// Returns the cost of attention for the last `queries` of `context` tokens, without its activations.
    pub fn of_attention(&self, queries: usize, context: usize) -> Cost {
        self.attention.iter().fold(Cost::default(), |mut total, price| {
            let (pairs, keys) = price.sight.attended(queries, context);
            total.flops += pairs * price.flops_a_pair;
            total.kv_bytes += keys * price.bytes_a_key;
            total
        })
    }

    /// Returns the cost of a batch, equal to [`step_cost`] of its shape with the rank of the prices.
    pub fn price(&self, batch: &StepBatch) -> Cost {
        let counts = [batch.tokens(), batch.sampled_rows.len(), batch.pooled_rows.len(), batch.injected.len()];
        let mut total = Cost::default();
        for ((any, each), count) in self.rows.into_iter().zip(counts) {
            if count > 0 {
                total += any;
                total += each * count as u64;
            }
        }
        total.weight_bytes += experts_read(&self.experts, batch.tokens());
        for s in 0..batch.sequences() {
            total += self.of_attention(batch.query_range(s).len(), batch.seq_lens[s] as usize);
        }
        total += self.adapters.cost(AdaptedRows { rank: self.rank, ..AdaptedRows::from_batch(batch) });
        total
    }
}
