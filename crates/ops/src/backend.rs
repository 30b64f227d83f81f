//! Interface of a device.

use std::borrow::Cow;
use std::time::Duration;

use crate::cost::{ElementBytes, Peaks};
use crate::dummy::DummyRule;
use crate::sampling::{SampleBatch, SampledToken};
use crate::{
    AdapterSource, BackendError, EncodeBatch, KvGroup, LoraMatrices, Program, ProgramKind, SiteId, Slab, StepBatch,
    StorageType, WeightError, WeightPart,
};

/// A tensor of a checkpoint in its storage type, usually a view of the mapped file.
#[derive(Clone, Debug)]
pub struct TensorData<'a> {
    /// Layout of `bytes`.
    pub storage: StorageType,
    /// Shape, row-major, outermost dimension first; the last is the input dimension.
    pub shape: Vec<usize>,
    /// Exactly `storage.bytes_for(product of shape)` bytes, little-endian, of any alignment.
    pub bytes: Cow<'a, [u8]>,
}

impl WeightPart {
    /// Reads the part from a checkpoint, for a weight of `cols` columns. The shape of a slab is `[rows, cols]`.
    ///
    /// # Errors
    /// Returns an error if the checkpoint has no such tensor or it does not match the part.
    pub fn read<'a>(&self, cols: usize, source: &'a dyn WeightSource) -> Result<TensorData<'a>, WeightError> {
        let data = source.tensor(&self.tensor)?;
        self.check(cols, &data)?;
        let Some(Slab { index, count }) = self.slab else { return Ok(data) };
        let bytes = data.bytes.len() / count;
        let range = index * bytes..(index + 1) * bytes;
        let bytes = match data.bytes {
            Cow::Borrowed(all) => Cow::Borrowed(&all[range]),
            Cow::Owned(all) => Cow::Owned(all[range].to_vec()),
        };
        Ok(TensorData { bytes, shape: vec![self.rows, cols], ..data })
    }

    /// Checks that a checkpoint's tensor matches the program's part, for a weight of `cols` columns.
    fn check(&self, cols: usize, data: &TensorData<'_>) -> Result<(), WeightError> {
        let invalid = |reason| Err(WeightError::Invalid { name: self.tensor.clone(), reason });
        if data.storage != self.storage {
            return invalid(format!("it is stored as {}, expected {}", data.storage, self.storage));
        }
        let slabs = self.slab.map_or(1, |slab| slab.count);
        let rows = self.rows.checked_mul(slabs);
        let elements = data.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        // A vector may be one row or one column (the parts of a fused bias). The inputs of a convolution are several
        // dimensions, and so are the rows of slabs.
        let is_vector = data.shape.len() <= 1;
        let has_rows = data.shape.first() == Some(&self.rows) || data.shape.last() == Some(&cols);
        let fits = match self.slab {
            Some(slab) => slab.index < slab.count && data.shape.first() == Some(&slab.count),
            None => is_vector || has_rows,
        };
        let needed = rows.and_then(|rows| rows.checked_mul(cols));
        if elements.is_none() || elements != needed || !fits {
            let expected = match self.slab {
                Some(slab) => format!("[{}, {}, {cols}]", slab.count, self.rows),
                None => format!("[{}, {cols}]", self.rows),
            };
            return invalid(format!("its shape is {:?}, expected {expected}", data.shape));
        }
        let expected = elements.and_then(|n| self.storage.bytes_for(n)).unwrap_or(usize::MAX);
        if expected != data.bytes.len() {
            return invalid(format!("it holds {} bytes, its shape needs {expected}", data.bytes.len()));
        }
        Ok(())
    }
}

/// Source of a program's weights: a checkpoint.
pub trait WeightSource: Send + Sync {
    /// Returns the tensor `name`, a value of [`WeightPart::tensor`](crate::WeightPart::tensor).
    fn tensor(&self, name: &str) -> Result<TensorData<'_>, WeightError>;

    /// Returns the rule that generates the values of a plain dummy tensor, so that a device may generate them itself.
    /// `None` if the tensor is real.
    fn rule(&self, _name: &str) -> Option<DummyRule> {
        None
    }
}

