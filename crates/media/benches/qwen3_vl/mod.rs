//! The image processor that the benches measure.

use octavo_media::resize::Filter;
use octavo_media::{ImageProcessor, Normalize, PatchLayout, SizeRule};

/// The processor of Qwen3-VL.
pub(crate) fn processor() -> ImageProcessor {
    ImageProcessor {
        background: [255; 3],
        size: SizeRule::Area { min: 65536, max: 16_777_216 },
        filter: Filter::Bicubic,
        normalize: Normalize { rescale: 1.0 / 255.0, mean: [0.5; 3], std: [0.5; 3] },
        layout: PatchLayout { patch: 16, merge: 2, frames: 2 },
    }
}
