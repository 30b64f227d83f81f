//! Tests of the simulated executor on a tiny program.

use super::*;
use octavo_engine::{InputToken, PlannedRow, PlannedSequence};
use octavo_ops::cost::step_cost;
use octavo_ops::testing::TinyModel;
use proptest::prelude::*;

const VOCAB: usize = 1000;

fn program() -> Arc<Program> {
    let (program, _) = TinyModel { vocab_size: VOCAB, ..TinyModel::default() }.build().unwrap();
    Arc::new(program)
}

fn executor(config: SimulatorConfig) -> SimulatedExecutor {
    SimulatedExecutor::new(program(), Device::L40S, config).unwrap()
}

fn virtual_time() -> SimulatorConfig {
    SimulatorConfig { clock: Clock::Virtual, blocks: Some(100), ..SimulatorConfig::default() }
}

/// Appends `tokens` tokens of a sequence, after the last of which a token is drawn if `draws`.
fn add(plan: &mut StepPlan, seat: u32, first_position: u32, tokens: usize, draws: bool) {
    let (start, sequence) = (plan.tokens.len(), plan.sequences.len() as u32);
    if draws {
        let position = first_position + tokens as u32 - 1;
        plan.rows.push(PlannedRow { sequence, position, kind: RowKind::Draw });
    }
    plan.tokens.extend(std::iter::repeat_n(InputToken::Id(1), tokens));
    plan.sequences.push(PlannedSequence {
        seat,
        tokens: start..start + tokens,
        first_position,
        ..PlannedSequence::default()
    });
}

fn run(executor: &mut SimulatedExecutor, plan: StepPlan) -> Vec<u32> {
    let step = plan.step;
    executor.submit(plan).unwrap();
    executor.sample(step, StepMasks::default()).unwrap();
    executor.wait().unwrap().tokens.iter().map(|token| token.id).collect()
}

#[test]
fn tokens_depend_on_prompt_seed_and_position_alone() {
    let params = SamplingParams { seed: 7, ..SamplingParams::default() };
    let mut alone = executor(virtual_time());
    let mut expected = Vec::new();
    for step in 0..4 {
        let mut plan = StepPlan { step, ..StepPlan::default() };
        if step == 0 {
            plan.joined.push(Joined::new(0, [1, 2, 3], params.clone()));
        }
        add(&mut plan, 0, 2 + step as u32, 1, true);
        expected.extend(run(&mut alone, plan));
    }

    // Another seat, in company, in two chunks, and resumed half way.
    let mut batch = executor(virtual_time());
    let mut found: Vec<u32> = Vec::new();
    for step in 0..5 {
        let mut plan = StepPlan { step, ..StepPlan::default() };
        if step == 0 || step == 3 {
            plan.joined.push(Joined::new(9, [1, 2, 3], params.clone()));
            plan.joined.push(Joined::new(5, [1, 2, 4], params.clone()));
        }
        add(&mut plan, 5, 10, 2, true);
        add(&mut plan, 9, step as u32, 2, step > 0);
        found.extend(run(&mut batch, plan).get(1));
    }
    assert_eq!(found, expected);
    assert!(expected.iter().all(|&id| (id as usize) < VOCAB));
    assert!(expected.windows(2).any(|pair| pair[0] != pair[1]));
}

/// Time of a step on a device without overhead, from the bytes and operations of each op.
fn bound(shape: &StepShape, device: &Device) -> f64 {
    let program = program();
    let costs = program.ops.iter().map(|op| op_cost(&program, op, shape, ElementBytes::HALF));
    costs.map(|cost| (cost.bytes() as f64 / device.bandwidth).max(cost.flops as f64 / device.peak_flops)).sum()
}

#[test]
fn a_step_takes_the_bounds_of_its_ops_and_the_overhead() {
    // All bytes take as long as all operations, but no op has as many of the one as of the other.
    let whole = step_cost(&program(), &StepShape::prefill(64), ElementBytes::HALF);
    let peak_flops = Device::L40S.bandwidth * whole.flops as f64 / whole.bytes() as f64;
    let device = Device { peak_flops, ..Device::L40S };
    let mut executor = SimulatedExecutor::new(program(), device.clone(), virtual_time()).unwrap();
    let mut plan =
        StepPlan { step: 1, joined: vec![Joined::new(0, [1; 64], SamplingParams::default())], ..Default::default() };
    add(&mut plan, 0, 0, 64, true);
    run(&mut executor, plan);
    let seconds = bound(&StepShape::prefill(64), &device);
    assert_eq!(executor.time().elapsed(), device.step_overhead + Duration::from_secs_f64(seconds));
    let hidden = whole.roofline_seconds(device.bandwidth, device.peak_flops);
    assert!(seconds > 1.05 * hidden, "{seconds} s, {hidden} s if one kind of op hid the other");
}

