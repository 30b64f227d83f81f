//! Compares sampling with the scalar definition of `octavo_ops::sampling`.

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, Instance};
use octavo_kernels::params::{
    SAMPLING_ADJUST, SAMPLING_BINS, SAMPLING_LIST, SAMPLING_LOGPROBS, SAMPLING_NONE, SAMPLING_PADDING,
    SAMPLING_STATUS_EXHAUSTED, SAMPLING_TILE, SamplingParams, SamplingRow, SamplingState,
};
use octavo_ops::sampling::{SampleParams, SampleRow, SampledToken, Sampler, TokenCounts, TokenLogprobs};
use octavo_ops::testing::TestRng;

use crate::common::{in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, finds_races, on_device};
use crate::support::pick;

/// Number of entries in a row of reported tokens.
const TOP_STRIDE: usize = 24;

/// Sampling parameters of one row, owned.
#[derive(Clone, Debug, Default)]
struct Asked {
    params: SampleParams,
    output_position: u32,
    /// Counts of all tokens, of which one may be that of the preceding step.
    counts: Option<TokenCounts>,
    pending: Option<u32>,
    logit_bias: Vec<(u32, f32)>,
    forbidden: Vec<u32>,
    mask: Option<Vec<u32>>,
    forced: Option<u32>,
    logprob_ids: Vec<u32>,
}

impl Asked {
    fn row(&self) -> SampleRow<'_> {
        SampleRow {
            seat: 0,
            params: &self.params,
            output_position: self.output_position,
            counts: self.counts.as_ref(),
            pending: None,
            logit_bias: &self.logit_bias,
            forbidden: &self.forbidden,
            mask: self.mask.as_deref(),
            forced: self.forced,
            logprob_ids: &self.logprob_ids,
        }
    }

    fn adjusts(&self) -> bool {
        self.counts.is_some() || self.mask.is_some() || !self.logit_bias.is_empty() || !self.forbidden.is_empty()
    }
}

/// Rows of a step as flat arrays.
#[derive(Default)]
struct Lists {
    rows: Vec<SamplingRow>,
    masks: Vec<u32>,
    bias_ids: Vec<u32>,
    bias_values: Vec<f32>,
    forbidden_ids: Vec<u32>,
    count_ids: Vec<u32>,
    count_times: Vec<u32>,
    listed_ids: Vec<u32>,
    /// Tokens of the preceding step, by row.
    before: Vec<u32>,
}

impl Lists {
    fn push(&mut self, asked: &Asked, mask_words: usize) {
        let params = &asked.params;
        let mut row = SamplingRow {
            seed: params.seed,
            output_position: asked.output_position,
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            repetition_penalty: params.repetition_penalty,
            forced: asked.forced.unwrap_or(SAMPLING_NONE),
            bias_start: self.bias_ids.len() as u32,
            forbidden_start: self.forbidden_ids.len() as u32,
            counts_start: self.count_ids.len() as u32,
            listed_start: self.listed_ids.len() as u32,
            top: params.logprobs.unwrap_or(0),
            ..SamplingRow::GREEDY
        };
        if let Some(token) = asked.pending {
            row.pending = self.before.len() as u32;
            self.before.push(token);
        }
        row.flags |= if asked.adjusts() { SAMPLING_ADJUST } else { 0 };
        row.flags |= if params.logprobs.is_some() { SAMPLING_LOGPROBS } else { 0 };
        if let Some(mask) = &asked.mask {
            row.mask_row = (self.masks.len() / mask_words) as u32;
            self.masks.extend(mask);
        }
        self.bias_ids.extend(asked.logit_bias.iter().map(|b| b.0));
        self.bias_values.extend(asked.logit_bias.iter().map(|b| b.1));
        self.forbidden_ids.extend(&asked.forbidden);
        if let Some(counts) = &asked.counts {
            let generated = |id: &u32| counts.output.iter().any(|o| o.0 == *id);
            let prompt = counts.prompt.iter().filter(|id| !generated(id)).map(|id| (*id, 0));
            for (id, times) in prompt.chain(counts.output.iter().copied()) {
                // The kernel counts the token of the preceding step.
                let known = times - u32::from(asked.pending == Some(id));
                if known > 0 || counts.prompt.contains(&id) {
                    self.count_ids.push(id);
                    self.count_times.push(known);
                }
            }
        }
        self.listed_ids.extend(&asked.logprob_ids);
        row.bias_end = self.bias_ids.len() as u32;
        row.forbidden_end = self.forbidden_ids.len() as u32;
        row.counts_end = self.count_ids.len() as u32;
        row.listed_end = self.listed_ids.len() as u32;
        self.rows.push(row);
    }
}

