//! The memory of a request is a small multiple of its body: on every route that takes one, whatever the body has.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]
#![allow(unreachable_pub, reason = "helpers of another test binary")]

#[path = "../http/vocabulary.rs"]
mod vocabulary;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use octavo_engine::mock::{MockConfig, MockExecutor};
use octavo_engine::{Engine, EngineConfig};
use octavo_server::internals::post_routes;
use octavo_server::{Activation, Matryoshka, PairFormat, PoolingConfig, PoolingKind, Server, ServerConfig, TextModel};
use octavo_telemetry::{Telemetry, TelemetryConfig};
use octavo_text::ChatTemplate;
use peak_alloc::PeakAlloc;
use tower::ServiceExt;

use vocabulary::{IM_END, TEMPLATE, VOCAB, WORDS, id, tokenizer};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Bytes of memory for each byte of a body.
const FACTOR: usize = 24;

/// Bytes of memory that do not depend on the length of the body. A grammar as large as allowed takes most of it.
const ALLOWANCE: usize = 24 << 20;

/// Bytes that may stay behind after all requests: caches and buffers that grow once.
const REMAINS: usize = 2 << 20;

/// Fields of any route, each of which takes every shape.
const FIELDS: [&str; 35] = [
    "messages",
    "prompt",
    "input",
    "query",
    "queries",
    "items",
    "texts",
    "inputs",
    "embedding_types",
    "tokens",
    "tools",
    "tool_choice",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "logprob_token_ids",
    "documents",
    "chat_template_kwargs",
    "response_format",
    "structured_outputs",
    "stream_options",
    "repetition_detection",
    "system",
    "metadata",
    "instructions",
    "include",
    "text",
    "output_config",
    "model",
    "request_id",
    "encoding_format",
    "unknown",
];

/// What a list repeats.
const ELEMENTS: [&str; 10] = [
    "1",
    "\"\"",
    "\"a\"",
    "[1]",
    "[]",
    "{}",
    "null",
    "1e9",
    r#"{"role":"user","content":""}"#,
    r#"{"role":"user","content":[{"type":"text","text":""}]}"#,
];

/// JSON of about `bytes` bytes, in every shape.
fn shapes(bytes: usize) -> Vec<(String, String)> {
    let list = |element: &str| {
        let count = bytes / (element.len() + 1);
        (format!("a list of {element}"), format!("[{}]", vec![element; count].join(",")))
    };
    let mut shapes: Vec<_> = ELEMENTS.iter().map(|element| list(element)).collect();
    let keys: Vec<String> = (0..bytes / 9).map(|key| format!("\"{key:x}\":1")).collect();
    shapes.push(("an object of short fields".into(), format!("{{{}}}", keys.join(","))));
    shapes.push(("nested lists".into(), format!("{}{}", "[".repeat(bytes / 2), "]".repeat(bytes / 2))));
    shapes.push(("a long key".into(), format!("{{\"{}\":1}}", "k".repeat(bytes))));
    shapes.push(("a long text".into(), format!("\"{}\"", "word ".repeat(bytes / 5))));
    shapes.push(("an escaped text".into(), format!("\"{}\"", "\\u0001".repeat(bytes / 6))));
    let schema =
        format!(r#"{{"type":"json_schema","json_schema":{{"schema":{{"enum":[{}1]}}}}}}"#, "1,".repeat(bytes / 2));
    shapes.push(("a schema with a long enum".into(), schema));
    shapes
}

/// A body that is valid on most routes, but for one field.
fn body(field: &str, value: &str) -> String {
    let others = [
        ("messages", r#"[{"role":"user","content":"hi"}]"#),
        ("prompt", "\"hi\""),
        ("input", "\"hi\""),
        ("tokens", "[1]"),
        ("max_tokens", "1"),
        ("query", "\"hi\""),
        ("queries", "\"hi\""),
        ("documents", "[\"hi\"]"),
        ("texts", "[\"hi\"]"),
    ];
    // A conversation takes precedence over a prompt, where a route takes both.
    let hidden = match field {
        "prompt" | "input" => Some("messages"),
        "items" => Some("documents"),
        "inputs" => Some("texts"),
        _ => None,
    };
    let others = others.iter().filter(|(name, _)| *name != field && Some(*name) != hidden);
    let fields: String = others.map(|(name, value)| format!("\"{name}\":{value},")).collect();
    format!("{{{fields}\"{field}\":{value}}}")
}

struct TestServer {
    router: Router,
    routes: Vec<&'static str>,
    _engine: Engine,
}

/// A model that returns vectors or scores.
fn pooling(kind: PoolingKind) -> Option<PoolingConfig> {
    let pairs = PairFormat::Template { token_types: true };
    Some(PoolingConfig { kind, tokens: true, pairs, lowercase: false, prompts: BTreeMap::new() })
}

impl TestServer {
    fn new(max_model_len: usize, pooling: Option<PoolingConfig>) -> Self {
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "mock".into(), engine: 0, max_model_len });
        let mock = MockExecutor::new(MockConfig {
            vocab_size: VOCAB,
            tokens: 256..256 + WORDS.len() as u32,
            script: Some([id("Hello"), IM_END].into()),
            verify: false,
            ..MockConfig::default()
        });
        let config = EngineConfig { max_model_len, ..EngineConfig::default() };
        let engine = Engine::spawn(Box::new(mock), config, telemetry.engine()).unwrap();
        let tokenizer = Arc::new(tokenizer(&[]));
        let template = ChatTemplate::new(TEMPLATE, tokenizer.special()).unwrap();
        let text = TextModel { tokenizer, template: Some(Arc::new(template)), images: None };
        let config = ServerConfig {
            max_model_len,
            vocab_size: VOCAB,
            embedding_size: MockConfig::default().hidden_size,
            eos_token_ids: vec![IM_END],
            pooling,
            ..ServerConfig::default()
        };
        let routes = post_routes(&config);
        Self { router: Server::new(engine.handle(), text, telemetry, config, None).router(), routes, _engine: engine }
    }

    /// The most memory that a request took beside its body, in bytes.
    async fn peak(&self, path: &str, body: String) -> usize {
        let path = path.replace("{response_id}", "resp_1");
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json").body(Body::from(body));
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let response = self.router.clone().oneshot(request.unwrap()).await.unwrap();
        assert_ne!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let mut body = response.into_body();
        while body.frame().await.is_some() {}
        drop(body);
        MEMORY.peak_usage().saturating_sub(before)
    }
}

