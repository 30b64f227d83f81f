//! Tests of engine, runner and candle backend together: a request gets the same tokens whatever else runs.

#![allow(clippy::unwrap_used, reason = "the helpers of a test may panic, as it may")]

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};

use octavo_backend_candle::CandleBackend;
use octavo_engine::{
    Adapter, Engine, EngineConfig, FinishReason, Logprobs, Pooling, Request, RequestEvent, RequestStream,
    SamplingParams, Speculation, Task, TokenOutput,
};
use octavo_ops::sampling::{SampleBatch, SampleRow, SampledToken};
use octavo_ops::testing::{QkNormWidth, Scales, TestAdapter, TestRng, TinyModel};
use octavo_ops::{AdapterSource, Backend, BackendError, KvGroup, Program, StepBatch, WeightSource};
use octavo_runner::{AdapterLimits, AdapterWeights, KvBudget, Runner, RunnerConfig};
use octavo_telemetry::{Telemetry, TelemetryConfig};

const MAX_LEN: usize = 96;
const RANK: usize = 4;

/// Adapters of the requests: one more than a step can use.
static ADAPTERS: LazyLock<[Adapter; 3]> = LazyLock::new(|| {
    let program = model().build().unwrap().0.with_adapters();
    [(1, "a"), (2, "b"), (3, "c")].map(|(number, name)| {
        let weights = TestAdapter::random(&program, RANK, &mut TestRng(number));
        Adapter::new(number, name, "memory", AdapterWeights(Arc::new(weights)))
    })
});

/// Returns a model with two KV groups, so that a mix-up of block tables is detected.
fn model() -> TinyModel {
    TinyModel {
        layers: vec![0, 1, 0],
        windows: vec![None, Some(20)],
        qk_norm: Some(QkNormWidth::Head),
        biases: true,
        scales: Scales { logits: 4.0, ..Scales::default() },
        ..TinyModel::default()
    }
}

/// Order of successive steps.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Steps {
    /// Each step completes before the next is submitted.
    Apart,
    /// The next step is submitted while the backend computes.
    Queued,
    /// The next step is launched before the tokens are taken.
    Launched,
}

/// The candle backend as an asynchronous device: tokens are taken later than they are sampled, and the next step may
/// refer to them.
struct Launching {
    inner: CandleBackend,
    /// Tokens that have not been taken, oldest step first.
    waiting: VecDeque<Vec<SampledToken>>,
    /// Ids that the last step sampled.
    drawn: Vec<u32>,
}

impl Backend for Launching {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn block_sizes(&self) -> &[usize] {
        self.inner.block_sizes()
    }

    fn kv_dtype(&self) -> &'static str {
        self.inner.kv_dtype()
    }

    fn kv_block_bytes(&self, group: &KvGroup, block_size: usize) -> u64 {
        self.inner.kv_block_bytes(group, block_size)
    }

    fn load(
        &mut self,
        program: &Program,
        weights: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError> {
        self.inner.load(program, weights, progress)
    }

    fn weight_bytes(&self) -> u64 {
        self.inner.weight_bytes()
    }

    fn allocate_kv(&mut self, block_size: usize, blocks: usize) -> Result<(), BackendError> {
        self.inner.allocate_kv(block_size, blocks)
    }

    fn allocate_adapters(&mut self, slots: usize, rank: usize) -> Result<(), BackendError> {
        self.inner.allocate_adapters(slots, rank)
    }

    fn set_adapter(&mut self, slot: usize, adapter: &dyn AdapterSource) -> Result<(), BackendError> {
        self.inner.set_adapter(slot, adapter)
    }

    fn max_in_flight(&self) -> usize {
        2
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        let mut batch = batch.clone();
        for id in batch.token_ids.iter_mut().filter(|id| **id & StepBatch::DRAWN != 0) {
            *id = self.drawn[(*id & !StepBatch::DRAWN) as usize];
        }
        self.inner.forward(&batch)
    }

    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        assert!(self.waiting.len() < 2, "more steps are under way than was said");
        let mut tokens = Vec::new();
        // The tokens of the step before count too, which the host may not know yet.
        let count = |row: &SampleRow<'_>| {
            let mut counts = row.counts.cloned().unwrap_or_default();
            row.pending.into_iter().for_each(|row| counts.push(self.drawn[row as usize]));
            counts
        };
        let counts: Vec<_> = batch.rows.iter().map(count).collect();
        let rows: Vec<_> = (batch.rows.iter().zip(&counts))
            .map(|(row, counts)| SampleRow { counts: row.counts.map(|_| counts), ..*row })
            .collect();
        self.inner.sample(&SampleBatch { rows: &rows }, &mut tokens)?;
        self.drawn = tokens.iter().map(|token| token.id).collect();
        self.waiting.push_back(tokens);
        Ok(())
    }

    fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        *out = self.waiting.pop_front().expect("a step was sampled");
        Ok(())
    }

    fn embeddings(&mut self, out: &mut Vec<f32>) -> Result<(), BackendError> {
        self.inner.embeddings(out)
    }

    fn logits(&self) -> Result<Vec<f32>, BackendError> {
        self.inner.logits()
    }

    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        self.inner.copy_blocks(pairs)
    }
}

