//! `octavo bench roofline`: the steps of a model against the limits of the device.

use std::time::Duration;

use anyhow::{Result, bail};
use octavo_backend_cpu::probe::{self, ProbeConfig};
use octavo_bench::roofline::{Limits, RooflineConfig, RooflineReport, Step, measure};
use octavo_ops::cost::Peaks;
use tracing::{info, warn};

use super::write_json;
use crate::cli::{BenchRooflineArgs, MaxModelLen, SizesArgs};
use crate::serve;
use crate::serve::settings::log_config;

pub(super) fn run(mut args: BenchRooflineArgs) -> Result<()> {
    octavo_telemetry::init_logging(&log_config(&args.compose.observe, None))?;
    size(&mut args);
    let mut model = serve::load_model(&args.compose)?;
    let config = config(&args, model.block_size);
    let needed = config.steps().map(|step| config.blocks(step)).filter(|&blocks| blocks <= model.blocks).max();
    let Some(blocks) = needed else {
        bail!("the KV cache holds {} blocks, too few for any of the steps: ask for smaller ones", model.blocks);
    };
    let limits = limits(model.backend.device_profile().peaks, model.on_host);
    model.backend.allocate_kv(model.block_size, &vec![blocks; model.program.kv_groups.len()])?;
    let peaks = limits.as_ref().map(|limits| limits.peaks);
    let steps = measure(model.backend.as_mut(), &model.program, blocks, &config, peaks, &mut told)?;
    let report = RooflineReport { model: model.name, device: model.device, limits, steps };
    print!("{report}");
    match &args.output_json {
        Some(path) => write_json(path, &report.to_json()),
        None => Ok(()),
    }
}

fn told(step: Step) {
    match step {
        Step::Decode { sequences, context } => info!("decode, {sequences} x {context} tokens"),
        Step::Prefill { tokens } => info!("prefill of {tokens} tokens"),
    }
}

/// The sizes that the device is opened for: those of the steps.
fn size(args: &mut BenchRooflineArgs) {
    let SizesArgs { batch_sizes, contexts, prefill } = &args.sizes;
    let most = |sizes: &[usize]| sizes.iter().copied().max().unwrap_or(1);
    let engine = &mut args.compose.engine;
    engine.max_num_seqs = most(batch_sizes);
    engine.max_num_batched_tokens.get_or_insert(most(prefill).max(most(batch_sizes)));
    engine.max_model_len.get_or_insert(MaxModelLen::Tokens(most(contexts).max(most(prefill))));
}

fn config(args: &BenchRooflineArgs, block_size: usize) -> RooflineConfig {
    let SizesArgs { batch_sizes, contexts, prefill } = &args.sizes;
    RooflineConfig {
        batch_sizes: batch_sizes.clone(),
        contexts: contexts.clone(),
        prefill: prefill.clone(),
        max_num_batched_tokens: args.compose.engine.max_num_batched_tokens.unwrap_or(1),
        block_size,
        min_time: Duration::from_secs_f64(args.min_time),
    }
}

/// What is stated of the device, or what is measured of the processor: how fast memory is read, and its fastest unit.
fn limits(stated: Option<Peaks>, on_host: bool) -> Option<Limits> {
    if let Some(peaks) = stated {
        return Some(Limits { peaks, source: "data sheet or clocks" });
    }
    if !on_host {
        return None;
    }
    info!("measuring the processor's limits");
    match probe::Limits::measure(&ProbeConfig::default()) {
        Ok(limits) => {
            let fastest = limits.peaks.iter().map(|&(_, peak)| peak).max_by(f64::total_cmp)?;
            let peaks = Peaks { bandwidth: limits.read_bandwidth, flops: fastest };
            Some(Limits { peaks, source: "measured: reads of memory, the fastest unit" })
        }
        Err(error) => {
            warn!("the processor's limits are not measured: {error}");
            None
        }
    }
}
