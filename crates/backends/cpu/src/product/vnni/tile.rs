//! Many rows: some groups of two panels are unpacked in the first-level cache and multiplied with one block of rows after the other.
//!
//! A block's exact products in a group and its results take three quarters of the registers. Results are in memory only while other
//! blocks are multiplied.

use std::hint::black_box;
use std::ops::Range;

use super::*;
use crate::memory::LINE;
use crate::product::outlying::Bits;
use crate::product::pairs::{PanelPair, Sums, load, row_blocks};
use crate::weights::Part;

/// Largest number of rows of a block, and of one whose groups have more in registers.
const ROWS: usize = 6;
const ROWS_OF_HALVES: usize = 4;

/// Number of rows of a tile, for which a group is unpacked once.
pub(in super::super) const TILE_ROWS: usize = 128;

/// Number of groups that are unpacked at once: those of two panels, and of a block of rows, take a third of the first-level cache.
const GROUPS: usize = 8;

/// Results of a tile of rows with two panels. A row more keeps them from being 4 KiB apart: a processor that compares the last
/// twelve bits of addresses would let a result of the second panel wait for one of the first to be stored.
pub(in super::super) type TileResults = Results<{ TILE_ROWS + 1 }>;

/// Memory of a tile. A thread keeps it, because few rows are multiplied in less time than it is set to zero.
pub(in super::super) struct Tile {
    pub(in super::super) unpacked: [Group; GROUPS],
    pub(in super::super) results: TileResults,
}

impl Default for Tile {
    fn default() -> Self {
        Self { unpacked: [Group::ZERO; GROUPS], results: [[[0.0; PANEL]; TILE_ROWS + 1]; BLOCK_PANELS] }
    }
}

/// Sums of the products of a group, or of half of it.
type Dots<const N: usize> = [[__m512i; N]; BLOCK_PANELS];

/// A group of two panels.
#[repr(align(64))]
pub(in super::super) struct Group {
    /// Codes as bytes, by panel and step.
    codes: [[[u8; LINE]; STEPS]; BLOCK_PANELS],
    /// Where they are, by panel: here, or in a panel that stores them so.
    at: [*const u8; BLOCK_PANELS],
    /// Scales and minima.
    scales: [[[f32; PANEL]; 2]; BLOCK_PANELS],
    /// Factors or scales of both halves.
    halves: [[[i32; PANEL]; 2]; BLOCK_PANELS],
}

