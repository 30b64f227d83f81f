//! The choice of the device.

use std::time::Duration;

use anyhow::{Context, Result, bail};
#[cfg(feature = "candle")]
use octavo_backend_candle::CandleBackend;
use octavo_backend_cpu::{ActivationBits, CpuBackend, CpuConfig, KvDtype, WeightDtype};
use octavo_backend_cuda::{
    AdapterRoom, CacheType, CudaBackend, CudaConfig, DeviceInfo, Memory, Tuning, early_launches, named_folders, probe,
};
use octavo_models::ResolveOptions;
use octavo_ops::{Backend, Program};
use octavo_runner::AdapterLimits;
use tracing::{info, warn};

use crate::cli::{ComposeArgs, Device, Dtype, EngineArgs, Numa};
use crate::kernels;
use crate::serve::adapters;
use crate::serve::granted::Surroundings;
use crate::serve::images::Vision;
use crate::serve::model::{LoadedModel, ModelFiles};
use crate::serve::quantised;
use crate::system::{self, human_bytes};

/// Limits on processors. The token budget is smaller than vLLM's 2048, because matrix products reach their full speed
/// with a few hundred tokens and every running request waits for the step. `benches/beside_chat.py` measures the effect of
/// the bound in time and its cost.
const CPU_STEPS: StepLimits =
    StepLimits { tokens: 512, time: Some(Duration::from_millis(100)), stuck_after: Duration::from_secs(120) };

/// Area of an image on processors, in pixels. A step encodes an image whole, while other requests wait, and the work of
/// attention grows with the square of the area.
const CPU_IMAGE_PIXELS: u64 = 1 << 20;

/// Limits on a GPU. The token budget is vLLM's: a GPU needs that many tokens to be busy.
///
/// A step takes less than a second, so a GPU without progress for 30 s counts as hung. On a processor a step of a large model
/// may take a minute.
const GPU_STEPS: StepLimits = StepLimits { tokens: 2048, time: None, stuck_after: Duration::from_secs(30) };

/// Default share of a GPU's memory, which is vLLM's.
const GPU_SHARE: f64 = 0.9;

/// The chosen device, before the model is known.
#[derive(Debug)]
pub(crate) enum Choice {
    Cpu(CpuConfig),
    Cuda,
    #[cfg(feature = "candle")]
    Candle,
}

/// Limits of an engine step on a kind of device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepLimits {
    /// Token budget.
    pub(crate) tokens: usize,
    /// Bound of the estimated time; `None` means no bound.
    pub(crate) time: Option<Duration>,
    /// Time without progress after which the device counts as hung.
    pub(crate) stuck_after: Duration,
}

/// A device with the model's weights.
pub(crate) struct Computer {
    pub(crate) backend: Box<dyn Backend>,
    /// The processor's instruction set, or the GPU's name.
    pub(crate) device: String,
    /// Limits of a step unless flags say otherwise.
    pub(crate) steps: StepLimits,
    /// Bytes that a GPU has for the KV cache; `None` on a processor.
    pub(crate) kv_bytes: Option<u64>,
    /// Type of the KV cache, by vLLM's names.
    pub(crate) kv_cache_dtype: String,
    /// Description such as `NVIDIA H200 (sm_90a, 140.40 GiB), bfloat16`.
    pub(crate) name: String,
}

/// The type of the KV cache on a processor, by vLLM's names.
fn kv_dtype(name: &str) -> Result<KvDtype> {
    match name {
        "auto" | "bfloat16" => Ok(KvDtype::Bf16),
        "float16" | "half" | "float32" | "float" => {
            warn!("--kv-cache-dtype {name}: the KV cache is stored in bfloat16 instead");
            Ok(KvDtype::Bf16)
        }
        "int8_per_token_head" | "int8" => Ok(KvDtype::Int8),
        "fp8" | "fp8_e4m3" => Ok(KvDtype::Fp8),
        _ => {
            bail!(
                "--kv-cache-dtype {name}: not supported; accepted: auto, bfloat16, fp8, fp8_e4m3, int8_per_token_head"
            )
        }
    }
}

/// The type of the KV cache on a GPU, by vLLM's names.
pub(crate) fn cache_type(name: &str) -> Result<CacheType> {
    match name {
        "auto" => Ok(CacheType::Activation),
        "fp8" | "fp8_e4m3" => Ok(CacheType::E4m3),
        _ => bail!(
            "--kv-cache-dtype {name}: not supported on a GPU; accepted: fp8, fp8_e4m3, and auto, which is the type of --dtype"
        ),
    }
}

