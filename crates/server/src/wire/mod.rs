//! How outputs are spelled: one implementation for each generation route.

mod chat;
mod completion;

use std::sync::Arc;

use axum::response::{IntoResponse, Response};

use crate::choices::{Choices, Output};
use crate::error::ApiError;
use crate::sse::{Events, Extras};
use crate::types::common::StreamOptions;
use crate::types::response::{Finish, Usage};

pub(crate) use chat::ChatWire;
pub(crate) use completion::CompletionWire;

/// What every body of a response repeats.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    /// With the route's prefix.
    pub(crate) id: String,
    /// Unix time.
    pub(crate) created: u64,
    pub(crate) model: Arc<str>,
    pub(crate) fingerprint: Arc<str>,
}

/// A choice that has ended, whole.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    pub(crate) text: String,
    pub(crate) tokens: Vec<octavo_engine::TokenOutput>,
    pub(crate) finish: Option<Finish>,
}

/// The bodies of one route.
pub(crate) trait Wire: Send + Sized + 'static {
    /// Number of choices.
    fn choices(&self) -> usize;

    /// Tokens of the prompt that a choice continues.
    fn prompt_tokens(&self, index: u32) -> usize;

    /// Tokens of all prompts, each counted once.
    fn total_prompt_tokens(&self) -> usize;

    /// Adds the event that opens a choice, if the route has one.
    fn open(&mut self, events: &mut Events, index: u32, extras: Extras);

    /// Adds the event of an output.
    fn chunk(&mut self, events: &mut Events, output: Output, extras: Extras);

    /// Adds the event with the usage.
    fn usage(&self, events: &mut Events, usage: Usage);

    /// The one body of a response that is not streamed.
    fn whole(self, choices: Vec<Whole>, usage: Usage) -> Response;
}

/// Answers a request whose sequences run.
pub(crate) async fn respond<W: Wire>(
    mut choices: Choices,
    wire: W,
    stream: Option<StreamOptions>,
) -> Result<Response, ApiError> {
    if let Some(options) = stream {
        return crate::sse::respond(choices, wire, options).await;
    }
    let mut wholes: Vec<Whole> = (0..wire.choices()).map(|_| Whole::default()).collect();
    while let Some(output) = choices.next().await.transpose()? {
        let whole = &mut wholes[output.index as usize];
        whole.text.push_str(&output.text);
        whole.tokens.extend(output.tokens);
        whole.finish = output.finish;
    }
    let usage = Usage::new(wire.total_prompt_tokens(), wholes.iter().map(|w| w.tokens.len()).sum());
    Ok(wire.whole(wholes, usage).into_response())
}
