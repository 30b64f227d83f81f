//! `octavo bench latency` and `octavo bench throughput`: measurements of an engine in this process, without HTTP.

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use octavo_bench::offline::{
    self, FixedBatch, LatencyConfig, LatencyReport, ModelLimits, ThroughputConfig, ThroughputReport,
};
use octavo_bench::plot::Chart;
use octavo_engine::EngineHandle;
use serde_json::Value;

use super::bar::watched;
use super::{write_json, write_plot};
use crate::cli::{BatchArgs, BenchLatencyArgs, BenchThroughputArgs, ComposeArgs, ReportArgs, RequestsArgs};
use crate::serve;
use crate::serve::settings::log_config;

pub(super) fn latency(args: &BenchLatencyArgs) -> Result<()> {
    let seed = seed(&args.compose);
    let (report, model) = with_engine(&args.compose, async |engine, limits| {
        let batch = FixedBatch::new(&latency_config(&args.batch, limits, seed))?;
        iterate("Warmup iterations", args.batch.num_iters_warmup, &batch, engine).await?;
        let latencies = iterate("Bench iterations", args.batch.num_iters, &batch, engine).await?;
        LatencyReport::new(&latencies).context("--num-iters must be at least 1")
    })?;
    print!("{report}");
    let BatchArgs { batch_size, input_len, output_len, .. } = args.batch;
    let title = format!("{model}: batches of {batch_size}, {input_len} + {output_len} tokens each");
    save(&args.report, &report.to_json(), || report.chart(title))
}

pub(super) fn throughput(args: &BenchThroughputArgs) -> Result<()> {
    let seed = seed(&args.compose);
    let (report, model): (ThroughputReport, _) = with_engine(&args.compose, async |engine, limits| {
        let config = throughput_config(&args.requests, limits, seed);
        let answers = config.prompts.saturating_mul(config.n as usize);
        let run = watched("answers", answers, async |done| offline::throughput(engine, &config, &done).await);
        Ok(run.await?)
    })?;
    print!("{report}");
    let RequestsArgs { num_prompts, input_len, output_len, .. } = args.requests;
    let title = format!("{model}: {num_prompts} requests of {input_len} + {output_len} tokens");
    save(&args.report, &report.to_json(), || report.chart(title))
}

/// Loads the model and measures its engine. Returns the result and the model's name.
fn with_engine<T>(
    args: &ComposeArgs,
    measure: impl AsyncFnOnce(&EngineHandle, ModelLimits) -> Result<T>,
) -> Result<(T, String)> {
    octavo_telemetry::init_logging(&log_config(&args.observe, None))?;
    let composed = serve::compose_in_process(args)?;
    let limits = ModelLimits {
        vocab_size: u32::try_from(composed.vocab_size).unwrap_or(u32::MAX),
        max_model_len: composed.max_model_len,
    };
    // One thread reads all answers, so that the other threads are free for the model.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let measured = runtime.block_on(measure(&composed.engine.handle(), limits));
    composed.engine.join();
    Ok((measured?, composed.model_name))
}

/// Runs the batch `count` times.
async fn iterate(
    what: &'static str,
    count: usize,
    batch: &FixedBatch,
    engine: &EngineHandle,
) -> Result<Vec<Duration>, offline::OfflineError> {
    watched(what, count, async |done| {
        let mut latencies = Vec::with_capacity(count);
        for _ in 0..count {
            latencies.push(batch.run(engine).await?);
            done.fetch_add(1, Ordering::Relaxed);
        }
        Ok(latencies)
    })
    .await
}

/// Random seed for prompts and sampling: 0 by default, as in vLLM.
fn seed(args: &ComposeArgs) -> u64 {
    args.sampling.seed.unwrap_or(0)
}

fn latency_config(args: &BatchArgs, limits: ModelLimits, seed: u64) -> LatencyConfig {
    let &BatchArgs { input_len, output_len, batch_size, n, .. } = args;
    LatencyConfig { limits, input_len, output_len, batch_size, n, seed }
}

fn throughput_config(args: &RequestsArgs, limits: ModelLimits, seed: u64) -> ThroughputConfig {
    let &RequestsArgs { input_len, output_len, random_range_ratio: range_ratio, num_prompts: prompts, n } = args;
    ThroughputConfig { limits, prompts, input_len, output_len, range_ratio, n, seed }
}

