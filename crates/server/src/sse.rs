//! A response as server-sent events. The next event is made only when the socket has room for it: a client that reads
//! slowly gets fewer, longer chunks, and costs no more memory than one that reads fast.

use std::convert::Infallible;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream::unfold;
use http::header;
use serde::Serialize;

use crate::choices::{Choices, Output};
use crate::error::ApiError;
use crate::types::common::StreamOptions;
use crate::types::response::Usage;
use crate::wire::Wire;

/// Events of one frame of the body.
#[derive(Default)]
pub(crate) struct Events(Vec<u8>);

impl Events {
    /// Adds an event with a JSON body.
    pub(crate) fn push(&mut self, data: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        let written = serde_json::to_writer(&mut self.0, data);
        debug_assert!(written.is_ok(), "response bodies have string keys and go to memory");
        self.0.extend_from_slice(b"\n\n");
    }

    pub(crate) fn into_bytes(self) -> Bytes {
        self.0.into()
    }

    fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// What an event carries besides its choice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extras {
    /// The usage so far, if every chunk shall have it.
    pub(crate) usage: Option<Usage>,
    /// The chunk carries the fingerprint.
    pub(crate) fingerprint: bool,
}

/// A response that is being streamed.
struct Streaming<W> {
    choices: Choices,
    wire: W,
    options: StreamOptions,
    /// Tokens that each choice has generated.
    generated: Vec<usize>,
    unfinished: usize,
    /// The output that was awaited before the response began.
    first: Option<Output>,
    ended: bool,
}

/// Waits for the first output, whose failure is still an ordinary error response, and streams the rest.
pub(crate) async fn respond<W: Wire>(
    mut choices: Choices,
    wire: W,
    options: StreamOptions,
) -> Result<Response, ApiError> {
    let first = choices.next().await.transpose()?;
    let count = wire.choices();
    let streaming =
        Streaming { choices, wire, options, generated: vec![0; count], unfinished: count, first, ended: false };
    let frames = unfold(streaming, |mut streaming| async {
        let frame = streaming.next_frame().await?;
        Some((Ok::<_, Infallible>(frame), streaming))
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(frames)).into_response())
}

impl<W: Wire> Streaming<W> {
    /// The events of the next output; `None` after the end.
    async fn next_frame(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let mut events = Events::default();
        let output = match self.first.take() {
            Some(first) => {
                self.open(&mut events);
                Some(Ok(first))
            }
            None => self.choices.next().await,
        };
        match output {
            Some(Ok(output)) => self.chunk(&mut events, output),
            Some(Err(error)) => {
                events.push(&error.body());
                self.ended = true;
            }
            None => self.ended = true,
        }
        if self.unfinished == 0 && !self.ended {
            if self.options.include_usage {
                self.wire.usage(&mut events, self.usage());
            }
            self.ended = true;
        }
        if self.ended {
            events.done();
        }
        Some(events.into_bytes())
    }

    fn open(&mut self, events: &mut Events) {
        for index in 0..self.generated.len() {
            let usage = self.options.continuous_usage.then(|| self.usage_of(index));
            self.wire.open(events, index as u32, Extras { usage, fingerprint: false });
        }
    }

    fn chunk(&mut self, events: &mut Events, output: Output) {
        let index = output.index as usize;
        self.generated[index] += output.tokens.len();
        self.unfinished -= usize::from(output.finish.is_some());
        let extras = Extras {
            usage: self.options.continuous_usage.then(|| self.usage_of(index)),
            fingerprint: self.unfinished == 0 && !self.options.include_usage,
        };
        self.wire.chunk(events, output, extras);
    }

    fn usage_of(&self, index: usize) -> Usage {
        Usage::new(self.wire.prompt_tokens(index as u32), self.generated[index])
    }

    fn usage(&self) -> Usage {
        Usage::new(self.wire.total_prompt_tokens(), self.generated.iter().sum())
    }
}
