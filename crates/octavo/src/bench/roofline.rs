//! `octavo bench roofline`: the steps of a model against the limits of the device.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use octavo_backend_cpu::probe::{self, ProbeConfig};
use octavo_bench::roofline::{Bounds, FEWEST, Limits, RooflineBench, RooflineConfig, RooflineReport, Step};
use octavo_ops::cost::Peaks;
use tracing::{info, warn};

use super::{Growing, limits, predict};
use crate::cli::{BenchRooflineArgs, MaxModelLen, SizesArgs};
use crate::serve;
use crate::serve::settings::log_config;

pub(super) fn run(mut args: BenchRooflineArgs) -> Result<()> {
    octavo_telemetry::init_logging(&log_config(&args.compose.observe, None))?;
    size(&mut args);
    if let Some(chip) = args.predict {
        return predict::run(&args, chip);
    }
    let mut model = serve::load_model(&args.compose)?;
    let config = config(&args, model.block_size);
    let groups = model.program.kv_groups.len();
    let needed = config.steps().map(|step| config.blocks(step, groups)).filter(|&blocks| blocks <= model.blocks).max();
    let Some(blocks) = needed else {
        bail!("the KV cache holds {} blocks, too few for any of the steps; use smaller sizes", model.blocks);
    };
    let limits = stated_limits(model.backend.device_profile().peaks, model.on_host);
    let ceilings = args.limits.as_deref().map(|path| limits::read(path, &model.device, model.backend.kv_dtype()));
    let bounds = Bounds { limits, ceilings: ceilings.transpose()?.flatten() };
    model.backend.allocate_kv(model.block_size, blocks)?;
    let mut bench = RooflineBench::new(model.backend.as_mut(), &model.program, blocks, &config, &bounds);
    let (planned, steps) = (config.steps().count(), Vec::new());
    let mut report = RooflineReport { model: model.name, device: model.device, bounds: bounds.clone(), planned, steps };
    let figures = Growing { path: args.output_json.as_deref() };
    info!("measuring {planned} steps, each for about {} s and at least {FEWEST} times", args.min_time);
    let begun = Instant::now();
    for (index, step) in config.steps().enumerate() {
        info!("step {} of {planned}: {}{}", index + 1, described(step), time_left(begun.elapsed(), index, planned));
        report.steps.push(bench.measure(step)?);
        figures.write(|| report.to_json())?;
    }
    print!("{report}");
    figures.finish();
    Ok(())
}

/// The estimate of the time for the remaining steps, after the first of them.
fn time_left(elapsed: Duration, done: usize, planned: usize) -> String {
    if done == 0 {
        return String::new();
    }
    let left = elapsed.as_secs_f64() / done as f64 * planned.saturating_sub(done) as f64;
    format!("; about {left:.0} s left")
}

fn described(step: Step) -> String {
    match step {
        Step::Decode { sequences, context } => format!("decode of {sequences} x {context} tokens"),
        Step::Prefill { tokens } => format!("prefill of {tokens} tokens"),
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

pub(super) fn config(args: &BenchRooflineArgs, block_size: usize) -> RooflineConfig {
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

/// Limits that the maker states; of the processor the measured ones: the bandwidth of reads, and the rate of its fastest unit.
fn stated_limits(stated: Option<Peaks>, on_host: bool) -> Option<Limits> {
    if let Some(peaks) = stated {
        return Some(Limits { peaks, source: "data sheet or clocks" });
    }
    if !on_host {
        return None;
    }
    info!("measuring the processor's memory bandwidth and arithmetic rates, which takes about ten seconds");
    match probe::Limits::measure(&ProbeConfig::default()) {
        Ok(limits) => {
            let fastest = limits.peaks.iter().map(|&(_, peak)| peak).max_by(f64::total_cmp)?;
            let peaks = Peaks { bandwidth: limits.read_bandwidth, flops: fastest };
            Some(Limits { peaks, source: "measured: reads of memory, the fastest unit" })
        }
        Err(error) => {
            warn!("the processor's limits cannot be measured: {error}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_follows_from_the_steps_that_are_done() {
        assert_eq!(time_left(Duration::ZERO, 0, 10), "");
        assert_eq!(time_left(Duration::from_secs(8), 4, 10), "; about 12 s left");
    }
}
