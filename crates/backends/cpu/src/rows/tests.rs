use half::bf16;
use octavo_ops::testing::TestRng;

use super::*;

fn each(test: impl Fn(Isa)) {
    Isa::ALL.into_iter().filter(|isa| isa.is_available()).for_each(test);
}

fn values(seed: u64, count: usize, size: f32) -> Vec<f32> {
    let mut rng = TestRng(seed);
    (0..count).map(|_| rng.signed() * size).collect()
}

fn near(found: &[f32], expected: impl IntoIterator<Item = f64>, tolerance: f64) {
    for (i, (&found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs() / expected.abs().max(1.0);
        assert!(error <= tolerance, "element {i} is {found}, expected {expected}");
    }
}

#[test]
fn activations_are_near_their_definitions() {
    let gate: Vec<f32> = (-3000..3000).map(|i| i as f32 * 0.01).chain([100.0, -100.0, 0.0, 1e-4]).collect();
    let up = vec![1.0; gate.len()];
    let wide = || gate.iter().map(|&x| f64::from(x));
    each(|isa| {
        let mut out = vec![0.0; gate.len()];
        isa.glu(GluKind::Silu, &gate, &up, &mut out);
        near(&out, wide().map(|x| x / (1.0 + (-x).exp())), 3e-7);
        isa.glu(GluKind::GeluTanh, &gate, &up, &mut out);
        let inner = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        near(&out, wide().map(|x| 0.5 * x * (1.0 + inner(x).tanh())), 3e-7);
        let mut out = gate.clone();
        isa.softcap(&mut out, 5.0);
        near(&out, wide().map(|x| 5.0 * (x / 5.0).tanh()), 2e-6);
        isa.glu(GluKind::Gelu, &[1.0, -1.0, 3.0], &[1.0; 3], &mut out[..3]);
        near(&out[..3], [0.841_344_746, -0.158_655_254, 2.995_950_3], 1e-6);
    });
}

#[test]
fn norms_are_near_their_definitions() {
    for count in [1, 15, 16, 100, 576] {
        let (x, weight, bias) = (values(1, count, 3.0), values(2, count, 1.0), values(3, count, 1.0));
        let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let mean = wide.iter().sum::<f64>() / count as f64;
        let power = |mean: f64| wide.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count as f64 + 1e-5;
        each(|isa| {
            let mut out = vec![0.0; count];
            isa.norm(&x, Norm { kind: NormKind::Rms, weight: &weight, bias: None, eps: 1e-5 }, &mut out);
            near(&out, wide.iter().zip(&weight).map(|(x, &w)| x / power(0.0).sqrt() * f64::from(w)), 1e-5);
            isa.norm(&x, Norm { kind: NormKind::Layer, weight: &weight, bias: Some(&bias), eps: 1e-5 }, &mut out);
            let rows = wide.iter().zip(&weight).zip(&bias);
            near(&out, rows.map(|((x, &w), &b)| (x - mean) / power(mean).sqrt() * f64::from(w) + f64::from(b)), 1e-4);
        });
    }
}

/// The parts of a quantised row.
#[derive(Clone, Debug, PartialEq)]
struct Quantised {
    codes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    totals: Vec<[i32; 2]>,
    steps: Vec<u8>,
}

fn quantised(isa: Isa, x: &[f32], coarse: bool) -> Quantised {
    let groups = x.len() / GROUP;
    let mut row = Quantised {
        codes: vec![0; 2 * x.len()],
        scales: vec![0.0; groups],
        sums: vec![0.0; groups],
        totals: vec![[0; 2]; groups],
        steps: vec![0; groups],
    };
    let Quantised { codes, scales, sums, totals, steps } = &mut row;
    isa.quantise(x, coarse, QuantRow { codes, scales, sums, totals, steps });
    row
}

#[test]
fn quantised_rows_are_near_and_their_sums_are_theirs() {
    let mut x = values(4, 19 * GROUP, 2.0);
    x[GROUP..2 * GROUP].fill(0.0);
    x[2 * GROUP] = 1000.0;
    x[3 * GROUP + 20] = -1000.0;
    for coarse in [false, true] {
        each(|isa| {
            let row = quantised(isa, &x, coarse);
            assert_eq!(row, quantised(Isa::Portable, &x, coarse), "{isa}");
            for ((group, x), codes) in x.chunks(GROUP).enumerate().zip(row.codes.chunks(2 * GROUP)) {
                let (high, low) = codes.split_at(GROUP);
                let steps: Vec<f32> = x.chunks(4).map(|x| x.iter().fold(0.0, |a: f32, b| a.max(b.abs()))).collect();
                let outlying = outlying_step(&steps).filter(|_| coarse);
                let most = |of: &dyn Fn(usize) -> bool| {
                    steps.iter().enumerate().filter(|(step, _)| of(*step)).fold(0.0f32, |a, (_, b)| a.max(*b))
                };
                let scale = match (coarse, outlying) {
                    (false, _) => most(&|_| true) / (127.0 * 16.0),
                    (true, None) => most(&|_| true) / 127.0,
                    (true, Some(step)) => most(&|other| other != step).max(steps[step] / 16.0) / 127.0,
                };
                assert_eq!(row.scales[group], scale);
                for (k, (&high, &low)) in high.iter().zip(low).enumerate() {
                    assert!(high >= -127 && low >= -127);
                    let split = !coarse || outlying == Some(k / 4);
                    assert!(if split { (-8..8).contains(&low) } else { high == 0 });
                }
                let codes: Vec<i32> = high.iter().zip(low).map(|(&h, &l)| i32::from(h) * 16 + i32::from(l)).collect();
                for (&code, &x) in codes.iter().zip(x) {
                    assert!((code as f32 * scale - x).abs() <= scale * 0.51);
                }
                let total: i32 = codes.iter().sum();
                assert_eq!(row.sums[group], scale * total as f32);
                let halves = [0, 1].map(|half| codes[half * GROUP / 2..][..GROUP / 2].iter().sum::<i32>());
                assert_eq!(row.totals[group], halves);
            }
        });
    }
}

/// Returns the only step whose largest magnitude is more than half of the largest of all.
fn outlying_step(steps: &[f32]) -> Option<usize> {
    let largest = steps.iter().fold(0.0f32, |a, &b| a.max(b));
    let mut some = (0..steps.len()).filter(|&step| steps[step] > 0.5 * largest);
    some.next().filter(|_| some.next().is_none())
}

#[test]
fn parts_are_joined_in_order_or_crossed() {
    let codes: Vec<i8> = (0..4 * GROUP)
        .map(|k| if (k / GROUP).is_multiple_of(2) { (k * 7 % 255) as u8 as i8 } else { (k % 16) as i8 - 8 })
        .collect();
    let code = |k: usize| {
        let at = k / GROUP * 2 * GROUP + k % GROUP;
        i16::from(codes[at]) * 16 + i16::from(codes[at + GROUP])
    };
    each(|isa| {
        let mut words = vec![0; 2 * GROUP];
        isa.join(&codes, &mut words);
        assert!(words.iter().enumerate().all(|(k, word)| *word == code(k)));
        isa.join_crossed(&codes, &mut words);
        assert!(words.iter().enumerate().all(|(k, word)| *word == code(k / 4 * 4 + [0, 2, 1, 3][k % 4])));
    });
}

#[test]
fn bf16_is_rounded_to_nearest_even() {
    let mut x = values(5, 1000, 1e3);
    x.extend([0.0, -0.0, f32::INFINITY, f32::MAX, f32::NAN, f32::from_bits(0x3f80_8000), f32::from_bits(0x3f81_8000)]);
    each(|isa| {
        let mut out = vec![0; x.len()];
        isa.to_bf16(&x, &mut out);
        let expected: Vec<u16> = x.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
        assert_eq!(out, expected);
    });
}

#[test]
fn rotations_turn_pairs_and_leave_the_rest() {
    let angles: Vec<f32> = (0..20).map(|i| i as f32 * 0.3).collect();
    let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
    let head = values(6, 47, 1.0);
    each(|isa| {
        for style in [RopeStyle::NeoX, RopeStyle::GptJ] {
            let mut out = head.clone();
            isa.rotate(style, &mut out, &cos, &sin);
            for i in 0..20 {
                let (a, b) = if style == RopeStyle::NeoX { (i, i + 20) } else { (2 * i, 2 * i + 1) };
                near(&[out[a]], [f64::from(head[a] * cos[i] - head[b] * sin[i])], 1e-6);
                near(&[out[b]], [f64::from(head[b] * cos[i] + head[a] * sin[i])], 1e-6);
            }
            assert_eq!(out[40..], head[40..]);
        }
    });
}

#[test]
fn what_no_number_is_stays_in_its_place() {
    each(|isa| {
        let mut out = [0.0; 4];
        let gate = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0];
        isa.glu(GluKind::Silu, &gate, &[1.0; 4], &mut out);
        assert!(out[0].is_nan() && out[1] == f32::INFINITY && out[3] > 0.7, "{out:?}");
    });
}

