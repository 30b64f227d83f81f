//! The body of POST /v1/embeddings.

use crate::error::ApiError;
use crate::fields::Fields;
use crate::types::pooling::{Encoding, Input, PoolingFields};

/// A well-formed embeddings request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EmbeddingRequest {
    pub(crate) common: PoolingFields,
    pub(crate) input: Input,
    pub(crate) encoding: Encoding,
    /// Number of dimensions, if not the model's.
    pub(crate) dimensions: Option<i64>,
}

impl EmbeddingRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let request = Self {
            common: PoolingFields::read(&mut fields),
            input: Input::read(&mut fields, body)?,
            encoding: Encoding::read(&mut fields),
            dimensions: fields.get("dimensions"),
        };
        fields.finish()?;
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::completion::Prompt;
    use crate::types::pooling::Format;

    fn parse(body: &str) -> Result<EmbeddingRequest, String> {
        EmbeddingRequest::parse(body.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn an_input_is_one_text_or_many_or_tokens() {
        let input = |prompts| Input::Prompts { prompts, add_special_tokens: true };
        let texts = |texts: &[&str]| input(texts.iter().map(|text| Prompt::Text((*text).into())).collect());
        assert_eq!(parse(r#"{"input": "a"}"#).unwrap().input, texts(&["a"]));
        assert_eq!(parse(r#"{"input": ["a", "b"]}"#).unwrap().input, texts(&["a", "b"]));
        assert_eq!(parse(r#"{"input": [1, 2]}"#).unwrap().input, input(vec![Prompt::Tokens(vec![1, 2])]));
        let request = parse(r#"{"input": "a", "encoding_format": "base64", "dimensions": 4}"#).unwrap();
        assert_eq!((request.encoding.format, request.dimensions), (Format::Base64, Some(4)));
        let chat = parse(r#"{"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": true}"#).unwrap();
        assert!(matches!(chat.input, Input::Conversation { add_generation_prompt: Some(true), .. }));
    }

    #[test]
    fn what_cannot_be_done_is_named() {
        for (body, words) in [
            ("{}", "input"),
            (r#"{"input": ""}"#, "input"),
            (
                r#"{"input": "a", "normalize": true}"#,
                "Parameter `normalize` was removed; use `use_activation` instead.",
            ),
            (r#"{"input": "a", "activation": true}"#, "Parameter `activation` was removed"),
            (r#"{"input": "a", "embed_dtype": "fp8_e5m2"}"#, "embed_dtype"),
            (r#"{"input": "a", "encoding_format": "hex"}"#, "encoding_format"),
            (r#"{"input": "a", "padding": "max_length"}"#, "`padding` is not supported"),
            (r#"{"input": "a", "use_activation": "yes"}"#, "Input should be a valid boolean"),
            (r#"{"input": "a", "mm_processor_kwargs": {}}"#, "mm_processor_kwargs"),
        ] {
            let error = parse(body).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert!(parse(r#"{"input": "a", "padding": "do_not_pad", "normalize": null, "user": "u"}"#).is_ok());
    }
}
