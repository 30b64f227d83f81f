//! Many rows: some groups of two panels are unpacked in the first-level cache and multiplied with one block of rows after the other.
//!
//! Sums of a block's products take half of the registers, so that each instruction finds its sum ready. The results of all groups
//! are in memory.

use std::hint::black_box;

use super::*;
use crate::memory::LINE;

/// Number of rows of a block.
const ROWS: usize = 8;

/// Number of rows of a tile, for which a group is unpacked once.
pub(in super::super) const TILE_ROWS: usize = 8 * ROWS;

/// Largest number of groups that are unpacked at once.
const GROUPS: usize = 4;

/// Number of inputs from which on rows are far apart.
const FAR: usize = 1024;

/// Returns the number of groups that are unpacked at once. Where there are many rows that are far apart, several groups of each are
/// read in sequence; where there are few, weights are read from memory in the meantime.
fn groups_at_once(rows: usize, cols: usize) -> usize {
    match rows {
        17..=32 if cols >= FAR => 2,
        33.. if cols >= FAR => GROUPS,
        _ => 1,
    }
}

/// Results of a tile of rows with two panels. A row more keeps them from being 4 KiB apart: a processor that compares the last
/// twelve bits of addresses would let a result of the second panel wait for one of the first to be stored.
pub(in super::super) type TileResults = [[[f32; PANEL]; TILE_ROWS + 1]; BLOCK_PANELS];

/// Sums of the products of a group, or of half of it.
type Dots<const N: usize> = [[__m512i; N]; BLOCK_PANELS];

/// A group of two panels.
#[repr(align(64))]
struct Group {
    /// Codes as bytes, by panel and step.
    codes: [[[u8; LINE]; STEPS]; BLOCK_PANELS],
    /// Where they are, by panel: here, or in a panel that stores them so.
    at: [*const u8; BLOCK_PANELS],
    /// Scales and minima.
    scales: [[[f32; PANEL]; 2]; BLOCK_PANELS],
    /// Factors of both halves.
    factors: [[[i32; PANEL]; 2]; BLOCK_PANELS],
}

impl Group {
    const ZERO: Self = Self {
        codes: [[[0; LINE]; STEPS]; BLOCK_PANELS],
        at: [std::ptr::null(); BLOCK_PANELS],
        scales: [[[0.0; PANEL]; 2]; BLOCK_PANELS],
        factors: [[[0; PANEL]; 2]; BLOCK_PANELS],
    };

