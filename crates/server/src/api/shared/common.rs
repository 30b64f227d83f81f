//! JsonFields that chat and completion requests share.

use crate::api::shared::bias::LogitBias;
use crate::api::shared::fields::{JsonFields, Strings};
use crate::api::shared::structured_outputs;
use octavo_engine::RepetitionDetection;
use octavo_text::GrammarSpec;

/// Maximum number of stop strings.
pub(crate) const MAX_STOP_STRINGS: usize = 4;

/// Maximum length of all stop strings of a request together, in bytes.
const MAX_STOP_BYTES: usize = 16 << 10;

/// Maximum number of ids in `stop_token_ids`.
const MAX_STOP_TOKENS: usize = 4096;

/// Maximum number of ids in `allowed_token_ids`, more than any vocabulary has.
const MAX_ALLOWED_TOKENS: usize = 1 << 20;

/// Maximum number of ids in `logprob_token_ids`.
const MAX_LOGPROB_TOKENS: usize = 128;

/// Maximum number of bad words.
const MAX_BAD_WORDS: usize = 128;

/// Maximum length of a client's request id, in characters.
pub(crate) const MAX_REQUEST_ID: usize = 256;

/// The options of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamOptions {
    /// Whether a last chunk reports the usage.
    pub(crate) include_usage: bool,
    /// Whether every chunk reports the usage so far.
    pub(crate) continuous_usage: bool,
}

/// Maximum length of a repeated pattern, in tokens.
const MAX_PATTERN: i64 = 256;

/// The truncation of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Truncation {
    /// Number of tokens to keep; `None` for as many as leave room for the output.
    pub(crate) tokens: Option<u32>,
    /// The end that is cut off, if the client names it.
    pub(crate) side: Option<Side>,
}

/// An end of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

impl Truncation {
    /// Whether the end of the prompt is kept rather than its beginning. Models that generate text cut off the beginning,
    /// unless the client says otherwise.
    pub(crate) fn keeps_end(self) -> bool {
        self.side != Some(Side::Right)
    }
}

/// The shared fields. Types are checked, ranges are not.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CommonFields {
    pub(crate) model: Option<String>,
    pub(crate) max_tokens: Option<i64>,
    pub(crate) temperature: Option<f64>,
    pub(crate) top_p: Option<f64>,
    pub(crate) top_k: Option<i64>,
    pub(crate) min_p: Option<f64>,
    pub(crate) presence_penalty: Option<f64>,
    pub(crate) frequency_penalty: Option<f64>,
    pub(crate) repetition_penalty: Option<f64>,
    pub(crate) seed: Option<i64>,
    pub(crate) n: Option<i64>,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: Vec<i64>,
    pub(crate) logit_bias: LogitBias,
    pub(crate) min_tokens: Option<i64>,
    pub(crate) ignore_eos: bool,
    pub(crate) include_stop_str_in_output: bool,
    pub(crate) skip_special_tokens: bool,
    pub(crate) priority: i64,
    pub(crate) request_id: Option<String>,
    pub(crate) cache_salt: Option<String>,
    pub(crate) allowed_token_ids: Option<Vec<i64>>,
    pub(crate) bad_words: Vec<String>,
    pub(crate) logprob_token_ids: Vec<i64>,
    pub(crate) prompt_logprobs: Option<i64>,
    pub(crate) repetition_detection: Option<RepetitionDetection>,
    pub(crate) return_token_ids: bool,
    pub(crate) return_tokens_as_token_ids: bool,
    pub(crate) truncation: Option<Truncation>,
    /// Tokens per streamed chunk, if the client sets it.
    pub(crate) stream_interval: Option<u32>,
    /// The grammar of the output.
    pub(crate) grammar: Option<GrammarSpec>,
    /// The options of a streamed response; `None` for one JSON body.
    pub(crate) stream: Option<StreamOptions>,
}

impl CommonFields {
    pub(crate) fn read(fields: &mut JsonFields<'_>) -> Self {
        // It names the client's session for routers; here its type is checked and nothing else.
        let _: Option<String> = fields.get("session_id");
        Self {
            model: fields.get("model"),
            max_tokens: fields.get("max_tokens"),
            temperature: fields.get("temperature"),
            top_p: fields.get("top_p"),
            top_k: fields.get("top_k"),
            min_p: fields.get("min_p"),
            presence_penalty: fields.get("presence_penalty"),
            frequency_penalty: fields.get("frequency_penalty"),
            repetition_penalty: fields.get("repetition_penalty"),
            seed: fields.get("seed"),
            n: fields.get("n"),
            stop: stop_strings(fields),
            stop_token_ids: fields.list::<i64, MAX_STOP_TOKENS>("stop_token_ids"),
            logit_bias: fields.get("logit_bias").unwrap_or_default(),
            min_tokens: fields.get("min_tokens"),
            ignore_eos: fields.get("ignore_eos").unwrap_or(false),
            include_stop_str_in_output: fields.get("include_stop_str_in_output").unwrap_or(false),
            skip_special_tokens: fields.get("skip_special_tokens").unwrap_or(true),
            priority: fields.get("priority").unwrap_or(0),
            request_id: request_id(fields),
            cache_salt: cache_salt(fields),
            allowed_token_ids: allowed_token_ids(fields),
            bad_words: fields.list::<String, MAX_BAD_WORDS>("bad_words"),
            logprob_token_ids: fields.list::<i64, MAX_LOGPROB_TOKENS>("logprob_token_ids"),
            prompt_logprobs: fields.get("prompt_logprobs"),
            repetition_detection: repetition_detection(fields),
            return_token_ids: fields.get("return_token_ids").unwrap_or(false),
            return_tokens_as_token_ids: fields.get("return_tokens_as_token_ids").unwrap_or(false),
            truncation: truncation(fields),
            stream_interval: stream_interval(fields),
            grammar: structured_outputs::grammar(fields),
            stream: stream(fields),
        }
    }
}