impl Group {
    const ZERO: Self = Self {
        codes: [[[0; LINE]; STEPS]; BLOCK_PANELS],
        at: [std::ptr::null(); BLOCK_PANELS],
        scales: [[[0.0; PANEL]; 2]; BLOCK_PANELS],
        halves: [[[0; PANEL]; 2]; BLOCK_PANELS],
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
                if S::PAIRED {
                    for (to, scales) in self.halves[p].iter_mut().zip(panel.pair(group)) {
                        _mm512_store_ps(to.as_mut_ptr().cast(), scales);
                    }
                    continue;
                }
                let (scale, min) = panel.scales(group);
                _mm512_store_ps(self.scales[p][0].as_mut_ptr(), scale);
                _mm512_store_ps(self.scales[p][1].as_mut_ptr(), min);
                if S::HALVES {
                    for (to, factors) in self.halves[p].iter_mut().zip(panel.factors(group)) {
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
        unsafe { _mm512_load_si512(self.halves[panel][half].as_ptr().cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn scales_of_half(&self, panel: usize, half: usize) -> __m512 {
        _mm512_castsi512_ps(self.factors(panel, half))
    }
}

/// A group of a block of rows: pointers to the first row's.
#[derive(Clone, Copy)]
struct Block {
    codes: *const i8,
    scales: *const f32,
    sums: *const f32,
    totals: *const [i32; 2],
    steps: *const u8,
    /// Number of bytes from the codes of a row to those of the next.
    stride: usize,
    /// Number of groups of a row.
    groups: usize,
    /// Whether the group is the first one of the rows.
    is_first: bool,
    /// Whether codes of weights times 16 are bytes.
    narrow: bool,
}

impl Block {
    /// Returns the group that follows.
    #[inline]
    unsafe fn next(self) -> Self {
        // SAFETY: the caller guarantees that this group is not after the last one.
        unsafe {
            Self {
                codes: self.codes.add(2 * GROUP),
                scales: self.scales.add(1),
                sums: self.sums.add(1),
                totals: self.totals.add(1),
                steps: self.steps.add(1),
                ..self
            }
        }
    }

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

/// Multiplies up to [`TILE_ROWS`] rows, from `first` on, with a pair of a part's panels. `ahead` prefetches the panels that follow.
/// Results of a block are stored while they are in the first-level cache.
///
/// # Safety
/// AVX-512 with VNNI must be available, and the input must have room for whole blocks of rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(in super::super) unsafe fn multiply_tile(
    part: &Part,
    pair: &PanelPair<'_>,
    input: &Quant<'_>,
    (first, count): (usize, usize),
    ahead: bool,
    tile: &mut Tile,
) {
    assert!(input.cols == part.layout.cols && count <= TILE_ROWS);
    // SAFETY: the caller guarantees this; the panels of a part have its layout.
    unsafe { with_kind!(part.layout.kind, multiply_tile_as, (part, pair, input, (first, count), ahead, tile)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn multiply_tile_as<C: ReadCodes, S: ReadScales>(
    part: &Part,
    pair: &PanelPair<'_>,
    input: &Quant<'_>,
    (first, count): (usize, usize),
    ahead: bool,
    Tile { unpacked, results }: &mut Tile,
) {
    let (panels, layout) = (pair.weights(|panel| part.panel(panel)), &part.layout);
    let panels = [Packed::<C, S>::new(panels[0], layout), Packed::new(panels[1], layout)];
    let (groups, stride, rows) = (layout.groups(), 2 * input.cols, count.next_multiple_of(2));
    let ((codes, scales, sums), totals) = (input.from(first), input.totals_from(first));
    let steps = input.steps_from(first);
    assert!(
        codes.len() >= rows * stride
            && [scales.len(), sums.len(), totals.len(), steps.len()].iter().all(|len| *len >= rows * groups)
    );
    let most = if S::HALVES || S::PAIRED { ROWS_OF_HALVES } else { ROWS };
    // What follows is prefetched between blocks, because memory would be busy for longer than all at once takes.
    let ahead_of_block = GROUPS.div_ceil(count.div_ceil(ROWS));
    for start in (0..groups).step_by(GROUPS) {
        let end = (start + GROUPS).min(groups);
        let unpacked = &mut unpacked[..end - start];
        let mut following = if ahead { start..end } else { end..end };
        // SAFETY: the caller guarantees this; the panels and the rows have these groups.
        unsafe {
            for (row, rows) in row_blocks(count, most) {
                for group in following.by_ref().take(ahead_of_block) {
                    panels.iter().for_each(|panel| panel.prefetch(group));
                }
                let at = row * groups + start;
                let block = Block {
                    codes: codes.as_ptr().add(row * stride + start * 2 * GROUP),
                    scales: scales.as_ptr().add(at),
                    sums: sums.as_ptr().add(at),
                    totals: totals.as_ptr().add(at),
                    steps: steps.as_ptr().add(at),
                    stride,
                    groups,
                    is_first: start == 0,
                    narrow: C::NARROW,
                };
                let some = row..(row + rows).min(count);
                if end == groups {
                    pair.prefetch(first + some.start..first + some.end);
                }
                if row == 0 {
                    let packed = PackedGroups { panels, start };
                    packed.add_first(unpacked, block, input.coarse, rows, results);
                } else {
                    add_block::<S>(unpacked, block, input.coarse, (row, rows), results);
                }
                if end == groups {
                    pair.store(first + row, some, results);
                }
            }
        }
    }
}

/// Groups of two panels, from one on, that are unpacked together.
struct PackedGroups<'a, C, S> {
    panels: [Packed<'a, C, S>; BLOCK_PANELS],
    start: usize,
}

impl<C: ReadCodes, S: ReadScales> PackedGroups<'_, C, S> {
    /// Unpacks the groups, and adds their products with the first block of rows to the results.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn add_first(
        &self,
        groups: &mut [Group],
        block: Block,
        coarse: bool,
        count: usize,
        results: &mut TileResults,
    ) {
        // SAFETY: the caller guarantees this.
        unsafe {
            match (count, coarse) {
                (2..=4, false) => self.unpack_beside::<4, false>(groups, block, results),
                (2..=4, true) => self.unpack_beside::<4, true>(groups, block, results),
                (_, false) => self.unpack_beside::<ROWS, false>(groups, block, results),
                (_, true) => self.unpack_beside::<ROWS, true>(groups, block, results),
            }
        }
    }

    /// Unpacks each group before its products with `N` rows, while those of the group before it are computed.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn unpack_beside<const N: usize, const COARSE: bool>(
        &self,
        groups: &mut [Group],
        mut block: Block,
        results: &mut TileResults,
    ) {
        // SAFETY: the instruction set is available.
        let mut sums =
            unsafe { if block.is_first { [[_mm512_setzero_ps(); N]; BLOCK_PANELS] } else { load(results, 0) } };
        for (index, group) in (self.start..).zip(groups) {
            // SAFETY: the caller guarantees this.
            unsafe {
                group.fill(self.panels, index);
                add_group::<S, N, COARSE>(group, block, &mut sums);
                block = block.next();
            }
        }
        // SAFETY: the instruction set is available.
        unsafe { store(sums, 0, results) };
    }
}

/// Adds the products of some groups with a block of rows to the results from a row on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_block<S: ReadScales>(
    groups: &[Group],
    block: Block,
    coarse: bool,
    (first, count): (usize, usize),
    results: &mut TileResults,
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        match (count, coarse) {
            (2, false) => add_groups::<S, 2, false>(groups, block, first, results),
            (2, true) => add_groups::<S, 2, true>(groups, block, first, results),
            (4, false) => add_groups::<S, 4, false>(groups, block, first, results),
            (4, true) => add_groups::<S, 4, true>(groups, block, first, results),
            (_, false) => add_groups::<S, ROWS, false>(groups, block, first, results),
            (_, true) => add_groups::<S, ROWS, true>(groups, block, first, results),
        }
    }
}

/// Adds the products of some groups with `N` rows.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn add_groups<S: ReadScales, const N: usize, const COARSE: bool>(
    groups: &[Group],
    mut block: Block,
    first: usize,
    results: &mut TileResults,
) {
    // SAFETY: the instruction set is available.
    let mut sums =
        unsafe { if block.is_first { [[_mm512_setzero_ps(); N]; BLOCK_PANELS] } else { load(results, first) } };
    for group in groups {
        // SAFETY: the caller guarantees this.
        unsafe {
            add_group::<S, N, COARSE>(group, block, &mut sums);
            block = block.next();
        }
    }
    // SAFETY: the instruction set is available.
    unsafe { store(sums, first, results) };
}

/// Adds the products of a group.
#[inline(always)]
unsafe fn add_group<S: ReadScales, const N: usize, const COARSE: bool>(
    group: &Group,
    block: Block,
    sums: &mut Sums<N>,
) {
    // SAFETY: the caller guarantees this.
    unsafe {
        if S::PAIRED {
            add_pairs::<N, COARSE>(group, block, sums);
        } else if S::HALVES {
            add_halves::<N, COARSE>(group, block, sums);
        } else {
            add_whole::<N, COARSE>(group, block, sums);
        }
    }
}

/// Adds the products of a group that has a scale and a minimum.
#[inline(always)]
unsafe fn add_whole<const N: usize, const COARSE: bool>(group: &Group, block: Block, sums: &mut Sums<N>) {
    // SAFETY: the caller guarantees this.
    unsafe {
        let zeros = [_mm512_setzero_si512(); N];
        let dots = dots::<N, COARSE>(group, block, 0..STEPS, zeros);
        for p in 0..BLOCK_PANELS {
            let (scale, min) = (group.scales(p, 0), group.scales(p, 1));
            for r in 0..N {
                let scale = _mm512_mul_ps(scale, block.scale(r));
                let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[p][r]), scale, sums[p][r]);
                sums[p][r] = _mm512_fmadd_ps(min, block.sum(r), sum);
            }
        }
    }
}

