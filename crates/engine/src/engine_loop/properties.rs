//! Property tests of the engine with random requests: every invariant holds after every step, and every request ends
//! once, with the tokens it gets when it runs alone.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use octavo_telemetry::{EngineMetrics, Telemetry, TelemetryConfig};
use proptest::prelude::*;

use super::{Exit, Turn};
use crate::internals::ManualEngine;
use crate::mock::{FailurePoint, MockConfig, MockExecutor, MockFailure};
use crate::{
    Adapter, BlockHash, ClientId, Constraint, EngineConfig, FinishReason, ImageHash, ImageInput, ImageSpan, KvEvent,
    KvEventSink, KvKind, Logprobs, Pooling, PromptImage, RepetitionDetection, Request, RequestStream, SamplingParams,
    SchedulingPolicy, Speculation, Task,
};

const MAX_LEN: usize = 40;
const VOCAB: usize = 40;
/// Number of times that a token is computed, on average.
const REPEATS: usize = 3;
/// Number of tokens of the largest image.
const MOST_ROWS: usize = 8;

/// Adapters of the requests. Two have the same name.
static ADAPTERS: LazyLock<[Adapter; 3]> = LazyLock::new(|| {
    [(1, "a", "x"), (2, "a", "y"), (3, "b", "x")].map(|(number, name, origin)| Adapter::new(number, name, origin, ()))
});

/// Behaviour of a caller.
#[derive(Clone, Copy, Debug)]
enum Caller {
    /// Reads every turn until the end.
    Reads,
    /// Reads only after the engine is idle.
    Sleeps,
    /// Drops its stream after this many turns.
    Leaves(usize),
    /// Finishes its stream after this many tokens.
    Finishes(usize),
}

#[derive(Clone, Debug)]
struct Life {
    at: usize,
    prompt: Vec<u32>,
    images: Vec<PromptImage>,
    embed: bool,
    params: SamplingParams,
    priority: i64,
    salt: bool,
    /// Index of the adapter.
    adapter: Option<usize>,
    client: u128,
    constrained: bool,
    caller: Caller,
}

impl Life {
    fn contents(&self) -> Vec<u32> {
        let contents = mock_alone().with_images(&self.prompt, &self.images);
        match self.adapter {
            Some(index) => mock_alone().with_adapter(contents, ADAPTERS[index].number()),
            None => contents,
        }
    }

    /// Leaves out the scores of the prompt.
    fn score_nothing(&mut self) {
        self.params.prompt_logprobs = None;
        self.params.max_tokens = self.params.max_tokens.max(1);
    }

    fn request(&self, epoch: Instant) -> Request {
        Request {
            task: if self.embed { Task::Embed(Pooling::Prompt) } else { Task::Generate },
            priority: self.priority,
            arrival: epoch + Duration::from_millis(self.at as u64),
            cache_salt: self.salt.then(|| "salt".into()),
            adapter: self.adapter.map(|index| ADAPTERS[index].clone()),
            constraint: self.constrained.then(|| Box::new(Alternating { odd: false }) as Box<dyn Constraint>),
            client: ClientId(self.client),
            images: self.images.as_slice().into(),
            ..Request::new(format!("{self:?}"), self.prompt.as_slice(), self.params.clone())
        }
    }
}

/// Allows even and odd tokens alternately.
struct Alternating {
    odd: bool,
}

impl Constraint for Alternating {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(if self.odd { 0xaaaa_aaaa } else { 0x5555_5555 });
    }

    fn accept(&mut self, token: u32) -> bool {
        let allowed = (token % 2 == 1) == self.odd;
        self.odd = !self.odd;
        allowed
    }

    fn rollback(&mut self, tokens: usize) {
        self.odd ^= tokens % 2 == 1;
    }
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let scores = prop::option::weighted(0.3, (0..3u32, any::<bool>()));
    let repetition = prop::option::weighted(0.2, (1..4u32, 0..3u32, 2..4u32));
    (1..25u32, 0..6u32, any::<bool>(), any::<bool>(), 0..3u64, scores, repetition).prop_map(
        |(max_tokens, min_tokens, ignore_eos, hot, seed, scores, repetition)| SamplingParams {
            max_tokens: if scores.is_some_and(|(_, only)| only) { 0 } else { max_tokens },
            prompt_logprobs: scores.map(|(alternatives, _)| alternatives),
            repetition_detection: repetition.map(|(max_pattern_size, min_pattern_size, min_count)| {
                RepetitionDetection { max_pattern_size, min_pattern_size, min_count }
            }),
            min_tokens,
            ignore_eos,
            temperature: if hot { 1.0 } else { 0.0 },
            seed,
            eos_token_ids: vec![3],
            stop_token_ids: vec![5].into(),
            ..SamplingParams::default()
        },
    )
}

