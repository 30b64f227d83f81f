//! Flags of `octavo bench`: those of `vllm bench`, with its defaults.

mod offline;
mod serve;

use clap::{Args, Subcommand};

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
}
