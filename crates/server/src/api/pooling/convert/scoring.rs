//! Requests that compare texts.

use std::borrow::Cow;

use octavo_engine::Pooling;
use octavo_text::{ChatTemplate, TemplateError, TemplateInput};
use serde_json::{Map, Value, json};

use crate::api::pooling::answer::{Comparison, Ranking, Scores};
use crate::api::pooling::convert::prompts::{PoolingPrompt, Prompts};
use crate::api::pooling::convert::{ITEM_BYTES, PreparedPooling, Work, head, prepared, tokens_of};
use crate::api::pooling::request::{RerankRequest, ScoreRequest, ScoringFields};
use crate::api::shared::conversation::merged;
use crate::api::shared::headers::RequestHeaders;
use crate::api::shared::size::ResponseSize;
use crate::app::{App, AppState};
use crate::config::{PairFormat, PoolingKind};
use crate::error::ApiError;
use crate::workers::take_turns;

/// Prepares a request of POST /score.
pub(crate) fn scores(state: &AppState, body: &[u8], headers: &RequestHeaders) -> Result<PreparedPooling, ApiError> {
    let ScoreRequest { fields, queries, documents } = ScoreRequest::parse(body)?;
    let model = state.resolve_model(fields.common.model.as_deref())?;
    let compared = compare(state, &fields, &queries, &documents)?;
    let bytes = documents.len() * ITEM_BYTES;
    let id = headers.id(fields.common.request_id.as_ref());
    let head = head(&model, format!("score-{id}"), compared.counted);
    let answer = Box::new(Scores { head, comparison: compared.comparison });
    let work = Work { model, prompts: compared.prompts, pooling: Pooling::Prompt, answer, bytes };
    Ok(prepared(state, &fields.common, headers, id, work))
}

/// Prepares a request of POST /rerank.
pub(crate) fn ranking(state: &AppState, body: &[u8], headers: &RequestHeaders) -> Result<PreparedPooling, ApiError> {
    let RerankRequest { fields, query, documents, top_n } = RerankRequest::parse(body)?;
    let model = state.resolve_model(fields.common.model.as_deref())?;
    let compared = compare(state, &fields, &[query], &documents)?;
    let bytes = ResponseSize::without_choices()
        .texts("documents", documents.iter().map(String::as_str))
        .bytes("documents", documents.len() * ITEM_BYTES)
        .check(state)?;
    let id = headers.id(fields.common.request_id.as_ref());
    let head = head(&model, format!("score-{id}"), compared.counted);
    let top = usize::try_from(top_n).ok().filter(|&top| top > 0).unwrap_or(usize::MAX);
    let answer = Box::new(Ranking { head, comparison: compared.comparison, documents, top });
    let work = Work { model, prompts: compared.prompts, pooling: Pooling::Prompt, answer, bytes };
    Ok(prepared(state, &fields.common, headers, id, work))
}

/// The prompts that compare texts.
struct Compared {
    prompts: Vec<PoolingPrompt>,
    comparison: Comparison,
    /// The tokens that the answer reports.
    counted: usize,
}

/// Makes the prompts that compare the documents with the queries: one query with all, or each with its own.
fn compare(
    state: &AppState,
    fields: &ScoringFields,
    queries: &[String],
    documents: &[String],
) -> Result<Compared, ApiError> {
    let limits = Limits {
        query: state.limit("max_tokens_per_query", fields.max_tokens_per_query)?,
        document: state.limit("max_tokens_per_doc", fields.max_tokens_per_doc)?,
    };
    let prompts = Prompts::new(state, fields.common.truncation, "documents")?;
    match &state.pooling.kind {
        PoolingKind::Embedder { .. } => {
            let of = |text: &String, most: Option<usize>| match most {
                None => prompts.text(text, true),
                Some(_) => prompts.assembled(&prompts.tokens(text, most)?),
            };
            let first = queries.iter().map(|query| of(query, limits.query));
            let all = first.chain(documents.iter().map(|document| of(document, limits.document)));
            let made = all.collect::<Result<Vec<_>, _>>()?;
            let counted = counted_as_pairs(&made[..queries.len()], &made[queries.len()..], pad_tokens(state));
            let comparison = Comparison::Cosine { queries: queries.len() };
            Ok(Compared { prompts: made, comparison, counted })
        }
        PoolingKind::Classifier { .. } => {
            let (finish, _) = state.score_finish(fields.common.use_activation)?;
            let made = Pairs::new(&prompts, limits, &fields.template_kwargs)?.prompts(queries, documents)?;
            let counted = tokens_of(&made);
            Ok(Compared { prompts: made, comparison: Comparison::Pairs(finish), counted })
        }
    }
}

