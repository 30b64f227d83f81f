//! The encoder of images, which runs image by image.
//!
//! The rows of an image are therefore the same in every batch, whatever library computes the products, and the step
//! buffers are those of one image. An image of a few hundred patches occupies a GPU less well than several together.

use std::ops::Range;

use octavo_kernels::params::KV_BLOCK;
use octavo_ops::{BackendError, EncodeBatch, Program, StepBatch, WeightSource};

use crate::failed;
use crate::forward::{Cache, Step};
use crate::layout::{Limits, has_taps, patch_cols};
use crate::loaded::{Loaded, Opened, Wanted};
use crate::lower::block_elements;
use crate::media::MediaCache;
use crate::staged::Staged;
use crate::step::{Filler, ImageShape, Plans, StepShape, write_image};

/// Maximum number of words of patches that are copied at once.
const PATCH_WORDS: usize = 4 << 20;

/// A loaded encoder.
pub(crate) struct Encoder {
    /// The arrays of an image.
    block: Staged,
    /// Pieces of patches, written by turns.
    pieces: [Staged; 2],
    filler: Filler,
    plans: Plans,
    /// Rows of one image, over the memory of its keys and values.
    step: StepBatch,
    cache: Cache,
    loaded: Loaded,
}

impl Encoder {
    /// Reads the weights and builds the kernels.
    pub(crate) fn load(
        opened: &Opened<'_>,
        program: &Program,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, BackendError> {
        let limits = Limits::of_images(opened.config.max_patches);
        let (loaded, ()) = Loaded::new(opened, &Wanted { program, limits, source }, progress, |_| ())?;
        let largest = limits.largest_step(program);
        let piece = (limits.tokens * patch_cols(program)).div_ceil(size_of::<u32>()).min(PATCH_WORDS);
        let staged = |words| Staged::new(opened.gpu, words);
        let cache = Cache {
            address: loaded.arena.at(loaded.layout.step_kv),
            block_elements: block_elements(&program.step_kv()),
            blocks: limits.step_blocks(),
        };
        Ok(Self {
            block: staged(largest.words())?,
            pieces: [staged(piece)?, staged(piece)?],
            filler: Filler::with_capacity(largest.tiles, 0),
            plans: Plans::of(&loaded.machine.stages, program.kind()),
            step: StepBatch::with_capacity(limits.tokens, 1, 0, 1),
            cache,
            loaded,
        })
    }

    pub(crate) fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// Encodes the images of a batch and stores their rows.
    pub(crate) fn encode(&mut self, batch: &EncodeBatch, media: &MediaCache) -> Result<(), BackendError> {
        let checked = batch.check(&self.loaded.program, media.count());
        checked.map_err(|reason| failed(format!("the batch is malformed: {reason}")))?;
        let limit = self.loaded.limits.tokens;
        for image in 0..batch.rows.sequences() {
            let found = batch.rows.query_range(image).len();
            if found > limit {
                let reason = format!("an image has {found} patches, but memory was taken for {limit}");
                return Err(failed(reason));
            }
        }
        if batch.rows.positions.iter().any(|&position| position as usize >= limit) {
            return Err(failed(format!("a patch is at a position beyond {limit}")));
        }
        (0..batch.rows.sequences()).try_for_each(|image| self.image(batch, batch.rows.query_range(image), media))
    }

    /// Encodes the image with these rows of the batch.
    fn image(&mut self, batch: &EncodeBatch, rows: Range<usize>, media: &MediaCache) -> Result<(), BackendError> {
        if rows.is_empty() {
            return Ok(());
        }
        self.select(batch, rows.clone());
        let program = &self.loaded.program;
        let merged = rows.start / program.merge()..rows.end / program.merge();
        let shape = self.filler.plan_image(
            &self.step,
            ImageShape {
                streams: program.position_streams(),
                merged: merged.len(),
                tapped: if has_taps(program) { rows.len() } else { 0 },
                channels: batch.channels.len(),
            },
            self.plans,
        );
        let bytes = patch_cols(program);
        self.send_patches(&batch.patches[rows.start * bytes..rows.end * bytes])?;
        self.send_block(batch, rows, merged, &shape)?;
        self.loaded.update_tables(&self.step)?;
        self.loaded.machine.run(&Step {
            shape,
            address: self.loaded.step(),
            tables: self.loaded.tables.at,
            caches: std::slice::from_ref(&self.cache),
            media: media.rows(),
            patches: self.loaded.arena.at(self.loaded.layout.patches),
            adapters: None,
        })
    }

    /// Writes the rows of an image as a step whose blocks follow each other.
    fn select(&mut self, batch: &EncodeBatch, rows: Range<usize>) {
        let (step, all) = (&mut self.step, batch.rows.tokens());
        step.clear();
        let (count, blocks) = (rows.len() as u32, rows.len().div_ceil(KV_BLOCK));
        step.token_ids.resize(rows.len(), 0);
        for positions in batch.rows.positions.chunks_exact(all) {
            step.positions.extend_from_slice(&positions[rows.clone()]);
        }
        step.slot_mapping[0].extend(0..count);
        step.block_tables[0].change(0, 0, 0..blocks as u32);
        step.seats.push(0);
        step.query_start.extend([0, count]);
        step.seq_lens.push(count);
    }

    /// Copies patches to the device.
    fn send_patches(&mut self, patches: &[u8]) -> Result<(), BackendError> {
        let mut to = self.loaded.arena.at(self.loaded.layout.patches);
        for piece in patches.chunks(PATCH_WORDS * size_of::<u32>()) {
            self.pieces.reverse();
            self.pieces[0].send(to, piece.len().div_ceil(size_of::<u32>()), |out| {
                for (word, bytes) in out.iter_mut().zip(piece.chunks(size_of::<u32>())) {
                    let mut padded = [0; size_of::<u32>()];
                    padded[..bytes.len()].copy_from_slice(bytes);
                    *word = u32::from_le_bytes(padded);
                }
                out.len()
            })?;
            to += piece.len() as u64;
        }
        Ok(())
    }

    fn send_block(
        &mut self,
        batch: &EncodeBatch,
        rows: Range<usize>,
        merged: Range<usize>,
        shape: &StepShape,
    ) -> Result<(), BackendError> {
        let (filler, step) = (&self.filler, &self.step);
        self.block.send(self.loaded.step(), shape.words(), |out| {
            filler.write(step, shape, out);
            write_image(batch, rows, merged, shape, out);
            out.len()
        })
    }
}
