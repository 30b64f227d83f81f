//! POST /pooling, and the routes that pooling models have.

use octavo_engine::mock::MockConfig;
use octavo_server::{Activation, Matryoshka, PoolingKind};
use reqwest::Response;
use serde_json::{Value, json};

use crate::support::{IM_END, Setup, TestServer, id, ok};

/// The prompt of a text.
pub fn prompt(text: &str) -> Vec<u32> {
    [vec![id("<|im_start|>")], text.bytes().map(u32::from).collect(), vec![IM_END]].concat()
}

/// The raw result of a prompt.
pub fn raw(tokens: &[u32], elements: usize) -> Vec<f32> {
    MockConfig { hidden_size: elements, ..MockConfig::default() }.expected_embedding(tokens)
}

/// A vector of length 1.
pub fn normalised(vector: &[f32]) -> Vec<f32> {
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    vector.iter().map(|x| (f64::from(*x) / length) as f32).collect()
}

pub fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// The message of a request that must be refused with this status.
pub async fn refused(server: &TestServer, path: &str, body: Value, status: u16) -> String {
    let response = server.post(path, &body).send().await.unwrap();
    assert_eq!(response.status(), status, "{path} {body}");
    let error: Value = response.json().await.unwrap();
    error["error"]["message"].as_str().unwrap().to_owned()
}

async fn pool(server: &TestServer, body: Value) -> Value {
    ok(server.post("/pooling", &body)).await
}

const GENERATING: [&str; 11] = [
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/generate",
    "/",
    "/assets/main.js",
];

const SCORING: [&str; 5] = ["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"];

#[tokio::test]
async fn a_model_has_the_routes_that_it_can_answer() {
    let all: Vec<&str> = GENERATING
        .iter()
        .chain(&SCORING)
        .chain(&["/v1/embeddings", "/v2/embed", "/pooling", "/classify"])
        .chain(&["/tokenize", "/invocations"])
        .copied()
        .collect();
    let embedder = [&["/v1/embeddings", "/v2/embed", "/pooling"][..], &SCORING].concat();
    let cross_encoder = [&["/pooling", "/classify"][..], &SCORING].concat();
    let models = [
        (Setup::default(), [&["/v1/embeddings"][..], &GENERATING].concat()),
        (Setup::embedder(), embedder),
        (Setup::classifier(&["one"], Activation::Sigmoid), cross_encoder),
        (Setup::classifier(&["yes", "no"], Activation::Softmax), vec!["/pooling", "/classify"]),
    ];
    for (setup, own) in models {
        let server = setup.start().await;
        let described: Value = server.get("/openapi.json").await.json().await.unwrap();
        for path in &all {
            let response: Response = server.post(path, &json!({})).send().await.unwrap();
            let status = response.status();
            let serves = own.contains(path) || ["/tokenize", "/invocations"].contains(path);
            assert_eq!(status != 404, serves, "{path} {status}");
            if !serves {
                assert_eq!(response.json::<Value>().await.unwrap(), json!({"detail": "Not Found"}), "{path}");
            }
            let path = path.replace("main.js", "{file}");
            assert_eq!(described["paths"].get(&path).is_some(), serves, "{path}");
        }
        for path in ["/health", "/v1/models", "/metrics", "/docs"] {
            assert_eq!(server.get(path).await.status(), 200, "{path}");
        }
        let metrics = server.telemetry.render();
        assert_eq!(metrics.contains("handler=\"/v1/chat/completions\""), own.contains(&"/v1/chat/completions"));
        assert_eq!(metrics.contains("handler=\"/pooling\""), own.contains(&"/pooling"));
    }
}

#[tokio::test]
async fn the_result_of_a_prompt_is_the_models_own_task() {
    let server = Setup::embedder().start().await;
    let body = pool(&server, json!({"input": ["first", "second"]})).await;
    let expected = ["first", "second"].map(|text| normalised(&raw(&prompt(text), 8)));
    assert_eq!((&body["id"], &body["object"], &body["model"]), (&json!("pooling-r"), &json!("list"), &json!("mock")));
    for (index, vector) in expected.iter().enumerate() {
        let item = &body["data"][index];
        assert_eq!((&item["index"], &item["object"]), (&json!(index), &json!("pooling")));
        assert_eq!(numbers(&item["data"]), *vector);
    }
    assert_eq!(body["usage"]["prompt_tokens"], 15);
    let raw_vector = pool(&server, json!({"input": "first", "use_activation": false})).await;
    assert_eq!(numbers(&raw_vector["data"][0]["data"]), raw(&prompt("first"), 8));

    let server = Setup::classifier(&["a", "b", "c"], Activation::Softmax).start().await;
    let body = pool(&server, json!({"input": "x"})).await;
    let sum: f32 = numbers(&body["data"][0]["data"]).iter().sum();
    assert!((sum - 1.0).abs() < 1e-5, "{body}");
    let scores = pool(&server, json!({"input": "x", "use_activation": false})).await;
    assert_eq!(numbers(&scores["data"][0]["data"]), raw(&prompt("x"), 3));
}

