//! The span of a request.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::Span;

use super::Shared;

/// Name of the span, as in vLLM.
const NAME: &str = "llm_request";

/// The trace that a request belongs to, from its headers (W3C Trace Context).
#[derive(Clone, Debug, Default)]
pub struct TraceParent(Option<Context>);

impl TraceParent {
    /// Reads the two headers. A malformed header means that there is no parent.
    pub fn read(traceparent: Option<&str>, tracestate: Option<&str>) -> Self {
        let headers = Headers { traceparent, tracestate };
        let context =
            traceparent.map(|_| TraceContextPropagator::new().extract_with_context(&Context::new(), &headers));
        Self(context.filter(|context| context.span().span_context().is_valid()))
    }

    /// The trace id as 32 hexadecimal digits, if there is a parent.
    pub fn trace_id(&self) -> Option<String> {
        self.0.as_ref().map(|context| context.span().span_context().trace_id().to_string())
    }
}

struct Headers<'a> {
    traceparent: Option<&'a str>,
    tracestate: Option<&'a str>,
}

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => self.traceparent,
            "tracestate" => self.tracestate,
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

/// The attributes of a span. They contain no text of the prompt or the answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedRequest {
    /// Id of the request.
    pub id: String,
    /// Model name in the response.
    pub model: String,
    /// Sequences per prompt. This and the next three attributes do not apply to embeddings.
    pub n: Option<u32>,
    /// Effective value.
    pub temperature: Option<f64>,
    /// Effective value.
    pub top_p: Option<f64>,
    /// Effective limit on generated tokens, for the prompt that leaves room for most.
    pub max_tokens: Option<u32>,
    /// Tokens of all prompts together.
    pub prompt_tokens: usize,
    /// The sequences of the request.
    pub sequences: Vec<TracedSequence>,
    /// Status of the error that ended a stream, whose own status was sent before.
    pub error: Option<u16>,
    /// Time at which the last sequence ended.
    pub ended: Option<Instant>,
}

/// One sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TracedSequence {
    /// Time of its submission to the engine.
    pub submitted: Instant,
    /// Durations of its stages; `None` before its first token.
    pub times: Option<SequenceTimes>,
    /// Number of generated tokens.
    pub tokens: usize,
    /// Prompt tokens from the prefix cache.
    pub cached_tokens: usize,
    /// Finish reason; `None` before the end.
    pub finish: Option<&'static str>,
}

/// The consecutive stages of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceTimes {
    /// Time from submission to the first step.
    pub queue: Duration,
    /// Time from there to the first token.
    pub prefill: Duration,
    /// Time from there to the latest token.
    pub decode: Duration,
}

/// The HTTP attributes of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HttpOutcome<'a> {
    /// The route's pattern.
    pub route: Option<&'a str>,
    /// Status code; `None` if the client disconnected before.
    pub status: Option<u16>,
}

/// The span of a request, from its arrival until its response is complete.
#[derive(Debug)]
pub struct RequestSpan {
    shared: Arc<Shared>,
    span: Span,
    clock: Clock,
}

/// Converts moments to system times, whose order stays correct when the system clock changes.
#[derive(Clone, Copy, Debug)]
struct Clock {
    arrival: Instant,
    wall: SystemTime,
}

impl Clock {
    fn at(&self, moment: Instant) -> SystemTime {
        self.wall + moment.saturating_duration_since(self.arrival)
    }
}

impl RequestSpan {
    pub(super) fn begin(shared: Arc<Shared>, parent: &TraceParent) -> Self {
        let clock = Clock { arrival: Instant::now(), wall: SystemTime::now() };
        let builder = SpanBuilder::from_name(NAME).with_kind(SpanKind::Server).with_start_time(clock.wall);
        let root = Context::new();
        let span = shared.tracer.build_with_context(builder, parent.0.as_ref().unwrap_or(&root));
        Self { shared, span, clock }
    }

    /// Trace id and span id for the log: 32 and 16 hexadecimal digits.
    pub fn ids(&self) -> (String, String) {
        let context = self.span.span_context();
        (context.trace_id().to_string(), context.span_id().to_string())
    }

    /// Whether the sampler records the span. If not, attributes need not be set.
    pub fn is_recorded(&self) -> bool {
        self.span.is_recording()
    }

