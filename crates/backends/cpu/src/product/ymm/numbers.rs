//! Products of floating-point numbers in fewer than 16 bits with AVX2.
//!
//! Numbers in e4m3 are exact in f32. Values of a table become integers of 16 bits, which are multiplied with the rows' own. In
//! both, the products of a group are added first, and their sum is multiplied with the group's scale: weights are not rounded
//! to bf16. A single row is multiplied with numbers as they are read. For more rows, a group of a panel is unpacked in the
//! first-level cache first.

use std::arch::x86_64::*;
use std::cell::RefCell;

use octavo_ops::{FP4_VALUES, NF4_VALUES};

use super::super::walk::{Range, Store, Tile};
use super::{LANES, ROW_BYTES, ROWS, Row, TileRows, four, read};
use crate::activation::TILE;
use crate::isa::Isa;
use crate::memory::Lines;
use crate::rows::GROUP;
use crate::weights::{Layout, Numbers, PANEL, Part};

/// Pairs of inputs in a group.
const PAIRS: usize = GROUP / 2;

/// Registers of f32 that hold a pair of inputs of a panel: four rows each, a row's two beside each other.
const QUARTERS: usize = 2 * PANEL / LANES;

/// Factor of the rows that are multiplied with e4m3 numbers, and of the scales. The bits of an e4m3 number at their place in
/// an f32 are the number times 2⁻¹²⁰; the smallest are denormal there. Half of the difference goes to either factor, so that
/// neither the products nor the scales leave the range of f32.
const LIFT: f32 = (1u64 << 60) as f32;

thread_local! {
    /// Rows of a tile times [`LIFT`].
    static LIFTED: RefCell<Lines<f32>> = RefCell::default();
}

/// Multiplies any number of rows with panels of e4m3 numbers.
///
/// # Safety
/// AVX2 and FMA must be available, the panels must be of these numbers, and rows must have as many inputs.
pub(in super::super) unsafe fn tiles_of_f8<'a>(
    isa: Isa,
    part: &Part,
    panels: Range,
    input: impl Fn(usize) -> &'a [f32],
    rows: Range,
    store: Store<'_>,
) {
    let layout = &part.layout;
    let mut tile = Tile([[0.0; PANEL]; TILE]);
    LIFTED.with_borrow_mut(|lifted| {
        lifted.reserve_zeroed(TILE * layout.cols);
        for first in rows.clone().step_by(TILE) {
            let count = (rows.end - first).min(TILE);
            for (row, lifted) in (first..first + count).zip(lifted.chunks_exact_mut(layout.cols)) {
                lifted.copy_from_slice(input(row));
                isa.scale(lifted, LIFT);
            }
            for panel in panels.clone() {
                let ahead = if first == rows.start { layout.bytes } else { 0 };
                let (x, results) = (&lifted[..count * layout.cols], &mut tile.0[..count]);
                // SAFETY: the caller guarantees this; the panel has this layout.
                unsafe { multiply_f8(part.panel(panel), layout, x, ahead, results) };
                store(first, panel, results);
            }
        }
    });
}

/// e4m3 numbers of a group. It is a trait because the compiler does not inline every closure that returns registers.
trait Pairs {
    /// Returns four rows of a pair of inputs.
    ///
    /// # Safety
    /// AVX2 must be available, and there must be this pair.
    unsafe fn quarter(&self, pair: usize, index: usize) -> __m256;
}

/// e4m3 numbers of a stored panel.
struct StoredF8(*const u8);

impl Pairs for StoredF8 {
    #[inline(always)]
    unsafe fn quarter(&self, pair: usize, index: usize) -> __m256 {
        // SAFETY: the caller guarantees this.
        unsafe {
            let codes = _mm_loadl_epi64(self.0.add((pair * QUARTERS + index) * LANES).cast());
            // The sign is extended to the left of the four bits of the exponent, and masked between.
            let bits = _mm256_slli_epi32::<20>(_mm256_cvtepi8_epi32(codes));
            _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x87f0_0000_u32 as i32)))
        }
    }
}

/// A group of e4m3 numbers as f32.
#[repr(align(64))]
struct Widened([[[f32; LANES]; QUARTERS]; PAIRS]);

impl Pairs for Widened {
    #[inline(always)]
    unsafe fn quarter(&self, pair: usize, index: usize) -> __m256 {
        // SAFETY: the caller guarantees this.
        unsafe { _mm256_load_ps(self.0.get_unchecked(pair).get_unchecked(index).as_ptr()) }
    }
}

