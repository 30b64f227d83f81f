//! Flags of `octavo bench limits`, `octavo bench kernels` and `octavo bench roofline`.

use std::path::PathBuf;

use clap::Args;
use octavo_backend_cuda::ChipModel;

use crate::cli::model::{ComposeArgs, SourceArgs};
use crate::cli::values::{self, Dtype};

#[derive(Debug, Args)]
pub(crate) struct BenchRooflineArgs {
    #[command(flatten)]
    pub(crate) sizes: SizesArgs,

    /// Predict the times on a GPU that need not be there, and measure nothing: H200, H100, L40S or V100. Of the model only its
    /// configuration is read [default model: Qwen3-8B].
    #[arg(long, value_parser = values::chip_model, value_name = "CHIP", help_heading = "Benchmark")]
    pub(crate) predict: Option<ChipModel>,

    /// Predict the times of weights that are stored as llama.cpp's Q4_K_M, instead of those of the model.
    #[arg(long, requires = "predict", help_heading = "Benchmark")]
    pub(crate) predict_q4_k_m: bool,

    /// Time for which each step is repeated.
    #[arg(long, default_value_t = 1.0, value_parser = values::seconds, value_name = "SECONDS", help_heading = "Benchmark")]
    pub(crate) min_time: f64,

    /// Write the figures to a JSON file, which grows with each step.
    #[arg(long, value_name = "FILE", help_heading = "Benchmark")]
    pub(crate) output_json: Option<PathBuf>,

    /// Compare the times also with the rates that `octavo bench limits --output-json FILE` measured on this GPU.
    #[arg(long, value_name = "FILE", help_heading = "Benchmark")]
    pub(crate) limits: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) compose: ComposeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct BenchLimitsArgs {
    /// Bytes that a copy reads; choose more than the GPU's caches hold.
    #[arg(long, value_parser = values::count, default_value = "4G", value_name = "BYTES")]
    pub(crate) copy_bytes: usize,

    /// Rows, inputs and outputs of a matrix product.
    #[arg(long, value_parser = values::small_count, default_value_t = 8192, value_name = "N")]
    pub(crate) product_size: u32,

    /// Duration of each of seven measurements.
    #[arg(long, default_value_t = 0.2, value_parser = values::seconds, value_name = "SECONDS")]
    pub(crate) min_time: f64,

    /// Write the figures to a JSON file, which `octavo bench kernels` and `octavo bench roofline` take with `--limits`.
    #[arg(long, value_name = "FILE")]
    pub(crate) output_json: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct BenchKernelsArgs {
    /// Model whose sizes are measured: catalog name, hub id or path. Only its configuration is read [default: the sizes of
    /// Qwen3-8B].
    pub(crate) model: Option<String>,

    #[command(flatten)]
    pub(crate) sizes: SizesArgs,

    /// Measure only kernels whose name or sizes contain this text: gemv, paged_decode, gate_up, ...
    #[arg(long, value_name = "TEXT", help_heading = "Benchmark")]
    pub(crate) filter: Option<String>,

    /// Time for which a kernel is repeated in each of seven measurements.
    #[arg(long, default_value_t = 0.02, value_parser = values::seconds, value_name = "SECONDS", help_heading = "Benchmark")]
    pub(crate) min_time: f64,

    /// Write the figures to a JSON file, which grows with each kernel.
    #[arg(long, value_name = "FILE", help_heading = "Benchmark")]
    pub(crate) output_json: Option<PathBuf>,

    /// Compare the times also with the rates that `octavo bench limits --output-json FILE` measured on this GPU.
    #[arg(long, value_name = "FILE", help_heading = "Benchmark")]
    pub(crate) limits: Option<PathBuf>,

    /// Precision of weights, activations and KV cache; auto is bfloat16, or float16 on Volta and Turing.
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    pub(crate) dtype: Dtype,

    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

/// The steps that are measured.
#[derive(Debug, Args)]
#[command(next_help_heading = "Benchmark")]
pub(crate) struct SizesArgs {
    /// Batch sizes of decode steps, in sequences.
    #[arg(long, value_parser = values::count, value_delimiter = ',', default_value = "1,8,32,128,256", value_name = "N,...")]
    pub(crate) batch_sizes: Vec<usize>,

    /// Context lengths of decode steps, in tokens per sequence.
    #[arg(long, value_parser = values::count, value_delimiter = ',', default_value = "1024,4096", value_name = "TOKENS,...")]
    pub(crate) contexts: Vec<usize>,

    /// Lengths of prompts, in tokens.
    #[arg(long, value_parser = values::count, value_delimiter = ',', default_value = "512,2048,8192", value_name = "TOKENS,...")]
    pub(crate) prefill: Vec<usize>,
}
