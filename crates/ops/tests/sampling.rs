//! Tests of the scalar definition of `Sample`: examples for each rule, and properties over randomly generated rows.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may panic, as it may")]

use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow, SampledToken, Sampler, TokenCounts};
use proptest::prelude::*;

const RANDOM: SampleParams = SampleParams {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    repetition_penalty: 1.0,
    seed: 0,
    logprobs: None,
};

fn row(params: &SampleParams) -> SampleRow<'_> {
    SampleRow::new(params)
}

fn sample(logits: &[f32], row: &SampleRow<'_>) -> SampledToken {
    Sampler::new().sample(logits, row)
}

/// Counts how often each token is sampled over many positions.
fn histogram(logits: &[f32], row: &SampleRow<'_>, draws: u32) -> Vec<u32> {
    let mut sampler = Sampler::new();
    let mut counts = vec![0; logits.len()];
    for output_position in 0..draws {
        counts[sampler.sample(logits, &SampleRow { output_position, ..*row }).id as usize] += 1;
    }
    counts
}

fn support(logits: &[f32], row: &SampleRow<'_>) -> Vec<usize> {
    histogram(logits, row, 2_000).iter().enumerate().filter(|(_, n)| **n > 0).map(|(id, _)| id).collect()
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let weights: Vec<f64> = logits.iter().map(|&x| (f64::from(x) / temperature).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

#[test]
fn greedy_takes_the_lowest_id_among_equals() {
    assert_eq!(sample(&[0.0, 3.0, 3.0, -1.0], &row(&SampleParams::default())).id, 1);
    assert_eq!(sample(&[-0.0, 0.0], &row(&SampleParams::default())).id, 0, "the zeros are equal");
}

#[test]
fn bias_forbidden_and_mask_apply_to_greedy() {
    let greedy = SampleParams::default();
    let logits = [1.0, 5.0, 4.0, 3.0];
    assert_eq!(sample(&logits, &SampleRow { logit_bias: &[(3, 2.5), (99, 50.0)], ..row(&greedy) }).id, 3);
    assert_eq!(sample(&logits, &SampleRow { forbidden: &[1, 99], ..row(&greedy) }).id, 2);
    assert_eq!(sample(&logits, &SampleRow { mask: Some(&[0b1001]), ..row(&greedy) }).id, 3);
    let both = SampleRow { forbidden: &[3], mask: Some(&[0b1001]), logit_bias: &[(3, 100.0)], ..row(&greedy) };
    assert_eq!(sample(&logits, &both).id, 0, "a bias does not lift a ban");
}

#[test]
fn penalties_follow_their_definitions() {
    let counts = TokenCounts::new(&[2, 0, 2], &[1, 3, 1]);
    assert_eq!((&counts.prompt[..], &counts.output[..]), (&[0, 2][..], &[(1, 2), (3, 1)][..]));
    assert_eq!(counts.generated(), [1, 3, 1]);
    let draft = counts.with(3);
    assert_eq!((&draft.output[..], draft.generated()), (&[(1, 2), (3, 2)][..], &[1, 3, 1, 3][..]));
    assert_eq!(draft, TokenCounts::new(&[0, 2], &[3, 3, 1, 1]), "the order does not count");
    assert_ne!((draft.id(), counts.id()), (counts.id(), TokenCounts::default().id()));
    let pick = |params: SampleParams, logits: &[f32]| {
        assert!(params.needs_counts());
        sample(logits, &SampleRow { counts: Some(&counts), ..row(&params) }).id
    };
    let presence = SampleParams { presence_penalty: 1.0, ..SampleParams::default() };
    // The penalty applies once, however often the token was generated, and ignores the prompt.
    assert_eq!(pick(presence, &[0.0, 1.5, 0.4, 0.0, 0.45]), 1);
    assert_eq!(pick(presence, &[0.0, 1.5, 0.6, 0.0, 0.45]), 2);
    let frequency = SampleParams { frequency_penalty: 1.0, ..SampleParams::default() };
    assert_eq!(pick(frequency, &[-1.0, 1.5, -0.4, 0.5, -0.6]), 2, "1.5 - 2, 0.5 - 1");
    let repetition = SampleParams { repetition_penalty: 2.0, ..SampleParams::default() };
    assert_eq!(pick(repetition, &[0.9, 1.0, 1.1, -1.0, 0.52]), 2, "all are halved but the last");
    assert_eq!(pick(repetition, &[0.9, 1.0, 1.1, -1.0, 0.56]), 4);
    assert_eq!(pick(repetition, &[-1.0, -0.9, -0.8, -0.7, -1.3]), 4, "negative logits are multiplied");
}

#[test]
fn top_k_keeps_k_and_breaks_ties_by_id() {
    let params = SampleParams { top_k: 3, ..RANDOM };
    assert_eq!(support(&[1.0, 2.0, 1.0, 1.5, 1.0], &row(&params)), [0, 1, 3]);
    let params = SampleParams { top_k: 9, ..RANDOM };
    assert_eq!(support(&[1.0, 2.0, 1.0], &row(&params)), [0, 1, 2]);
}

#[test]
fn top_p_keeps_the_smallest_set_that_reaches_p() {
    let logits: Vec<f32> = [0.1f32, 0.4, 0.2, 0.3].iter().map(|p| p.ln()).collect();
    let kept = |top_p| support(&logits, &row(&SampleParams { top_p, ..RANDOM }));
    assert_eq!(kept(0.3), [1]);
    assert_eq!(kept(0.41), [1, 3]);
    assert_eq!(kept(0.69), [1, 3]);
    assert_eq!(kept(0.75), [1, 2, 3]);
    assert_eq!(kept(0.95), [0, 1, 2, 3]);
    assert_eq!(kept(0.0), [1], "one is always kept");
}

#[test]
fn top_p_is_taken_of_what_top_k_leaves() {
    let logits: Vec<f32> = [0.1f32, 0.4, 0.2, 0.3].iter().map(|p| p.ln()).collect();
    // 0.4 is 57 % of 0.7.
    assert_eq!(support(&logits, &row(&SampleParams { top_k: 2, top_p: 0.55, ..RANDOM })), [1]);
    assert_eq!(support(&logits, &row(&SampleParams { top_k: 2, top_p: 0.6, ..RANDOM })), [1, 3]);
}

#[test]
fn min_p_is_relative_to_the_most_likely() {
    let logits: Vec<f32> = [0.1f32, 0.4, 0.2, 0.3].iter().map(|p| p.ln()).collect();
    assert_eq!(support(&logits, &row(&SampleParams { min_p: 0.45, ..RANDOM })), [1, 2, 3]);
    assert_eq!(support(&logits, &row(&SampleParams { min_p: 1.0, ..RANDOM })), [1]);
    // Min-p applies after the temperature: at 2, the ratio 0.25 becomes 0.5.
    assert_eq!(support(&logits, &row(&SampleParams { min_p: 0.45, temperature: 2.0, ..RANDOM })), [0, 1, 2, 3]);
}

#[test]
fn log_probabilities_come_from_the_raw_row() {
    let params = SampleParams { logprobs: Some(2), temperature: 0.5, ..RANDOM };
    let logits = [2.0, 1.0, 1.0, f32::NAN, -3.0];
    let row = SampleRow { logit_bias: &[(4, 1000.0)], ..row(&params) };
    let token = sample(&logits, &row);
    assert_eq!(token.id, 4);
    let log_sum = (2f64.exp() + 2.0 * 1f64.exp() + (-3f64).exp()).ln();
    let logprobs = token.logprobs.unwrap();
    assert!((f64::from(logprobs.logprob) - (-3.0 - log_sum)).abs() < 1e-6);
    assert_eq!(logprobs.rank, 4);
    assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1], "ties by id");
    assert!((f64::from(logprobs.top[1].1) - (1.0 - log_sum)).abs() < 1e-6);
}

