//! Conversations: chat requests, and the requests of other APIs that are converted to them.

use std::sync::Arc;

use octavo_media::ProcessedImage;
use octavo_text::{
    ChatTemplate, GrammarSpec, ReasoningSyntax, TemplateError, TemplateInput, ThinkingBudget, ToolSyntax,
};
use serde_json::{Map, Value};

use crate::api::chat::request::ChatRequest;
use crate::api::shared::convert::{restrictions, stream_interval};
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::model::ResolvedModel;
use crate::api::shared::prompt::{fit, tokenise};
use crate::api::shared::restrictions::{ReasoningSpan, Restrictions};
use crate::api::shared::sampling::{OutputLimit, Sampling};
use crate::api::shared::tools::ToolChoice;
use crate::api::shared::untrusted_template;
use crate::app::AppState;
use crate::choices::{Calls, Parsing, Submission};
use crate::error::ApiError;
use crate::images::WithImages;
use crate::workers::take_turns;

/// Characters at the end of the prompt that are searched for the start of reasoning.
const TAIL: usize = 256;

/// A conversation that is ready to run.
pub(crate) struct Conversation {
    /// The request id without the route's prefix.
    pub(crate) id: String,
    pub(crate) submission: Submission,
    pub(crate) grammar: Option<GrammarSpec>,
    pub(crate) prompt: Arc<[u32]>,
    /// The rendered prompt.
    pub(crate) text: String,
}

/// The parameters and restrictions of a conversation, which those of a batch share.
#[derive(Clone)]
pub(crate) struct ConversationSettings {
    model: ResolvedModel,
    sampling: Sampling,
    restrictions: Restrictions,
}

impl ConversationSettings {
    /// Checks all of a request but its messages, so that a request that is refused loads no image.
    pub(crate) fn new(state: &AppState, request: &ChatRequest) -> Result<Self, ApiError> {
        let (common, config) = (&request.common, &state.config);
        let model = state.resolve_model(common.model.as_deref())?;
        let (field, max_tokens) = request.limit;
        let limit = OutputLimit { field, max_tokens, default: config.sampling_defaults.max_new_tokens, least: 1 };
        let alternatives = request.logprobs.map(|count| ("top_logprobs", count));
        let sampling = Sampling::new(common, limit, alternatives, config)?;
        Ok(Self { model, sampling, restrictions: restrictions(state, common)? })
    }
}

/// Renders and tokenizes a conversation with its images, and checks that it fits the context.
pub(crate) fn conversation(
    state: &AppState,
    request: &ChatRequest,
    headers: &RequestHeaders,
    ConversationSettings { model, mut sampling, restrictions }: ConversationSettings,
    images: &[Arc<ProcessedImage>],
) -> Result<Conversation, ApiError> {
    let (common, config) = (&request.common, &state.config);
    let (calls, grammar) = calls(state, request)?;
    if let Calls::Written(syntax, _) = &calls {
        sampling.text.skip_special_tokens &= !syntax.needs_special_tokens();
    }
    let (text, prompt) = prompt_of(state, request, images)?;
    let prompt = fit(state, prompt, common, &sampling)?;
    let forced = matches!(request.tools.choice, ToolChoice::Required | ToolChoice::Named(_));
    let template = request.chat_template.as_deref().or(state.text.template.as_deref().map(ChatTemplate::source));
    let prompt_tail = octavo_text::without_written_turns(tail(&text), template.unwrap_or_default());
    let parsing = Parsing {
        reasoning: config.api.reasoning.map(|syntax| effective(syntax, grammar.is_some(), &prompt_tail)),
        calls,
        prompt_tail,
        hide_reasoning: !request.include_reasoning,
        first_call_only: !request.tools.parallel,
        complete_calls_only: forced && common.stream.is_none(),
    };
    if let Some(syntax) = parsing.reasoning {
        sampling.text.skip_special_tokens &= !syntax.needs_special_tokens();
    }
    let restrictions = reasoning_restrictions(state, request, &parsing, restrictions)?;
    let id = headers.id(common.request_id.as_ref());
    let tokens = Arc::clone(&prompt.tokens);
    let submission = Submission {
        request_id: id.clone(),
        model,
        prompts: vec![prompt],
        sampling,
        restrictions,
        parsing,
        origin: headers.origin(state, common.priority, common.cache_salt.as_deref()),
        interval: stream_interval(state, common),
    };
    Ok(Conversation { id, submission, grammar, prompt: tokens, text })
}

/// The rendered prompt, and its tokens with those of its images.
pub(crate) fn prompt_of(
    state: &AppState,
    request: &ChatRequest,
    images: &[Arc<ProcessedImage>],
) -> Result<(String, WithImages), ApiError> {
    let truncation = request.common.truncation;
    if !images.is_empty() && truncation.is_some() {
        let message = "A prompt with images cannot be truncated; leave out truncate_prompt_tokens.";
        return Err(ApiError::bad_request(message).with_param("truncate_prompt_tokens"));
    }
    let text = render(state, request)?;
    let tokens_of = |text: &str| tokenise(state, text, request.add_special_tokens, truncation);
    let prompt = match &state.text.images {
        Some(model) => WithImages::new(tokens_of(&model.with_views(&text, images)?)?, model.token, images)?,
        None => WithImages::none(tokens_of(&text)?),
    };
    Ok((text, prompt))
}

