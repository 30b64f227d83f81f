//! Tests of encoders, and of decoders that take their outputs, which every backend with images must pass.

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::reference::{Extras, Reference, encoded};
use super::suite::{BLOCK, BLOCKS, Suite, run};
use super::{PagedBatches, Rounding, TestRng, TinyEncoder, TinyModel};
use crate::{Backend, EncodeBatch, GluKind, HeadShape, InjectedRow, MergeKind, NormKind, Rope, RopeStyle, StepBatch};

/// Number of rows of the media cache.
const MEDIA: usize = 100;

/// An encoder and the decoder that takes its outputs.
#[derive(Clone, Debug)]
pub struct ImageModel {
    /// Encoder.
    pub encoder: TinyEncoder,
    /// Decoder.
    pub decoder: TinyModel,
}

/// Generates encoders and decoders with odd sizes.
pub fn image_models() -> impl Strategy<Value = ImageModel> {
    let sizes = (8usize..30, 1usize..40, 1usize..3, 1usize..3, 2usize..20, 1usize..5);
    let encoder = (1usize..6, 1usize..5, 1usize..9, 8usize..25);
    let norm = prop_oneof![Just(NormKind::Rms), Just(NormKind::Layer)];
    let glu = prop_oneof![Just(GluKind::Silu), Just(GluKind::Gelu), Just(GluKind::GeluTanh)];
    let merge_kind = prop_oneof![Just(MergeKind::Concatenated), Just(MergeKind::Mean)];
    let rest = (norm, glu, any::<bool>(), any::<bool>(), 1usize..=3, merge_kind, any::<u64>());
    (sizes, encoder, rest).prop_map(|(sizes, (patch, merge, positions, out), rest)| {
        let (hidden, inner, kv, group, dim, pairs) = sizes;
        let (norm, glu, biases, rotates, parts, merge_kind, seed) = rest;
        let pairs = pairs.min(dim / 2);
        let inv_freq = (0..pairs).map(|pair| 0.4f64.powi(pair as i32)).collect();
        let streams = (0..pairs).map(|pair| pair % 2).collect();
        let rope = rotates.then_some(Rope { style: RopeStyle::NeoX, inv_freq, magnitude: 1.0, streams });
        let heads = HeadShape::new(kv * group, kv, dim);
        let layers = TinyModel { hidden, inner, heads, rope, norm, glu, biases, seed, ..TinyModel::default() };
        let encoder = TinyEncoder { layers, patch, merge, merge_kind, positions, out, parts };
        // The second and third position of a token turn a pair each.
        let rope = TinyModel::default().rope.map(|rope| Rope { streams: vec![0, 1, 2, 0], ..rope });
        let decoder = TinyModel { hidden: out, media: parts, rope, seed: seed ^ 77, ..TinyModel::default() };
        ImageModel { encoder, decoder }
    })
}

/// Returns a model whose images have hundreds of patches, at which attention takes its blocked path, with heads of the
/// odd size that published encoders have.
pub fn large_images() -> ImageModel {
    let heads = HeadShape::new(1, 1, 72);
    let layers =
        TinyModel { hidden: 72, inner: 96, heads, layers: vec![0], norm: NormKind::Layer, ..TinyModel::default() };
    let out = TinyModel::default().hidden;
    ImageModel {
        encoder: TinyEncoder {
            layers,
            patch: 16,
            merge: 4,
            merge_kind: MergeKind::Concatenated,
            positions: 36,
            out,
            parts: 1,
        },
        decoder: TinyModel { media: 1, ..TinyModel::default() },
    }
}

/// Returns the rows of a sequence of `tokens` tokens that belong to an image: every second, so that each chunk has some.
fn injected(tokens: usize) -> Vec<InjectedRow> {
    // 7 has no common factor with the number of rows, so every row is another.
    let rows = (1..tokens as u32).step_by(2);
    rows.map(|row| InjectedRow { row, media: row * 7 % MEDIA as u32 }).collect()
}

/// Returns rows of the cache in an order without a pattern.
fn scattered(count: usize) -> Vec<u32> {
    (0..count as u32).map(|row| (row * 13 + 5) % MEDIA as u32).collect()
}