/// Properties from which device utilisation is computed.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceProfile {
    /// Element sizes of activations and of the KV cache.
    pub elements: ElementBytes,
    /// Peak rates; `None` if they are unknown.
    pub peaks: Option<Peaks>,
    /// Size of the device's own memory and of a step's buffers in it, in bytes; `None` if it is the host's memory.
    pub memory: Option<(u64, u64)>,
}

/// Checks that a backend supports KV blocks of `size` tokens.
///
/// # Errors
/// Returns [`BackendError::Unsupported`] with the supported sizes.
pub fn check_block_size(backend: &'static str, sizes: &[usize], size: usize) -> Result<(), BackendError> {
    if sizes.contains(&size) {
        return Ok(());
    }
    Err(BackendError::Unsupported { backend, what: format!("KV blocks of {size} tokens; it supports {sizes:?}") })
}

/// Checks that an encoder stores the rows that a decoder injects.
///
/// # Errors
/// Returns [`BackendError::Failed`] with both sizes.
pub fn check_encoder(backend: &'static str, decoder: &Program, encoder: &Program) -> Result<(), BackendError> {
    let (found, expected) = (encoder.media_columns(), decoder.media_columns());
    if encoder.kind() == ProgramKind::Encoder && found == expected {
        return Ok(());
    }
    let reason = format!("the encoder stores {found} columns, the decoder takes {expected}");
    Err(BackendError::Failed { backend, reason })
}

/// Checks that adapters can add to the products of a program.
///
/// # Errors
/// Returns [`BackendError::Failed`] if the program has no sites.
pub fn check_sites(backend: &'static str, program: &Program) -> Result<(), BackendError> {
    if program.sites.is_empty() {
        return Err(BackendError::Failed { backend, reason: "the program has no sites for adapters".into() });
    }
    Ok(())
}

/// Checks that the matrices of an adapter fit a program and are of the rank `limit` at most.
///
/// # Errors
/// Returns [`BackendError::Failed`] with the rank or the size that does not fit.
pub fn check_adapter(
    backend: &'static str,
    program: &Program,
    adapter: &dyn AdapterSource,
    limit: usize,
) -> Result<(), BackendError> {
    let failed = |reason: String| Err(BackendError::Failed { backend, reason });
    if adapter.rank() > limit {
        return failed(format!("the adapter has the rank {}, above the largest of {limit}", adapter.rank()));
    }
    for site in (0..program.sites.len()).map(SiteId) {
        for (part, [rows, cols]) in program.site_parts(site).into_iter().enumerate() {
            let Some(LoraMatrices { rank, a, b, .. }) = adapter.matrices(site, part) else { continue };
            if a.len() != rank * cols || b.len() != rows * rank || rank > adapter.rank() {
                return failed(format!("an adapter of rank {rank} does not fit a weight of {rows} x {cols}"));
            }
        }
    }
    Ok(())
}

/// A device that runs programs. A backend holds one model.
///
/// The backend decides how weights and KV are laid out in memory: callers know names, shapes and block ids. Methods are
/// called from one thread at a time; `forward` and `sample` of one step follow each other.
pub trait Backend: Send {
    /// Returns the name: `candle`, `cpu` or `cuda`.
    fn name(&self) -> &'static str;

    /// Returns the supported numbers of tokens per KV block; the first is the default.
    fn block_sizes(&self) -> &[usize];

    /// Returns the element type of the KV cache for display (`float32`, `bfloat16`).
    fn kv_dtype(&self) -> &'static str;

    /// Returns the size in bytes of the keys and values of `block_size` tokens in all layers of `group`.
    fn kv_block_bytes(&self, group: &KvGroup, block_size: usize) -> u64;

    /// Returns the size in bytes of a block, which has room for `block_size` tokens of any of the groups; 0 without groups.
    fn kv_page_bytes(&self, groups: &[KvGroup], block_size: usize) -> u64 {
        groups.iter().map(|group| self.kv_block_bytes(group, block_size)).max().unwrap_or(0)
    }

