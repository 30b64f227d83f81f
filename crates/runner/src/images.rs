//! Encoding of the images of a plan.

use octavo_engine::{ImageSpec, PlannedImage};
use octavo_models::{EncodedImage, ImageGrid, VisionConfig};
use octavo_ops::{Channel, EncodeBatch};

/// What a runner needs to encode images.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageConfig {
    /// Encoder of the model.
    pub vision: VisionConfig,
    /// Normalisation of each colour channel.
    pub channels: Vec<Channel>,
    /// Number of rows of the media cache.
    pub media_rows: usize,
}

impl ImageConfig {
    /// Returns the images that a runner takes.
    pub(crate) fn spec(&self) -> ImageSpec {
        let VisionConfig { merge_size, .. } = self.vision;
        ImageSpec {
            cache_tokens: self.media_rows,
            merge: merge_size as u32,
            patch_bytes: self.vision.patch_elements(),
            frame_bytes: self.vision.frame_elements(),
            seen_whole: self.vision.seen_whole,
        }
    }
}

/// The encoder's batch, which is kept from step to step.
pub(crate) struct Images {
    vision: VisionConfig,
    batch: EncodeBatch,
}

impl Images {
    pub(crate) fn new(config: &ImageConfig) -> Self {
        let batch = EncodeBatch { channels: config.channels.clone(), ..EncodeBatch::default() };
        Self { vision: config.vision.clone(), batch }
    }

    /// Writes the images of a plan into the batch. The error describes the defect of the plan.
    pub(crate) fn fill(&mut self, images: &[PlannedImage]) -> Result<&EncodeBatch, String> {
        let rows: Vec<Vec<u32>> =
            images.iter().map(|planned| planned.media.iter().cloned().flatten().collect()).collect();
        let encoded = images.iter().zip(&rows).map(|(planned, rows)| EncodedImage {
            grid: ImageGrid { rows: planned.image.rows as usize, cols: planned.image.cols as usize },
            patches: (*planned.image.patches).as_ref(),
            store_rows: rows,
        });
        self.vision.fill(&encoded.collect::<Vec<_>>(), &mut self.batch)?;
        Ok(&self.batch)
    }
}