#[tokio::test]
async fn each_token_may_have_a_result() {
    let server = Setup::embedder().start().await;
    let body = pool(&server, json!({"input": ["abc", "d"], "task": "token_embed"})).await;
    for (index, text) in ["abc", "d"].iter().enumerate() {
        let tokens = prompt(text);
        let rows = body["data"][index]["data"].as_array().unwrap();
        assert_eq!(rows.len(), tokens.len());
        for (row, end) in rows.iter().zip(1..) {
            assert_eq!(numbers(row), normalised(&raw(&tokens[..end], 8)));
        }
    }
    let server = Setup::classifier(&["a", "b"], Activation::Sigmoid).start().await;
    let body = pool(&server, json!({"input": "ab", "task": "token_classify", "use_activation": false})).await;
    let rows = body["data"][0]["data"].as_array().unwrap();
    assert_eq!((rows.len(), numbers(&rows[3])), (4, raw(&prompt("ab"), 2)));
    server.idle().await;
}

#[tokio::test]
async fn a_model_refuses_tasks_that_it_does_not_do() {
    let message = |task: &str, supported: &str| format!("Unsupported task: '{task}' Supported tasks: ({supported})");
    let server = Setup::embedder().start().await;
    for task in ["classify", "token_classify"] {
        let body = json!({"input": "x", "task": task});
        assert_eq!(refused(&server, "/pooling", body, 400).await, message(task, "'embed', 'token_embed'"));
    }
    let mut setup = Setup::classifier(&["a"], Activation::Sigmoid);
    setup.pools().tokens = false;
    let server = setup.start().await;
    for task in ["embed", "token_classify"] {
        let body = json!({"input": "x", "task": task});
        assert_eq!(refused(&server, "/pooling", body, 400).await, message(task, "'classify',"));
    }
    let removed = refused(&server, "/pooling", json!({"input": "x", "task": "score"}), 400).await;
    assert!(removed.contains("`score` task was removed; use `classify` instead."), "{removed}");
    let dimensions = refused(&server, "/pooling", json!({"input": "x", "dimensions": 2}), 400).await;
    assert!(dimensions.contains("dimensions is currently not supported"), "{dimensions}");
}

#[tokio::test]
async fn vectors_may_be_bytes_with_a_description() {
    let server = Setup::embedder().start().await;
    let vectors = ["first", "second"].map(|text| normalised(&raw(&prompt(text), 8)));
    let request = |path: &str, rest: Value| {
        server
            .post(path, &crate::support::with(json!({"input": ["first", "second"], "encoding_format": "bytes"}), rest))
    };
    for path in ["/pooling", "/v1/embeddings"] {
        let response = request(path, json!({"endianness": "little"})).send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "application/octet-stream");
        let metadata: Value = serde_json::from_str(response.headers()["metadata"].to_str().unwrap()).unwrap();
        let item = |index: usize| {
            json!({"index": index, "embed_dtype": "float32", "endianness": "little", "start": 32 * index,
                "end": 32 * (index + 1), "shape": [8]})
        };
        assert_eq!(metadata["data"], json!([item(0), item(1)]));
        assert_eq!(metadata["usage"], json!({"prompt_tokens": 15, "total_tokens": 15}));
        assert_eq!((&metadata["model"], metadata["created"].is_u64()), (&json!("mock"), true));
        let bytes = response.bytes().await.unwrap();
        let expected: Vec<u8> = vectors.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(bytes, expected);
    }
    let rest = json!({"task": "token_embed", "encoding_format": "bytes_only", "embed_dtype": "bfloat16"});
    let response = request("/pooling", rest).send().await.unwrap();
    assert!(!response.headers().contains_key("metadata"));
    assert_eq!(response.bytes().await.unwrap().len(), 15 * 8 * 2);
    let shapes = request("/pooling", json!({"task": "token_embed"})).send().await.unwrap();
    let metadata: Value = serde_json::from_str(shapes.headers()["metadata"].to_str().unwrap()).unwrap();
    assert_eq!((&metadata["data"][0]["shape"], &metadata["data"][1]["shape"]), (&json!([7, 8]), &json!([8, 8])));
}

