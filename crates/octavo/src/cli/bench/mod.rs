//! Flags of `octavo bench`: those of `vllm bench`, with its defaults.

mod device;
mod offline;
mod serve;

use clap::{Args, Subcommand};

pub(crate) use device::{BenchKernelsArgs, BenchLimitsArgs, BenchRooflineArgs, SizesArgs};
pub(crate) use offline::{BatchArgs, BenchLatencyArgs, BenchThroughputArgs, ReportArgs, RequestsArgs};
pub(crate) use serve::{BenchServeArgs, LoadBackend};

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Send random prompts to a running server and tell how fast it answers.
    Serve(Box<BenchServeArgs>),
    /// Run one batch of random prompts again and again, without a server, and tell how long it takes.
    Latency(Box<BenchLatencyArgs>),
    /// Run many random prompts at once, without a server, and tell how much gets done in a second.
    Throughput(Box<BenchThroughputArgs>),
    /// Measure the rates that the GPU reaches in a large copy and in large matrix products.
    Limits(BenchLimitsArgs),
    /// Measure each kernel of the GPU at the sizes of a model, and hold it against the GPU's limits.
    Kernels(Box<BenchKernelsArgs>),
    /// Measure a model's steps, and hold each against the least time that its bytes and FLOPs take on the device.
    Roofline(Box<BenchRooflineArgs>),
}
