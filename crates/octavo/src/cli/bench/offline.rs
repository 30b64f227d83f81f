//! Flags of `octavo bench latency` and `octavo bench throughput`.

use std::path::PathBuf;

use clap::{Arg, ArgAction, Args};

use crate::cli::model::ComposeArgs;
use crate::cli::values;

/// The help of --seed.
const SEED: &str = "Random seed for prompts and sampling [default: 0]";

/// The help of --enable-prefix-caching, which vLLM's latency benchmark has off as well.
const CACHING: &str = "Reuse the KV cache of earlier runs; only the first run then computes the prompts [default: off]";

#[derive(Debug, Args)]
#[command(
    mut_arg("enable_prefix_caching", |arg| arg.default_value("false").help(CACHING)),
    mut_arg("seed", |arg| arg.help(SEED))
)]
pub(crate) struct BenchLatencyArgs {
    #[command(flatten)]
    pub(crate) batch: BatchArgs,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}

/// The batch and the number of runs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Benchmark", arg(no_effect("disable-detokenize")))]
pub(crate) struct BatchArgs {
    /// Tokens of each prompt.
    #[arg(long, value_parser = values::count, default_value = "32", value_name = "TOKENS")]
    pub(crate) input_len: usize,

    /// Tokens of each answer; an end-of-sequence token does not end it.
    #[arg(long, value_parser = values::small_count, default_value = "128", value_name = "TOKENS")]
    pub(crate) output_len: u32,

    /// Number of prompts in the batch.
    #[arg(long, value_parser = values::count, default_value = "8", value_name = "N")]
    pub(crate) batch_size: usize,

    /// Number of answers to each prompt.
    #[arg(long, value_parser = values::small_count, default_value = "1", value_name = "N")]
    pub(crate) n: u32,

    /// Number of runs before the measured ones.
    #[arg(long, value_parser = values::amount, default_value = "10", value_name = "N")]
    pub(crate) num_iters_warmup: usize,

    /// Number of measured runs.
    #[arg(long, value_parser = values::count, default_value = "30", value_name = "N")]
    pub(crate) num_iters: usize,
}

#[derive(Debug, Args)]
#[command(mut_arg("seed", |arg| arg.help(SEED)))]
pub(crate) struct BenchThroughputArgs {
    #[command(flatten)]
    pub(crate) requests: RequestsArgs,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}

/// The requests, which are all sent at once.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Benchmark",
    arg(only("dataset-name", "random", "Dataset that prompts come from")),
    arg(only("backend", "vllm", "Engine that runs the prompts, by vLLM's name")),
    args(["disable-detokenize", "async-engine"].map(no_effect))
)]
pub(crate) struct RequestsArgs {
    /// Tokens of each prompt.
    #[arg(long, alias = "random-input-len", value_parser = values::count, default_value = "1024", value_name = "TOKENS")]
    pub(crate) input_len: usize,

    /// Tokens of each answer; an end-of-sequence token does not end it.
    #[arg(long, alias = "random-output-len", value_parser = values::small_count, default_value = "128")]
    #[arg(value_name = "TOKENS")]
    pub(crate) output_len: u32,

    /// Vary both lengths uniformly between length * (1 - RATIO) and length * (1 + RATIO); at least 0 and below 1.
    #[arg(long, default_value_t = 0.0, value_name = "RATIO")]
    pub(crate) random_range_ratio: f64,

    /// Number of prompts.
    #[arg(long, value_parser = values::count, default_value = "1000", value_name = "N")]
    pub(crate) num_prompts: usize,

    /// Number of answers to each prompt.
    #[arg(long, value_parser = values::small_count, default_value = "1", value_name = "N")]
    pub(crate) n: u32,
}

/// The output files.
#[derive(Debug, Args)]
#[command(next_help_heading = "Benchmark")]
pub(crate) struct ReportArgs {
    /// Write the figures to a JSON file.
    #[arg(long, value_name = "FILE")]
    pub(crate) output_json: Option<PathBuf>,

    /// Plot the distribution of latencies, or the output tokens per second over time.
    #[arg(long, value_parser = values::svg, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
}

/// A switch of vLLM without an effect: nothing is detokenized, and there is one engine.
fn no_effect(name: &'static str) -> Arg {
    Arg::new(name).long(name).hide(true).action(ArgAction::SetTrue)
}

/// A flag of vLLM with one supported value.
fn only(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_parser([value]).default_value(value).value_name("NAME").help(help)
}