/// Returns the images of a prompt of `len` tokens: gaps between images, and their contents. Few contents occur, so that
/// requests share them.
fn place(len: usize, images: &[(u32, u8)]) -> Vec<PromptImage> {
    let mut placed = Vec::new();
    let mut end = 0;
    for &(gap, content) in images {
        let (rows, cols) = [(1, 2), (2, 2), (3, 2), (2, 4)][content as usize % 4];
        let span = ImageSpan { start: end + gap, rows, cols };
        if span.end() as usize > len {
            break;
        }
        end = span.end();
        let patches = Box::new(vec![content; (4 * rows * cols) as usize]);
        let input = Arc::new(ImageInput { rows: 2 * rows, cols: 2 * cols, patches });
        placed.push(PromptImage { span, hash: ImageHash([content; 32]), input });
    }
    placed
}

fn life() -> impl Strategy<Value = Life> {
    let caller = prop_oneof![
        4 => Just(Caller::Reads),
        1 => Just(Caller::Sleeps),
        2 => (0..30usize).prop_map(Caller::Leaves),
        1 => (1..8usize).prop_map(Caller::Finishes),
    ];
    let prompt = (0..3u32, 1..MAX_LEN as u32).prop_map(|(family, len)| {
        // Prompts of one family share all tokens up to the shorter length; prompts of different families share their
        // first 9.
        (0..len).map(|i| if i < 9 { i } else { (family * 13 + i) % VOCAB as u32 }).collect()
    });
    let adapter = prop::option::weighted(0.4, 0..ADAPTERS.len());
    let flags = (prop::bool::weighted(0.2), prop::bool::weighted(0.2), prop::bool::weighted(0.3), adapter);
    let images = prop_oneof![2 => Just(Vec::new()), 3 => prop::collection::vec((0..9u32, 0..6u8), 1..4)];
    (0..25usize, (prompt, images), params(), (-2..3i64, 0..3u128), flags, caller).prop_map(
        |(at, (prompt, images), params, (priority, client), (embed, salt, constrained, adapter), caller): (
            _,
            (Vec<u32>, Vec<_>),
            _,
            _,
            _,
            _,
        )| Life {
            at,
            images: place(prompt.len(), &images),
            prompt,
            embed,
            params,
            priority,
            salt,
            adapter,
            client,
            constrained,
            caller,
        },
    )
}

fn failures() -> impl Strategy<Value = Vec<MockFailure>> {
    let at = prop_oneof![Just(FailurePoint::Submit), Just(FailurePoint::Sample), Just(FailurePoint::Wait)];
    let failure =
        (1..40u64, at, prop::bool::weighted(0.1)).prop_map(|(step, at, fatal)| MockFailure { step, at, fatal });
    prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec(failure, 1..4)]
}

fn mock() -> impl Strategy<Value = MockConfig> {
    let kind = prop_oneof![Just(KvKind::Full), (1..20usize).prop_map(KvKind::Window)];
    let kv_groups = prop::collection::vec(kind, 0..4);
    (1..6usize, 0..20usize, kv_groups, 1..=2usize, failures(), (MOST_ROWS..30, any::<bool>(), 1..4usize)).prop_map(
        |(block_size, spare, kv_groups, max_in_flight, failures, (media_rows, seen_whole, adapter_slots))| MockConfig {
            adapter_slots,
            media_rows,
            seen_whole,
            vocab_size: VOCAB,
            tokens: 0..VOCAB as u32,
            block_size,
            // Those of one sequence are added when the size of steps is known.
            blocks: 1 + spare,
            kv_groups,
            max_in_flight,
            failures,
            verify: true,
            ..MockConfig::default()
        },
    )
}

