//! `octavo bench kernels`: each kernel of the CUDA backend at the sizes of a model.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use octavo_backend_cuda::{CudaBackend, CudaConfig, KernelBench, KernelTime, KernelTimes, Memory, named_folders};
use octavo_bench::roofline::{Figures, Limits, table};
use octavo_models::{Checkpoint, ModelConfig, ResolveOptions};
use octavo_ops::HeadShape;
use octavo_ops::cost::{Cost, Peaks};
use serde_json::{Value, json};
use tracing::info;

use super::write_json;
use crate::cli::{BenchKernelsArgs, SizesArgs};
use crate::serve::device::{described, element_type};
use crate::{kernels, pull};

/// Sizes of Qwen3-8B: what is measured when no model is named. A test holds them against `models/shapes/qwen3-8b`.
const SHAPE: (usize, usize, HeadShape, usize, usize) = (4096, 12288, HeadShape { q: 32, kv: 8, dim: 128 }, 36, 151_936);

pub(super) fn run(args: &BenchKernelsArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    let bench = bench(args)?;
    let backend = CudaBackend::new(config(args)?)
        .map_err(|reason| anyhow!("kernels are measured on a GPU, and none can be used: {reason}"))?;
    let (device, dtype) = (described(backend.device()), backend.dtype());
    let times = backend.bench_kernels(&bench, &mut |kernel, what| info!("{kernel}: {what}"))?;
    if times.times.is_empty() {
        bail!("no kernel has '{}' in its name or its sizes", bench.filter.unwrap_or_default());
    }
    let model = args.model.as_deref().unwrap_or("Qwen3-8B");
    let limits = times.peaks.map(|peaks| Limits { peaks, source: "data sheet or clocks" });
    println!("kernels at the sizes of {model} on {device}, {dtype}");
    println!("{}", Limits::line(limits.as_ref()));
    print!("{}", report(&times));
    match &args.output_json {
        Some(path) => {
            let kernels: Vec<Value> = times.times.iter().map(|time| figures(time, times.peaks)).collect();
            let limits = Limits::json(limits.as_ref());
            write_json(
                path,
                &json!({"model": model, "device": device, "dtype": dtype, "limits": limits, "kernels": kernels}),
            )
        }
        None => Ok(()),
    }
}

fn bench(args: &BenchKernelsArgs) -> Result<KernelBench> {
    let shape = match &args.model {
        None => SHAPE,
        Some(model) => sizes(Checkpoint::open_shape(&pull::resolve_shape(model, &args.source)?.path)?.config()),
    };
    let (hidden, inner, heads, layers, vocab_size) = shape;
    let SizesArgs { batch_sizes, contexts, prefill } = &args.sizes;
    Ok(KernelBench {
        hidden,
        inner,
        heads,
        layers,
        vocab_size,
        batch_sizes: batch_sizes.clone(),
        contexts: contexts.clone(),
        prefill: prefill.clone(),
        filter: args.filter.clone(),
        min_time: Duration::from_secs_f64(args.min_time),
    })
}

fn sizes(config: &ModelConfig) -> (usize, usize, HeadShape, usize, usize) {
    let heads = config.head_shape();
    (config.hidden_size, config.intermediate_size, heads, config.layers, config.vocab_size)
}

/// Nothing of a model's steps is needed: no step is run.
fn config(args: &BenchKernelsArgs) -> Result<CudaConfig> {
    Ok(CudaConfig {
        device: 0,
        dtype: element_type(args.dtype),
        libraries: named_folders(),
        kernel_pack: kernels::pack(None)?.map(|(folder, _)| folder),
        kernel_cache: ResolveOptions::from_env().cache_dir.join("kernels"),
        max_num_batched_tokens: 1,
        max_num_seqs: 1,
        max_rows: 1,
        max_model_len: 1,
        memory: Memory::Share(1.0),
        graphs: false,
        batch_invariant: false,
    })
}

fn of(time: &KernelTime, peaks: Option<Peaks>) -> Option<Figures> {
    let &KernelTime { bytes, flops, seconds, .. } = time;
    // A kernel's operands are not in any cache.
    let cost = Cost { activation_bytes: bytes, flops, ..Cost::default() };
    let bound = peaks.map(|peaks| cost.roofline_seconds(peaks.bandwidth, peaks.flops));
    seconds.map(|seconds| Figures { seconds, bytes, flops, bound })
}

fn report(times: &KernelTimes) -> String {
    let row = |time: &KernelTime| {
        let (kernel, what) = (time.kernel.clone(), time.what.clone());
        match of(time, times.peaks) {
            Some(figures) => [kernel, what].into_iter().chain(figures.cells()).collect(),
            None => vec![kernel, format!("{what}: does not fit the memory")],
        }
    };
    let heads = ["kernel", "on"].into_iter().chain(Figures::HEADS);
    table(2, &heads.collect::<Vec<_>>(), &times.times.iter().map(row).collect::<Vec<_>>())
}

fn figures(time: &KernelTime, peaks: Option<Peaks>) -> Value {
    let mut value = of(time, peaks).map_or_else(|| json!({"error": "it does not fit the memory"}), |f| f.json());
    value["kernel"] = time.kernel.clone().into();
    value["on"] = time.what.clone().into();
    value["copies"] = time.copies.into();
    value
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_usual_sizes_are_those_of_the_shape() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/shapes/qwen3-8b");
        assert_eq!(sizes(octavo_models::Checkpoint::open_without_weights(&path).unwrap().config()), SHAPE);
    }

    #[test]
    fn times_are_held_against_the_slower_of_memory_and_arithmetic() {
        let peaks = Peaks { bandwidth: 1e12, flops: 1e15 };
        let time = |kernel: &str, seconds, bytes, flops| KernelTime {
            kernel: kernel.into(),
            what: "8 rows".into(),
            seconds,
            bytes,
            flops,
            copies: 3,
        };
        let times = vec![
            time("gemv", Some(2e-3), 1_000_000_000, 1000),
            time("gemm", Some(4e-3), 1000, 1_000_000_000_000),
            time("big", None, 1, 1),
        ];
        let times = KernelTimes { peaks: Some(peaks), times };
        let text = report(&times);
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["kernel", "on", "ms", "GB/s", "TFLOP/s", "bound", "ms", "of", "bound"]);
        assert_eq!(rows[1], ["gemv", "8", "rows", "2.000", "500.0", "0.000", "1.000", "50.0", "%"]);
        assert_eq!(rows[2], ["gemm", "8", "rows", "4.000", "0.0", "250.000", "1.000", "25.0", "%"]);
        assert!(text.ends_with("8 rows: does not fit the memory\n"), "{text}");
        let json = figures(&times.times[0], times.peaks);
        assert_eq!((&json["fraction_of_bound"], &json["copies"]), (&0.5.into(), &3.into()));
        assert_eq!(figures(&times.times[0], None)["fraction_of_bound"], Value::Null);
        assert_eq!(figures(&times.times[2], None)["error"], "it does not fit the memory");
    }
}
