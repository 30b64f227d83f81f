//! An adapter in the layout that the kernels read.

use std::ops::Range;

use octavo_ops::{AdapterSource, BackendError, LoraMatrices, Program, SiteId, SiteKind, check_adapter};

use super::ROWS;
#[cfg(target_arch = "x86_64")]
use super::wide;
use crate::memory::Lines;
use crate::rows::LANES;
use crate::{Isa, NAME};

/// The numbers of an adapter, in rows of sixteen. All are in one allocation, in the order in which a step reads them, so that the
/// system can keep them in huge pages.
///
/// Adapters whose numbers all fit bf16, as most are stored, take half of the memory.
enum Numbers {
    F32(Lines<f32>),
    Bf16(Lines<u16>),
}

impl Numbers {
    /// Allocates memory for some rows.
    fn zeroed(rows: usize, is_bf16: bool) -> Result<Self, BackendError> {
        let (len, what) = (rows * LANES, || "an adapter".into());
        if is_bf16 { Lines::zeroed(len, what).map(Self::Bf16) } else { Lines::zeroed(len, what).map(Self::F32) }
    }

    fn put(&mut self, at: usize, number: f32) {
        match self {
            Self::F32(lines) => lines[at] = number,
            Self::Bf16(lines) => lines[at] = (number.to_bits() >> 16) as u16,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::F32(lines) => size_of_val(&lines[..]) as u64,
            Self::Bf16(lines) => size_of_val(&lines[..]) as u64,
        }
    }
}

/// Panels of sixteen columns of a matrix, one after the other: the rows of a panel are adjacent.
#[derive(Clone, Copy)]
pub(crate) struct Panels {
    /// First row among those of the adapter's numbers.
    first: usize,
}

/// Gives places to the panels of an adapter, first to measure them and then to fill them.
struct Packer<'n> {
    /// Number of rows of all panels so far.
    rows: usize,
    /// Whether all numbers so far fit bf16.
    is_bf16: bool,
    /// The numbers that are filled, once they are measured.
    numbers: Option<&'n mut Numbers>,
}

impl Packer<'_> {
    /// Packs `rows · cols` numbers. `at` returns that of a row and a column.
    fn put(&mut self, rows: usize, cols: usize, at: impl Fn(usize, usize) -> f32) -> Panels {
        let first = self.rows;
        self.rows += rows * cols.div_ceil(LANES);
        let mut places = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
        match &mut self.numbers {
            Some(numbers) => places.for_each(|(row, col)| {
                numbers.put((first + col / LANES * rows + row) * LANES + col % LANES, at(row, col));
            }),
            None => self.is_bf16 &= places.all(|(row, col)| at(row, col).to_bits() & 0xffff == 0),
        }
        Panels { first }
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
    numbers: Numbers,
}

impl Adapter {
    /// Packs the matrices of an adapter.
    ///
    /// # Errors
    /// Returns an error if a rank is above `limit`, if a matrix does not fit the program, or if memory runs out.
    pub(crate) fn new(program: &Program, source: &dyn AdapterSource, limit: usize) -> Result<Self, BackendError> {
        check_adapter(NAME, program, source, limit)?;
        let sites = |packer: &mut Packer<'_>| -> Vec<_> {
            (0..program.sites.len()).map(|site| AdaptedSite::new(program, SiteId(site), source, packer)).collect()
        };
        let mut measured = Packer { rows: 0, is_bf16: true, numbers: None };
        sites(&mut measured);
        let mut numbers = Numbers::zeroed(measured.rows, measured.is_bf16)?;
        let sites = sites(&mut Packer { rows: 0, numbers: Some(&mut numbers), ..measured });
        Ok(Self { sites, numbers })
    }

    /// Multiplies the first `count` rows with some rows of a panel: those that begin `from` rows after the first panel's. The sums
    /// of the other rows are not used.
    pub(crate) fn multiply(
        &self,
        isa: Isa,
        (x, count): (&[&[f32]; ROWS], usize),
        (panels, from): (Panels, usize),
        sums: &mut [[f32; LANES]; ROWS],
    ) {
        let rows = panels.first + from..panels.first + from + x[0].len();
        #[cfg(target_arch = "x86_64")]
        if isa.has_wide_registers() {
            // SAFETY: the instruction set is available.
            return unsafe {
                match &self.numbers {
                    Numbers::F32(lines) => wide::multiply(x, count, &lines.as_chunks().0[rows], sums),
                    Numbers::Bf16(lines) => wide::multiply(x, count, &lines.as_chunks().0[rows], sums),
                }
            };
        }
        // The common definition multiplies all rows.
        let _ = count;
        match &self.numbers {
            Numbers::F32(lines) => isa.multiply_f32(x, &lines.as_chunks().0[rows], sums),
            Numbers::Bf16(lines) => isa.multiply_bf16(x, &lines.as_chunks().0[rows], sums),
        }
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
        let parts =
            self.sites.iter().flat_map(|site| &site.experts).flat_map(|matrices| matrices.parts.iter().flatten());
        self.numbers.bytes() + parts.map(|part| size_of_val(&part.table[..]) as u64).sum::<u64>()
    }
}

impl AdaptedSite {
    fn new(program: &Program, site: SiteId, source: &dyn AdapterSource, packer: &mut Packer<'_>) -> Self {
        let (sizes, each) = (program.site_parts(site), program.parts_each(site).max(1));
        let is_table = program.sites[site.0].kind == SiteKind::Embedding;
        let experts = (0..sizes.len() / each).map(|expert| {
            let parts = expert * each..(expert + 1) * each;
            Matrices::new(&sizes, parts, is_table, |part| source.matrices(site, part), packer)
        });
        let experts: Vec<_> = experts.collect();
        let panels = experts.iter().map(|matrices| matrices.panels).max().unwrap_or(0);
        Self { experts, panels }
    }
}

impl Matrices {
    /// Packs the matrices for some parts of a weight of these sizes.
    fn new<'s>(
        sizes: &[[usize; 2]],
        parts: Range<usize>,
        is_table: bool,
        of: impl Fn(usize) -> Option<LoraMatrices<'s>>,
        packer: &mut Packer<'_>,
    ) -> Self {
        let sizes = &sizes[parts.clone()];
        let found: Vec<_> = parts.map(of).collect();
        if found.iter().all(Option::is_none) {
            return Self::default();
        }
        let mut columns = Vec::new();
        for (&[_, cols], found) in sizes.iter().zip(&found) {
            if let Some(LoraMatrices { a, .. }) = found.filter(|_| !is_table) {
                columns.extend(a.chunks(cols).map(Some));
                columns.resize(columns.len().next_multiple_of(LANES), None);
            }
        }
        let inputs = sizes.first().map_or(0, |[_, cols]| *cols);
        let at = |row: usize, col: usize| columns[col].map_or(0.0, |column: &[f32]| column[row]);
        let a = (!is_table).then(|| packer.put(inputs, columns.len(), at));
        let mut from = 0;
        let part = |(&[rows, _], found): (&[usize; 2], &Option<LoraMatrices<'s>>)| {
            let LoraMatrices { rank, scaling, a, b } = (*found)?;
            let b = packer.put(rank, rows, |row, col| b[col * rank + row]);
            let part = Part { from, rank, scaling, b, table: if is_table { a.to_vec() } else { Vec::new() } };
            from += rank.next_multiple_of(LANES);
            Some(part)
        };
        let parts = sizes.iter().zip(&found).map(part).collect();
        Self { a, panels: columns.len() / LANES, parts }
    }
}
