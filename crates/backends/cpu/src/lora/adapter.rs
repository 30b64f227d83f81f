//! An adapter in the layout that the kernels read.

use std::ops::Range;

use octavo_ops::{AdapterSource, BackendError, LoraMatrices, Program, SiteId, SiteKind, check_adapter};

use super::ROWS;
#[cfg(target_arch = "x86_64")]
use super::wide;
use crate::memory::Lines;
use crate::rows::LANES;
use crate::{Isa, NAME};

/// Panels of sixteen columns, one after the other: the rows of a panel are adjacent.
///
/// Adapters whose numbers all fit bf16, as most are stored, take half of the memory.
pub(crate) enum Panels {
    F32(Lines<f32>),
    Bf16(Lines<u16>),
}

impl Panels {
    /// Packs `rows · cols` numbers. `at` returns that of a row and a column.
    fn new(rows: usize, cols: usize, at: impl Fn(usize, usize) -> f32) -> Result<Self, BackendError> {
        let len = rows * cols.next_multiple_of(LANES);
        let place = |row: usize, col: usize| (col / LANES * rows + row) * LANES + col % LANES;
        let places = || (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
        let what = || "an adapter".into();
        if places().all(|(row, col)| at(row, col).to_bits() & 0xffff == 0) {
            let mut lines = Lines::zeroed(len, what)?;
            places().for_each(|(row, col)| lines[place(row, col)] = (at(row, col).to_bits() >> 16) as u16);
            return Ok(Self::Bf16(lines));
        }
        let mut lines = Lines::zeroed(len, what)?;
        places().for_each(|(row, col)| lines[place(row, col)] = at(row, col));
        Ok(Self::F32(lines))
    }

    /// Multiplies the first `count` rows with some rows of a panel: those that begin `from` rows after the first panel's. The sums
    /// of the other rows are not used.
    pub(crate) fn multiply(
        &self,
        isa: Isa,
        (x, count): ([&[f32]; ROWS], usize),
        from: usize,
        sums: &mut [[f32; LANES]; ROWS],
    ) {
        let len = x[0].len();
        match self {
            Self::F32(lines) => {
                let panel = &lines.as_chunks().0[from..][..len];
                #[cfg(target_arch = "x86_64")]
                if isa.has_wide_registers() {
                    // SAFETY: the instruction set is available.
                    return unsafe { wide::multiply(x, count, panel, sums) };
                }
                isa.multiply_f32(x, panel, sums);
            }
            Self::Bf16(lines) => {
                let panel = &lines.as_chunks().0[from..][..len];
                #[cfg(target_arch = "x86_64")]
                if isa.has_wide_registers() {
                    // SAFETY: the instruction set is available.
                    return unsafe { wide::multiply(x, count, panel, sums) };
                }
                isa.multiply_bf16(x, panel, sums);
            }
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::F32(lines) => size_of_val(&lines[..]) as u64,
            Self::Bf16(lines) => size_of_val(&lines[..]) as u64,
        }
    }
}

/// The matrices of a part of a site's weight.
pub(crate) struct Part {
    /// First column of the part's `A x` among those of the site.
    pub(crate) from: usize,
    pub(crate) rank: usize,
    /// Factor of `A x`.
    pub(crate) scaling: f32,
    /// `Bᵀ [r,N]`.
    pub(crate) b: Panels,
    /// For a table of embeddings, `Aᵀ [K,r]`.
    pub(crate) table: Vec<f32>,
}

/// The matrices of a site, or of one of its experts.
#[derive(Default)]
pub(crate) struct Matrices {
    /// `Aᵀ [K,.]`: the columns of all parts, each padded to whole panels.
    pub(crate) a: Option<Panels>,
    /// Number of panels of `a`.
    pub(crate) panels: usize,
    /// By part of the weight, or of the expert's.
    pub(crate) parts: Vec<Option<Part>>,
}

/// The matrices of a site by expert; one if there are none.
struct AdaptedSite {
    experts: Vec<Matrices>,
    /// Largest number of panels of A of an expert.
    panels: usize,
}

/// An adapter in a slot.
pub(crate) struct Adapter {
    /// By site.
    sites: Vec<AdaptedSite>,
}

impl Adapter {
    /// Packs the matrices of an adapter.
    ///
    /// # Errors
    /// Returns an error if a rank is above `limit`, if a matrix does not fit the program, or if memory runs out.
    pub(crate) fn new(program: &Program, source: &dyn AdapterSource, limit: usize) -> Result<Self, BackendError> {
        check_adapter(NAME, program, source, limit)?;
        let sites = (0..program.sites.len()).map(|site| AdaptedSite::new(program, SiteId(site), source));
        Ok(Self { sites: sites.collect::<Result<_, _>>()? })
    }

