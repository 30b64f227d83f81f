//! Flags of `octavo bench`: those of `vllm bench`, with its defaults.

mod device;
mod offline;
mod serve;
mod unsupported;

use clap::{Args, Subcommand};

pub(crate) use device::{BenchKernelsArgs, BenchLimitsArgs, BenchRooflineArgs, SizesArgs};
pub(crate) use offline::{BatchArgs, BenchLatencyArgs, BenchThroughputArgs, ReportArgs, RequestsArgs};
pub(crate) use serve::{BenchServeArgs, BodyArgs, Dataset, DatasetArgs, TrafficArgs};

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the throughput and latency of a running server.
    Serve(Box<BenchServeArgs>),
    /// Measure the latency of one batch of random prompts, without a server.
    Latency(Box<BenchLatencyArgs>),
    /// Measure the throughput of many random prompts sent at once, without a server.
    Throughput(Box<BenchThroughputArgs>),
    /// Measure the rates that the GPU reaches in a large copy and in large matrix products.
    Limits(BenchLimitsArgs),
    /// Compare the time of each GPU kernel with the limits of the GPU, at the sizes of a model.
    Kernels(Box<BenchKernelsArgs>),
    /// Compare the time of a model's steps with the roofline limit of the device.
    Roofline(Box<BenchRooflineArgs>),
}