/// Multiplies the rows `x`, each times [`LIFT`], with a panel. `ahead` prefetches the panel at that distance in bytes, unless
/// it is 0.
///
/// # Safety
/// AVX2, FMA and F16C must be available, and the panel must have this layout.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_f8(panel: &[u8], layout: &Layout, x: &[f32], ahead: usize, results: &mut [[f32; PANEL]]) {
    assert!(panel.len() >= layout.bytes && x.len() == results.len() * layout.cols);
    let panel = panel.as_ptr();
    let mut wide = Widened([[[0.0; LANES]; QUARTERS]; PAIRS]);
    results.fill([0.0; PANEL]);
    let (whole, single) = results.as_chunks_mut::<ROWS>();
    for group in 0..layout.groups() {
        // SAFETY: the caller guarantees this; the rows and the panel have this group.
        unsafe {
            if ahead > 0 {
                read::prefetch(panel.wrapping_add(ahead), layout, group);
            }
            let lift = _mm256_set1_ps(LIFT);
            let [first, second] = scales(panel, layout, group);
            let scales = [_mm256_mul_ps(first, lift), _mm256_mul_ps(second, lift)];
            let codes = StoredF8(panel.add(group * GROUP * PANEL));
            let row = |row: usize| x.as_ptr().add(row * layout.cols + group * GROUP);
            if !whole.is_empty() {
                for pair in 0..PAIRS {
                    for index in 0..QUARTERS {
                        _mm256_store_ps(wide.0[pair][index].as_mut_ptr(), codes.quarter(pair, index));
                    }
                }
            }
            for (index, results) in whole.iter_mut().enumerate() {
                add_f8(&wide, scales, [row(index * ROWS), row(index * ROWS + 1)], results);
            }
            for (index, result) in single.iter_mut().enumerate() {
                add_f8(&codes, scales, [row(whole.len() * ROWS + index)], std::array::from_mut(result));
            }
        }
    }
}

/// Adds the products of a group to the results.
#[inline(always)]
unsafe fn add_f8<const N: usize>(
    numbers: &impl Pairs,
    scales: [__m256; 2],
    x: [*const f32; N],
    results: &mut [[f32; PANEL]; N],
) {
    // SAFETY: the caller guarantees this; arrays of a panel have two registers.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); QUARTERS]; N];
        for pair in 0..PAIRS {
            for r in 0..N {
                let both = x[r].add(2 * pair).cast::<f64>().read_unaligned();
                let both = _mm256_castpd_ps(_mm256_set1_pd(both));
                for (q, sum) in sums[r].iter_mut().enumerate() {
                    *sum = _mm256_fmadd_ps(numbers.quarter(pair, q), both, *sum);
                }
            }
        }
        for r in 0..N {
            for h in 0..2 {
                // The sums of a row's even and odd inputs are beside each other. The addition within each half of a register
                // leaves the rows as 0, 1, 4, 5, 2, 3, 6, 7.
                let added = _mm256_castps_pd(_mm256_hadd_ps(sums[r][2 * h], sums[r][2 * h + 1]));
                let added = _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(added));
                let result = results[r].as_mut_ptr().add(h * LANES);
                _mm256_storeu_ps(result, _mm256_fmadd_ps(added, scales[h], _mm256_loadu_ps(result)));
            }
        }
    }
}

/// Returns the scales of a group.
#[inline(always)]
unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m256; 2] {
    // SAFETY: the caller guarantees that the panel has this layout and group, and the instruction set.
    unsafe {
        let at = panel.add(layout.number_scales_at(group)).cast::<f32>();
        [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(LANES))]
    }
}

/// The values of a table as integers of 16 bits: their lower and their upper bytes.
struct Levels {
    low: [u8; 16],
    high: [u8; 16],
    /// Factor of the integers.
    inverse: f32,
}

/// Largest integer of NF4. The sum of a group's products with codes of 12 bits is below 2³¹. A weight is within 2⁻¹⁶ times its
/// scale.
static NF4: Levels = levels(&NF4_VALUES, 32767.0);

/// All values of FP4 are whole 192nds.
static FP4: Levels = levels(&FP4_VALUES, 192.0 * 170.0);

const fn levels(values: &[f32; 16], factor: f32) -> Levels {
    let mut levels = Levels { low: [0; 16], high: [0; 16], inverse: 1.0 / factor };
    let mut code = 0;
    while code < values.len() {
        let scaled = values[code] * factor;
        let [low, high] = ((if scaled < 0.0 { scaled - 0.5 } else { scaled + 0.5 }) as i16).to_le_bytes();
        (levels.low[code], levels.high[code]) = (low, high);
        code += 1;
    }
    levels
}

/// Levels of a stored panel: a register has those of the rows 0 to 3 and 8 to 11, another the others.
struct StoredLevels {
    at: *const u8,
    low: __m256i,
    high: __m256i,
}

/// Levels of a group, in pairs of registers.
trait LevelPairs {
    /// # Safety
    /// AVX2 must be available, and there must be this pair.
    unsafe fn pair(&self, pair: usize) -> [__m256i; 2];
}

impl LevelPairs for StoredLevels {
    #[inline(always)]
    unsafe fn pair(&self, pair: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let packed = _mm256_broadcastsi128_si256(_mm_loadu_si128(self.at.add(pair * PANEL).cast()));
            // The high nibbles are those of the rows from 8 on.
            let moved = _mm256_srlv_epi32(packed, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
            let codes = _mm256_and_si256(moved, _mm256_set1_epi8(15));
            let (low, high) = (_mm256_shuffle_epi8(self.low, codes), _mm256_shuffle_epi8(self.high, codes));
            [_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)]
        }
    }
}