    /// Returns the matrices for an expert of a site; the expert is 0 if there are none.
    pub(crate) fn matrices(&self, site: SiteId, expert: usize) -> &Matrices {
        &self.sites[site.0].experts[expert]
    }

    /// Returns the largest number of panels of A at a site.
    pub(crate) fn panels(&self, site: SiteId) -> usize {
        self.sites[site.0].panels
    }

    /// Returns the size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let part = |part: &Part| part.b.bytes() + size_of_val(&part.table[..]) as u64;
        let matrices =
            |of: &Matrices| of.a.as_ref().map_or(0, Panels::bytes) + of.parts.iter().flatten().map(part).sum::<u64>();
        self.sites.iter().flat_map(|site| &site.experts).map(matrices).sum()
    }
}

impl AdaptedSite {
    fn new(program: &Program, site: SiteId, source: &dyn AdapterSource) -> Result<Self, BackendError> {
        let (sizes, each) = (program.site_parts(site), program.parts_each(site).max(1));
        let is_table = program.sites[site.0].kind == SiteKind::Embedding;
        let experts = (0..sizes.len() / each).map(|expert| {
            let parts = expert * each..(expert + 1) * each;
            Matrices::new(&sizes, parts, is_table, |part| source.matrices(site, part))
        });
        let experts: Vec<_> = experts.collect::<Result<_, _>>()?;
        let panels = experts.iter().map(|matrices| matrices.panels).max().unwrap_or(0);
        Ok(Self { experts, panels })
    }
}

impl Matrices {
    /// Packs the matrices for some parts of a weight of these sizes.
    fn new<'s>(
        sizes: &[[usize; 2]],
        parts: Range<usize>,
        is_table: bool,
        of: impl Fn(usize) -> Option<LoraMatrices<'s>>,
    ) -> Result<Self, BackendError> {
        let sizes = &sizes[parts.clone()];
        let found: Vec<_> = parts.map(of).collect();
        if found.iter().all(Option::is_none) {
            return Ok(Self::default());
        }
        let (mut columns, mut parts) = (Vec::new(), Vec::new());
        for (&[rows, cols], found) in sizes.iter().zip(&found) {
            let Some(LoraMatrices { rank, scaling, a, b }) = *found else {
                parts.push(None);
                continue;
            };
            let from = columns.len();
            if !is_table {
                columns.extend(a.chunks(cols).map(Some));
                columns.resize(columns.len().next_multiple_of(LANES), None);
            }
            let table = if is_table { a.to_vec() } else { Vec::new() };
            let b = Panels::new(rank, rows, |row, col| b[col * rank + row])?;
            parts.push(Some(Part { from, rank, scaling, b, table }));
        }
        let inputs = sizes.first().map_or(0, |[_, cols]| *cols);
        let at = |row: usize, col: usize| columns[col].map_or(0.0, |column: &[f32]| column[row]);
        let a = if is_table { None } else { Some(Panels::new(inputs, columns.len(), at)?) };
        Ok(Self { a, panels: columns.len() / LANES, parts })
    }
}