/// Requests that took gigabytes, or hundreds of megabytes, before there were limits: their name, path and body, and the
/// bytes that each may take.
fn giants() -> Vec<(&'static str, &'static str, String, usize)> {
    const MIB: usize = 1 << 20;
    let list = |element: &str, bytes: usize| vec![element; bytes / (element.len() + 1)].join(",");
    let tokenize = |text: String, strings: bool| format!(r#"{{"return_token_strs":{strings},"prompt":"{text}"}}"#);
    let numbers = format!(r#"{{"messages":[{}]}}"#, list("1", 24 * MIB));
    let stop = format!(r#"{{"prompt":"hi","max_tokens":1,"n":256,"stop_token_ids":[{}]}}"#, list("1", 12 * MIB));
    let echo = |n: u32| {
        let text = "a ".repeat(27 << 10);
        format!(r#"{{"prompt":"{text}","echo":true,"max_tokens":1,"n":{n},"logprobs":5}}"#)
    };
    let truncated = format!(r#"{{"prompt":"{}","max_tokens":1,"truncate_prompt_tokens":9}}"#, "a".repeat(16 * MIB));
    vec![
        ("messages that are numbers", "/v1/chat/completions", numbers, 256 * MIB),
        ("a long list of stop tokens for 256 sequences", "/v1/completions", stop, 320 * MIB),
        ("an echo with logprobs of 256 sequences", "/v1/completions", echo(256), 16 * MIB),
        ("an echo with logprobs of one sequence", "/v1/completions", echo(1), 128 * MIB),
        ("a text of words", "/tokenize", tokenize("word ".repeat(16 * MIB / 5), false), 24 * 16 * MIB),
        ("a text of one letter", "/tokenize", tokenize("a".repeat(16 * MIB), false), 24 * 16 * MIB),
        ("a text of spaces", "/tokenize", tokenize(" ".repeat(16 * MIB), false), 24 * 16 * MIB),
        ("a text with the spelling of its tokens", "/tokenize", tokenize("word ".repeat(MIB), true), 32 * 5 * MIB),
        ("a text that is truncated", "/v1/completions", truncated, 16 * 16 * MIB),
    ]
}

/// Measures [`giants`] and adds those that take too much.
async fn requests_that_once_took_gigabytes(failures: &mut Vec<(usize, String)>) {
    let server = TestServer::new(64 << 10, None);
    for (name, path, body, limit) in giants() {
        let length = body.len();
        let peak = server.peak(path, body).await;
        println!("{:>6} KiB for {name}, {} KiB", peak >> 10, length >> 10);
        if peak > limit {
            failures.push((peak, format!("{path}: {name}, {length} bytes")));
        }
    }
}

/// Lists as long as allowed cost about the same for many sequences as for one.
async fn sequences_share_what_they_do_not_change(server: &TestServer) {
    let request = |n: u32, lists: &str| format!(r#"{{"prompt":"hi","max_tokens":1,"n":{n}{lists}}}"#);
    let ids: Vec<String> = (0..4096).map(|id| (id % VOCAB).to_string()).collect();
    let biases: Vec<String> = (0..VOCAB).map(|id| format!("\"{id}\":1")).collect();
    let stop = "x".repeat(16 << 10);
    let allowed = ids[..VOCAB].join(",");
    let (ids, biases) = (ids.join(","), biases.join(","));
    let lists = format!(
        r#","stop_token_ids":[{ids}],"allowed_token_ids":[{allowed}],"logit_bias":{{{biases}}},"stop":"{stop}","bad_words":["{}"]"#,
        "y".repeat(1024)
    );
    let mut extra = vec![];
    for n in [1, 128] {
        server.peak("/v1/completions", request(n, "")).await;
        let without = server.peak("/v1/completions", request(n, "")).await;
        extra.push(server.peak("/v1/completions", request(n, &lists)).await.saturating_sub(without));
    }
    assert!(extra[1] <= extra[0] + (2 << 20), "one sequence takes {} more bytes, and 128 take {}", extra[0], extra[1]);
}

/// Sends every shape in every field to every route of a server, and adds the requests that take too much. Of long bodies, it sends one
/// in `share`: every shape in every field to some routes, and to every route some shapes in every field.
async fn every_field_takes_every_shape(server: &TestServer, share: usize, failures: &mut Vec<(usize, String)>) {
    let mut started = 0;
    for (bytes, share) in [(8 << 10, 1), (256 << 10, share)] {
        for (number, (shape, value)) in shapes(bytes).into_iter().enumerate() {
            for (nth, field) in FIELDS.into_iter().enumerate() {
                for path in server.routes.iter().skip((number + nth) % share).step_by(share) {
                    let body = body(field, &value);
                    let limit = ALLOWANCE + FACTOR * body.len();
                    let length = body.len();
                    let peak = server.peak(path, body).await;
                    if peak > limit {
                        failures.push((peak, format!("{path}: {field} with {shape}, {length} bytes")));
                    }
                }
            }
        }
        let now = MEMORY.current_usage();
        assert!(started == 0 || now <= started + REMAINS, "{started} bytes were in use, and now {now}");
        started = now;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_of_a_request_is_a_small_multiple_of_its_body() {
    requests_take_little_memory(4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes"]
async fn the_memory_of_every_long_request_is_a_small_multiple_of_its_body() {
    requests_take_little_memory(1).await;
}

async fn requests_take_little_memory(share: usize) {
    let server = TestServer::new(4096, None);
    assert!(server.routes.contains(&"/v1/chat/completions"));
    // The first grammar creates the compiler, which stays.
    let first = body("response_format", r#"{"type":"json_object"}"#);
    server.peak("/v1/chat/completions", first).await;
    let mut failures = vec![];
    every_field_takes_every_shape(&server, share, &mut failures).await;
    sequences_share_what_they_do_not_change(&server).await;
    drop(server);
    let embedder = PoolingKind::Embedder { normalise: true, matryoshka: Matryoshka::Any };
    let classifier = PoolingKind::Classifier { labels: vec!["only".into()], activation: Activation::Sigmoid };
    for (kind, path) in [(embedder, "/v2/embed"), (classifier, "/classify")] {
        let server = TestServer::new(4096, pooling(kind));
        assert!(server.routes.contains(&path) && server.routes.contains(&"/rerank"));
        every_field_takes_every_shape(&server, share, &mut failures).await;
    }
    requests_that_once_took_gigabytes(&mut failures).await;
    failures.sort_by(|a, b| b.cmp(a));
    let lines: Vec<_> = failures.iter().map(|(peak, what)| format!("{} KiB for {what}", peak >> 10)).collect();
    assert!(
        lines.is_empty(),
        "{} requests took too much memory:\n{}",
        lines.len(),
        lines[..lines.len().min(60)].join("\n")
    );
}
