//! `octavo bench`: measurements in vLLM's terms, and against a device's limits.

mod bar;
mod kernels;
mod offline;
mod roofline;
mod serve;

use std::path::Path;

use anyhow::{Context, Result};
use octavo_bench::plot::Chart;
use serde_json::Value;

use crate::cli::{BenchArgs, BenchCommand};
use crate::signals;

pub(crate) fn run(args: BenchArgs) -> Result<()> {
    signals::end_first_process()?;
    match args.command {
        BenchCommand::Serve(args) => serve::run(&args),
        BenchCommand::Latency(args) => offline::latency(&args),
        BenchCommand::Throughput(args) => offline::throughput(&args),
        BenchCommand::Kernels(args) => kernels::run(&args),
        BenchCommand::Roofline(args) => roofline::run(*args),
    }
}

fn write_json(path: &Path, figures: &Value) -> Result<()> {
    write(path, &serde_json::to_vec_pretty(figures)?)
}

fn write_plot(path: &Path, chart: &Chart) -> Result<()> {
    write(path, chart.to_string().as_bytes())
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))?;
    println!("saved to {}", path.display());
    Ok(())
}
