//! Shared test code for all backends: random models of any shape, their exact results in plain f64, and paged batches.
//!
//! A backend is correct if its logits are close to those of the [`Reference`] for every [`TinyModel`] and, if it claims
//! so, if a row's bits do not depend on how [`PagedBatches`] divides the sequences into steps. [`suite`] tests all of
//! this.

mod adapters;
mod attention;
mod batches;
mod encoder;
mod experts;
mod images;
mod latent;
mod math;
mod model;
mod reference;
pub mod suite;
mod texts;

pub use adapters::TestAdapter;
pub use batches::{PagedBatches, in_each_group, position, seen_end};
pub use encoder::TinyEncoder;
pub use experts::{TinyExperts, experts_of_blocks, models_with_experts};
pub use images::{ImageModel, image_models, large_images};
pub use latent::{TinyLatent, latents_of_blocks, models_with_latents, real_latents};
pub use math::erf;
pub use model::{MemoryWeights, NormPlacement, QkNormWidth, Scales, TinyModel, random_blocks};
pub use reference::{Reference, Rounding};
pub use texts::{TinyTexts, text_models, windowed_texts};

/// SplitMix64: a small generator for test data.
#[derive(Clone, Debug)]
pub struct TestRng(pub u64);

impl TestRng {
    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns an integer below `bound`, which must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next_u64() % bound as u64) as usize
    }

    /// Returns a uniform number in [-1, 1).
    pub fn signed(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Returns `count` token ids of a vocabulary.
    pub fn tokens(&mut self, count: usize, vocab_size: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocab_size) as u32).collect()
    }
}
