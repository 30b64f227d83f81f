//! Time of the steps from pixels to patches for images of 1, 4 and 16 megapixels on one core. `beside_python.py` measures
//! files, beside other programs.

mod qwen3_vl;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use octavo_media::RgbImage;
use octavo_media::resize::{Filter, resize};

use crate::qwen3_vl::processor;

/// Sides of 1, 4 and 16 megapixels that are no multiples of a cell.
const SIDES: [usize; 3] = [1000, 2000, 4000];

fn noise(side: usize) -> RgbImage {
    let mut state = 1_u32;
    let data = (0..side * side * 3).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    RgbImage::from_raw(side, side, data.collect())
}

fn images(criterion: &mut Criterion) {
    let processor = processor();
    let mut group = criterion.benchmark_group("images");
    for side in SIDES {
        let image = noise(side);
        let pixels = (side * side) as u64;
        let target = processor.plan(side, side).expect("a square").views[0].size;
        group.sample_size(10).throughput(Throughput::Elements(pixels));
        for (name, size) in [("resize", target), ("shrink", (side / 4, side / 4))] {
            group.bench_function(BenchmarkId::new(name, side), |bencher| {
                let run = |image| resize(image, size, Filter::Bicubic, &|| false);
                bencher.iter_batched(|| image.clone(), run, criterion::BatchSize::LargeInput);
            });
        }
        group.bench_function(BenchmarkId::new("process", side), |bencher| {
            let run = |image| processor.process(image, &|| false);
            bencher.iter_batched(|| image.clone(), run, criterion::BatchSize::LargeInput);
        });
        let views = processor.process(image, &|| false).expect("a square").expect("not cancelled");
        let patches = &views.patches()[0];
        let mut rows = vec![0.0; patches.len() * patches.layout().values()];
        group.bench_function(BenchmarkId::new("normalize", side), |bencher| {
            bencher.iter(|| patches.normalized(0..patches.len(), black_box(&mut rows)));
        });
    }
}

criterion_group!(benches, images);
criterion_main!(benches);
