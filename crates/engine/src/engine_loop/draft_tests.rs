//! Tests of speculation: drafts change no token.

use octavo_telemetry::{Telemetry, TelemetryConfig};

use super::tests::{ids, read, request, tokens};
use super::*;
use crate::constraint::Anything;
use crate::internals::ManualEngine;
use crate::mock::{MockConfig, MockExecutor};
use crate::{Constraint, KvKind, Request, RequestEvent, SamplingParams, Speculation};

const SPECULATION: Speculation = Speculation { tokens: 4, lookup_min: 1, lookup_max: 3 };

fn config(speculation: Option<Speculation>) -> EngineConfig {
    EngineConfig { max_model_len: 200, speculation, ..EngineConfig::default() }
}

/// Results of an engine: the events of each request, the number of steps, and the drafts with those accepted.
struct Outcome {
    events: Vec<Vec<RequestEvent>>,
    steps: u64,
    drafts: (f64, f64),
}

fn run(mock: &MockConfig, config: EngineConfig, requests: &[(Vec<u32>, SamplingParams)]) -> Outcome {
    let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 200 });
    let executor = MockExecutor::new(mock.clone());
    let counters = executor.counters();
    let metrics = telemetry.speculating_engine(SPECULATION.tokens);
    let mut engine = ManualEngine::new(Box::new(executor), config, metrics).unwrap();
    let streams = requests.iter().map(|(prompt, params)| engine.submit(request(prompt, params)).unwrap());
    let mut streams: Vec<_> = streams.collect();
    while engine.turn() {}
    let text = telemetry.render();
    let count = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(&format!("vllm:spec_decode_num_{name}_total{{"))).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    let per_position: f64 = (0..SPECULATION.tokens)
        .map(|position| {
            let label = format!("position=\"{position}\"");
            let mut lines =
                text.lines().filter(|line| line.starts_with("vllm:spec_decode_num_accepted_tokens_per_pos"));
            lines.find(|line| line.contains(&label)).unwrap().rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
        })
        .sum();
    assert_eq!(per_position, count("accepted_tokens"));
    Outcome {
        events: streams.iter_mut().map(|stream| read(stream).0).collect(),
        steps: counters.steps(),
        drafts: (count("draft_tokens"), count("accepted_tokens")),
    }
}

fn requests() -> Vec<(Vec<u32>, SamplingParams)> {
    let params = |number: u64| SamplingParams {
        temperature: if number.is_multiple_of(2) { 0.0 } else { 1.0 },
        seed: number,
        logprobs: number.is_multiple_of(3).then_some(2),
        prompt_logprobs: (number % 5 == 4).then_some(1),
        min_tokens: 5,
        eos_token_ids: vec![3],
        stop_token_ids: vec![1].into(),
        ignore_eos: number.is_multiple_of(4),
        ..tokens(30 + number as u32)
    };
    (0..8).map(|number| (vec![number as u32, 7, 8, 7, 9, number as u32], params(number))).collect()
}

/// A mock with steps that take as long with drafts as without.
fn free_drafts() -> MockConfig {
    MockConfig { step_latency: Duration::from_micros(20), ..MockConfig::default() }
}

/// Mocks whose drafts are mostly accepted, and hardly ever.
fn mocks() -> Vec<MockConfig> {
    let small = MockConfig { block_size: 4, verify: true, ..free_drafts() };
    let script = Some([7, 8, 7, 9, 6].into());
    vec![
        MockConfig { script, ..small.clone() },
        MockConfig { tokens: 0..4, ..small.clone() },
        MockConfig { tokens: 0..40, kv_groups: vec![KvKind::Full, KvKind::Window(5)], max_in_flight: 2, ..small },
    ]
}

fn finishes(events: &[RequestEvent]) -> Option<&FinishReason> {
    events.iter().find_map(|event| event.finish.as_ref())
}

