//! Quantised weights: what an operator expects, and what is kept of them.

use anyhow::{Result, bail};
use octavo_models::{Checkpoint, Format, StorageTotal};
use octavo_ops::{Program, StorageType};
use tracing::info;

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
    let matrices = program.weights.iter().filter(|weight| weight.cols > 1);
    let parts =
        || matrices.clone().flat_map(|weight| weight.parts.iter().map(|part| (part.storage, part.rows * weight.cols)));
    let kinds = StorageType::ALL.into_iter().filter_map(|storage| {
        let count = parts().filter(|(found, _)| *found == storage).count();
        (count > 0).then(|| format!("{count} as {storage}"))
    });
    let kinds = kinds.collect::<Vec<_>>().join(", ");
    let elements: usize = parts().map(|(_, elements)| elements).sum();
    let bytes: usize = parts().filter_map(|(storage, elements)| storage.bytes_for(elements)).sum();
    info!(
        "quantisation: {method}; matrices: {kinds}; {:.2} bytes per parameter",
        bytes as f64 / elements.max(1) as f64
    );
}
