//! Converts the fields of a request into sampling parameters. Values out of range are refused by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use octavo_engine::{SamplingParams, TokenSet};
use octavo_text::TextOptions;
use serde_json::{Map, Value, json};

use crate::api::shared::bias::{LogitBias, MAX_BIASED_TOKENS};
use crate::api::shared::common::CommonFields;
use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::seeds::Seeds;

/// Minimum temperature other than 0; lower ones are raised to it.
const MIN_TEMPERATURE: f64 = 0.01;

/// The validated parameters of a request, independent of its prompts.
#[derive(Clone, Debug)]
pub(crate) struct Sampling {
    /// The parameters that all sequences share: all but seed and `max_tokens`.
    base: SamplingParams,
    seed: Option<i64>,
    /// The limit of the client.
    max_tokens: Option<u32>,
    /// The limit of the model, if the client sets none. It is no error if it exceeds the context.
    default_max_tokens: Option<u32>,
    /// Sequences for each prompt.
    pub(crate) n: u32,
    pub(crate) text: TextOptions,
}

/// The limit on output tokens, which chat and completion requests specify differently.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputLimit<'a> {
    /// The field that set the limit.
    pub(crate) field: &'a str,
    /// The limit in tokens, if the client sets one.
    pub(crate) max_tokens: Option<i64>,
    /// The model's limit, for clients that set none.
    pub(crate) default: Option<u32>,
    /// The minimum: 0 if the prompt is echoed, else 1.
    pub(crate) least: i64,
}