#[test]
fn codes_of_a_row_are_near_it_and_exact_when_widened() {
    // The rows cover every remainder of lanes, a row of zeros, and a row whose largest magnitude is negative.
    for count in [1, 4, 15, 16, 64, 100] {
        let mut x = values(11, count, 3.0);
        x[count / 2] = -5.0;
        each(|isa| {
            let (mut codes, mut scale) = (vec![0i8; count], 0.0);
            isa.code(&x, &mut codes, &mut scale);
            assert_eq!(scale, 5.0 / 127.0);
            for (&x, &code) in x.iter().zip(&codes) {
                assert!((f32::from(code) * scale - x).abs() <= scale * 0.501, "{x} became {code}");
            }
            isa.code(&vec![0.0; count], &mut codes, &mut scale);
            assert!(scale == 0.0 && codes.iter().all(|&code| code == 0));
        });
    }
    let words: Vec<u32> =
        (0..2 * LANES as u32).map(|i| u32::from_le_bytes([i as u8, 128 - i as u8, 127, 129])).collect();
    each(|isa| {
        let mut out = vec![0; 2 * words.len()];
        isa.widen(&words, &mut out);
        assert_widened(&words, &out, |byte| f32::from(byte as i8));
    });
}

/// Checks that rows of words have become the numbers of their bytes.
fn assert_widened(words: &[u32], out: &[u32], number: impl Fn(u8) -> f32) {
    let half = |half: u32| bf16::from_bits(half as u16).to_f32();
    for (words, out) in words.chunks(LANES).zip(out.chunks(2 * LANES)) {
        for (lane, word) in words.iter().enumerate() {
            let pairs = [out[lane], out[LANES + lane]];
            let found = pairs.map(|pair| [half(pair & 0xffff), half(pair >> 16)]);
            let bytes = word.to_le_bytes().map(&number);
            let same = found.as_flattened().iter().zip(bytes).all(|(a, b)| *a == b || a.is_nan() && b.is_nan());
            assert!(same, "{found:?} of {bytes:?}");
        }
    }
}