/// The source of tool calls, and the grammar of the output.
fn calls(state: &AppState, request: &ChatRequest) -> Result<(Calls, Option<GrammarSpec>), ApiError> {
    let tools = &request.tools;
    let grammar = request.common.grammar.clone();
    let Some(definitions) = &tools.definitions else { return Ok((Calls::None, grammar)) };
    Ok(match &tools.choice {
        ToolChoice::None => (Calls::None, grammar),
        ToolChoice::Auto => {
            let syntax = state.config.api.tools.ok_or_else(|| {
                let message =
                    "\"auto\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set";
                ApiError::bad_request(message).with_param("tool_choice")
            })?;
            (Calls::Written(syntax, definitions.as_slice().into()), grammar)
        }
        ToolChoice::Required => {
            let spec = GrammarSpec::ToolCalls { tools: tools.signatures(), parallel: tools.parallel };
            (Calls::Written(ToolSyntax::JsonArray, definitions.as_slice().into()), Some(spec))
        }
        ToolChoice::Named(name) => {
            let parameters = tools.parameters(name).unwrap_or_else(|| serde_json::json!({"type": "object"}));
            (Calls::Named(name.clone()), Some(GrammarSpec::NamedTool { parameters }))
        }
    })
}

/// The syntax of reasoning for one request. A grammar must know where reasoning begins: if the prompt leaves that open,
/// reasoning begins with its marker or not at all, so a model that does not reason is constrained too.
fn effective(syntax: ReasoningSyntax, has_grammar: bool, prompt_tail: &str) -> ReasoningSyntax {
    let is_open = syntax.is_default() && has_grammar && syntax.opened_by(prompt_tail).is_none();
    if is_open { ReasoningSyntax::Qwen3 } else { syntax }
}

/// The effect of reasoning: grammars begin after it, and it may have a budget.
fn reasoning_restrictions(
    state: &AppState,
    request: &ChatRequest,
    parsing: &Parsing,
    mut restrictions: Restrictions,
) -> Result<Restrictions, ApiError> {
    let Some(syntax) = parsing.reasoning else {
        if request.thinking_token_budget.is_some() {
            let message = "thinking_token_budget requires --reasoning-parser to be set";
            return Err(ApiError::bad_request(message).with_param("thinking_token_budget"));
        }
        return Ok(restrictions);
    };
    let opened = syntax.opened_by(&parsing.prompt_tail);
    if opened == Some(false) {
        return Ok(restrictions);
    }
    // If the prompt begins the reasoning, the output has no start marker.
    let begun = opened.unwrap_or(syntax.is_default());
    let ids = |marker: &str| marker_tokens(state, marker);
    let (end, vocab_size) = (ids(syntax.end())?, state.config.vocab_size);
    let start = if begun { Arc::default() } else { ids(syntax.start())? };
    if let Some(budget) = request.thinking_token_budget {
        restrictions.thinking = Some(ThinkingBudget::new(budget as usize, &start, &end, vocab_size));
    }
    let span = |start, end| ReasoningSpan { start, end, has_gap: false, choice: None, vocab_size };
    restrictions.reasoning = match (syntax.answer_header(), &start[..]) {
        (Some(header), _) => {
            let end = ids(header)?;
            let forced = matches!(request.tools.choice, ToolChoice::Required | ToolChoice::Named(_));
            // A forced call is the answer, so the model may not call a function elsewhere instead.
            let choice = match (end.get(..2), &ids(syntax.start())?[..]) {
                (Some(&[channel, answer]), &[_, reasoning, ..]) if forced => {
                    Some((channel, [answer, reasoning].into()))
                }
                _ => None,
            };
            Some(ReasoningSpan { has_gap: true, choice, ..span(None, end) })
        }
        (None, []) => Some(span(None, end)),
        (None, &[start]) => Some(span(Some(start), end)),
        // A marker of several tokens is text that a grammar may allow too, so the grammar applies at once.
        (None, _) => None,
    };
    Ok(restrictions)
}

/// The tokens of a marker of reasoning.
fn marker_tokens(state: &AppState, marker: &str) -> Result<Arc<[u32]>, ApiError> {
    state.text.tokenizer.encode(marker, false).map(Arc::from).map_err(|error| {
        tracing::error!(%error, marker, "a reasoning marker could not be tokenised");
        ApiError::internal()
    })
}

fn render(state: &AppState, request: &ChatRequest) -> Result<String, ApiError> {
    let kwargs = merged(&state.config.api.template_kwargs, &request.template_kwargs);
    let input = TemplateInput {
        messages: &request.messages,
        tools: request.tools.definitions.as_deref(),
        documents: request.documents.as_deref(),
        add_generation_prompt: request.add_generation_prompt,
        continue_final_message: request.continue_final_message,
        kwargs: &kwargs,
    };
    if let Some(source) = &request.chat_template {
        return untrusted_template::render(state, source, &input);
    }
    let template = state.text.template.as_deref().ok_or(TemplateError::Missing)?;
    let placeholder = state.text.images.as_ref().map(|images| &*images.placeholder);
    let messages = octavo_text::normalize_messages(&request.messages, template.content_format(), placeholder)
        .map_err(|error| request.refused(&error))?;
    template.render_in_turns(&TemplateInput { messages: &messages, ..input }, take_turns)
}

/// The server's template variables, overridden by the request's.
pub(crate) fn merged(defaults: &Map<String, Value>, own: &Map<String, Value>) -> Map<String, Value> {
    let mut all = defaults.clone();
    all.extend(own.iter().map(|(key, value)| (key.clone(), value.clone())));
    all
}

fn tail(text: &str) -> &str {
    let start = text.char_indices().rev().nth(TAIL - 1).map_or(0, |(at, _)| at);
    &text[start..]
}
