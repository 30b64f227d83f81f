//! The body of POST /v1/embeddings.

use crate::api::pooling::request::{Encoding, Input, PoolingFields};
use crate::api::shared::fields::{JsonFields, request_fields};
use crate::error::ApiError;

request_fields! {
    /// A well-formed embeddings request.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct EmbeddingRequest |fields, common: PoolingFields, input: Input| {
        EmbeddingRequest {
            common: PoolingFields => (common),
            input: Input => (input),
            encoding: Encoding => (Encoding::read(fields)),
            /// Shorter vectors, of models trained for it.
            dimensions: Option<i64> {"minimum": 1},
        }
    }
}

impl EmbeddingRequest {
    /// Reads a body. By default, a prompt of messages ends with the start of an answer if `starts_answer`.
    pub(crate) fn parse(body: &[u8], starts_answer: bool) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        let common = PoolingFields::checked(&mut fields);
        let input = Input::read(&mut fields, body, starts_answer)?;
        let request = Self::read(&mut fields, common, input);
        fields.finish()?;
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::completions::request::Prompt;
    use crate::api::pooling::request::Format;

    fn parse(body: &str) -> Result<EmbeddingRequest, String> {
        EmbeddingRequest::parse(body.as_bytes(), false).map_err(|error| error.to_string())
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
    }

    #[test]
    fn a_conversation_may_end_with_the_start_of_an_answer() {
        let starts = |rest: &str, by_default: bool| {
            let body = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}]{rest}}}"#);
            match EmbeddingRequest::parse(body.as_bytes(), by_default).unwrap().input {
                Input::Conversation(request) => request.add_generation_prompt,
                Input::Prompts { .. } => panic!("it has messages"),
            }
        };
        assert!(starts("", true) && !starts("", false));
        assert!(starts(r#", "add_generation_prompt": true"#, false));
        assert!(!starts(r#", "continue_final_message": true"#, false));
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
