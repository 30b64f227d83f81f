//! The two passes, written so that the compiler vectorises them for the instruction set of the machine.
//!
//! Both add runs of bytes, each times one weight. In the vertical pass a run is a row of the image. The horizontal pass
//! first transposes a strip of rows, so that a column of the strip is a run.

use pulp::Arch;

use super::weights::Weights;
use crate::RgbImage;

/// Pairs of shuffles that transpose a strip; see [`transpose`].
const SHUFFLE_PAIRS: usize = 2;

/// Rows of a strip.
const STRIP: usize = 1 << (2 * SHUFFLE_PAIRS);

/// Output rows of the vertical pass between two questions whether the work is cancelled.
const BAND: usize = 16;

/// Weights that are applied in one sweep. Longer runs add up their sums in memory.
const TAPS: usize = 8;

/// Resizes the width.
pub(super) fn horizontal(
    image: &RgbImage,
    weights: &Weights,
    width: usize,
    cancelled: &dyn Fn() -> bool,
) -> Option<RgbImage> {
    let (input, output) = (image.width() * 3, width * 3);
    let mut resized = vec![0; output * image.height()];
    let mut strip = Strip::new(input, output);
    for (from, to) in image.data().chunks(STRIP * input).zip(resized.chunks_mut(STRIP * output)) {
        if cancelled() {
            return None;
        }
        Arch::new().dispatch(
            #[inline(always)]
            || strip.resize(weights, from, to),
        );
    }
    Some(RgbImage::from_raw(width, image.height(), resized))
}

/// Resizes the height.
pub(super) fn vertical(
    image: &RgbImage,
    weights: &Weights,
    height: usize,
    cancelled: &dyn Fn() -> bool,
) -> Option<RgbImage> {
    let row = image.width() * 3;
    let mut resized = vec![0; row * height];
    let mut sums = vec![0; row];
    for (band, to) in resized.chunks_mut(BAND * row).enumerate() {
        if cancelled() {
            return None;
        }
        Arch::new().dispatch(
            #[inline(always)]
            || resize_band(weights, band * BAND, image.data(), to, &mut sums),
        );
    }
    Some(RgbImage::from_raw(image.width(), height, resized))
}

/// Memory for one strip, before the pass in `input` and after it in `output`.
struct Strip {
    input: Vec<u8>,
    output: Vec<u8>,
    scratch: Vec<u8>,
    sums: Vec<i32>,
}

impl Strip {
    /// `input` and `output` are the bytes of a row.
    fn new(input: usize, output: usize) -> Self {
        let strip = |row| vec![0; STRIP * row];
        Self { input: strip(input), output: strip(output), scratch: strip(input.max(output)), sums: vec![0; STRIP * 3] }
    }

    /// Resizes the width of at most [`STRIP`] rows.
    #[inline(always)]
    fn resize(&mut self, weights: &Weights, from: &[u8], to: &mut [u8]) {
        let Self { input, output, scratch, sums } = self;
        // The last strip may have fewer rows. The others then hold rows of the strip before, which are not read.
        input[..from.len()].copy_from_slice(from);
        transpose(input, scratch);
        for (i, to) in output.chunks_exact_mut(STRIP * 3).enumerate() {
            let (low, run) = weights.of(i);
            weighted(&input[low * STRIP * 3..], run, weights.precision, sums, to);
        }
        untranspose(output, scratch);
        to.copy_from_slice(&output[..to.len()]);
    }
}

/// Resizes the height of the rows from `first` on. `sums` has the length of a row.
#[inline(always)]
fn resize_band(weights: &Weights, first: usize, from: &[u8], to: &mut [u8], sums: &mut [i32]) {
    let row = sums.len();
    for (i, to) in to.chunks_exact_mut(row).enumerate() {
        let (low, run) = weights.of(first + i);
        weighted(&from[low * row..], run, weights.precision, sums, to);
    }
}

