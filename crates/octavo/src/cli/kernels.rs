//! Flags of `octavo kernels`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use octavo_backend_cuda::{PACKED, Target};

#[derive(Debug, Args)]
pub(crate) struct KernelsArgs {
    #[command(subcommand)]
    pub(crate) command: KernelsCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KernelsCommand {
    /// Compile kernels into a pack, for images and for machines without NVRTC. This needs NVRTC, which is searched for in
    /// OCTAVO_CUDA_LIBS first, but neither a GPU nor a driver.
    Build(KernelsBuildArgs),
}

#[derive(Debug, Args)]
pub(crate) struct KernelsBuildArgs {
    /// Chips to compile for, separated by commas: sm_70 (V100), sm_75 (T4), sm_80 (A100), sm_86 (A10), sm_89 (L40S), sm_90a (H100,
    /// H200), sm_100 (B200), sm_120 (RTX PRO 6000), ... A later chip of the same major runs the code of an earlier one. compute_120
    /// and so on for PTX, which the driver of any later chip compiles.
    #[arg(long, value_delimiter = ',', value_parser = target, default_value = PACKED, value_name = "CHIP,...")]
    pub(crate) arch: Vec<Target>,

    /// Folder of the pack: a new one, an empty one, or one with a pack, which is replaced [default: where `octavo serve`
    /// looks for it, ../share/octavo/kernels from a binary in a folder `bin`].
    #[arg(long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,

    /// Compile only kernels whose names begin with one of these texts, for experiments.
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    pub(crate) only: Vec<String>,
}

/// A target by the compiler's name.
fn target(text: &str) -> Result<Target, String> {
    let hint = match text {
        "sm_90" | "90" | "9.0" | "90a" => "use sm_90a",
        _ => "a name such as sm_70, sm_89 or sm_90a is expected",
    };
    Target::parse(text).ok_or_else(|| hint.to_owned())
}
