//! One request's span.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::{Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _};
use opentelemetry::{Array, Context, KeyValue, StringValue, Value};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::Span;

use super::Shared;

/// vLLM's name of a request's span.
const NAME: &str = "llm_request";

/// The trace that a request belongs to already, as its headers tell (W3C Trace Context).
#[derive(Clone, Debug, Default)]
pub struct TraceParent(Option<Context>);

impl TraceParent {
    /// Reads the two headers; what is malformed is no parent.
    pub fn read(traceparent: Option<&str>, tracestate: Option<&str>) -> Self {
        let headers = Headers { traceparent, tracestate };
        let context =
            traceparent.map(|_| TraceContextPropagator::new().extract_with_context(&Context::new(), &headers));
        Self(context.filter(|context| context.span().span_context().is_valid()))
    }

    /// 32 hexadecimal digits, if there is a parent.
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

/// What a span tells of its request: no text of the prompt or of the answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedRequest {
    /// Of the request.
    pub id: String,
    /// The name that responses carry.
    pub model: String,
    /// Sequences for each prompt; this and the next three are left out for embeddings.
    pub n: Option<u32>,
    /// In effect.
    pub temperature: Option<f64>,
    /// In effect.
    pub top_p: Option<f64>,
    /// In effect, of the prompt that leaves room for most.
    pub max_tokens: Option<u32>,
    /// Of all prompts together.
    pub prompt_tokens: usize,
    /// What runs for it.
    pub sequences: Vec<TracedSequence>,
    /// The status of the error that ended it, which a stream cannot have any more.
    pub error: Option<u16>,
    /// The last sequence ended.
    pub ended: Option<Instant>,
}

/// One sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TracedSequence {
    /// It was given to the engine.
    pub submitted: Instant,
    /// How long its stages took; `None` before its first token.
    pub times: Option<SequenceTimes>,
    /// Generated tokens.
    pub tokens: usize,
    /// Prompt tokens from the prefix cache.
    pub cached_tokens: usize,
    /// How it ended; `None` if it did not.
    pub finish: Option<&'static str>,
}

/// A sequence's stages, one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceTimes {
    /// Taken by the engine → first planned in a step.
    pub queue: Duration,
    /// → first token.
    pub prefill: Duration,
    /// → latest token.
    pub decode: Duration,
}

/// What HTTP makes of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HttpOutcome<'a> {
    /// The route's pattern.
    pub route: Option<&'a str>,
    /// Status code; `None` if the client left before there was one.
    pub status: Option<u16>,
}

/// The span of a request, from its arrival until its response is out.
#[derive(Debug)]
pub struct RequestSpan {
    shared: Arc<Shared>,
    span: Span,
    clock: Clock,
}

/// Puts moments onto the calendar, so that none is before another that it follows, whatever is done to the system's clock.
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

    /// Its trace and itself, for the log: 32 and 16 hexadecimal digits.
    pub fn ids(&self) -> (String, String) {
        let context = self.span.span_context();
        (context.trace_id().to_string(), context.span_id().to_string())
    }

    /// Whether the sampler wants it: if not, nothing needs to be told of it.
    pub fn is_recorded(&self) -> bool {
        self.span.is_recording()
    }

    /// Ends the span now, and queues it for export.
    pub fn end(mut self, request: &TracedRequest, http: HttpOutcome<'_>) {
        if !self.span.is_recording() {
            return;
        }
        let now = Instant::now();
        self.span.set_attributes(attributes(request, self.clock.arrival, now));
        self.span.set_attributes(http_attributes(http));
        if let Some(status) = request.error.or(http.status).filter(|status| *status >= 400) {
            self.span.set_attribute(KeyValue::new("error.type", status.to_string()));
            // What the client did wrong is no error of the server's, by the conventions for its spans.
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

    /// A span for each stage of a sequence.
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

/// vLLM's attributes, and those of the conventions for HTTP.
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
    // The stages of several sequences overlap: those of the one that took longest are told.
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
