use std::task::{Context, Poll, Waker};

use octavo_telemetry::{Telemetry, TelemetryConfig};

use super::*;
use crate::internals::ManualEngine;
use crate::mock::{FailurePoint, MockConfig, MockExecutor, MockFailure};
use crate::{Constraint, Pooling, RepetitionDetection, Request, RequestEvent, RequestStream, SamplingParams, Task};

/// An engine over a mock executor, turned by the test, and its metrics.
pub(super) struct Rig {
    pub(super) manual: ManualEngine,
    pub(super) counters: crate::mock::MockCounters,
    telemetry: Telemetry,
}

impl Rig {
    pub(super) fn new(mock: MockConfig, config: EngineConfig) -> Self {
        Self::build(mock, config, None)
    }

    pub(super) fn with_events(mock: MockConfig, config: EngineConfig, events: Box<dyn KvEventSink>) -> Self {
        Self::build(mock, config, Some(events))
    }

    fn build(mock: MockConfig, config: EngineConfig, events: Option<Box<dyn KvEventSink>>) -> Self {
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 2048 });
        let executor = Box::new(MockExecutor::new(mock));
        let counters = executor.counters();
        let manual = ManualEngine::with_events(executor, config, telemetry.engine(), events).unwrap();
        Self { manual, counters, telemetry }
    }

    pub(super) fn submit(&self, prompt: &[u32], params: &SamplingParams) -> RequestStream {
        self.manual.submit(request(prompt, params)).unwrap()
    }

    pub(super) fn run(&mut self) {
        while self.manual.turn() {}
    }

    pub(super) fn metric(&self, name: &str) -> f64 {
        metric(&self.telemetry, name)
    }
}

/// Returns the value of a series, named without its prefix and its constant labels.
fn metric(telemetry: &Telemetry, name: &str) -> f64 {
    let text = telemetry.render();
    let mut samples = text
        .lines()
        .filter_map(|line| line.strip_prefix("vllm:").or_else(|| line.strip_prefix("octavo_"))?.rsplit_once(' '));
    let found = samples.find(|(series, _)| without_constant_labels(series) == name);
    found.unwrap_or_else(|| panic!("there is no series {name}")).1.parse().unwrap()
}

fn without_constant_labels(series: &str) -> String {
    let Some((name, labels)) = series.trim_end_matches('}').split_once('{') else { return series.into() };
    let constant = |label: &&str| !label.starts_with("engine=") && !label.starts_with("model_name=");
    match labels.split(',').filter(constant).collect::<Vec<_>>().join(",") {
        rest if rest.is_empty() => name.into(),
        rest => format!("{name}{{{rest}}}"),
    }
}

pub(super) fn request(prompt: &[u32], params: &SamplingParams) -> Request {
    Request { parent_n: Some(1), ..Request::new("r", prompt, params.clone()) }
}

pub(super) fn tokens(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ..SamplingParams::default() }
}

/// Returns all events available in the stream, and whether it has ended.
pub(super) fn read(stream: &mut RequestStream) -> (Vec<RequestEvent>, bool) {
    let mut events = Vec::new();
    loop {
        match stream.poll_next(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(event)) => events.push(event),
            Poll::Ready(None) => return (events, true),
            Poll::Pending => return (events, false),
        }
    }
}

pub(super) fn ids(events: &[RequestEvent]) -> Vec<u32> {
    events.iter().flat_map(|event| &event.tokens).map(|token| token.id).collect()
}

pub(super) fn both_depths(test: impl Fn(MockConfig)) {
    for max_in_flight in [1, 2] {
        test(MockConfig { max_in_flight, ..MockConfig::default() });
    }
}

