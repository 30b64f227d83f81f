//! `octavo bench kernels`: each kernel of the CUDA backend at the sizes of a model.

use std::fmt;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use octavo_backend_cuda::{
    CacheType, CudaBackend, CudaConfig, ExpertSizes, KernelBench, KernelTime, Memory, early_launches, named_folders,
};
use octavo_bench::roofline::{Bounds, Figures, Limits, table};
use octavo_models::{Checkpoint, ModelConfig, ResolveOptions};
use octavo_ops::HeadShape;
use octavo_ops::cost::Cost;
use serde_json::{Value, json};
use tracing::info;

use super::{Growing, limits};
use crate::cli::{BenchKernelsArgs, Dtype, SizesArgs};
use crate::serve::device::{described, element_type};
use crate::{kernels, pull};

/// Sizes of Qwen3-8B: what is measured when no model is named. A test holds them against `models/shapes/qwen3-8b`.
const SHAPE: (usize, usize, HeadShape, usize, usize) = (4096, 12288, HeadShape::new(32, 8, 128), 36, 151_936);

pub(super) fn run(args: &BenchKernelsArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    let bench = bench(args)?;
    let backend = open(config(args.dtype)?)?;
    let (device, dtype) = (described(backend.device()), backend.dtype());
    let bencher = backend.kernel_bencher(&bench)?;
    if bencher.cases().len() == 0 {
        bail!("no kernel has '{}' in its name or its sizes", bench.filter.unwrap_or_default());
    }
    let ceilings = args.limits.as_deref().map(|path| limits::read(path, &device, dtype)).transpose()?.flatten();
    let stated = backend.stated_peaks().map(|peaks| Limits { peaks, source: "data sheet or clocks" });
    let model = args.model.as_deref().unwrap_or("Qwen3-8B").to_owned();
    let bounds = Bounds { limits: stated, ceilings };
    let mut report = KernelReport {
        model,
        device,
        dtype,
        layers: bench.layers,
        bounds,
        planned: bencher.cases().len(),
        times: Vec::new(),
    };
    let figures = Growing { path: args.output_json.as_deref() };
    for (number, (kernel, what)) in bencher.cases().enumerate() {
        info!("{kernel}: {what}");
        report.times.push(bencher.measure(number)?);
        figures.write(|| report.to_json())?;
    }
    print!("{report}");
    figures.finish();
    Ok(())
}

/// Opens the first GPU.
pub(super) fn open(config: CudaConfig) -> Result<CudaBackend> {
    CudaBackend::new(config).map_err(|reason| anyhow!("kernels are measured on a GPU, and none can be used: {reason}"))
}

