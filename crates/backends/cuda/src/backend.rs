//! The implementation of [`Backend`].

use std::sync::Arc;
use std::time::Duration;

use half::{bf16, f16};
use octavo_kernels::manifest::{CacheType, Chip, Dtype};
use octavo_kernels::params::{KV_BLOCK, NO_SLOT};
use octavo_ops::cost::ElementBytes;
use octavo_ops::sampling::{SampleBatch, SampledToken};
use octavo_ops::{
    AdapterSource, Backend, BackendError, DeviceProfile, EncodeBatch, KvGroup, Program, StepBatch, WeightSource,
    check_block_size,
};

use crate::driver::{DeviceInfo, Driver, Gpu, Unavailable};
use crate::libraries::Version;
use crate::loaded::Opened;
use crate::lower::block_elements;
use crate::model::Model;
use crate::peaks::peaks;
use crate::texts::encodes_images;
use crate::{CudaConfig, Memory, NAME, failed, unsupported};

/// Supported numbers of tokens per KV block.
const BLOCK_SIZES: &[usize] = &[KV_BLOCK];

/// Runs programs on an NVIDIA GPU.
pub struct CudaBackend {
    config: CudaConfig,
    driver: Version,
    gpu: Arc<Gpu>,
    dtype: Dtype,
    model: Option<Model>,
}

/// Returns the default element type for a chip.
pub(crate) const fn usual_dtype(chip: Chip) -> Dtype {
    if chip.has(Dtype::Bf16) { Dtype::Bf16 } else { Dtype::F16 }
}

/// Returns the value of `--dtype`.
pub(crate) const fn long_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::F16 => "float16",
        Dtype::Bf16 => "bfloat16",
    }
}

impl CudaBackend {
    /// Creates a backend without a model.
    ///
    /// # Errors
    /// Returns the reason why the GPU cannot be used.
    pub fn new(config: CudaConfig) -> Result<Self, Unavailable> {
        let driver = Driver::open(&config.libraries)?;
        let info = driver.device(config.device)?;
        info.check()?;
        let dtype = config.dtype.unwrap_or_else(|| usual_dtype(info.chip));
        if !info.chip.has(dtype) {
            return Err(Unavailable::Dtype { name: info.name, chip: info.chip.arch(), dtype: long_name(dtype) });
        }
        let gpu = Gpu::new(driver, info, config.early_launches).map_err(Unavailable::Broken)?;
        Ok(Self { config, driver: driver.version, gpu, dtype, model: None })
    }

    /// Returns the GPU's properties.
    pub fn device(&self) -> &DeviceInfo {
        self.gpu.info()
    }

    /// Returns the element type of weights and activations (`bfloat16`).
    pub fn dtype(&self) -> &'static str {
        long_name(self.dtype)
    }

    /// Changes the amount of memory that the next model uses.
    pub fn set_memory(&mut self, memory: Memory) {
        self.config.memory = memory;
    }

    /// Returns the CUDA version that the driver supports.
    pub fn driver(&self) -> Version {
        self.driver
    }

    /// Returns the number of bytes that a loaded model leaves to the KV cache.
    pub fn kv_bytes(&self) -> u64 {
        self.model.as_ref().map_or(0, Model::kv_bytes)
    }

    /// Returns the size of the step's buffers of a loaded model in bytes.
    pub fn step_bytes(&self) -> u64 {
        self.model.as_ref().map_or(0, Model::step_bytes)
    }

    /// Returns the number of steps that ran as a recorded graph and of steps that were launched op by op since the
    /// model was loaded.
    pub fn graph_steps(&self) -> (u64, u64) {
        self.model.as_ref().map_or((0, 0), |model| model.steps)
    }

    /// Returns whether products with FP8 weights round their input to FP8 in the largest steps.
    pub fn rounds_to_fp8(&self) -> bool {
        self.model.as_ref().is_some_and(Model::rounds_to_fp8)
    }

    /// Returns the device and settings for loading a model.
    pub(crate) fn opened(&self) -> Opened<'_> {
        Opened { gpu: &self.gpu, driver: self.driver, config: &self.config, dtype: self.dtype }
    }

    fn model(&self) -> Result<&Model, BackendError> {
        self.model.as_ref().ok_or_else(no_model)
    }

    /// Returns the model and makes the device's context current in this thread.
    fn bound(&mut self) -> Result<&mut Model, BackendError> {
        self.gpu.bind()?;
        self.model.as_mut().ok_or_else(no_model)
    }
}

/// Appends elements; a word holds two of 16 bits.
fn append(dtype: Dtype, words: &[u32], out: &mut Vec<f32>) {
    let halves = || words.iter().flat_map(|word| [*word as u16, (word >> 16) as u16]);
    match dtype {
        Dtype::F32 => out.extend(words.iter().map(|&word| f32::from_bits(word))),
        Dtype::F16 => out.extend(halves().map(|bits| f16::from_bits(bits).to_f32())),
        Dtype::Bf16 => out.extend(halves().map(|bits| bf16::from_bits(bits).to_f32())),
    }
}

