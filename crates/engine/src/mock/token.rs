//! What the mock executor draws.

use super::{MockConfig, memory::mix};
use crate::{Logprobs, SamplingParams};

/// The token after `state`. Of the parameters only these matter: the seed if the temperature is not 0, the
/// end-of-sequence and stop ids below `min_tokens`.
pub(super) fn draw(
    config: &MockConfig,
    params: &SamplingParams,
    state: u64,
    output_position: u32,
    mask: Option<&[u32]>,
) -> u32 {
    let ends = |id| params.eos_token_ids.contains(&id) || params.stop_token_ids.contains(&id);
    let below_min = output_position < params.min_tokens;
    let allowed = |id: u32| {
        let bit = mask.is_none_or(|mask| mask.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1));
        bit && !(below_min && ends(id))
    };
    let candidate = candidate(config, params, state, output_position);
    if allowed(candidate) {
        return candidate;
    }
    // The next allowed id, if any, counting round the vocabulary.
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
    let span = u64::from(config.tokens.end.saturating_sub(config.tokens.start).max(1));
    config.tokens.start + (mix(state ^ key) % span) as u32
}

/// Made-up log-probabilities: the drawn token is the most likely one, each following id half as likely.
pub(super) fn logprobs(config: &MockConfig, params: &SamplingParams, id: u32) -> Option<Logprobs> {
    let count = params.logprobs? as usize;
    let vocab = config.vocab_size as u32;
    let likely = |place: u32| ((id + place) % vocab, -(place as f32 + 1.0) * std::f32::consts::LN_2);
    let top = (0..vocab).take(count).map(likely).collect();
    Some(Logprobs { logprob: -std::f32::consts::LN_2, rank: 1, top })
}
