//! What a backend is made for.

use std::path::PathBuf;

use octavo_kernels::manifest::Dtype;

/// Device, precision and sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaConfig {
    /// Number of the GPU, from 0.
    pub device: usize,
    /// Of weights, activations and KV cache; `None` takes bf16 where the chip has it and f16 elsewhere.
    pub dtype: Option<Dtype>,
    /// Folders in which the driver and the libraries are looked for before the usual ones.
    pub libraries: Vec<PathBuf>,
    /// Folder of kernels that were compiled ahead of time ([`build_pack`](crate::build_pack)), which are used before those of the
    /// cache.
    pub kernel_pack: Option<PathBuf>,
    /// Folder in which compiled kernels are kept.
    pub kernel_cache: PathBuf,
    /// Tokens of a step, at most.
    pub max_num_batched_tokens: usize,
    /// Sequences of a step, at most.
    pub max_num_seqs: usize,
    /// Rows of a step that reach the head, at most; and rows whose hidden state is returned.
    pub max_rows: usize,
    /// Tokens of a sequence, at most.
    pub max_model_len: usize,
    /// Memory that is taken.
    pub memory: Memory,
    /// Whether steps in which all sequences decode are recorded as CUDA graphs at the start.
    pub graphs: bool,
    /// Whether a row's bits are the same in every batch. Products are then our own and not cuBLASLt's, and attention reads every
    /// key in one order, whether it decodes or prefills: slower.
    pub batch_invariant: bool,
}

/// How much of the device's memory is taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Memory {
    /// This share of it, what others use included; the KV cache gets what weights and step buffers leave.
    Share(f64),
    /// This many bytes for the KV cache, beside weights and step buffers.
    KvCache(u64),
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Sizes for small models.
    pub(crate) fn config() -> CudaConfig {
        CudaConfig {
            device: 0,
            dtype: None,
            libraries: Vec::new(),
            kernel_pack: None,
            kernel_cache: PathBuf::new(),
            max_num_batched_tokens: 128,
            max_num_seqs: 8,
            max_rows: 128,
            max_model_len: 256,
            memory: Memory::Share(0.5),
            graphs: true,
            batch_invariant: false,
        }
    }
}