/// The kernels, in the order of their launches.
fn instances() -> [Instance; 6] {
    [
        manifest::sampling_adjust(),
        manifest::sampling_scan(),
        manifest::sampling_weigh(),
        manifest::sampling_draw(),
        manifest::sampling_rank(),
        manifest::sampling_report(),
    ]
}

/// The kernels with the number of tokens of a segment.
struct Sampling {
    kernels: Kernels,
    segment: u32,
}

impl Sampling {
    fn new() -> Self {
        Self { kernels: Kernels::new(&instances()), segment: SAMPLING_TILE }
    }

    /// Returns tokens and statuses of rows of `vocab` logits each.
    fn sample(&self, order: Order, logits: &[f32], vocab: usize, asked: &[Asked]) -> Vec<(SampledToken, u32)> {
        let mut lists = Lists::default();
        asked.iter().for_each(|row| lists.push(row, vocab.div_ceil(32)));
        self.run(order, logits, vocab, &lists)
    }

    fn run(&self, order: Order, logits: &[f32], vocab: usize, lists: &Lists) -> Vec<(SampledToken, u32)> {
        let rows = lists.rows.len();
        let stride = vocab.next_multiple_of(4);
        let mut padded = vec![f32::NAN; rows * stride];
        for (to, from) in padded.chunks_mut(stride).zip(logits.chunks(vocab)) {
            to[..vocab].copy_from_slice(from);
        }
        let logits = padded.clone();
        let poison = u32::MAX;
        let mut adjusted = vec![f32::NAN; rows * stride];
        let [mut ids, mut status, mut ranks, mut top_counts] = [(); 4].map(|()| vec![poison; rows]);
        ids[..lists.before.len()].copy_from_slice(&lists.before);
        let (mut logprobs, mut top_ids) = (vec![f32::NAN; rows], vec![poison; rows * TOP_STRIDE]);
        let mut top_logprobs = vec![f32::NAN; rows * TOP_STRIDE];
        let segments = vocab.div_ceil(self.segment as usize);
        let mut states = vec![SamplingState::default(); rows];
        let mut parts = vec![u64::MAX; rows * 2 * segments];
        let mut masses = vec![0u64; rows * SAMPLING_BINS as usize];
        let mut counts = vec![0u32; rows * SAMPLING_BINS as usize];
        let mut lists_of = vec![u64::MAX; rows * SAMPLING_LIST as usize];
        let params = SamplingParams {
            logits: address(&logits),
            adjusted: address_mut(&mut adjusted),
            rows_of: address(&lists.rows),
            masks: address(&lists.masks),
            bias_ids: address(&lists.bias_ids),
            bias_values: address(&lists.bias_values),
            forbidden_ids: address(&lists.forbidden_ids),
            count_ids: address(&lists.count_ids),
            count_times: address(&lists.count_times),
            listed_ids: address(&lists.listed_ids),
            ids: address_mut(&mut ids),
            status: address_mut(&mut status),
            logprobs: address_mut(&mut logprobs),
            ranks: address_mut(&mut ranks),
            top_counts: address_mut(&mut top_counts),
            top_ids: address_mut(&mut top_ids),
            top_logprobs: address_mut(&mut top_logprobs),
            states: address_mut(&mut states),
            parts: address_mut(&mut parts),
            masses: address_mut(&mut masses),
            counts: address_mut(&mut counts),
            lists: address_mut(&mut lists_of),
            rows: rows as u32,
            vocab: vocab as u32,
            row_stride: stride as u32,
            mask_words: vocab.div_ceil(32) as u32,
            top_stride: TOP_STRIDE as u32,
            segment: self.segment,
        };
        for instance in instances() {
            launch(&self.kernels, order, &instance, params.grid(), &params);
        }
        assert!(states.iter().all(|state| (state.ticket, state.listed) == (0, 0)), "the next launches begin with 0");
        assert!(masses.iter().all(|mass| *mass == 0) && counts.iter().all(|count| *count == 0), "bins are cleared");
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&logits) == bits(&padded), "the model's logits are only read");

        let token = |r: usize| {
            let reports = lists.rows[r].flags & SAMPLING_LOGPROBS != 0;
            let top = |i: usize| (top_ids[r * TOP_STRIDE + i], top_logprobs[r * TOP_STRIDE + i]);
            let logprobs = reports.then(|| TokenLogprobs {
                logprob: logprobs[r],
                rank: ranks[r],
                top: (0..top_counts[r] as usize).map(top).collect(),
            });
            (SampledToken { id: ids[r], logprobs }, status[r])
        };
        (0..rows).map(token).collect()
    }
}

