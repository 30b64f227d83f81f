//! Tests of attention in both directions, within segments.

use octavo_kernels::manifest::{self, CacheType, Dtype};
use octavo_ops::Sight;
use octavo_ops::testing::TestRng;

use crate::attention::{Chunk, Path, Setup};
use crate::common::rng;
use crate::launcher::{dtypes, has_sm80, on_device};
use crate::support::{Array, pick};

/// Returns setups for segments: every head size of the fast kernels, and the plain kernel.
fn segment_setups() -> Vec<Setup> {
    let mut all = Vec::new();
    for dtype in dtypes() {
        for size in manifest::PREFILL_HEAD_SIZES {
            let (window, softcap, sinks, sight) = (None, None, false, Sight::Both);
            let setup = |path| Setup {
                dtype,
                q_heads: 4,
                kv_heads: 2,
                size,
                window,
                softcap,
                sinks,
                sight,
                prefix: None,
                cache: CacheType::Activation,
                path,
            };
            all.push(setup(Path::Plain));
            all.extend((dtype != Dtype::F32 && has_sm80()).then(|| setup(Path::AMPERE)));
            all.extend((dtype == Dtype::F16).then(|| setup(Path::VOLTA)));
        }
    }
    all
}

/// Returns the setups for segments that run: for the emulation each takes seconds to compile, so only those with padded
/// heads and a few of the others run.
fn some_segment_setups(rng: &mut TestRng) -> Vec<Setup> {
    let (mut paddings, mut others): (Vec<_>, Vec<_>) =
        segment_setups().into_iter().partition(|setup| setup.size == 72 && setup.dtype != Dtype::F32);
    while !on_device() && others.len() > 3 {
        others.swap_remove(rng.below(others.len()));
    }
    paddings.append(&mut others);
    paddings
}

#[test]
fn segments_are_as_in_f64() {
    let rng = &mut rng();
    for setup in some_segment_setups(rng) {
        for window in [None, Some(0), Some(1 + rng.below(40)), Some(64 + rng.below(80))] {
            let setup = Setup { window, ..setup };
            // One key, a part of a tile, whole tiles, and a query that begins a tile.
            let lens = [1, 2 + rng.below(60), 64, 65, 129 + rng.below(60)];
            let sequences = lens.map(|len| setup.sequence(len, rng));
            let chunks: Vec<Chunk<'_>> = sequences.iter().zip(lens).map(|(s, len)| (s, 0..len)).collect();
            let outputs = setup.run(&chunks, rng.next_u64());
            setup.check(&chunks, &outputs);
            for (chunk, output) in chunks.iter().zip(&outputs) {
                let alone = setup.run_alone(chunk, rng.next_u64());
                assert!(alone == *output, "{setup:?}: {} tokens alone", chunk.1.len());
            }
        }
    }
}

#[test]
fn keys_outside_a_window_reach_no_row() {
    let rng = &mut rng();
    for setup in some_segment_setups(rng) {
        let (len, window) = (170, pick(rng, &[0, 5, 64]));
        let setup = Setup { window: Some(window), ..setup };
        let mut sequence = setup.sequence(len, rng);
        let expected = setup.run(&[(&sequence, 0..len)], 1).remove(0);
        let (place, kv_cols, cols) = (rng.below(len), setup.kv_cols(), setup.out_cols());
        sequence.k.copy_from(place * kv_cols, &Array::poisoned(setup.dtype, kv_cols), 0..kv_cols);
        let found = setup.run(&[(&sequence, 0..len)], 2).remove(0);
        for position in 0..len {
            let row = position * cols..(position + 1) * cols;
            match setup.seen(position, len).contains(&place) {
                true => assert!(found.range(row).iter().all(|x| x.is_nan()), "{setup:?}: {position} sees {place}"),
                false => assert!(found.bits(row.clone()) == expected.bits(row), "{setup:?}: {position}, not {place}"),
            }
        }
    }
}
