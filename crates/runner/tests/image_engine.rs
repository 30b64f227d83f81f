//! Tests of engine, runner and backend together with a model of images: requests get what PyTorch computed, whole, cut,
//! cached, preempted and decoded token by token.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use octavo_backend_candle::CandleBackend;
use octavo_backend_cpu::{CpuBackend, CpuConfig};
use octavo_engine::{
    Constraint, Engine, EngineConfig, ImageHash, ImageInput, ImageSpan, PromptImage, Request, RequestStream,
    SamplingParams,
};
use octavo_models::{Checkpoint, Programs, build_programs};
use octavo_ops::{Backend, Channel, InjectMode, Op};
use octavo_runner::{ImageConfig, KvBudget, Runner, RunnerConfig};
use octavo_telemetry::{DeviceMetrics, Telemetry, TelemetryConfig};
use safetensors::SafeTensors;

const VOCAB: usize = 320;
/// Maximum difference from PyTorch's log-probabilities on the candle backend, which computes in f32; 6e-6 was measured.
const TOLERANCE: f32 = 3e-5;
/// The same on the CPU backend, which stores keys and values in bf16; 0.036 was measured.
const CPU_TOLERANCE: f32 = 0.08;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata/qwen3-vl")
}

/// A prompt, and the log-probability that PyTorch gives each token after the first.
struct Case {
    ids: Vec<u32>,
    images: Vec<PromptImage>,
    logprobs: Vec<f32>,
}