/// Returns logits of one of the difficult kinds.
fn draw_logits(rng: &mut TestRng, vocab: usize) -> Vec<f32> {
    let spread = pick(rng, &[0.1, 1.0, 10.0, 300.0]);
    let mut row: Vec<f32> = (0..vocab).map(|_| rng.signed() * spread).collect();
    match rng.below(8) {
        // The first kind has hundreds of ties.
        0 => row.iter_mut().for_each(|x| *x = (*x / spread * 3.0).round()),
        1 => row.fill(rng.signed()),
        2 => row.iter_mut().step_by(3).for_each(|x| *x = f32::NEG_INFINITY),
        3 => row.iter_mut().step_by(5).for_each(|x| *x = f32::NAN),
        4 => {
            let at = rng.below(vocab);
            row[at] = f32::INFINITY;
            row[rng.below(vocab)] = f32::INFINITY;
        }
        5 => row.iter_mut().for_each(|x| *x *= 3e38 / spread),
        6 => row.iter_mut().for_each(|x| *x = if *x > 0.0 { 0.0 } else { -0.0 }),
        _ => {}
    }
    row
}

fn draw_ids(rng: &mut TestRng, vocab: usize, most: usize) -> Vec<u32> {
    (0..rng.below(most + 1)).map(|_| rng.below(vocab) as u32).collect()
}

fn draw_asked(rng: &mut TestRng, vocab: usize) -> Asked {
    let mut asked = Asked {
        params: SampleParams {
            temperature: pick(rng, &[0.0, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0]),
            top_k: pick(rng, &[0, 0, 1, 2, 5, 40, 1_000_000]),
            top_p: pick(rng, &[1.0, 1.0, 0.95, 0.5, 0.1, 0.0]),
            min_p: pick(rng, &[0.0, 0.0, 0.05, 0.5, 1.0]),
            seed: rng.next_u64(),
            logprobs: pick(rng, &[None, Some(0), Some(1), Some(5), Some(20)]),
            ..SampleParams::default()
        },
        output_position: rng.below(1000) as u32,
        ..Asked::default()
    };
    if rng.below(3) == 0 {
        asked.params.repetition_penalty = pick(rng, &[1.0, 1.25, 0.5]);
        asked.params.presence_penalty = pick(rng, &[0.0, 0.5, -1.0]);
        asked.params.frequency_penalty = pick(rng, &[0.0, 0.25]);
        let mut counts = TokenCounts::new(&draw_ids(rng, vocab, 30), &draw_ids(rng, vocab, 20));
        if rng.below(2) == 0 {
            let seen = counts.output.iter().map(|(id, _)| *id).chain(counts.prompt.iter().copied());
            let all: Vec<u32> = seen.chain([rng.below(vocab) as u32]).collect();
            let token = pick(rng, &all);
            asked.pending = Some(token);
            counts.push(token);
        }
        asked.counts = Some(counts);
    }
    if rng.below(4) == 0 {
        asked.logit_bias = draw_ids(rng, vocab, 6).into_iter().map(|id| (id, rng.signed() * 10.0)).collect();
        // One bias is for an id beyond the vocabulary, and one token has two.
        asked.logit_bias.push((vocab as u32 + 3, 1.0));
        asked.logit_bias.push((asked.logit_bias[0].0, 0.5));
    }
    if rng.below(4) == 0 {
        asked.forbidden = draw_ids(rng, vocab + 2, 5);
        asked.forbidden.sort_unstable();
        asked.forbidden.dedup();
    }
    if rng.below(4) == 0 {
        let keep = pick(rng, &[0, 1, 3]);
        let word = |rng: &mut TestRng| (0..keep).fold(0, |bits, _| bits | rng.next_u64() as u32);
        asked.mask = Some((0..vocab.div_ceil(32)).map(|_| word(rng)).collect());
    }
    if rng.below(10) == 0 {
        asked.forced = Some(rng.below(vocab) as u32);
    }
    if rng.below(5) == 0 {
        asked.logprob_ids = draw_ids(rng, vocab + 5, 10);
    }
    asked
}

