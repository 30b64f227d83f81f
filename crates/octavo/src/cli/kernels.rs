//! Flags of `octavo kernels`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use octavo_backend_cuda::Chip;

#[derive(Debug, Args)]
pub(crate) struct KernelsArgs {
    #[command(subcommand)]
    pub(crate) command: KernelsCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KernelsCommand {
    /// Compile the GPU kernels into a folder, for images and machines without NVRTC.
    ///
    /// Needs NVRTC, which is searched for in the folders of OCTAVO_CUDA_LIBS first; needs neither a GPU nor a driver.
    Build(KernelsBuildArgs),
}

#[derive(Debug, Args)]
pub(crate) struct KernelsBuildArgs {
    /// GPU architectures: sm_70 (V100), sm_75 (T4), sm_80 (A100), sm_86 (A10), sm_89 (L40S), sm_90a (H100, H200), ...
    #[arg(long, value_delimiter = ',', value_parser = chip, default_value = "sm_70,sm_89,sm_90a", value_name = "CHIP,...")]
    pub(crate) arch: Vec<Chip>,

    /// Folder for the kernels: new, empty, or one with kernels to replace.
    ///
    /// The default is where `octavo serve` looks: ../share/octavo/kernels from a binary in a folder `bin`.
    #[arg(long, value_name = "DIR")]
    pub(crate) output: Option<PathBuf>,

    /// Build only kernels whose names start with these prefixes, for tests.
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    pub(crate) only: Vec<String>,
}

/// A chip by the compiler's name.
fn chip(text: &str) -> Result<Chip, String> {
    let hint = match text {
        "sm_90" | "90" | "9.0" | "90a" => "sm_90a is meant",
        _ => "a name such as sm_70, sm_89 or sm_90a is expected",
    };
    Chip::parse(text).ok_or_else(|| hint.to_owned())
}
