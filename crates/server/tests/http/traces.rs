//! Spans of requests, as a collector receives them.

use std::time::Duration;

use octavo_engine::mock::{FailurePoint, MockFailure};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use serde_json::json;

use crate::receiver::{Collected, integer, number, over_http, text};
use crate::support::{Setup, TestServer, ok};

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// A server that is traced.
async fn traced(setup: Setup) -> (TestServer, Collected) {
    let collected = over_http();
    (setup.traced(&collected.endpoint).start().await, collected)
}

/// The first `count` spans, and no more, in the order of their ends.
async fn spans(mut server: TestServer, collected: &Collected, count: usize) -> Vec<Span> {
    // A client has its answer a moment before the server is done with the request; when its tasks are gone it is.
    server.idle().await;
    server.shutdown.signal();
    (&mut server.task).await.unwrap().unwrap();
    let traces = server.traces.take();
    tokio::task::spawn_blocking(move || drop(traces)).await.unwrap();
    let spans = collected.spans(count);
    assert_eq!(spans.len(), count);
    spans
}

fn failed(span: &Span) -> bool {
    span.status.as_ref().is_some_and(|status| status.code() == StatusCode::Error)
}

fn stages(all: &[KeyValue]) -> [Option<f64>; 4] {
    ["time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"]
        .map(|name| number(all, &format!("gen_ai.latency.{name}")))
}

#[tokio::test]
async fn a_request_is_told_streamed_or_not() {
    for stream in [false, true] {
        let (server, collected) = traced(Setup::default()).await;
        let body = json!({"stream": stream, "max_tokens": 9, "temperature": 0.7, "top_p": 0.9});
        let request = server.chat(body).header("traceparent", PARENT).header("tracestate", "vendor=1");
        assert!(request.send().await.unwrap().text().await.unwrap().contains("Hello"));
        let span = spans(server, &collected, 1).await.remove(0);
        assert_eq!((span.name.as_str(), failed(&span)), ("llm_request", false));
        assert_eq!(span.trace_id[..2], [0x0a, 0xf7]);
        assert_eq!(span.parent_span_id[..2], [0xb7, 0xad]);
        assert_eq!(span.trace_state, "vendor=1");
        let all = &span.attributes;
        assert_eq!(text(all, "gen_ai.request.id").unwrap(), "r");
        assert_eq!(text(all, "gen_ai.response.model").unwrap(), "mock");
        assert_eq!(text(all, "gen_ai.response.finish_reasons").unwrap(), "stop");
        assert_eq!(text(all, "http.route").unwrap(), "/v1/chat/completions");
        assert_eq!(integer(all, "http.response.status_code"), Some(200));
        assert_eq!(integer(all, "gen_ai.request.n"), Some(1));
        assert_eq!(integer(all, "gen_ai.request.max_tokens"), Some(9));
        assert_eq!(integer(all, "gen_ai.usage.completion_tokens"), Some(4));
        assert!(integer(all, "gen_ai.usage.prompt_tokens").unwrap() > 2);
        assert_eq!(
            (number(all, "gen_ai.request.temperature"), number(all, "gen_ai.request.top_p")),
            (Some(0.7), Some(0.9))
        );
        let [queue, prefill, decode, inference] = stages(all).map(Option::unwrap);
        let [first, whole] =
            ["gen_ai.latency.time_to_first_token", "gen_ai.latency.e2e"].map(|name| number(all, name).unwrap());
        assert!((prefill + decode - inference).abs() < 1e-6);
        assert!(queue + prefill <= first && first <= whole, "{all:?}");
        let span_seconds = Duration::from_nanos(span.end_time_unix_nano - span.start_time_unix_nano).as_secs_f64();
        assert!(whole <= span_seconds + 1e-6, "{whole} of {span_seconds}");
    }
}