#[test]
fn drafts_change_no_token() {
    for mock in mocks() {
        for tight in [false, true] {
            let limits = |speculation| match tight {
                false => config(speculation),
                true => EngineConfig { max_num_batched_tokens: 11, max_num_seqs: 5, ..config(speculation) },
            };
            // Tight memory preempts sequences.
            let mock = MockConfig {
                blocks: if tight { 51 * mock.kv_groups.len() } else { 401 * mock.kv_groups.len() },
                ..mock.clone()
            };
            let plain = run(&mock, limits(None), &requests());
            let drafted = run(&mock, limits(Some(SPECULATION)), &requests());
            assert_eq!(plain.drafts, (0.0, 0.0));
            assert!(drafted.drafts.0 > 0.0, "{mock:?}");
            for ((prompt, params), (plain, drafted)) in requests().iter().zip(plain.events.iter().zip(&drafted.events))
            {
                let expected = mock.expected_output(prompt, params, 200);
                assert_eq!((ids(plain), ids(drafted)), (expected.clone(), expected));
                assert_eq!(finishes(plain), finishes(drafted));
                let tokens = |events: &[RequestEvent]| -> Vec<TokenOutput> {
                    events.iter().flat_map(|event| event.tokens.clone()).collect()
                };
                assert_eq!(tokens(plain), tokens(drafted), "with their log-probabilities");
            }
        }
    }
}

#[test]
fn accepted_drafts_save_steps_and_can_be_found_afterwards() {
    let mock = MockConfig { block_size: 4, script: Some([7, 8, 9].into()), verify: true, ..free_drafts() };
    let long = || vec![(vec![1, 2, 3, 4], tokens(60))];
    let plain = run(&mock, config(None), &long());
    let drafted = run(&mock, config(Some(SPECULATION)), &long());
    assert_eq!(plain.steps, 60);
    assert!(drafted.steps < 25, "{} steps", drafted.steps);
    assert!(drafted.drafts.1 > 0.9 * drafted.drafts.0, "{:?}", drafted.drafts);
    // Blocks with accepted drafts are in the prefix index.
    let mut prompt = vec![1, 2, 3, 4];
    prompt.extend(mock.expected_output(&prompt, &tokens(60), 200));
    let mut engine =
        ManualEngine::new(Box::new(MockExecutor::new(mock)), config(Some(SPECULATION)), EngineMetrics::disabled())
            .unwrap();
    for (prompt, cached) in [(&prompt[..4], 0), (&prompt[..], 60)] {
        let mut stream = engine.submit(request(prompt, &tokens(60))).unwrap();
        while engine.turn() {}
        assert_eq!(read(&mut stream).0[0].cached_tokens, Some(cached));
    }
}

#[test]
fn sequences_with_a_mask_draft_nothing() {
    let mock = MockConfig { script: Some([7].into()), ..free_drafts() };
    let executor = MockExecutor::new(mock);
    let counters = executor.counters();
    let mut engine =
        ManualEngine::new(Box::new(executor), config(Some(SPECULATION)), EngineMetrics::disabled()).unwrap();
    let constraint: Option<Box<dyn Constraint>> = Some(Box::new(Anything));
    let mut stream = engine.submit(Request { constraint, ..request(&[1, 2], &tokens(30)) }).unwrap();
    while engine.turn() {}
    assert_eq!((ids(&read(&mut stream).0).len(), counters.drawn_tokens()), (30, 30));
}

#[test]
fn drafts_rest_where_they_are_not_accepted_or_a_step_is_full() {
    // Every token follows every other, so that a draft is accepted one time in four.
    let mock = MockConfig { tokens: 0..4, token_latency: Duration::from_nanos(10), ..MockConfig::default() };
    let many = |count: u32| (0..count).map(|number| (vec![number, 1, 2], tokens(150))).collect::<Vec<_>>();
    let busy = run(&mock, config(Some(SPECULATION)), &many(40));
    let drafts = busy.drafts.0 / (40.0 * 150.0);
    assert!(drafts < 0.2, "{drafts} drafts a token, although a draft costs as much as a token");
}