#[tokio::test]
async fn elements_have_the_type_and_the_order_of_the_request() {
    use base64::Engine as _;
    let server = Setup::embedder().start().await;
    let vector = normalised(&raw(&prompt("x"), 8));
    for (element, order, expected) in [
        ("float32", "big", vector.iter().flat_map(|x| x.to_be_bytes()).collect::<Vec<u8>>()),
        ("float16", "little", vector.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect()),
        ("bfloat16", "big", vector.iter().flat_map(|x| half::bf16::from_f32(*x).to_be_bytes()).collect()),
    ] {
        let body = json!({"input": "x", "encoding_format": "base64", "embed_dtype": element, "endianness": order});
        let answer = ok(server.post("/v1/embeddings", &body)).await;
        let text = answer["data"][0]["embedding"].as_str().unwrap();
        assert_eq!(base64::prelude::BASE64_STANDARD.decode(text).unwrap(), expected, "{element} {order}");
    }
    let fp8 = json!({"input": "x", "embed_dtype": "fp8_e4m3"});
    let message = refused(&server, "/v1/embeddings", fp8, 400).await;
    assert!(
        message.contains("embed_dtype 'fp8_e4m3' is not supported; use float32, float16 or bfloat16."),
        "{message}"
    );
}

#[tokio::test]
async fn only_models_that_were_trained_for_it_have_shorter_vectors() {
    let ask = |dimensions: i64| json!({"input": "x", "dimensions": dimensions});
    let with = |matryoshka: Matryoshka| {
        let mut setup = Setup::embedder();
        setup.pools().kind = PoolingKind::Embedder { normalise: true, matryoshka };
        setup
    };
    let server = with(Matryoshka::Unsupported).start().await;
    assert_eq!(
        refused(&server, "/v1/embeddings", ask(8), 400).await,
        "Model 'mock' does not support Matryoshka embeddings; dimensions must be unset (received dimensions=8)."
    );
    let server = with(Matryoshka::Dimensions(vec![2, 4])).start().await;
    for (dimensions, message) in [
        (3, "Model 'mock' only supports Matryoshka dimensions [2, 4], got 3."),
        (9, "Model 'mock' only supports dimensions in range [1, 8], got 9."),
        (0, "Model 'mock' only supports dimensions in range [1, 8], got 0."),
        (-1, "Model 'mock' only supports dimensions in range [1, 8], got -1."),
    ] {
        assert_eq!(refused(&server, "/v1/embeddings", ask(dimensions), 400).await, message);
    }
    let body = ok(server.post("/v1/embeddings", &ask(4))).await;
    let expected = normalised(&raw(&prompt("x"), 8)[..4]);
    assert_eq!(numbers(&body["data"][0]["embedding"]), expected, "cut, then normalised");
}

#[tokio::test]
async fn vectors_are_normalised_as_the_model_or_the_request_says() {
    let mut setup = Setup::embedder();
    setup.pools().kind = PoolingKind::Embedder { normalise: false, matryoshka: Matryoshka::Any };
    let server = setup.start().await;
    for (body, vector) in [
        (json!({"input": "x"}), raw(&prompt("x"), 8)),
        (json!({"input": "x", "dimensions": 2}), raw(&prompt("x"), 8)[..2].to_vec()),
        (json!({"input": "x", "use_activation": true}), normalised(&raw(&prompt("x"), 8))),
    ] {
        let answer = ok(server.post("/v1/embeddings", &body)).await;
        assert_eq!(numbers(&answer["data"][0]["embedding"]), vector, "{body}");
    }
    for name in ["normalize", "activation", "softmax"] {
        let message = refused(&server, "/v1/embeddings", json!({"input": "x", name: true}), 400).await;
        assert!(
            message.contains(&format!("Parameter `{name}` was removed; use `use_activation` instead.")),
            "{message}"
        );
    }
}

#[tokio::test]
async fn a_truncated_text_keeps_its_special_tokens() {
    let server = Setup::embedder().start().await;
    let vector = async |body: Value| {
        let answer = ok(server.post("/v1/embeddings", &body)).await;
        (answer["usage"]["prompt_tokens"].as_u64().unwrap(), numbers(&answer["data"][0]["embedding"]))
    };
    let of = |text: &str| normalised(&raw(&prompt(text), 8));
    for (rest, text) in [
        (json!({"truncate_prompt_tokens": 5}), "abc"),
        (json!({"truncate_prompt_tokens": 5, "truncation_side": "right"}), "abc"),
        (json!({"truncate_prompt_tokens": 5, "truncation_side": "left"}), "def"),
        (json!({"truncate_prompt_tokens": 100}), "abcdef"),
    ] {
        let body = crate::support::with(json!({"input": "abcdef"}), rest);
        assert_eq!(vector(body.clone()).await, (text.len() as u64 + 2, of(text)), "{body}");
    }
    let long = "x".repeat(5000);
    let (tokens, cut) = vector(json!({"input": long, "truncate_prompt_tokens": -1})).await;
    assert_eq!((tokens, cut), (4096, of(&long[..4094])));
    let plain = json!({"input": "abcdef", "truncate_prompt_tokens": 2, "add_special_tokens": false});
    assert_eq!(vector(plain).await, (2, normalised(&raw(&[97, 98], 8))));
    let ids = json!({"input": [97, 98, 99], "truncate_prompt_tokens": 2});
    assert_eq!(vector(ids).await, (2, normalised(&raw(&[97, 98], 8))), "tokens are taken as they are");
    for (body, word) in [
        (json!({"input": "x", "truncate_prompt_tokens": 5000}), "truncate_prompt_tokens value (5000) is greater"),
        (json!({"input": "x".repeat(4095)}), "4097 input tokens"),
        (json!({"input": "x".repeat(100_000)}), "at least 4097 input tokens"),
        (json!({"input": [VOCAB_END]}), "out of vocabulary"),
    ] {
        let message = refused(&server, "/v1/embeddings", body, 400).await;
        assert!(message.contains(word), "{message}");
    }
}