fn config() -> impl Strategy<Value = EngineConfig> {
    let chunks = prop_oneof![3 => Just(true), 1 => Just(false)];
    let policy = prop::sample::select(vec![SchedulingPolicy::Fcfs, SchedulingPolicy::Priority, SchedulingPolicy::Fair]);
    let max_step = prop::option::of((1..200_000u64).prop_map(Duration::from_nanos));
    let speculation = (1..6usize, 1..3usize, 0..3usize).prop_map(|(tokens, lookup_min, more)| Speculation {
        tokens,
        lookup_min,
        lookup_max: lookup_min + more,
    });
    let budgets = (1..50usize, MOST_ROWS..30, prop::option::of(speculation));
    (1..6usize, budgets, chunks, any::<bool>(), (policy, max_step), 0..9usize).prop_map(
        |(max_num_seqs, budgets, enable_chunked_prefill, enable_prefix_caching, (policy, max_step), threshold)| {
            let (budget, max_num_encoder_tokens, speculation) = budgets;
            EngineConfig {
                max_num_encoder_tokens,
                speculation,
                max_model_len: MAX_LEN,
                max_num_seqs,
                max_num_batched_tokens: if enable_chunked_prefill { budget } else { MAX_LEN + budget },
                max_step,
                policy,
                enable_prefix_caching,
                enable_chunked_prefill,
                long_prefill_token_threshold: threshold,
                ..EngineConfig::default()
            }
        },
    )
}

/// Events that a caller has received.
struct Seen {
    life: Life,
    stream: Option<RequestStream>,
    tokens: Vec<u32>,
    prompt_logprobs: Vec<Logprobs>,
    embedding: Option<Vec<f32>>,
    finish: Option<FinishReason>,
}

impl Seen {
    fn new(life: &Life, stream: RequestStream) -> Self {
        Self {
            life: life.clone(),
            stream: Some(stream),
            tokens: Vec::new(),
            prompt_logprobs: Vec::new(),
            embedding: None,
            finish: None,
        }
    }

    /// Checks everything that does not depend on sampled tokens.
    fn check(&self) {
        let Life { prompt, params, embed, .. } = &self.life;
        let ended = matches!(self.finish, Some(FinishReason::Stop { .. } | FinishReason::Length));
        if !embed && (ended || !self.tokens.is_empty()) {
            let expected =
                params.prompt_logprobs.map(|top| mock_alone().expected_scores(&self.life.contents(), prompt, top));
            assert_eq!(self.prompt_logprobs, expected.unwrap_or_default());
        }
        if *embed && ended {
            assert_eq!(self.embedding, Some(mock_alone().expected_embedding(&self.life.contents())));
        }
        if *embed || params.max_tokens == 0 {
            assert!(self.tokens.is_empty());
        }
        assert!(self.embedding.is_none() || (*embed && ended));
    }

    fn read(&mut self) {
        while let Some(stream) = &mut self.stream {
            match stream.poll_next(&mut Context::from_waker(Waker::noop())) {
                Poll::Pending => return,
                Poll::Ready(None) => {
                    assert!(self.finish.is_some(), "a stream that is over had a terminal event");
                    self.stream = None;
                }
                Poll::Ready(Some(event)) => {
                    assert!(self.finish.is_none(), "an event after the terminal one");
                    let none = self.life.embed || self.life.params.max_tokens == 0;
                    let answered = matches!(event.finish, Some(FinishReason::Stop { .. } | FinishReason::Length));
                    let answer = !event.tokens.is_empty() || (none && answered);
                    assert_eq!(event.cached_tokens.is_some(), self.tokens.is_empty() && answer);
                    assert!(event.cached_tokens.is_some() || event.prompt_logprobs.is_empty(), "only with the first");
                    self.prompt_logprobs.extend(event.prompt_logprobs);
                    self.embedding = event.embedding;
                    self.tokens.extend(event.tokens.iter().map(|token| token.id));
                    self.finish = event.finish;
                }
            }
        }
    }

