//! The body of POST /v1/completions.

use serde_json::Value;
use serde_json::value::RawValue;

use crate::api::shared::common::CommonFields;
use crate::api::shared::fields::{JsonFields, Limited, request_fields};
use crate::api::shared::unserved;
use crate::api::shared::unserved::Route;
use crate::error::ApiError;

/// Maximum number of prompts in a request.
pub(crate) const MAX_PROMPTS: usize = 1024;

const NO_PROMPT: &str = "Either prompt or prompt_embeds must be provided and non-empty.";

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    /// Token ids, not yet checked against the vocabulary.
    Tokens(Vec<i64>),
}

request_fields! {
    /// A well-formed completion request.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct CompletionRequest |fields| {
        CompletionRequest {
            common: CommonFields => (CommonFields::read(fields)) {
                /// Most tokens of each continuation; 0 only with `echo`.
                max_tokens: Option<i64> {"minimum": 0, "default": 16},
            },
            /// The prompts, at least one.
            prompts: Vec<Prompt> => (prompts(fields, "prompt")) {
                prompt: Option<Value> {"$ref": "#/components/schemas/Prompts"},
            },
            /// Log-probabilities with this many alternatives; −1: all.
            logprobs: Option<i64> {"minimum": -1},
            /// Begin with the prompt.
            echo: bool = false,
            /// Special tokens around a text, as the tokenizer has them.
            add_special_tokens: bool = true,
        }
    }
}

impl CompletionRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        unserved::refuse(&mut fields, Route::Completion);
        let request = Self::read(&mut fields);
        if request.logprobs.is_none() && !request.common.logprob_token_ids.is_empty() {
            fields.value_error("logprob_token_ids", "when using `logprob_token_ids`, `logprobs` must be set.");
        }
        fields.finish()?;
        Ok(request)
    }
}

/// The prompts of the field `name`, at least one.
pub(crate) fn prompts(fields: &mut JsonFields<'_>, name: &str) -> Vec<Prompt> {
    let Some(raw) = fields.raw(name) else {
        fields.value_error(name, NO_PROMPT);
        return vec![];
    };
    match read_prompts(raw) {
        None => {
            let message =
                "Input should be a string, a list of strings, a list of token ids or a list of lists of token ids";
            fields.error(name, "union_type", message);
            vec![]
        }
        Some(Err(count)) => {
            fields.value_error(name, format_args!("{name} accepts at most {MAX_PROMPTS} prompts, got {count}."));
            vec![]
        }
        Some(Ok(prompts)) if prompts.is_empty() || prompts == [Prompt::Text(String::new())] => {
            fields.value_error(name, NO_PROMPT);
            vec![]
        }
        Some(Ok(prompts)) => prompts,
    }
}

/// The prompts, or their number if there are too many. The first characters distinguish the four forms.
fn read_prompts(raw: &RawValue) -> Option<Result<Vec<Prompt>, usize>> {
    let text = raw.get();
    if text.starts_with('"') {
        return serde_json::from_str(text).ok().map(|one| Ok(vec![Prompt::Text(one)]));
    }
    let inner = text.strip_prefix('[')?.trim_start();
    if inner == "]" {
        return Some(Ok(vec![]));
    }
    if inner.starts_with('"') {
        return serde_json::from_str(text).ok().map(|many| all(many, Prompt::Text));
    }
    if inner.starts_with('[') {
        return serde_json::from_str(text).ok().map(|many| all(many, Prompt::Tokens));
    }
    serde_json::from_str(text).ok().map(|one| Ok(vec![Prompt::Tokens(one)]))
}

fn all<T>(list: Limited<T, MAX_PROMPTS>, prompt: fn(T) -> Prompt) -> Result<Vec<Prompt>, usize> {
    if list.count > MAX_PROMPTS { Err(list.count) } else { Ok(list.items.into_iter().map(prompt).collect()) }
}