impl Suite<'_> {
    /// Returns a backend with both programs and zeroed rows of the cache.
    fn with_images(&self, model: &ImageModel) -> Box<dyn Backend> {
        let (program, weights) = model.decoder.build().expect("the decoder is well formed");
        let mut backend = self.loaded(&program, &weights);
        let (program, weights) = model.encoder.build().expect("the encoder is well formed");
        backend.load_encoder(&program, &weights, &mut |_| {}).expect("the encoder fits");
        backend.allocate_media(MEDIA).expect("there is memory");
        backend
    }

    /// Checks that the stored rows are close to the exact f64 results, and so are those of a decoder that takes them.
    pub fn images_are_near(
        &self,
        model: &ImageModel,
        rounding: Rounding,
        margin: f64,
        images: &[usize],
    ) -> Result<(), TestCaseError> {
        let images: Vec<_> =
            images.iter().enumerate().map(|(at, &rows)| (model.encoder.layers.seed ^ at as u64, rows)).collect();
        let stored = scattered(images.iter().map(|image| image.1).sum());
        let batch = model.encoder.batch(&images, stored.clone());
        let (program, weights) = model.encoder.build().expect("the encoder is well formed");
        let mut backend = self.with_images(model);
        backend.encode(&batch).expect("the encoder runs");
        let (exact, disturbed) = encoded(&program, &weights, &batch, MEDIA, (rounding, model.encoder.layers.seed));
        let all: Vec<u32> = (0..MEDIA as u32).collect();
        let media = backend.media(&all).expect("there are rows");
        let columns = program.media_columns();
        prop_assert_eq!(media.len(), MEDIA * columns);
        for (row, values) in media.chunks(columns).enumerate() {
            prop_assert!(
                stored.contains(&(row as u32)) || values.iter().all(|&x| x == 0.0),
                "row {} is not stored",
                row
            );
        }
        let bits: Vec<Vec<u32>> = media.chunks(columns).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect();
        let found: Vec<&[u32]> = bits.iter().map(|row| &row[..]).collect();
        self.near(&found, &exact, disturbed.iter(), margin)?;

        // The decoder is compared on what the encoder has stored, so that errors do not add up.
        let media = media.chunks(columns).map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect();
        const TOKENS: usize = 30;
        let reference = Reference::with(
            &model.decoder,
            TOKENS,
            rounding,
            Extras { media, injected: injected(TOKENS), adapter: None },
        );
        let mut batches = PagedBatches::for_program(&reference.program, BLOCK, BLOCKS, &mut TestRng(1));
        let sequence = batches.add(reference.tokens.clone());
        let mut batch = batches.step(&[(sequence, TOKENS)]);
        batch.injected = injected(TOKENS);
        let found = run(&mut *backend, &reference.program, &batch);
        let vocab = reference.program.vocab_size;
        let logits: Vec<&[u32]> = found.iter().map(|row| &row[..vocab]).collect();
        self.near(&logits, &reference.exact.logits, reference.disturbed.iter().map(|meaning| &meaning.logits), margin)
    }

    /// Checks that the bits of an image do not depend on the images beside it, and those of a sequence not on the chunks
    /// into which its images are cut.
    pub fn images_have_the_same_bits(&self, model: &ImageModel, images: &[usize]) -> Result<(), TestCaseError> {
        let images: Vec<_> = images.iter().enumerate().map(|(at, &rows)| (at as u64, rows)).collect();
        let rows = scattered(images.iter().map(|image| image.1).sum());
        let mut backend = self.with_images(model);
        backend.encode(&model.encoder.batch(&images, rows.clone())).expect("the encoder runs");
        let together = bits(&backend.media(&rows).expect("there are rows"));
        let mut alone = Vec::new();
        for &(seed, count) in images.iter().rev() {
            // An image has other rows of the cache than before.
            let rows: Vec<u32> = (0..count as u32).map(|row| (row + 3) % MEDIA as u32).collect();
            backend.encode(&model.encoder.batch(&[(seed, count)], rows.clone())).expect("the encoder runs");
            alone.push(bits(&backend.media(&rows).expect("there are rows")));
        }
        alone.reverse();
        prop_assert_eq!(alone.concat(), together);

        const TOKENS: usize = 30;
        let (program, _) = model.decoder.build().expect("the decoder is well formed");
        let tokens = TestRng(7).tokens(TOKENS, program.vocab_size);
        let found = [1, 7, TOKENS].map(|chunk| {
            let mut batches = PagedBatches::for_program(&program, BLOCK, BLOCKS, &mut TestRng(1));
            let sequence = batches.add(tokens.clone());
            let mut rows = Vec::new();
            for start in (0..TOKENS).step_by(chunk) {
                let count = chunk.min(TOKENS - start);
                let mut batch = batches.step(&[(sequence, count)]);
                batch.injected = part(start, count);
                rows.extend(run(&mut *backend, &program, &batch));
            }
            rows
        });
        prop_assert_eq!(&found[0], &found[2]);
        prop_assert_eq!(&found[1], &found[2]);
        Ok(())
    }

    /// Checks that an encoder and a decoder that do not fit, or a malformed batch, give an error.
    pub fn malformed_images_are_errors(&self) {
        let model = ImageModel {
            encoder: TinyEncoder {
                layers: TinyModel::default(),
                patch: 8,
                merge: 2,
                merge_kind: MergeKind::Concatenated,
                positions: 9,
                out: TinyModel::default().hidden,
                parts: 2,
            },
            decoder: TinyModel { media: 2, ..TinyModel::default() },
        };
        let mut backend = self.with_images(&model);
        let name = backend.name();
        type Spoil = fn(&mut EncodeBatch);
        let spoilt: [(&str, Spoil); 9] = [
            ("positions", |b| b.rows.positions.truncate(3)),
            ("patches", |b| b.patches.truncate(3)),
            ("the number of channels", |b| b.channels.clear()),
            ("a channel's divisor", |b| b.channels[1].divisor = 0.0),
            ("taps", |b| b.taps.truncate(1)),
            ("a tap beyond the table", |b| b.taps[3][2].row = 9),
            ("rows to store", |b| b.store_rows.truncate(1)),
            ("a row beyond the media cache", |b| b.store_rows[1] = MEDIA as u32),
            ("a row that is stored twice", |b| b.store_rows[1] = b.store_rows[0]),
        ];
        let sound = model.encoder.batch(&[(1, 3), (2, 2)], scattered(5));
        for (what, spoil) in spoilt {
            let mut batch = sound.clone();
            spoil(&mut batch);
            let message = backend.encode(&batch).expect_err("the batch is malformed").to_string();
            assert_eq!(message, format!("the {name} backend failed: the batch is malformed: {what}"));
        }
        backend.encode(&sound).expect("the encoder runs");
        let error = backend.media(&[MEDIA as u32]).expect_err("there is no such row").to_string();
        assert_eq!(
            error,
            format!("the {name} backend failed: there is no row {MEDIA} in a media cache of {MEDIA} rows")
        );
        injected_rows_are_checked(&mut *backend);

        let other = TinyEncoder { parts: 1, ..model.encoder };
        let (program, weights) = other.build().expect("the encoder is well formed");
        let error = backend.load_encoder(&program, &weights, &mut |_| {}).expect_err("it does not fit").to_string();
        assert_eq!(error, format!("the {name} backend failed: the encoder stores 24 columns, the decoder takes 48"));
        let (program, weights) = TinyModel::default().build().expect("the decoder is well formed");
        backend.load(&program, &weights, &mut |_| {}).expect("it fits");
        backend.allocate_kv(BLOCK, 8).expect("there is room");
        let message = backend.forward(&injecting_batch()).expect_err("there is no cache").to_string();
        assert!(message.ends_with(": an image's row for a model without images"), "{message}");
        let error = backend.encode(&sound).expect_err("the encoder is gone").to_string();
        assert_eq!(error, format!("the {name} backend failed: no encoder is loaded"));
    }
}