/// Reproduces vLLM's test_metrics_counts: the counts of 10 requests of 10 tokens are known exactly.
#[test]
fn metrics_count_as_in_vllm() {
    for one_by_one in [true, false] {
        both_depths(|mock| {
            let mut rig = Rig::new(mock.clone(), EngineConfig::default());
            let params = SamplingParams { ignore_eos: true, ..tokens(10) };
            let mut streams = Vec::new();
            let mut prompt_tokens = 0;
            for number in 0..10 {
                let prompt: Vec<u32> = (0..5 + number).map(|i| 100 * number + i).collect();
                prompt_tokens += prompt.len();
                streams.push((rig.submit(&prompt, &params), mock.expected_output(&prompt, &params, 2048)));
                if one_by_one {
                    rig.run();
                }
            }
            rig.run();
            for (stream, expected) in &mut streams {
                let (events, ended) = read(stream);
                assert!(ended);
                assert_eq!(ids(&events), *expected);
                assert_eq!(events.last().unwrap().finish, Some(FinishReason::Length));
            }
            let prompt_tokens = prompt_tokens as f64;
            for (name, expected) in [
                ("time_to_first_token_seconds_count", 10.0),
                ("inter_token_latency_seconds_count", 90.0),
                ("e2e_request_latency_seconds_count", 10.0),
                ("request_queue_time_seconds_count", 10.0),
                ("request_prefill_time_seconds_count", 10.0),
                ("request_decode_time_seconds_count", 10.0),
                ("request_inference_time_seconds_count", 10.0),
                ("request_prompt_tokens_sum", prompt_tokens),
                ("request_prompt_tokens_count", 10.0),
                ("request_generation_tokens_sum", 100.0),
                ("request_params_max_tokens_sum", 100.0),
                ("request_params_n_sum", 10.0),
                ("iteration_tokens_total_sum", prompt_tokens + 100.0),
                ("iteration_tokens_total_count", if one_by_one { 100.0 } else { 10.0 }),
                ("prompt_tokens_total", prompt_tokens),
                ("prompt_tokens_cached_total", 0.0),
                ("generation_tokens_total", 100.0),
                ("prefix_cache_queries_total", prompt_tokens),
                ("prefix_cache_hits_total", 0.0),
                ("num_preemptions_total", 0.0),
                (r#"request_success_total{finished_reason="length"}"#, 10.0),
                (r#"request_success_total{finished_reason="stop"}"#, 0.0),
                (r#"request_success_total{finished_reason="abort"}"#, 0.0),
                ("num_requests_running", 0.0),
                ("num_requests_waiting", 0.0),
                ("kv_cache_usage_perc", 0.0),
            ] {
                assert_eq!(rig.metric(name), expected, "{name}, one by one: {one_by_one}");
            }
        });
    }
}

#[test]
fn a_row_wasted_after_a_stop_counts_in_no_metric() {
    let mock = MockConfig { max_in_flight: 2, eos_after: Some(3), ..MockConfig::default() };
    let executor = MockExecutor::new(mock.clone());
    let counters = executor.counters();
    let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 2048 });
    let mut manual = ManualEngine::new(Box::new(executor), EngineConfig::default(), telemetry.engine()).unwrap();
    let params = SamplingParams { eos_token_ids: vec![999], ..tokens(50) };
    let mut stream = manual.submit(request(&[1, 2, 3, 4, 5], &params)).unwrap();
    while manual.turn() {}
    let (events, _) = read(&mut stream);
    assert_eq!(ids(&events), mock.expected_output(&[1, 2, 3, 4, 5], &params, 2048));
    assert_eq!(ids(&events).len(), 4, "the end-of-sequence token is the last");
    assert_eq!(events.last().unwrap().finish, Some(FinishReason::Stop { token: None }));
    assert_eq!(counters.drawn_tokens(), 5, "one more was drawn");
    assert_eq!(metric(&telemetry, "generation_tokens_total"), 4.0);
    assert_eq!(metric(&telemetry, "iteration_tokens_total_sum"), 5.0 + 4.0);
    assert_eq!(metric(&telemetry, "iteration_tokens_total_count"), 4.0);
}

#[test]
fn stop_tokens_are_reported_and_min_tokens_is_kept() {
    both_depths(|mock| {
        let mock = MockConfig { tokens: 0..4, ..mock };
        let mut rig = Rig::new(mock.clone(), EngineConfig::default());
        let params = SamplingParams { stop_token_ids: vec![2, 3].into(), min_tokens: 6, ..tokens(100) };
        let mut stream = rig.submit(&[9], &params);
        rig.run();
        let (events, _) = read(&mut stream);
        let ids = ids(&events);
        assert_eq!(ids, mock.expected_output(&[9], &params, 2048));
        assert!(ids.len() > 6 && ids[..6].iter().all(|&id| id != 2 && id != 3));
        let last = ids.last().copied();
        assert_eq!(events.last().unwrap().finish, Some(FinishReason::Stop { token: last }));
    });
}

#[test]
fn the_context_bounds_the_output() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock, EngineConfig { max_model_len: 12, ..EngineConfig::default() });
        let mut stream = rig.submit(&[1; 9], &tokens(100));
        rig.run();
        let (events, _) = read(&mut stream);
        assert_eq!(ids(&events).len(), 3);
        assert_eq!(events.last().unwrap().finish, Some(FinishReason::Length));
        assert_eq!(rig.metric("request_params_max_tokens_sum"), 3.0, "what is in force, not what was asked for");
    });
}

