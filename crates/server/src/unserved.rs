//! Fields of vLLM's API that are not supported. A field that would change the answer is refused by name; null and the
//! value that means "off" are accepted. To support a field, read it and delete its row.

use serde_json::Value;

use crate::fields::Fields;

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
pub(crate) fn refuse(fields: &mut Fields<'_>, route: Route) {
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
}

/// Whether two JSON texts are equal as values.
fn means(text: &str, off: &str) -> bool {
    let parse = |text: &str| serde_json::from_str::<Value>(text).ok();
    parse(text).is_some_and(|value| Some(value) == parse(off))
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
    fn what_nobody_knows_is_ignored() {
        assert!(refused(r#"{"frobnicate": [1, 2], "guided_json": {}}"#, Route::Chat).is_empty());
    }
}