const VOCAB_END: usize = crate::support::VOCAB;

#[tokio::test]
async fn messages_are_rendered_without_the_start_of_an_answer() {
    let server = Setup::embedder().start().await;
    let embed = async |rest: Value| {
        let body = crate::support::with(json!({"messages": [{"role": "user", "content": "hi"}]}), rest);
        ok(server.post("/v1/embeddings", &body)).await["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    // The header, the content and the end of the message.
    assert_eq!(embed(json!({})).await, 1 + 5 + 2 + 1 + 1);
    assert_eq!(embed(json!({"add_generation_prompt": true})).await, 10 + 11);
    assert_eq!(embed(json!({"truncate_prompt_tokens": 4})).await, 4);
    assert_eq!(embed(json!({"add_special_tokens": true})).await, 12);
    assert_eq!(embed(json!({"continue_final_message": true})).await, 8, "without the end of the message");
}

#[tokio::test]
async fn texts_may_be_lower_case() {
    let mut setup = Setup::embedder();
    setup.pools().lowercase = true;
    let server = setup.start().await;
    let answer = ok(server.post("/v1/embeddings", &json!({"input": "ABC"}))).await;
    assert_eq!(numbers(&answer["data"][0]["embedding"]), normalised(&raw(&prompt("abc"), 8)));
}

#[tokio::test]
async fn an_answer_that_would_be_too_large_is_refused_before_it_is_computed() {
    let mut setup = Setup::embedder();
    setup.config.connection.max_response_bytes = 10_000;
    let server = setup.start().await;
    let body = |task: &str| json!({"input": "x".repeat(200), "task": task});
    let message = refused(&server, "/pooling", body("token_embed"), 400).await;
    assert_eq!(
        message,
        "The response would have about 21072 bytes, 21072 of them for input, but at most 10000 are allowed. Please reduce \
         input or the length of the prompt."
    );
    ok(server.post("/pooling", &body("embed"))).await;
    let bytes =
        crate::support::with(body("token_embed"), json!({"encoding_format": "bytes", "embed_dtype": "float16"}));
    assert_eq!(server.post("/pooling", &bytes).send().await.unwrap().status(), 200);
    let series = "vllm:prompt_tokens_total{engine=\"0\",model_name=\"mock\"}";
    assert_eq!(server.metric(series), 2.0 * 202.0);
}

#[tokio::test]
async fn one_route_takes_every_kind_of_request_of_the_model() {
    let embedder = Setup::embedder().start().await;
    let invoke = |server: &TestServer, body: Value| server.post("/invocations", &body);
    let pair = json!({"queries": "a", "documents": "b"});
    let ranking = json!({"query": "a", "documents": ["b"]});
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(ok(invoke(&embedder, json!({"input": "x"}))).await["data"][0]["object"], "embedding");
    assert_eq!(ok(invoke(&embedder, messages.clone())).await["data"][0]["object"], "embedding");
    assert_eq!(ok(invoke(&embedder, pair.clone())).await["data"][0]["object"], "score");
    assert_eq!(ok(invoke(&embedder, ranking.clone())).await["results"][0]["document"]["text"], "b");
    let labels = Setup::classifier(&["yes", "no"], Activation::Softmax).start().await;
    assert_eq!(ok(invoke(&labels, json!({"input": "x"}))).await["data"][0]["num_classes"], 2);
    assert_eq!(ok(invoke(&labels, messages)).await["data"][0]["num_classes"], 2);
    for body in [pair, ranking, json!({"prompt": "x"}), json!({})] {
        let message = refused(&labels, "/invocations", body, 400).await;
        assert_eq!(message, "Cannot find suitable handler for request. Expected one of: messages, input.");
    }
}
