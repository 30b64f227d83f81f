//! Streams a response as server-sent events, one per token. The next frame is created only when the socket has room, so a
//! slow client causes tokens to queue rather than their events.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream::{Stream, unfold};
use futures::{FutureExt, StreamExt};
use http::{HeaderName, header};
use serde::Serialize;
use tokio::time::timeout;

use crate::api::shared::common::StreamOptions;
use crate::api::shared::response::Usage;
use crate::api::shared::stream::{ResponseFormat, Tally};
use crate::choices::{Choices, Output};
use crate::error::ApiError;
use crate::keep_alive::COMMENT;

/// Size in bytes from which a frame takes no more outputs.
const FRAME_BYTES: usize = 32 << 10;

/// The events of one frame of the body.
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

    /// Adds an event with a name and a JSON body.
    pub(crate) fn push_named(&mut self, name: &str, data: &impl Serialize) {
        self.0.extend_from_slice(b"event: ");
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.push(data);
    }

    /// Adds a line of JSON.
    pub(crate) fn line(&mut self, data: &impl Serialize) {
        let written = serde_json::to_writer(&mut self.0, data);
        debug_assert!(written.is_ok(), "response bodies have string keys and go to memory");
        self.0.push(b'\n');
    }

    /// Adds the end mark of the completion routes' streams.
    pub(crate) fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// The fields of an event beside its choice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Extras {
    /// The usage so far, if every chunk reports it.
    pub(crate) usage: Option<Usage>,
    /// Whether the chunk has the fingerprint.
    pub(crate) fingerprint: bool,
}

/// A response that is being streamed.
struct Streaming<W> {
    choices: Choices,
    format: W,
    options: StreamOptions,
    tally: Tally,
    unfinished: usize,
    first: First,
    opened: bool,
    ended: bool,
}

/// The state of a response before its first frame.
enum First {
    /// The output that was awaited before the response began.
    Output(Output),
    /// The response began with no output, because the time of silence had passed.
    Silence,
    /// The first frame is sent.
    Sent,
}

impl First {
    /// Waits for the first output. A request may be queued or prefilled for long, so the wait ends after `silence`.
    async fn wait(choices: &mut Choices, silence: Option<Duration>) -> Result<Self, ApiError> {
        let first = match silence {
            None => choices.next().await,
            Some(silence) => match timeout(silence, choices.next()).await {
                Ok(first) => first,
                Err(_) => return Ok(Self::Silence),
            },
        };
        Ok(first.transpose()?.map_or(Self::Sent, Self::Output))
    }
}

/// Waits for the first output, whose failure is an ordinary error response, and streams the rest. With keep-alive
/// comments, the response begins with a comment if the first output takes longer than their interval; a later failure
/// is then an event.
pub(crate) async fn respond<W: ResponseFormat>(
    mut choices: Choices,
    format: W,
    options: StreamOptions,
) -> Result<Response, ApiError> {
    let silence = choices.keep_alive().filter(|_| W::COMMENTS);
    let first = First::wait(&mut choices, silence).await?;
    let frames = Streaming::new(choices, format, options, first).frames();
    Ok(response::<W>(Body::from_stream(frames.map(Ok::<_, Infallible>))))
}

/// The frames of a stream, apart from any response.
pub(crate) fn frames<W: ResponseFormat>(
    choices: Choices,
    format: W,
    options: StreamOptions,
) -> impl Stream<Item = Bytes> + Send {
    Streaming::new(choices, format, options, First::Sent).frames()
}

/// A response whose body is a stream.
pub(crate) fn response<W: ResponseFormat>(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, W::STREAM_TYPE),
        (header::CACHE_CONTROL, "no-cache"),
        // Tells nginx and proxies based on it to forward each event at once, whatever their settings.
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, body).into_response()
}

impl<W: ResponseFormat> Streaming<W> {
    fn new(choices: Choices, format: W, options: StreamOptions, first: First) -> Self {
        let (tally, unfinished) = (Tally::new(&format, choices.n()), format.choices());
        Self { choices, format, options, tally, unfinished, first, opened: false, ended: false }
    }

    fn frames(self) -> impl Stream<Item = Bytes> + Send {
        unfold(self, |mut streaming| async {
            let frame = streaming.next_frame().await?;
            Some((frame, streaming))
        })
    }

    /// The events of the next output and of further outputs that are ready; `None` after the end.
    async fn next_frame(&mut self) -> Option<Bytes> {
        let mut events = Events::default();
        // An empty output creates no event, and an empty frame would end the body.
        while events.0.is_empty() && !self.ended {
            let output = match std::mem::replace(&mut self.first, First::Sent) {
                First::Silence => return Some(Bytes::from_static(COMMENT)),
                First::Output(first) => Some(Ok(first)),
                First::Sent => self.choices.next().await,
            };
            self.advance(&mut events, output);
            while !self.ended && events.0.len() < FRAME_BYTES {
                let Some(output) = self.choices.next().now_or_never() else { break };
                self.advance(&mut events, output);
            }
        }
        (!events.0.is_empty()).then(|| events.into_bytes())
    }

    fn advance(&mut self, events: &mut Events, output: Option<Result<Output, ApiError>>) {
        if output.is_some() && !std::mem::replace(&mut self.opened, true) {
            self.open(events);
        }
        match output {
            Some(Ok(output)) => self.chunk(events, output),
            Some(Err(error)) => {
                self.format.fail(events, &error);
                self.ended = true;
            }
            None => self.ended = true,
        }
        if self.unfinished == 0 && !self.ended {
            if self.options.include_usage {
                self.format.usage(events, self.tally.total());
            }
            self.format.close(events, self.tally.total());
            self.ended = true;
        }
    }

    fn open(&mut self, events: &mut Events) {
        for index in 0..self.format.choices() {
            let usage = self.options.continuous_usage.then(|| self.tally.choice(index));
            self.format.open(events, index as u32, Extras { usage, fingerprint: false });
        }
    }

    fn chunk(&mut self, events: &mut Events, output: Output) {
        self.tally.add(&output);
        self.unfinished -= usize::from(output.finish.is_some());
        let extras = Extras {
            usage: self.options.continuous_usage.then(|| self.tally.choice(output.index as usize)),
            fingerprint: self.unfinished == 0 && !self.options.include_usage,
        };
        self.format.chunk(events, output, extras);
    }
}
