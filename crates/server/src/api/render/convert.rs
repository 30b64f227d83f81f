//! Rendered requests: the tokens of a prompt and the parameters of its sampling, for routers that send tokens to engines.

use octavo_text::GrammarSpec;
use serde_json::{Value, json};

use crate::api::chat::request::ChatRequest;
use crate::api::completions::convert::prepare;
use crate::api::completions::request::CompletionRequest;
use crate::api::shared::common::CommonFields;
use crate::api::shared::conversation::{Conversation, ConversationSettings, conversation};
use crate::api::shared::convert::Prepared;
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::staged::images_of;
use crate::app::AppState;
use crate::choices::Submission;
use crate::error::ApiError;

/// Renders a chat request.
pub(crate) fn rendered_chat(state: &AppState, body: &[u8], headers: &RequestHeaders) -> Result<Value, ApiError> {
    let request = ChatRequest::parse(body)?;
    let shared = ConversationSettings::new(state, &request)?;
    if !images_of(state, &request, headers)?.is_empty() {
        return Err(ApiError::not_implemented("Requests with images cannot be rendered.").with_param("messages"));
    }
    let Conversation { id, submission, grammar, .. } = conversation(state, &request, headers, shared, &[])?;
    let constraints = constraints(grammar.as_ref());
    Ok(rendered(&request.common, &submission, 0, &constraints, format!("chatcmpl-{id}")))
}

/// Renders a completion request: a list with one entry for each prompt.
pub(crate) fn rendered_completions(state: &AppState, body: &[u8], headers: &RequestHeaders) -> Result<Value, ApiError> {
    let request = CompletionRequest::parse(body)?;
    let common = request.common.clone();
    let Prepared { submission, grammar, format, .. } = prepare(state, request, headers)?;
    let constraints = constraints(grammar.as_ref());
    let one = |index| {
        let suffix = if submission.prompts.len() > 1 { format!("-{index}") } else { String::new() };
        rendered(&common, &submission, index, &constraints, format!("{}{suffix}", format.envelope.id))
    };
    Ok((0..submission.prompts.len()).map(one).collect())
}

/// The request of one prompt in the form of vLLM's POST /inference/v1/generate.
fn rendered(
    common: &CommonFields,
    submission: &Submission,
    index: usize,
    constraints: &Value,
    request_id: String,
) -> Value {
    let prompt = &submission.prompts[index];
    let mut parameters = submission.sampling.describe(prompt.max_tokens);
    parameters.insert("bad_words".into(), json!(common.bad_words));
    parameters.insert("allowed_token_ids".into(), json!(common.allowed_token_ids));
    parameters.insert("structured_outputs".into(), constraints.clone());
    let options = common.stream.map(
        |options| json!({"include_usage": options.include_usage, "continuous_usage_stats": options.continuous_usage}),
    );
    json!({
        "request_id": request_id,
        "token_ids": &prompt.tokens[..],
        "features": null,
        "sampling_params": parameters,
        "model": common.model,
        "stream": common.stream.is_some(),
        "stream_options": options,
        "cache_salt": common.cache_salt,
        "priority": submission.origin.priority,
        "kv_transfer_params": null,
    })
}

/// The grammar in the form of vLLM's `structured_outputs`.
fn constraints(grammar: Option<&GrammarSpec>) -> Value {
    let call = |(name, parameters): &(String, Value)| {
        json!({"properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
            "required": ["name", "parameters"]})
    };
    match grammar {
        None => Value::Null,
        Some(GrammarSpec::JsonObject) => json!({"json_object": true}),
        Some(GrammarSpec::JsonSchema { schema, .. }) => json!({"json": schema}),
        Some(GrammarSpec::Regex(regex)) => json!({"regex": regex}),
        Some(GrammarSpec::Choice(choices)) => json!({"choice": choices}),
        Some(GrammarSpec::Grammar(grammar)) => json!({"grammar": grammar}),
        // vLLM has the tag as a text.
        Some(GrammarSpec::StructuralTag(tag)) => json!({"structural_tag": tag.to_string()}),
        Some(GrammarSpec::NamedTool { parameters }) => json!({"json": parameters}),
        Some(GrammarSpec::ToolCalls { tools, .. }) => {
            let calls: Vec<Value> = tools.iter().map(call).collect();
            json!({"json": {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}})
        }
    }
}
