//! The two passes, written so that the compiler vectorises them for the instruction set of the machine.
//!
//! Both add runs of bytes, each times one weight. In the vertical pass a run is a row of the image. The horizontal pass
//! first transposes a strip of rows, so that a column of the strip is a run.

use pulp::{Arch, NullaryFnOnce};

use super::weights::Weights;
use crate::RgbImage;

/// Pairs of shuffles that transpose a strip; see [`transpose`].
const SHUFFLE_PAIRS: usize = 2;

/// Rows of a strip.
const STRIP: usize = 1 << (2 * SHUFFLE_PAIRS);

/// Output rows of the vertical pass between two questions whether the work is cancelled.
const BAND: usize = 16;

/// Bytes of a run whose sums are in registers at one time: a column of a strip.
const LANES: usize = STRIP * 3;

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
        Arch::new().dispatch(StripPass { strip: &mut strip, weights, from, to });
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
    for (band, to) in resized.chunks_mut(BAND * row).enumerate() {
        if cancelled() {
            return None;
        }
        Arch::new().dispatch(BandPass { weights, first: band * BAND, from: image.data(), row, to });
    }
    Some(RgbImage::from_raw(image.width(), height, resized))
}

/// Memory for one strip, before the pass in `input` and after it in `output`.
struct Strip {
    input: Vec<u8>,
    output: Vec<u8>,
    scratch: Vec<u8>,
}

impl Strip {
    /// `input` and `output` are the bytes of a row.
    fn new(input: usize, output: usize) -> Self {
        let strip = |row| vec![0; STRIP * row];
        Self { input: strip(input), output: strip(output), scratch: strip(input.max(output)) }
    }
}

/// Resizes the width of at most [`STRIP`] rows.
///
/// A type of its own, because the call of a closure would not be inlined into the code for an instruction set.
struct StripPass<'a> {
    strip: &'a mut Strip,
    weights: &'a Weights,
    from: &'a [u8],
    to: &'a mut [u8],
}

impl NullaryFnOnce for StripPass<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { strip: Strip { input, output, scratch }, weights, from, to } = self;
        // The last strip may have fewer rows. The others then hold rows of the strip before, which are not read.
        input[..from.len()].copy_from_slice(from);
        transpose(input, scratch);
        for (i, to) in output.chunks_exact_mut(LANES).enumerate() {
            let (low, run) = weights.taps(i);
            weighted(&input[low * LANES..], run, weights.precision, to);
        }
        untranspose(output, scratch);
        to.copy_from_slice(&output[..to.len()]);
    }
}

/// Resizes the height of the rows from `first` on.
struct BandPass<'a> {
    weights: &'a Weights,
    first: usize,
    from: &'a [u8],
    /// Bytes of a row.
    row: usize,
    to: &'a mut [u8],
}

impl NullaryFnOnce for BandPass<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (i, to) in self.to.chunks_exact_mut(self.row).enumerate() {
            let (low, run) = self.weights.taps(self.first + i);
            weighted(&self.from[low * self.row..], run, self.weights.precision, to);
        }
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
fn weighted(from: &[u8], weights: &[i32], precision: u32, to: &mut [u8]) {
    let row = to.len();
    let (whole, rest) = to.as_chunks_mut::<LANES>();
    let first = row - rest.len();
    for (i, to) in whole.iter_mut().enumerate() {
        let mut sums = [half(precision); LANES];
        for (weight, run) in weights.iter().zip(from[i * LANES..].chunks(row)) {
            if let Some(run) = run.first_chunk::<LANES>() {
                add(&mut sums, run, *weight);
            }
        }
        round(to, &sums, precision);
    }
    let mut sums = [half(precision); LANES];
    let sums = &mut sums[..rest.len()];
    for (weight, run) in weights.iter().zip(from[first..].chunks(row)) {
        add(sums, run, *weight);
    }
    round(rest, sums, precision);
}

/// Adds a run times its weight. Lengths that the compiler knows need no loop.
#[inline(always)]
fn add(sums: &mut [i32], run: &[u8], weight: i32) {
    for (sum, x) in sums.iter_mut().zip(run) {
        *sum += i32::from(*x) * weight;
    }
}

#[inline(always)]
fn round(to: &mut [u8], sums: &[i32], precision: u32) {
    for (to, sum) in to.iter_mut().zip(sums) {
        *to = (*sum >> precision).clamp(0, 255) as u8;
    }
}

/// One half in fixed point.
#[inline(always)]
fn half(precision: u32) -> i32 {
    (1 << precision) >> 1
}