/// A group of levels.
#[repr(align(64))]
struct Unpacked([[[i16; 2 * LANES]; 2]; PAIRS]);

impl LevelPairs for Unpacked {
    #[inline(always)]
    unsafe fn pair(&self, pair: usize) -> [__m256i; 2] {
        // SAFETY: the caller guarantees this.
        unsafe {
            let [first, second] = self.0.get_unchecked(pair);
            [_mm256_load_si256(first.as_ptr().cast()), _mm256_load_si256(second.as_ptr().cast())]
        }
    }
}

/// Multiplies the rows of a tile with a panel of the values of a table. `ahead` prefetches the panel at that distance in
/// bytes, unless it is 0.
///
/// # Safety
/// AVX2, FMA and F16C must be available, the panel must have this layout, and the rows must be in 16 bits.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn multiply_levels(
    numbers: Numbers,
    panel: &[u8],
    layout: &Layout,
    rows: &TileRows<'_>,
    ahead: usize,
    results: &mut [[f32; PANEL]],
) {
    let levels = match numbers {
        Numbers::Nf4 => &NF4,
        Numbers::Fp4 => &FP4,
        Numbers::F8 => unreachable!("e4m3 numbers are no table"),
    };
    let Some(words) = rows.words else { unreachable!("the rows of these numbers are in 16 bits") };
    assert!(panel.len() >= layout.bytes && results.len() == rows.count);
    let (panel, groups) = (panel.as_ptr(), layout.groups());
    let (_, row_scales, row_sums) = rows.input.from(rows.first);
    let row_totals = rows.input.totals_from(rows.first);
    let mut unpacked = Unpacked([[[0; 2 * LANES]; 2]; PAIRS]);
    results.fill([0.0; PANEL]);
    let (whole, single) = results.as_chunks_mut::<ROWS>();
    for group in 0..groups {
        // SAFETY: the caller guarantees this; the rows and the panel have this group, and tables have sixteen bytes.
        unsafe {
            if ahead > 0 {
                read::prefetch(panel.wrapping_add(ahead), layout, group);
            }
            let table = |bytes: &[u8; 16]| _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast()));
            let (low, high) = (table(&levels.low), table(&levels.high));
            let stored = StoredLevels { at: panel.add(group * GROUP * PANEL / 2), low, high };
            let [first, second] = scales(panel, layout, group);
            let inverse = _mm256_set1_ps(levels.inverse);
            let scales = [_mm256_mul_ps(first, inverse), _mm256_mul_ps(second, inverse)];
            let row = |row: usize| {
                let at = row * groups + group;
                Row {
                    codes: words.as_ptr().cast::<u8>().add(at * ROW_BYTES),
                    scale: row_scales.as_ptr().add(at).read(),
                    sum: row_sums.as_ptr().add(at).read(),
                    totals: row_totals.as_ptr().add(at).read(),
                }
            };
            if !whole.is_empty() {
                for (pair, [first, second]) in unpacked.0.iter_mut().enumerate() {
                    let [low, high] = stored.pair(pair);
                    _mm256_store_si256(first.as_mut_ptr().cast(), low);
                    _mm256_store_si256(second.as_mut_ptr().cast(), high);
                }
            }
            for (index, results) in whole.iter_mut().enumerate() {
                add_levels(&unpacked, scales, &[row(index * ROWS), row(index * ROWS + 1)], results);
            }
            for (index, result) in single.iter_mut().enumerate() {
                let rows = [row(whole.len() * ROWS + index)];
                add_levels(&stored, scales, &rows, std::array::from_mut(result));
            }
        }
    }
}

/// Adds the products of a group to the results.
#[inline(always)]
unsafe fn add_levels<const N: usize>(
    levels: &impl LevelPairs,
    scales: [__m256; 2],
    rows: &[Row; N],
    results: &mut [[f32; PANEL]; N],
) {
    // SAFETY: the caller guarantees this; arrays of a panel have two registers.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 2]; N];
        for pair in 0..PAIRS {
            let levels = levels.pair(pair);
            for r in 0..N {
                let both = four(rows[r].codes, pair);
                for (sum, levels) in sums[r].iter_mut().zip(levels) {
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(levels, both));
                }
            }
        }
        for r in 0..N {
            let [first, second] = sums[r];
            let ordered =
                [_mm256_permute2x128_si256::<0x20>(first, second), _mm256_permute2x128_si256::<0x31>(first, second)];
            for (h, sums) in ordered.into_iter().enumerate() {
                let result = results[r].as_mut_ptr().add(h * LANES);
                let scale = _mm256_mul_ps(scales[h], _mm256_set1_ps(rows[r].scale));
                let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale, _mm256_loadu_ps(result));
                _mm256_storeu_ps(result, sum);
            }
        }
    }
}
