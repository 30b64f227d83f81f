//! Configuration of a backend.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use octavo_kernels::manifest::{CacheType, Dtype};

/// Device, precision and sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaConfig {
    /// Index of the GPU, from 0.
    pub device: usize,
    /// Element type of weights and activations; `None` selects bf16 if the chip supports it, else f16.
    pub dtype: Option<Dtype>,
    /// Element type of the KV cache.
    pub kv_cache: CacheType,
    /// Folders in which the driver and the libraries are searched before the usual ones.
    pub libraries: Vec<PathBuf>,
    /// Folder of precompiled kernels ([`build_pack`](crate::build_pack)), which have priority over those of the cache.
    pub kernel_pack: Option<PathBuf>,
    /// Folder of the cache of compiled kernels.
    pub kernel_cache: PathBuf,
    /// Measurements of products while a model is loaded; `None` chooses their kernels by the chip, without measurements.
    pub tuning: Option<Tuning>,
    /// Maximum number of tokens in a step.
    pub max_num_batched_tokens: usize,
    /// Maximum number of sequences in a step.
    pub max_num_seqs: usize,
    /// Maximum number of rows of a step that reach the head, and of rows whose hidden state is returned. A program that
    /// samples nothing may return the hidden states of all tokens instead.
    pub max_rows: usize,
    /// Maximum number of tokens of a sequence.
    pub max_model_len: usize,
    /// Maximum number of patches of an image; 0 if no encoder of images will be loaded.
    pub max_patches: usize,
    /// Room that is left to adapters beside the KV cache, if any will be allocated.
    pub adapters: Option<AdapterRoom>,
    /// Amount of memory to use.
    pub memory: Memory,
    /// Whether steps in which all sequences decode are recorded as CUDA graphs at the start.
    pub graphs: bool,
    /// Whether a launch may begin before the one before has ended, where chip and driver can do that. The results are the same.
    pub early_launches: bool,
    /// Whether a row's bits are the same in every batch. Products then use our own kernels instead of cuBLASLt, and
    /// attention reads every key in one order in decode and prefill, with the kernel of prefill, which is slower.
    pub batch_invariant: bool,
}

/// Variable that turns early launches off with the value 0, to find out whether they cause a fault.
const EARLY_LAUNCHES: &str = "OCTAVO_CUDA_EARLY_LAUNCHES";

/// Returns whether `OCTAVO_CUDA_EARLY_LAUNCHES` allows launches to begin before the one before has ended.
pub fn early_launches() -> bool {
    are_allowed(std::env::var_os(EARLY_LAUNCHES).as_deref())
}

fn are_allowed(value: Option<&OsStr>) -> bool {
    value.is_none_or(|value| value != "0")
}

/// Measurements of products.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Folder of the files with the fastest kernels and algorithms. What they lack is measured.
    pub folder: PathBuf,
    /// Time after which no further algorithms of cuBLASLt are measured; products without measurements keep its first choice.
    pub time: Duration,
}

impl Tuning {
    /// Time for the algorithms of cuBLASLt: a container without a volume for the file measures at every start.
    pub const TIME: Duration = Duration::from_secs(2);

    /// Returns measurements with the usual time.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), time: Self::TIME }
    }
}

/// Room for adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterRoom {
    /// Number of slots.
    pub slots: usize,
    /// Largest rank.
    pub rank: usize,
}

/// Amount of the device's memory to use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Memory {
    /// Share of the device's memory, including memory used by others. The KV cache gets the part that weights and step
    /// buffers leave.
    Share(f64),
    /// Number of bytes for the KV cache, in addition to weights and step buffers.
    KvCache(u64),
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn a_zero_turns_early_launches_off() {
        assert!([None, Some(""), Some("1")].iter().all(|value| are_allowed(value.map(OsStr::new))));
        assert!(!are_allowed(Some(OsStr::new("0"))));
    }

    /// Returns sizes for small models.
    pub(crate) fn config() -> CudaConfig {
        CudaConfig {
            device: 0,
            dtype: None,
            kv_cache: CacheType::Activation,
            libraries: Vec::new(),
            kernel_pack: None,
            kernel_cache: PathBuf::new(),
            tuning: None,
            max_num_batched_tokens: 128,
            max_num_seqs: 8,
            max_rows: 128,
            max_model_len: 256,
            max_patches: 256,
            adapters: None,
            memory: Memory::Share(0.5),
            graphs: true,
            early_launches: true,
            batch_invariant: false,
        }
    }
}
