//! Property tests of attention that do not depend on the numbers.

use octavo_kernels::manifest::{CacheType, Dtype};
use octavo_ops::testing::TestRng;

use crate::attention::{Chunk, Path, Sequence, Setup, setups, with_options};
use crate::common::{assert_near, rng};
use crate::support::{Array, Tolerance};

/// Returns setups of the tensor-core paths and a plain one, few enough for many comparisons.
fn few() -> [Setup; 4] {
    let all = setups();
    [all[1], all[5], all[8], all[12]]
}

/// Returns sequences of these lengths.
fn sequences(setup: &Setup, lens: &[usize], rng: &mut TestRng) -> Vec<Sequence> {
    lens.iter().map(|&len| setup.sequence(len, rng)).collect()
}

#[test]
fn a_row_depends_neither_on_where_its_blocks_lie_nor_on_the_batch() {
    let rng = &mut rng();
    for setup in few() {
        let setup = with_options(setup, rng);
        let s = sequences(&setup, &[40, 90, 17, 71], rng);
        let chunks: [Chunk<'_>; 4] = [(&s[0], 39..40), (&s[1], 20..90), (&s[2], 0..17), (&s[3], 70..71)];
        let together = setup.run(&chunks, 1);
        assert!(together == setup.run(&chunks, 2), "other blocks");
        let reordered = setup.run(&[2, 0, 3, 1].map(|i| chunks[i].clone()), 3);
        assert!([1, 3, 0, 2].map(|i| reordered[i].clone()) == together[..], "another order");
        for (chunk, expected) in chunks.iter().zip(&together) {
            assert!(setup.run_alone(chunk, 4) == *expected, "alone");
        }
        // A padding row of a captured graph has a query of NaN and no keys.
        let nothing = Sequence {
            q: Array::poisoned(setup.dtype, setup.q_cols()),
            k: Array::poisoned(setup.dtype, 0),
            v: Array::poisoned(setup.dtype, 0),
        };
        let padded = setup.run_padded(&chunks, &nothing, 2);
        assert!(padded[..4] == together[..], "with padding");
        assert!(padded[4..].iter().all(|row| row.values().iter().all(|&x| x == 0.0)), "padding is 0");
    }
}

#[test]
fn tokens_to_come_reach_no_row_before_them() {
    let rng = &mut rng();
    for setup in few() {
        for setup in [setup, with_options(setup, rng)] {
            let s = sequences(&setup, &[90, 90], rng);
            let expected = setup.run(&[(&s[0], 0..90)], 1).remove(0);
            let (from, q_cols, kv_cols) = (1 + rng.below(89), setup.q_cols(), setup.kv_cols());
            let mut other = s[0].clone();
            let nothing = Array::poisoned(setup.dtype, 90 * q_cols);
            other.q.copy_from(from * q_cols, &nothing, from * q_cols..90 * q_cols);
            other.k.copy_from(from * kv_cols, &nothing, from * kv_cols..90 * kv_cols);
            // Tensor cores multiply a tile's values by the weight 0 of later keys. NaN there, in the sequence's own
            // chunk, is the only value that would reach earlier rows.
            let values = if setup.path == Path::Plain { &nothing } else { &s[1].v };
            other.v.copy_from(from * kv_cols, values, from * kv_cols..90 * kv_cols);
            let found = setup.run(&[(&other, 0..90)], 2).remove(0);
            let before = 0..from * q_cols;
            assert!(found.bits(before.clone()) == expected.bits(before), "{setup:?}: from position {from} on");
        }
    }
}

/// A query that sees a key of NaN has no finite output, in every kernel.
#[test]
fn nan_in_a_key_is_not_hidden() {
    let rng = &mut rng();
    for setup in few() {
        let mut s = sequences(&setup, &[90], rng).remove(0);
        let (at, q_cols, kv_cols) = (40, setup.q_cols(), setup.kv_cols());
        s.k.copy_from(at * kv_cols, &Array::poisoned(setup.dtype, kv_cols), 0..kv_cols);
        let prefill = setup.run(&[(&s, 0..90)], 1)[0].values();
        let [before, after] = [&prefill[..at * q_cols], &prefill[at * q_cols..]];
        assert!(before.iter().all(|x| x.is_finite()) && after.iter().all(|x| x.is_nan()), "{setup:?}, prefill");
        let decode = setup.run(&[(&s, 89..90)], 2)[0].values();
        assert!(decode.iter().all(|x| x.is_nan()), "{setup:?}, decode");
    }
}

#[test]
fn chunks_of_any_size_give_the_bits_of_one() {
    let rng = &mut rng();
    for setup in few() {
        for setup in [setup, with_options(setup, rng)] {
            let s = &sequences(&setup, &[150], rng)[0];
            let whole = &setup.run(&[(s, 0..150)], 1)[0];
            let mut start = 0;
            while start < 150 {
                // A chunk of one token would be processed by decode.
                let end = match (start + 2 + rng.below(80)).min(150) {
                    149 => 150,
                    end => end,
                };
                let chunk = &setup.run(&[(s, start..end)], 2 + start as u64)[0];
                let cols = setup.q_cols();
                let expected = whole.bits(start * cols..end * cols);
                assert!(chunk.bits(0..chunk.len()) == expected, "{setup:?}: {start}..{end}");
                start = end;
            }
        }
    }
}

#[test]
fn decode_is_the_last_row_of_prefill() {
    let rng = &mut rng();
    for setup in few() {
        for setup in [setup, with_options(setup, rng)] {
            for len in [2, 16, 17, 33, 64, 65, 130] {
                let s = &sequences(&setup, &[len], rng)[0];
                let last = (len - 1) * setup.q_cols()..len * setup.q_cols();
                let prefill = setup.run(&[(s, 0..len)], 1)[0].range(last);
                let decode = setup.run(&[(s, len - 1..len)], 2)[0].values();
                // Both round, so their difference may be twice the error of one.
                let tolerance = 2.0 * Tolerance::Attention.bound(setup.dtype);
                assert_near(&decode, &prefill, tolerance, &format!("{setup:?}, {len} tokens"));
            }
        }
    }
}

#[test]
fn splits_of_any_size_agree_and_their_ctas_do_not_matter() {
    let rng = &mut rng();
    let setup = setups()[1];
    let Path::Fast { chip, .. } = setup.path else { unreachable!("it is one of the fast paths") };
    let fast = |split_tokens, columns| Path::Fast { chip, split_tokens, columns };
    for setup in [setup, with_options(setup, rng), with_options(setup, rng)] {
        let s = sequences(&setup, &[200, 1, 33], rng);
        let chunks: [Chunk<'_>; 3] = [(&s[0], 199..200), (&s[1], 0..1), (&s[2], 32..33)];
        for split_tokens in [16, 48, 64, 208, 2048] {
            let run = |columns| Setup { path: fast(split_tokens, columns), ..setup }.run(&chunks, 5);
            let out = run(1);
            setup.check(&chunks, &out);
            assert!(out == run(2) && out == run(40), "splits of {split_tokens}");
        }
    }
}

#[test]
fn shared_kv_heads_are_as_repeated_ones() {
    let rng = &mut rng();
    for setup in [setups()[0], setups()[4], setups()[8]] {
        let group = setup.q_heads / setup.kv_heads;
        let repeated = Setup { kv_heads: setup.q_heads, ..setup };
        let s = &sequences(&setup, &[70], rng)[0];
        let repeat = |array: &Array| {
            let mut out = Array::poisoned(setup.dtype, array.len() * group);
            for head in 0..70 * setup.q_heads {
                let from = head / group * setup.size;
                out.copy_from(head * setup.size, array, from..from + setup.size);
            }
            out
        };
        let alone = Sequence { q: s.q.clone(), k: repeat(&s.k), v: repeat(&s.v) };
        for positions in [0..70, 69..70] {
            let shared = setup.run(&[(s, positions.clone())], 1);
            let own = repeated.run(&[(&alone, positions)], 2);
            let tolerance = 2.0 * Tolerance::Attention.bound(setup.dtype);
            assert_near(&shared[0].values(), &own[0].values(), tolerance, "heads");
        }
    }
}

/// Tests scores so large that their powers overflow f32, and so small that all but one vanish.
#[test]
fn extreme_scores_stay_finite() {
    let rng = &mut rng();
    // Beside a cache in e4m3, queries in bf16 are beyond the range of f16.
    let narrow = Setup { cache: CacheType::E4m3, ..setups()[0] };
    for setup in few().into_iter().chain([narrow]) {
        let mut s = sequences(&setup, &[40], rng).remove(0);
        let factor = match setup.dtype {
            Dtype::F32 => 1e4,
            Dtype::F16 => 60.0,
            Dtype::Bf16 => 1e6,
        };
        for i in 0..s.q.len() {
            s.q.set(i, s.q.get(i) * factor);
        }
        for positions in [0..40, 39..40] {
            let out = setup.run(&[(&s, positions)], 1);
            assert!(out[0].values().iter().all(|x| x.is_finite() && x.abs() < 30.0), "{setup:?}");
        }
    }
}

/// A CTA passes over more splits than a warp looks at at once.
#[test]
fn splits_before_a_window_are_passed_over() {
    let rng = &mut rng();
    let setup = few()[0];
    let Path::Fast { chip, .. } = setup.path else { panic!("a path with splits") };
    let path = Path::Fast { chip, split_tokens: 16, columns: 1 };
    let setup = Setup { window: Some(19), path, ..setup };
    let s = sequences(&setup, &[620, 70, 1200], rng);
    let chunks: Vec<Chunk<'_>> =
        s.iter().map(|s| (s, s.k.len() / setup.kv_cols() - 1..s.k.len() / setup.kv_cols())).collect();
    setup.check(&chunks, &setup.run(&chunks, 1));
}

/// With the kernel of prefill for all sequences, the bits of a row are the same whether it is decoded or prefilled, in chunks of
/// any size, alone and in any batch.
#[test]
fn rows_of_one_kernel_have_the_same_bits_in_every_step() {
    let rng = &mut rng();
    for setup in few().into_iter().filter(|setup| setup.path != Path::Plain) {
        let Path::Fast { chip, .. } = setup.path else { continue };
        for setup in [setup, with_options(setup, rng)] {
            for cache in CacheType::ALL {
                let setup = Setup { cache, path: Path::Invariant { chip }, ..setup };
                let s = sequences(&setup, &[140, 70], rng);
                let cols = setup.q_cols();
                let [whole, other] = [(&s[0], 0..140), (&s[1], 0..70)].map(|chunk| setup.run(&[chunk], 1).remove(0));
                setup.check(&[(&s[0], 0..140)], std::slice::from_ref(&whole));
                for place in [0, 1 + rng.below(137), 139] {
                    // Rows of the sequence are decoded, or are the last of a chunk, beside others.
                    let from = rng.below(place + 1);
                    let chunks: [Chunk<'_>; 3] = [(&s[0], place..place + 1), (&s[1], 3..70), (&s[0], from..place + 1)];
                    let found = setup.run(&chunks, rng.next_u64());
                    let expected = whole.bits(place * cols..(place + 1) * cols);
                    assert!(found[0].bits(0..cols) == expected, "{setup:?}: {place}, decoded");
                    assert!(found[1].bits(0..67 * cols) == other.bits(3 * cols..70 * cols), "{setup:?}: the other");
                    let rows = (place + 1 - from) * cols;
                    let expected = whole.bits(from * cols..(place + 1) * cols);
                    assert!(found[2].bits(0..rows) == expected, "{setup:?}: {from}..={place}");
                }
            }
        }
    }
}