impl Sampling {
    /// Validates a request's parameters. `logprobs` is the number of alternatives, −1 for all.
    pub(crate) fn new(
        fields: &CommonFields,
        limit: OutputLimit<'_>,
        logprobs: Option<(&str, i64)>,
        config: &ServerConfig,
    ) -> Result<Self, ApiError> {
        let defaults = &config.sampling_defaults;
        let n = n(fields.n.unwrap_or(1), config)?;
        let max_tokens = max_tokens(limit, config)?;
        let mut base = SamplingParams {
            temperature: temperature(fields.temperature.unwrap_or(f64::from(defaults.temperature.unwrap_or(1.0))))?,
            top_p: top_p(fields.top_p.unwrap_or(f64::from(defaults.top_p.unwrap_or(1.0))))?,
            top_k: top_k(fields.top_k.unwrap_or(i64::from(defaults.top_k.unwrap_or(0))))?,
            min_p: within("min_p", fields.min_p.unwrap_or(f64::from(defaults.min_p.unwrap_or(0.0))), 0.0, 1.0)?,
            presence_penalty: within("presence_penalty", fields.presence_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            frequency_penalty: within("frequency_penalty", fields.frequency_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            repetition_penalty: repetition_penalty(
                fields.repetition_penalty.unwrap_or(f64::from(defaults.repetition_penalty.unwrap_or(1.0))),
            )?,
            seed: 0,
            logprobs: logprobs.map(|(field, count)| alternatives(field, count, config)).transpose()?,
            logprob_token_ids: logprob_token_ids(fields, config)?,
            prompt_logprobs: prompt_logprobs(fields, config)?,
            repetition_detection: fields.repetition_detection,
            logit_bias: logit_bias(fields, config)?,
            max_tokens: 1,
            min_tokens: min_tokens(fields.min_tokens.unwrap_or(0))?,
            eos_token_ids: config.eos_token_ids.clone(),
            stop_token_ids: stop_token_ids(fields, config)?,
            ignore_eos: fields.ignore_eos,
        };
        if base.temperature == 0.0 {
            if n > 1 {
                let message = format!("n must be 1 when using greedy sampling, got {n}.");
                return Err(ApiError::invalid_value("n", n, message));
            }
            (base.top_p, base.top_k, base.min_p) = (1.0, 0, 0.0);
        }
        let text = TextOptions {
            stop: fields.stop.clone().into(),
            include_stop_str_in_output: fields.include_stop_str_in_output,
            skip_special_tokens: fields.skip_special_tokens,
            min_tokens: base.min_tokens,
        };
        let default_max_tokens = limit.default.filter(|&tokens| tokens > 0);
        Ok(Self { base, seed: fields.seed.filter(|&seed| seed != -1), max_tokens, default_max_tokens, n, text })
    }

    /// Tokens that a sequence may generate after a prompt of `prompt_len` < `max_model_len` tokens.
    pub(crate) fn max_tokens_after(&self, prompt_len: usize, max_model_len: usize) -> Result<u32, ApiError> {
        let room = u32::try_from(max_model_len.saturating_sub(prompt_len)).unwrap_or(u32::MAX);
        let max_tokens = self.max_tokens.or(self.default_max_tokens).map_or(room, |wanted| wanted.min(room));
        let min_tokens = self.base.min_tokens;
        if min_tokens > max_tokens {
            let message =
                format!("min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.");
            return Err(ApiError::invalid_value("min_tokens", min_tokens, message));
        }
        Ok(max_tokens)
    }

    /// The parameters of one sequence, the `child`-th of its prompt.
    pub(crate) fn for_sequence(&self, child: u32, max_tokens: u32, seeds: &Seeds) -> SamplingParams {
        let seed = match self.seed {
            Some(seed) => seed.wrapping_add(i64::from(child)).cast_unsigned(),
            None => seeds.next(),
        };
        SamplingParams { seed, max_tokens, ..self.base.clone() }
    }

    /// Adds the log-probabilities of an echoed prompt, with as many alternatives as the output has.
    pub(crate) fn with_echoed_logprobs(mut self) -> Self {
        self.base.prompt_logprobs = self.base.prompt_logprobs.max(self.base.logprobs);
        self
    }

    /// Whether the prompt must be computed even if no token is generated.
    pub(crate) fn scores_prompt(&self) -> bool {
        self.base.prompt_logprobs.is_some()
    }

    /// The effective values, as decimal numbers that look like those of the request.
    pub(crate) fn temperature_and_top_p(&self) -> (f64, f64) {
        let decimal = |value: f32| value.to_string().parse().unwrap_or(f64::from(value));
        (decimal(self.base.temperature), decimal(self.base.top_p))
    }

    /// The parameters of a prompt's sequences under vLLM's names.
    pub(crate) fn describe(&self, max_tokens: u32) -> Map<String, Value> {
        let decimal = |value: f32| value.to_string().parse().unwrap_or(f64::from(value));
        let base = &self.base;
        let bias: Map<_, _> =
            base.logit_bias.iter().map(|&(id, bias)| (id.to_string(), Value::from(decimal(bias)))).collect();
        let pairs = [
            ("n", self.n.into()),
            ("presence_penalty", decimal(base.presence_penalty).into()),
            ("frequency_penalty", decimal(base.frequency_penalty).into()),
            ("repetition_penalty", decimal(base.repetition_penalty).into()),
            ("temperature", decimal(base.temperature).into()),
            ("top_p", decimal(base.top_p).into()),
            ("top_k", base.top_k.into()),
            ("min_p", decimal(base.min_p).into()),
            ("seed", self.seed.into()),
            ("stop", json!(self.text.stop.strings())),
            ("stop_token_ids", json!(*base.stop_token_ids)),
            ("ignore_eos", base.ignore_eos.into()),
            ("max_tokens", max_tokens.into()),
            ("min_tokens", base.min_tokens.into()),
            ("logprobs", base.logprobs.into()),
            ("prompt_logprobs", base.prompt_logprobs.into()),
            ("logprob_token_ids", json!(Some(&base.logprob_token_ids).filter(|ids| !ids.is_empty()))),
            ("skip_special_tokens", self.text.skip_special_tokens.into()),
            ("include_stop_str_in_output", self.text.include_stop_str_in_output.into()),
            ("logit_bias", if bias.is_empty() { Value::Null } else { bias.into() }),
        ];
        pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// The number of tokens that the client requested.
    pub(crate) fn max_tokens(&self) -> Option<u32> {
        self.max_tokens
    }

    /// Number of alternatives per token, if requested.
    pub(crate) fn logprobs(&self) -> Option<u32> {
        self.base.logprobs.map(|top| top.max(self.base.logprob_token_ids.len() as u32))
    }

    /// Number of entries per token in the chat format, if requested. The token itself is one of them, so it must not
    /// displace a token that the client named.
    pub(crate) fn chat_logprobs(&self) -> Option<u32> {
        let named = match self.base.logprob_token_ids.len() as u32 {
            0 => 0,
            named => named + 1,
        };
        self.base.logprobs.map(|top| top.max(named))
    }

    /// Number of alternatives per prompt token, if requested.
    pub(crate) fn prompt_logprobs(&self) -> Option<u32> {
        self.base.prompt_logprobs
    }

    /// Whether the client wants the prompt alone.
    pub(crate) fn generates_nothing(&self) -> bool {
        self.max_tokens == Some(0)
    }

    /// Whether a stop token's text belongs to the output.
    pub(crate) fn includes_stop(&self) -> bool {
        self.text.include_stop_str_in_output
    }
}

fn n(n: i64, config: &ServerConfig) -> Result<u32, ApiError> {
    if n < 1 {
        return Err(ApiError::invalid_value("n", n, format!("n must be at least 1, got {n}.")));
    }
    match u32::try_from(n).ok().filter(|&n| n as usize <= config.max_sequences) {
        Some(n) => Ok(n),
        None => {
            let message = format!("n must be at most {}, got {n}.", config.max_sequences);
            Err(ApiError::invalid_value("n", n, message))
        }
    }
}

fn max_tokens(limit: OutputLimit<'_>, config: &ServerConfig) -> Result<Option<u32>, ApiError> {
    let OutputLimit { field, max_tokens, least, .. } = limit;
    let Some(wanted) = max_tokens else { return Ok(None) };
    if wanted < least {
        let message = format!("{field} must be at least {least}, got {wanted}.");
        return Err(ApiError::invalid_value(field, wanted, message));
    }
    match u32::try_from(wanted).ok().filter(|&tokens| tokens as usize <= config.max_model_len) {
        Some(tokens) => Ok(Some(tokens)),
        None => {
            let message = format!(
                "{field}={wanted} cannot be greater than max_model_len={}. Please request fewer output tokens.",
                config.max_model_len
            );
            Err(ApiError::invalid_value(field, wanted, message))
        }
    }
}

fn temperature(value: f64) -> Result<f32, ApiError> {
    if value < 0.0 {
        let message = format!("temperature must be non-negative, got {value}.");
        return Err(ApiError::invalid_value("temperature", value, message));
    }
    if value > 2.0 {
        let message = format!("temperature must be in [0, 2], got {value}.");
        return Err(ApiError::invalid_value("temperature", value, message));
    }
    Ok(if value == 0.0 { 0.0 } else { value.max(MIN_TEMPERATURE) as f32 })
}

fn top_p(value: f64) -> Result<f32, ApiError> {
    if value > 0.0 && value <= 1.0 {
        return Ok((value as f32).max(f32::MIN_POSITIVE));
    }
    Err(ApiError::invalid_value("top_p", value, format!("top_p must be in (0, 1], got {value}.")))
}

fn top_k(value: i64) -> Result<u32, ApiError> {
    match value {
        -1 => Ok(0),
        0.. => Ok(u32::try_from(value).unwrap_or(0)),
        _ => {
            let message = format!("top_k must be 0 (disable), or at least 1, got {value}.");
            Err(ApiError::invalid_value("top_k", value, message))
        }
    }
}

fn within(field: &str, value: f64, low: f64, high: f64) -> Result<f32, ApiError> {
    if (low..=high).contains(&value) {
        return Ok(value as f32);
    }
    Err(ApiError::invalid_value(field, value, format!("{field} must be in [{low}, {high}], got {value}.")))
}

fn repetition_penalty(value: f64) -> Result<f32, ApiError> {
    let narrow = value as f32;
    if narrow > 0.0 && narrow.is_finite() && narrow.recip().is_finite() {
        return Ok(narrow);
    }
    let message = format!("repetition_penalty must be greater than zero, got {value}.");
    Err(ApiError::invalid_value("repetition_penalty", value, message))
}

fn min_tokens(value: i64) -> Result<u32, ApiError> {
    if value < 0 {
        let message = format!("min_tokens must be greater than or equal to 0, got {value}.");
        return Err(ApiError::invalid_value("min_tokens", value, message));
    }
    Ok(u32::try_from(value).unwrap_or(u32::MAX))
}

fn alternatives(field: &str, count: i64, config: &ServerConfig) -> Result<u32, ApiError> {
    let wanted = match count {
        -1 => config.vocab_size as u64,
        0.. => count.cast_unsigned(),
        _ => {
            let message = format!("{field} must be non-negative or -1, got {count}.");
            return Err(ApiError::invalid_value(field, count, message));
        }
    };
    match u32::try_from(wanted).ok().filter(|&wanted| wanted <= config.max_logprobs) {
        Some(wanted) => Ok(wanted),
        None => {
            let message = format!(
                "Requested sample logprobs of {wanted}, which is greater than max allowed: {}",
                config.max_logprobs
            );
            Err(ApiError::invalid_value(field, count, message))
        }
    }
}

/// The tokens whose log-probabilities the client requested.
fn logprob_token_ids(fields: &CommonFields, config: &ServerConfig) -> Result<Vec<u32>, ApiError> {
    fields.logprob_token_ids.iter().map(|&id| known_token("logprob_token_ids", id, config)).collect()
}

/// Checks that a token id exists in the model's vocabulary.
pub(crate) fn known_token(field: &str, id: i64, config: &ServerConfig) -> Result<u32, ApiError> {
    u32::try_from(id).ok().filter(|&id| (id as usize) < config.vocab_size).ok_or_else(|| {
        let message =
            format!("{field} contains the token id {id}, which is out of the vocabulary of {} ids.", config.vocab_size);
        ApiError::bad_request(message).with_param(field)
    })
}

fn prompt_logprobs(fields: &CommonFields, config: &ServerConfig) -> Result<Option<u32>, ApiError> {
    let Some(count) = fields.prompt_logprobs else { return Ok(None) };
    if fields.stream.is_some() && count != 0 {
        let message = "`prompt_logprobs` are not available when `stream=True`.";
        return Err(ApiError::bad_request(message).with_param("prompt_logprobs"));
    }
    alternatives("prompt_logprobs", count, config).map(Some)
}

/// The biases in the order of their ids. Of an id that is given twice, the last bias counts.
fn logit_bias(fields: &CommonFields, config: &ServerConfig) -> Result<Arc<[(u32, f32)]>, ApiError> {
    let LogitBias { entries, count, error } = &fields.logit_bias;
    let refused = |message: String| ApiError::bad_request(message).with_param("logit_bias");
    if let Some(error) = error {
        return Err(refused(error.clone()));
    }
    if *count > MAX_BIASED_TOKENS {
        return Err(refused(format!("logit_bias accepts at most {MAX_BIASED_TOKENS} tokens, got {count}.")));
    }
    let mut biases = BTreeMap::new();
    for &(id, bias) in entries {
        let known = u32::try_from(id).ok().filter(|&id| (id as usize) < config.vocab_size).ok_or_else(|| {
            let size = config.vocab_size;
            refused(format!("token_id {id} in logit_bias is out of the vocabulary. Vocabulary size: {size}"))
        })?;
        biases.insert(known, bias.clamp(-100.0, 100.0) as f32);
    }
    Ok(biases.into_iter().collect())
}

/// The ids that end a sequence.
fn stop_token_ids(fields: &CommonFields, config: &ServerConfig) -> Result<TokenSet, ApiError> {
    let id = |&id: &i64| {
        if id < 0 {
            let message = format!("stop_token_ids must contain token ids, got {id}.");
            return Err(ApiError::invalid_value("stop_token_ids", id, message));
        }
        known_token("stop_token_ids", id, config)
    };
    fields.stop_token_ids.iter().map(id).collect::<Result<Vec<_>, _>>().map(TokenSet::from)
}
