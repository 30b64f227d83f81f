//! Encoders of images, shared by the suites over the stand-in and on a GPU.

use octavo_backend_cuda::{CudaBackend, CudaConfig};
use octavo_ops::testing::{ImageModel, PagedBatches, TestRng, TinyModel};
use octavo_ops::{Backend, InjectedRow};

use super::open;

/// Number of rows of the media cache.
pub(crate) const MEDIA: usize = 100;

/// Returns a backend with both programs, 8 blocks and rows of the media cache.
pub(crate) fn with_images(config: CudaConfig, model: &ImageModel) -> CudaBackend {
    let mut backend = open(config);
    let (program, weights) = model.decoder.build().expect("the decoder is well formed");
    backend.load(&program, &weights, &mut |_| {}).expect("the decoder is loaded");
    let (program, weights) = model.encoder.build().expect("the encoder is well formed");
    backend.load_encoder(&program, &weights, &mut |_| {}).expect("the encoder is loaded");
    backend.allocate_kv(16, 8).expect("there is memory");
    backend.allocate_media(MEDIA).expect("there is memory");
    backend
}

/// Returns the rows of images of the given numbers of merged rows, encoded together or one by one.
pub(crate) fn encoded(backend: &mut CudaBackend, model: &ImageModel, images: &[usize], together: bool) -> Vec<f32> {
    let images: Vec<_> = images.iter().enumerate().map(|(at, &rows)| (at as u64, rows)).collect();
    let total = images.iter().map(|image| image.1).sum::<usize>() as u32;
    if together {
        backend.encode(&model.encoder.batch(&images, (0..total).collect())).expect("the encoder runs");
    } else {
        let mut first = 0;
        for &(seed, rows) in &images {
            let places = (first..first + rows as u32).collect();
            backend.encode(&model.encoder.batch(&[(seed, rows)], places)).expect("the encoder runs");
            first += rows as u32;
        }
    }
    backend.media(&(0..total).collect::<Vec<_>>()).expect("there are rows")
}

/// Returns the logits of a sequence that is computed token by token; every second token is an image's if `injected`.
pub(crate) fn token_by_token(backend: &mut CudaBackend, model: &TinyModel, injected: bool) -> Vec<f32> {
    let mut batches = PagedBatches::new(16, 1, 8, &mut TestRng(3));
    let sequence = batches.add(TestRng(4).tokens(20, model.vocab_size));
    let mut logits = Vec::new();
    for token in 0..20 {
        let mut batch = batches.step(&[(sequence, 1)]);
        batch.pooled_rows.clear();
        if injected && token % 2 == 1 {
            batch.injected.push(InjectedRow { row: 0, media: token });
        }
        backend.forward(&batch).expect("the step runs");
        logits.extend(backend.logits().expect("there are logits"));
    }
    logits
}