#[test]
fn logprobs_zero_reports_the_drawn_token_alone() {
    let params = SampleParams { logprobs: Some(0), ..SampleParams::default() };
    let logprobs = sample(&[0.0, 0.0], &row(&params)).logprobs.unwrap();
    assert_eq!((logprobs.rank, logprobs.top.len()), (1, 0));
    assert!((logprobs.logprob - 0.5f32.ln()).abs() < 1e-6);
}

#[test]
fn a_forced_token_is_taken_whatever_else_is_asked() {
    let params = SampleParams { logprobs: Some(1), ..RANDOM };
    let logits = [2.0, 1.0, 1.0, -3.0];
    let elsewhere = SampleRow {
        forced: Some(3),
        forbidden: &[3],
        mask: Some(&[0b0111]),
        logit_bias: &[(3, -50.0), (0, 50.0)],
        ..row(&params)
    };
    let token = sample(&logits, &elsewhere);
    assert_eq!(
        (token.id, token.logprobs),
        (3, sample(&logits, &SampleRow { forced: Some(3), ..row(&params) }).logprobs)
    );
    let quiet = SampleParams { logprobs: None, ..RANDOM };
    let token = sample(&logits, &SampleRow { forced: Some(2), ..row(&quiet) });
    assert_eq!(token, SampledToken { id: 2, logprobs: None });
    let beyond = sample(&logits, &SampleRow { forced: Some(9), ..row(&params) });
    assert_eq!((beyond.id, beyond.logprobs.unwrap().logprob), (9, f32::NEG_INFINITY), "no such token");
}