fn no_model() -> BackendError {
    failed("no model is loaded")
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn block_sizes(&self) -> &[usize] {
        BLOCK_SIZES
    }

    fn kv_dtype(&self) -> &'static str {
        match self.config.kv_cache {
            CacheType::Activation => long_name(self.dtype),
            CacheType::E4m3 => "fp8_e4m3",
        }
    }

    fn kv_block_bytes(&self, group: &KvGroup, block_size: usize) -> u64 {
        let element = self.config.kv_cache.bytes(self.dtype) as u64;
        block_elements(group) * block_size.div_ceil(KV_BLOCK) as u64 * element
    }

    fn load(
        &mut self,
        program: &Program,
        weights: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError> {
        self.model = None;
        if encodes_images(program) {
            return Err(unsupported("encoders of images without a decoder"));
        }
        self.gpu.bind()?;
        let model = Model::load(&self.opened(), program, weights, progress)?;
        self.model = Some(model);
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        self.model.as_ref().map_or(0, Model::weight_bytes)
    }

    fn allocate_kv(&mut self, block_size: usize, blocks: usize) -> Result<(), BackendError> {
        check_block_size(NAME, BLOCK_SIZES, block_size)?;
        if blocks > NO_SLOT as usize / KV_BLOCK {
            let needed = (blocks as u64).saturating_mul(KV_BLOCK as u64);
            return Err(BackendError::OutOfMemory { what: "the KV cache".into(), needed });
        }
        let graphs = self.config.graphs;
        let model = self.bound()?;
        model.allocate_kv(blocks)?;
        if graphs { model.record() } else { Ok(()) }
    }

    fn max_in_flight(&self) -> usize {
        2
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        self.bound()?.forward(batch)
    }

    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        self.bound()?.start_sampling(batch)
    }

    fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        self.bound()?.take_tokens(out)
    }

    fn step_time(&self) -> Option<Duration> {
        self.model.as_ref().and_then(Model::step_time)
    }

    fn embeddings(&mut self, out: &mut Vec<f32>) -> Result<(), BackendError> {
        let dtype = self.dtype;
        out.clear();
        let (words, elements) = self.bound()?.embeddings()?;
        append(dtype, words, out);
        out.truncate(elements);
        Ok(())
    }

    fn load_encoder(
        &mut self,
        program: &Program,
        weights: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError> {
        self.gpu.bind()?;
        let opened = Opened { gpu: &self.gpu, driver: self.driver, config: &self.config, dtype: self.dtype };
        self.model.as_mut().ok_or_else(no_model)?.load_encoder(&opened, program, weights, progress)
    }

    fn allocate_media(&mut self, rows: usize) -> Result<(), BackendError> {
        self.bound()?.allocate_media(rows)
    }

    fn media_row_bytes(&self) -> u64 {
        self.model.as_ref().map_or(0, Model::media_row_bytes)
    }

    fn encode(&mut self, batch: &EncodeBatch) -> Result<(), BackendError> {
        self.bound()?.encode(batch)
    }

    fn media(&self, rows: &[u32]) -> Result<Vec<f32>, BackendError> {
        self.gpu.bind()?;
        let mut out = Vec::new();
        append(self.dtype, &self.model()?.media(rows)?, &mut out);
        Ok(out)
    }

    fn logits(&self) -> Result<Vec<f32>, BackendError> {
        self.gpu.bind()?;
        self.model()?.logits()
    }

    fn allocate_adapters(&mut self, slots: usize, rank: usize) -> Result<(), BackendError> {
        let graphs = self.config.graphs;
        let model = self.bound()?;
        model.allocate_adapters(slots, rank)?;
        if graphs && model.has_kv() { model.record() } else { Ok(()) }
    }

    fn set_adapter(&mut self, slot: usize, adapter: &dyn AdapterSource) -> Result<(), BackendError> {
        self.bound()?.set_adapter(slot, adapter)
    }

    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        self.bound()?.copy_blocks(pairs)
    }

    fn device_profile(&self) -> DeviceProfile {
        let size = self.dtype.bytes() as u64;
        DeviceProfile {
            elements: ElementBytes {
                activation: size,
                kv: self.config.kv_cache.bytes(self.dtype) as u64,
                ..ElementBytes::HALF
            },
            peaks: peaks(&self.gpu, self.dtype),
            memory: self.model.as_ref().map(|model| (model.memory_bytes(), model.step_bytes())),
        }
    }

    fn step_counts(&self) -> Option<(u64, u64)> {
        Some(self.graph_steps())
    }
}
