//! The body of POST /v1/embeddings.

use serde_json::value::RawValue;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::types::chat::ChatRequest;
use crate::types::common::{Truncation, cache_salt, request_id, truncation};
use crate::types::completion::{Prompt, prompts};

/// The encoding of vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Lists of numbers.
    #[default]
    Float,
    /// Little-endian 32-bit floats.
    Base64,
}

/// The texts to embed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Input {
    Prompts(Vec<Prompt>),
    Conversation(Box<ChatRequest>),
}

/// A well-formed embeddings request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EmbeddingRequest {
    pub(crate) model: Option<String>,
    pub(crate) input: Input,
    pub(crate) encoding: Encoding,
    /// Number of dimensions, if not the model's.
    pub(crate) dimensions: Option<i64>,
    pub(crate) add_special_tokens: bool,
    pub(crate) truncation: Option<Truncation>,
    pub(crate) priority: i64,
    pub(crate) request_id: Option<String>,
    pub(crate) cache_salt: Option<String>,
}

impl EmbeddingRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        for name in ["normalize", "embed_dtype", "endianness", "use_activation"] {
            let off = matches!(fields.raw(name).map(|raw| raw.get()), None | Some(r#""float32""# | r#""little""#));
            if !off {
                fields.value_error(name, format_args!("`{name}` is not supported by this server."));
            }
        }
        let input = match fields.raw("messages").is_some() {
            true => Input::Conversation(Box::new(ChatRequest::parse(body)?)),
            false => Input::Prompts(prompts(&mut fields, "input")),
        };
        let request = Self {
            model: fields.get("model"),
            input,
            encoding: encoding(&mut fields),
            dimensions: fields.get("dimensions"),
            add_special_tokens: fields.get("add_special_tokens").unwrap_or(true),
            truncation: truncation(&mut fields),
            priority: fields.get("priority").unwrap_or(0),
            request_id: request_id(&mut fields),
            cache_salt: cache_salt(&mut fields),
        };
        if request.dimensions.is_some_and(|dimensions| dimensions < 1) {
            fields.value_error("dimensions", "dimensions must be at least 1.");
        }
        fields.finish()?;
        Ok(request)
    }
}

fn encoding(fields: &mut Fields<'_>) -> Encoding {
    match fields.raw("encoding_format").map(RawValue::get) {
        None | Some(r#""float""#) => Encoding::Float,
        Some(r#""base64""#) => Encoding::Base64,
        Some(_) => {
            fields.error("encoding_format", "literal_error", "Input should be 'float' or 'base64'");
            Encoding::Float
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<EmbeddingRequest, String> {
        EmbeddingRequest::parse(body.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn an_input_is_one_text_or_many_or_tokens() {
        let texts = |texts: &[&str]| Input::Prompts(texts.iter().map(|text| Prompt::Text((*text).into())).collect());
        assert_eq!(parse(r#"{"input": "a"}"#).unwrap().input, texts(&["a"]));
        assert_eq!(parse(r#"{"input": ["a", "b"]}"#).unwrap().input, texts(&["a", "b"]));
        assert_eq!(parse(r#"{"input": [1, 2]}"#).unwrap().input, Input::Prompts(vec![Prompt::Tokens(vec![1, 2])]));
        let request = parse(r#"{"input": "a", "encoding_format": "base64", "dimensions": 4}"#).unwrap();
        assert_eq!((request.encoding, request.dimensions), (Encoding::Base64, Some(4)));
    }

    #[test]
    fn what_cannot_be_done_is_named() {
        for (body, word) in [
            ("{}", "input"),
            (r#"{"input": ""}"#, "input"),
            (r#"{"input": "a", "normalize": true}"#, "normalize"),
            (r#"{"input": "a", "embed_dtype": "float16"}"#, "embed_dtype"),
            (r#"{"input": "a", "encoding_format": "hex"}"#, "encoding_format"),
            (r#"{"input": "a", "dimensions": 0}"#, "dimensions"),
        ] {
            let error = parse(body).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