/// The type of floating-point weights on a processor.
const fn weight_dtype(dtype: Dtype) -> WeightDtype {
    match dtype {
        Dtype::Auto => WeightDtype::Halves,
        Dtype::Float32 => WeightDtype::F32,
        Dtype::Float16 => WeightDtype::F16,
        Dtype::Bfloat16 => WeightDtype::Bf16,
    }
}

/// Chooses the device, and logs the choice with its reason.
pub(crate) fn choose(args: &ComposeArgs) -> Result<Choice> {
    let gpu = match args.model.device {
        Device::Cuda => true,
        Device::Cpu => false,
        Device::Candle => return candle(args),
        Device::Auto => automatic(args)?,
    };
    if gpu {
        // What is not accepted is said before the model is read.
        cache_type(&args.model.kv_cache_dtype)?;
        return Ok(Choice::Cuda);
    }
    for warning in without_effect(args) {
        warn!("{warning}");
    }
    Ok(Choice::Cpu(CpuConfig {
        threads: args.model.cpu_threads.map(usize::from),
        isa: args.model.cpu_isa,
        weights: weight_dtype(args.model.dtype),
        kv: kv_dtype(&args.model.kv_cache_dtype)?,
        activations: match args.model.cpu_activation_bits.as_deref() {
            Some("12") => ActivationBits::Twelve,
            _ => ActivationBits::Eight,
        },
        copies_bytes: copies_bytes(args.model.cpu_numa, args.engine.kv_cache_memory_bytes, system::available_memory()),
    }))
}

/// The memory for the copies of the weights on all NUMA nodes together: half of what is available, without the KV cache if
/// its size is given.
fn copies_bytes(numa: Numa, kv_bytes: Option<usize>, available: Option<u64>) -> u64 {
    match numa {
        Numa::Auto => available.unwrap_or_default().saturating_sub(kv_bytes.unwrap_or_default() as u64) / 2,
        Numa::Off => 0,
    }
}

/// Chooses the reference backend.
#[cfg(feature = "candle")]
fn candle(args: &ComposeArgs) -> Result<Choice> {
    let kept = &args.model.kv_cache_dtype;
    if kept != "auto" {
        bail!("--kv-cache-dtype {kept}: --device candle stores the KV cache in float32; accepted: auto");
    }
    if args.model.cpu_threads.is_some() || args.model.cpu_isa.is_some() || args.model.cpu_activation_bits.is_some() {
        warn!(
            "--cpu-threads, --cpu-isa and --cpu-activation-bits have no effect: candle has its own kernels and threads"
        );
    }
    if args.model.dtype != Dtype::Auto {
        warn!("--dtype has no effect: candle computes in float32");
    }
    for warning in without_effect(args) {
        warn!("{warning}");
    }
    Ok(Choice::Candle)
}

#[cfg(not(feature = "candle"))]
fn candle(_args: &ComposeArgs) -> Result<Choice> {
    bail!(
        "--device candle: this binary was built without the reference backend; `cargo build --release --features candle` \
         builds one that has it"
    )
}

/// Whether a GPU is usable: it needs a working driver, and a kernel pack or a compiler.
///
/// # Errors
/// A GPU was given to this process and cannot be used.
fn automatic(args: &ComposeArgs) -> Result<bool> {
    let pack = kernels::pack(args.model.kernel_pack.as_deref())?;
    let report = probe(&named_folders());
    let usable = report.usable(0).map_err(|reason| reason.to_string());
    let ready = |device: &DeviceInfo| match &pack {
        Some((_, pack)) if report.takes(pack, device.chip).is_ok() => Ok(()),
        _ => report.compiler(device.chip).map(drop),
    };
    match usable.and_then(|device| ready(device).map(|()| device)) {
        Ok(device) => {
            info!("device: cuda, because {} is usable", described(device));
            Ok(true)
        }
        Err(reason) => {
            without_gpu(&reason, Surroundings::here().gpu())?;
            info!("device: cpu, because no GPU is usable: {reason}");
            Ok(false)
        }
    }
}

/// Refuses to compute on the processor if a GPU was `given` to this process.
fn without_gpu(reason: &str, given: Option<String>) -> Result<()> {
    match given {
        Some(sign) => bail!(
            "--device auto: a GPU was given to this process ({sign}) and cannot be used: {reason}. Repair that, or serve from \
             the processor with --device cpu"
        ),
        None => Ok(()),
    }
}

