//! Fields of vLLM's API that this server does not serve yet. One that would change the answer is refused by name, never
//! ignored; null and the value that means "off" are taken. To serve a field, read it and delete its row.

use serde_json::Value;

use crate::fields::Fields;

/// Name of the field, and the JSON of the value that means "off" (null always does).
type Row = (&'static str, &'static str);

/// Of both generation routes.
const COMMON: &[Row] = &[
    ("allowed_token_ids", "null"),
    ("bad_words", "[]"),
    ("ec_transfer_params", "null"),
    ("kv_transfer_params", "null"),
    ("length_penalty", "1"),
    ("logprob_token_ids", "null"),
    ("prompt_logprobs", "null"),
    ("repetition_detection", "null"),
    ("response_format", r#"{"type":"text"}"#),
    ("return_prompt_text", "false"),
    ("return_token_ids", "false"),
    ("return_token_offsets", "false"),
    ("return_tokens_as_token_ids", "false"),
    ("return_weight_versions", "false"),
    ("spaces_between_special_tokens", "true"),
    ("stream_interval", "1"),
    ("structured_outputs", "null"),
    ("thinking_token_budget", "null"),
    ("truncate_prompt_tokens", "null"),
    ("truncation_side", "null"),
    ("use_beam_search", "false"),
    ("vllm_xargs", "null"),
    ("watermarking", "null"),
];

/// Of chat requests alone.
const CHAT: &[Row] = &[
    ("chat_template", "null"),
    ("echo", "false"),
    ("include_reasoning", "true"),
    ("media_io_kwargs", "null"),
    ("mm_payload", "null"),
    ("mm_processor_kwargs", "null"),
    ("parallel_tool_calls", "true"),
    ("tool_choice", r#""none""#),
    ("tools", "null"),
];

/// Of completion requests alone.
const COMPLETION: &[Row] = &[("prompt_embeds", "null"), ("suffix", "null")];

/// Which request is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Completion,
}

/// Notes every field of `fields` that asks for what is not served.
pub(crate) fn refuse(fields: &mut Fields<'_>, route: Route) {
    let own = match route {
        Route::Chat => CHAT,
        Route::Completion => COMPLETION,
    };
    for (name, off) in COMMON.iter().chain(own) {
        if fields.raw(name).is_some_and(|raw| !means(raw.get(), off)) {
            fields.value_error(name, format_args!("`{name}` is not supported by this server yet."));
        }
    }
}

/// Whether two JSON texts have the same value; `1` and `1.0` have.
fn means(text: &str, off: &str) -> bool {
    let parse = |text: &str| serde_json::from_str::<Value>(text).ok();
    match (parse(text), parse(off)) {
        (Some(a), Some(b)) => a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(body: &str, route: Route) -> Vec<String> {
        let mut fields = Fields::parse(body.as_bytes()).unwrap();
        refuse(&mut fields, route);
        fields.into_errors().into_iter().map(|e| e.location.join(".")).collect()
    }

    #[test]
    fn every_row_takes_its_own_value_and_null_and_refuses_another() {
        for (route, own) in [(Route::Chat, CHAT), (Route::Completion, COMPLETION)] {
            for (name, off) in COMMON.iter().chain(own) {
                assert!(serde_json::from_str::<Value>(off).is_ok(), "{name}");
                for taken in [off, &"null"] {
                    assert!(refused(&format!("{{\"{name}\": {taken}}}"), route).is_empty(), "{name}");
                }
                assert_eq!(refused(&format!("{{\"{name}\": {{\"x\": 1}}}}"), route), [*name]);
            }
        }
    }

    #[test]
    fn equal_numbers_are_equal_however_spelled() {
        assert!(refused(r#"{"length_penalty": 1.0, "stream_interval": 1}"#, Route::Chat).is_empty());
        assert_eq!(refused(r#"{"length_penalty": 1.5}"#, Route::Chat), ["length_penalty"]);
    }

    #[test]
    fn what_nobody_knows_is_ignored() {
        assert!(refused(r#"{"frobnicate": [1, 2], "guided_json": {}}"#, Route::Chat).is_empty());
    }
}
