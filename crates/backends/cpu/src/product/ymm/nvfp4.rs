//! Products of NVFP4 weights in 16 bits with AVX2.
//!
//! Each half of a group has a scale of its own, so that the sum of a half is rounded before the other is added.

use std::arch::x86_64::*;
use std::ops::Range;

use super::scaling::{pair_factors, pair_scales};
use super::tile::{Group, Multiplied, Panel, Place};
use super::words::{self, Pair, Pairs, Unpacked};
use super::{LANES, Order};
use crate::memory::LINE;
use crate::weights::{Codes, E2M1_CODES, E2M1_OFFSET, Layout, PANEL};

/// Twice the values of the codes, as signed bytes.
static VALUES: [u8; 16] = {
    let mut values = E2M1_CODES;
    let mut code = 0;
    while code < values.len() {
        values[code] = values[code].wrapping_sub(E2M1_OFFSET);
        code += 1;
    }
    values
};

/// Mask of the upper bytes of words: a register.
#[repr(align(32))]
struct Mask(#[expect(dead_code, reason = "it is read by its address")] [u16; 2 * LANES]);
static UPPER: Mask = Mask([0xff00; 2 * LANES]);

/// Makes up for the place of the values, which is the upper byte of a word.
const INVERSE: f32 = 1.0 / 256.0;

/// Order of a row's inputs. Of four, the first and the third are multiplied with the lower bytes of two words, and the others with
/// the upper ones.
pub(super) static ORDER: Order = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15];

/// A panel of NVFP4 weights in its stored layout, which is multiplied with rows in 16 bits.
pub(super) struct PairPanel<'a>(Place<'a>);

impl<'a> PairPanel<'a> {
    pub(super) fn new(panel: &[u8], layout: &'a Layout) -> Self {
        Self(Place { start: panel.as_ptr(), layout })
    }

    fn codes(&self, group: usize) -> Values {
        let Place { start, layout } = self.0;
        Values(start.wrapping_add(layout.codes_at(Codes::E2m1, group)))
    }
}

/// Factors of the rows of a panel, for values in upper bytes.
#[repr(align(32))]
pub(super) struct Factors([[f32; LANES]; 2]);

impl Factors {
    /// # Safety
    /// AVX2 must be available.
    #[inline(always)]
    unsafe fn load(&self) -> [__m256; 2] {
        // SAFETY: the caller guarantees this; both are registers.
        unsafe { [_mm256_load_ps(self.0[0].as_ptr()), _mm256_load_ps(self.0[1].as_ptr())] }
    }
}

impl Panel for PairPanel<'_> {
    type Unpacked = Unpacked;
    type Scales = Factors;

    const EMPTY: (Unpacked, Factors) = (Unpacked::EMPTY, Factors([[0.0; LANES]; 2]));
    const BLOCK: usize = usize::MAX;
    const LINES: usize = Codes::E2m1.lines();

    fn place(&self) -> Place<'_> {
        self.0
    }

    #[inline(always)]
    unsafe fn read_scales(&self, _: Range<usize>, factors: &mut Factors) {
        // SAFETY: the caller guarantees this; both are registers.
        unsafe {
            for (factors, read) in factors.0.iter_mut().zip(pair_factors(self.0, INVERSE)) {
                _mm256_store_ps(factors.as_mut_ptr(), read);
            }
        }
    }

    #[inline(always)]
    unsafe fn group(&self, group: usize, factors: &Factors) -> impl Multiplied {
        // SAFETY: the caller guarantees this.
        let scales = unsafe { pair_scales(self.0, group, factors.load()) };
        PairGroup { values: self.codes(group), scales }
    }

    #[inline(always)]
    unsafe fn unpack(&self, group: usize, factors: &Factors, unpacked: &mut Unpacked) -> impl Multiplied {
        // SAFETY: the caller guarantees this.
        unsafe {
            unpacked.fill(&self.codes(group));
            PairGroup { values: &*unpacked, scales: pair_scales(self.0, group, factors.load()) }
        }
    }
}

/// The values of the codes of a group, each in the upper byte of a word.
struct Values(*const u8);

impl Pairs for Values {
    const IN_NIBBLES: bool = true;

    #[inline(always)]
    unsafe fn pair<const N: usize>(&self, pair: Pair) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this; the table has sixteen bytes, and a line has two registers.
        unsafe {
            let values = _mm256_broadcastsi128_si256(_mm_loadu_si128(VALUES.as_ptr().cast()));
            // The sums of many rows leave no register for the mask.
            let upper = (&raw const UPPER).cast::<__m256i>();
            let upper = if N > words::ROWS / 2 { upper.read_volatile() } else { upper.read() };
            let mut weights = [_mm256_setzero_si256(); 2];
            for (h, weights) in weights.iter_mut().enumerate() {
                let packed = _mm256_loadu_si256(self.0.add(pair.line * LINE + h * LINE / 2).cast());
                let nibbles = if pair.half == 0 { packed } else { _mm256_srli_epi16::<4>(packed) };
                let codes = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
                let values = _mm256_shuffle_epi8(values, codes);
                *weights = match pair.parity {
                    0 => _mm256_slli_epi16::<8>(values),
                    _ => _mm256_and_si256(values, upper),
                };
            }
            weights
        }
    }
}

/// A group, and the scales of its halves.
struct PairGroup<P> {
    values: P,
    scales: [[__m256; 2]; 2],
}

impl<P: Pairs> Multiplied for PairGroup<P> {
    #[inline(always)]
    unsafe fn add<const N: usize>(&self, rows: Group, results: &mut [[f32; PANEL]; N]) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let codes = rows.all_codes();
            let sums = if N <= words::ROWS / 2 {
                words::dots_of_halves::<N, P>(&self.values, codes)
            } else {
                let first = words::dots::<N, P>(&self.values, codes, 0..1);
                [first, words::dots::<N, P>(&self.values, codes, 1..2)]
            };
            rows.add_scaled(sums, self.scales, results);
        }
    }
}
