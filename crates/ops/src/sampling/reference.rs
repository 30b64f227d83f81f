//! The scalar definition of `Sample`.

use std::cmp::Ordering;

use super::{SampleBatch, SampleParams, SampleRow, SampledToken, TokenCounts, TokenLogprobs, philox};

/// Initial estimate of the number of most likely tokens that reach top-p. It grows until they do.
const NUCLEUS_GUESS: usize = 64;

/// Samples tokens from rows of logits, one row at a time, so that no row can depend on another.
///
/// If masks leave no token with a logit above −∞, the most likely token of the first non-empty set is taken: tokens
/// allowed by the mask and not forbidden, tokens allowed by the mask, tokens not forbidden.
///
/// Holds the scratch memory: after the first rows of a size it allocates only the requested log-probabilities.
#[derive(Clone, Debug, Default)]
pub struct Sampler {
    /// The row after bias, masks and penalties.
    logits: Vec<f32>,
    candidates: Vec<Candidate>,
    /// Ids of the most likely tokens to report.
    ids: Vec<u32>,
}

/// A token that may be sampled.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    logit: f32,
    /// Unnormalised probability: `exp((logit − largest logit) / temperature)`.
    weight: f32,
}

impl Candidate {
    /// Orders by descending probability, ties by id.
    fn order(&self, other: &Self) -> Ordering {
        descending(self.logit, other.logit).then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// Creates a sampler without scratch memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Samples a token for each row of `logits` into `out` (cleared first). `logits` holds one row of the same length
    /// for each of `batch.rows`.
    pub fn sample_batch(&mut self, logits: &[f32], batch: &SampleBatch<'_>, out: &mut Vec<SampledToken>) {
        out.clear();
        let vocab = logits.len() / batch.rows.len().max(1);
        out.extend(batch.rows.iter().enumerate().map(|(r, row)| self.sample(&logits[r * vocab..(r + 1) * vocab], row)));
    }

    /// Samples one token from a row of raw logits, or takes the forced one.
    pub fn sample(&mut self, logits: &[f32], row: &SampleRow<'_>) -> SampledToken {
        let id = row.forced.unwrap_or_else(|| self.draw(logits, row));
        let logprobs = row.params.logprobs.map(|top| self.logprobs(logits, id, top as usize, row.logprob_ids));
        SampledToken { id, logprobs }
    }

    fn draw(&mut self, raw: &[f32], row: &SampleRow<'_>) -> u32 {
        let greedy = row.params.is_greedy();
        if greedy && row.takes_logits_as_they_are() {
            match largest(raw) {
                Some(id) if !row.forbidden.contains(&id) => return id,
                Some(_) => {}
                None => return fallback(raw, row),
            }
        }
        self.adjust(raw, row);
        let Some(best) = largest(&self.logits) else { return fallback(raw, row) };
        if greedy {
            return best;
        }
        self.weigh(best, row.params);
        let filtered = self.filter(row.params);
        if filtered {
            self.candidates.sort_unstable_by_key(|c| c.id);
        }
        let total: f64 = self.candidates.iter().map(|c| f64::from(c.weight)).sum();
        let target = philox::uniform(row.params.seed, row.output_position) * total;
        let mut sum = 0.0;
        for candidate in &self.candidates {
            sum += f64::from(candidate.weight);
            if sum > target {
                return candidate.id;
            }
        }
        best
    }

    /// Returns whether a backend may sample `id` from a row of raw logits where this sampler samples another token,
    /// because its exponentials differ from the ones here by at most a share `error` of their value. Temperature 0 and
    /// forced tokens use no exponential.
    pub fn may_draw(&mut self, raw: &[f32], row: &SampleRow<'_>, id: u32, error: f64) -> bool {
        if row.forced.is_some() || row.params.is_greedy() {
            return false;
        }
        self.adjust(raw, row);
        let Some(best) = largest(&self.logits) else { return false };
        self.weigh(best, row.params);
        let (low, high) = (1.0 - error, 1.0 + error);
        let min_p = f64::from(row.params.min_p.min(1.0));
        self.candidates.retain(|c| f64::from(c.weight) * high >= min_p);
        self.candidates.sort_unstable_by(Candidate::order);
        if row.params.top_k > 0 {
            self.candidates.truncate(row.params.top_k as usize);
        }
        let (longest, certain) = self.nucleus_sizes(row.params, error);
        self.candidates.truncate(longest);
        // Each list of candidates between the shortest and the longest has its own total.
        let u = philox::uniform(row.params.seed, row.output_position);
        (certain..=self.candidates.len()).any(|kept| {
            let kept = &self.candidates[..kept];
            let Some(chosen) = kept.iter().find(|c| c.id == id) else { return false };
            let before: f64 = kept.iter().filter(|c| c.id < id).map(|c| f64::from(c.weight)).sum();
            let total: f64 = kept.iter().map(|c| f64::from(c.weight)).sum();
            let (target, end) = (u * total, before + f64::from(chosen.weight));
            target * low <= end * high && target * high >= before * low
        })
    }

    /// Returns the maximum and the minimum number of sorted candidates that are kept, for any errors of their weights.
    fn nucleus_sizes(&self, params: &SampleParams, error: f64) -> (usize, usize) {
        let (low, high) = (1.0 - error, 1.0 + error);
        let min_p = f64::from(params.min_p.min(1.0));
        let by_min_p = self.candidates.partition_point(|c| f64::from(c.weight) * low >= min_p);
        let total = |count: usize| self.candidates[..count].iter().map(|c| f64::from(c.weight)).sum::<f64>();
        // Returns the shortest head whose weights, scaled by a factor, reach the nucleus's share of a total.
        let head = |total: f64, factor: f64| {
            let (needed, mut reached) = (f64::from(params.top_p) * total, 0.0);
            let last = self.candidates.iter().position(|c| {
                reached += f64::from(c.weight) * factor;
                reached >= needed
            });
            last.filter(|_| params.top_p < 1.0).map_or(self.candidates.len(), |at| at + 1)
        };
        let longest = head(total(self.candidates.len()) * high, low);
        let shortest = head(total(by_min_p) * low, high);
        (longest, shortest.min(by_min_p).clamp(1, longest))
    }

    /// Applies bias, forbidden tokens, mask and penalties.
    fn adjust(&mut self, raw: &[f32], row: &SampleRow<'_>) {
        self.logits.clear();
        self.logits.extend(raw.iter().map(|&x| if x.is_nan() { f32::NEG_INFINITY } else { x }));
        for &(id, bias) in row.logit_bias {
            if let Some(x) = self.logits.get_mut(id as usize) {
                *x += bias;
            }
        }
        for &id in row.forbidden {
            if let Some(x) = self.logits.get_mut(id as usize) {
                *x = f32::NEG_INFINITY;
            }
        }
        if let Some(mask) = row.mask {
            for (id, x) in self.logits.iter_mut().enumerate() {
                if !allows(mask, id as u32) {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
        if let Some(counts) = row.counts {
            self.penalise(counts, row.params);
        }
    }

    fn penalise(&mut self, counts: &TokenCounts, params: &SampleParams) {
        let repeated = |x: f32| if x > 0.0 { x / params.repetition_penalty } else { x * params.repetition_penalty };
        if params.repetition_penalty != 1.0 {
            let generated = counts.output.iter().map(|&(id, _)| id);
            let only_in_prompt =
                counts.prompt.iter().copied().filter(|id| counts.output.binary_search_by_key(id, |o| o.0).is_err());
            for id in generated.chain(only_in_prompt) {
                if let Some(x) = self.logits.get_mut(id as usize) {
                    *x = repeated(*x);
                }
            }
        }
        for &(id, times) in &counts.output {
            if let Some(x) = self.logits.get_mut(id as usize) {
                *x -= params.frequency_penalty * times as f32 + params.presence_penalty;
            }
        }
    }

    /// Fills the candidates, by id, with every token above −∞.
    fn weigh(&mut self, best: u32, params: &SampleParams) {
        let largest = self.logits[best as usize];
        // The first case is needed for correctness too: ∞ − ∞ is NaN.
        let weight = |x: f32| if x == largest { 1.0 } else { ((x - largest) / params.temperature).exp() };
        self.candidates.clear();
        self.candidates.extend(
            self.logits.iter().enumerate().filter(|&(_, &x)| x > f32::NEG_INFINITY).map(|(id, &logit)| Candidate {
                id: id as u32,
                logit,
                weight: weight(logit),
            }),
        );
    }

    /// Applies min-p, top-k and top-p. Returns whether the candidates are no longer ordered by id.
    fn filter(&mut self, params: &SampleParams) -> bool {
        if params.min_p > 0.0 {
            // The most likely token has weight 1 and is always kept.
            self.candidates.retain(|c| c.weight >= params.min_p.min(1.0));
        }
        let top_k = params.top_k as usize;
        let by_k = top_k > 0 && top_k < self.candidates.len();
        if by_k {
            self.candidates.select_nth_unstable_by(top_k - 1, Candidate::order);
            self.candidates.truncate(top_k);
        }
        let by_p = params.top_p < 1.0;
        if by_p {
            self.keep_nucleus(params.top_p);
        }
        by_k || by_p
    }

    /// Keeps the smallest set of most likely candidates whose probability reaches `top_p`, at least one.
    fn keep_nucleus(&mut self, top_p: f32) {
        let needed = f64::from(top_p) * self.candidates.iter().map(|c| f64::from(c.weight)).sum::<f64>();
        // Only a head of the list is sorted, because more is rarely needed.
        let (mut sorted, mut sum) = (0, 0.0);
        while sorted < self.candidates.len() {
            let head = (sorted * 8).clamp(NUCLEUS_GUESS, self.candidates.len().max(NUCLEUS_GUESS));
            let tail = &mut self.candidates[sorted..];
            let head = (head - sorted).min(tail.len());
            if head < tail.len() {
                tail.select_nth_unstable_by(head, Candidate::order);
            }
            tail[..head].sort_unstable_by(Candidate::order);
            for (i, candidate) in tail[..head].iter().enumerate() {
                sum += f64::from(candidate.weight);
                if sum >= needed {
                    self.candidates.truncate(sorted + i + 1);
                    return;
                }
            }
            sorted += head;
        }
    }

    /// Returns the log-probabilities of the raw row: of `id`, and of `others` or, if that is empty, of the `top` most
    /// likely tokens.
    fn logprobs(&mut self, raw: &[f32], id: u32, top: usize, others: &[u32]) -> TokenLogprobs {
        let value = |id: u32| match raw.get(id as usize) {
            Some(x) if !x.is_nan() => *x,
            _ => f32::NEG_INFINITY,
        };
        let largest = largest(raw).map_or(f32::NEG_INFINITY, value);
        let weight = |x: f32| if x == largest { 1.0 } else { f64::from(x - largest).exp() };
        let log_sum = raw.iter().filter(|x| !x.is_nan()).map(|&x| weight(x)).sum::<f64>().ln();
        let logprob = |x: f32| match x {
            f32::NEG_INFINITY => f32::NEG_INFINITY,
            _ if x == largest => -log_sum as f32,
            _ => (f64::from(x - largest) - log_sum) as f32,
        };
        let order = |a: &u32, b: &u32| descending(value(*a), value(*b)).then(a.cmp(b));
        let ids = 0..raw.len() as u32;
        let rank = 1 + ids.clone().filter(|other| order(other, &id).is_lt()).count() as u32;
        let top = top.min(raw.len());
        self.ids.clear();
        if !others.is_empty() {
            self.ids.extend(others);
            self.ids.sort_unstable_by(order);
            self.ids.dedup();
        } else if top > 0 {
            self.ids.extend(ids);
            self.ids.select_nth_unstable_by(top - 1, order);
            self.ids.truncate(top);
            self.ids.sort_unstable_by(order);
        }
        let top = self.ids.iter().map(|&id| (id, logprob(value(id)))).collect();
        TokenLogprobs { logprob: logprob(value(id)), rank, top }
    }
}

/// Orders larger numbers first and treats both zeros as equal. The input has no NaN.
fn descending(a: f32, b: f32) -> Ordering {
    b.partial_cmp(&a).unwrap_or(Ordering::Equal)
}

/// Returns whether a mask allows a token.
fn allows(mask: &[u32], id: u32) -> bool {
    mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
}

/// Number of values that are compared in parallel, because a vocabulary is large.
const LANES: usize = 16;

/// Returns the largest value. NaN is ignored, and −∞ is returned if there is no other value. Inlined, so that it is
/// compiled for the caller's instruction set.
#[inline(always)]
pub fn largest_value(row: &[f32]) -> f32 {
    let (chunks, rest) = row.as_chunks::<LANES>();
    // `f32::max` would have to check for NaN; a comparison with NaN is simply false.
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// Returns the lowest id of the largest value above −∞ and ignores NaN.
pub fn largest(row: &[f32]) -> Option<u32> {
    let largest = largest_value(row);
    if largest == f32::NEG_INFINITY {
        return None;
    }
    let chunks = row.as_chunks::<LANES>().0;
    let has = |chunk: &[f32; LANES]| chunk.iter().fold(false, |any, &x| any | (x == largest));
    let from = chunks.iter().position(has).unwrap_or(chunks.len()) * LANES;
    row[from..].iter().position(|&x| x == largest).map(|at| (from + at) as u32)
}

/// Does the same as [`largest`] for the `allowed` ids.
fn argmax(row: &[f32], allowed: impl Fn(u32) -> bool) -> Option<u32> {
    let mut best = (None, f32::NEG_INFINITY);
    for (id, &x) in row.iter().enumerate() {
        if x > best.1 && allowed(id as u32) {
            best = (Some(id as u32), x);
        }
    }
    best.0
}

/// Returns the token of a row in which no candidate is left, see [`Sampler`].
fn fallback(raw: &[f32], row: &SampleRow<'_>) -> u32 {
    let masked = |id: u32| row.mask.is_none_or(|mask| allows(mask, id));
    let forbidden = |id: u32| row.forbidden.contains(&id);
    let pick =
        |allowed: &dyn Fn(u32) -> bool| argmax(raw, allowed).or_else(|| (0..raw.len() as u32).find(|&id| allowed(id)));
    pick(&|id| masked(id) && !forbidden(id))
        .or_else(|| pick(&masked))
        .or_else(|| pick(&|id| !forbidden(id)))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_largest_is_found_in_lanes_as_one_by_one(
            row in proptest::collection::vec(prop_oneof![
                (-2i8..3).prop_map(f32::from),
                any::<f32>(),
                Just(f32::NAN),
                Just(f32::NEG_INFINITY),
            ], 0..70),
        ) {
            prop_assert_eq!(largest(&row), argmax(&row, |_| true));
        }
    }
}
