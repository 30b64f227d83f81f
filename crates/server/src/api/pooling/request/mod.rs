//! Bodies of requests for vectors and scores.

mod cohere;
mod embeddings;
mod encoding;
mod scoring;
mod task;

use crate::api::chat::request::ChatRequest;
use crate::api::completions::request::{Prompt, prompts};
use crate::api::shared::common::{MAX_REQUEST_ID, Truncation, cache_salt, request_id, truncation};
use crate::api::shared::fields::{JsonFields, request_fields};
use crate::error::ApiError;

pub(crate) use cohere::{CohereInput, CohereRequest, CohereType};
pub(crate) use embeddings::EmbeddingRequest;
pub(crate) use encoding::{ByteOrder, ElementType, Encoding, Format};
pub(crate) use scoring::{RerankRequest, ScoreRequest, ScoringFields, names_queries};
pub(crate) use task::{PoolingRequest, PoolingTask};

/// JsonFields of earlier releases of vLLM that `use_activation` replaces. They would change the answer.
const REMOVED: [&str; 3] = ["activation", "normalize", "softmax"];

request_fields! {
    /// The fields that all requests for vectors and scores share.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub(crate) struct PoolingFields |fields| {
        Pooling {
            model: Option<String> {"$ref": "#/components/schemas/Model"},
            truncation: Option<Truncation> => (truncation(fields)) {
                /// The end that is cut off; absent: the right one, or the left one of a model that generates text.
                truncation_side: Option<String> {"enum": ["left", "right", null]},
                /// Keep this many tokens of a longer prompt, special tokens included; −1: as many as fit.
                truncate_prompt_tokens: Option<i64> {"minimum": -1},
            },
            /// Whether vectors have length 1 or scores are probabilities; absent: as the model was trained.
            use_activation: Option<bool>,
            /// Lower runs earlier.
            priority: i64 = 0,
            request_id: Option<String> => request_id {"maxLength": MAX_REQUEST_ID},
            /// Keeps the prefix cache of the request apart.
            cache_salt: Option<String> => cache_salt {"minLength": 1, "maxLength": 128},
        }
    }
}

impl PoolingFields {
    /// Reads the fields and refuses those that this server does not have.
    fn checked(fields: &mut JsonFields<'_>) -> Self {
        for name in REMOVED {
            if fields.raw(name).is_some() {
                let message = format_args!("Parameter `{name}` was removed; use `use_activation` instead.");
                fields.value_error(name, message);
            }
        }
        for (name, off) in
            [("padding", r#""do_not_pad""#), ("mm_processor_kwargs", "null"), ("media_io_kwargs", "null")]
        {
            if fields.raw(name).is_some_and(|raw| raw.get() != off) {
                fields.value_error(name, format_args!("`{name}` is not supported by this server."));
            }
        }
        Self::read(fields)
    }
}

/// The texts of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Input {
    Prompts { prompts: Vec<Prompt>, add_special_tokens: bool },
    Conversation(Box<ChatRequest>),
}

impl Input {
    /// Reads the input of a body. By default, a prompt of messages ends with the start of an answer if `starts_answer`.
    fn read(fields: &mut JsonFields<'_>, body: &[u8], starts_answer: bool) -> Result<Self, ApiError> {
        if fields.raw("messages").is_none() {
            let add_special_tokens = fields.get("add_special_tokens").unwrap_or(true);
            return Ok(Self::Prompts { prompts: prompts(fields, "input"), add_special_tokens });
        }
        Ok(Self::Conversation(Box::new(ChatRequest::parse_with(body, starts_answer)?)))
    }
}

/// A well-formed classification request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ClassifyRequest {
    pub(crate) common: PoolingFields,
    pub(crate) input: Input,
}

impl ClassifyRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        let request =
            Self { common: PoolingFields::checked(&mut fields), input: Input::read(&mut fields, body, false)? };
        fields.finish()?;
        Ok(request)
    }
}