fn bench(args: &BenchKernelsArgs) -> Result<KernelBench> {
    let (shape, experts) = match &args.model {
        None => (SHAPE, None),
        Some(model) => {
            let checkpoint = Checkpoint::open_shape(&pull::resolve_shape(model, &args.source)?.path)?;
            (sizes(checkpoint.config()), experts(checkpoint.config()))
        }
    };
    let (hidden, inner, heads, layers, vocab_size) = shape;
    let SizesArgs { batch_sizes, contexts, prefill } = &args.sizes;
    Ok(KernelBench {
        hidden,
        inner,
        experts,
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
    (config.hidden_size, config.layers[0].mlp.intermediate_size, heads, config.layers.len(), config.vocab_size)
}

fn experts(config: &ModelConfig) -> Option<ExpertSizes> {
    config.layers.iter().find_map(|layer| {
        let experts = layer.experts.as_ref()?;
        Some(ExpertSizes { count: experts.count, chosen: experts.chosen, inner: layer.mlp.intermediate_size })
    })
}

/// Settings of a backend that runs no step of a model.
pub(super) fn config(dtype: Dtype) -> Result<CudaConfig> {
    Ok(CudaConfig {
        device: 0,
        dtype: element_type(dtype),
        kv_cache: CacheType::Activation,
        libraries: named_folders(),
        kernel_pack: kernels::pack(None)?.map(|(folder, _)| folder),
        kernel_cache: ResolveOptions::from_env().cache_dir.join("kernels"),
        tuning: None,
        max_num_batched_tokens: 1,
        max_num_seqs: 1,
        max_rows: 1,
        max_model_len: 1,
        max_patches: 0,
        adapters: None,
        memory: Memory::Share(1.0),
        graphs: false,
        early_launches: early_launches(),
        batch_invariant: false,
    })
}

/// The times of kernels that were measured so far.
struct KernelReport {
    model: String,
    device: String,
    dtype: &'static str,
    layers: usize,
    bounds: Bounds,
    /// Number of kernels to measure.
    planned: usize,
    times: Vec<KernelTime>,
}

impl KernelReport {
    /// `None` for a kernel that was not measured.
    fn figures(&self, time: &KernelTime) -> Option<Figures> {
        let &KernelTime { bytes, flops, .. } = time;
        // A kernel's operands are not in any cache.
        let cost = Cost { activation_bytes: bytes, flops, ..Cost::default() };
        let bound = self.bounds.seconds(|peaks| cost.roofline_seconds(peaks.bandwidth, peaks.flops));
        time.seconds.as_ref().ok().map(|&seconds| Figures { seconds, bytes, flops, bound })
    }

    fn cells(&self, time: &KernelTime) -> Vec<String> {
        let (kernel, what) = (time.kernel.clone(), time.what.clone());
        match (&time.seconds, self.figures(time)) {
            (Err(reason), _) => vec![kernel, format!("{what}: {reason}")],
            (Ok(_), figures) => {
                let cells = figures.map(|figures| figures.cells()).into_iter().flatten();
                [kernel, what].into_iter().chain(cells).collect()
            }
        }
    }

    fn json(&self, time: &KernelTime) -> Value {
        let mut value = self.figures(time).map_or_else(|| json!({}), |figures| figures.json());
        if let Err(reason) = &time.seconds {
            value["error"] = reason.to_string().into();
        }
        value["kernel"] = time.kernel.clone().into();
        value["on"] = time.what.clone().into();
        value["copies"] = time.copies.into();
        value
    }

    fn to_json(&self) -> Value {
        let kernels: Vec<Value> = self.times.iter().map(|time| self.json(time)).collect();
        let Self { model, device, dtype, layers, planned, .. } = self;
        let complete = kernels.len() == *planned;
        let mut value = json!({
            "model": model,
            "device": device,
            "dtype": dtype,
            "layers": layers,
            "complete": complete,
            "kernels": kernels,
        });
        self.bounds.add_to(&mut value);
        value
    }
}

impl fmt::Display for KernelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "kernels at the sizes of {} on {}, {}", self.model, self.device, self.dtype)?;
        writeln!(f, "{}", self.bounds.lines())?;
        let heads: Vec<_> = ["kernel", "on"].into_iter().chain(Figures::HEADS).collect();
        f.write_str(&table(2, &heads, &self.times.iter().map(|time| self.cells(time)).collect::<Vec<_>>()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use octavo_backend_cuda::Unmeasured;
    use octavo_ops::cost::Peaks;

    use super::*;

    #[test]
    fn the_usual_sizes_are_those_of_the_shape() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/shapes/qwen3-8b");
        assert_eq!(sizes(octavo_models::Checkpoint::open_without_weights(&path).unwrap().config()), SHAPE);
    }

    #[test]
    fn times_are_compared_with_the_slower_of_memory_and_arithmetic() {
        let peaks = Peaks { bandwidth: 1e12, flops: 1e15 };
        let time = |kernel: &str, seconds, bytes, flops| KernelTime {
            kernel: kernel.into(),
            what: "8 rows".into(),
            seconds,
            bytes,
            flops,
            copies: 3,
        };
        let refused = Unmeasured::Refused("CUBLAS_STATUS_NOT_SUPPORTED".into());
        let times = vec![
            time("gemv", Ok(2e-3), 1_000_000_000, 1000),
            time("gemm", Ok(4e-3), 1000, 1_000_000_000_000),
            time("big", Err(Unmeasured::Memory), 1, 1),
            time("cublasLt", Err(refused), 1, 1),
        ];
        let limits = Some(Limits { peaks, source: "data sheet" });
        let ceilings = Some(Peaks { bandwidth: 0.8e12, flops: 0.5e15 });
        let bounds = Bounds { limits, ceilings };
        let mut report = KernelReport {
            model: "m".into(),
            device: "d".into(),
            dtype: "bfloat16",
            layers: 2,
            bounds,
            planned: 5,
            times,
        };
        let text = report.to_string();
        let rows: Vec<Vec<&str>> = text.lines().skip(3).map(|line| line.split_whitespace().collect()).collect();
        let heads = ["kernel", "on", "ms", "GB/s", "TFLOP/s", "bound", "ms", "of", "bound", "of", "ceiling"];
        assert_eq!(rows[0], heads);
        let gemv = ["gemv", "8", "rows", "2.000", "500.0", "0.000", "1.000", "50.0", "%", "62.5", "%"];
        assert_eq!(rows[1], gemv);
        let gemm = ["gemm", "8", "rows", "4.000", "0.0", "250.000", "1.000", "25.0", "%", "50.0", "%"];
        assert_eq!(rows[2], gemm);
        assert!(text.contains("8 rows: does not fit the memory\n"), "{text}");
        assert!(text.ends_with("8 rows: refused: CUBLAS_STATUS_NOT_SUPPORTED\n"), "{text}");
        let json = report.to_json();
        let kernels = &json["kernels"];
        assert_eq!((&kernels[0]["fraction_of_bound"], &kernels[0]["copies"]), (&0.5.into(), &3.into()));
        assert_eq!(kernels[1]["fraction_of_ceiling"], 0.5);
        assert_eq!(kernels[2]["error"], "does not fit the memory");
        assert_eq!(json["complete"], false);
        report.bounds = Bounds::default();
        report.planned = 4;
        let json = report.to_json();
        assert_eq!((&json["kernels"][0]["fraction_of_bound"], &json["complete"]), (&Value::Null, &true.into()));
    }
}
