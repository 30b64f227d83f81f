//! Tests of the engine on its thread, through its public interface.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use octavo_engine::mock::{FailurePoint, MockConfig, MockExecutor, MockFailure};
use octavo_engine::{
    Engine, EngineConfig, EngineHandle, EngineState, Executor, ExecutorError, FinishReason, KvCacheSpec, Request,
    RequestEvent, RequestStream, SamplingParams, StepCost, StepId, StepMasks, StepOutput, StepPlan, StepWork,
    SubmitError,
};
use octavo_telemetry::EngineMetrics;

fn request(prompt: &[u32], max_tokens: u32) -> Request {
    Request::new("r", prompt, SamplingParams { max_tokens, ..SamplingParams::default() })
}

fn spawn(executor: impl Executor + 'static, config: EngineConfig) -> Engine {
    Engine::spawn(Box::new(executor), config, EngineMetrics::disabled()).expect("limits are right")
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}

/// Returns every event until the end.
async fn drain(mut stream: RequestStream) -> Vec<RequestEvent> {
    let mut events = Vec::new();
    while let Some(event) = stream.next().await {
        events.push(event);
    }
    assert!(stream.next().await.is_none());
    events
}

fn ids(events: &[RequestEvent]) -> Vec<u32> {
    events.iter().flat_map(|event| &event.tokens).map(|token| token.id).collect()
}

fn finish(events: &[RequestEvent]) -> &FinishReason {
    assert_eq!(events.iter().filter(|event| event.finish.is_some()).count(), 1);
    events.last().and_then(|event| event.finish.as_ref()).expect("the last event ends the request")
}

/// A mock executor whose steps end when the test permits.
struct Gated {
    inner: MockExecutor,
    /// Receives the number of every step that is waited for.
    reached: Sender<StepId>,
    /// A step ends when a message arrives or the sender is dropped.
    gate: Receiver<()>,
    oldest: StepId,
    /// Whether it has a cost model.
    has_cost: bool,
}

fn gated(config: MockConfig) -> (Gated, Receiver<StepId>, Sender<()>) {
    let (reached, steps) = channel();
    let (open, gate) = channel();
    (Gated { inner: MockExecutor::new(config), reached, gate, oldest: 1, has_cost: false }, steps, open)
}

impl Executor for Gated {
    fn kv_cache_spec(&self) -> &KvCacheSpec {
        self.inner.kv_cache_spec()
    }

    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn max_rows(&self) -> usize {
        self.inner.max_rows()
    }

    fn step_cost(&self) -> Option<Box<dyn StepCost>> {
        self.has_cost.then(|| Box::new(SecondEach) as Box<dyn StepCost>)
    }

    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        assert_eq!(std::thread::current().name(), Some("octavo-engine"));
        self.inner.submit(plan)
    }

    fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError> {
        self.inner.sample(step, masks)
    }

    fn wait(&mut self) -> Result<StepOutput, ExecutorError> {
        let _ = self.reached.send(self.oldest);
        self.oldest += 1;
        let _ = self.gate.recv();
        self.inner.wait()
    }
}

#[test]
fn tokens_stream_to_their_requests() {
    for max_in_flight in [1, 2] {
        let mock = MockConfig { max_in_flight, ..MockConfig::default() };
        let engine = spawn(MockExecutor::new(mock.clone()), EngineConfig::default());
        let handle = engine.handle();
        block_on(async {
            let streams: Vec<_> = (0..50).map(|n| (n, handle.submit(request(&[n, n + 1], 20)).unwrap())).collect();
            for (n, stream) in streams {
                let events = drain(stream).await;
                let params = SamplingParams { max_tokens: 20, ..SamplingParams::default() };
                assert_eq!(ids(&events), mock.expected_output(&[n, n + 1], &params, 2048));
                assert_eq!(*finish(&events), FinishReason::Length);
                assert_eq!(events[0].cached_tokens, Some(0));
            }
        });
        let status = handle.status();
        assert_eq!((status.state, status.waiting), (EngineState::Running, 0));
        engine.join();
        assert_eq!(handle.status().state, EngineState::Stopped);
        assert_eq!(handle.submit(request(&[1], 1)).unwrap_err(), SubmitError::Stopped);
    }
}

#[test]
fn a_row_for_each_sequence_fits_a_step() {
    let started = |max_num_seqs| {
        let mock = MockExecutor::new(MockConfig { max_rows: 40, max_in_flight: 2, ..MockConfig::default() });
        let config = EngineConfig { max_num_seqs, ..EngineConfig::default() };
        Engine::spawn(Box::new(mock), config, EngineMetrics::disabled())
    };
    let error = started(40).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("max_num_seqs (40)") && error.contains("40 rows"), "{error}");
    let engine = started(39).unwrap();
    let requests: Vec<_> = (0..60).map(|n| engine.handle().submit(request(&[n, n + 1], 5)).unwrap()).collect();
    block_on(async {
        for stream in requests {
            assert_eq!(*finish(&drain(stream).await), FinishReason::Length);
        }
    });
}