    /// Unpacks a group. It must not be moved afterwards.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn fill<C: ReadCodes, S: ReadScales>(&mut self, panels: [Packed<'_, C, S>; BLOCK_PANELS], group: usize) {
        for (p, panel) in panels.into_iter().enumerate() {
            // SAFETY: the caller guarantees that the panels have this group; a register has a line, sixteen numbers or sixteen integers.
            unsafe {
                self.at[p] = panel.stored(group).unwrap_or_else(|| {
                    for (step, codes) in self.codes[p].iter_mut().enumerate() {
                        _mm512_store_si512(codes.as_mut_ptr().cast(), panel.step(group, step));
                    }
                    self.codes[p].as_ptr().cast()
                });
                let (scale, min) = panel.scales(group);
                _mm512_store_ps(self.scales[p][0].as_mut_ptr(), scale);
                _mm512_store_ps(self.scales[p][1].as_mut_ptr(), min);
                if S::HALVES {
                    for (to, factors) in self.factors[p].iter_mut().zip(panel.factors(group)) {
                        _mm512_store_si512(to.as_mut_ptr().cast(), factors);
                    }
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn scales(&self, panel: usize, index: usize) -> __m512 {
        // SAFETY: there are sixteen scales.
        unsafe { _mm512_load_ps(self.scales[panel][index].as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn factors(&self, panel: usize, half: usize) -> __m512i {
        // SAFETY: there are sixteen factors.
        unsafe { _mm512_load_si512(self.factors[panel][half].as_ptr().cast()) }
    }
}

/// A group of a block of rows: pointers to the first row's.
#[derive(Clone, Copy)]
struct Block {
    codes: *const i8,
    scales: *const f32,
    sums: *const f32,
    totals: *const [i32; 2],
    /// Number of bytes from the codes of a row to those of the next.
    stride: usize,
    /// Number of groups of a row.
    groups: usize,
}

impl Block {
    /// Broadcasts four inputs of a row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn inputs(self, row: usize, at: usize) -> __m512i {
        // SAFETY: the caller guarantees that the row has them.
        unsafe { _mm512_set1_epi32(self.codes.add(row * self.stride + at).cast::<i32>().read_unaligned()) }
    }

    /// Broadcasts the scale of a row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn scale(self, row: usize) -> __m512 {
        // SAFETY: the caller guarantees that there is the row.
        _mm512_set1_ps(unsafe { *self.scales.add(row * self.groups) })
    }

    /// Broadcasts the sum of a row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sum(self, row: usize) -> __m512 {
        // SAFETY: the caller guarantees that there is the row.
        _mm512_set1_ps(unsafe { *self.sums.add(row * self.groups) })
    }

    /// Broadcasts the total of half a row.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn total(self, row: usize, half: usize) -> __m512i {
        // SAFETY: the caller guarantees that there is the row.
        _mm512_set1_epi32(unsafe { (*self.totals.add(row * self.groups))[half] })
    }
}

/// Multiplies up to [`TILE_ROWS`] rows, from `first` on, with panels in their stored layout. `ahead` prefetches the panels that
/// follow.
///
/// # Safety
/// AVX-512 with VNNI must be available, the panels must have this layout, and the input must have room for whole blocks of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(in super::super) unsafe fn multiply_tile(
    panels: [&[u8]; BLOCK_PANELS],
    layout: &Layout,
    input: &Quant<'_>,
    (first, count): (usize, usize),
    ahead: bool,
    results: &mut TileResults,
) {
    assert!(input.cols == layout.cols && count <= TILE_ROWS);
    // SAFETY: the caller guarantees this.
    unsafe { with_kind!(layout.kind, multiply_tile_as, (panels, layout, input, (first, count), ahead, results)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn multiply_tile_as<C: ReadCodes, S: ReadScales>(
    panels: [&[u8]; BLOCK_PANELS],
    layout: &Layout,
    input: &Quant<'_>,
    (first, count): (usize, usize),
    ahead: bool,
    results: &mut TileResults,
) {
    let panels = [Packed::<C, S>::new(panels[0], layout), Packed::new(panels[1], layout)];
    let (groups, stride, rows) = (layout.groups(), 2 * input.cols, count.next_multiple_of(ROWS));
    let ((codes, scales, sums), totals) = (input.from(first), input.totals_from(first));
    assert!(
        codes.len() >= rows * stride
            && [scales.len(), sums.len(), totals.len()].iter().all(|len| *len >= rows * groups)
    );
    results.iter_mut().for_each(|results| results[..rows].fill([0.0; PANEL]));
    let mut unpacked = [Group::ZERO; GROUPS];
    let each = groups_at_once(count, input.cols);
    for start in (0..groups).step_by(each) {
        let unpacked = &mut unpacked[..each.min(groups - start)];
        // SAFETY: the caller guarantees this; the panels and the rows have these groups.
        unsafe {
            for (group, unpacked) in (start..).zip(&mut *unpacked) {
                if ahead {
                    panels.iter().for_each(|panel| panel.prefetch(group));
                }
                unpacked.fill(panels, group);
            }
            for row in (0..count).step_by(ROWS) {
                for (group, unpacked) in (start..).zip(&*unpacked) {
                    let at = row * groups + group;
                    let block = Block {
                        codes: codes.as_ptr().add(row * stride + group * 2 * GROUP),
                        scales: scales.as_ptr().add(at),
                        sums: sums.as_ptr().add(at),
                        totals: totals.as_ptr().add(at),
                        stride,
                        groups,
                    };
                    add_block::<S>(unpacked, block, input.coarse, (row, count - row), results);
                }
            }
        }
    }
}

/// Adds the products of a group with a block of rows, of which some may not exist, to the results from a row on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_block<S: ReadScales>(
    group: &Group,
    block: Block,
    coarse: bool,
    (first, count): (usize, usize),
    results: &mut TileResults,
) {
    macro_rules! add {
        ($function:ident) => {
            match (count, coarse) {
                (1..=4, false) => $function::<4, false>(group, block, first, results),
                (1..=4, true) => $function::<4, true>(group, block, first, results),
                (_, false) => $function::<ROWS, false>(group, block, first, results),
                (_, true) => $function::<ROWS, true>(group, block, first, results),
            }
        };
    }
    // SAFETY: the caller guarantees this.
    unsafe { if S::HALVES { add!(add_halves) } else { add!(add_whole) } }
}

/// Adds the products of a group that has a scale and a minimum.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_whole<const N: usize, const COARSE: bool>(
    group: &Group,
    block: Block,
    first: usize,
    results: &mut TileResults,
) {
    // SAFETY: the caller guarantees this.
    let dots = unsafe { dots::<N, COARSE>(group, block, 0, STEPS) };
    for p in 0..BLOCK_PANELS {
        let (scale, min) = (group.scales(p, 0), group.scales(p, 1));
        let results = &mut results[p][first..first + N];
        for r in 0..N {
            // SAFETY: the caller guarantees this; a result has sixteen elements.
            unsafe {
                let (scale, at) = (_mm512_mul_ps(scale, block.scale(r)), results[r].as_mut_ptr());
                let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[p][r]), scale, _mm512_loadu_ps(at));
                _mm512_storeu_ps(at, _mm512_fmadd_ps(min, block.sum(r), sum));
            }
        }
    }
}