/// Returns a step of 20 tokens, half of which take rows of the cache.
fn injecting_batch() -> StepBatch {
    let mut batches = PagedBatches::new(BLOCK, 1, 8, &mut TestRng(3));
    let sequence = batches.add(vec![1; 20]);
    StepBatch { injected: injected(20), ..batches.step(&[(sequence, 20)]) }
}

/// Checks that a step with malformed rows of images gives an error.
fn injected_rows_are_checked(backend: &mut dyn Backend) {
    type Spoil = fn(&mut StepBatch);
    let spoilt: [(&str, Spoil); 3] = [
        ("an image's row", |b| b.injected[9].row = 20),
        ("the order of images' rows", |b| b.injected.swap(0, 1)),
        ("a row beyond the media cache", |b| b.injected[0].media = MEDIA as u32),
    ];
    for (what, spoil) in spoilt {
        let mut batch = injecting_batch();
        spoil(&mut batch);
        let message = backend.forward(&batch).expect_err("the batch is malformed").to_string();
        assert_eq!(message, format!("the {} backend failed: the batch is malformed: {what}", backend.name()));
    }
}

/// Returns the injected rows of a chunk.
fn part(start: usize, count: usize) -> Vec<InjectedRow> {
    let all = injected(start + count).into_iter().filter(|injected| injected.row as usize >= start);
    all.map(|injected| InjectedRow { row: injected.row - start as u32, ..injected }).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
