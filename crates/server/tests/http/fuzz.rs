//! Whatever a client sends, the answer is the client's fault or a success.

use std::sync::OnceLock;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;

use crate::support::{Setup, TestServer};

const FIELDS: [&str; 48] = [
    "messages",
    "prompt",
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "top_logprobs",
    "ignore_eos",
    "min_tokens",
    "stream",
    "stream_options",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "stop_token_ids",
    "logit_bias",
    "priority",
    "request_id",
    "cache_salt",
    "echo",
    "tools",
    "tool_choice",
    "response_format",
    "chat_template_kwargs",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "reasoning_effort",
    "prompt_logprobs",
    "suffix",
    "use_beam_search",
    "length_penalty",
    "structured_outputs",
    "bad_words",
    "return_token_ids",
    "user",
    "metadata",
    "unheard_of",
];

fn json_value() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        (-3_i64..40).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-2.0..3.0).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
    ];
    let text = prop_oneof![
        Just(String::new()),
        Just("user".to_owned()),
        Just("text".to_owned()),
        Just("mock".to_owned()),
        any::<String>(),
    ];
    let leaf = prop_oneof![Just(Value::Null), any::<bool>().prop_map(Value::from), number, text.prop_map(Value::from)];
    let key = prop_oneof![Just("role"), Just("content"), Just("type"), Just("text"), Just("include_usage"), Just("5")];
    leaf.prop_recursive(4, 24, 5, move |inner| {
        let map = prop::collection::btree_map(key.clone(), inner.clone(), 0..4);
        prop_oneof![
            prop::collection::vec(inner, 0..5).prop_map(Value::from),
            map.prop_map(|map| map.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<Map<_, _>>().into()),
        ]
    })
}

fn body() -> impl Strategy<Value = Value> {
    let fields = prop::collection::btree_map(prop::sample::select(&FIELDS[..]), json_value(), 0..5);
    (any::<bool>(), fields).prop_map(|(valid, fields)| {
        let mut body = Map::new();
        if valid {
            body.insert("messages".into(), json!([{"role": "user", "content": "hi"}]));
            body.insert("prompt".into(), json!("hi"));
        }
        body.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
        Value::Object(body)
    })
}

/// One server for all cases, on a runtime that outlives them.
fn server() -> &'static (Runtime, TestServer) {
    static SERVER: OnceLock<(Runtime, TestServer)> = OnceLock::new();
    SERVER.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut setup = Setup::varied();
        (setup.config.max_model_len, setup.engine.max_model_len) = (64, 64);
        setup.config.max_sequences = 8;
        let server = runtime.block_on(setup.start());
        (runtime, server)
    })
}

/// Sends a body and returns the status, having read the whole answer.
fn send(path: &str, body: Vec<u8>) -> u16 {
    let (runtime, server) = server();
    let request = server.client.post(format!("{}{path}", server.url)).header("content-type", "application/json");
    let exchange = async {
        let response = request.body(body).send().await.unwrap();
        let status = response.status().as_u16();
        let text = response.text().await.unwrap();
        let shape = if status == 200 { "{\"id\":" } else { "{\"error\":{\"message\":" };
        assert!(text.trim_start_matches("data: ").starts_with(shape), "{status} {text}");
        status
    };
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), exchange).await.unwrap() })
}

const PATHS: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn json_bodies_never_break_the_server(body in body()) {
        for path in PATHS {
            let status = send(path, body.to_string().into_bytes());
            prop_assert!([200, 400, 404].contains(&status), "{status}");
        }
    }

    #[test]
    fn mangled_bodies_never_break_the_server(body in body(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = body.to_string().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        for path in PATHS {
            let status = send(path, bytes.clone());
            prop_assert!([200, 400, 404].contains(&status), "{status}");
        }
    }
}