#[test]
fn chosen_tokens_are_reported_in_place_of_the_most_likely() {
    let params = SampleParams { logprobs: Some(2), ..SampleParams::default() };
    let logits = [2.0, 1.0, 1.0, f32::NAN, -3.0];
    let top = |logprob_ids: &[u32]| {
        let row = SampleRow { logprob_ids, ..row(&params) };
        sample(&logits, &row).logprobs.unwrap().top.into_iter().map(|t| t.0).collect::<Vec<_>>()
    };
    assert_eq!(top(&[]), [0, 1]);
    assert_eq!(top(&[4, 2, 1, 4]), [1, 2, 4], "descending, ties by id, once each");
    assert_eq!(top(&[9, 3, 4]), [4, 3, 9], "what is not there is not likely");
    let all = SampleRow { logprob_ids: &[0, 1, 2, 4], ..row(&params) };
    let chosen = sample(&logits, &all).logprobs.unwrap().top;
    let likely = sample(&logits, &row(&SampleParams { logprobs: Some(4), ..params })).logprobs.unwrap().top;
    assert_eq!(chosen, likely, "the same numbers");
    let quiet = SampleParams::default();
    assert_eq!(sample(&logits, &SampleRow { logprob_ids: &[1], ..row(&quiet) }).logprobs, None, "not asked for");
}

#[test]
fn unusual_rows_still_give_a_token() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for params in [SampleParams::default(), RANDOM, SampleParams { top_p: 0.5, top_k: 2, min_p: 0.1, ..RANDOM }] {
        let params = SampleParams { logprobs: Some(3), ..params };
        assert_eq!(sample(&[nan, 1.0, nan], &row(&params)).id, 1);
        assert_eq!(sample(&[0.0, inf, 2.0], &row(&params)).id, 1);
        assert_eq!(sample(&[nan, nan], &row(&params)).id, 0);
        assert_eq!(sample(&[-inf, -inf], &SampleRow { forbidden: &[0], ..row(&params) }).id, 1);
        assert_eq!(sample(&[-inf, inf], &SampleRow { logit_bias: &[(0, inf), (1, -inf)], ..row(&params) }).id, 1);
        assert_eq!(sample(&[f32::MAX, f32::MIN, f32::MAX], &SampleRow { mask: Some(&[2]), ..row(&params) }).id, 1);
        let logprobs = sample(&[nan, inf, 2.0], &row(&params)).logprobs.unwrap();
        assert!(logprobs.top.iter().all(|t| !t.1.is_nan()), "{logprobs:?}");
    }
    let odd = SampleParams { temperature: nan, top_p: nan, min_p: nan, ..RANDOM };
    assert_eq!(sample(&[0.0, 1.0], &row(&odd)).id, 1, "parameters that are no numbers are off");
}

#[test]
fn where_nothing_is_left_the_mask_outlives_the_ban() {
    let greedy = SampleParams::default();
    let logits = [3.0, 2.0, 1.0];
    // The grammar allows only forbidden tokens (end of sequence below `min_tokens`).
    assert_eq!(sample(&logits, &SampleRow { forbidden: &[1, 2], mask: Some(&[0b110]), ..row(&greedy) }).id, 1);
    // The mask allows nothing or has no words.
    assert_eq!(sample(&logits, &SampleRow { forbidden: &[0], mask: Some(&[0]), ..row(&greedy) }).id, 1);
    assert_eq!(sample(&logits, &SampleRow { forbidden: &[0, 1, 2], mask: Some(&[]), ..row(&greedy) }).id, 0);
}

#[test]
fn draws_follow_the_distribution() {
    const DRAWS: u32 = 20_000;
    let logits = [0.3f32, -1.0, 2.0, 0.0, 1.2, -0.5, 0.9, 1.1];
    for (temperature, seed) in [(1.0, 1), (0.6, 2), (2.5, 3)] {
        let params = SampleParams { temperature, seed, ..RANDOM };
        let found = histogram(&logits, &row(&params), DRAWS);
        let chi2: f64 = softmax(&logits, f64::from(temperature))
            .iter()
            .zip(&found)
            .map(|(p, &n)| (f64::from(n) - p * f64::from(DRAWS)).powi(2) / (p * f64::from(DRAWS)))
            .sum();
        // The limit is the 99.9 % quantile of chi-square with 7 degrees of freedom.
        assert!(chi2 < 24.3, "temperature {temperature}: chi-square {chi2}");
    }
}