/// Describes a GPU: `NVIDIA H200 (sm_90a, 140.40 GiB)`.
pub(crate) fn described(device: &DeviceInfo) -> String {
    format!("{} ({}, {})", device.name, device.chip.arch(), human_bytes(device.memory))
}

/// Warnings for flags without an effect on a processor.
fn without_effect(args: &ComposeArgs) -> Vec<&'static str> {
    let gpu_memory = args.engine.gpu_memory_utilization.is_some();
    let flags = [
        (
            gpu_memory,
            "--gpu-memory-utilization has no effect: no GPU is used; use --kv-cache-memory-bytes to size the KV cache",
        ),
        (
            args.engine.batch_invariant,
            "--batch-invariant has no effect: the results on a processor are always batch-invariant",
        ),
        (args.engine.enforce_eager, "--enforce-eager has no effect: no GPU is used, so there are no CUDA graphs"),
    ];
    flags.into_iter().filter_map(|(given, warning)| given.then_some(warning)).collect()
}

/// Opens the device and loads the model.
pub(crate) fn load(choice: &Choice, args: &ComposeArgs, mut files: ModelFiles) -> Result<(LoadedModel, Computer)> {
    if !matches!(choice, Choice::Cuda) {
        files.limit_images(CPU_IMAGE_PIXELS);
    }
    match choice {
        Choice::Cpu(config) => {
            let kv_cache_dtype = files.kv_cache_dtype.clone();
            let kv = if kv_cache_dtype == "fp8" { KvDtype::Fp8 } else { config.kv };
            let config = CpuConfig { kv, ..*config };
            if kv == KvDtype::Fp8 {
                quantised::describe_kv_scales(&files.program, false);
            }
            let mut backend = CpuBackend::new(config)?;
            let device = backend.isa().to_string();
            let name = format!("cpu, {} threads, {device} kernels", backend.threads());
            info!("device: {name}");
            let model = files.load(args, &mut backend)?;
            let (backend, steps) = (Box::new(backend), CPU_STEPS);
            Ok((model, Computer { backend, device, steps, kv_bytes: None, kv_cache_dtype, name }))
        }
        #[cfg(feature = "candle")]
        Choice::Candle => {
            let mut backend = CandleBackend::new();
            info!("device: candle, the reference backend: float32, op by op, on the processor");
            let model = files.load(args, &mut backend)?;
            let (device, name) = ("cpu".to_owned(), "candle, float32".to_owned());
            let (backend, steps, kv_cache_dtype) = (Box::new(backend), CPU_STEPS, args.model.kv_cache_dtype.clone());
            Ok((model, Computer { backend, device, steps, kv_bytes: None, kv_cache_dtype, name }))
        }
        Choice::Cuda => {
            let (mut backend, kv_cache_dtype) = (cuda_backend(args, &files)?, files.kv_cache_dtype.clone());
            if cache_type(&kv_cache_dtype)? == CacheType::E4m3 {
                quantised::describe_kv_scales(&files.program, true);
            }
            let model = files.load(args, &mut backend)?;
            let (device, kv_bytes) = (backend.device().name.clone(), backend.kv_bytes());
            info!(
                "step buffers: {}; left for the KV cache: {}",
                human_bytes(backend.step_bytes()),
                human_bytes(kv_bytes)
            );
            let name = format!("{}, {}", described(backend.device()), backend.dtype());
            let (backend, steps, kv_bytes) = (Box::new(backend), GPU_STEPS, Some(kv_bytes));
            Ok((model, Computer { backend, device, steps, kv_bytes, kv_cache_dtype, name }))
        }
    }
}

/// Returns the token budget of a step: that of the flag or the default, and more for a model whose texts are not divided. A
/// model that computes an image in one step needs room for it beside a token of each other sequence.
///
/// # Errors
/// The flag leaves no room for an image.
pub(crate) fn step_tokens(
    limits: &EngineArgs,
    default: usize,
    program: &Program,
    vision: Option<&Vision>,
    max_model_len: usize,
) -> Result<usize> {
    let tokens = limits.max_num_batched_tokens.unwrap_or(default);
    let tokens = if program.reduces_rows() { tokens.max(max_model_len) } else { tokens };
    let image = vision.map_or(0, |vision| vision.tokens_of_a_step(max_model_len));
    let needed = if image > 0 { image.saturating_add(limits.max_num_seqs - 1) } else { 0 };
    if limits.max_num_batched_tokens.is_some() && tokens < needed {
        bail!(
            "--max-num-batched-tokens {tokens}: this model computes the {image} tokens of an image in one step, beside a \
             token of each of the other sequences of --max-num-seqs {}; give at least {needed}, lower --max-num-seqs, or \
             serve texts only with --language-model-only",
            limits.max_num_seqs
        );
    }
    Ok(tokens.max(needed))
}