/// The tokens of queries and documents as vLLM reports them: each query as often as it is compared, with a padding token
/// between the texts.
fn counted_as_pairs(queries: &[PoolingPrompt], documents: &[PoolingPrompt], padding: usize) -> usize {
    let pairs = documents.len() * padding + tokens_of(documents);
    match queries {
        [query] => pairs + documents.len() * query.tokens.len(),
        queries => pairs + tokens_of(queries),
    }
}

fn pad_tokens(state: &App) -> usize {
    usize::from(state.text.tokenizer.special().pad.is_some())
}

/// Most tokens of prompts that repeat one query. A body of a few kilobytes could otherwise need gigabytes.
const MAX_TOKENS: usize = 8 << 20;

/// The prompts, unless they have more than `most` tokens together.
fn within(
    prompts: impl Iterator<Item = Result<PoolingPrompt, ApiError>>,
    most: usize,
) -> Result<Vec<PoolingPrompt>, ApiError> {
    let (mut made, mut tokens) = (vec![], 0);
    for prompt in prompts {
        let prompt = prompt?;
        tokens += prompt.tokens.len();
        if tokens > most {
            let message = format!(
                "The query and the documents make prompts of more than {most} tokens, because each document is read with \
                 the query. Please send fewer documents or a shorter query."
            );
            return Err(ApiError::bad_request(message).with_param("documents"));
        }
        made.push(prompt);
    }
    Ok(made)
}

/// The most tokens of each text, before they become a prompt.
#[derive(Clone, Copy)]
struct Limits {
    query: Option<usize>,
    document: Option<usize>,
}

impl App {
    /// The value of a limit of texts; 0 is none.
    fn limit(&self, name: &'static str, tokens: i64) -> Result<Option<usize>, ApiError> {
        let max_model_len = self.config.max_model_len;
        let message = match usize::try_from(tokens) {
            Ok(0) => return Ok(None),
            Ok(tokens) if tokens < max_model_len => return Ok(Some(tokens)),
            Ok(tokens) => format!("{name} ({tokens}) must be less than max_model_len ({max_model_len})."),
            Err(_) => format!("{name} must be a non-negative integer"),
        };
        Err(ApiError::bad_request(message).with_param(name))
    }
}

/// Makes prompts of pairs of texts.
struct Pairs<'a> {
    prompts: &'a Prompts<'a>,
    limits: Limits,
    format: Format<'a>,
}

/// [`PairFormat`] with what it needs.
enum Format<'a> {
    Template { token_types: bool },
    Joined,
    Chat { template: &'a ChatTemplate, kwargs: Map<String, Value> },
}

impl<'a> Pairs<'a> {
    fn new(prompts: &'a Prompts<'a>, limits: Limits, kwargs: &Map<String, Value>) -> Result<Self, ApiError> {
        let state = prompts.state;
        let format = match state.pooling.pairs {
            PairFormat::Template { token_types } => Format::Template { token_types },
            PairFormat::Joined => Format::Joined,
            PairFormat::ChatTemplate => Format::Chat {
                template: state.text.template.as_deref().ok_or(TemplateError::Missing)?,
                kwargs: merged(&state.config.api.template_kwargs, kwargs),
            },
        };
        Ok(Self { prompts, limits, format })
    }

