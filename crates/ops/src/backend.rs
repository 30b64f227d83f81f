//! What a device has to offer.

use std::borrow::Cow;

use crate::cost::{ElementBytes, Peaks};
use crate::dummy::DummyRule;
use crate::sampling::{SampleBatch, SampledToken};
use crate::{BackendError, KvGroup, Program, StepBatch, StorageType, WeightError, WeightPart};

/// A tensor of a checkpoint in its storage type, usually a view of the mapped file.
#[derive(Clone, Debug)]
pub struct TensorData<'a> {
    /// How `bytes` are laid out.
    pub storage: StorageType,
    /// Row-major, outermost dimension first; the last is the input dimension.
    pub shape: Vec<usize>,
    /// Exactly `storage.bytes_for(product of shape)` bytes, little-endian, of any alignment.
    pub bytes: Cow<'a, [u8]>,
}

impl WeightPart {
    /// Whether a checkpoint's tensor is what the program says of it, for a weight of `cols` columns.
    pub fn check(&self, cols: usize, data: &TensorData<'_>) -> Result<(), WeightError> {
        let invalid = |reason| Err(WeightError::Invalid { name: self.tensor.clone(), reason });
        if data.storage != self.storage {
            return invalid(format!("it is stored as {}, expected {}", data.storage, self.storage));
        }
        let elements = data.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        // A vector may be read as one row or as one column (the parts of a fused bias).
        let is_vector = data.shape.len() <= 1;
        if elements != self.rows.checked_mul(cols) || !(is_vector || data.shape.last() == Some(&cols)) {
            return invalid(format!("its shape is {:?}, expected [{}, {cols}]", data.shape, self.rows));
        }
        let expected = elements.and_then(|n| self.storage.bytes_for(n)).unwrap_or(usize::MAX);
        if expected != data.bytes.len() {
            return invalid(format!("it holds {} bytes, its shape needs {expected}", data.bytes.len()));
        }
        Ok(())
    }
}

/// Where a backend takes a program's weights from: a checkpoint.
pub trait WeightSource: Send + Sync {
    /// The tensor called `name`, as named by [`WeightPart::tensor`](crate::WeightPart::tensor).
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, WeightError>;

    /// How the values of a plain tensor are made, where they are made up: a device may then make them itself.
    fn rule(&self, _name: &str) -> Option<DummyRule> {
        None
    }
}

/// What tells how well a device is used.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProfile {
    /// What a backend keeps activations and keys in.
    pub elements: ElementBytes,
    /// `None` where nobody has stated them.
    pub peaks: Option<Peaks>,
    /// Bytes of the device's own memory, and of the buffers of a step in it; `None` where it is the host's.
    pub memory: Option<(u64, u64)>,
}

/// That a backend has KV blocks of `size` tokens.
///
/// # Errors
/// [`BackendError::Unsupported`], which names the sizes that it has.
pub fn check_block_size(backend: &'static str, sizes: &[usize], size: usize) -> Result<(), BackendError> {
    if sizes.contains(&size) {
        return Ok(());
    }
    Err(BackendError::Unsupported { backend, what: format!("KV blocks of {size} tokens; it supports {sizes:?}") })
}

/// That there is a number of blocks for each KV group of a program.
///
/// # Errors
/// [`BackendError::Failed`], which tells both numbers.
pub fn check_block_counts(backend: &'static str, groups: &[KvGroup], blocks: &[usize]) -> Result<(), BackendError> {
    if groups.len() == blocks.len() {
        return Ok(());
    }
    let reason = format!("{} block counts for {} KV groups", blocks.len(), groups.len());
    Err(BackendError::Failed { backend, reason })
}

/// A device that runs programs. One backend holds one model.
///
/// How weights and KV lie in memory is the backend's business: callers know names, shapes and block ids.
/// Methods are called from one thread at a time; `forward` and `sample` of one step follow each other.
pub trait Backend: Send {
    /// `candle`, `cpu`, `cuda`.
    fn name(&self) -> &'static str;

    /// Tokens per KV block that the backend supports; the first is its default.
    fn block_sizes(&self) -> &[usize];

    /// Element type of the KV cache, for people (`float32`, `bfloat16`).
    fn kv_dtype(&self) -> &'static str;

    /// Bytes of one block of `block_size` tokens of `group`, over all its layers.
    fn kv_block_bytes(&self, group: &KvGroup, block_size: usize) -> u64;

    /// Takes the program and reads its weights. `progress` is called with the bytes read so far.
    fn load(
        &mut self,
        program: &Program,
        weights: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError>;

    /// Bytes that the loaded weights occupy.
    fn weight_bytes(&self) -> u64;

    /// Allocates `blocks[g]` blocks (the null block 0 included) of `block_size` tokens for each KV group g, zeroed.
    fn allocate_kv(&mut self, block_size: usize, blocks: &[usize]) -> Result<(), BackendError>;

    /// Steps that may be under way: 2 where calls launch work and return, so that a step can be launched before the tokens
    /// of the one before have been taken; 1 for a backend that works on the caller's thread.
    fn max_in_flight(&self) -> usize {
        1
    }

    /// Runs the forward part of the program. The logits `[R,V]` stay on the device for the sampling, the hidden states
    /// `[E,H]` for [`Backend::embeddings`]. Where two steps may be under way, tokens may be named as
    /// [`StepBatch::drawn`] of the step that was sampled last.
    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError>;

    /// Starts to draw one token for each of the R rows of the last forward pass, or takes the one that is forced. After an
    /// error there is nothing to take.
    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError>;

    /// Waits for the tokens of the oldest step whose sampling was started and which nobody has taken; in the order of its
    /// rows, into `out` (cleared first).
    fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError>;

    /// Draws the tokens of the last forward pass into `out` (cleared first).
    fn sample(&mut self, batch: &SampleBatch<'_>, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        out.clear();
        self.start_sampling(batch)?;
        self.take_tokens(out)
    }

    /// The hidden states `[E,H]` of the last forward pass, row by row, into `out` (cleared first). Waits for the step.
    fn embeddings(&mut self, out: &mut Vec<f32>) -> Result<(), BackendError>;

    /// The logits `[R,V]` of the last forward pass, for parity tests and tools.
    fn logits(&self) -> Result<Vec<f32>, BackendError>;

    /// Copies whole blocks `(from, to)` of a KV group.
    fn copy_blocks(&mut self, group: usize, pairs: &[(u32, u32)]) -> Result<(), BackendError>;

    /// What tells how well the device is used; once a model is loaded.
    fn device_profile(&self) -> DeviceProfile {
        DeviceProfile { elements: ElementBytes::F32, peaks: None, memory: None }
    }

    /// Steps that were replayed as they had been recorded, and steps that were launched op by op, since the model was loaded;
    /// `None` for a device that records none.
    fn step_counts(&self) -> Option<(u64, u64)> {
        None
    }
}