#[tokio::test]
async fn an_aborted_request_is_told_with_what_it_had() {
    let (server, collected) = traced(Setup::endless()).await;
    let mut response = server.long(true).send().await.unwrap();
    response.chunk().await.unwrap().unwrap();
    drop(response);
    server.idle().await;
    let waiting = tokio::spawn(server.long(false).send());
    server.running(1).await;
    waiting.abort();
    let spans = spans(server, &collected, 2).await;
    let [streamed, whole] = &spans[..] else { panic!("two spans") };
    for span in [streamed, whole] {
        assert_eq!(text(&span.attributes, "gen_ai.response.finish_reasons").unwrap(), "abort");
        assert!(!failed(span), "it is not the server's fault");
    }
    assert!(integer(&streamed.attributes, "gen_ai.usage.completion_tokens").unwrap() >= 1);
    assert_eq!(integer(&streamed.attributes, "http.response.status_code"), Some(200));
    assert_eq!(integer(&whole.attributes, "http.response.status_code"), None, "there was no response");
}

#[tokio::test]
async fn a_failed_request_is_an_error() {
    let mut setup = Setup::default();
    setup.mock.failures = vec![MockFailure { step: 3, at: FailurePoint::Wait, fatal: false }];
    let (setup, gate) = setup.gated();
    let (server, collected) = traced(setup).await;
    gate.step();
    let response = server.chat(json!({"stream": true})).send().await.unwrap();
    assert_eq!(response.status(), 200, "the first token is out");
    drop(gate);
    assert!(response.text().await.unwrap().contains("InternalServerError"));
    assert_eq!(server.chat(json!({"max_tokens": -1})).send().await.unwrap().status(), 400);
    assert_eq!(server.chat(json!({"model": "nobody's"})).send().await.unwrap().status(), 404);
    let spans = spans(server, &collected, 3).await;
    let seen: Vec<_> = spans.iter().map(|span| (text(&span.attributes, "error.type").unwrap(), failed(span))).collect();
    assert_eq!(seen, [("500".into(), true), ("400".into(), false), ("404".into(), false)]);
    assert_eq!(text(&spans[0].attributes, "gen_ai.response.finish_reasons").unwrap(), "error");
    assert_eq!(integer(&spans[1].attributes, "gen_ai.usage.prompt_tokens"), None, "it never ran");
}

#[tokio::test]
async fn several_sequences_are_one_span() {
    let (server, collected) = traced(Setup::default()).await;
    ok(server.completion(json!({"prompt": ["hi", "you there"], "n": 2, "max_tokens": 3}))).await;
    let span = spans(server, &collected, 1).await.remove(0);
    let all = &span.attributes;
    assert_eq!(text(all, "gen_ai.response.finish_reasons").unwrap(), "length,length,length,length");
    assert_eq!(integer(all, "gen_ai.usage.completion_tokens"), Some(12));
    assert_eq!(integer(all, "gen_ai.usage.prompt_tokens"), Some(11), "each prompt once, a byte a token");
    assert_eq!(integer(all, "gen_ai.request.n"), Some(2));
}

#[tokio::test]
async fn embeddings_are_told_and_what_generates_nothing_is_not() {
    let (server, collected) = traced(Setup::default()).await;
    assert_eq!(server.get("/health").await.status(), 200);
    ok(server.post("/tokenize", &json!({"prompt": "hi"}))).await;
    ok(server.post("/v1/embeddings", &json!({"input": ["hi", "you"]}))).await;
    let span = spans(server, &collected, 1).await.remove(0);
    let all = &span.attributes;
    assert_eq!(text(all, "http.route").unwrap(), "/v1/embeddings");
    assert_eq!(text(all, "gen_ai.response.finish_reasons").unwrap(), "stop,stop");
    assert_eq!(integer(all, "gen_ai.usage.prompt_tokens"), Some(5));
    assert_eq!((integer(all, "gen_ai.request.n"), number(all, "gen_ai.request.temperature")), (None, None));
    assert!(stages(all)[1].is_some());
}

#[tokio::test]
async fn strangers_get_no_span() {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["secret".into()];
    let (server, collected) = traced(setup).await;
    assert_eq!(server.chat(json!({})).send().await.unwrap().status(), 401);
    ok(server.chat(json!({})).bearer_auth("secret")).await;
    spans(server, &collected, 1).await;
}
