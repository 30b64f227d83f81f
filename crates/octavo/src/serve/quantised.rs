//! Quantised weights: what an operator expects, and what is kept of them.

use anyhow::{Result, bail};
use octavo_models::{Checkpoint, Format, KvScheme, StorageTotal};
use octavo_ops::{Program, StorageType, Weight};
use tracing::{info, warn};

/// Refuses a checkpoint that is quantised in another way than `--quantization` says.
pub(super) fn check(expected: Option<&str>, checkpoint: &Checkpoint) -> Result<()> {
    let found = match checkpoint.format() {
        Format::Gguf => Some("gguf"),
        Format::HuggingFace => checkpoint.quantisation(),
    };
    let Some(expected) = expected.filter(|expected| found != Some(*expected) && !checkpoint.is_dummy()) else {
        return Ok(());
    };
    match found {
        Some(found) => bail!("--quantization {expected}: the weights of this checkpoint are quantised by '{found}'"),
        None => bail!(
            "--quantization {expected}: the weights of this checkpoint are not quantised; they are not quantised while they \
             are loaded either"
        ),
    }
}

/// Returns the type of the KV cache by vLLM's names: the `given` one, or with `auto` that for which the checkpoint is made.
///
/// # Errors
/// The checkpoint has scales for the given type that are not supported.
pub(super) fn kv_cache_dtype(given: &str, scheme: Option<&KvScheme>) -> Result<String> {
    match (given, scheme) {
        ("auto", Some(KvScheme::Fp8)) => Ok("fp8".into()),
        ("auto", Some(KvScheme::Other(scheme))) => {
            warn!("KV cache: this checkpoint is made for one of {scheme}, which is not supported; the default is used");
            Ok(given.into())
        }
        ("fp8" | "fp8_e4m3", Some(KvScheme::Other(scheme))) => bail!(
            "--kv-cache-dtype {given}: this checkpoint has scales for a KV cache of {scheme}, which are not supported; \
             accepted: auto, bfloat16, int8_per_token_head"
        ),
        _ => Ok(given.into()),
    }
}

/// Says which scales an FP8 cache of keys and values has.
pub(super) fn describe_kv_scales(program: &Program, on_gpu: bool) {
    if program.kv_groups.iter().all(|group| group.scales.is_empty()) {
        let better = if on_gpu { "auto is" } else { "int8_per_token_head is nearly as small and" };
        warn!("KV cache: fp8 without scales, because the checkpoint has none; {better} more exact");
    } else {
        info!("KV cache: fp8 with the scales of the checkpoint");
    }
}

/// Says in which storage types quantised matrices are read, and how large they are.
pub(super) fn describe(checkpoint: &Checkpoint, program: &Program) {
    for StorageTotal { storage, grid, tensors, .. } in checkpoint.storage_summary() {
        let Some(grid) = grid else { continue };
        let loss = match storage {
            StorageType::BF16 => "each weight is within 0.2 % of its value",
            _ => "without a loss",
        };
        let bytes = storage.block_bytes() as f64 / storage.block_elements() as f64;
        info!(
            "quantisation: {tensors} tensors of the type {grid} are kept as {storage}, {bytes:.2} bytes per parameter, {loss}"
        );
    }
    let Some(method) = checkpoint.quantisation().filter(|_| checkpoint.format() == Format::HuggingFace) else { return };
    let matrices = program.weights.iter().filter(|weight| weight.rows.min(weight.cols) > 1);
    let parts = || matrices.clone().flat_map(|weight| weight.parts.iter().map(|part| part.storage));
    let kinds = StorageType::ALL.into_iter().filter_map(|storage| {
        let count = parts().filter(|found| *found == storage).count();
        (count > 0).then(|| format!("{count} as {storage}"))
    });
    let kinds = kinds.collect::<Vec<_>>().join(", ");
    let elements: usize = matrices.clone().map(Weight::elements).sum();
    let bytes: u64 = matrices.map(Weight::kept_bytes).sum();
    info!(
        "quantisation: {method}; matrices: {kinds}; {:.2} bytes per parameter",
        bytes as f64 / elements.max(1) as f64
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checkpoint_decides_on_the_kv_cache_unless_a_flag_does() {
        let chosen = |given, scheme: Option<KvScheme>| kv_cache_dtype(given, scheme.as_ref());
        assert_eq!(chosen("auto", None).unwrap(), "auto");
        assert_eq!(chosen("auto", Some(KvScheme::Fp8)).unwrap(), "fp8");
        assert_eq!(chosen("bfloat16", Some(KvScheme::Fp8)).unwrap(), "bfloat16");
        assert_eq!(chosen("fp8", None).unwrap(), "fp8");
        let heads = || Some(KvScheme::Other("8 bits, float, attn_head".into()));
        assert_eq!(chosen("auto", heads()).unwrap(), "auto");
        assert_eq!(chosen("int8_per_token_head", heads()).unwrap(), "int8_per_token_head");
        let error = chosen("fp8_e4m3", heads()).unwrap_err().to_string();
        assert!(error.starts_with("--kv-cache-dtype fp8_e4m3: this checkpoint has scales for a KV cache of 8 bits"));
    }
}
