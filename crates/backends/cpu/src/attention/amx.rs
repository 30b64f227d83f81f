//! The kernel with AMX: queries and weights are rounded to bf16, the type of keys and values, and one product
//! multiplies sixteen rows with sixteen keys.

use std::arch::x86_64::*;
use std::cell::RefCell;

use super::bf16::{narrow_weights, weigh};
use super::plain::{Running, visible, whole};
use super::{Block, KEYS, ROWS};
use crate::Isa;
use crate::kv::{BLOCK, CHUNK};
use crate::memory::LINE;
use crate::tiles::{self, SIDE, Strided, Tiles};

/// Scratch memory of a thread.
#[repr(align(64))]
struct Scratch {
    /// Contribution of a tile to four chunks of the rows' output.
    sums: [[[f32; CHUNK]; ROWS]; SIDE],
}

thread_local! {
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch {
        sums: [[[0.0; CHUNK]; ROWS]; SIDE],
    }));
}

/// Computes attention of up to [`ROWS`] rows, with heads of whole pairs of chunks.
///
/// # Safety
/// AMX in bf16 and AVX-512 F, BW, DQ and BF16 must be available.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
pub(super) unsafe fn attend(block: Block<'_>) {
    let Block { mut keys, q, narrow_q, sees, starts, softcap, weights, narrow_weights: narrow, out, partial, .. } =
        block;
    let count = sees.len();
    let (width, q_width) = (out.len() / count, q.len() / count);
    assert!(width.is_multiple_of(2 * CHUNK) && q_width.is_multiple_of(2 * CHUNK));
    assert!(count <= ROWS && narrow_q.len() >= ROWS * q_width);
    let first = sees.iter().map(|see| see.0).min().unwrap_or(0);
    let last = sees.iter().map(|see| see.1).max().unwrap_or(0);
    let mut running: [Running; ROWS] = std::array::from_fn(|r| starts[if r < count { r } else { 0 }]);
    let _tiles = Tiles::bf16(count);
    SCRATCH.with_borrow_mut(|scratch| {
        let Scratch { sums } = &mut **scratch;
        out.fill(0.0);
        for tile in first / KEYS..=last / KEYS {
            let blocks = tile * (KEYS / BLOCK)..((tile + 1) * (KEYS / BLOCK)).min(last / BLOCK + 1);
            keys.enter(Isa::Amx, blocks.clone());
            for from in blocks.clone().step_by(SIDE) {
                // Blocks that do not exist repeat the last one; their scores are not used.
                let keys: [&[u32]; SIDE] = std::array::from_fn(|i| keys.block((from + i).min(blocks.end - 1)).0);
                let at = (from - blocks.start) * BLOCK;
                let scores = Strided {
                    start: weights.as_mut_ptr().cast::<f32>().wrapping_add(at),
                    stride: KEYS * size_of::<f32>(),
                };
                let q = Strided { start: narrow_q.as_ptr(), stride: q_width * size_of::<u16>() };
                let keys = keys.map(|keys| keys.as_ptr().cast());
                // SAFETY: the tiles are set up; a block has a tile for every 32 dimensions, queries and weights have
                // all rows, and a tile of keys holds a multiple of four blocks.
                unsafe { tiles::dot(q, keys, q_width / (2 * CHUNK), scores, BLOCK * size_of::<f32>()) };
            }
            let len = blocks.len() * BLOCK;
            let mut fades = [0.0; ROWS];
            for (row, &sees) in sees.iter().enumerate() {
                let scores = &mut weights[row][..len];
                if let Some((scales, _)) = keys.scales() {
                    Isa::Amx.multiply(scores, scales);
                }
                if let Some(cap) = softcap {
                    Isa::Amx.softcap(scores, cap);
                }
                visible(scores, tile * KEYS, sees);
                // SAFETY: the caller guarantees this.
                unsafe {
                    fades[row] = weigh(scores, &mut running[row]);
                    if let Some((_, scales)) = keys.scales() {
                        Isa::Amx.multiply(scores, scales);
                    }
                    narrow_weights(scores, &mut narrow[row]);
                }
            }
            let chunks = width / CHUNK;
            for chunk in (0..chunks).step_by(SIDE) {
                // SAFETY: the tiles are set up, as above.
                unsafe { tiles::zero() };
                for (index, block) in blocks.clone().enumerate() {
                    let values = whole(&keys, block, partial);
                    let chunk = |i: usize| (chunk + i).min(chunks - 1) * CHUNK * BLOCK / 2;
                    let values: [*const u32; SIDE] = std::array::from_fn(|i| values[chunk(i)..].as_ptr());
                    let weights = Strided {
                        start: narrow.as_ptr().cast::<u16>().wrapping_add(index * BLOCK),
                        stride: KEYS * size_of::<u16>(),
                    };
                    // SAFETY: as above; a block has half a tile for each chunk, and each row of weights has its block.
                    unsafe { tiles::add(weights, values) };
                }
                // SAFETY: as above; the destination holds four tiles.
                unsafe {
                    tiles::store(Strided { start: sums.as_mut_ptr().cast(), stride: LINE }, ROWS * LINE);
                    for row in 0..count {
                        let out = &mut out[row * width..][..width].as_chunks_mut::<CHUNK>().0[chunk..];
                        for (out, sums) in out.iter_mut().zip(&*sums) {
                            let fade = _mm512_set1_ps(fades[row]);
                            let sum = _mm512_loadu_ps(sums[row].as_ptr());
                            let faded = _mm512_fmadd_ps(_mm512_loadu_ps(out.as_ptr()), fade, sum);
                            _mm512_storeu_ps(out.as_mut_ptr(), faded);
                        }
                    }
                }
            }
        }
    });
    for (out, running) in out.chunks_exact_mut(width).zip(&running) {
        Isa::Amx.scale(out, 1.0 / running.sum);
    }
}