/// The element type on a GPU; `None` for the default of the chip.
pub(crate) const fn element_type(dtype: Dtype) -> Option<octavo_backend_cuda::Dtype> {
    match dtype {
        Dtype::Auto => None,
        Dtype::Float32 => Some(octavo_backend_cuda::Dtype::F32),
        Dtype::Float16 => Some(octavo_backend_cuda::Dtype::F16),
        Dtype::Bfloat16 => Some(octavo_backend_cuda::Dtype::Bf16),
    }
}

fn cuda_backend(args: &ComposeArgs, files: &ModelFiles) -> Result<CudaBackend> {
    let limits = &args.engine;
    let max_model_len = limits.longest_context(files.checkpoint.config().max_position_embeddings);
    let max_patches = files.vision().map_or(0, |vision| vision.patches_of_a_view(max_model_len));
    let memory = match limits.kv_cache_memory_bytes {
        Some(bytes) => Memory::KvCache(bytes as u64),
        None => Memory::Share(limits.gpu_memory_utilization.unwrap_or(GPU_SHARE)),
    };
    let cache = ResolveOptions::from_env().cache_dir;
    let config = CudaConfig {
        device: 0,
        dtype: element_type(args.model.dtype),
        kv_cache: cache_type(&files.kv_cache_dtype)?,
        libraries: named_folders(),
        kernel_pack: kernels::pack(args.model.kernel_pack.as_deref())?.map(|(folder, _)| folder),
        kernel_cache: cache.join("kernels"),
        tuning: Some(Tuning::new(cache.join("tuning"))),
        max_num_batched_tokens: step_tokens(limits, GPU_STEPS.tokens, &files.program, files.vision(), max_model_len)?,
        max_num_seqs: limits.max_num_seqs,
        max_rows: octavo_runner::max_rows(limits.max_num_seqs, files.program.vocab_size),
        max_model_len,
        max_patches,
        adapters: adapters::limits(&args.adapters)?.map(|AdapterLimits { slots, rank }| AdapterRoom { slots, rank }),
        memory,
        graphs: !limits.enforce_eager,
        early_launches: early_launches(),
        batch_invariant: limits.batch_invariant,
    };
    let mut backend = match CudaBackend::new(config) {
        Ok(backend) => backend,
        Err(reason) => bail!("--device cuda: {reason}"),
    };
    if let Some(blocks) = limits.num_gpu_blocks_override {
        let size = *backend.block_sizes().first().context("the backend has no block size")?;
        let block = backend.kv_page_bytes(&files.program.kv_groups, size);
        backend.set_memory(Memory::KvCache(block.saturating_mul(blocks as u64)));
    }
    info!("device: cuda, {}, {}", described(backend.device()), backend.dtype());
    Ok(backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_keeps_keys_and_values_in_the_type_of_activations_or_in_8_bits() {
        assert_eq!(cache_type("auto").unwrap(), CacheType::Activation);
        assert_eq!(cache_type("fp8").unwrap(), CacheType::E4m3);
        assert_eq!(cache_type("fp8_e4m3").unwrap(), CacheType::E4m3);
        let error = cache_type("int8_per_token_head").unwrap_err().to_string();
        assert!(
            error.starts_with("--kv-cache-dtype int8_per_token_head: not supported on a GPU; accepted: fp8"),
            "{error}"
        );
    }

    #[test]
    fn copies_of_weights_take_half_of_the_memory_that_the_kv_cache_leaves() {
        assert_eq!(copies_bytes(Numa::Auto, None, Some(1000)), 500);
        assert_eq!(copies_bytes(Numa::Auto, Some(400), Some(1000)), 300);
        assert_eq!(copies_bytes(Numa::Auto, Some(2000), Some(1000)), 0);
        assert_eq!(copies_bytes(Numa::Auto, None, None), 0, "the memory is unknown");
        assert_eq!(copies_bytes(Numa::Off, None, Some(1000)), 0);
    }

    #[test]
    fn a_gpu_that_was_given_and_cannot_be_used_is_an_error() {
        assert!(without_gpu("there is no driver", None).is_ok());
        let error = without_gpu("there is no driver", Some("/dev/nvidia0".into())).unwrap_err().to_string();
        assert_eq!(
            error,
            "--device auto: a GPU was given to this process (/dev/nvidia0) and cannot be used: there is no driver. Repair \
             that, or serve from the processor with --device cpu"
        );
    }
}
