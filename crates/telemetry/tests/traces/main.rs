//! Traces, as a collector in this process receives them.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]
#![allow(unreachable_pub, missing_docs, reason = "helpers of one test binary")]

mod grpc;
mod receiver;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use octavo_telemetry::{
    HttpOutcome, SequenceTimes, Telemetry, TelemetryConfig, TraceConfig, TraceParent, TracedRequest, TracedSequence,
    Tracer, Traces,
};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use receiver::{integer, number, over_http, text};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
const HTTP: (&str, &str) = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf");

fn start(endpoint: &str, detailed: bool, variables: &[(&str, &str)]) -> (Telemetry, Traces) {
    let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 64 });
    let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
    let config = TraceConfig::new(Some(endpoint), detailed, &find).unwrap().unwrap();
    let traces = telemetry.start_traces(&config).unwrap();
    assert!(telemetry.tracer().is_on());
    (telemetry, traces)
}

fn parent(flags: &str) -> TraceParent {
    TraceParent::read(Some(&format!("00-{TRACE}-{PARENT}-{flags}")), Some("vendor=1"))
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Two sequences of which the second is slower.
fn request(begun: Instant) -> TracedRequest {
    let sequence = |prefill, finish| TracedSequence {
        submitted: begun + millis(5),
        times: Some(SequenceTimes { queue: millis(10), prefill: millis(prefill), decode: millis(100) }),
        tokens: 7,
        cached_tokens: 16,
        finish: Some(finish),
    };
    TracedRequest {
        id: "r-1".into(),
        model: "m".into(),
        n: Some(2),
        temperature: Some(0.5),
        top_p: Some(0.9),
        max_tokens: Some(20),
        prompt_tokens: 33,
        sequences: vec![sequence(20, "stop"), sequence(40, "length")],
        error: None,
        ended: Some(begun + millis(500)),
    }
}

fn end_one(tracer: &Tracer, status: u16) {
    let outcome = HttpOutcome { route: Some("/v1/completions"), status: Some(status) };
    tracer.begin(&TraceParent::default()).unwrap().end(&TracedRequest::default(), outcome);
}

fn spans_counted(telemetry: &Telemetry, result: &str) -> f64 {
    let series = format!("octavo_trace_spans_total{{result=\"{result}\"}} ");
    let text = telemetry.render();
    text.lines().find_map(|line| line.strip_prefix(&series)).unwrap_or_else(|| panic!("{text}")).parse().unwrap()
}

#[test]
fn a_span_tells_what_vllm_tells_over_either_protocol() {
    for (collected, variables) in [(over_http(), &[HTTP][..]), (grpc::over_grpc(), &[])] {
        let (telemetry, traces) = start(&collected.endpoint, false, variables);
        let begun = Instant::now();
        let span = traces.tracer().begin(&parent("01")).unwrap();
        let ids = span.ids();
        assert!(span.is_recorded());
        span.end(&request(begun), HttpOutcome { route: Some("/v1/completions"), status: Some(200) });
        drop(traces);

        let [span] = &collected.spans(1)[..] else { panic!("one span") };
        assert_eq!((span.name.as_str(), span.kind()), ("llm_request", SpanKind::Server));
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.into(), PARENT.into()));
        assert_eq!((hex(&span.trace_id), hex(&span.span_id)), ids);
        assert_eq!(span.trace_state, "vendor=1");
        assert!(span.status.as_ref().is_none_or(|status| status.code() == StatusCode::Unset));
        let all = &span.attributes;
        assert_eq!(text(all, "gen_ai.request.id").unwrap(), "r-1");
        assert_eq!(text(all, "gen_ai.response.model").unwrap(), "m");
        assert_eq!(text(all, "gen_ai.response.finish_reasons").unwrap(), "stop,length");
        assert_eq!(text(all, "http.route").unwrap(), "/v1/completions");
        for (name, expected) in [
            ("gen_ai.request.n", 2),
            ("gen_ai.request.max_tokens", 20),
            ("gen_ai.usage.prompt_tokens", 33),
            ("gen_ai.usage.completion_tokens", 14),
            ("gen_ai.usage.cache_read.input_tokens", 32),
            ("http.response.status_code", 200),
        ] {
            assert_eq!(integer(all, name), Some(expected), "{name}");
        }
        for (name, expected) in [
            ("gen_ai.request.temperature", 0.5),
            ("gen_ai.request.top_p", 0.9),
            ("gen_ai.latency.time_in_queue", 0.01),
            ("gen_ai.latency.time_in_model_prefill", 0.04),
            ("gen_ai.latency.time_in_model_decode", 0.1),
            ("gen_ai.latency.time_in_model_inference", 0.14),
        ] {
            assert_eq!(number(all, name), Some(expected), "{name}");
        }
        // Since the span's beginning, which is a moment after the test's.
        for (name, expected) in [("gen_ai.latency.time_to_first_token", 0.035), ("gen_ai.latency.e2e", 0.5)] {
            let seconds = number(all, name).unwrap();
            assert!((expected - 0.02..=expected).contains(&seconds), "{name}: {seconds}");
        }
        assert_eq!(spans_counted(&telemetry, "exported"), 1.0);
    }
}