fn engine(config: EngineConfig, blocks: usize, steps: Steps) -> (Engine, Telemetry) {
    let (program, weights) = model().build().unwrap();
    let program = program.with_adapters();
    let mut backend: Box<dyn Backend> = match steps {
        Steps::Apart | Steps::Queued => Box::new(CandleBackend::new()),
        Steps::Launched => {
            Box::new(Launching { inner: CandleBackend::new(), waiting: VecDeque::new(), drawn: Vec::new() })
        }
    };
    backend.load(&program, &weights, &mut |_| {}).unwrap();
    let runner_config = RunnerConfig {
        block_size: 16,
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_model_len: config.max_model_len,
        kv: KvBudget::Blocks(blocks),
        async_scheduling: (steps == Steps::Queued).then_some(true),
        adapters: Some(AdapterLimits { slots: 2, rank: RANK }),
    };
    let runner = Runner::new(backend, Arc::new(program), runner_config).unwrap();
    let telemetry = Telemetry::new(TelemetryConfig { model_name: "tiny".into(), engine: 0, max_model_len: MAX_LEN });
    let metrics = telemetry.speculating_engine(config.speculation.map_or(0, |speculation| speculation.tokens));
    (Engine::spawn(Box::new(runner), config, metrics).unwrap(), telemetry)
}

/// Adds speculation with n-grams of any length.
fn speculating(config: EngineConfig) -> EngineConfig {
    EngineConfig { speculation: Some(Speculation { tokens: 3, lookup_min: 1, lookup_max: 3 }), ..config }
}

const STEPS: [Steps; 3] = [Steps::Apart, Steps::Queued, Steps::Launched];

fn config() -> EngineConfig {
    EngineConfig { max_model_len: MAX_LEN, max_num_seqs: 8, max_num_batched_tokens: 256, ..EngineConfig::default() }
}

fn request(prompt: &[u32], params: &SamplingParams) -> Request {
    Request::new("test", prompt, params.clone())
}

