//! The engine over the runner over the candle backend: the same request gives the same tokens, whatever else runs.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may panic, as it may")]

use std::sync::Arc;
use std::time::Instant;

use octavo_backend_candle::CandleBackend;
use octavo_engine::{Engine, EngineConfig, FinishReason, Request, RequestStream, SamplingParams, TokenOutput};
use octavo_ops::Backend;
use octavo_ops::testing::{QkNormWidth, TestRng, TinyModel};
use octavo_runner::{KvBudget, Runner, RunnerConfig};
use octavo_telemetry::{Telemetry, TelemetryConfig};

const MAX_LEN: usize = 96;

/// Two KV groups, so that tables are told apart.
fn model() -> TinyModel {
    TinyModel {
        layers: vec![0, 1, 0],
        windows: vec![None, Some(20)],
        qk_norm: Some(QkNormWidth::Head),
        biases: true,
        scales: (1.0, 4.0),
        ..TinyModel::default()
    }
}

fn engine(config: EngineConfig, blocks: usize) -> (Engine, Telemetry) {
    let (program, weights) = model().build().unwrap();
    let mut backend = CandleBackend::new();
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    let runner_config = RunnerConfig {
        block_size: 16,
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_model_len: config.max_model_len,
        kv: KvBudget::Blocks(blocks),
    };
    let runner = Runner::new(Box::new(backend), Arc::new(program), runner_config).unwrap();
    let telemetry = Telemetry::new(TelemetryConfig { model_name: "tiny".into(), engine: 0, max_model_len: MAX_LEN });
    (Engine::spawn(Box::new(runner), config, telemetry.engine()).unwrap(), telemetry)
}

fn config() -> EngineConfig {
    EngineConfig { max_model_len: MAX_LEN, max_num_seqs: 8, max_num_batched_tokens: 256, ..EngineConfig::default() }
}

fn request(prompt: &[u32], params: &SamplingParams) -> Request {
    Request {
        id: "test".into(),
        prompt: prompt.into(),
        params: Arc::new(params.clone()),
        priority: 0,
        arrival: Instant::now(),
        cache_salt: None,
        constraint: None,
        parent_n: None,
    }
}

/// The value of a counter.
fn counter(telemetry: &Telemetry, name: &str) -> f64 {
    let text = telemetry.render();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Every token with its log-probabilities, and why it ended.
async fn collect(mut stream: RequestStream) -> (Vec<TokenOutput>, FinishReason) {
    let mut tokens = Vec::new();
    loop {
        let event = stream.next().await.unwrap();
        tokens.extend(event.tokens);
        if let Some(finish) = event.finish {
            return (tokens, finish);
        }
    }
}

/// Greedy and random ones, with penalties, with end-of-sequence ids.
fn requests() -> Vec<(Vec<u32>, SamplingParams)> {
    let mut rng = TestRng(21);
    let mut requests = Vec::new();
    for i in 0..10u64 {
        let length = [1, 7, 16, 17, 33, 40][i as usize % 6];
        let mut prompt = rng.tokens(length, 50);
        if i >= 6 {
            // Shares whole blocks with the longest of the first round.
            let first: &(Vec<u32>, SamplingParams) = &requests[5];
            prompt.splice(..0, first.0[..32].iter().copied());
        }
        let random = i % 2 == 1;
        let params = SamplingParams {
            temperature: if random { 0.9 } else { 0.0 },
            top_p: if random { 0.95 } else { 1.0 },
            seed: i,
            repetition_penalty: if i % 3 == 0 { 1.3 } else { 1.0 },
            logprobs: Some(2),
            max_tokens: 14 + i as u32,
            eos_token_ids: vec![49],
            min_tokens: 4,
            ..SamplingParams::default()
        };
        requests.push((prompt, params));
    }
    requests
}

async fn one_by_one(engine: &Engine) -> Vec<(Vec<TokenOutput>, FinishReason)> {
    let mut outputs = Vec::new();
    for (prompt, params) in requests() {
        outputs.push(collect(engine.handle().submit(request(&prompt, &params)).unwrap()).await);
    }
    outputs
}

async fn all_at_once(engine: &Engine) -> Vec<(Vec<TokenOutput>, FinishReason)> {
    let submit =
        |(prompt, params): &(Vec<u32>, SamplingParams)| engine.handle().submit(request(prompt, params)).unwrap();
    let streams: Vec<_> = requests().iter().map(submit).collect();
    let mut outputs = Vec::new();
    for stream in streams {
        outputs.push(collect(stream).await);
    }
    outputs
}

#[tokio::test]
async fn the_same_request_gives_the_same_tokens() {
    let (alone, _) = engine(EngineConfig { enable_prefix_caching: false, ..config() }, 64);
    let expected = one_by_one(&alone).await;
    assert!(expected.iter().all(|(tokens, _)| tokens.len() >= 4), "min_tokens");
    assert!(expected.iter().any(|(tokens, _)| tokens.len() >= 14));
    alone.join();

    let settings = [
        ("batched", config(), 64),
        ("without prefix cache", EngineConfig { enable_prefix_caching: false, ..config() }, 64),
        ("chunked", EngineConfig { max_num_batched_tokens: 5, ..config() }, 64),
        ("few sequences", EngineConfig { max_num_seqs: 2, ..config() }, 64),
        // Eight sequences of up to five blocks in twelve: some are preempted and recomputed.
        ("preempted", EngineConfig { max_num_batched_tokens: 48, ..config() }, 13),
    ];
    for (name, config, blocks) in settings {
        let (engine, telemetry) = engine(config, blocks);
        assert_eq!(all_at_once(&engine).await, expected, "{name}");
        // Now with what the prefix cache has kept.
        assert_eq!(one_by_one(&engine).await, expected, "{name}, again");
        let (preemptions, hits) = ("vllm:num_preemptions_total{", "vllm:prefix_cache_hits_total{");
        assert_eq!(counter(&telemetry, preemptions) > 0.0, name == "preempted", "{name}");
        assert_eq!(counter(&telemetry, hits) > 0.0, name != "without prefix cache", "{name}");
        engine.join();
    }
}