fn stop_strings(fields: &mut JsonFields<'_>) -> Vec<String> {
    let stop: Strings<MAX_STOP_STRINGS> = fields.get("stop").unwrap_or_default();
    let stop = fields.within("stop", stop.0);
    check_stop_bytes(fields, "stop", &stop);
    if stop.iter().any(String::is_empty) {
        fields.value_error("stop", "stop cannot contain an empty string.");
    }
    stop
}

/// Adds an error if the stop strings are too long.
pub(crate) fn check_stop_bytes(fields: &mut JsonFields<'_>, name: &str, stop: &[String]) {
    let bytes: usize = stop.iter().map(String::len).sum();
    if bytes > MAX_STOP_BYTES {
        fields.value_error(name, format_args!("{name} accepts at most {MAX_STOP_BYTES} bytes, got {bytes}."));
    }
}

/// Reads `request_id` and validates it.
pub(crate) fn request_id(fields: &mut JsonFields<'_>) -> Option<String> {
    let id: String = fields.get("request_id")?;
    if id.chars().count() > MAX_REQUEST_ID {
        fields.value_error("request_id", format_args!("request_id must have at most {MAX_REQUEST_ID} characters."));
    }
    Some(id)
}

/// Reads `cache_salt` and validates it.
pub(crate) fn cache_salt(fields: &mut JsonFields<'_>) -> Option<String> {
    let salt: String = fields.get("cache_salt")?;
    if !(1..=128).contains(&salt.chars().count()) || salt.contains(['@', '/', '\\', '\0']) {
        let message = "cache_salt must have 1 to 128 characters and none of '@', '/', '\\' and NUL.";
        fields.value_error("cache_salt", message);
    }
    Some(salt)
}

fn allowed_token_ids(fields: &mut JsonFields<'_>) -> Option<Vec<i64>> {
    fields.raw("allowed_token_ids")?;
    let ids = fields.list::<i64, MAX_ALLOWED_TOKENS>("allowed_token_ids");
    if ids.is_empty() {
        fields.value_error("allowed_token_ids", "allowed_token_ids is not None and empty!");
    }
    Some(ids)
}

fn repetition_detection(fields: &mut JsonFields<'_>) -> Option<RepetitionDetection> {
    let raw = fields.raw("repetition_detection")?;
    let mut inner = match JsonFields::object(raw, vec!["repetition_detection".into()]) {
        Ok(inner) => inner,
        Err(error) => {
            fields.absorb(error);
            return None;
        }
    };
    let mut number = |name: &str, default: i64, low: i64, high: i64| {
        let value = inner.get(name).unwrap_or(default);
        if !(low..=high).contains(&value) {
            inner.value_error(name, format_args!("{name} must be in [{low}, {high}], got {value}."));
        }
        value.clamp(low, high) as u32
    };
    let max_pattern_size = number("max_pattern_size", 0, 0, MAX_PATTERN);
    let min_pattern_size = number("min_pattern_size", 0, 0, MAX_PATTERN).max(1);
    let min_count = number("min_count", 0, 0, i64::from(u32::MAX));
    if max_pattern_size > 0 && (min_pattern_size > max_pattern_size || min_count < 2) {
        let message = "min_pattern_size must not exceed max_pattern_size, and min_count must be at least 2.";
        inner.value_error("max_pattern_size", message);
    }
    fields.absorb(inner.into_errors());
    (max_pattern_size > 0).then_some(RepetitionDetection { max_pattern_size, min_pattern_size, min_count })
}

/// Reads the truncation fields.
pub(crate) fn truncation(fields: &mut JsonFields<'_>) -> Option<Truncation> {
    let side = match fields.get::<String>("truncation_side").as_deref() {
        None => None,
        Some("left") => Some(Side::Left),
        Some("right") => Some(Side::Right),
        Some(_) => {
            fields.error("truncation_side", "literal_error", "Input should be 'left' or 'right'");
            None
        }
    };
    let wanted: i64 = fields.get("truncate_prompt_tokens")?;
    let tokens = match wanted {
        -1 => None,
        1.. => Some(u32::try_from(wanted).unwrap_or(u32::MAX)),
        _ => {
            fields.value_error("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1.");
            None
        }
    };
    Some(Truncation { tokens, side })
}

fn stream_interval(fields: &mut JsonFields<'_>) -> Option<u32> {
    let interval: i64 = fields.get("stream_interval")?;
    if interval < 1 {
        fields.value_error("stream_interval", "stream_interval must be at least 1.");
    }
    Some(u32::try_from(interval).unwrap_or(1).max(1))
}

fn stream(fields: &mut JsonFields<'_>) -> Option<StreamOptions> {
    let stream = fields.get("stream").unwrap_or(false);
    let Some(raw) = fields.raw("stream_options") else { return stream.then(StreamOptions::default) };
    if !stream {
        fields.value_error("stream_options", "Stream options can only be defined when `stream=True`.");
        return None;
    }
    let mut options = match JsonFields::object(raw, vec!["stream_options".into()]) {
        Ok(options) => options,
        Err(error) => {
            fields.absorb(error);
            return None;
        }
    };
    let include_usage = options.get("include_usage").unwrap_or(false);
    let continuous_usage = options.get("continuous_usage_stats").unwrap_or(false) && include_usage;
    fields.absorb(options.into_errors());
    Some(StreamOptions { include_usage, continuous_usage })
}