impl Case {
    fn read(name: &str) -> Self {
        let bytes = std::fs::read(folder().join("golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |part: &str| file.tensor(&format!("{name}.{part}")).unwrap().data().as_chunks::<4>().0.to_vec();
        let integers = |part: &str| words(part).into_iter().map(u32::from_le_bytes).collect::<Vec<_>>();
        let ids = integers("input_ids");
        let logits: Vec<f32> = words("logits").into_iter().map(f32::from_le_bytes).collect();
        let logprob = |(row, &id): (&[f32], &u32)| {
            let sum: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum();
            (f64::from(row[id as usize]) - sum.ln()) as f32
        };
        let logprobs = logits.chunks(VOCAB).zip(&ids[1..]).map(logprob).collect();
        let mut images = Vec::new();
        if name != "text" {
            let patches = file.tensor(&format!("{name}.patches")).unwrap().data().to_vec();
            let starts = (1..ids.len()).filter(|&at| ids[at] == 300 && ids[at - 1] != 300);
            let mut rest = &patches[..];
            for (start, grid) in starts.zip(integers("grids").chunks(2)) {
                let (rows, cols) = (grid[0], grid[1]);
                let (image, after) = rest.split_at((rows * cols) as usize * 96);
                rest = after;
                let span = ImageSpan { start: start as u32, rows: rows / 2, cols: cols / 2 };
                let input = Arc::new(ImageInput { rows, cols, patches: Box::new(image.to_vec()) });
                images.push(PromptImage { span, hash: ImageHash([image[0]; 32]), input });
            }
        }
        Self { ids, images, logprobs }
    }

    /// Returns the request whose prompt are the first `prompt` tokens and whose output are the others.
    fn request(&self, prompt: usize, scores: bool) -> Request {
        let forced = Forced { rest: self.ids[prompt..].to_vec(), next: 0 };
        let params = SamplingParams {
            max_tokens: (self.ids.len() - prompt) as u32,
            logprobs: Some(0),
            prompt_logprobs: scores.then_some(0),
            ..SamplingParams::default()
        };
        Request {
            images: self.images.as_slice().into(),
            constraint: (prompt < self.ids.len()).then(|| Box::new(forced) as Box<dyn Constraint>),
            ..Request::new("test", &self.ids[..prompt], params)
        }
    }
}

/// Allows exactly the given tokens.
struct Forced {
    rest: Vec<u32>,
    next: usize,
}

impl Constraint for Forced {
    fn fill_mask(&mut self, mask: &mut [u32]) {
        mask.fill(0);
        let id = self.rest[self.next];
        mask[id as usize / 32] = 1 << (id % 32);
    }

    fn accept(&mut self, token: u32) -> bool {
        self.next += 1;
        token == self.rest[self.next - 1]
    }

    fn rollback(&mut self, tokens: usize) {
        self.next -= tokens;
    }
}

/// An engine over a backend.
struct Rig {
    engine: Engine,
    telemetry: Telemetry,
}

#[derive(Clone, Copy)]
struct Setting {
    cpu: bool,
    chunk: usize,
    blocks: usize,
    /// Swaps the layers that take the encoder's deepstack outputs.
    swapped: bool,
}

const SETTING: Setting = Setting { cpu: false, chunk: 256, blocks: 40, swapped: false };

impl Rig {
    fn new(setting: Setting) -> Self {
        let checkpoint = Checkpoint::open(&folder()).unwrap();
        let Programs { mut decoder, encoder } = build_programs(&checkpoint).unwrap();
        let hidden = checkpoint.config().hidden_size;
        for op in &mut decoder.ops {
            if let Op::InjectRows(op) = op
                && op.mode == InjectMode::Add
                && setting.swapped
            {
                op.column = 3 * hidden - op.column;
            }
        }
        let mut backend: Box<dyn Backend> = match setting.cpu {
            true => Box::new(CpuBackend::new(CpuConfig::default()).unwrap()),
            false => Box::new(CandleBackend::new()),
        };
        backend.load(&decoder, &checkpoint, &mut |_| {}).unwrap();
        backend.load_encoder(&encoder.unwrap(), &checkpoint, &mut |_| {}).unwrap();
        let vision = checkpoint.config().vision.clone().unwrap();
        let channels = vec![Channel { shift: 127.5, divisor: 127.5 }; 3];
        let images = ImageConfig { vision, channels, media_rows: 16 };
        let runner_config = RunnerConfig {
            block_size: 16,
            max_num_seqs: 4,
            max_num_batched_tokens: setting.chunk,
            max_model_len: 96,
            kv: KvBudget::Blocks(setting.blocks),
            async_scheduling: None,
            adapters: None,
        };
        let runner =
            Runner::observed(backend, Arc::new(decoder), runner_config, Some(&images), |_| DeviceMetrics::disabled());
        let config = EngineConfig {
            max_model_len: 96,
            max_num_seqs: 4,
            max_num_batched_tokens: setting.chunk,
            ..EngineConfig::default()
        };
        let telemetry = Telemetry::new(TelemetryConfig { model_name: "m".into(), engine: 0, max_model_len: 96 });
        let engine = Engine::spawn(Box::new(runner.unwrap()), config, telemetry.engine()).unwrap();
        Self { engine, telemetry }
    }

    fn counter(&self, name: &str) -> f64 {
        let page = self.telemetry.render();
        let line = page.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Returns the difference from PyTorch of a request that runs alone.
    fn difference(&self, case: &Case, prompt: usize, scores: bool) -> f32 {
        difference(case, self.engine.handle().submit(case.request(prompt, scores)).unwrap())
    }
}

/// Reads a request to its end, and returns the largest difference of its log-probabilities from PyTorch's.
fn difference(case: &Case, mut stream: RequestStream) -> f32 {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (mut tokens, mut found) = (Vec::new(), Vec::new());
    runtime.block_on(async {
        while let Some(event) = stream.next().await {
            found.extend(event.prompt_logprobs.iter().map(|logprobs| logprobs.logprob));
            found.extend(event.tokens.iter().map(|token| token.logprobs.as_ref().unwrap().logprob));
            tokens.extend(event.tokens.into_iter().map(|token| token.id));
        }
    });
    assert!(!found.is_empty());
    assert!(case.ids.ends_with(&tokens));
    let expected = &case.logprobs[case.logprobs.len() - found.len()..];
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn prompts_and_answers_are_those_of_pytorch_whole_and_in_chunks() {
    for (cpu, tolerance) in [(false, TOLERANCE), (true, CPU_TOLERANCE)] {
        for chunk in [256, 9] {
            let rig = Rig::new(Setting { cpu, chunk, ..SETTING });
            for (name, end) in [("text", 10), ("one", 20), ("two", 30), ("decode", 24)] {
                let case = Case::read(name);
                let difference = rig.difference(&case, end, true);
                assert!(difference < tolerance, "{name}, chunks of {chunk}, on the CPU backend: {cpu}: {difference}");
            }
        }
    }
}

#[test]
fn a_cached_prefix_gives_the_same_without_the_encoder() {
    let rig = Rig::new(SETTING);
    let case = Case::read("two");
    for round in 0..3 {
        // The second round finds both images in the prefix cache, the last one only the first.
        let prompt = [40, 40, 31][round];
        let difference = rig.difference(&case, prompt, false);
        assert!(difference < TOLERANCE, "round {round}: {difference}");
        assert_eq!(rig.counter("octavo_encoder_cache_queries_total"), [2.0, 2.0, 3.0][round]);
    }
    assert_eq!(rig.counter("vllm:prefix_cache_hits_total"), 32.0 + 16.0);
}

#[test]
fn requests_together_and_preempted_are_those_of_pytorch() {
    // Seven blocks and the null block hold two of the requests.
    for blocks in [40, 8] {
        let rig = Rig::new(Setting { blocks, chunk: 20, ..SETTING });
        let cases = ["one", "two", "decode", "text", "two"].map(Case::read);
        let streams = cases.each_ref().map(|case| rig.engine.handle().submit(case.request(27, false)).unwrap());
        for (case, stream) in cases.iter().zip(streams) {
            let difference = difference(case, stream);
            assert!(difference < TOLERANCE, "{difference}");
        }
        assert_eq!(rig.counter("vllm:num_preemptions_total") > 0.0, blocks == 8);
    }
}

#[test]
fn defects_are_found() {
    let case = Case::read("one");
    let swapped = Rig::new(Setting { swapped: true, ..SETTING }).difference(&case, 20, true);
    let rig = Rig::new(SETTING);
    let changed = |change: &dyn Fn(&mut PromptImage)| {
        let mut case = Case::read("one");
        change(&mut case.images[0]);
        rig.difference(&case, 20, true)
    };
    let transpose = |image: &mut PromptImage| {
        let ImageInput { rows, cols, patches } = &*image.input;
        let patches = Box::new((**patches).as_ref().to_vec());
        image.input = Arc::new(ImageInput { rows: *cols, cols: *rows, patches });
        (image.span.rows, image.span.cols) = (image.span.cols, image.span.rows);
        image.hash = ImageHash([77; 32]);
    };
    for (what, difference) in [
        ("swapped layers", swapped),
        ("a wrong position", changed(&|image| image.span.start += 1)),
        ("a transposed grid", changed(&transpose)),
    ] {
        assert!(difference > 10.0 * CPU_TOLERANCE, "{what}: {difference}");
    }
}