    fn behave(&mut self, turn: usize) {
        match self.life.caller {
            Caller::Reads => self.read(),
            Caller::Sleeps => {}
            Caller::Leaves(after) if turn >= self.life.at + after => self.stream = None,
            Caller::Leaves(_) => self.read(),
            Caller::Finishes(after) => {
                self.read();
                if self.tokens.len() >= after
                    && let Some(stream) = self.stream.take()
                {
                    stream.finish();
                }
            }
        }
    }
}

fn mock_alone() -> MockConfig {
    MockConfig {
        vocab_size: VOCAB,
        tokens: 0..VOCAB as u32,
        media_rows: 100,
        adapter_slots: 1,
        ..MockConfig::default()
    }
}

/// Returns the tokens of a request that runs alone.
fn alone(life: &Life) -> (Vec<u32>, FinishReason) {
    let mock = mock_alone();
    let config = EngineConfig { max_model_len: MAX_LEN, enable_prefix_caching: false, ..EngineConfig::default() };
    let executor = Box::new(MockExecutor::new(mock.clone()));
    let mut engine = ManualEngine::new(executor, config, EngineMetrics::disabled()).unwrap();
    let stream = engine.submit(life.request(Instant::now())).unwrap();
    let mut seen = Seen::new(life, stream);
    while engine.turn() {}
    seen.read();
    seen.check();
    if !life.constrained && !life.embed {
        let expected = mock.expected_output(&life.contents(), &life.params, MAX_LEN);
        match seen.finish {
            Some(FinishReason::Repetition) => assert!(expected.starts_with(&seen.tokens)),
            _ => assert_eq!(seen.tokens, expected),
        }
    }
    (seen.tokens, seen.finish.unwrap())
}

/// Runs the requests in one engine and returns the events that their callers received.
fn together(engine: &mut ManualEngine, lives: &[Life]) -> (Vec<Seen>, Option<Exit>) {
    let epoch = Instant::now();
    let mut seen: Vec<Seen> = Vec::new();
    let last = lives.iter().map(|life| life.at).max().unwrap_or(0);
    // A step computes at least one token and takes at most two turns. Tokens of a sequence are computed again after a
    // preemption, which lets an older one end.
    let tokens: usize = lives.iter().map(|life| MAX_LEN.min(life.prompt.len() + life.params.max_tokens as usize)).sum();
    let most = last + 2 * REPEATS * tokens + 20;
    for turn in 0.. {
        assert!(turn < most, "{tokens} tokens are not computed in {most} turns");
        for life in lives.iter().filter(|life| life.at == turn) {
            seen.push(Seen::new(life, engine.submit(life.request(epoch)).unwrap()));
        }
        let outcome = engine.engine.turn();
        assert_eq!(engine.engine.scheduler.check_integrity(), Ok(()));
        seen.iter_mut().for_each(|seen| seen.behave(turn));
        match outcome {
            Turn::Over(exit) => return (seen, Some(exit)),
            // Ends that callers have just posted still take a turn.
            Turn::Idle if turn > last => break,
            _ => {}
        }
    }
    assert_eq!(engine.engine.turn(), Turn::Idle);
    (seen, None)
}

/// A router's view of the prefix cache, built from events.
#[derive(Clone, Default)]
struct Router {
    known: Arc<Mutex<Known>>,
    /// Whether no KV group sees all tokens.
    only_windows: bool,
}

#[derive(Default)]
struct Known {
    /// Blocks that are in the prefix index.
    blocks: HashSet<BlockHash>,
    /// All tokens up to the end of every block that was ever indexed. A block may outlive its predecessor if another
    /// sequence's copy of the predecessor was found.
    ever: HashMap<BlockHash, Vec<u32>>,
}