#[test]
fn the_sampler_heeds_the_parent() {
    let collected = over_http();
    let (_telemetry, traces) = start(&collected.endpoint, false, &[HTTP]);
    let outcome = HttpOutcome { route: None, status: Some(200) };
    for flags in ["00", "01"] {
        let span = traces.tracer().begin(&parent(flags)).unwrap();
        assert_eq!((span.is_recorded(), span.ids().0.as_str()), (flags == "01", TRACE));
        span.end(&TracedRequest { id: flags.into(), ..TracedRequest::default() }, outcome);
    }
    drop(traces);
    let spans = collected.spans(1);
    assert_eq!((spans.len(), text(&spans[0].attributes, "gen_ai.request.id").unwrap()), (1, "01".into()));
    assert!(collected.exports.try_recv().is_err(), "nothing else was sent");
}

#[test]
fn what_the_server_did_wrong_is_an_error_and_what_the_client_did_is_told() {
    let collected = over_http();
    let (_telemetry, traces) = start(&collected.endpoint, false, &[HTTP]);
    let broken = TracedRequest { error: Some(503), ..TracedRequest::default() };
    traces
        .tracer()
        .begin(&TraceParent::default())
        .unwrap()
        .end(&broken, HttpOutcome { route: None, status: Some(200) });
    traces.tracer().begin(&TraceParent::default()).unwrap().end(&TracedRequest::default(), HttpOutcome::default());
    end_one(&traces.tracer(), 500);
    end_one(&traces.tracer(), 400);
    drop(traces);
    let seen: Vec<_> = collected
        .spans(4)
        .iter()
        .map(|span| {
            assert_eq!(span.parent_span_id, [0; 0], "a root");
            let status = span.status.as_ref().map_or(StatusCode::Unset, |status| status.code());
            (integer(&span.attributes, "http.response.status_code"), text(&span.attributes, "error.type"), status)
        })
        .collect();
    let kind = |code: &str| Some(code.to_owned());
    let expected = [
        (Some(200), kind("503"), StatusCode::Error),
        (None, None, StatusCode::Unset),
        (Some(500), kind("500"), StatusCode::Error),
        (Some(400), kind("400"), StatusCode::Unset),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn stages_are_spans_below_the_requests_where_details_are_asked_for() {
    let collected = over_http();
    let (_telemetry, traces) = start(&collected.endpoint, true, &[HTTP]);
    traces.tracer().begin(&parent("01")).unwrap().end(&request(Instant::now()), HttpOutcome::default());
    drop(traces);
    let spans = collected.spans(7);
    let request = spans.iter().find(|span| span.name == "llm_request").unwrap();
    let stages: Vec<_> = spans
        .iter()
        .filter(|span| span.parent_span_id == request.span_id)
        .map(|span| {
            let millis = (span.end_time_unix_nano - span.start_time_unix_nano) / 1_000_000;
            (integer(&span.attributes, "gen_ai.sequence.index").unwrap(), span.name.as_str(), millis)
        })
        .collect();
    let expected = [
        (0, "queue", 10),
        (0, "prefill", 20),
        (0, "decode", 100),
        (1, "queue", 10),
        (1, "prefill", 40),
        (1, "decode", 100),
    ];
    assert_eq!(stages, expected);
}

#[test]
fn a_collector_that_hangs_delays_nobody_and_what_does_not_fit_is_counted() {
    // Connections are taken by the kernel, and nobody ever answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let limits = [HTTP, ("OTEL_BSP_MAX_QUEUE_SIZE", "8"), ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "300")];
    let (telemetry, traces) = start(&endpoint, false, &limits);
    let begun = Instant::now();
    for _ in 0..1000 {
        end_one(&traces.tracer(), 200);
    }
    assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
    assert_eq!(spans_counted(&telemetry, "dropped"), 992.0);
    drop(traces);
    assert_eq!((spans_counted(&telemetry, "failed"), spans_counted(&telemetry, "exported")), (8.0, 0.0));
    assert!(begun.elapsed() < Duration::from_secs(6), "the end is not waited for: {:?}", begun.elapsed());
}

#[test]
fn without_an_exporter_there_are_no_spans() {
    let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 64 });
    assert!(!telemetry.tracer().is_on());
    assert!(telemetry.tracer().begin(&parent("01")).is_none());
    assert!(!telemetry.render().contains("trace"));
}

#[test]
fn a_malformed_parent_is_none() {
    assert_eq!(parent("01").trace_id().as_deref(), Some(TRACE));
    for header in ["", "00", "00-0-0-01", "00-00000000000000000000000000000000-b7ad6b7169203331-01", "\u{11f}"] {
        assert_eq!(TraceParent::read(Some(header), None).trace_id(), None, "{header}");
    }
    assert_eq!(TraceParent::read(None, Some("vendor=1")).trace_id(), None);
}