#[test]
fn cached_prompt_tokens_are_reported_and_counted_once() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock.clone(), EngineConfig::default());
        let prompt: Vec<u32> = (0..50).collect();
        drop(rig.submit(&prompt, &tokens(1)));
        rig.run();
        let mut first = rig.submit(&prompt, &tokens(3));
        rig.run();
        let mut second = rig.submit(&prompt, &tokens(3));
        rig.run();
        let (events, _) = read(&mut first);
        assert_eq!(events[0].cached_tokens, Some(0), "the first never ran: its caller was gone before");
        let (events, _) = read(&mut second);
        assert_eq!(events[0].cached_tokens, Some(48));
        assert!(events[1..].iter().all(|event| event.cached_tokens.is_none()));
        assert_eq!(ids(&events), mock.expected_output(&prompt, &tokens(3), 2048));
        assert_eq!(rig.metric("prefix_cache_queries_total"), 100.0);
        assert_eq!(rig.metric("prefix_cache_hits_total"), 48.0);
        assert_eq!(rig.metric("prompt_tokens_cached_total"), 48.0);
        assert_eq!(rig.metric("iteration_tokens_total_sum"), 50.0 + 3.0 + 2.0 + 3.0);
        assert_eq!(rig.metric(r#"request_success_total{finished_reason="abort"}"#), 1.0);
    });
}

#[test]
fn preempted_requests_come_back_with_the_same_tokens() {
    both_depths(|mock| {
        for enable_prefix_caching in [true, false] {
            let mock = MockConfig { block_size: 4, blocks: 17, ..mock.clone() };
            let config = EngineConfig { max_model_len: 64, enable_prefix_caching, ..EngineConfig::default() };
            let mut rig = Rig::new(mock.clone(), config);
            let prompts = [1, 2, 3].map(|family| (0..15).map(|i| family * 100 + i).collect::<Vec<u32>>());
            let mut streams = prompts.clone().map(|prompt| rig.submit(&prompt, &tokens(30)));
            rig.run();
            for (stream, prompt) in streams.iter_mut().zip(&prompts) {
                let (events, ended) = read(stream);
                assert!(ended);
                assert_eq!(ids(&events), mock.expected_output(prompt, &tokens(30), 64));
            }
            assert!(rig.metric("num_preemptions_total") > 0.0);
            assert_eq!(rig.metric("request_num_preemptions_sum"), rig.metric("num_preemptions_total"));
            let queries = if enable_prefix_caching { 45.0 } else { 0.0 };
            assert_eq!(rig.metric("prefix_cache_queries_total"), queries, "coming back is no new lookup");
            assert_eq!(rig.metric("prompt_tokens_total"), 45.0);
            assert_eq!(rig.metric("time_to_first_token_seconds_count"), 3.0);
        }
    });
}

