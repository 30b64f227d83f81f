//! What is asked of a backend, and what is told of it.

use octavo_ops::cost::Peaks;
use octavo_ops::sampling::SampledToken;
use octavo_ops::testing::TinyModel;
use octavo_ops::{DeviceProfile, KvGroup, WeightSource};

use super::*;

/// Takes its time, and notes what it was asked for.
#[derive(Default)]
struct Noting {
    /// Tokens, sequences and longest sequence of each step.
    steps: Vec<(usize, usize, u32)>,
    /// Blocks that were copied.
    copied: Vec<(u32, u32)>,
}

impl Backend for Noting {
    fn name(&self) -> &'static str {
        "noting"
    }

    fn block_sizes(&self) -> &[usize] {
        &[16]
    }

    fn kv_dtype(&self) -> &'static str {
        "float32"
    }

    fn kv_block_bytes(&self, _: &KvGroup, _: usize) -> u64 {
        1
    }

    fn load(&mut self, _: &Program, _: &dyn WeightSource, _: &mut dyn FnMut(u64)) -> Result<(), BackendError> {
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn allocate_kv(&mut self, _: usize, _: usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        self.steps.push((batch.tokens(), batch.sequences(), batch.seq_lens.iter().copied().max().unwrap_or(0)));
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    }

    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        assert!(!batch.rows.is_empty());
        Ok(())
    }

    fn take_tokens(&mut self, _: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        Ok(())
    }

    fn embeddings(&mut self, _: &mut Vec<f32>) -> Result<(), BackendError> {
        Ok(())
    }

    fn logits(&self) -> Result<Vec<f32>, BackendError> {
        Ok(Vec::new())
    }

    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        self.copied.extend(pairs);
        Ok(())
    }

    fn device_profile(&self) -> DeviceProfile {
        DeviceProfile { elements: ElementBytes::HALF, peaks: None, memory: None }
    }
}

fn config() -> RooflineConfig {
    RooflineConfig {
        batch_sizes: vec![1, 3],
        contexts: vec![40],
        prefill: vec![50],
        max_num_batched_tokens: 32,
        block_size: 16,
        min_time: Duration::ZERO,
    }
}

const PEAKS: Peaks = Peaks { bandwidth: 1e12, flops: 1e15 };

/// A device that reaches half of what its data sheet states.
fn bounds() -> Bounds {
    let half = Peaks { bandwidth: PEAKS.bandwidth / 2.0, flops: PEAKS.flops / 2.0 };
    Bounds { limits: Some(Limits { peaks: PEAKS, source: "data sheet" }), ceilings: Some(half) }
}

/// The times of every step.
fn measure(backend: &mut Noting, program: &Program, blocks: usize, bounds: &Bounds) -> Vec<StepTime> {
    let config = config();
    let mut bench = RooflineBench::new(backend, program, blocks, &config, bounds);
    config.steps().map(|step| bench.measure(step).unwrap()).collect()
}

#[test]
fn steps_are_repeated_on_keys_that_are_there() {
    let (program, _) = TinyModel::default().build().unwrap();
    let mut backend = Noting::default();
    let times = measure(&mut backend, &program, 10, &bounds());
    let expected = [
        Step::Decode { sequences: 1, context: 40 },
        Step::Decode { sequences: 3, context: 40 },
        Step::Prefill { tokens: 50 },
    ];
    assert_eq!(times.iter().map(|time| time.step).collect::<Vec<_>>(), expected);
    // A prompt of 40 in chunks of 32 fills the first sequence; the others get copies of its three blocks.
    assert_eq!(backend.steps[..3], [(32, 1, 32), (8, 1, 40), (1, 1, 40)]);
    assert_eq!(backend.copied, [(1, 4), (2, 5), (3, 6), (1, 7), (2, 8), (3, 9)]);
    let counts = |step: (usize, usize, u32)| backend.steps.iter().filter(|&&found| found == step).count();
    // Once without the clock, then as often as it must be.
    assert_eq!([counts((1, 1, 40)), counts((3, 3, 40)), counts((18, 1, 50))], [1 + FEWEST; 3]);
    for time in &times {
        let (median, least) = time.seconds.unwrap();
        assert!(least >= 1e-3 && median >= least, "{time:?}");
    }
    assert!(times[2].seconds.unwrap().1 >= 2e-3, "both chunks of the prompt");
    // The bound is that of the steps, each with its own weights.
    let shape =
        |tokens, context| StepShape { tokens, sampled: 1, sequences: vec![(tokens, context)], ..StepShape::default() };
    let parts = [shape(32, 32), shape(18, 50)].map(|shape| step_cost(&program, &shape, ElementBytes::HALF));
    assert_eq!(times[2].cost.flops, parts[0].flops + parts[1].flops);
    let bound = parts.iter().map(|cost| cost.bound_seconds(&PEAKS)).sum::<f64>();
    assert!((times[2].bound.limits.unwrap() / bound - 1.0).abs() < 1e-12);
    // The ceilings are half of the limits.
    assert!((times[2].bound.ceilings.unwrap() / bound - 2.0).abs() < 1e-12);
}

#[test]
fn what_does_not_fit_is_said_and_not_run() {
    let (program, _) = TinyModel::default().build().unwrap();
    let mut backend = Noting::default();
    let mut steps = measure(&mut backend, &program, 9, &Bounds::default());
    assert!(steps[1].seconds.is_none() && backend.steps.iter().all(|step| step.1 == 1));
    let last = steps.pop().unwrap();
    let bounds = Bounds::default();
    let mut report = RooflineReport { model: "m".into(), device: "d".into(), bounds, planned: 3, steps };
    assert_eq!(report.to_json()["complete"], false);
    report.steps.push(last);
    assert_eq!(report.to_json()["complete"], true);
    let text = report.to_string();
    assert!(text.starts_with("m on d\nlimits: unknown"), "{text}");
    assert!(text.contains("\ndecode 3 x 40: does not fit the KV cache\n"), "{text}");
    let json = report.to_json();
    assert_eq!(json["steps"][1]["error"], "it does not fit the KV cache");
    assert_eq!(
        (&json["limits"], &json["steps"][0]["bound_seconds"]),
        (&serde_json::Value::Null, &serde_json::Value::Null)
    );
}

#[test]
fn a_fraction_is_the_bound_over_the_time() {
    let cost = Cost { weight_bytes: 1_500_000_000, kv_bytes: 500_000_000, flops: 1000, ..Cost::default() };
    let step = Step::Decode { sequences: 8, context: 1024 };
    let bounds = bounds();
    let bound = bounds.seconds(|peaks| cost.bound_seconds(peaks));
    let steps = vec![StepTime { step, seconds: Some((4e-3, 3e-3)), cost, bound }];
    let report = RooflineReport { model: "m".into(), device: "d".into(), bounds, planned: 1, steps };
    let text = report.to_string();
    assert!(
        text.contains(
            "limits: 1000.0 GB/s, 1000.00 TFLOP/s (data sheet)\nceilings: 500.0 GB/s, 500.00 TFLOP/s (measured)"
        ),
        "{text}"
    );
    let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
    assert_eq!(
        row,
        ["decode", "8", "x", "1024", "4.000", "3.000", "2000", "500.0", "0.000", "2.000", "50.0", "%", "100.0", "%"]
    );
    let json = &report.to_json()["steps"][0];
    assert_eq!((&json["fraction_of_bound"], &json["tokens_per_second"]), (&0.5.into(), &2000.0.into()));
    assert_eq!(
        (&json["fraction_of_ceiling"], &report.to_json()["ceilings"]["source"]),
        (&1.0.into(), &"measured".into())
    );
}