/// Checks that the kernels' token is the definition's, and its log-probabilities within rounding.
fn assert_same(found: &SampledToken, expected: &SampledToken, context: &str) {
    assert_eq!(found.id, expected.id, "{context}");
    let (Some(found), Some(expected)) = (&found.logprobs, &expected.logprobs) else {
        return assert_eq!(found.logprobs.is_some(), expected.logprobs.is_some(), "{context}");
    };
    assert_eq!(found.rank, expected.rank, "{context}");
    let near = |a: f32, b: f32| a == b || (a - b).abs() <= 1e-5 * (1.0 + b.abs());
    assert!(near(found.logprob, expected.logprob), "{context}: {} not {}", found.logprob, expected.logprob);
    let ids = |logprobs: &TokenLogprobs| logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>();
    assert_eq!(ids(found), ids(expected), "{context}");
    for (a, b) in found.top.iter().zip(&expected.top) {
        assert!(near(a.1, b.1), "{context}: {a:?} not {b:?}");
    }
}

/// Maximum relative difference of a device's exponential from the host's: CUDA's `expf` has an error of up to two units
/// in the last place, and its argument, at most 100 here, is rounded once more.
const EXPONENTIAL_ERROR: f64 = 1e-5;

/// Returns the definition's result for a row. On a device another token may result if only the rounding of an
/// exponential decides; this is reported, and the log-probabilities are then those of the token that was found.
fn expected(sampler: &mut Sampler, logits: &[f32], asked: &Asked, found: u32, context: &str) -> SampledToken {
    let expected = sampler.sample(logits, &asked.row());
    let rounded =
        on_device() && found != expected.id && sampler.may_draw(logits, &asked.row(), found, EXPONENTIAL_ERROR);
    if !rounded {
        return expected;
    }
    eprintln!("rounding of expf: token {found} in place of {}, {context}", expected.id);
    sampler.sample(logits, &SampleRow { forced: Some(found), ..asked.row() })
}

#[test]
fn tokens_of_drawn_rows_are_the_definitions() {
    let rng = &mut rng();
    let vocabs = [1, 2, 31, 130, 1 + rng.below(600), 1000 + rng.below(3000), 4096, 5001];
    check_drawn(24, &vocabs, rng);
}

/// Checks drawn rows of each vocabulary.
pub(crate) fn check_drawn(rows: usize, vocabs: &[usize], rng: &mut TestRng) {
    for &vocab in vocabs {
        let asked: Vec<Asked> = (0..rows).map(|_| draw_asked(rng, vocab)).collect();
        let logits: Vec<f32> = asked.iter().flat_map(|_| draw_logits(rng, vocab)).collect();
        check_rows(&asked, &logits, vocab);
    }
}

/// Checks a row of whose tokens each is biased, forbidden and counted, at different places of the lists.
pub(crate) fn check_adjusted_again(rng: &mut TestRng) {
    let (ids, vocab) = ([1, 2, 3, 4, 5], 40);
    let asked = Asked {
        params: SampleParams { temperature: 1.0, repetition_penalty: 1.25, ..SampleParams::default() },
        logit_bias: ids.map(|id| (id, 1.0)).to_vec(),
        forbidden: ids.into_iter().rev().collect(),
        counts: Some(TokenCounts::new(&[3], &[1, 2, 4])),
        ..Asked::default()
    };
    check_rows(&[asked], &draw_logits(rng, vocab), vocab);
}

