//! Tests of steps that are submitted before the tokens of earlier steps are known.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use octavo_engine::{Executor, InputToken, Joined, SamplingParams, StepMasks, StepPlan};
use octavo_ops::StepBatch;
use octavo_runner::{Runner, RunnerConfig};
use octavo_telemetry::{Telemetry, TelemetryConfig};

use crate::fake::{CONFIG, FakeBackend, Fate, Log, backend, decode, ids, prefill, program, push, start};

/// Returns a step of the sequences in seats 1 and 2, and the next one in another order, whose tokens are not known yet.
fn two_steps(params: &SamplingParams) -> [StepPlan; 2] {
    let mut first = prefill(1, params.clone());
    first.joined.push(Joined::new(2, [5], params.clone()));
    push(&mut first, 2, 0, &[InputToken::Id(5)], true);
    let mut second = StepPlan { step: 2, ..StepPlan::default() };
    push(&mut second, 2, 1, &[InputToken::Drawn { row: 1 }], true);
    push(&mut second, 1, 3, &[InputToken::Drawn { row: 0 }], true);
    [first, second]
}

#[test]
fn tokens_that_the_engine_has_not_seen_are_filled_in() {
    let config = RunnerConfig { async_scheduling: Some(true), ..CONFIG };
    let backend = backend(&[]);
    let log = backend.log.clone();
    let mut runner = Runner::new(Box::new(backend), program(), config).unwrap();
    assert_eq!(runner.max_in_flight(), 2);
    let [first, second] = two_steps(&SamplingParams::default());
    runner.submit(first).unwrap();
    runner.sample(1, StepMasks::default()).unwrap();
    runner.submit(second).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [10, 11]);
    runner.sample(2, StepMasks::default()).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [20, 21]);
    assert_eq!(log.lock().unwrap().batches[1].token_ids, [11, 10]);
}

/// Tokens or error of each step.
type Results = Vec<Result<Vec<u32>, String>>;

/// Runs two steps, the second submitted as early as possible.
fn run_ahead(backend: FakeBackend, params: &SamplingParams) -> (Results, Arc<Mutex<Log>>) {
    let (mut runner, log) = start(FakeBackend { in_flight: 2, ..backend });
    assert_eq!(runner.max_in_flight(), 2);
    let [first, second] = two_steps(params);
    runner.submit(first).unwrap();
    runner.sample(1, StepMasks::default()).unwrap();
    runner.submit(second).unwrap();
    runner.sample(2, StepMasks::default()).unwrap();
    let results = (0..2).map(|_| match runner.wait() {
        Ok(output) => Ok(ids(&output)),
        Err(error) => Err(format!("{} {error}", if error.fatal { "fatal" } else { "lost" })),
    });
    (results.collect(), log)
}

#[test]
fn a_backend_that_launches_has_the_next_step_before_its_tokens_are_taken() {
    let (results, log) = run_ahead(backend(&[]), &SamplingParams::default());
    assert_eq!(results, [Ok(vec![10, 11]), Ok(vec![20, 21])]);
    let log = log.lock().unwrap();
    assert_eq!(log.batches[1].token_ids, [StepBatch::drawn(1), StepBatch::drawn(0)]);
    let calls = [("forward", 1), ("start", 1), ("forward", 2), ("start", 2), ("take", 1), ("take", 2)];
    assert_eq!(log.calls, calls);
}

#[test]
fn a_step_with_penalties_does_not_wait_for_the_tokens_of_the_step_before() {
    let params = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::default() };
    let (results, log) = run_ahead(backend(&[]), &params);
    assert_eq!(results, [Ok(vec![10, 11]), Ok(vec![20, 21])]);
    let log = log.lock().unwrap();
    let calls = [("forward", 1), ("start", 1), ("forward", 2), ("start", 2), ("take", 1), ("take", 2)];
    assert_eq!(log.calls, calls);
    let counted = log.rows[1].iter().map(|row| (row.counts.clone().unwrap().output, row.pending));
    assert_eq!(counted.collect::<Vec<_>>(), [(vec![], Some(1)), (vec![], Some(0))]);
    // Without penalties there is nothing to count.
    let (_, log) = run_ahead(backend(&[]), &SamplingParams::default());
    assert!(log.lock().unwrap().rows[1].iter().all(|row| row.counts.is_none() && row.pending.is_none()));
}

