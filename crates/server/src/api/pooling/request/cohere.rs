//! The body of POST /v2/embed, a route of Cohere's API.

use octavo_text::Modality;
use serde_json::{Value, json};

use crate::api::completions::request::MAX_PROMPTS;
use crate::api::pooling::request::encoding::one_of;
use crate::api::shared::common::{Side, Truncation};
use crate::api::shared::fields::{JsonFields, request_fields, words};
use crate::error::ApiError;

/// An encoding of vectors in Cohere's API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CohereType {
    /// Lists of numbers.
    #[default]
    Float,
    /// A bit for each element, in signed bytes.
    Binary,
    /// A bit for each element, in unsigned bytes.
    UBinary,
    /// Little-endian 32-bit floats.
    Base64,
}

const TYPES: [(&str, CohereType); 4] = [
    ("float", CohereType::Float),
    ("binary", CohereType::Binary),
    ("ubinary", CohereType::UBinary),
    ("base64", CohereType::Base64),
];

/// The end of a text that is cut off if it is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Truncate {
    None,
    Start,
    #[default]
    End,
}

const TRUNCATE: [(&str, Truncate); 3] = [("NONE", Truncate::None), ("START", Truncate::Start), ("END", Truncate::End)];

/// The texts of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CohereInput {
    Texts(Vec<String>),
    /// The content of a message each.
    Contents(Vec<Value>),
}

/// The limits of a text: how it is truncated, or most tokens of one that is not.
type Limits = (Option<Truncation>, Option<u32>);

request_fields! {
    /// A well-formed request.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct CohereRequest |fields, input: CohereInput, types: Vec<CohereType>, limits: Limits| {
        CohereRequest {
            model: Option<String> {"$ref": "#/components/schemas/Model"},
            /// The name of a prompt of the model, which is put before each text.
            input_type: Option<String>,
            input: CohereInput => (input) {
                texts: Vec<String> [MAX_PROMPTS] {"type": "array", "minItems": 1},
                inputs: Option<Value> {"$ref": "#/components/schemas/CohereInputs"},
            },
            dimensions: Option<i64> => (fields.get("output_dimension")) {
                /// Shorter vectors, of models trained for it.
                output_dimension: Option<i64> {"minimum": 1},
            },
            /// The encodings, each once.
            types: Vec<CohereType> => (types) {
                /// The encodings; absent: float.
                embedding_types: Option<Vec<Value>> {"items": {"enum": TYPES.map(|(name, _)| name)}},
            },
            truncation: Option<Truncation> => (limits.0) {
                /// The end of a text that is cut off if it is too long.
                truncate: Option<String> {"enum": words(TRUNCATE.map(|(name, _)| name)), "default": "END"},
            },
            /// Most tokens of an input that is not truncated.
            max_tokens: Option<u32> => (limits.1) {
                /// Most tokens of a text; absent: as many as fit.
                max_tokens: Option<i64> {"minimum": 1},
            },
            /// Lower runs earlier.
            priority: i64 = 0,
        }
    }
}

impl CohereRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        let given: Vec<&str> =
            ["texts", "images", "inputs"].into_iter().filter(|name| fields.raw(name).is_some()).collect();
        let input = match given[..] {
            ["texts"] => CohereInput::Texts(fields.list::<String, MAX_PROMPTS>("texts")),
            ["inputs"] => CohereInput::Contents(contents(&mut fields)?),
            ["images"] => return Err(ApiError::too_many(Modality::Image, 0)),
            _ => CohereInput::Texts(vec![]),
        };
        let types = types(&mut fields);
        let limits = limits(&mut fields);
        let request = Self::read(&mut fields, input, types, limits);
        fields.finish()?;
        match &request.input {
            CohereInput::Texts(texts) if texts.is_empty() => Err(nothing()),
            CohereInput::Contents(contents) if contents.is_empty() => Err(nothing()),
            _ => Ok(request),
        }
    }
}

fn limits(fields: &mut JsonFields<'_>) -> Limits {
    let max_tokens: Option<i64> = fields.get("max_tokens");
    if max_tokens.is_some_and(|tokens| tokens < 1) {
        fields.value_error("max_tokens", "max_tokens must be at least 1.");
    }
    let most = max_tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
    match one_of(fields, "truncate", &TRUNCATE) {
        Truncate::None => (None, most),
        Truncate::Start => (Some(Truncation { tokens: most, side: Some(Side::Left) }), None),
        Truncate::End => (Some(Truncation { tokens: most, side: Some(Side::Right) }), None),
    }
}

fn nothing() -> ApiError {
    ApiError::bad_request("Exactly one of texts, images, or inputs must be provided, and it must be non-empty")
}