/// Checks rows in segments of one tile, in every order of threads, and in longer segments.
fn check_rows(asked: &[Asked], logits: &[f32], vocab: usize) {
    let (kernels, mut sampler) = (Sampling::new(), Sampler::new());
    let found = in_every_order(|order| {
        // NaN is not equal to itself, and tokens may have such log-probabilities.
        format!("{:?}", kernels.sample(order, logits, vocab, asked))
    });
    let tokens = kernels.sample(Order::Forward, logits, vocab, asked);
    assert_eq!(format!("{tokens:?}"), found);
    if !finds_races() {
        let longer = Sampling { segment: 3 * SAMPLING_TILE, ..kernels };
        assert_eq!(format!("{:?}", longer.sample(Order::Forward, logits, vocab, asked)), found, "longer segments");
    }
    for (r, (asked, (token, _))) in asked.iter().zip(&tokens).enumerate() {
        let logits = &logits[r * vocab..][..vocab];
        let context = format!("vocabulary {vocab}, row {r}: {asked:?}");
        let expected = expected(&mut sampler, logits, asked, token.id, &context);
        assert_same(token, &expected, &context);
    }
}

/// Returns rows whose filters end among many tokens: equal ones, more than a list holds, and nearly equal ones.
fn crowded(vocab: usize, rng: &mut TestRng) -> (Vec<Asked>, Vec<f32>) {
    let filters =
        [(1.0, 0, 0.7), (1.0, 900, 1.0), (1.0, 2500, 0.6), (40.0, 0, 0.3), (40.0, 700, 0.9), (0.02, 50, 0.99)];
    let asked = filters.map(|(temperature, top_k, top_p)| {
        let seed = rng.next_u64();
        let params = SampleParams { temperature, top_k, top_p, logprobs: Some(7), seed, ..SampleParams::default() };
        Asked { params, ..Asked::default() }
    });
    let kinds: [fn(usize) -> f32; 3] = [|_| 0.5, |id| (id % 2) as f32, |id| 1.0 + (id * 7919 % 4096) as f32 * 1e-6];
    let logits = (0..asked.len()).flat_map(|row| (0..vocab).map(move |id| kinds[row % 3](id))).collect();
    (asked.to_vec(), logits)
}

/// Checks rows of [`crowded`].
pub(crate) fn check_crowded(vocab: usize, rng: &mut TestRng) {
    let (asked, logits) = crowded(vocab, rng);
    check_rows(&asked, &logits, vocab);
}

#[test]
fn filters_that_end_among_many_tokens_are_the_definitions() {
    [700, 5200].into_iter().for_each(|vocab| check_crowded(vocab, &mut rng()));
}

#[test]
fn a_row_draws_the_same_alone_and_among_others() {
    let (mut rng, kernels) = (rng(), Sampling::new());
    let vocab = 300 + rng.below(900);
    let asked: Vec<Asked> = (0..8).map(|_| draw_asked(&mut rng, vocab)).collect();
    let logits: Vec<f32> = asked.iter().flat_map(|_| draw_logits(&mut rng, vocab)).collect();
    let together = kernels.sample(Order::Forward, &logits, vocab, &asked);
    for (r, asked) in asked.iter().enumerate() {
        let alone = kernels.sample(Order::Forward, &logits[r * vocab..][..vocab], vocab, std::slice::from_ref(asked));
        assert_eq!(format!("{:?}", alone[0]), format!("{:?}", together[r]));
    }
}

#[test]
fn only_allowed_tokens_are_drawn() {
    let (mut rng, kernels) = (rng(), Sampling::new());
    let vocab = 200usize;
    let mask: Vec<u32> = (0..vocab.div_ceil(32)).map(|_| (rng.next_u64() & rng.next_u64()) as u32 | 1).collect();
    let asked: Vec<Asked> = (0..200)
        .map(|_| {
            let mut asked = draw_asked(&mut rng, vocab);
            asked.params.temperature = 2.0;
            asked.mask = Some(mask.clone());
            asked.forced = None;
            asked
        })
        .collect();
    let logits: Vec<f32> = asked.iter().flat_map(|_| draw_logits(&mut rng, vocab)).collect();
    for (asked, (token, status)) in asked.iter().zip(kernels.sample(Order::Forward, &logits, vocab, &asked)) {
        let id = token.id as usize;
        assert!(mask[id / 32] >> (id % 32) & 1 == 1, "the mask does not allow {id}");
        assert!(status != 0 || !asked.forbidden.contains(&token.id), "{id} is forbidden");
    }
}