/// Turns `[row][byte]` into `[byte][row]`.
///
/// A perfect shuffle moves the top bit of an index to its bottom. As many shuffles as the number of a row has bits move
/// the whole number.
#[inline(always)]
fn transpose(strip: &mut [u8], scratch: &mut [u8]) {
    let scratch = &mut scratch[..strip.len()];
    for _ in 0..SHUFFLE_PAIRS {
        interleave(strip, scratch);
        interleave(scratch, strip);
    }
}

/// The inverse of [`transpose`].
#[inline(always)]
fn untranspose(strip: &mut [u8], scratch: &mut [u8]) {
    let scratch = &mut scratch[..strip.len()];
    for _ in 0..SHUFFLE_PAIRS {
        deinterleave(strip, scratch);
        deinterleave(scratch, strip);
    }
}

#[inline(always)]
fn interleave(from: &[u8], to: &mut [u8]) {
    let (even, odd) = from.split_at(from.len() / 2);
    for ((to, even), odd) in to.chunks_exact_mut(2).zip(even).zip(odd) {
        to[0] = *even;
        to[1] = *odd;
    }
}

#[inline(always)]
fn deinterleave(from: &[u8], to: &mut [u8]) {
    let (even, odd) = to.split_at_mut(from.len() / 2);
    for ((from, even), odd) in from.chunks_exact(2).zip(even).zip(odd) {
        *even = from[0];
        *odd = from[1];
    }
}

/// The sum of the runs in `from`, each times its weight, rounded to 8 bits. A run has the length of `to`.
#[inline(always)]
fn weighted(from: &[u8], weights: &[i32], precision: u32, sums: &mut [i32], to: &mut [u8]) {
    match weights.len() {
        1 => sweep::<1>(from, weights, precision, to),
        2 => sweep::<2>(from, weights, precision, to),
        3 => sweep::<3>(from, weights, precision, to),
        4 => sweep::<4>(from, weights, precision, to),
        5 => sweep::<5>(from, weights, precision, to),
        6 => sweep::<6>(from, weights, precision, to),
        7 => sweep::<7>(from, weights, precision, to),
        8 => sweep::<8>(from, weights, precision, to),
        _ => {
            sums.fill(half(precision));
            for (weights, from) in weights.chunks(TAPS).zip(from.chunks(TAPS * to.len())) {
                if weights.len() == TAPS {
                    add::<TAPS>(from, weights, sums);
                } else {
                    weights
                        .chunks(1)
                        .zip(from.chunks(to.len()))
                        .for_each(|(weight, from)| add::<1>(from, weight, sums));
                }
            }
            for (to, sum) in to.iter_mut().zip(sums) {
                *to = rounded(*sum, precision);
            }
        }
    }
}

/// [`weighted`] for a number of weights that is known to the compiler, so that the sums stay in registers.
#[inline(always)]
fn sweep<const N: usize>(from: &[u8], weights: &[i32], precision: u32, to: &mut [u8]) {
    let Some(weights) = weights.first_chunk::<N>() else { return };
    let runs: [&[u8]; N] = runs(from, to.len());
    for (i, to) in to.iter_mut().enumerate() {
        let mut sum = half(precision);
        for (run, weight) in runs.iter().zip(weights) {
            sum += i32::from(run[i]) * weight;
        }
        *to = rounded(sum, precision);
    }
}

/// Adds `N` runs to `sums`, each times its weight.
#[inline(always)]
fn add<const N: usize>(from: &[u8], weights: &[i32], sums: &mut [i32]) {
    let Some(weights) = weights.first_chunk::<N>() else { return };
    let runs: [&[u8]; N] = runs(from, sums.len());
    for (i, sum) in sums.iter_mut().enumerate() {
        for (run, weight) in runs.iter().zip(weights) {
            *sum += i32::from(run[i]) * weight;
        }
    }
}

#[inline(always)]
fn runs<const N: usize>(from: &[u8], len: usize) -> [&[u8]; N] {
    std::array::from_fn(|j| &from[j * len..][..len])
}

/// One half in fixed point.
#[inline(always)]
fn half(precision: u32) -> i32 {
    (1 << precision) >> 1
}

#[inline(always)]
fn rounded(sum: i32, precision: u32) -> u8 {
    (sum >> precision).clamp(0, 255) as u8
}