#[test]
fn two_steps_in_flight_keep_the_device_busy() {
    let mut executor = executor(virtual_time());
    for step in 1..=2 {
        let mut plan = StepPlan { step, ..StepPlan::default() };
        plan.joined.push(Joined::new(0, [1], SamplingParams::default()));
        add(&mut plan, 0, 0, 1, true);
        executor.submit(plan).unwrap();
        executor.sample(step, StepMasks::default()).unwrap();
    }
    assert!(executor.submit(StepPlan { step: 3, ..StepPlan::default() }).unwrap_err().fatal);
    assert_eq!(executor.wait().unwrap().plan.step, 1);
    let one = executor.time().elapsed();
    assert_eq!(executor.wait().unwrap().plan.step, 2);
    assert_eq!(executor.time().elapsed(), 2 * one);
    assert!(executor.wait().is_err());
}

#[test]
fn real_time_takes_at_least_the_simulated_time() {
    let slow = Device { step_overhead: Duration::from_millis(40), ..Device::L40S };
    let config =
        SimulatorConfig { clock: Clock::Real { speed_up: 4.0 }, blocks: Some(10), ..SimulatorConfig::default() };
    let mut executor = SimulatedExecutor::new(program(), slow, config).unwrap();
    let started = Instant::now();
    let mut plan =
        StepPlan { step: 1, joined: vec![Joined::new(0, [1], SamplingParams::default())], ..Default::default() };
    add(&mut plan, 0, 0, 1, true);
    run(&mut executor, plan);
    assert!(started.elapsed() >= Duration::from_millis(10));
}

#[test]
fn masks_and_ends_are_respected() {
    let mut executor = executor(virtual_time());
    let params = SamplingParams { eos_token_ids: vec![5], logprobs: Some(3), ..SamplingParams::default() };
    let mut plan = StepPlan { step: 1, joined: vec![Joined::new(0, [1], params)], ..StepPlan::default() };
    add(&mut plan, 0, 0, 1, true);
    plan.joined[0].constrained = true;
    executor.submit(plan).unwrap();
    let mut mask = vec![0u32; VOCAB.div_ceil(32)];
    mask[0] = 1 << 5 | 1 << 9;
    executor.sample(1, StepMasks { rows: vec![mask] }).unwrap();
    let output = executor.wait().unwrap();
    assert_eq!(output.tokens[0].id, 9);
    let logprobs = output.tokens[0].logprobs.as_ref().unwrap();
    assert_eq!((logprobs.rank, logprobs.top.len(), logprobs.top[0]), (1, 3, (9, logprobs.logprob)));
}

#[test]
fn the_cache_fills_what_the_weights_leave() {
    let small = Device { memory_bytes: 1_000_000, ..Device::L40S };
    let config = SimulatorConfig { blocks: None, ..virtual_time() };
    let executor = SimulatedExecutor::new(program(), small.clone(), config.clone()).unwrap();
    let spec = executor.kv_cache_spec();
    assert_eq!(spec.block_bytes, 2 * 16 * 2 * (2 * 8) * 2, "layers, tokens, k and v, columns, bytes");
    assert_eq!(spec.blocks as u64, (1_000_000 - program().weight_bytes()) / spec.block_bytes);
    let tiny = Device { memory_bytes: 1000, ..small };
    let error = SimulatedExecutor::new(program(), tiny, config).err().unwrap();
    assert!(error.to_string().contains("nothing is left for the KV cache"), "{error}");
}

#[test]
fn impossible_settings_are_refused() {
    for config in [
        SimulatorConfig { clock: Clock::Real { speed_up: 0.0 }, ..virtual_time() },
        SimulatorConfig { clock: Clock::Real { speed_up: f64::NAN }, ..virtual_time() },
        SimulatorConfig { max_in_flight: 3, ..virtual_time() },
        SimulatorConfig { block_size: 0, ..virtual_time() },
    ] {
        assert!(SimulatedExecutor::new(program(), Device::L40S, config).is_err());
    }
}

proptest! {
    #[test]
    fn time_is_the_sum_over_the_steps(steps in prop::collection::vec((1usize..64, 0u32..512), 1..20)) {
        let mut executor = executor(virtual_time());
        let mut expected = Duration::ZERO;
        for (step, &(tokens, position)) in steps.iter().enumerate() {
            let mut plan = StepPlan { step: step as u64, ..StepPlan::default() };
            plan.joined.push(Joined::new(3, [1], SamplingParams::default()));
            add(&mut plan, 3, position, tokens, true);
            run(&mut executor, plan);
            let sequences = vec![(tokens, position as usize + tokens)];
            let shape = StepShape { tokens, sampled: 1, sequences, ..StepShape::default() };
            expected += Device::L40S.step_overhead + Duration::from_secs_f64(bound(&shape, &Device::L40S));
            prop_assert_eq!(executor.time().elapsed(), expected);
        }
    }
}