#[test]
fn a_token_that_is_known_is_counted_once() {
    let (mut runner, log) = start(FakeBackend { in_flight: 2, ..backend(&[]) });
    let params = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::default() };
    let [first, second] = two_steps(&params);
    runner.submit(first).unwrap();
    runner.sample(1, StepMasks::default()).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [10, 11]);
    runner.submit(second).unwrap();
    runner.sample(2, StepMasks::default()).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [20, 21]);
    let log = log.lock().unwrap();
    let counted = log.rows[1].iter().map(|row| (row.counts.clone().unwrap().output, row.pending));
    assert_eq!(counted.collect::<Vec<_>>(), [(vec![(11, 1)], None), (vec![(10, 1)], None)]);
}

#[test]
fn a_token_counts_for_whom_it_was_drawn() {
    let (mut runner, log) = start(FakeBackend { in_flight: 2, ..backend(&[]) });
    let params = SamplingParams { frequency_penalty: 1.0, ..SamplingParams::default() };
    runner.submit(prefill(1, params.clone())).unwrap();
    runner.sample(1, StepMasks::default()).unwrap();
    // Another sequence takes the seat while the first one's token is in flight.
    runner.submit(prefill(2, params)).unwrap();
    runner.sample(2, StepMasks::default()).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [10]);
    assert_eq!(ids(&runner.wait().unwrap()), [20]);
    let log = log.lock().unwrap();
    assert_eq!((&log.rows[1][0].counts.as_ref().unwrap().output[..], log.rows[1][0].pending), (&[][..], None));
}

#[test]
fn a_failure_is_told_to_those_who_wait_for_its_step() {
    let told = "the fake backend failed: told to";
    let not_drawn = "step 2 is malformed: row 1 of the step before was not drawn";
    let (lost, gone) =
        (|reason: &str| Err(format!("lost {reason}")), "fatal the fake backend lost its device: told to");
    let second = || Ok(vec![20, 21]);
    for (fate, expected) in [
        (Fate::ForwardFails, [lost(told), lost(not_drawn)]),
        (Fate::SampleFails, [lost(told), lost(not_drawn)]),
        (Fate::TakeFails, [lost(told), second()]),
        (Fate::DeviceIsLost, [Err(gone.into()), Err("fatal the device thread has ended".into())]),
        (Fate::TakeLosesTheDevice, [Err(gone.into()), Err("fatal the device thread has ended".into())]),
    ] {
        let (results, _) = run_ahead(backend(&[fate]), &SamplingParams::default());
        assert_eq!(results, expected);
    }
}

/// Runs a step whose chunk of a prompt draws nothing, and one that draws. The engine fills masks and asks late. Returns the
/// number of steps and the time for which the device was busy.
fn busy(backend: FakeBackend) -> (f64, f64) {
    let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 8 });
    let register = |device: &_| telemetry.device(device);
    let mut runner = Runner::observed(Box::new(backend), program(), CONFIG, None, register).unwrap();
    let mut plan = prefill(1, SamplingParams::default());
    plan.rows.clear();
    for plan in [plan, decode(2, 3, InputToken::Id(10))] {
        let step = plan.step;
        runner.submit(plan).unwrap();
        std::thread::sleep(LATE);
        runner.sample(step, StepMasks::default()).unwrap();
        std::thread::sleep(LATE);
        runner.wait().unwrap();
    }
    let text = telemetry.render();
    let value = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    (value("octavo_step_busy_seconds_count"), value("octavo_step_busy_seconds_sum"))
}

/// Much longer than the calls of the fake backend take.
const LATE: Duration = Duration::from_millis(300);

#[test]
fn an_engine_that_asks_late_does_not_make_the_device_busy() {
    let (steps, seconds) = busy(backend(&[]));
    assert!(steps == 2.0 && (1e-9..LATE.as_secs_f64()).contains(&seconds), "the calls took {seconds} s");
    let measured = FakeBackend { in_flight: 2, step_time: Some(Duration::from_millis(7)), ..backend(&[]) };
    let (steps, seconds) = busy(measured);
    assert!(steps == 2.0 && (seconds - 0.014).abs() < 1e-9, "the backend has measured {seconds} s");
}

#[test]
fn the_engine_waits_for_a_step_that_draws_nothing() {
    let (mut runner, log) = start(FakeBackend { in_flight: 2, ..backend(&[]) });
    let mut plan = prefill(1, SamplingParams::default());
    plan.rows.clear();
    runner.submit(plan).unwrap();
    runner.sample(1, StepMasks::default()).unwrap();
    assert_eq!(ids(&runner.wait().unwrap()), [0u32; 0]);
    assert_eq!(log.lock().unwrap().calls, [("forward", 1), ("start", 1), ("take", 1)]);
}
