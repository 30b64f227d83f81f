//! Tests of the kernels for images.

use std::sync::LazyLock;

use octavo_kernels::manifest::{self, Dtype, MediaMove};
use octavo_kernels::params::{EmbedTapsParams, MeanRowsParams, MediaRowsParams, PatchesParams};
use octavo_ops::testing::TestRng;

use crate::common::{assert_near, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, dtypes};
use crate::support::{Array, Tolerance, pick};

const MOVES: [MediaMove; 3] = [MediaMove::Store, MediaMove::Replace, MediaMove::Add];

static KERNELS: LazyLock<Kernels> = LazyLock::new(|| {
    let mut instances = Vec::new();
    for dtype in dtypes() {
        instances.extend([manifest::patches(dtype), manifest::embed_taps(dtype), manifest::mean_rows(dtype)]);
        instances.extend(MOVES.map(|how| manifest::media_rows(dtype, how)));
    }
    Kernels::new(&instances)
});

fn check_patches(dtype: Dtype, rng: &mut TestRng) {
    let (rows, channel_cols, channels) = (1 + rng.below(5), pick(rng, &[1, 16, 50, 512]), 3);
    let cols = channel_cols * channels;
    let bytes: Vec<u8> = (0..rows * cols).map(|_| rng.below(256) as u8).collect();
    let numbers: Vec<f32> = (0..channels).flat_map(|c| [100.0 + 9.0 * c as f32, 60.0 - 4.0 * c as f32]).collect();
    let out = in_every_order(|order| {
        let mut out = Array::poisoned(dtype, rows * cols);
        let params = PatchesParams {
            out: out.ptr_mut(),
            bytes: address(&bytes),
            channels: address(&numbers),
            rows: rows as u32,
            cols: cols as u32,
            channel_cols: channel_cols as u32,
            reserved: 0,
        };
        launch(&KERNELS, order, &manifest::patches(dtype), params.grid(), &params);
        out
    });
    let value = |(i, &byte): (usize, &u8)| {
        let channel = i % cols / channel_cols;
        (f64::from(byte) - f64::from(numbers[2 * channel])) / f64::from(numbers[2 * channel + 1])
    };
    let expected: Vec<f64> = bytes.iter().enumerate().map(value).collect();
    assert_near(&out.values(), &expected, Tolerance::Elementwise.bound(dtype), "patches");
}

fn check_taps(dtype: Dtype, rng: &mut TestRng) {
    let (rows, positions, cols) = (1 + rng.below(5), 6, pick(rng, &[1, 24, 100, 1152]));
    let (before, table) = (Array::random(dtype, rows * cols, rng), Array::random(dtype, positions * cols, rng));
    let tap_rows = rng.tokens(4 * rows, positions);
    let tap_weights: Vec<f32> = (0..4 * rows).map(|_| rng.signed()).collect();
    let out = in_every_order(|order| {
        let mut out = before.clone();
        let params = EmbedTapsParams {
            out: out.ptr_mut(),
            table: table.ptr(),
            tap_rows: address(&tap_rows),
            tap_weights: address(&tap_weights),
            rows: rows as u32,
            cols: cols as u32,
        };
        launch(&KERNELS, order, &manifest::embed_taps(dtype), params.grid(), &params);
        out
    });
    let value = |i: usize| {
        let taps = tap_rows[i / cols * 4..].iter().zip(&tap_weights[i / cols * 4..]).take(4);
        let learned = taps.map(|(&row, &weight)| f64::from(weight) * table.get(row as usize * cols + i % cols));
        before.get(i) + learned.sum::<f64>()
    };
    let expected: Vec<f64> = (0..rows * cols).map(value).collect();
    // Sums of five numbers may cancel.
    assert_near(&out.values(), &expected, 2.0 * Tolerance::Elementwise.bound(dtype), "learned positions");
}

fn check_means(dtype: Dtype, rng: &mut TestRng) {
    let (rows, merge, cols) = (1 + rng.below(5), 1 + rng.below(16), pick(rng, &[1, 24, 100, 1152]));
    let input = Array::random(dtype, rows * merge * cols, rng);
    let out = in_every_order(|order| {
        let mut out = Array::poisoned(dtype, rows * cols);
        let params = MeanRowsParams {
            out: out.ptr_mut(),
            input: input.ptr(),
            rows: rows as u32,
            cols: cols as u32,
            merge: merge as u32,
            reserved: 0,
        };
        launch(&KERNELS, order, &manifest::mean_rows(dtype), params.grid(), &params);
        out
    });
    let value = |i: usize| {
        let column = (0..merge).map(|row| input.get((i / cols * merge + row) * cols + i % cols));
        column.sum::<f64>() / merge as f64
    };
    let expected: Vec<f64> = (0..rows * cols).map(value).collect();
    // The sum of up to 16 numbers may cancel.
    assert_near(&out.values(), &expected, 2.0 * Tolerance::Elementwise.bound(dtype), "means");
}

fn check_media_rows(dtype: Dtype, how: MediaMove, rng: &mut TestRng) {
    let (count, cols) = (1 + rng.below(4), pick(rng, &[1, 24, 100, 1152]));
    let (rows, kept, parts) = (7, 9, 3);
    let (media_cols, column) = (parts * cols, rng.below(parts) * cols);
    let before = [Array::random(dtype, rows * cols, rng), Array::random(dtype, kept * media_cols, rng)];
    // Distinct rows, or the rows in order.
    let row_index = (rng.below(2) == 0).then(|| (0..count as u32).map(|i| (i * 3 + 1) % 7).collect::<Vec<_>>());
    let media_index: Vec<u32> = (0..count as u32).map(|i| (i * 5 + 2) % 9).collect();
    let [found_rows, found_media] = in_every_order(|order| {
        let [mut buffer, mut media] = before.clone();
        let params = MediaRowsParams {
            rows: buffer.ptr_mut(),
            media: media.ptr_mut(),
            row_index: row_index.as_deref().map_or(0, address),
            media_index: address(&media_index),
            count: count as u32,
            cols: cols as u32,
            media_cols: media_cols as u32,
            column: column as u32,
        };
        launch(&KERNELS, order, &manifest::media_rows(dtype, how), params.grid(), &params);
        [buffer, media]
    });
    let [mut expected_rows, mut expected_media] = before.clone();
    for (i, &media) in media_index.iter().enumerate() {
        let row = row_index.as_ref().map_or(i, |rows| rows[i] as usize) * cols;
        let media = media as usize * media_cols + column;
        match how {
            MediaMove::Store => expected_media.copy_from(media, &before[0], row..row + cols),
            MediaMove::Replace => expected_rows.copy_from(row, &before[1], media..media + cols),
            MediaMove::Add => {
                for c in 0..cols {
                    expected_rows.set(row + c, before[0].get(row + c) + before[1].get(media + c));
                }
            }
        }
    }
    assert!(found_media == expected_media, "{how:?}: the media cache");
    // The sums of two numbers are rounded once, from f64 here and from f32 there.
    assert_near(&found_rows.values(), &expected_rows.values(), Tolerance::Elementwise.bound(dtype), "rows");
    if how != MediaMove::Add {
        assert!(found_rows == expected_rows, "{how:?}: rows");
    }
}

#[test]
fn images_are_as_in_f64() {
    let rng = &mut rng();
    for _ in 0..8 {
        for dtype in dtypes() {
            check_patches(dtype, rng);
            check_taps(dtype, rng);
            check_means(dtype, rng);
            MOVES.into_iter().for_each(|how| check_media_rows(dtype, how, rng));
        }
    }
}
