//! Adapters: what sequences add to the products of a step, row by row.

use std::collections::HashMap;
use std::ops::Range;

use candle_core::{Device, Result, Tensor};
use octavo_ops::{AdapterSource, BackendError, LoraMatrices, Program, SiteId, check_adapter};

use crate::NAME;

/// The matrices of a part of a site's weight.
struct Matrices {
    rank: usize,
    scaling: f32,
    a: Vec<f32>,
    b: Vec<f32>,
}

/// An adapter in a slot.
#[derive(Default)]
pub(crate) struct Adapter {
    matrices: HashMap<(SiteId, usize), Matrices>,
}

/// The input of a product: rows of K elements, or the index of the only one that is 1.
pub(crate) enum Input<'a> {
    Rows(Vec<Vec<f32>>),
    Tokens(&'a [u32]),
}

impl Adapter {
    /// Copies an adapter.
    pub(crate) fn new(
        program: &Program,
        source: &dyn AdapterSource,
        limit: usize,
    ) -> std::result::Result<Self, BackendError> {
        check_adapter(NAME, program, source, limit)?;
        let mut matrices = HashMap::new();
        for site in (0..program.sites.len()).map(SiteId) {
            for part in 0..program.site_parts(site).len() {
                let Some(LoraMatrices { rank, scaling, a, b }) = source.matrices(site, part) else { continue };
                matrices.insert((site, part), Matrices { rank, scaling, a: a.to_vec(), b: b.to_vec() });
            }
        }
        Ok(Self { matrices })
    }
}

/// The outputs of a product, to which adapters add.
pub(crate) struct Outputs<'a> {
    pub(crate) site: SiteId,
    /// Outputs of each part of its weight.
    pub(crate) columns: &'a [Range<usize>],
    /// Number of parts of an expert, or of all parts.
    pub(crate) each: usize,
    pub(crate) scale: f32,
    pub(crate) rows: Vec<Vec<f32>>,
}

/// A row of the outputs of a product.
#[derive(Clone, Copy)]
pub(crate) struct OutputRow {
    pub(crate) row: usize,
    /// Row of the input.
    pub(crate) source: usize,
    /// Expert; 0 if there are none.
    pub(crate) expert: usize,
}

impl Outputs<'_> {
    /// Adds what an adapter has for a row.
    pub(crate) fn add(&mut self, adapter: &Adapter, input: &Input<'_>, of: OutputRow) {
        for (part, columns) in self.columns.iter().enumerate().skip(of.expert * self.each).take(self.each) {
            let Some(Matrices { rank, scaling, a, b }) = adapter.matrices.get(&(self.site, part)) else { continue };
            let shrunk: Vec<f32> = match input {
                Input::Rows(rows) => {
                    let row = &rows[of.source];
                    a.chunks(row.len()).map(|a| scaling * dot(row, a)).collect()
                }
                Input::Tokens(ids) => {
                    a[ids[of.source] as usize * rank..][..*rank].iter().map(|a| scaling * a).collect()
                }
            };
            for (out, b) in self.rows[of.row][columns.clone()].iter_mut().zip(b.chunks(*rank)) {
                *out += self.scale * dot(&shrunk, b);
            }
        }
    }

    /// Returns the outputs as a tensor.
    pub(crate) fn tensor(self) -> Result<Tensor> {
        Tensor::new(self.rows, &Device::Cpu)
    }
}

fn dot(x: &[f32], y: &[f32]) -> f32 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
