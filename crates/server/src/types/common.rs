//! Fields that chat and completion requests share.

use serde_json::{Map, Value};

use crate::fields::{Fields, Strings};

/// Most stop strings of a request.
pub(crate) const MAX_STOP_STRINGS: usize = 4;

/// Most characters of a request id that a client chooses.
const MAX_REQUEST_ID: usize = 256;

/// How a stream reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamOptions {
    /// A last chunk with the usage.
    pub(crate) include_usage: bool,
    /// The usage so far on every chunk.
    pub(crate) continuous_usage: bool,
}

/// The shared fields, of the right types; ranges are checked later.
#[derive(Clone, Debug, Default, PartialEq)]
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
    pub(crate) logit_bias: Map<String, Value>,
    pub(crate) min_tokens: Option<i64>,
    pub(crate) ignore_eos: bool,
    pub(crate) include_stop_str_in_output: bool,
    pub(crate) skip_special_tokens: bool,
    pub(crate) priority: i64,
    pub(crate) request_id: Option<String>,
    pub(crate) cache_salt: Option<String>,
    /// `None`: the response is one JSON body.
    pub(crate) stream: Option<StreamOptions>,
}

impl CommonFields {
    pub(crate) fn read(fields: &mut Fields<'_>) -> Self {
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
            stop_token_ids: fields.get("stop_token_ids").unwrap_or_default(),
            logit_bias: fields.get("logit_bias").unwrap_or_default(),
            min_tokens: fields.get("min_tokens"),
            ignore_eos: fields.get("ignore_eos").unwrap_or(false),
            include_stop_str_in_output: fields.get("include_stop_str_in_output").unwrap_or(false),
            skip_special_tokens: fields.get("skip_special_tokens").unwrap_or(true),
            priority: fields.get("priority").unwrap_or(0),
            request_id: request_id(fields),
            cache_salt: cache_salt(fields),
            stream: stream(fields),
        }
    }
}

fn stop_strings(fields: &mut Fields<'_>) -> Vec<String> {
    let stop = fields.get::<Strings>("stop").unwrap_or_default().0;
    if stop.len() > MAX_STOP_STRINGS {
        let message = format!("stop accepts at most {MAX_STOP_STRINGS} strings, got {}.", stop.len());
        fields.value_error("stop", message);
        return vec![];
    }
    if stop.iter().any(String::is_empty) {
        fields.value_error("stop", "stop cannot contain an empty string.");
    }
    stop
}

fn request_id(fields: &mut Fields<'_>) -> Option<String> {
    let id: String = fields.get("request_id")?;
    if id.chars().count() > MAX_REQUEST_ID {
        fields.value_error("request_id", format_args!("request_id must have at most {MAX_REQUEST_ID} characters."));
    }
    Some(id)
}

fn cache_salt(fields: &mut Fields<'_>) -> Option<String> {
    let salt: String = fields.get("cache_salt")?;
    if !(1..=128).contains(&salt.chars().count()) || salt.contains(['@', '/', '\\', '\0']) {
        let message = "cache_salt must have 1 to 128 characters and none of '@', '/', '\\' and NUL.";
        fields.value_error("cache_salt", message);
    }
    Some(salt)
}

fn stream(fields: &mut Fields<'_>) -> Option<StreamOptions> {
    let stream = fields.get("stream").unwrap_or(false);
    let Some(raw) = fields.raw("stream_options") else { return stream.then(StreamOptions::default) };
    if !stream {
        fields.value_error("stream_options", "Stream options can only be defined when `stream=True`.");
        return None;
    }
    let mut options = match Fields::object(raw, vec!["stream_options".into()]) {
        Ok(options) => options,
        Err(error) => {
            fields.absorb([error]);
            return None;
        }
    };
    let include_usage = options.get("include_usage").unwrap_or(false);
    let continuous_usage = options.get("continuous_usage_stats").unwrap_or(false) && include_usage;
    fields.absorb(options.into_errors());
    Some(StreamOptions { include_usage, continuous_usage })
}