#[test]
fn a_slow_reader_gets_merged_events_and_delays_nobody() {
    let engine = spawn(MockExecutor::new(MockConfig::default()), EngineConfig::default());
    let slow = engine.handle().submit(request(&[1], 100)).unwrap();
    let quick = engine.handle().submit(request(&[2], 200)).unwrap();
    block_on(async {
        assert_eq!(ids(&drain(quick).await).len(), 200);
        let events = drain(slow).await;
        assert_eq!(events.len(), 1, "all that was missed comes in one event");
        assert_eq!((events[0].tokens.len(), finish(&events)), (100, &FinishReason::Length));
    });
    engine.join();
}

#[test]
fn an_aborted_request_leaves_no_trace() {
    let (executor, steps, open) = gated(MockConfig::default());
    let engine = spawn(executor, EngineConfig::default());
    let handle = engine.handle();
    let gone = handle.submit(request(&[1; 40], 1000)).unwrap();
    steps.recv().unwrap();
    drop(gone);
    let other = handle.submit(request(&[2], 3)).unwrap();
    drop(open);
    block_on(async { assert_eq!(ids(&drain(other).await).len(), 3) });
    let stepped: Vec<_> = std::iter::from_fn(|| steps.try_recv().ok()).collect();
    assert!(stepped.len() <= 4, "the aborted request ran on: {stepped:?}");
    engine.join();
    let status = handle.status();
    assert_eq!((status.running, status.waiting, status.blocks_used), (0, 0, 0));
}

#[test]
fn the_inbox_is_bounded_and_submit_does_not_block() {
    let config = EngineConfig {
        max_num_seqs: 1,
        max_queued_requests: 3,
        max_queued_tokens: 100,
        max_model_len: 500,
        ..EngineConfig::default()
    };
    let (executor, steps, open) = gated(MockConfig::default());
    let engine = spawn(executor, config);
    let handle = engine.handle();
    let running = handle.submit(request(&[1; 300], 1)).unwrap();
    steps.recv().unwrap();
    let mut waiting = vec![handle.submit(request(&[1; 60], 1)).unwrap()];
    let full = handle.submit(request(&[1; 41], 1)).unwrap_err();
    assert_eq!(full, SubmitError::TooManyTokens { waiting: 60, limit: 100 });
    waiting.push(handle.submit(request(&[1; 20], 1)).unwrap());
    waiting.push(handle.submit(request(&[1; 20], 1)).unwrap());
    let full = handle.submit(request(&[1], 1)).unwrap_err();
    assert_eq!(full, SubmitError::TooManyRequests { waiting: 3, limit: 3 });
    assert_eq!(handle.status().waiting, 3);

    assert_eq!(handle.submit(request(&[], 1)).unwrap_err(), SubmitError::EmptyPrompt);
    let long = handle.submit(request(&[1; 500], 1)).unwrap_err();
    assert_eq!(long, SubmitError::PromptTooLong { tokens: 500, limit: 499 });
    drop(open);
    block_on(async {
        for stream in std::iter::once(running).chain(waiting) {
            assert_eq!(*finish(&drain(stream).await), FinishReason::Length);
        }
        assert_eq!(ids(&drain(handle.submit(request(&[1; 499], 9)).unwrap()).await).len(), 1);
    });
    engine.join();
}

#[test]
fn join_and_abort_all_end_everything_as_abort() {
    let (executor, steps, open) = gated(MockConfig::default());
    let engine = spawn(executor, EngineConfig { max_num_seqs: 1, ..EngineConfig::default() });
    let handle: EngineHandle = engine.handle();
    let before = [handle.submit(request(&[1], 500)).unwrap(), handle.submit(request(&[2], 500)).unwrap()];
    steps.recv().unwrap();
    handle.abort_all();
    let after = handle.submit(request(&[3], 5)).unwrap();
    drop(open);
    block_on(async {
        for stream in before {
            assert_eq!(*finish(&drain(stream).await), FinishReason::Abort);
        }
        assert_eq!(*finish(&drain(after).await), FinishReason::Length, "submitted after the call");
    });
    let last = handle.submit(request(&[4], 2000)).unwrap();
    engine.join();
    block_on(async { assert!(matches!(finish(&drain(last).await), FinishReason::Abort | FinishReason::Length)) });
}

#[test]
fn a_fatal_error_fails_the_engine() {
    let failures = vec![MockFailure { step: 3, at: FailurePoint::Wait, fatal: true }];
    let engine = spawn(MockExecutor::new(MockConfig { failures, ..MockConfig::default() }), EngineConfig::default());
    let stream = engine.handle().submit(request(&[1], 50)).unwrap();
    let handle = engine.handle();
    block_on(async {
        let events = drain(stream).await;
        assert_eq!(ids(&events).len(), 2);
        assert!(matches!(finish(&events), FinishReason::Error(message) if message.contains("told to fail")));
    });
    engine.join();
    assert_eq!(handle.status().state, EngineState::Failed);
    assert_eq!(handle.submit(request(&[1], 1)).unwrap_err(), SubmitError::Stopped);
}