/// The encodings, each once.
fn types(fields: &mut JsonFields<'_>) -> Vec<CohereType> {
    let names = fields.list::<String, 16>("embedding_types");
    let mut types = vec![];
    for name in names {
        match TYPES.into_iter().find(|(known, _)| *known == name) {
            Some((_, kind)) if types.contains(&kind) => {}
            Some((_, kind)) => types.push(kind),
            None => {
                fields.error(
                    "embedding_types",
                    "literal_error",
                    "Input should be 'float', 'binary', 'ubinary' or 'base64'",
                );
                break;
            }
        }
    }
    if types.is_empty() {
        types.push(CohereType::default());
    }
    types
}

/// The contents of `inputs`, which have texts only, as parts of messages.
fn contents(fields: &mut JsonFields<'_>) -> Result<Vec<Value>, ApiError> {
    const NO_CONTENT: &str = "Input should be a list of objects whose content is a list of texts";
    let inputs: Vec<Value> = fields.get("inputs").unwrap_or_default();
    if inputs.len() > MAX_PROMPTS {
        let count = inputs.len();
        fields.value_error("inputs", format_args!("inputs accepts at most {MAX_PROMPTS} elements, got {count}."));
        return Ok(vec![]);
    }
    let mut contents = Vec::with_capacity(inputs.len());
    for input in &inputs {
        let parts = input["content"].as_array().filter(|parts| !parts.is_empty());
        let Some(parts) = parts else {
            fields.error("inputs", "list_type", NO_CONTENT);
            break;
        };
        if parts.iter().any(|part| part["type"] == "image_url") {
            return Err(ApiError::too_many(Modality::Image, 0));
        }
        let part = |part: &Value| {
            let text = part["text"].as_str().filter(|_| part["type"] == "text")?;
            Some(json!({"type": "text", "text": text}))
        };
        match parts.iter().map(part).collect::<Option<Vec<Value>>>() {
            Some(parts) => contents.push(Value::Array(parts)),
            None => {
                fields.error("inputs", "value_error", NO_CONTENT);
                break;
            }
        }
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<CohereRequest, String> {
        CohereRequest::parse(body.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn texts_are_truncated_at_the_end_unless_the_client_says_otherwise() {
        let request = |rest: &str| parse(&format!(r#"{{"texts": ["a"]{rest}}}"#)).unwrap();
        let limits = |rest: &str| (request(rest).truncation, request(rest).max_tokens);
        let truncation = |tokens, side| Some(Truncation { tokens, side: Some(side) });
        assert_eq!(limits(""), (truncation(None, Side::Right), None));
        assert_eq!(limits(r#", "max_tokens": 3"#), (truncation(Some(3), Side::Right), None));
        assert_eq!(limits(r#", "truncate": "START""#), (truncation(None, Side::Left), None));
        assert_eq!(limits(r#", "truncate": "NONE", "max_tokens": 3"#), (None, Some(3)));
    }

    #[test]
    fn encodings_are_listed_once() {
        let types = |rest: &str| parse(&format!(r#"{{"texts": ["a"]{rest}}}"#)).map(|request| request.types);
        assert_eq!(types("").unwrap(), [CohereType::Float]);
        let twice = r#", "embedding_types": ["base64", "float", "base64"]"#;
        assert_eq!(types(twice).unwrap(), [CohereType::Base64, CohereType::Float]);
        assert!(types(r#", "embedding_types": ["int8"]"#).unwrap_err().contains("'ubinary' or 'base64'"));
    }

    #[test]
    fn one_kind_of_input_is_needed() {
        const NONE: &str = "Exactly one of texts, images, or inputs must be provided, and it must be non-empty";
        for body in ["{}", r#"{"texts": []}"#, r#"{"inputs": []}"#, r#"{"texts": ["a"], "inputs": []}"#] {
            assert_eq!(parse(body).unwrap_err(), NONE, "{body}");
        }
        for body in [
            r#"{"images": ["data:"]}"#,
            r#"{"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}"#,
        ] {
            assert!(parse(body).unwrap_err().starts_with("At most 0 image(s)"), "{body}");
        }
        for input in ["1", "{}", r#"{"content": []}"#, r#"{"content": [{"type": "text"}]}"#] {
            let error = parse(&format!(r#"{{"inputs": [{input}]}}"#)).unwrap_err();
            assert!(error.contains("('body', 'inputs')"), "{input}: {error}");
        }
        let contents = parse(r#"{"inputs": [{"content": [{"type": "text", "text": "a"}]}]}"#).unwrap().input;
        assert_eq!(contents, CohereInput::Contents(vec![json!([{"type": "text", "text": "a"}])]));
    }
}
