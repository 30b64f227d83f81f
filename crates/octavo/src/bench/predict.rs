//! `octavo bench roofline --predict`: the steps of a model on a GPU that need not be there.

use std::fmt;

use anyhow::{Context, Result};
use octavo_backend_cuda::{
    CORRECTED_BY, Cause, ChipModel, CudaConfig, KernelPrediction, Loss, Predictor, StepPrediction,
};
use octavo_bench::roofline::{RooflineConfig, Step, milliseconds, table};
use octavo_models::{Checkpoint, build_programs};
use octavo_ops::{Program, StorageType};
use serde_json::{Value, json};

use super::{Growing, kernels, roofline};
use crate::cli::{BenchRooflineArgs, MaxModelLen, ModelArgs};
use crate::pull;
use crate::serve::device::cache_type;

/// Losses of a step that are named.
const NAMED: usize = 3;

/// The configuration of the model for which times are predicted unless another is named.
const QWEN3_8B: &str = include_str!("../../../../models/shapes/qwen3-8b/config.json");

pub(super) fn run(args: &BenchRooflineArgs, chip: ChipModel) -> Result<()> {
    let (name, mut program, kv_cache) = open(&args.compose.model)?;
    if args.predict_q4_k_m {
        store_as_q4_k_m(&mut program);
    }
    let engine = &args.compose.engine;
    let longest = match engine.max_model_len {
        Some(MaxModelLen::Tokens(tokens)) => tokens,
        _ => 1,
    };
    let config = CudaConfig {
        kv_cache: cache_type(&kv_cache)?,
        max_num_batched_tokens: engine.max_num_batched_tokens.unwrap_or(1),
        max_num_seqs: engine.max_num_seqs,
        max_rows: octavo_runner::max_rows(engine.max_num_seqs, program.vocab_size),
        max_model_len: longest,
        graphs: !engine.enforce_eager,
        batch_invariant: engine.batch_invariant,
        ..kernels::config(args.compose.model.dtype)?
    };
    let steps = roofline::config(args, Predictor::BLOCK_SIZE);
    let predictor = Predictor::new(&program, &config, chip)?;
    let report = PredictionReport { model: name, chip, steps: predictions(&predictor, &program, &steps)? };
    print!("{report}");
    let figures = Growing { path: args.output_json.as_deref() };
    figures.write(|| report.to_json())?;
    figures.finish();
    Ok(())
}

/// The name of a model, its program, and the type of its KV cache.
fn open(model: &ModelArgs) -> Result<(String, Program, String)> {
    let named = model.positional.as_ref().or(model.named.as_ref());
    let (name, checkpoint) = match named {
        Some(name) => (name.clone(), Checkpoint::open_shape(&pull::resolve_shape(name, &model.source)?.path)?),
        None => ("Qwen3-8B".to_owned(), open_config(QWEN3_8B)?),
    };
    let kv_cache = model.kv_cache_dtype.clone();
    Ok((name, build_programs(&checkpoint)?.decoder, kv_cache))
}

/// Opens a model of which there is only a configuration.
fn open_config(config: &str) -> Result<Checkpoint> {
    let folder = tempfile::tempdir().context("no temporary folder for the model's configuration")?;
    std::fs::write(folder.path().join("config.json"), config)?;
    Ok(Checkpoint::open_shape(folder.path())?)
}

/// The predictions of steps, each with those of all chunks of a prompt.
fn predictions(
    predictor: &Predictor,
    program: &Program,
    config: &RooflineConfig,
) -> Result<Vec<(Step, StepPrediction)>> {
    let of_step = |step: Step| -> Result<_> {
        let mut whole: Option<StepPrediction> = None;
        for batch in config.batches(program, step) {
            let part = predictor.step(&batch)?;
            match &mut whole {
                Some(whole) => whole.add(part),
                None => whole = Some(part),
            }
        }
        Ok((step, whole.context("a step without tokens")?))
    };
    config.steps().map(of_step).collect()
}

/// Stores the matrices of a program as llama.cpp does in Q4_K_M: values and down projections of the first and the last eighth of the
/// layers and of each third one between them, and the head, in 6 bits, and all others in 4.
fn store_as_q4_k_m(program: &mut Program) {
    let layer = |tensor: &str| tensor.split('.').find_map(|word| word.parse::<usize>().ok());
    let tensors = || program.weights.iter().flat_map(|weight| &weight.parts);
    let layers = tensors().filter_map(|part| layer(&part.tensor)).max().map_or(0, |last| last + 1);
    let more_bits = |at: usize| at < layers / 8 || at >= 7 * layers / 8 || (at - layers / 8) % 3 == 2;
    for weight in program.weights.iter_mut().filter(|weight| weight.rows > 1 && weight.cols % 256 == 0) {
        for part in &mut weight.parts {
            let wide = ["v_proj", "down_proj"].iter().any(|name| part.tensor.contains(name));
            let has_more = part.tensor.contains("lm_head") || (wide && layer(&part.tensor).is_some_and(more_bits));
            part.storage = if has_more { StorageType::Q6K } else { StorageType::Q4K };
        }
    }
}

/// Predicted steps.
struct PredictionReport {
    model: String,
    chip: ChipModel,
    steps: Vec<(Step, StepPrediction)>,
}

/// What the figures are, and what they are not.
fn caveat(corrected_by: &[&str]) -> String {
    let corrected = match corrected_by {
        [] => "no measurement has corrected them yet".to_owned(),
        known => format!("corrected by {}", known.join(", ")),
    };
    format!("These times are predictions from machine code and launches, not measurements; {corrected}.")
}