#[test]
fn small_row_of_which_nothing_is_left_is_flagged() {
    let (kernels, vocab) = (Sampling::new(), 70);
    let mut row: Vec<f32> = (0..vocab).map(|i| (i % 7) as f32).collect();
    row[3] = f32::NAN;
    let asked = |mask: Option<Vec<u32>>, forbidden: Vec<u32>| Asked { mask, forbidden, ..Asked::default() };
    let only_5_and_6 = Some(vec![0b110_0000, 0, 0]);
    let all: Vec<u32> = (0..vocab as u32).collect();
    let cases = [
        (asked(Some(vec![0; 3]), vec![]), 6, true),
        (asked(only_5_and_6.clone(), vec![5, 6]), 6, true),
        (asked(only_5_and_6, vec![6]), 5, false),
        (asked(Some(vec![0; 3]), vec![6, 13]), 20, true),
        (asked(None, all), 6, true),
        (asked(None, vec![]), 6, false),
    ];
    let (asked, expected): (Vec<_>, Vec<_>) = cases.into_iter().map(|(a, id, flagged)| (a, (id, flagged))).unzip();
    let logits = row.repeat(asked.len());
    let found = kernels.sample(Order::Forward, &logits, vocab, &asked);
    for (i, ((token, status), (id, flagged))) in found.iter().zip(expected).enumerate() {
        assert_eq!((token.id, *status), (id, if flagged { SAMPLING_STATUS_EXHAUSTED } else { 0 }), "case {i}");
        let definition = Sampler::new().sample(&row, &asked[i].row());
        assert_eq!(token.id, definition.id, "case {i}");
    }
}

#[test]
fn padding_is_left_alone() {
    let (kernels, vocab) = (Sampling::new(), 40);
    let mut lists = Lists::default();
    let report = Asked { params: SampleParams { logprobs: Some(3), ..SampleParams::default() }, ..Asked::default() };
    lists.push(&report, 2);
    lists.push(&report, 2);
    lists.rows[1].flags |= SAMPLING_PADDING | SAMPLING_ADJUST;
    let logits: Vec<f32> = (0..2 * vocab).map(|i| i as f32).collect();
    // The log-probabilities of a row without them are not read.
    let mut outputs = lists.rows.clone();
    outputs[1].flags &= !SAMPLING_LOGPROBS;
    let found = kernels.run(Order::Forward, &logits, vocab, &Lists { rows: outputs, ..lists });
    assert_eq!((found[0].0.id, found[0].1), (39, 0));
    assert_eq!((found[1].0.id, found[1].1), (u32::MAX, u32::MAX), "as it was before");
}

#[test]
fn draws_follow_the_law() {
    // A device samples more in little time.
    let draws = if on_device() { 100_000 } else { 3000 };
    let (mut rng, kernels) = (rng(), Sampling::new());
    let row = [0.0f32, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.25];
    let params =
        SampleParams { temperature: 0.8, top_k: 6, min_p: 0.05, seed: rng.next_u64(), ..SampleParams::default() };
    let asked: Vec<Asked> =
        (0..draws).map(|i| Asked { params, output_position: i as u32, ..Asked::default() }).collect();
    let found = kernels.sample(Order::Forward, &row.repeat(draws), row.len(), &asked);
    let mut times = [0u32; 8];
    found.iter().for_each(|(token, _)| times[token.id as usize] += 1);
    let kept: Vec<usize> = vec![0, 1, 3, 4, 6, 7];
    let weight = |i: usize| (f64::from(row[i]) / 0.8).exp();
    let total: f64 = kept.iter().map(|&i| weight(i)).sum();
    assert_eq!(times[2] + times[5], 0, "beyond the six most likely");
    let chi2: f64 = kept
        .iter()
        .map(|&i| {
            let expected = draws as f64 * weight(i) / total;
            (f64::from(times[i]) - expected).powi(2) / expected
        })
        .sum();
    // The limit fails one in a million runs with 5 degrees of freedom.
    assert!(chi2 < 35.9, "chi-square {chi2}: {times:?}");
}