#[test]
fn a_dropped_stream_frees_its_blocks_while_its_step_is_in_flight() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock.clone(), EngineConfig::default());
        let prompt: Vec<u32> = (0..40).collect();
        let gone = rig.submit(&prompt, &tokens(100));
        let mut other = rig.submit(&[7; 5], &tokens(20));
        rig.manual.turn();
        rig.manual.turn();
        assert_eq!(rig.manual.engine.scheduler.kv().used(), 4);
        drop(gone);
        rig.manual.turn();
        assert_eq!(rig.manual.engine.scheduler.kv().used(), 1);
        rig.run();
        assert_eq!(ids(&read(&mut other).0), mock.expected_output(&[7; 5], &tokens(20), 2048));
        assert_eq!(rig.metric(r#"request_success_total{finished_reason="abort"}"#), 1.0);
        assert_eq!(rig.metric(r#"request_success_total{finished_reason="length"}"#), 1.0);
    });
}

#[test]
fn finishing_a_stream_counts_as_stop() {
    let mut rig = Rig::new(MockConfig::default(), EngineConfig::default());
    let stream = rig.submit(&[1, 2], &tokens(100));
    rig.manual.turn();
    rig.manual.turn();
    stream.finish();
    rig.run();
    assert_eq!(rig.metric(r#"request_success_total{finished_reason="stop"}"#), 1.0);
    assert_eq!(rig.metric(r#"request_success_total{finished_reason="abort"}"#), 0.0);
    assert!(rig.metric("generation_tokens_total") < 3.0);
}

#[test]
fn a_failed_step_ends_its_requests_and_no_others() {
    for at in [FailurePoint::Submit, FailurePoint::Sample, FailurePoint::Wait] {
        both_depths(|mock| {
            let mock = MockConfig { failures: vec![MockFailure { step: 3, at, fatal: false }], ..mock };
            let mut rig = Rig::new(mock.clone(), EngineConfig { max_num_seqs: 2, ..EngineConfig::default() });
            let mut streams: Vec<_> = [10, 20, 30].iter().map(|&t| (t, rig.submit(&[t, t + 1], &tokens(8)))).collect();
            rig.run();
            for (first, stream) in &mut streams {
                let expected = mock.expected_output(&[*first, *first + 1], &tokens(8), 2048);
                let (events, ended) = read(stream);
                assert!(ended);
                let ids = ids(&events);
                match events.last().unwrap().finish.as_ref().unwrap() {
                    FinishReason::Error(message) if *first < 30 => {
                        assert!(message.contains("told to fail"));
                        assert_eq!(ids, expected[..ids.len()]);
                        assert!(ids.len() <= 2);
                    }
                    FinishReason::Length if *first == 30 => assert_eq!(ids, expected),
                    other => panic!("request {first}: {other:?} at {at:?}"),
                }
            }
            assert_eq!(rig.metric(r#"request_success_total{finished_reason="error"}"#), 2.0);
        });
    }
}

#[test]
fn a_fatal_failure_ends_everything() {
    both_depths(|mock| {
        let failure = MockFailure { step: 2, at: FailurePoint::Wait, fatal: true };
        let mut rig = Rig::new(
            MockConfig { failures: vec![failure], ..mock },
            EngineConfig { max_num_seqs: 1, ..EngineConfig::default() },
        );
        let mut streams = [rig.submit(&[1], &tokens(9)), rig.submit(&[2], &tokens(9))];
        let exit = loop {
            match rig.manual.engine.turn() {
                Turn::Over(exit) => break exit,
                turn => assert_eq!(turn, Turn::Again),
            }
        };
        assert_eq!(exit, Exit::Failed);
        for stream in &mut streams {
            let (events, ended) = read(stream);
            assert!(ended && matches!(events.last().unwrap().finish, Some(FinishReason::Error(_))));
        }
        assert_eq!(rig.manual.shared.inbox.queued_requests(), 0);
    });
}

/// Allows token `t` at output position `p` if `t % 5 == p % 5`, and checks that positions are requested in order.
struct FifthAfterFifth {
    accepted: u32,
    reject_at: Option<u32>,
    /// Position at which nothing is allowed.
    stuck_at: Option<u32>,
}

impl Constraint for FifthAfterFifth {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(0);
        if self.stuck_at == Some(self.accepted) {
            return;
        }
        for id in (self.accepted % 5..1000).step_by(5) {
            mask[id as usize / 32] |= 1 << (id % 32);
        }
    }

    fn accept(&mut self, token: u32) -> bool {
        if [self.reject_at, self.stuck_at].contains(&Some(self.accepted)) {
            return false;
        }
        assert_eq!(token % 5, self.accepted % 5);
        self.accepted += 1;
        true
    }

    fn rollback(&mut self, tokens: usize) {
        self.accepted -= tokens as u32;
    }
}

#[test]
fn constrained_requests_draw_under_their_masks() {
    both_depths(|mock| {
        let mock = MockConfig { block_size: 4, blocks: 17, ..mock };
        let mut rig = Rig::new(mock.clone(), EngineConfig { max_model_len: 64, ..EngineConfig::default() });
        let mut plain = rig.submit(&[1; 12], &tokens(30));
        let mut constrained: Vec<_> = (2..4)
            .map(|first| {
                let constraint = Box::new(FifthAfterFifth { accepted: 0, reject_at: None, stuck_at: None });
                let request = Request { constraint: Some(constraint), ..request(&[first; 12], &tokens(30)) };
                rig.manual.submit(request).unwrap()
            })
            .collect();
        rig.run();
        assert!(rig.metric("num_preemptions_total") > 0.0, "the masks survive preemption");
        assert_eq!(ids(&read(&mut plain).0), mock.expected_output(&[1; 12], &tokens(30), 64));
        for stream in &mut constrained {
            let (events, ended) = read(stream);
            assert!(ended);
            let ids = ids(&events);
            assert_eq!(ids.len(), 30);
            assert!(ids.iter().enumerate().all(|(position, id)| *id as usize % 5 == position % 5));
        }
    });
}

#[test]
fn a_rejected_token_ends_the_request_with_an_error() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock, EngineConfig::default());
        let constraint = Box::new(FifthAfterFifth { accepted: 0, reject_at: Some(4), stuck_at: None });
        let request = Request { constraint: Some(constraint), ..request(&[1], &tokens(30)) };
        let mut stream = rig.manual.submit(request).unwrap();
        rig.run();
        let (events, ended) = read(&mut stream);
        assert!(ended && ids(&events).len() == 4);
        assert!(matches!(&events.last().unwrap().finish, Some(FinishReason::Error(m)) if m.contains("grammar")));
    });
}

#[test]
fn a_constraint_that_allows_nothing_ends_the_request_as_unsatisfiable() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock, EngineConfig::default());
        let constraint = Box::new(FifthAfterFifth { accepted: 0, reject_at: None, stuck_at: Some(4) });
        let request = Request { constraint: Some(constraint), ..request(&[1], &tokens(30)) };
        let mut stream = rig.manual.submit(request).unwrap();
        rig.run();
        let (events, ended) = read(&mut stream);
        assert!(ended && ids(&events).len() == 4);
        assert_eq!(events.last().unwrap().finish, Some(FinishReason::Unsatisfiable));
    });
}

