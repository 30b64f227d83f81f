//! Fields that chat and completion requests share.

use crate::api::shared::bias::LogitBias;
use crate::api::shared::fields::{JsonFields, Strings, request_fields};
use crate::api::shared::structured_outputs;
use octavo_engine::RepetitionDetection;
use octavo_text::GrammarSpec;
use serde_json::Value;

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

request_fields! {
    /// The shared fields. Types are checked, ranges are not.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct CommonFields |fields| {
        Handling {
            /// The client's session, for routers; this server ignores it.
            session_id: Option<String>,
            model: Option<String> {"$ref": "#/components/schemas/Model"},
            max_tokens: Option<i64> => (fields.get("max_tokens")),
        }
        Logits {
            /// 0: always the likeliest token. Above 0 and below 0.01 is taken for 0.01.
            temperature: Option<f64> {"minimum": 0, "maximum": 2, "default": 1},
            /// Draw among the likeliest tokens that have this share together.
            top_p: Option<f64> {"exclusiveMinimum": 0, "maximum": 1, "default": 1},
            /// Draw among this many; 0 and −1: among all.
            top_k: Option<i64> {"minimum": -1, "default": 0},
            /// Leave out tokens less likely than this share of the likeliest.
            min_p: Option<f64> {"minimum": 0, "maximum": 1, "default": 0},
            /// Off the logit of every token generated before.
            presence_penalty: Option<f64> {"minimum": -2, "maximum": 2, "default": 0},
            /// The same, times how often it was.
            frequency_penalty: Option<f64> {"minimum": -2, "maximum": 2, "default": 0},
            /// Divides the logit of every token of prompt or output; above 1 discourages.
            repetition_penalty: Option<f64> {"exclusiveMinimum": 0, "default": 1},
            /// The same seed draws the same tokens; −1: none. Sequence i of `n` has seed + i.
            seed: Option<i64> {"minimum": i64::MIN, "maximum": i64::MAX},
        }
        Handling {
            /// Sequences for each prompt; 1 with temperature 0. The server has a limit on sequences of a request.
            n: Option<i64> {"minimum": 1, "default": 1},
        }
        Logits {
            /// Strings that end the text.
            stop: Vec<String> [MAX_STOP_STRINGS] => stop_strings
                {"type": ["string", "array", "null"], "minLength": 1, "items": {"type": "string", "minLength": 1}},
            /// Tokens that end the text, beside the model's own.
            stop_token_ids: Vec<i64> [MAX_STOP_TOKENS] {"items": {"type": "integer", "minimum": 0, "maximum": u32::MAX}},
            logit_bias: LogitBias => (fields.get("logit_bias").unwrap_or_default()) {
                /// Token id → what is added to its logit, clamped to ±100.
                logit_bias: Option<LogitBias>,
            },
            /// No end before this many tokens; at most the limit of tokens.
            min_tokens: Option<i64> {"minimum": 0, "default": 0},
            /// Go on past the end-of-sequence token.
            ignore_eos: bool = false,
            /// Keep the stop string or token in the text.
            include_stop_str_in_output: bool = false,
            /// Leave special tokens out of the text.
            skip_special_tokens: bool = true,
        }
        Handling {
            /// Lower runs earlier, under `--scheduling-policy priority`.
            priority: i64 = 0 {"minimum": i64::MIN, "maximum": i64::MAX},
            /// Becomes part of the response's id; the header `X-Request-Id` wins.
            request_id: Option<String> => request_id {"maxLength": MAX_REQUEST_ID},
            /// Requests share a prefix cache only with those of the same salt.
            cache_salt: Option<String> => cache_salt
                {"minLength": 1, "maxLength": 128, "pattern": "^[^@/\\\\\\u0000]+$"},
        }
        Logits {
            /// Draw only these.
            allowed_token_ids: Option<Vec<i64>> [MAX_ALLOWED_TOKENS] => allowed_token_ids
                {"items": {"type": "integer", "minimum": 0}},
            /// Never generate these sequences of tokens.
            bad_words: Vec<String> [MAX_BAD_WORDS],
        }
        Handling {
            /// Tokens whose log-probabilities are reported too; needs `logprobs`.
            logprob_token_ids: Vec<i64> [MAX_LOGPROB_TOKENS] {"items": {"type": "integer", "minimum": 0}},
            /// Log-probabilities of the prompt with this many alternatives; −1: all. Above 0 not with `stream`.
            prompt_logprobs: Option<i64> {"minimum": -1},
        }
        Logits {
            repetition_detection: Option<RepetitionDetection> => (repetition_detection(fields)) {
                repetition_detection: Option<Value> {"$ref": "#/components/schemas/RepetitionDetection"},
            },
        }
        Handling {
            /// Report the ids of prompt and output.
            return_token_ids: bool = false,
            /// Write tokens of log-probabilities as `token_id:N`.
            return_tokens_as_token_ids: bool = false,
            truncation: Option<Truncation> => (truncation(fields)) {
                /// Which end of the prompt is cut.
                truncation_side: Option<String> {"enum": ["left", "right", null]},
                /// Keep this many tokens of a longer prompt; −1: as many as fit.
                truncate_prompt_tokens: Option<i64> {"minimum": -1},
            },
            /// Tokens of a chunk after the first.
            stream_interval: Option<u32> => stream_interval {"minimum": 1},
        }
        Logits {
            /// The grammar of the output.
            grammar: Option<GrammarSpec> => (structured_outputs::grammar(fields)) {
                response_format: Option<Value> {"$ref": "#/components/schemas/ResponseFormat"},
                structured_outputs: Option<Value> {"$ref": "#/components/schemas/StructuredOutputs"},
            },
        }
        Handling {
            /// The options of a streamed response; `None` for one JSON body.
            stream: Option<StreamOptions> => (stream(fields)) {
                stream: bool {"$ref": "#/components/schemas/Stream"},
                stream_options: Option<Value> {"$ref": "#/components/schemas/StreamOptions"},
            },
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
    let mut inner = fields.nested("repetition_detection")?;
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
    if fields.raw("stream_options").is_none() {
        return stream.then(StreamOptions::default);
    }
    if !stream {
        fields.value_error("stream_options", "Stream options can only be defined when `stream=True`.");
        return None;
    }
    let mut options = fields.nested("stream_options")?;
    let include_usage = options.get("include_usage").unwrap_or(false);
    let continuous_usage = options.get("continuous_usage_stats").unwrap_or(false) && include_usage;
    fields.absorb(options.into_errors());
    Some(StreamOptions { include_usage, continuous_usage })
}