    /// The prompts of the documents, each with its query.
    fn prompts(&self, queries: &[String], documents: &[String]) -> Result<Vec<PoolingPrompt>, ApiError> {
        if let [query] = queries {
            // It is read once.
            let query = self.query(query)?;
            return within(documents.iter().map(|document| self.pair(&query, document)), MAX_TOKENS);
        }
        queries.iter().zip(documents).map(|(query, document)| self.pair(&self.query(query)?, document)).collect()
    }

    fn query<'t>(&self, text: &'t str) -> Result<Query<'t>, ApiError> {
        let is_limited = self.limits.query.is_some() || self.limits.document.is_some();
        Ok(match &self.format {
            Format::Template { .. } => Query::Tokens(self.prompts.tokens(text, self.limits.query)?),
            Format::Joined if is_limited => Query::Tokens(self.prompts.tokens(text, self.limits.query)?),
            Format::Joined => Query::Text(text.into()),
            Format::Chat { .. } => Query::Text(self.cut(text, self.limits.query)?),
        })
    }

    fn pair(&self, query: &Query<'_>, document: &str) -> Result<PoolingPrompt, ApiError> {
        match (&self.format, query) {
            (Format::Template { token_types }, Query::Tokens(query)) => {
                self.prompts.pair(query, &self.prompts.tokens(document, self.limits.document)?, *token_types)
            }
            (_, Query::Tokens(query)) => {
                self.prompts.assembled(&[&query[..], &self.prompts.tokens(document, self.limits.document)?].concat())
            }
            (Format::Chat { template, kwargs }, Query::Text(query)) => {
                let document = self.cut(document, self.limits.document)?;
                let messages =
                    [json!({"role": "query", "content": query}), json!({"role": "document", "content": document})];
                let input = TemplateInput {
                    messages: &messages,
                    tools: None,
                    documents: None,
                    add_generation_prompt: false,
                    continue_final_message: false,
                    kwargs,
                };
                let text = template.render_in_turns::<ApiError>(&input, take_turns)?;
                self.prompts.rendered(&text, true)
            }
            (_, Query::Text(query)) => self.prompts.text(&format!("{query}{document}"), true),
        }
    }

    /// The text of the first tokens of a text, as the tokenizer gets it.
    fn cut<'t>(&self, text: &'t str, most: Option<usize>) -> Result<Cow<'t, str>, ApiError> {
        let Some(most) = most else { return Ok(self.prompts.spelled(text)) };
        let tokens = self.prompts.tokens(text, Some(most))?;
        let kept = self.prompts.state.text.tokenizer.decode(&tokens, false);
        let mut kept = kept.map_err(|error| ApiError::bad_request(error.to_string()))?;
        // The last token may end in a character.
        kept.truncate(kept.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        Ok(kept.into())
    }
}

/// A query as its pairs need it.
enum Query<'t> {
    /// Its tokens without special tokens.
    Tokens(Vec<u32>),
    Text(Cow<'t, str>),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(tokens: usize) -> PoolingPrompt {
        PoolingPrompt { tokens: vec![0; tokens].into(), second_text: None }
    }

    #[test]
    fn prompts_that_repeat_a_query_have_a_bounded_number_of_tokens() {
        let prompts = || [3, 3].map(|tokens| Ok(prompt(tokens))).into_iter();
        assert_eq!(within(prompts(), 6).unwrap().len(), 2);
        let error = within(prompts(), 5).unwrap_err();
        assert!(error.to_string().contains("more than 5 tokens"), "{error}");
        // Nothing is made after the first that is too many.
        let endless = std::iter::repeat_with(|| Ok(prompt(1)));
        assert!(within(endless, 100).is_err());
    }

    #[test]
    fn a_query_counts_once_for_each_document_that_it_is_compared_with() {
        let (two, three) = (prompt(2), prompt(3));
        assert_eq!(counted_as_pairs(std::slice::from_ref(&two), &[three.clone(), three.clone()], 1), (2 + 1 + 3) * 2);
        assert_eq!(counted_as_pairs(&[two.clone(), three.clone()], &[three, two], 0), (2 + 3) + (3 + 2));
    }
}
