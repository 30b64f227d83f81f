//! Fields of vLLM's API that are not supported. A field that would change the answer is refused by name; null and the
//! value that means "off" are accepted. Other fields that are unknown are ignored, as in vLLM. To support a field, read it
//! and delete its row.

use crate::api::shared::fields::JsonFields;

/// Name of a field, and the JSON of the value that means "off" in addition to null.
type Row = (&'static str, &'static str);

/// Of both generation routes.
const COMMON: &[Row] = &[
    ("ec_transfer_params", "null"),
    ("kv_transfer_params", "null"),
    ("return_token_offsets", "false"),
    ("return_weight_versions", "false"),
    ("use_beam_search", "false"),
    ("watermarking", "null"),
];

/// Fields of earlier releases of vLLM that restricted the output, and their new names in `structured_outputs`. vLLM
/// ignores them; an answer without the requested restriction would be worse than an error.
const RENAMED: &[(&str, &str, &str)] = &[
    ("guided_choice", "null", "choice"),
    ("guided_grammar", "null", "grammar"),
    ("guided_json", "null", "json"),
    ("guided_json_object", "false", "json_object"),
    ("guided_regex", "null", "regex"),
    ("guided_whitespace_pattern", "null", "whitespace_pattern"),
    ("structural_tag", "null", "structural_tag"),
];

/// Of chat requests alone.
const CHAT: &[Row] = &[("media_io_kwargs", "null"), ("mm_payload", "null"), ("mm_processor_kwargs", "null")];

/// Of completion requests alone.
const COMPLETION: &[Row] = &[("prompt_embeds", "null"), ("suffix", "null")];

/// Of responses requests alone.
const RESPONSES: &[Row] = &[("prompt", "null"), ("max_tool_calls", "null")];

/// The kind of request that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Completion,
    Responses,
}

/// Adds an error for every field that requests an unsupported feature.
pub(crate) fn refuse(fields: &mut JsonFields<'_>, route: Route) {
    let own = match route {
        Route::Chat => CHAT,
        Route::Completion => COMPLETION,
        Route::Responses => RESPONSES,
    };
    for (name, off) in COMMON.iter().chain(own) {
        if fields.raw(name).is_some_and(|raw| !means(raw.get(), off)) {
            fields.value_error(name, format_args!("`{name}` is not supported by this server."));
        }
    }
    for (name, off, renamed) in RENAMED {
        if fields.raw(name).is_some_and(|raw| !means(raw.get(), off)) {
            fields.value_error(
                name,
                format_args!("`{name}` is no longer supported; use `structured_outputs.{renamed}`."),
            );
        }
    }
}

/// The names of all fields that are refused.
#[cfg(test)]
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    let rows = [COMMON, CHAT, COMPLETION, RESPONSES].into_iter().flatten().map(|(name, _)| *name);
    rows.chain(RENAMED.iter().map(|(name, ..)| *name))
}

/// Whether two JSON texts are equal, one of them the text of a literal.
fn means(text: &str, off: &str) -> bool {
    text == off
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn refused(body: &str, route: Route) -> Vec<String> {
        let mut fields = JsonFields::parse(body.as_bytes()).unwrap();
        refuse(&mut fields, route);
        fields.into_errors().listed().iter().map(|e| e.location.join(".")).collect()
    }

    #[test]
    fn every_row_takes_its_own_value_and_null_and_refuses_another() {
        for (route, own) in [(Route::Chat, CHAT), (Route::Completion, COMPLETION), (Route::Responses, RESPONSES)] {
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
    fn unknown_fields_are_ignored() {
        let body = r#"{"frobnicate": [1, 2], "guided_json": null, "guided_decoding_backend": "xgrammar"}"#;
        assert!(refused(body, Route::Chat).is_empty());
    }

    #[test]
    fn renamed_fields_are_refused_with_their_new_names() {
        for (name, off, renamed) in RENAMED {
            for route in [Route::Chat, Route::Completion, Route::Responses] {
                assert!(refused(&format!("{{\"{name}\": {off}}}"), route).is_empty(), "{name}");
                let body = format!("{{\"{name}\": {{\"x\": 1}}}}");
                let mut fields = JsonFields::parse(body.as_bytes()).unwrap();
                refuse(&mut fields, route);
                let errors = fields.into_errors();
                let errors = errors.listed();
                assert_eq!(errors.len(), 1);
                assert!(errors[0].message.ends_with(&format!("use `structured_outputs.{renamed}`.")), "{errors:?}");
            }
        }
    }
}