/// Adds the products of a group whose halves have factors: the products of each half, minus the offset of its codes, times the factor.
#[inline(always)]
unsafe fn add_halves<const N: usize, const COARSE: bool>(group: &Group, block: Block, sums: &mut Sums<N>) {
    // SAFETY: the caller guarantees this.
    unsafe {
        let mut both = [[_mm512_setzero_si512(); N]; BLOCK_PANELS];
        for half in 0..2 {
            let dots = dots_of_half::<N, COARSE>(group, block, half, HALVES_OFFSET);
            for p in 0..BLOCK_PANELS {
                let factor = group.factors(p, half);
                for r in 0..N {
                    both[p][r] = _mm512_add_epi32(both[p][r], _mm512_mullo_epi32(dots[p][r], factor));
                }
            }
        }
        for p in 0..BLOCK_PANELS {
            for r in 0..N {
                let scale = _mm512_mul_ps(group.scales(p, 0), block.scale(r));
                sums[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both[p][r]), scale, sums[p][r]);
            }
        }
    }
}

/// Adds the products of a group whose halves have scales: the products of each half, minus the offset of its codes, times the scale.
#[inline(always)]
unsafe fn add_pairs<const N: usize, const COARSE: bool>(group: &Group, block: Block, sums: &mut Sums<N>) {
    // SAFETY: the caller guarantees this.
    unsafe {
        let mut both = [[_mm512_setzero_ps(); N]; BLOCK_PANELS];
        for half in 0..2 {
            let dots = dots_of_half::<N, COARSE>(group, block, half, E2M1_OFFSET.into());
            for p in 0..BLOCK_PANELS {
                let scales = group.scales_of_half(p, half);
                for r in 0..N {
                    both[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[p][r]), scales, both[p][r]);
                }
            }
        }
        for p in 0..BLOCK_PANELS {
            for r in 0..N {
                sums[p][r] = _mm512_fmadd_ps(both[p][r], block.scale(r), sums[p][r]);
            }
        }
    }
}

