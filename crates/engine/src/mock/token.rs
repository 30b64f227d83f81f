//! Token and log-probability functions of the mock executor.

use super::{MockConfig, memory::mix};
use crate::{Logprobs, SamplingParams};

/// Returns the token after `state`. Only these parameters matter: the seed if the temperature is not 0, and the
/// end-of-sequence and stop ids below `min_tokens`.
pub(super) fn draw(
    config: &MockConfig,
    params: &SamplingParams,
    state: u64,
    output_position: u32,
    mask: Option<&[u32]>,
) -> u32 {
    let ends = |id| params.eos_token_ids.contains(&id) || params.stop_token_ids.contains(id);
    let below_min = output_position < params.min_tokens;
    let allowed = |id: u32| {
        let bit = mask.is_none_or(|mask| mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1));
        bit && !(below_min && ends(id))
    };
    let candidate = candidate(config, params, state, output_position);
    if allowed(candidate) {
        return candidate;
    }
    // Searches for the next allowed id and wraps around at the end of the vocabulary.
    let vocab = config.vocab_size as u32;
    (1..vocab).map(|step| (candidate % vocab + step) % vocab).find(|&id| allowed(id)).unwrap_or(candidate)
}

fn candidate(config: &MockConfig, params: &SamplingParams, state: u64, output_position: u32) -> u32 {
    if let (Some(after), Some(&eos)) = (config.eos_after, params.eos_token_ids.first())
        && output_position >= after
    {
        return eos;
    }
    if let Some(script) = config.script.as_deref().filter(|script| !script.is_empty()) {
        return script[output_position as usize % script.len()];
    }
    let key = if params.temperature > 0.0 { mix(params.seed ^ u64::from(output_position)) } else { 0 };
    function_of(config, state ^ key)
}

fn function_of(config: &MockConfig, state: u64) -> u32 {
    let span = u64::from(config.tokens.end.saturating_sub(config.tokens.start).max(1));
    config.tokens.start + (mix(state) % span) as u32
}

/// Returns made-up log-probabilities: the sampled token is the most likely one, and each following id is half as
/// likely.
pub(super) fn logprobs(config: &MockConfig, params: &SamplingParams, id: u32) -> Option<Logprobs> {
    let mut logprobs = around(config, id, id, params.logprobs?);
    if !params.logprob_token_ids.is_empty() {
        let mut ids = params.logprob_token_ids.clone();
        ids.sort_by_key(|&other| (place(config, id, other), other));
        ids.dedup();
        logprobs.top = ids.into_iter().map(|other| (other, logprob(place(config, id, other)))).collect();
    }
    Some(logprobs)
}

/// Returns the log-probability of token `id` after `state`, consistent with greedy sampling without a script.
pub(super) fn score(config: &MockConfig, state: u64, id: u32, alternatives: u32) -> Logprobs {
    around(config, function_of(config, state), id, alternatives)
}

/// Returns the log-probabilities of `id` where `best` is the most likely token.
fn around(config: &MockConfig, best: u32, id: u32, alternatives: u32) -> Logprobs {
    let vocab = config.vocab_size as u32;
    let place = place(config, best, id);
    let likely = |place: u32| ((best + place) % vocab, logprob(place));
    let top = (0..vocab).take(alternatives as usize).map(likely).collect();
    Logprobs { logprob: logprob(place), rank: place.saturating_add(1), top }
}

/// Returns how many tokens are more likely than `id`, where `best` is the most likely one. Ids beyond the vocabulary
/// are least likely.
fn place(config: &MockConfig, best: u32, id: u32) -> u32 {
    let vocab = config.vocab_size as u32;
    if id < vocab { (id + vocab - best % vocab) % vocab } else { u32::MAX }
}

fn logprob(place: u32) -> f32 {
    if place == u32::MAX { f32::NEG_INFINITY } else { -(place as f32 + 1.0) * std::f32::consts::LN_2 }
}

/// Returns a vector in [-1, 1) that depends on every token so far.
pub(super) fn embedding(config: &MockConfig, state: u64) -> Vec<f32> {
    let element = |index: u64| (mix(state ^ mix(index + 1)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    (0..config.hidden_size as u64).map(element).collect()
}
