//! Flags of `octavo bench latency` and `octavo bench throughput`.

use std::path::PathBuf;

use clap::{Arg, ArgAction, Args};

use crate::cli::model::ComposeArgs;
use crate::cli::values;

/// What --seed is for here.
const SEED: &str = "Of prompts and of what is drawn [default: 0]";

/// What --enable-prefix-caching does to a latency; vLLM has it off here as well.
const CACHING: &str = "Reuse the KV of prompts that begin alike: only the first run computes them then [default: off]";

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

/// The batch, and how often it is run.
#[derive(Debug, Args)]
#[command(next_help_heading = "Benchmark", arg(no_effect("disable-detokenize")))]
pub(crate) struct BatchArgs {
    /// Tokens of each prompt.
    #[arg(long, value_parser = values::count, default_value = "32", value_name = "TOKENS")]
    pub(crate) input_len: usize,

    /// Tokens of each answer, no fewer.
    #[arg(long, value_parser = values::small_count, default_value = "128", value_name = "TOKENS")]
    pub(crate) output_len: u32,

    /// Prompts of the batch.
    #[arg(long, value_parser = values::count, default_value = "8", value_name = "N")]
    pub(crate) batch_size: usize,

    /// Answers to each prompt.
    #[arg(long, value_parser = values::small_count, default_value = "1", value_name = "N")]
    pub(crate) n: u32,

    /// Runs that come first and are not measured.
    #[arg(long, value_parser = values::amount, default_value = "10", value_name = "N")]
    pub(crate) num_iters_warmup: usize,

    /// Runs that are measured.
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

/// The requests, all sent at once.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Benchmark",
    arg(only("dataset-name", "random", "Where prompts come from")),
    arg(only("backend", "vllm", "What runs them: this engine, under the name that vLLM gives its own")),
    args(["disable-detokenize", "async-engine"].map(no_effect))
)]
pub(crate) struct RequestsArgs {
    /// Tokens of a prompt.
    #[arg(long, alias = "random-input-len", value_parser = values::count, default_value = "1024", value_name = "TOKENS")]
    pub(crate) input_len: usize,

    /// Tokens of an answer, no fewer.
    #[arg(long, alias = "random-output-len", value_parser = values::small_count, default_value = "128")]
    #[arg(value_name = "TOKENS")]
    pub(crate) output_len: u32,

    /// Draw both lengths from a range that is by this share shorter and longer; at least 0 and below 1.
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    pub(crate) random_range_ratio: f64,

    /// Prompts in all.
    #[arg(long, value_parser = values::count, default_value = "1000", value_name = "N")]
    pub(crate) num_prompts: usize,

    /// Answers to each prompt.
    #[arg(long, value_parser = values::small_count, default_value = "1", value_name = "N")]
    pub(crate) n: u32,
}

/// Where figures go beside the terminal.
#[derive(Debug, Args)]
#[command(next_help_heading = "Benchmark")]
pub(crate) struct ReportArgs {
    /// Write the figures to a JSON file.
    #[arg(long, value_name = "FILE")]
    pub(crate) output_json: Option<PathBuf>,

    /// Plot them: how latencies are distributed, or output tokens per second over time.
    #[arg(long, value_parser = values::svg, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
}

/// A switch of vLLM for what happens here anyway: nothing is turned into text, and there is one engine.
fn no_effect(name: &'static str) -> Arg {
    Arg::new(name).long(name).hide(true).action(ArgAction::SetTrue)
}

/// A flag of vLLM of whose values one is served.
fn only(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_parser([value]).default_value(value).value_name("NAME").help(help)
}