/// Returns the exact products of half a group, minus those of the rows with an offset.
#[inline(always)]
unsafe fn dots_of_half<const N: usize, const COARSE: bool>(
    group: &Group,
    block: Block,
    half: usize,
    offset: i32,
) -> Dots<N> {
    // SAFETY: the caller guarantees this.
    unsafe {
        let mut plus = [_mm512_setzero_si512(); N];
        for (r, plus) in plus.iter_mut().enumerate() {
            *plus = _mm512_mullo_epi32(block.total(r, half), _mm512_set1_epi32(-offset));
        }
        dots::<N, COARSE>(group, block, half * STEPS / 2..(half + 1) * STEPS / 2, plus)
    }
}

/// Returns the exact products of some steps of a group plus a number for each row: those with the rows' high parts, shifted, and those
/// with their low parts. With `COARSE`, only outlying steps have high parts.
#[inline(always)]
unsafe fn dots<const N: usize, const COARSE: bool>(
    group: &Group,
    block: Block,
    steps: Range<usize>,
    plus: [__m512i; N],
) -> Dots<N> {
    // The compiler would unroll loops whose ends it knows, and then keep more in memory than in registers.
    let (first, end) = (steps.start, black_box(steps.end));
    // SAFETY: the caller guarantees this; a group of a row has STEPS words of each part.
    unsafe {
        let mut sums = [plus; BLOCK_PANELS];
        if COARSE {
            let steps = Bits::of(outlying::<N>(block.steps, block.groups), first..end);
            if block.narrow {
                for step in steps {
                    add_step::<N, { LOW_BITS }>(&mut sums, group, step, block, 4 * step);
                }
            } else if !steps.is_empty() {
                sums = [[_mm512_setzero_si512(); N]; BLOCK_PANELS];
                for step in steps {
                    add_step::<N, 0>(&mut sums, group, step, block, 4 * step);
                }
                shift(&mut sums, plus);
            }
        } else {
            sums = [[_mm512_setzero_si512(); N]; BLOCK_PANELS];
            for step in first..end {
                add_step::<N, 0>(&mut sums, group, step, block, 4 * step);
            }
            shift(&mut sums, plus);
        }
        for step in first..end {
            add_step::<N, 0>(&mut sums, group, step, block, GROUP + 4 * step);
        }
        sums
    }
}

/// Shifts the products with high parts, and adds a number for each row.
#[inline(always)]
unsafe fn shift<const N: usize>(sums: &mut Dots<N>, plus: [__m512i; N]) {
    for sums in sums {
        for (sum, plus) in sums.iter_mut().zip(plus) {
            // SAFETY: the caller guarantees the instruction set.
            *sum = unsafe { _mm512_add_epi32(_mm512_slli_epi32::<LOW_BITS>(*sum), plus) };
        }
    }
}

/// Adds the products of a step, whose codes are shifted, with the rows' inputs at a place.
#[expect(clippy::needless_range_loop, reason = "by index, what is in arrays ends in registers")]
#[inline(always)]
unsafe fn add_step<const N: usize, const SHIFT: u32>(
    sums: &mut Dots<N>,
    group: &Group,
    step: usize,
    block: Block,
    at: usize,
) {
    // SAFETY: the caller guarantees this; a step fills a register.
    unsafe {
        let codes = |p: usize| _mm512_slli_epi16::<SHIFT>(_mm512_loadu_si512(group.at[p].add(step * LINE).cast()));
        let codes = [codes(0), codes(1)];
        for r in 0..N {
            let inputs = block.inputs(r, at);
            for p in 0..BLOCK_PANELS {
                sums[p][r] = _mm512_dpbusd_epi32(sums[p][r], codes[p], inputs);
            }
        }
    }
}