fn drawn_params() -> impl Strategy<Value = SampleParams> {
    let temperature = prop_oneof![Just(0.0f32), 0.05f32..3.0];
    let (top_k, top_p, min_p) =
        (0u32..12, prop_oneof![Just(1.0f32), 0.01f32..1.0], prop_oneof![Just(0.0f32), 0.0f32..1.0]);
    let penalties = (-2.0f32..2.0, -2.0f32..2.0, 0.5f32..2.0);
    (temperature, top_k, top_p, min_p, penalties, any::<u64>(), proptest::option::of(0u32..5)).prop_map(
        |(temperature, top_k, top_p, min_p, penalties, seed, logprobs)| SampleParams {
            temperature,
            top_k,
            top_p,
            min_p,
            presence_penalty: penalties.0,
            frequency_penalty: penalties.1,
            repetition_penalty: penalties.2,
            seed,
            logprobs,
        },
    )
}

/// Generates finite and infinite logits, coarse enough for ties.
fn drawn_logits(vocab: usize) -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![
        12 => (-40i32..40).prop_map(|x| x as f32 / 4.0),
        1 => Just(f32::NAN),
        1 => Just(f32::NEG_INFINITY),
        1 => Just(f32::INFINITY),
        1 => Just(f32::MAX),
    ];
    proptest::collection::vec(logit, vocab)
}

#[derive(Debug, Clone)]
struct DrawnRow {
    logits: Vec<f32>,
    params: SampleParams,
    counts: TokenCounts,
    bias: Vec<(u32, f32)>,
    forbidden: Vec<u32>,
    mask: Option<Vec<u32>>,
    position: u32,
}

impl DrawnRow {
    fn row(&self) -> SampleRow<'_> {
        SampleRow {
            params: &self.params,
            output_position: self.position,
            counts: Some(&self.counts),
            logit_bias: &self.bias,
            forbidden: &self.forbidden,
            mask: self.mask.as_deref(),
            ..SampleRow::new(&self.params)
        }
    }
}

const VOCAB: usize = 70;

fn drawn_row() -> impl Strategy<Value = DrawnRow> {
    let id = || 0..VOCAB as u32 + 3;
    let ids = move |n| proptest::collection::vec(id(), 0..n);
    let counts = (ids(6), ids(6)).prop_map(|(prompt, output)| TokenCounts::new(&prompt, &output));
    let bias = proptest::collection::vec((id(), -100.0f32..100.0), 0..4);
    let mask = proptest::option::of(proptest::collection::vec(any::<u32>(), VOCAB.div_ceil(32)));
    (drawn_logits(VOCAB), drawn_params(), counts, bias, ids(5), mask, any::<u32>()).prop_map(
        |(logits, params, counts, bias, forbidden, mask, position)| DrawnRow {
            logits,
            params,
            counts,
            bias,
            forbidden,
            mask,
            position,
        },
    )
}