#[test]
fn a_stop_ends_waiting_and_running_requests_as_abort() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock, EngineConfig { max_num_seqs: 1, ..EngineConfig::default() });
        let mut streams = [rig.submit(&[1], &tokens(50)), rig.submit(&[2], &tokens(50))];
        rig.manual.turn();
        rig.manual.turn();
        rig.manual.shared.inbox.stop();
        assert_eq!(rig.manual.engine.turn(), Turn::Over(Exit::Stopped));
        for stream in &mut streams {
            let (events, ended) = read(stream);
            assert!(ended);
            assert_eq!(events.last().unwrap().finish, Some(FinishReason::Abort));
        }
        let refused = rig.manual.submit(request(&[1], &tokens(1)));
        assert_eq!(refused.unwrap_err(), crate::SubmitError::Stopped);
    });
}

fn scored(alternatives: u32, max_tokens: u32) -> SamplingParams {
    SamplingParams { prompt_logprobs: Some(alternatives), ..tokens(max_tokens) }
}

#[test]
fn a_prompt_is_scored_in_chunks_and_delivered_with_the_first_event() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock.clone(), EngineConfig::default());
        let prompt: Vec<u32> = (0..200).map(|i| i * 7 % 900).collect();
        drop(rig.submit(&prompt, &tokens(1)));
        let mut first = rig.submit(&prompt, &tokens(1));
        rig.run();
        let mut stream = rig.submit(&prompt, &scored(2, 3));
        let mut turns = 0;
        while rig.manual.turn() {
            turns += 1;
        }
        assert!(turns >= 4, "199 rows, 64 a step");
        let (events, ended) = read(&mut stream);
        assert!(ended && read(&mut first).1);
        assert_eq!(events[0].prompt_logprobs, mock.expected_prompt_logprobs(&prompt, 2));
        assert_eq!(events[0].cached_tokens, Some(0), "the prefix cache is not looked up");
        assert!(events[1..].iter().all(|event| event.prompt_logprobs.is_empty()));
        assert_eq!(ids(&events), mock.expected_output(&prompt, &tokens(3), 2048));
        assert_eq!(rig.metric("prefix_cache_queries_total"), 200.0, "nor counted");
        let mut last = rig.submit(&prompt, &tokens(1));
        rig.run();
        assert_eq!(read(&mut last).0[0].cached_tokens, Some(192), "what was scored is stored");
    });
}

