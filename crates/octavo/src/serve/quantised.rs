//! Quantised weights: what an operator expects, and what is kept of them.

use anyhow::{Result, bail};
use octavo_models::{Checkpoint, Format};
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

/// Says how many of a Hugging Face directory's quantised matrices stay as small as they are.
pub(super) fn describe(checkpoint: &Checkpoint, program: &Program) {
    let Some(method) = checkpoint.quantisation().filter(|_| checkpoint.format() == Format::HuggingFace) else { return };
    let parts = || program.weights.iter().filter(|weight| weight.cols > 1).flat_map(|weight| &weight.parts);
    let packed = parts().filter(|part| part.storage.block_elements() > 1).count();
    let unpacked = parts().filter(|part| part.storage == StorageType::F32).count();
    info!(
        "quantisation: {method}; {packed} matrices stay packed, and {unpacked} are read as float32, which a backend keeps in \
         its own type (16 bits, rounded, unless --dtype says otherwise)"
    );
}
