//! Arrays of a kernel's element type.

use std::ops::Range;

use octavo_kernels::manifest::Dtype;
use octavo_ops::testing::TestRng;

use crate::common::{decode, encode};
use crate::launcher::{address, address_mut};

/// Elements of one type at a 16-byte aligned address, with nothing allocated directly behind them.
#[derive(Clone, PartialEq)]
pub(crate) struct Array {
    pub(crate) dtype: Dtype,
    bytes: Vec<u8>,
}

impl Array {
    /// Returns an array of NaN, in every element type.
    pub(crate) fn poisoned(dtype: Dtype, len: usize) -> Self {
        Self { dtype, bytes: vec![0xff; len * dtype.bytes()] }
    }

    pub(crate) fn new(dtype: Dtype, values: &[f64]) -> Self {
        let mut this = Self::poisoned(dtype, values.len());
        values.iter().enumerate().for_each(|(i, &x)| this.set(i, x));
        this
    }

    /// Returns approximately normal numbers of variance 1.
    pub(crate) fn random(dtype: Dtype, len: usize, rng: &mut TestRng) -> Self {
        Self::new(dtype, &(0..len).map(|_| normal(rng)).collect::<Vec<_>>())
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / self.dtype.bytes()
    }

    pub(crate) fn get(&self, i: usize) -> f64 {
        decode(self.dtype, self.bits(i..i + 1))
    }

    /// Rounds to the element type.
    pub(crate) fn set(&mut self, i: usize, value: f64) {
        let at = i * self.dtype.bytes();
        self.bytes[at..at + self.dtype.bytes()].copy_from_slice(&encode(self.dtype, value as f32));
    }

    pub(crate) fn values(&self) -> Vec<f64> {
        self.range(0..self.len())
    }

    pub(crate) fn range(&self, range: Range<usize>) -> Vec<f64> {
        range.map(|i| self.get(i)).collect()
    }

    /// Returns the bytes of the elements in memory.
    pub(crate) fn bits(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[range.start * self.dtype.bytes()..range.end * self.dtype.bytes()]
    }

    pub(crate) fn copy_from(&mut self, at: usize, other: &Self, range: Range<usize>) {
        let size = self.dtype.bytes();
        let bits = other.bits(range);
        self.bytes[at * size..at * size + bits.len()].copy_from_slice(bits);
    }

    /// Returns the address for a kernel that reads.
    pub(crate) fn ptr(&self) -> u64 {
        address(&self.bytes)
    }

    /// Returns the address for a kernel that writes.
    pub(crate) fn ptr_mut(&mut self) -> u64 {
        address_mut(&mut self.bytes)
    }
}

/// Returns a sum of uniform numbers, which is approximately normal with variance 1.
pub(crate) fn normal(rng: &mut TestRng) -> f64 {
    (0..3).map(|_| f64::from(rng.signed())).sum()
}

/// Returns uniform numbers in [-scale, scale).
pub(crate) fn uniform(dtype: Dtype, len: usize, scale: f32, rng: &mut TestRng) -> Array {
    Array::new(dtype, &(0..len).map(|_| f64::from(rng.signed() * scale)).collect::<Vec<_>>())
}

/// Returns one of the choices.
pub(crate) fn pick<T: Copy>(rng: &mut TestRng, choices: &[T]) -> T {
    choices[rng.below(choices.len())]
}

/// Maximum error of a kind of kernel, relative to the norm of the correct result.
pub(crate) enum Tolerance {
    /// Elementwise kernels, norms, rotary embedding.
    Elementwise,
    /// Matrix products with f32 accumulation.
    Product,
    Attention,
}

impl Tolerance {
    pub(crate) fn bound(self, dtype: Dtype) -> f64 {
        match (self, dtype) {
            (Self::Elementwise, Dtype::F32) => 1e-6,
            (Self::Elementwise | Self::Product, Dtype::F16) => 6e-4,
            (Self::Elementwise | Self::Product, Dtype::Bf16) => 4e-3,
            (Self::Product | Self::Attention, Dtype::F32) => 1e-5,
            (Self::Attention, Dtype::F16) => 1e-3,
            (Self::Attention, Dtype::Bf16) => 5e-3,
        }
    }
}