proptest! {
    /// Teacher forcing: a forced row reports the same log-probabilities as a row that samples that token.
    #[test]
    fn a_forced_token_has_the_log_probabilities_of_the_drawn_one(drawn in drawn_row()) {
        let params = SampleParams { logprobs: Some(3), ..drawn.params };
        let row = SampleRow { params: &params, ..drawn.row() };
        let free = sample(&drawn.logits, &row);
        let forced = SampleRow { forced: Some(free.id), ..SampleRow::new(&params) };
        prop_assert_eq!(sample(&drawn.logits, &forced), free);
    }

    #[test]
    fn the_mask_is_never_violated(drawn in drawn_row()) {
        let id = sample(&drawn.logits, &drawn.row()).id;
        prop_assert!((id as usize) < VOCAB);
        let allowed = |id: u32| drawn.mask.as_ref().is_none_or(|m| m[id as usize / 32] >> (id % 32) & 1 == 1);
        let free = |id: u32| allowed(id) && !drawn.forbidden.contains(&id);
        if (0..VOCAB as u32).any(free) {
            prop_assert!(free(id), "token {id} is masked or forbidden");
        }
    }

    #[test]
    fn a_row_does_not_depend_on_the_others(rows in proptest::collection::vec(drawn_row(), 1..6)) {
        let logits: Vec<f32> = rows.iter().flat_map(|r| r.logits.clone()).collect();
        let batch: Vec<_> = rows.iter().map(DrawnRow::row).collect();
        let mut together = vec![SampledToken { id: 99, logprobs: None }];
        Sampler::new().sample_batch(&logits, &SampleBatch { rows: &batch }, &mut together);
        let alone: Vec<_> = rows.iter().map(|r| sample(&r.logits, &r.row())).collect();
        prop_assert_eq!(together, alone);
    }

    #[test]
    fn greedy_is_the_limit_of_every_filter(drawn in drawn_row()) {
        let greedy = DrawnRow { params: SampleParams { temperature: 0.0, ..drawn.params }, ..drawn.clone() };
        let id = sample(&greedy.logits, &greedy.row()).id;
        for params in [
            SampleParams { temperature: 1.0, top_k: 1, ..drawn.params },
            SampleParams { temperature: 1.0, top_p: 0.0, ..drawn.params },
        ] {
            let filtered = DrawnRow { params, ..drawn.clone() };
            prop_assert_eq!(sample(&filtered.logits, &filtered.row()).id, id);
        }
    }

    /// Checks the nucleus against its definition, on rows wide enough for several sorted heads.
    #[test]
    fn top_p_draws_from_the_nucleus(
        logits in proptest::collection::vec(-30i32..30, 700),
        top_p in 0.05f32..0.999,
        temperature in 0.5f32..4.0,
        position in any::<u32>(),
    ) {
        let logits: Vec<f32> = logits.iter().map(|&x| x as f32 / 10.0).collect();
        let params = SampleParams { top_p, temperature, ..RANDOM };
        let id = sample(&logits, &SampleRow { output_position: position, ..row(&params) }).id;
        let probabilities = softmax(&logits, f64::from(temperature));
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let before: f64 = order.iter().take_while(|&&t| t != id as usize).map(|&t| probabilities[t]).sum();
        prop_assert!(before < f64::from(top_p) + 1e-5, "{before} of the mass is more likely than token {id}");
    }

    #[test]
    fn log_probabilities_sum_to_one(logits in proptest::collection::vec(-20.0f32..20.0, 1..50)) {
        let params = SampleParams { logprobs: Some(u32::MAX), ..SampleParams::default() };
        let logprobs = sample(&logits, &row(&params)).logprobs.unwrap();
        prop_assert_eq!(logprobs.top.len(), logits.len());
        let sum: f64 = logprobs.top.iter().map(|t| f64::from(t.1).exp()).sum();
        prop_assert!((sum - 1.0).abs() < 1e-5);
        prop_assert!(logprobs.top.is_sorted_by(|a, b| a.1 >= b.1));
        prop_assert_eq!(logprobs.rank, 1);
        prop_assert_eq!(logprobs.logprob, logprobs.top[0].1);
    }
}

proptest! {
    /// A temperature that is one unit in the last place larger represents exponentials that round differently.
    #[test]
    fn a_draw_by_other_exponentials_is_possible_and_few_others_are(
        logits in proptest::collection::vec(-8.0f32..8.0, 2..200),
        temperature in 0.3f32..2.0,
        top_k in prop_oneof![Just(0u32), 1..50u32],
        top_p in prop_oneof![Just(1.0f32), 0.05f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.001f32..0.5],
        seed in any::<u64>(),
    ) {
        let params = SampleParams { temperature, top_k, top_p, min_p, seed, ..RANDOM };
        let other = SampleParams { temperature: temperature.next_up(), ..params };
        let mut sampler = Sampler::new();
        for output_position in 0..20 {
            let own = SampleRow { output_position, ..row(&params) };
            let drawn = sampler.sample(&logits, &own).id;
            prop_assert!(sampler.may_draw(&logits, &own, drawn, 0.0));
            let drawn = sampler.sample(&logits, &SampleRow { output_position, ..row(&other) }).id;
            prop_assert!(sampler.may_draw(&logits, &own, drawn, 1e-5));
            let possible = (0..logits.len() as u32).filter(|id| sampler.may_draw(&logits, &own, *id, 1e-6));
            prop_assert!(possible.count() <= 4);
        }
    }
}

#[test]
fn no_exponential_decides_a_greedy_or_a_forced_token() {
    let (mut sampler, logits) = (Sampler::new(), [0.0, 1.0, 1.0]);
    let greedy = SampleParams { temperature: 0.0, ..RANDOM };
    assert!((0..3).all(|id| !sampler.may_draw(&logits, &row(&greedy), id, 0.1)));
    assert!(!sampler.may_draw(&logits, &SampleRow { forced: Some(1), ..row(&RANDOM) }, 1, 0.1));
    // A masked token is never possible.
    assert!(!sampler.may_draw(&logits, &SampleRow { mask: Some(&[0b011]), ..row(&RANDOM) }, 2, 0.5));
}
