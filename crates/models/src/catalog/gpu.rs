//! Flags with which a catalog model is served on common GPUs.

use serde::Deserialize;

use super::{CatalogEntry, DeviceKind};

/// Share of a GPU's memory that the server takes (`--gpu-memory-utilization`), in percent.
const SHARE: u64 = 90;
/// Memory in bytes for what the cost model leaves out: activations, logits, CUDA graphs and the driver's context.
const REST: u64 = 2 << 30;
/// A context length is cut to a multiple of this many tokens.
const STEP: u64 = 1024;
/// A GPU on which a request has fewer tokens than this, and than the model's context, is not recommended.
const LEAST: u64 = 4096;

/// A GPU for which entries state flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub enum Gpu {
    /// NVIDIA V100 with 16 GB.
    #[serde(rename = "v100-16")]
    V100With16,
    /// NVIDIA V100 with 32 GB.
    #[serde(rename = "v100-32")]
    V100With32,
    /// NVIDIA L40S.
    #[serde(rename = "l40s")]
    L40s,
    /// NVIDIA H100 with 80 GB.
    #[serde(rename = "h100")]
    H100,
}

impl Gpu {
    /// All GPUs, the smallest first.
    pub const ALL: [Gpu; 4] = [Gpu::V100With16, Gpu::V100With32, Gpu::L40s, Gpu::H100];

    /// Display name.
    pub const fn name(self) -> &'static str {
        match self {
            Gpu::V100With16 => "V100 16 GB",
            Gpu::V100With32 => "V100 32 GB",
            Gpu::L40s => "L40S 48 GB",
            Gpu::H100 => "H100 80 GB",
        }
    }

    /// Size of the memory in bytes, by the data sheet.
    pub const fn memory(self) -> u64 {
        let gigabytes = match self {
            Gpu::V100With16 => 16,
            Gpu::V100With32 => 32,
            Gpu::L40s => 48,
            Gpu::H100 => 80,
        };
        gigabytes * 1_000_000_000
    }

    /// Whether its tensor cores take bf16.
    const fn has_bf16(self) -> bool {
        !matches!(self, Gpu::V100With16 | Gpu::V100With32)
    }
}

impl CatalogEntry {
    /// Computes the flags of `octavo serve` for one of these GPUs; `None` if the model does not fit it. They hold for
    /// one request of the full context, and `--max-model-len` is among them only if the model's own context does not fit.
    pub fn gpu_flags(&self, gpu: Gpu) -> Option<String> {
        let need = self.memory_need(DeviceKind::Cuda, 1);
        let room = (gpu.memory() / 100 * SHARE).checked_sub(need.weights + REST)?;
        let context = u64::from(self.context);
        // An encoder has no KV cache.
        let fits = room.checked_div(need.kv).unwrap_or(context);
        let mut flags = Vec::new();
        if !gpu.has_bf16() {
            flags.push("--dtype half".to_owned());
        }
        if fits < context {
            let tokens = fits / STEP * STEP;
            if tokens < LEAST {
                return None;
            }
            flags.push(format!("--max-model-len {tokens}"));
        }
        Some(flags.join(" "))
    }

    /// Checks that the stated flags are the computed ones.
    pub(super) fn check_flags(&self) -> Result<(), String> {
        for gpu in Gpu::ALL {
            let (stated, computed) = (self.flags.get(&gpu), self.gpu_flags(gpu));
            if stated != computed.as_ref() {
                return Err(format!("the flags for {} are {stated:?}, computed {computed:?}", gpu.name()));
            }
        }
        Ok(())
    }
}