/// A call of the engine to its executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Submit,
    Sample,
    Wait,
    Recycle,
    SpareMasks,
}

/// A mock executor that panics at a call.
struct Panics {
    inner: MockExecutor,
    at: Call,
    /// Number of such calls that succeed.
    after: usize,
}

impl Panics {
    fn reach(&mut self, call: Call) {
        if call == self.at {
            self.after = self.after.checked_sub(1).expect("the device is on fire");
        }
    }
}

impl Executor for Panics {
    fn kv_cache_spec(&self) -> &KvCacheSpec {
        self.inner.kv_cache_spec()
    }

    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    fn max_rows(&self) -> usize {
        self.inner.max_rows()
    }

    fn max_in_flight(&self) -> usize {
        self.inner.max_in_flight()
    }

    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        self.reach(Call::Submit);
        self.inner.submit(plan)
    }

    fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError> {
        self.reach(Call::Sample);
        self.inner.sample(step, masks)
    }

    fn wait(&mut self) -> Result<StepOutput, ExecutorError> {
        self.reach(Call::Wait);
        self.inner.wait()
    }

    fn recycle(&mut self, rows: Vec<octavo_engine::TokenOutput>) {
        self.reach(Call::Recycle);
        self.inner.recycle(rows);
    }

    fn spare_masks(&mut self) -> StepMasks {
        self.reach(Call::SpareMasks);
        self.inner.spare_masks()
    }
}

/// Allows every token.
struct Anything;

impl octavo_engine::Constraint for Anything {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(u32::MAX);
    }

    fn accept(&mut self, _token: u32) -> bool {
        true
    }

    fn rollback(&mut self, _tokens: usize) {}
}

/// Every request ends, also one that ends in the turn of the panic, whose reader waits to be woken.
#[test]
fn readers_survive_a_panic_at_any_call_of_the_executor() {
    for (at, max_in_flight) in [Call::Submit, Call::Sample, Call::Wait, Call::Recycle, Call::SpareMasks]
        .into_iter()
        .flat_map(|call| [(call, 1), (call, 2)])
    {
        for after in [0, 1, 3] {
            // Steps take long enough for all readers to wait.
            let mock = MockConfig { step_latency: Duration::from_millis(3), max_in_flight, ..MockConfig::default() };
            let engine = spawn(Panics { inner: MockExecutor::new(mock), at, after }, EngineConfig::default());
            let handle = engine.handle();
            let submit = |tokens| {
                let constraint: Option<Box<dyn octavo_engine::Constraint>> = Some(Box::new(Anything));
                handle.submit(Request { constraint, ..request(&[tokens], tokens) }).ok()
            };
            let streams: Vec<_> = (1..8).filter_map(submit).collect();
            assert!(!streams.is_empty());
            let (done, ended) = channel();
            let reader = std::thread::spawn(move || {
                block_on(async {
                    for stream in streams {
                        let events = drain(stream).await;
                        assert!(matches!(finish(&events), FinishReason::Error(_) | FinishReason::Length));
                    }
                });
                done.send(()).unwrap();
            });
            let woken = ended.recv_timeout(Duration::from_secs(60));
            assert!(
                woken.is_ok(),
                "a reader waits for ever after a panic at {at:?} number {after}, {max_in_flight} deep"
            );
            reader.join().unwrap();
            engine.join();
            assert_eq!(handle.status().state, EngineState::Failed, "{at:?}");
            assert_eq!(handle.submit(request(&[1], 1)).unwrap_err(), SubmitError::Stopped);
        }
    }
}

/// Expects a second for each token of a step.
struct SecondEach;

impl StepCost for SecondEach {
    fn step(&self) -> StepWork {
        StepWork::default()
    }

    fn share(&self, tokens: usize, _context: usize, _rows: usize) -> StepWork {
        StepWork { tokens: tokens as f64, ..StepWork::default() }
    }
}

#[test]
fn an_engine_is_stuck_when_a_step_takes_longer_than_expected() {
    let config = EngineConfig { stuck_after: Duration::from_millis(20), ..EngineConfig::default() };
    for (has_cost, expected) in [(false, Duration::from_millis(20)), (true, Duration::from_secs(32 * 40))] {
        let (mut executor, steps, open) = gated(MockConfig::default());
        executor.has_cost = has_cost;
        let engine = spawn(executor, config.clone());
        let handle = engine.handle();
        let stream = handle.submit(request(&[1; 40], 1)).unwrap();
        steps.recv().unwrap();
        assert_eq!(handle.status().stuck_after, expected);
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(handle.status().stuck(), !has_cost);
        drop(open);
        block_on(async { assert_eq!(ids(&drain(stream).await).len(), 1) });
        engine.join();
        assert!(!handle.status().stuck());
    }
}

#[test]
fn an_engine_does_not_start_with_a_cache_too_small() {
    let executor = MockExecutor::new(MockConfig { blocks: 3, ..MockConfig::default() });
    let error = Engine::spawn(Box::new(executor), EngineConfig::default(), EngineMetrics::disabled()).err().unwrap();
    assert!(error.to_string().contains("lower max_model_len to 32"), "{error}");
}
