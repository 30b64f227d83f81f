//! NVFP4: each half of a group has a scale of its own.

use std::arch::x86_64::*;

use super::{Kind, PAIRS, Unpacked};
use crate::memory::LINE;
use crate::product::levels::E2M1_VALUES;
use crate::product::read::{self, ReadScales};
use crate::weights::{Codes, Layout, PANEL};

/// Codes of a group, whose integers are twice their values.
#[derive(Clone, Copy)]
pub(super) struct E2m1 {
    codes: *const u8,
}

/// Orders that move the first and the last two of each four bytes to the upper bytes of words. The lower bytes become 0.
static ORDERS: [[u8; 16]; 2] = {
    let mut orders = [[0x80; 16]; 2];
    let mut at = 0;
    while at < 16 {
        orders[at / 2 % 2][at / 4 * 4 + at % 2 * 2 + 1] = at as u8;
        at += 1;
    }
    orders
};

impl Kind for E2m1 {
    const BYTES: usize = Codes::E2m1.bytes();
    const LINES: usize = Codes::E2m1.lines();
    const HALVES: bool = true;

    fn new(codes: *const u8) -> Self {
        Self { codes }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scales(panel: *const u8, layout: &Layout, group: usize) -> [__m512; 2] {
        // SAFETY: the caller guarantees this.
        unsafe { read::Pair::pair(panel, layout, group) }
    }

    /// A line has four inputs of the first half of the group, and four of the last.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn unpack(self, unpacked: &mut Unpacked) {
        let (first, last) = unpacked.0.split_at_mut(PAIRS / 2);
        let words = first.as_chunks_mut().0.iter_mut().zip(last.as_chunks_mut().0);
        for (line, (first, last)) in words.enumerate() {
            // SAFETY: the caller guarantees this; two pairs are two registers.
            unsafe {
                let packed = read::line(self.codes.add(line * LINE));
                store(packed, first);
                store(_mm512_srli_epi16::<4>(packed), last);
            }
        }
    }
}

/// Stores the integers of the lower nibbles of bytes: two pairs of inputs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn store(codes: __m512i, pairs: &mut [[i16; 2 * PANEL]; 2]) {
    // SAFETY: the tables have sixteen bytes; a pair fills a register.
    unsafe {
        let values = read::looked_up(&E2M1_VALUES, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
        for (order, pair) in ORDERS.iter().zip(pairs) {
            let order = _mm512_broadcast_i32x4(_mm_loadu_si128(order.as_ptr().cast()));
            let words = _mm512_srai_epi16::<8>(_mm512_shuffle_epi8(values, order));
            _mm512_store_si512(pair.as_mut_ptr().cast(), words);
        }
    }
}