#[test]
fn every_e4m3_number_is_exact_when_widened() {
    let words: Vec<u32> = (0..64u32).map(|i| 0x0302_0100 + 0x0404_0404 * i).collect();
    each(|isa| {
        let mut out = vec![0; 2 * words.len()];
        isa.widen_e4m3(&words, &mut out);
        assert_widened(&words, &out, octavo_ops::e4m3);
        let x = values(12, 300, 200.0);
        let mut codes = vec![0i8; x.len()];
        for scale in [1.0, 0.37, 1e-3] {
            isa.to_e4m3(&x, scale, &mut codes);
            assert!(codes.iter().zip(&x).all(|(code, x)| *code as u8 == octavo_ops::to_e4m3(*x / scale)));
        }
    });
}

#[test]
fn the_largest_element_is_found_among_numbers_that_are_none() {
    each(|isa| {
        let largest = |x: &[f32]| {
            let mut found = 0.0;
            isa.largest(x, &mut found);
            found
        };
        for at in [0, 15, 16, 69] {
            let mut x = values(12, 70, 1.0);
            x[at] = 2.0;
            x[(at + 1) % 70] = f32::NAN;
            assert_eq!(largest(&x), 2.0);
        }
        assert_eq!(largest(&[f32::NAN, f32::NEG_INFINITY]), f32::NEG_INFINITY);
        assert_eq!(largest(&[]), f32::NEG_INFINITY);
    });
}