impl KvEventSink for Router {
    fn publish(&mut self, events: Vec<KvEvent>) {
        assert!(!events.is_empty(), "never nothing");
        let mut known = self.known.lock().unwrap();
        for event in events {
            match event {
                KvEvent::Stored { parent, hashes, tokens, block_size, .. } => {
                    assert_eq!(tokens.len(), hashes.len() * block_size);
                    // A window may have passed a parent before its tokens were known.
                    let chain = parent.map_or(Some(Vec::new()), |parent| known.ever.get(&parent).cloned());
                    let Some(mut chain) = chain else {
                        assert!(self.only_windows);
                        hashes.into_iter().for_each(|hash| assert!(known.blocks.insert(hash), "stored twice"));
                        continue;
                    };
                    for (hash, block) in hashes.into_iter().zip(tokens.chunks(block_size)) {
                        chain.extend(block);
                        assert!(known.blocks.insert(hash), "stored twice");
                        let before = known.ever.insert(hash, chain.clone());
                        assert!(before.is_none_or(|before| before == chain), "other tokens under the same name");
                    }
                }
                KvEvent::Removed { hashes } => {
                    hashes.iter().for_each(|hash| assert!(known.blocks.remove(hash), "removed twice"));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_request_ends_once_with_the_tokens_it_gets_alone(
        mut lives in prop::collection::vec(life(), 1..14),
        mut mock in mock(),
        mut config in config(),
        scored_rows in 1..50usize,
    ) {
        mock.max_rows = config.max_num_seqs + scored_rows;
        if mock.seen_whole {
            let room = MOST_ROWS + config.max_num_seqs - 1;
            config.max_num_batched_tokens = config.max_num_batched_tokens.max(room);
            lives.iter_mut().filter(|life| !life.images.is_empty()).for_each(Life::score_nothing);
        }
        mock.blocks += mock.kv_cache_spec().blocks_for(MAX_LEN, config.max_num_batched_tokens);
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: MAX_LEN });
        let fails = !mock.failures.is_empty();
        let only_windows = !mock.kv_groups.contains(&KvKind::Full);
        let executor = Box::new(MockExecutor::new(mock));
        let (counters, most_encoded) = (executor.counters(), config.max_num_encoder_tokens);
        let router = Router { only_windows, ..Router::default() };
        let sink = Box::new(router.clone());
        let mut engine = ManualEngine::with_events(executor, config, telemetry.engine(), Some(sink)).unwrap();
        let (mut seen, exit) = together(&mut engine, &lives);
        prop_assert!(exit.is_none() || (fails && exit == Some(Exit::Failed)));

        let submitted = seen.len();
        let mut whole: Vec<Vec<u32>> = Vec::new();
        for seen in &mut seen {
            let left = seen.stream.is_none() && seen.finish.is_none();
            seen.read();
            seen.check();
            let (tokens, finish) = alone(&seen.life);
            whole.push([&seen.life.prompt[..], &tokens].concat());
            prop_assert!(tokens.starts_with(&seen.tokens), "{:?} is not the start of {:?}", seen.tokens, tokens);
            match &seen.finish {
                None => prop_assert!(left, "no terminal event"),
                Some(FinishReason::Error(message)) => prop_assert!(fails && message.contains("told to fail"), "{message}"),
                Some(reason) => prop_assert_eq!((&seen.tokens, reason), (&tokens, &finish)),
            }
        }

        // Indexed blocks hold only tokens that a request received, never tokens that a step in flight was still to
        // sample.
        for chain in router.known.lock().unwrap().ever.values() {
            prop_assert!(whole.iter().any(|tokens| tokens.starts_with(chain)), "{chain:?} is nobody's");
        }

        prop_assert!(counters.most_encoded_tokens() <= most_encoded as u64, "the encoder's budget holds");
        prop_assert!(engine.engine.scheduler.is_idle());
        prop_assert_eq!(engine.engine.scheduler.kv().used(), 0);
        prop_assert_eq!(engine.shared.inbox.queued_requests(), 0);
        let ended: f64 = telemetry
            .render()
            .lines()
            .filter(|line| line.starts_with("vllm:request_success_total{"))
            .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
            .sum();
        prop_assert_eq!(ended, submitted as f64, "each request counts once in request_success_total");
    }
}