    /// Loads the program and reads its weights. `progress` is called with the number of bytes read so far.
    fn load(
        &mut self,
        program: &Program,
        weights: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError>;

    /// Returns the number of bytes that the loaded weights occupy.
    fn weight_bytes(&self) -> u64;

    /// Allocates zeroed blocks (including the null block 0) of `block_size` tokens, which the KV groups share: a block holds
    /// the layers of the group in whose table it is.
    fn allocate_kv(&mut self, block_size: usize, blocks: usize) -> Result<(), BackendError>;

    /// Returns the maximum number of steps under way: 2 if calls launch work and return, so that a step can be launched
    /// before the tokens of the one before have been taken; 1 for a backend that works on the caller's thread.
    fn max_in_flight(&self) -> usize {
        1
    }

    /// Runs the forward part of the program. The logits `[R,V]` stay on the device for sampling, the hidden states
    /// `[E,H]` for [`Backend::embeddings`]. If two steps may be under way, token ids may be [`StepBatch::drawn`]
    /// references to the step that was sampled last.
    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError>;

    /// Starts to sample one token for each of the R rows of the last forward pass, or takes the forced one. After an
    /// error there are no tokens to take. A backend that only launches work is also called for steps without rows, so that
    /// the caller can wait for them.
    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError>;

    /// Waits for the tokens of the oldest step that was sampled and not taken, and writes them into `out` (cleared
    /// first) in the order of its rows.
    fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError>;

    /// Returns the time that the device worked on the step whose tokens were taken last, whenever they were taken; `None` for
    /// a backend that works on the caller's thread.
    fn step_time(&self) -> Option<Duration> {
        None
    }

    /// Samples the tokens of the last forward pass into `out` (cleared first).
    fn sample(&mut self, batch: &SampleBatch<'_>, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        out.clear();
        self.start_sampling(batch)?;
        self.take_tokens(out)
    }

    /// Waits for the step and writes the hidden states `[E,H]` of the last forward pass into `out` (cleared first), row
    /// by row.
    fn embeddings(&mut self, out: &mut Vec<f32>) -> Result<(), BackendError>;

    /// Returns the logits `[R,V]` of the last forward pass, for parity tests and tools.
    fn logits(&self) -> Result<Vec<f32>, BackendError>;

    /// Loads the encoder of the loaded decoder's images; [`Backend::load`] removes it.
    fn load_encoder(
        &mut self,
        _program: &Program,
        _weights: &dyn WeightSource,
        _progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError> {
        Err(BackendError::Unsupported { backend: self.name(), what: "image encoders".into() })
    }

    /// Allocates the media cache: `rows` zeroed rows of [`Program::media_columns`] columns, from which the decoder takes
    /// the encoder's outputs.
    fn allocate_media(&mut self, _rows: usize) -> Result<(), BackendError> {
        Err(BackendError::Unsupported { backend: self.name(), what: "image encoders".into() })
    }

    /// Returns the size in bytes of a row of the media cache.
    fn media_row_bytes(&self) -> u64 {
        0
    }

    /// Runs the encoder. Later calls of [`Backend::forward`] see the rows that it stores.
    fn encode(&mut self, _batch: &EncodeBatch) -> Result<(), BackendError> {
        Err(BackendError::Unsupported { backend: self.name(), what: "image encoders".into() })
    }

    /// Returns rows of the media cache, for parity tests and tools.
    fn media(&self, _rows: &[u32]) -> Result<Vec<f32>, BackendError> {
        Err(BackendError::Unsupported { backend: self.name(), what: "image encoders".into() })
    }

    /// Allocates `slots` empty slots for adapters of at most the given rank. The program must have sites
    /// ([`Program::with_adapters`]).
    fn allocate_adapters(&mut self, _slots: usize, _rank: usize) -> Result<(), BackendError> {
        Err(BackendError::Unsupported { backend: self.name(), what: "adapters".into() })
    }

    /// Copies an adapter into a slot, whose content it replaces. No step may be under way that uses the slot.
    fn set_adapter(&mut self, _slot: usize, _adapter: &dyn AdapterSource) -> Result<(), BackendError> {
        Err(BackendError::Unsupported { backend: self.name(), what: "adapters".into() })
    }

    /// Copies whole blocks `(from, to)`.
    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError>;

    /// Returns the properties from which device utilisation is computed, once a model is loaded.
    fn device_profile(&self) -> DeviceProfile {
        DeviceProfile { elements: ElementBytes::F32, peaks: None, memory: None }
    }

    /// Returns the numbers of steps that were replayed from a recording and of steps that were launched op by op since
    /// the model was loaded; `None` for a device that records none.
    fn step_counts(&self) -> Option<(u64, u64)> {
        None
    }
}
