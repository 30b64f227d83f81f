//! Tracing of a request: its span for the trace collector, and its ids for the log.

mod sequences;

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use octavo_telemetry::{HttpOutcome, RequestSpan, TraceParent, TracedRequest, Tracer};
use tracing::field::{Empty, display};
use tracing::{Instrument, Span};

use crate::lock::lock;
use crate::route_table::Route;

pub(crate) use sequences::TracedSequences;

/// Traces a request: its log lines carry its ids, and its span ends when its response is complete or its client has
/// disconnected.
pub(crate) async fn follow(State(tracer): State<Tracer>, mut request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().cloned();
    let trace = RequestTrace::new(tracer, &request);
    request.extensions_mut().insert(trace.clone());
    let log = trace.log.clone();
    let mut following = Following { trace, path, status: None };
    let response = next.run(request).instrument(log).await;
    following.status = Some(response.status().as_u16());
    response.map(|body| Body::new(Followed { body: Some(body), following }))
}

/// A handle on the span of a request for the parts of the server. Clones share the request; the default handle has none.
#[derive(Clone, Debug)]
pub(crate) struct RequestTrace {
    log: Span,
    begun: Arc<Mutex<Begun>>,
}

#[derive(Debug)]
enum Begun {
    /// Generation has not begun.
    No {
        tracer: Tracer,
        parent: TraceParent,
    },
    Yes {
        span: Box<RequestSpan>,
        request: Box<TracedRequest>,
    },
    /// The span has ended, or there is none.
    Ended,
}

impl Default for RequestTrace {
    fn default() -> Self {
        Self { log: Span::none(), begun: Arc::new(Mutex::new(Begun::Ended)) }
    }
}

impl RequestTrace {
    fn new(tracer: Tracer, request: &Request) -> Self {
        let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
        let parent = TraceParent::read(header("traceparent"), header("tracestate"));
        // At the error level, so that it exists at every log level.
        let log =
            tracing::error_span!("request", key_name = Empty, request_id = Empty, trace_id = Empty, span_id = Empty);
        if let Some(trace_id) = parent.trace_id() {
            log.record("trace_id", display(trace_id));
        }
        let tracer = if Route::generates(request) { tracer } else { Tracer::default() };
        Self { log, begun: Arc::new(Mutex::new(Begun::No { tracer, parent })) }
    }

    /// The handle of a request that passed [`follow`].
    pub(crate) fn from_request(request: &Request) -> Self {
        request.extensions().get().cloned().unwrap_or_default()
    }

    /// Marks the arrival of the request at a generation route.
    pub(crate) fn begin(&self) {
        let mut begun = lock(&self.begun);
        let Begun::No { tracer, parent } = &*begun else { return };
        let Some(span) = tracer.begin(parent) else { return };
        let (trace_id, span_id) = span.ids();
        self.log.record("trace_id", display(trace_id)).record("span_id", display(span_id));
        *begun = Begun::Yes { span: Box::new(span), request: Box::default() };
    }

    /// Sets the name of the request's API key.
    pub(crate) fn name_key(&self, name: &str) {
        self.log.record("key_name", name);
    }

    /// Sets the id of the request.
    pub(crate) fn identify(&self, id: &str) {
        self.log.record("request_id", id);
        self.tell(|request| id.clone_into(&mut request.id));
    }

    /// Whether the span is recorded.
    pub(crate) fn is_recorded(&self) -> bool {
        matches!(&*lock(&self.begun), Begun::Yes { span, .. } if span.is_recorded())
    }

    /// Changes the attributes of the span, if it is recorded.
    pub(crate) fn tell(&self, change: impl FnOnce(&mut TracedRequest)) {
        if let Begun::Yes { span, request } = &mut *lock(&self.begun)
            && span.is_recorded()
        {
            change(request);
        }
    }

    fn end(&self, http: HttpOutcome<'_>) {
        if let Begun::Yes { span, request } = std::mem::replace(&mut *lock(&self.begun), Begun::Ended) {
            span.end(&request, http);
        }
    }
}

/// Ends the span when dropped.
struct Following {
    trace: RequestTrace,
    path: Option<MatchedPath>,
    /// `None` until the response begins.
    status: Option<u16>,
}

impl Drop for Following {
    fn drop(&mut self) {
        let route = self.path.as_ref().map(MatchedPath::as_str);
        self.trace.end(HttpOutcome { route, status: self.status });
    }
}

/// A body whose frames and end are processed within the request's log span.
struct Followed {
    /// Dropped before the span ends, since generation records its last attributes when dropped.
    body: Option<Body>,
    following: Following,
}

impl Drop for Followed {
    fn drop(&mut self) {
        let _entered = self.following.trace.log.enter();
        self.body = None;
    }
}

impl HttpBody for Followed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = self.get_mut();
        let _entered = this.following.trace.log.enter();
        this.body.as_mut().map_or(Poll::Ready(None), |body| Pin::new(body).poll_frame(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, HttpBody::size_hint)
    }
}
