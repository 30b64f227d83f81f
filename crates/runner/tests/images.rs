//! A model with an encoder of images behind the executor: plans name the images to encode and the rows to inject.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use octavo_backend_candle::CandleBackend;
use octavo_engine::{
    Executor, ImageHash, ImageInput, ImageSpan, InjectedTokens, InputToken, Joined, PlannedImage, PlannedRow,
    PlannedSequence, PromptImage, RowKind, SamplingParams, StepId, StepMasks, StepPlan, TableChange,
};
use octavo_models::{Checkpoint, Programs, build_programs};
use octavo_ops::{Backend, Channel};
use octavo_runner::{ImageConfig, KvBudget, Runner, RunnerConfig};
use octavo_telemetry::DeviceMetrics;
use safetensors::SafeTensors;

const CONFIG: RunnerConfig = RunnerConfig {
    block_size: 16,
    max_num_seqs: 2,
    max_num_batched_tokens: 256,
    max_model_len: 128,
    kv: KvBudget::Blocks(12),
    async_scheduling: None,
    adapters: None,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/testdata/qwen3-vl")
}

/// A prompt with one image of 4 by 6 patches, and the token that PyTorch samples after it.
struct Prompt {
    ids: Vec<u32>,
    patches: Vec<u8>,
    next: u32,
}

impl Prompt {
    fn read() -> Self {
        let bytes = std::fs::read(folder().join("golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let ids: Vec<u32> = words("one.input_ids").into_iter().map(u32::from_le_bytes).collect();
        let logits: Vec<f32> = words("one.logits").into_iter().map(f32::from_le_bytes).collect();
        let last = &logits[logits.len() - logits.len() / ids.len()..];
        let next = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap() as u32;
        Self { ids, patches: file.tensor("one.patches").unwrap().data().to_vec(), next }
    }
}

fn runner(images: bool) -> Runner {
    runner_of(images, CONFIG)
}

fn runner_of(images: bool, config: RunnerConfig) -> Runner {
    let checkpoint = Checkpoint::open(&folder()).unwrap();
    let Programs { decoder, encoder } = build_programs(&checkpoint).unwrap();
    let mut backend: Box<dyn Backend> = Box::new(CandleBackend::new());
    backend.load(&decoder, &checkpoint, &mut |_| {}).unwrap();
    backend.load_encoder(&encoder.unwrap(), &checkpoint, &mut |_| {}).unwrap();
    let vision = checkpoint.config().vision.clone().unwrap();
    let channels = vec![Channel { shift: 127.5, divisor: 127.5 }; 3];
    let images = images.then_some(ImageConfig { vision, channels, media_rows: 20 });
    Runner::observed(backend, Arc::new(decoder), config, images.as_ref(), |_| DeviceMetrics::disabled()).unwrap()
}

/// Returns the plan of the tokens `first..end` of a prompt whose image is encoded in the first step.
fn plan(prompt: &Prompt, step: StepId, first: usize, end: usize) -> StepPlan {
    let start = prompt.ids.iter().position(|&id| id == 300).unwrap();
    // The image's rows are in two runs.
    let media = [10..13, 4..7];
    let mut plan = StepPlan { step, ..StepPlan::default() };
    if step == 1 {
        let input = Arc::new(ImageInput { rows: 4, cols: 6, patches: Box::new(prompt.patches.clone()) });
        let span = ImageSpan { start: start as u32, rows: 2, cols: 3 };
        let images = [PromptImage { span, hash: ImageHash([0; 32]), input: input.clone() }].into();
        plan.joined.push(Joined { images, ..Joined::new(1, prompt.ids.clone(), SamplingParams::default()) });
        plan.encode.push(PlannedImage { image: input, media: media.to_vec() });
    }
    for (index, rows) in media.into_iter().flatten().enumerate() {
        let position = (start + index) as u32;
        if (first..end).contains(&(start + index)) {
            plan.injected.push(InjectedTokens { position, media: rows..rows + 1 });
        }
    }
    plan.tokens = prompt.ids[first..end].iter().map(|&id| InputToken::Id(id)).collect();
    plan.blocks = vec![3, 1, 7, 2];
    plan.tables.push(TableChange { seat: 1, group: 0, start: 0, blocks: 0..4 });
    plan.sequences.push(PlannedSequence {
        seat: 1,
        tokens: 0..end - first,
        first_position: first as u32,
        injected: 0..plan.injected.len(),
    });
    if end == prompt.ids.len() {
        plan.rows.push(PlannedRow { sequence: 0, position: end as u32 - 1, kind: RowKind::Draw });
    }
    plan
}

fn run(runner: &mut Runner, plan: StepPlan) -> Result<Vec<u32>, String> {
    let step = plan.step;
    runner.submit(plan).unwrap();
    runner.sample(step, StepMasks::default()).unwrap();
    let output = runner.wait().map_err(|error| error.message)?;
    Ok(output.tokens.iter().map(|token| token.id).collect())
}

#[test]
fn a_prompt_with_an_image_gives_the_reference_token_whole_and_in_chunks() {
    let prompt = Prompt::read();
    let len = prompt.ids.len();
    // The second division cuts the image.
    for cuts in [vec![0, len], vec![0, 8, 10, len]] {
        let mut runner = runner(true);
        let mut tokens = Vec::new();
        for (index, cut) in cuts.windows(2).enumerate() {
            tokens = run(&mut runner, plan(&prompt, 1 + index as u64, cut[0], cut[1])).unwrap();
        }
        assert_eq!(tokens, [prompt.next], "{cuts:?}");
    }
}

#[test]
fn the_media_cache_is_taken_from_the_memory_of_the_kv_cache() {
    let plan = runner(true).memory_plan().clone();
    // A row holds the merged output and two deepstack outputs of 64 columns in f32.
    assert_eq!(plan.media_bytes, 20 * 3 * 64 * 4);
    let bytes = 30 * plan.kv.block_bytes;
    let sized = |images| {
        let config = RunnerConfig { kv: KvBudget::Bytes(bytes), ..CONFIG };
        runner_of(images, config).memory_plan().clone()
    };
    let (with, without) = (sized(true), sized(false));
    assert_eq!((without.kv.blocks, without.media_bytes), (30, 0));
    assert_eq!(with.kv.blocks as u64, (bytes - plan.media_bytes) / plan.kv.block_bytes);
    assert!(with.kv.blocks < without.kv.blocks);
}

#[test]
fn an_image_that_does_not_fit_is_an_error_of_its_step() {
    let prompt = Prompt::read();
    let len = prompt.ids.len();
    let mut runner = runner(true);
    let mut bad = plan(&prompt, 1, 0, len);
    bad.encode[0].media.pop();
    let error = run(&mut runner, bad).unwrap_err();
    assert_eq!(error, "step 1 is malformed: image 0 of 6 tokens has 2304 bytes and 3 rows to store");
    let mut next = plan(&prompt, 1, 0, len);
    next.step = 2;
    assert_eq!(run(&mut runner, next).unwrap(), [prompt.next], "the next step runs");
}

#[test]
fn a_runner_without_an_encoder_refuses_images() {
    let prompt = Prompt::read();
    let error = run(&mut runner(false), plan(&prompt, 1, 0, 5)).unwrap_err();
    assert_eq!(error, "step 1 is malformed: it has images, the runner has no encoder");
}