#[test]
fn a_prompt_that_is_only_scored_ends_by_length_without_a_token() {
    both_depths(|mock| {
        let mut rig = Rig::new(mock.clone(), EngineConfig { max_model_len: 100, ..EngineConfig::default() });
        for length in [1, 2, 63, 64, 65, 66, 99, 100] {
            let prompt: Vec<u32> = (0..length).map(|i| i * 7 % 900).collect();
            let mut stream = rig.submit(&prompt, &scored(1, 0));
            rig.run();
            let (events, ended) = read(&mut stream);
            assert!(ended && events.len() == 1);
            assert_eq!(events[0].finish, Some(FinishReason::Length));
            assert_eq!((events[0].cached_tokens, events[0].tokens.len()), (Some(0), 0));
            assert_eq!(events[0].prompt_logprobs, mock.expected_prompt_logprobs(&prompt, 1));
        }
        assert_eq!(rig.metric("generation_tokens_total"), 0.0);
        assert_eq!(rig.metric("prompt_tokens_total"), 460.0);
        assert_eq!(rig.metric("time_to_first_token_seconds_count"), 8.0);
        assert_eq!(rig.metric(r#"request_success_total{finished_reason="length"}"#), 8.0);
        assert!(rig.manual.submit(request(&[1; 101], &scored(1, 0))).is_err());
        assert!(rig.manual.submit(request(&[1; 100], &scored(1, 1))).is_err(), "a token more does not fit");
    });
}

#[test]
fn preempted_prompts_are_scored_once() {
    both_depths(|mock| {
        for enable_prefix_caching in [true, false] {
            let mock = MockConfig { block_size: 4, blocks: 17, ..mock.clone() };
            let config = EngineConfig {
                max_model_len: 64,
                max_num_batched_tokens: 10,
                enable_prefix_caching,
                ..EngineConfig::default()
            };
            let mut rig = Rig::new(mock.clone(), config);
            let prompts = [1, 2, 3].map(|family| (0..24).map(|i| family * 100 + i).collect::<Vec<u32>>());
            let mut streams = prompts.clone().map(|prompt| rig.submit(&prompt, &scored(1, 30)));
            rig.run();
            assert!(rig.metric("num_preemptions_total") > 0.0);
            for (stream, prompt) in streams.iter_mut().zip(&prompts) {
                let (events, ended) = read(stream);
                assert!(ended);
                assert_eq!(events[0].prompt_logprobs, mock.expected_prompt_logprobs(prompt, 1));
                assert_eq!(ids(&events), mock.expected_output(prompt, &tokens(30), 64));
            }
        }
    });
}

#[test]
fn an_embedding_ends_by_stop_without_a_token() {
    both_depths(|mock| {
        let config = EngineConfig { max_model_len: 64, max_num_batched_tokens: 24, ..EngineConfig::default() };
        let mut rig = Rig::new(mock.clone(), config);
        let long: Vec<u32> = (0..64).collect();
        let embed = |rig: &Rig, prompt: &[u32]| {
            // Sampling parameters of an embedding request have no effect.
            let request = Request { task: Task::Embed(Pooling::Prompt), ..request(prompt, &scored(1, 5)) };
            rig.manual.submit(request).unwrap()
        };
        let mut generating = rig.submit(&[7; 5], &tokens(20));
        let mut streams = [embed(&rig, &long), embed(&rig, &long[..9]), embed(&rig, &[3])];
        rig.run();
        let mut again = embed(&rig, &long);
        rig.run();
        let prompts = [&long[..], &long[..9], &[3], &long[..]];
        for (stream, prompt) in streams.iter_mut().chain([&mut again]).zip(prompts) {
            let (events, ended) = read(stream);
            assert!(ended && events.len() == 1);
            let event = &events[0];
            assert_eq!(event.embedding, Some(mock.expected_embedding(prompt)));
            assert_eq!(event.finish, Some(FinishReason::Stop { token: None }));
            assert!(event.tokens.is_empty() && event.prompt_logprobs.is_empty() && event.cached_tokens.is_some());
        }
        assert_eq!(ids(&read(&mut generating).0), mock.expected_output(&[7; 5], &tokens(20), 64));
        assert_eq!(rig.metric("prompt_tokens_cached_total"), 48.0, "three whole blocks of the last");
        assert_eq!(rig.metric("generation_tokens_total"), 20.0);
        assert_eq!(rig.metric("prompt_tokens_total"), 5.0 + 64.0 + 9.0 + 1.0 + 64.0);
        assert_eq!(rig.metric("time_to_first_token_seconds_count"), 5.0);
        assert_eq!(rig.metric("request_decode_time_seconds_count"), 5.0);
        assert_eq!(rig.metric(r#"request_success_total{finished_reason="stop"}"#), 4.0);
    });
}

#[test]
fn a_request_that_repeats_itself_ends() {
    both_depths(|mock| {
        let mock = MockConfig { script: Some([5, 6, 7].into()), ..mock };
        let mut rig = Rig::new(mock, EngineConfig::default());
        let rule = |min_count| RepetitionDetection { max_pattern_size: 8, min_pattern_size: 2, min_count };
        let repeats = |rig: &Rig, min_count, min_tokens, max_tokens| {
            let repetition_detection = Some(rule(min_count));
            rig.submit(&[1, 2], &SamplingParams { repetition_detection, min_tokens, ..tokens(max_tokens) })
        };
        let mut streams =
            [repeats(&rig, 3, 0, 50), repeats(&rig, 3, 11, 50), repeats(&rig, 3, 0, 9), rig.submit(&[1], &tokens(50))];
        rig.run();
        let expected = [
            (9, FinishReason::Repetition),
            (11, FinishReason::Repetition),
            (9, FinishReason::Length),
            (50, FinishReason::Length),
        ];
        for (stream, (count, reason)) in streams.iter_mut().zip(expected) {
            let (events, ended) = read(stream);
            assert!(ended);
            assert_eq!((ids(&events).len(), events.last().unwrap().finish.clone()), (count, Some(reason)));
        }
        assert_eq!(rig.metric(r#"request_success_total{finished_reason="repetition"}"#), 2.0);
    });
}