    /// Ends the span and queues it for export.
    pub fn end(mut self, request: &TracedRequest, http: HttpOutcome<'_>) {
        if !self.span.is_recording() {
            return;
        }
        let now = Instant::now();
        self.span.set_attributes(attributes(request, self.clock.arrival, now));
        self.span.set_attributes(http_attributes(http));
        if let Some(status) = request.error.or(http.status).filter(|status| *status >= 400) {
            self.span.set_attribute(KeyValue::new("error.type", status.to_string()));
            // By the conventions for server spans, client errors are not errors of the span.
            if status >= 500 {
                self.span.set_status(Status::error(""));
            }
        }
        if self.shared.detailed {
            let context = self.span.span_context().clone();
            request.sequences.iter().enumerate().for_each(|sequence| self.stages(&context, sequence));
        }
        self.span.end_with_timestamp(self.clock.at(now));
    }

    /// Adds a span for each stage of a sequence.
    fn stages(&self, parent: &SpanContext, (index, sequence): (usize, &TracedSequence)) {
        let Some(times) = sequence.times else { return };
        let parent = Context::new().with_remote_span_context(parent.clone());
        let mut begin = sequence.submitted;
        for (name, duration) in [("queue", times.queue), ("prefill", times.prefill), ("decode", times.decode)] {
            let builder = SpanBuilder::from_name(name).with_start_time(self.clock.at(begin));
            let builder = builder.with_attributes([KeyValue::new("gen_ai.sequence.index", integer(index))]);
            let mut span = self.shared.tracer.build_with_context(builder, &parent);
            begin += duration;
            span.end_with_timestamp(self.clock.at(begin));
        }
    }
}

/// Sets vLLM's attributes and those of the HTTP conventions.
fn attributes(request: &TracedRequest, arrival: Instant, now: Instant) -> Vec<KeyValue> {
    let sequences = &request.sequences;
    let ended = request.ended.unwrap_or(now);
    let mut all = vec![KeyValue::new("gen_ai.latency.e2e", seconds(ended.saturating_duration_since(arrival)))];
    let mut add = |name: &'static str, value: Option<Value>| all.extend(value.map(|value| KeyValue::new(name, value)));
    let text = |text: &str| (!text.is_empty()).then(|| Value::from(text.to_owned()));
    add("gen_ai.request.id", text(&request.id));
    add("gen_ai.response.model", text(&request.model));
    add("gen_ai.request.n", request.n.map(|n| i64::from(n).into()));
    add("gen_ai.request.temperature", request.temperature.map(Value::from));
    add("gen_ai.request.top_p", request.top_p.map(Value::from));
    add("gen_ai.request.max_tokens", request.max_tokens.map(|tokens| i64::from(tokens).into()));
    if sequences.is_empty() {
        return all;
    }
    let sum = |of: fn(&TracedSequence) -> usize| integer(sequences.iter().map(of).sum()).into();
    add("gen_ai.usage.prompt_tokens", Some(integer(request.prompt_tokens).into()));
    add("gen_ai.usage.completion_tokens", Some(sum(|sequence| sequence.tokens)));
    add("gen_ai.usage.cache_read.input_tokens", Some(sum(|sequence| sequence.cached_tokens)));
    let reasons: Vec<StringValue> = sequences.iter().filter_map(|sequence| sequence.finish).map(Into::into).collect();
    add("gen_ai.response.finish_reasons", Some(Value::Array(Array::String(reasons))));
    let timed = || sequences.iter().filter_map(|sequence| Some((sequence.submitted, sequence.times?)));
    let first =
        timed().map(|(submitted, times)| submitted.saturating_duration_since(arrival) + times.queue + times.prefill);
    add("gen_ai.latency.time_to_first_token", first.min().map(seconds).map(Value::from));
    // The stages of several sequences overlap, so the longest sequence is reported.
    if let Some((_, times)) = timed().max_by_key(|(_, times)| times.queue + times.prefill + times.decode) {
        add("gen_ai.latency.time_in_queue", Some(seconds(times.queue).into()));
        add("gen_ai.latency.time_in_model_prefill", Some(seconds(times.prefill).into()));
        add("gen_ai.latency.time_in_model_decode", Some(seconds(times.decode).into()));
        add("gen_ai.latency.time_in_model_inference", Some(seconds(times.prefill + times.decode).into()));
    }
    all
}

fn http_attributes(http: HttpOutcome<'_>) -> impl Iterator<Item = KeyValue> {
    let route = http.route.map(|route| KeyValue::new("http.route", route.to_owned()));
    let status = http.status.map(|status| KeyValue::new("http.response.status_code", i64::from(status)));
    route.into_iter().chain(status)
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

fn integer(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
