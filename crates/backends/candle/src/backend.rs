//! The implementation of [`Backend`].

use candle_core::Tensor;
use octavo_ops::sampling::{SampleBatch, SampledToken, Sampler};
use octavo_ops::{
    AdapterSource, Backend, BackendError, EncodeBatch, KvGroup, Limits, Program, ProgramKind, StepBatch, WeightSource,
    check_block_size, check_encoder, check_sites,
};

use crate::forward::{Forward, malformed};
use crate::kv::KvCache;
use crate::load::load_weight;
use crate::lora::Adapter;
use crate::media::MediaCache;
use crate::{NAME, failed};

/// Supported numbers of tokens per KV block.
const BLOCK_SIZES: &[usize] = &[16];

/// Runs programs op by op with candle tensors on the CPU.
#[derive(Default)]
pub struct CandleBackend {
    model: Option<Model>,
    kv: KvCache,
    encoder: Option<Model>,
    media: MediaCache,
    /// Adapters by slot, and their largest rank.
    adapters: Vec<Option<Adapter>>,
    largest_rank: usize,
    /// Logits `[R,V]` of the last forward pass.
    logits: Vec<f32>,
    /// Hidden states `[E,H]` of the last forward pass.
    embeddings: Vec<f32>,
    sampler: Sampler,
    /// Tokens of the last step, until they are taken.
    tokens: Vec<SampledToken>,
}

/// A program and its weights, by [`octavo_ops::WeightId`].
struct Model {
    program: Program,
    weights: Vec<Tensor>,
}

impl Model {
    fn load(
        program: &Program,
        weights: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, BackendError> {
        let mut bytes_read = 0;
        let mut tensors = Vec::with_capacity(program.weights.len());
        for weight in &program.weights {
            let mut advance = |bytes: usize| {
                bytes_read += bytes as u64;
                progress(bytes_read);
            };
            tensors.push(load_weight(weight, weights, &mut advance)?);
        }
        Ok(Self { program: program.clone(), weights: tensors })
    }
}

impl CandleBackend {
    /// Creates a backend without a model.
    pub fn new() -> Self {
        Self::default()
    }

    fn model(&self) -> Result<&Model, BackendError> {
        self.model.as_ref().ok_or_else(|| failed("no model is loaded"))
    }
}

impl Backend for CandleBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn block_sizes(&self) -> &[usize] {
        BLOCK_SIZES
    }

    fn kv_dtype(&self) -> &'static str {
        "float32"
    }

    fn kv_block_bytes(&self, group: &KvGroup, block_size: usize) -> u64 {
        (group.elements_per_token() * block_size * size_of::<f32>()) as u64
    }

    fn load(
        &mut self,
        program: &Program,
        weights: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError> {
        *self = Self::default();
        self.model = Some(Model::load(program, weights, progress)?);
        Ok(())
    }

    fn load_encoder(
        &mut self,
        program: &Program,
        weights: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), BackendError> {
        check_encoder(NAME, &self.model()?.program, program)?;
        self.encoder = Some(Model::load(program, weights, progress)?);
        Ok(())
    }

    fn weight_bytes(&self) -> u64 {
        let weights = self.model.iter().chain(&self.encoder).flat_map(|m| &m.weights);
        weights.map(|w| (w.elem_count() * size_of::<f32>()) as u64).sum()
    }

    fn media_row_bytes(&self) -> u64 {
        self.model.as_ref().map_or(0, |model| (model.program.media_columns() * size_of::<f32>()) as u64)
    }

    fn allocate_adapters(&mut self, slots: usize, rank: usize) -> Result<(), BackendError> {
        check_sites(NAME, &self.model()?.program)?;
        self.adapters.clear();
        self.adapters.resize_with(slots, || None);
        self.largest_rank = rank;
        Ok(())
    }

    fn set_adapter(&mut self, slot: usize, adapter: &dyn AdapterSource) -> Result<(), BackendError> {
        let adapter = Adapter::new(&self.model()?.program, adapter, self.largest_rank)?;
        let place = self.adapters.get_mut(slot).ok_or_else(|| failed(format!("there is no slot {slot}")))?;
        *place = Some(adapter);
        Ok(())
    }

    fn allocate_media(&mut self, rows: usize) -> Result<(), BackendError> {
        self.media = MediaCache::new(rows, self.model()?.program.media_columns())?;
        Ok(())
    }

    fn encode(&mut self, batch: &EncodeBatch) -> Result<(), BackendError> {
        let Some(Model { program, weights }) = &self.encoder else { return Err(failed("no encoder is loaded")) };
        batch.check(program, self.media.rows()).map_err(malformed)?;
        let mut step = StepBatch::default();
        let blocks = batch.rows.in_own_blocks(BLOCK_SIZES[0], &mut step);
        let mut kv = KvCache::new(&[program.step_kv()], BLOCK_SIZES[0], blocks)?;
        Forward::over(program, weights, &mut kv, &mut self.media, (&step, Some(batch))).run().map_err(failed)?;
        Ok(())
    }

    fn media(&self, rows: &[u32]) -> Result<Vec<f32>, BackendError> {
        let rows: Result<Vec<_>, _> = rows.iter().map(|&row| self.media.row(row)).collect();
        Ok(rows?.concat())
    }

    fn allocate_kv(&mut self, block_size: usize, blocks: usize) -> Result<(), BackendError> {
        check_block_size(NAME, BLOCK_SIZES, block_size)?;
        self.kv = KvCache::new(&self.model()?.program.kv_groups, block_size, blocks)?;
        Ok(())
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<(), BackendError> {
        self.logits.clear();
        self.embeddings.clear();
        let Some(Model { program, weights }) = &self.model else { return Err(failed("no model is loaded")) };
        let (logits, embeddings) = match program.kind() {
            ProgramKind::Encoder => {
                batch.check(program, Limits::default()).map_err(malformed)?;
                let mut step = StepBatch::default();
                let blocks = batch.in_own_blocks(BLOCK_SIZES[0], &mut step);
                let mut kv = KvCache::new(&[program.step_kv()], BLOCK_SIZES[0], blocks)?;
                Forward::over(program, weights, &mut kv, &mut self.media, (&step, None)).run()
            }
            ProgramKind::Decoder | ProgramKind::Embedder => {
                Forward::new(program, weights, &mut self.kv, &mut self.media, (batch, &self.adapters))?.run()
            }
        }
        .map_err(failed)?;
        let flat = |tensor: Option<Tensor>| tensor.map_or(Ok(Vec::new()), |t| t.flatten_all()?.to_vec1());
        self.logits = flat(logits).map_err(failed)?;
        self.embeddings = flat(embeddings).map_err(failed)?;
        Ok(())
    }

    fn start_sampling(&mut self, batch: &SampleBatch<'_>) -> Result<(), BackendError> {
        let vocab = self.model()?.program.vocab_size;
        batch.check(NAME, self.logits.len() / vocab.max(1))?;
        self.sampler.sample_batch(&self.logits, batch, &mut self.tokens);
        Ok(())
    }

    fn take_tokens(&mut self, out: &mut Vec<SampledToken>) -> Result<(), BackendError> {
        std::mem::swap(out, &mut self.tokens);
        self.tokens.clear();
        Ok(())
    }

    fn embeddings(&mut self, out: &mut Vec<f32>) -> Result<(), BackendError> {
        self.model()?;
        out.clear();
        out.extend_from_slice(&self.embeddings);
        Ok(())
    }

    fn logits(&self) -> Result<Vec<f32>, BackendError> {
        self.model()?;
        Ok(self.logits.clone())
    }

    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        self.kv.copy_blocks(pairs)
    }
}