/// Returns the value of a counter.
fn counter(telemetry: &Telemetry, name: &str) -> f64 {
    let text = telemetry.render();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Collects every token with its log-probabilities, and the finish reason.
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

/// Returns greedy and random requests, with penalties and with end-of-sequence ids.
fn requests() -> Vec<(Vec<u32>, SamplingParams)> {
    let mut rng = TestRng(21);
    let mut requests = Vec::new();
    for i in 0..10u64 {
        let length = [1, 7, 16, 17, 33, 40][i as usize % 6];
        let mut prompt = rng.tokens(length, 50);
        if i >= 6 {
            // The prompt shares whole blocks with the longest one of the first round.
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

/// Submits a request of [`requests`]. Half of them have an adapter.
fn submit(engine: &Engine, (index, (prompt, params)): (usize, (Vec<u32>, SamplingParams))) -> RequestStream {
    let adapter = if index % 2 == 0 { None } else { Some(ADAPTERS[index % 3].clone()) };
    engine.handle().submit(Request { adapter, ..request(&prompt, &params) }).unwrap()
}

async fn one_by_one(engine: &Engine) -> Vec<(Vec<TokenOutput>, FinishReason)> {
    let mut outputs = Vec::new();
    for request in requests().into_iter().enumerate() {
        outputs.push(collect(submit(engine, request)).await);
    }
    outputs
}

async fn all_at_once(engine: &Engine) -> Vec<(Vec<TokenOutput>, FinishReason)> {
    let streams: Vec<_> = requests().into_iter().enumerate().map(|request| submit(engine, request)).collect();
    let mut outputs = Vec::new();
    for stream in streams {
        outputs.push(collect(stream).await);
    }
    outputs
}

#[tokio::test]
async fn the_same_request_gives_the_same_tokens() {
    let (alone, _) = engine(EngineConfig { enable_prefix_caching: false, ..config() }, 64, Steps::Apart);
    let expected = one_by_one(&alone).await;
    assert!(expected.iter().all(|(tokens, _)| tokens.len() >= 4), "min_tokens");
    assert!(expected.iter().any(|(tokens, _)| tokens.len() >= 14));
    // The adapters make a difference.
    for (index, (prompt, params)) in requests().into_iter().enumerate() {
        let base = collect(alone.handle().submit(request(&prompt, &params)).unwrap()).await;
        assert_eq!(base == expected[index], index % 2 == 0, "request {index}");
    }
    alone.join();

    let settings = [
        ("batched", config(), 64),
        ("without prefix cache", EngineConfig { enable_prefix_caching: false, ..config() }, 64),
        ("chunked", EngineConfig { max_num_batched_tokens: 5, ..config() }, 64),
        ("few sequences", EngineConfig { max_num_seqs: 2, ..config() }, 64),
        // Eight sequences of up to five blocks with full attention and three with a window share sixteen, so some are preempted and
        // recomputed.
        ("preempted", EngineConfig { max_num_batched_tokens: 48, ..config() }, 17),
        ("speculating", speculating(config()), 64),
        ("preempted and speculating", speculating(EngineConfig { max_num_batched_tokens: 48, ..config() }), 17),
    ];
    let all = settings.into_iter().flat_map(|setting| STEPS.map(|steps| (setting.clone(), steps)));
    for ((name, config, blocks), steps) in all {
        let (engine, telemetry) = engine(config, blocks, steps);
        let name = &format!("{name}, {steps:?}");
        assert_eq!(all_at_once(&engine).await, expected, "{name}");
        // The second pass finds the first one's blocks in the prefix cache.
        assert_eq!(one_by_one(&engine).await, expected, "{name}, again");
        let (preemptions, hits) = ("vllm:num_preemptions_total{", "vllm:prefix_cache_hits_total{");
        assert_eq!(counter(&telemetry, preemptions) > 0.0, name.starts_with("preempted"), "{name}");
        assert_eq!(counter(&telemetry, hits) > 0.0, !name.starts_with("without prefix cache"), "{name}");
        let (drafted, accepted) =
            ("vllm:spec_decode_num_draft_tokens_total{", "vllm:spec_decode_num_accepted_tokens_total{");
        let drafts = (counter(&telemetry, drafted), counter(&telemetry, accepted));
        assert_eq!(drafts.0 > 0.0 && drafts.1 > 0.0, name.contains("speculating"), "{name}: {drafts:?}");
        engine.join();
    }
}

/// Merges every event of a stream into one.
async fn whole(mut stream: RequestStream) -> RequestEvent {
    let mut all = RequestEvent::default();
    while let Some(event) = stream.next().await {
        all.prompt_logprobs.extend(event.prompt_logprobs);
        all.tokens.extend(event.tokens);
        all.embedding = event.embedding;
        all.finish = event.finish;
    }
    all
}

/// Returns the settings under which a request must get the same bits: `(name, limits, blocks, steps)`.
fn settings() -> [(&'static str, EngineConfig, usize, Steps); 5] {
    [
        ("batched", config(), 64, Steps::Apart),
        ("chunked", EngineConfig { max_num_batched_tokens: 7, ..config() }, 64, Steps::Launched),
        ("without prefix cache", EngineConfig { enable_prefix_caching: false, ..config() }, 64, Steps::Launched),
        ("preempted", EngineConfig { max_num_batched_tokens: 48, ..config() }, 17, Steps::Launched),
        ("queued", EngineConfig { max_num_batched_tokens: 7, ..config() }, 64, Steps::Queued),
    ]
}

/// Bits of the log-probability, rank and most likely tokens of a position.
type Bits = (u32, u32, Vec<(u32, u32)>);

/// Converts log-probabilities to bits, because equal floats may differ in them.
fn bits(logprobs: &[Logprobs]) -> Vec<Bits> {
    let top = |l: &Logprobs| l.top.iter().map(|t| (t.0, t.1.to_bits())).collect();
    logprobs.iter().map(|l| (l.logprob.to_bits(), l.rank, top(l))).collect()
}

/// Teacher forcing: the log-probabilities of generated tokens equal, bit by bit, those of the same tokens as a prompt,
/// however the prompt is computed.
#[tokio::test]
async fn a_prompt_s_log_probabilities_are_those_of_generating_it() {
    let (alone, _) = engine(EngineConfig { enable_prefix_caching: false, ..config() }, 64, Steps::Apart);
    let mut prompts = Vec::new();
    for (prompt, params) in requests() {
        let params = SamplingParams { eos_token_ids: vec![], logprobs: Some(3), ..params };
        let generated = whole(alone.handle().submit(request(&prompt, &params)).unwrap()).await;
        assert_eq!(generated.prompt_logprobs.len(), 0);
        let logprobs: Vec<_> = generated.tokens.iter().filter_map(|token| token.logprobs.clone()).collect();
        assert_eq!(logprobs.len(), params.max_tokens as usize);
        let forced: Vec<u32> = prompt.iter().copied().chain(generated.tokens.iter().map(|token| token.id)).collect();
        prompts.push((forced, prompt.len(), logprobs));
    }
    alone.join();
    let mut expected: Vec<Vec<Logprobs>> = Vec::new();
    for (name, config, blocks, steps) in settings() {
        let (engine, telemetry) = engine(config, blocks, steps);
        // Some requests continue to generate, others are only scored.
        let submit = |(i, (forced, ..)): (usize, &(Vec<u32>, usize, Vec<Logprobs>))| {
            let max_tokens = if i % 2 == 0 && name != "preempted" { 0 } else { 20 };
            let params = SamplingParams { prompt_logprobs: Some(3), max_tokens, ..SamplingParams::default() };
            (max_tokens, engine.handle().submit(request(forced, &params)).unwrap())
        };
        let streams: Vec<_> = prompts.iter().enumerate().map(submit).collect();
        for (i, (max_tokens, stream)) in streams.into_iter().enumerate() {
            let (forced, border, generated) = &prompts[i];
            let event = whole(stream).await;
            assert_eq!(event.prompt_logprobs.len(), forced.len() - 1, "{name}");
            assert_eq!(bits(&event.prompt_logprobs[border - 1..]), bits(generated), "{name}");
            assert_eq!((event.tokens.len(), event.finish), (max_tokens as usize, Some(FinishReason::Length)), "{name}");
            match expected.get(i) {
                Some(expected) => assert_eq!(bits(&event.prompt_logprobs), bits(expected), "{name}"),
                None => expected.push(event.prompt_logprobs),
            }
        }
        assert_eq!(counter(&telemetry, "vllm:num_preemptions_total{") > 0.0, name == "preempted", "{name}");
        engine.join();
    }
}

#[tokio::test]
async fn chosen_tokens_have_the_log_probabilities_of_the_most_likely() {
    let (engine, _) = engine(config(), 64, Steps::Apart);
    let params = SamplingParams { logprobs: Some(50), ..SamplingParams::default() };
    let all = whole(engine.handle().submit(request(&[3, 1, 4], &params)).unwrap()).await;
    let params = SamplingParams { logprobs: Some(0), logprob_token_ids: vec![40, 7, 7, 11], ..params };
    let some = whole(engine.handle().submit(request(&[3, 1, 4], &params)).unwrap()).await;
    for (all, some) in all.tokens.iter().zip(&some.tokens) {
        let (all, some) = (all.logprobs.as_ref().unwrap(), some.logprobs.as_ref().unwrap());
        let expected: Vec<_> = all.top.iter().copied().filter(|(id, _)| [7, 11, 40].contains(id)).collect();
        assert_eq!((some.logprob, some.rank, &some.top), (all.logprob, all.rank, &expected));
    }
    engine.join();
}

#[tokio::test]
async fn the_same_prompt_gives_the_same_embedding() {
    let embed = |engine: &Engine, prompt: &[u32]| {
        let request = Request { task: Task::Embed(Pooling::Prompt), ..request(prompt, &SamplingParams::default()) };
        engine.handle().submit(request).unwrap()
    };
    let (alone, _) = engine(EngineConfig { enable_prefix_caching: false, ..config() }, 64, Steps::Apart);
    let mut expected = Vec::new();
    for (prompt, _) in requests() {
        let event = whole(embed(&alone, &prompt)).await;
        assert_eq!((event.tokens.len(), event.finish), (0, Some(FinishReason::Stop { token: None })));
        let embedding: Vec<u32> = event.embedding.unwrap().iter().map(|x| x.to_bits()).collect();
        assert_eq!(embedding.len(), model().hidden);
        expected.push(embedding);
    }
    alone.join();
    for (name, config, blocks, steps) in settings() {
        let (engine, telemetry) = engine(config, blocks, steps);
        for round in 0..2 {
            // Other requests generate at the same time. The second round finds blocks in the prefix cache.
            let others: Vec<_> = requests()
                .iter()
                .map(|(prompt, params)| engine.handle().submit(request(prompt, params)).unwrap())
                .collect();
            let streams: Vec<_> = requests().iter().map(|(prompt, _)| embed(&engine, prompt)).collect();
            for (stream, expected) in streams.into_iter().zip(&expected) {
                let embedding = whole(stream).await.embedding.unwrap();
                let embedding: Vec<u32> = embedding.iter().map(|x| x.to_bits()).collect();
                assert_eq!(embedding, *expected, "{name}, round {round}");
            }
            for other in others {
                whole(other).await;
            }
        }
        let hits = counter(&telemetry, "vllm:prefix_cache_hits_total{");
        assert_eq!(hits > 0.0, name != "without prefix cache", "{name}");
        engine.join();
    }
}