fn save(args: &ReportArgs, figures: &Value, chart: impl FnOnce() -> Chart) -> Result<()> {
    if let Some(path) = &args.output_json {
        write_json(path, figures)?;
    }
    if let Some(path) = &args.plot {
        write_plot(path, &chart())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, BenchArgs, BenchCommand, Command};

    const LIMITS: ModelLimits = ModelLimits { vocab_size: 320, max_model_len: 2048 };

    fn parsed(line: &str) -> Result<BenchCommand, String> {
        let args = line.split_whitespace().map(Into::into).collect();
        let cli = cli::parse(args, &|_| None).map_err(|failure| failure.to_string())?;
        match cli.command {
            Command::Bench(BenchArgs { command }) => Ok(command),
            _ => Err("another command".to_owned()),
        }
    }

    fn latency(line: &str) -> Box<BenchLatencyArgs> {
        match parsed(line) {
            Ok(BenchCommand::Latency(args)) => args,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn throughput(line: &str) -> Box<BenchThroughputArgs> {
        match parsed(line) {
            Ok(BenchCommand::Throughput(args)) => args,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn defaults_are_vllms() {
        let args = latency("bench latency");
        let expected = LatencyConfig { limits: LIMITS, input_len: 32, output_len: 128, batch_size: 8, n: 1, seed: 0 };
        assert_eq!(latency_config(&args.batch, LIMITS, seed(&args.compose)), expected);
        assert_eq!((args.batch.num_iters_warmup, args.batch.num_iters), (10, 30));
        assert!(!args.compose.engine.enable_prefix_caching, "every iteration computes its prompts");

        let args = throughput("bench throughput");
        let expected = ThroughputConfig {
            limits: LIMITS,
            prompts: 1000,
            input_len: 1024,
            output_len: 128,
            range_ratio: 0.0,
            n: 1,
            seed: 0,
        };
        assert_eq!(throughput_config(&args.requests, LIMITS, seed(&args.compose)), expected);
        assert!(args.compose.engine.enable_prefix_caching);
    }

    #[test]
    fn flags_of_vllm_are_understood() {
        let args = latency(
            "vllm bench latency --model m --input_len 1k --output-len=5 --batch_size 2 --n 3 --num_iters_warmup 0 \
             --num-iters 4 --output_json o.json --seed 7 --max-model-len 2K --enable-prefix-caching -tp 1 \
             --disable-detokenize --plot p.svg",
        );
        let expected = LatencyConfig { limits: LIMITS, input_len: 1000, output_len: 5, batch_size: 2, n: 3, seed: 7 };
        assert_eq!(latency_config(&args.batch, LIMITS, seed(&args.compose)), expected);
        assert_eq!((args.batch.num_iters_warmup, args.batch.num_iters), (0, 4));
        assert_eq!(args.compose.model.given(), Some("m"));
        assert!(args.compose.engine.enable_prefix_caching);
        assert_eq!((args.report.output_json, args.report.plot), (Some("o.json".into()), Some("p.svg".into())));

        let args = throughput(
            "bench throughput m --backend vllm --dataset_name random --random-input-len 10 --random_output_len 20 \
             --random-range-ratio 0.5 --num-prompts 30 --n 2 --async-engine --no-enable-prefix-caching",
        );
        let config = throughput_config(&args.requests, LIMITS, seed(&args.compose));
        assert_eq!((config.input_len, config.output_len, config.prompts, config.n), (10, 20, 30, 2));
        assert_eq!(config.range_ratio, 0.5);
        assert!(!args.compose.engine.enable_prefix_caching);
    }

    #[test]
    fn wrong_values_are_named() {
        for (line, expected) in [
            ("bench latency --num-iters 0", "--num-iters"),
            ("bench latency --batch-size 0", "--batch-size"),
            ("bench latency --plot p.png", ".svg"),
            ("bench throughput --dataset-name sharegpt", "possible values: random"),
            ("bench throughput --output-len 5G", "too large"),
            ("bench throughput --num-prompt 3", "--num-prompts"),
        ] {
            let error = parsed(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