impl fmt::Display for PredictionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, chip, steps } = self;
        writeln!(f, "{model} on {}, predicted", chip.name)?;
        writeln!(f, "{}", caveat(CORRECTED_BY))?;
        let (gigabytes, teraflops) = (chip.sheet.bandwidth / 1e9, chip.sheet.half_flops / 1e12);
        writeln!(f, "limits: {gigabytes:.1} GB/s, {teraflops:.2} TFLOP/s ({})", chip.sheet.source)?;
        let heads = ["step", "ms", "tokens/s", "bound ms", "of bound", "launches"];
        let rows: Vec<_> = steps.iter().map(|(step, prediction)| cells(*step, prediction)).collect();
        f.write_str(&table(1, &heads, &rows))?;
        writeln!(f, "\nlosses of all kernels by cause, in percent of a step's time")?;
        let heads: Vec<_> = Cause::ALL.iter().map(Cause::to_string).collect();
        let heads: Vec<_> = std::iter::once("step").chain(heads.iter().map(String::as_str)).collect();
        let rows: Vec<_> = steps.iter().map(|(step, prediction)| causes(*step, prediction)).collect();
        f.write_str(&table(1, &heads, &rows))?;
        writeln!(f, "\nlargest losses of a kernel, in percent of a step's time")?;
        let rows: Vec<_> = steps.iter().flat_map(|(step, prediction)| losses(*step, prediction)).collect();
        f.write_str(&table(3, &["step", "kernel", "cause", "loss"], &rows))?;
        let memory_only = unknown(steps);
        if !memory_only.is_empty() {
            writeln!(
                f,
                "Bytes and FLOPs alone, as nothing is known of their machine code: {}.",
                memory_only.join(", ")
            )?;
        }
        if steps.iter().flat_map(|(_, step)| &step.kernels).any(KernelPrediction::is_assumed) {
            writeln!(f, "Products of cuBLASLt take an assumed share of the limits.")?;
        }
        Ok(())
    }
}

/// Names of kernels whose code is not known.
fn unknown(steps: &[(Step, StepPrediction)]) -> Vec<String> {
    let kernels = steps.iter().flat_map(|(_, step)| &step.kernels).filter(|kernel| kernel.memory_only);
    let mut names: Vec<_> = kernels.map(|kernel| kernel.name.clone()).collect();
    names.sort();
    names.dedup();
    names
}

fn cells(step: Step, prediction: &StepPrediction) -> Vec<String> {
    let &StepPrediction { seconds, bound, launches, .. } = prediction;
    vec![
        step.name(),
        milliseconds(seconds),
        format!("{:.0}", step.tokens() as f64 / seconds),
        milliseconds(bound),
        format!("{:.1} %", 100.0 * bound / seconds),
        launches.to_string(),
    ]
}

/// Seconds in percent of a step's time.
fn percent(seconds: f64, prediction: &StepPrediction) -> String {
    format!("{:.1}", 100.0 * seconds / prediction.seconds)
}

/// A row with the losses of a step by cause.
fn causes(step: Step, prediction: &StepPrediction) -> Vec<String> {
    let lost = Cause::ALL.map(|cause| percent(prediction.lost(cause), prediction));
    std::iter::once(step.name()).chain(lost).collect()
}

/// A row for each of the largest losses of a step.
fn losses(step: Step, prediction: &StepPrediction) -> Vec<Vec<String>> {
    let row = |(at, loss): (usize, Loss<'_>)| {
        let KernelPrediction { name, what, .. } = loss.kernel;
        let step = if at == 0 { step.name() } else { String::new() };
        let share = percent(loss.seconds, prediction);
        vec![step, format!("{name} {what}").trim_end().to_owned(), loss.cause.to_string(), share]
    };
    prediction.losses().into_iter().take(NAMED).enumerate().map(row).collect()
}

impl PredictionReport {
    fn to_json(&self) -> Value {
        let losses = |losses: &[(Cause, f64)]| -> serde_json::Map<String, Value> {
            losses.iter().map(|(cause, seconds)| (cause.to_string(), (*seconds).into())).collect()
        };
        let kernel = |kernel: &KernelPrediction| {
            json!({
                "kernel": kernel.name,
                "on": kernel.what,
                "launches": kernel.launches,
                "seconds": kernel.seconds,
                "bound_seconds": kernel.bound,
                "losses_seconds": losses(&kernel.losses),
                "memory_only": kernel.memory_only,
                "assumed": kernel.is_assumed(),
            })
        };
        let step = |(step, prediction): &(Step, StepPrediction)| {
            let mut value = step.json();
            value["seconds"] = prediction.seconds.into();
            value["bound_seconds"] = prediction.bound.into();
            value["fraction_of_bound"] = (prediction.bound / prediction.seconds).into();
            value["launches"] = prediction.launches.into();
            value["kernels"] = prediction.kernels.iter().map(kernel).collect();
            value
        };
        json!({
            "model": self.model,
            "device": self.chip.name,
            "predicted": true,
            "corrected_by": CORRECTED_BY,
            "limits": {
                "bandwidth_bytes_per_second": self.chip.sheet.bandwidth,
                "flops_per_second": self.chip.sheet.half_flops,
                "source": self.chip.sheet.source,
            },
            "steps": self.steps.iter().map(step).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests;
