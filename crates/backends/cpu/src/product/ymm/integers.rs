//! Panels of integers.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::read::{ReadCodes, Stored};
use super::scaling::{Scaled, Scaling};
use super::tile::{Group, Multiplied, Panel, Place};
use crate::weights::{Layout, PANEL};

/// Exact products of a group's codes with those of a few rows.
pub(super) trait Dots {
    /// Returns the products of some halves of the inputs with the first rows.
    ///
    /// # Safety
    /// The instruction set must be available, and there must be so many rows.
    unsafe fn dots<const N: usize>(&self, rows: Group, halves: Range<usize>) -> [[__m256i; N]; 2];
}

/// A way to multiply codes.
pub(super) trait Way {
    /// Memory of an unpacked group.
    type Unpacked;

    const EMPTY: Self::Unpacked;

    /// Returns codes that are unpacked while they are multiplied.
    fn stored<C: ReadCodes>(codes: Stored<'_, C>) -> impl Dots;

    /// Unpacks codes.
    ///
    /// # Safety
    /// The instruction set must be available.
    unsafe fn unpack<C: ReadCodes>(codes: Stored<'_, C>, unpacked: &mut Self::Unpacked) -> impl Dots;
}

/// Panels of integers in their stored layout.
pub(super) struct Integers<'a, C, W> {
    place: Place<'a>,
    kind: PhantomData<(C, W)>,
}

impl<'a, C: ReadCodes, W> Integers<'a, C, W> {
    pub(super) fn new(panel: &[u8], layout: &'a Layout) -> Self {
        Self { place: Place { start: panel.as_ptr(), layout }, kind: PhantomData }
    }

    #[inline(always)]
    fn codes(&self, group: usize) -> Stored<'a, C> {
        Stored { panel: self.place.start, layout: self.place.layout, group, codes: PhantomData }
    }

    #[inline(always)]
    fn scaled<'b, B>(&self, index: usize, block: &'b B) -> Scaled<'a, 'b, B> {
        Scaled { place: self.place, index, block, offset: C::OFFSET }
    }
}

impl<C: ReadCodes, W: Way> Panel for Integers<'_, C, W> {
    type Unpacked = W::Unpacked;
    type Scales = <C::Scaling as Scaling>::Block;

    const EMPTY: (W::Unpacked, Self::Scales) = (W::EMPTY, C::Scaling::EMPTY);
    const BLOCK: usize = C::Scaling::GROUPS;
    const LINES: usize = C::CODES.lines();

    fn place(&self) -> Place<'_> {
        self.place
    }

    #[inline(always)]
    unsafe fn read_scales(&self, groups: Range<usize>, scales: &mut Self::Scales) {
        // SAFETY: the caller guarantees this.
        unsafe { C::Scaling::read(self.place, groups, scales) }
    }

    #[inline(always)]
    unsafe fn group(&self, index: usize, scales: &Self::Scales) -> impl Multiplied {
        IntegerGroup::<'_, '_, C::Scaling, _> { dots: W::stored(self.codes(index)), scaled: self.scaled(index, scales) }
    }

    #[inline(always)]
    unsafe fn unpack(&self, index: usize, scales: &Self::Scales, unpacked: &mut W::Unpacked) -> impl Multiplied {
        // SAFETY: the caller guarantees this.
        let dots = unsafe { W::unpack(self.codes(index), unpacked) };
        IntegerGroup::<'_, '_, C::Scaling, _> { dots, scaled: self.scaled(index, scales) }
    }
}

/// A group of integers and its scales.
struct IntegerGroup<'a, 'b, S: Scaling, D> {
    dots: D,
    scaled: Scaled<'a, 'b, S::Block>,
}

impl<S: Scaling, D: Dots> Multiplied for IntegerGroup<'_, '_, S, D> {
    #[inline(always)]
    unsafe fn add<const N: usize>(&self, rows: Group, results: &mut [[f32; PANEL]; N]) {
        // SAFETY: the caller guarantees this.
        unsafe { S::add(&self.scaled, &self.dots, rows, results) }
    }
}
