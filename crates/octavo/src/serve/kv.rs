//! The size of the KV cache and the context length that fits it.

use anyhow::{Result, bail};
use octavo_ops::{Backend, Program};
use octavo_runner::{KvBudget, kv_cache_spec};
use tracing::{info, warn};

use crate::cli::{EngineArgs, MaxModelLen};
use crate::serve::device::Computer;
use crate::serve::model::LoadedModel;
use crate::system::{self, human_bytes};

/// Default limit of the KV cache in bytes, which is vLLM's default on CPUs.
const DEFAULT_LIMIT: u64 = 4 << 30;

/// Default share of the memory that is available after loading the weights.
const SHARE: f64 = 0.5;

/// Context length and cache size, which depend on each other.
#[derive(Debug)]
pub(crate) struct KvPlan {
    pub(crate) budget: KvBudget,
    pub(crate) max_model_len: usize,
}

/// Plans the KV cache of a device, from whose memory a media cache of `media_rows` rows is taken.
pub(crate) fn plan(
    args: &EngineArgs,
    model: &LoadedModel,
    computer: &Computer,
    block_size: usize,
    media_rows: usize,
) -> Result<KvPlan> {
    let (backend, device_bytes) = (computer.backend.as_ref(), computer.kv_bytes);
    let (budget, blocks) = blocks(args, &model.program, backend, device_bytes, block_size, media_rows);
    let step = args.max_num_batched_tokens.unwrap_or(computer.steps.tokens);
    let step = if model.program.reduces_rows() { usize::MAX } else { step };
    let fits = kv_cache_spec(backend, &model.program, block_size, blocks).longest_sequence(step);
    let max_model_len = max_model_len(args, model.checkpoint.config().max_position_embeddings, fits, device_bytes)?;
    Ok(KvPlan { budget, max_model_len })
}

/// The budget of the cache and the resulting number of blocks, including the null block. `device_bytes` is the free memory of
/// a GPU; `None` if the cache is in host memory.
pub(crate) fn blocks(
    args: &EngineArgs,
    program: &Program,
    backend: &dyn Backend,
    device_bytes: Option<u64>,
    block_size: usize,
    media_rows: usize,
) -> (KvBudget, usize) {
    let block_bytes = backend.kv_page_bytes(&program.kv_groups, block_size);
    let budget = budget(args, device_bytes);
    (budget, budget.blocks(block_bytes, backend.media_row_bytes().saturating_mul(media_rows as u64)))
}

fn budget(args: &EngineArgs, device_bytes: Option<u64>) -> KvBudget {
    if let Some(blocks) = args.num_gpu_blocks_override {
        return KvBudget::Blocks(blocks);
    }
    if let Some(bytes) = args.kv_cache_memory_bytes.map(|bytes| bytes as u64).or(device_bytes) {
        return KvBudget::Bytes(bytes);
    }
    let share = system::available_memory().map(|bytes| (bytes as f64 * SHARE) as u64);
    KvBudget::Bytes(share.map_or(DEFAULT_LIMIT, |share| share.min(DEFAULT_LIMIT)))
}

/// The context length: the requested one, which must not exceed the model's limit and must fit the cache.
fn max_model_len(args: &EngineArgs, trained: usize, fits: usize, device_bytes: Option<u64>) -> Result<usize> {
    let asked = match args.max_model_len {
        Some(MaxModelLen::Tokens(tokens)) if tokens > trained => {
            bail!("--max-model-len {tokens}: the model supports at most {trained} tokens")
        }
        Some(MaxModelLen::Tokens(tokens)) => tokens,
        Some(MaxModelLen::Auto) => {
            let length = trained.min(fits);
            info!("context: {length} tokens, the longest that fits the KV cache");
            length
        }
        None => trained,
    };
    if asked > fits || asked == 0 {
        let available = device_bytes.or_else(system::available_memory);
        let memory = available.map_or_else(|| "unknown".into(), human_bytes);
        bail!(
            "the KV cache holds {fits} tokens, too few for one request of {asked}: use --max-model-len {fits} or \
             less, or give the cache more with --kv-cache-memory-bytes (memory available: {memory})"
        );
    }
    if args.max_model_len.is_none() && trained > 4 * 8192 {
        warn!("context: {trained} tokens, the model's own; a smaller --max-model-len lets more requests run at a time");
    }
    Ok(asked)
}