/// Adds the products of a group whose halves have factors: the products of each half, minus the offset of its codes, times the factor.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_halves<const N: usize, const COARSE: bool>(
    group: &Group,
    block: Block,
    first: usize,
    results: &mut TileResults,
) {
    let mut sums = [[_mm512_setzero_si512(); N]; BLOCK_PANELS];
    let offset = _mm512_set1_epi32(HALVES_OFFSET);
    for half in 0..2 {
        // SAFETY: the caller guarantees this.
        unsafe {
            let dots = dots::<N, COARSE>(group, block, half * STEPS / 2, STEPS / 2);
            let factors = [group.factors(0, half), group.factors(1, half)];
            for r in 0..N {
                let offset = _mm512_mullo_epi32(block.total(r, half), offset);
                for p in 0..BLOCK_PANELS {
                    let dot = _mm512_mullo_epi32(_mm512_sub_epi32(dots[p][r], offset), factors[p]);
                    sums[p][r] = _mm512_add_epi32(sums[p][r], dot);
                }
            }
        }
    }
    for p in 0..BLOCK_PANELS {
        let results = &mut results[p][first..first + N];
        for r in 0..N {
            // SAFETY: the caller guarantees this; a result has sixteen elements.
            unsafe {
                let (scale, at) = (_mm512_mul_ps(group.scales(p, 0), block.scale(r)), results[r].as_mut_ptr());
                _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[p][r]), scale, _mm512_loadu_ps(at)));
            }
        }
    }
}

/// Returns the exact products of some steps of a group: those with the rows' high parts, shifted, and those with their low parts. With
/// `COARSE`, only outlying steps have high parts.
#[inline(always)]
unsafe fn dots<const N: usize, const COARSE: bool>(group: &Group, block: Block, first: usize, count: usize) -> Dots<N> {
    // The compiler would unroll loops whose ends it knows, and then keep more in memory than in registers.
    let end = black_box(first + count);
    // SAFETY: the caller guarantees this; a group of a row has STEPS words of each part.
    unsafe {
        let mut sums = [[_mm512_setzero_si512(); N]; BLOCK_PANELS];
        if COARSE {
            let mut steps = outlying::<N>(block.codes, block.stride) & ((1 << end) - (1 << first));
            if steps != 0 {
                while steps != 0 {
                    let step = steps.trailing_zeros() as usize;
                    add_step(&mut sums, group, step, block, 4 * step);
                    steps &= steps - 1;
                }
                shift(&mut sums);
            }
        } else {
            for step in first..end {
                add_step(&mut sums, group, step, block, 4 * step);
            }
            shift(&mut sums);
        }
        for step in first..end {
            add_step(&mut sums, group, step, block, GROUP + 4 * step);
        }
        sums
    }
}

/// Shifts the products with high parts.
#[inline(always)]
unsafe fn shift<const N: usize>(sums: &mut Dots<N>) {
    for sums in sums {
        for sum in sums {
            // SAFETY: the caller guarantees the instruction set.
            *sum = unsafe { _mm512_slli_epi32::<LOW_BITS>(*sum) };
        }
    }
}

/// Adds the products of a step with the rows' inputs at a place.
#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline(always)]
unsafe fn add_step<const N: usize>(sums: &mut Dots<N>, group: &Group, step: usize, block: Block, at: usize) {
    // SAFETY: the caller guarantees this; a step fills a register.
    unsafe {
        let codes = |p: usize| _mm512_loadu_si512(group.at[p].add(step * LINE).cast());
        let codes = [codes(0), codes(1)];
        for r in 0..N {
            let inputs = block.inputs(r, at);
            for p in 0..BLOCK_PANELS {
                sums[p][r] = _mm512_dpbusd_epi32(sums[p][r], codes[p], inputs);
            }
        }
    }
}
