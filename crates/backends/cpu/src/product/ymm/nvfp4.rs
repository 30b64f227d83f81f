//! Products of NVFP4 weights in 16 bits with AVX2.
//!
//! Each half of a group has a scale of its own, so that the sums of both halves are scaled before they are added.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::LANES;
use super::scaling::pair_scales;
use super::tile::{Group, Multiplied, Panel, Place};
use super::words::{self, AddProducts, Pair, Pairs, Unpacked};
use crate::memory::LINE;
use crate::product::levels::E2M1_VALUES;
use crate::weights::{Codes, Layout, PANEL};

/// Mask of the upper bytes of words: a register.
#[repr(align(32))]
struct Mask(#[expect(dead_code, reason = "it is read by its address")] [u16; 2 * LANES]);
static UPPER: Mask = Mask([0xff00; 2 * LANES]);

/// Makes up for the place of the values, which is the upper byte of a word.
const INVERSE: f32 = 1.0 / 256.0;

/// A panel of NVFP4 weights in its stored layout, which is multiplied with rows in 16 bits, crossed: of four inputs, the first and the
/// third are multiplied with the lower bytes of two words, and the others with the upper ones.
pub(super) struct PairPanel<'a, A>(Place<'a>, PhantomData<A>);

impl<'a, A> PairPanel<'a, A> {
    pub(super) fn new(panel: &[u8], layout: &'a Layout) -> Self {
        Self(Place { start: panel.as_ptr(), layout }, PhantomData)
    }

    fn codes(&self, group: usize) -> Values {
        let Place { start, layout } = self.0;
        Values(start.wrapping_add(layout.codes_at(Codes::E2m1, group)))
    }
}

impl<A: AddProducts> Panel for PairPanel<'_, A> {
    type Unpacked = Unpacked;
    type Scales = ();

    const EMPTY: (Unpacked, ()) = (Unpacked::EMPTY, ());
    const BLOCK: usize = usize::MAX;
    const LINES: usize = Codes::E2m1.lines();

    fn place(&self) -> Place<'_> {
        self.0
    }

    unsafe fn read_scales(&self, _: Range<usize>, (): &mut ()) {}

    #[inline(always)]
    unsafe fn group(&self, group: usize, (): &()) -> impl Multiplied {
        // SAFETY: the caller guarantees this.
        let scales = unsafe { pair_scales(self.0, group, INVERSE) };
        PairGroup { values: self.codes(group), scales, add: PhantomData::<A> }
    }

    #[inline(always)]
    unsafe fn unpack(&self, group: usize, (): &(), unpacked: &mut Unpacked) -> impl Multiplied {
        // SAFETY: the caller guarantees this.
        unsafe {
            unpacked.fill(&self.codes(group));
            PairGroup { values: &*unpacked, scales: pair_scales(self.0, group, INVERSE), add: PhantomData::<A> }
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
            let values = _mm256_broadcastsi128_si256(_mm_loadu_si128(E2M1_VALUES.as_ptr().cast()));
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
struct PairGroup<P, A> {
    values: P,
    scales: [[__m256; 2]; 2],
    add: PhantomData<A>,
}

impl<P: Pairs, A: AddProducts> Multiplied for PairGroup<P, A> {
    #[inline(always)]
    unsafe fn add<const N: usize>(&self, rows: Group, results: &mut [[f32; PANEL]; N]) {
        // SAFETY: the caller guarantees this.
        unsafe {
            let codes = rows.all_codes();
            let sums = if N <= words::ROWS / 2 {
                words::dots_of_halves::<A, N, P>(&self.values, codes)
            } else {
                let first = words::dots::<A, N, P>(&self.values, codes, 0..1);
                [first, words::dots::<A, N, P>(&self.values, codes, 1..2)]
            };
            rows.add_halves(sums, self.scales, results);
        }
    }
}
