//! Tests of split, norm, rotary embedding and cache write.

use std::sync::LazyLock;

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, AttentionTypes, CacheType, Dtype};
use octavo_kernels::params::{KV_BLOCK, NO_SLOT, QkvPostParams};
use octavo_ops::testing::TestRng;
use octavo_ops::{e4m3, to_e4m3};

use crate::common::{assert_near, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes};
use crate::support::{Array, Tolerance, normal, pick};

static KERNELS: LazyLock<Kernels> = LazyLock::new(|| {
    let types = dtypes().into_iter().flat_map(|dtype| CacheType::ALL.map(|cache| AttentionTypes { dtype, cache }));
    Kernels::new(&types.map(manifest::qkv_post).collect::<Vec<_>>())
});

/// Norm weights of q and k, over a head or over the whole row.
#[derive(Clone)]
pub(crate) struct Norm {
    q: Vec<f32>,
    k: Vec<f32>,
    whole_row: bool,
    offset: f32,
}

/// Tables of cosine and sine, `[positions, rotary_dim / 2]`.
#[derive(Clone)]
pub(crate) struct Rope {
    /// Index of the token position that rotates each pair; empty means the first for all.
    streams: Vec<u32>,
    dim: usize,
    interleaved: bool,
    cosine: Vec<f32>,
    sine: Vec<f32>,
}

/// What follows the projection of q, k and v in a step.
#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) dtype: Dtype,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) size: usize,
    norm: Option<Norm>,
    rope: Option<Rope>,
    /// `[STREAMS, tokens]`.
    positions: Vec<u32>,
    pub(crate) slots: Vec<u32>,
    pub(crate) qkv: Array,
    /// Number of layers of the group; the last one is written.
    layers: usize,
    pub(crate) blocks: usize,
}

const EPS: f32 = 1e-6;
/// Scales of a cache in e4m3, and a code that means NaN and is never written: its sign is that of no number.
const K_SCALE: f32 = 0.013;
const V_SCALE: f32 = 2.9;
const UNWRITTEN: u8 = 0xff;
const POSITIONS: usize = 40;
const STREAMS: usize = 3;

impl Case {
    fn draw(dtype: Dtype, rng: &mut TestRng) -> Self {
        let kv_heads = 1 + rng.below(3);
        let q_heads = kv_heads * (1 + rng.below(3));
        let size = pick(rng, &[6, 16, 64, 96, 128, 256]);
        let blocks = 3;
        // Slots are in random order, each used once; one row in four is padding.
        let mut free: Vec<u32> = (KV_BLOCK as u32..(blocks * KV_BLOCK) as u32).collect();
        let mut slots = Vec::new();
        for _ in 0..1 + rng.below(6) {
            let slot = free.swap_remove(rng.below(free.len()));
            slots.push(if rng.below(4) == 0 { NO_SLOT } else { slot });
        }
        Self::with_slots(dtype, ([q_heads, kv_heads], size), (slots, blocks), rng)
    }

    /// Returns a case with a norm and a rotary embedding, or one of them, or none, for tokens in these slots of a cache.
    pub(crate) fn with_slots(
        dtype: Dtype,
        ([q_heads, kv_heads], size): ([usize; 2], usize),
        (slots, blocks): (Vec<u32>, usize),
        rng: &mut TestRng,
    ) -> Self {
        let (tokens, layers) = (slots.len(), 1 + rng.below(2));
        let weights = |rng: &mut TestRng, len: usize| (0..len).map(|_| normal(rng) as f32).collect();
        let norm = (rng.below(3) > 0).then(|| {
            let whole_row = rng.below(2) == 0;
            let len = |heads| if whole_row { heads * size } else { size };
            let (q, k) = (weights(rng, len(q_heads)), weights(rng, len(kv_heads)));
            Norm { q, k, whole_row, offset: pick(rng, &[0.0, 1.0]) }
        });
        let rope = (rng.below(4) > 0).then(|| {
            let dim = pick(rng, &[size, size / 2 / 2 * 2]);
            let angle = |i: usize| (i / (dim / 2)) as f64 * 10000f64.powf(-((2 * (i % (dim / 2))) as f64) / dim as f64);
            let table = |f: fn(f64) -> f64| (0..POSITIONS * dim / 2).map(|i| (1.1 * f(angle(i))) as f32).collect();
            let streams = match rng.below(2) {
                0 => Vec::new(),
                _ => (0..dim / 2).map(|_| rng.below(STREAMS) as u32).collect(),
            };
            Rope { streams, dim, interleaved: rng.below(2) == 0, cosine: table(f64::cos), sine: table(f64::sin) }
        });
        let qkv = Array::random(dtype, tokens * (q_heads + 2 * kv_heads) * size, rng);
        let positions = rng.tokens(STREAMS * tokens, POSITIONS);
        Self { dtype, q_heads, kv_heads, size, norm, rope, positions, slots, qkv, layers, blocks }
    }

    /// Returns an f32 case with a rotary embedding of this pairing.
    fn draw_rotated(interleaved: bool, rng: &mut TestRng) -> Self {
        loop {
            let case = Self::draw(Dtype::F32, rng);
            if let Some(rope) = case.rope {
                return Self { rope: Some(Rope { interleaved, ..rope }), ..case };
            }
        }
    }

    fn row(&self) -> usize {
        (self.q_heads + 2 * self.kv_heads) * self.size
    }

    /// Returns the number of elements of one layer's keys in a block.
    pub(crate) fn plane(&self) -> usize {
        KV_BLOCK * self.kv_heads * self.size
    }

    pub(crate) fn block_stride(&self) -> usize {
        self.layers * 2 * self.plane()
    }

    /// Returns q, and the cache of all layers.
    fn run(&self) -> (Array, Array) {
        in_every_order(|order| {
            let mut cache = Array::poisoned(self.dtype, self.blocks * self.block_stride());
            let q = self.launch(order, CacheType::Activation, cache.ptr_mut());
            (q, cache)
        })
    }

    /// Returns the cache of all layers in e4m3.
    fn codes(&self) -> Vec<u8> {
        in_every_order(|order| {
            let mut codes = vec![UNWRITTEN; self.blocks * self.block_stride()];
            self.launch(order, CacheType::E4m3, address_mut(&mut codes));
            codes
        })
    }

    /// Returns the index of the first element of the layer that is written.
    pub(crate) fn layer(&self) -> usize {
        2 * (self.layers - 1) * self.plane()
    }

    /// Returns q, and writes a cache that begins at `base`.
    pub(crate) fn launch(&self, order: Order, cache: CacheType, base: u64) -> Array {
        let mut q = Array::poisoned(self.dtype, self.slots.len() * self.q_heads * self.size);
        let params = self.params(q.ptr_mut(), cache, base);
        let instance = manifest::qkv_post(AttentionTypes { dtype: self.dtype, cache });
        launch(&KERNELS, order, &instance, params.grid(), &params);
        q
    }

    /// Returns the parameters with an output of the queries and a cache that begins at `base`.
    pub(crate) fn params(&self, q: u64, cache: CacheType, base: u64) -> QkvPostParams {
        let tokens = self.slots.len();
        let place = |element: usize| base + (element * cache.bytes(self.dtype)) as u64;
        let norm = self.norm.as_ref();
        let rope = self.rope.as_ref();
        QkvPostParams {
            q,
            k_cache: place(self.layer()),
            v_cache: place(self.layer() + self.plane()),
            qkv: self.qkv.ptr(),
            q_weight: norm.map_or(0, |n| address(&n.q)),
            k_weight: norm.map_or(0, |n| address(&n.k)),
            cosine: rope.map_or(0, |r| address(&r.cosine)),
            sine: rope.map_or(0, |r| address(&r.sine)),
            positions: address(&self.positions),
            streams: rope.filter(|r| !r.streams.is_empty()).map_or(0, |r| address(&r.streams)),
            slots: address(&self.slots),
            block_stride: self.block_stride() as u64,
            tokens: tokens as u32,
            q_heads: self.q_heads as u32,
            kv_heads: self.kv_heads as u32,
            head_size: self.size as u32,
            rotary_dim: rope.map_or(0, |r| r.dim as u32),
            rope_interleaved: rope.is_some_and(|r| r.interleaved).into(),
            norm_whole_row: norm.is_some_and(|n| n.whole_row).into(),
            position_stride: tokens as u32,
            eps: EPS,
            weight_offset: norm.map_or(0.0, |n| n.offset),
            k_scale: K_SCALE,
            v_scale: V_SCALE,
        }
    }

    /// Returns q or k of one token in f64.
    fn expected(&self, token: usize, row: &[f64], weight: Option<&[f32]>) -> Vec<f64> {
        let mut out = row.to_vec();
        if let (Some(norm), Some(weight)) = (&self.norm, weight) {
            for part in out.chunks_mut(weight.len()) {
                let mean = part.iter().map(|x| x * x).sum::<f64>() / part.len() as f64;
                let root = (mean + f64::from(EPS)).sqrt();
                part.iter_mut()
                    .zip(weight)
                    .for_each(|(x, w)| *x = *x / root * (f64::from(*w) + f64::from(norm.offset)));
            }
        }
        let Some(rope) = &self.rope else { return out };
        for head in out.chunks_mut(self.size) {
            for i in 0..rope.dim / 2 {
                let (a, b) = if rope.interleaved { (2 * i, 2 * i + 1) } else { (i, i + rope.dim / 2) };
                let stream = rope.streams.get(i).map_or(0, |&stream| stream as usize);
                let at = self.positions[stream * self.slots.len() + token] as usize * rope.dim / 2 + i;
                let (cosine, sine) = (f64::from(rope.cosine[at]), f64::from(rope.sine[at]));
                (head[a], head[b]) = (head[a] * cosine - head[b] * sine, head[b] * cosine + head[a] * sine);
            }
        }
        out
    }

    fn check(&self) {
        let (q, cache) = self.run();
        let tolerance = Tolerance::Elementwise.bound(self.dtype);
        let (q_cols, kv_cols) = (self.q_heads * self.size, self.kv_heads * self.size);
        let mut written = vec![false; cache.len()];
        for (token, &slot) in self.slots.iter().enumerate() {
            let start = token * self.row();
            let norm = self.norm.as_ref();
            let expected = self.expected(token, &self.qkv.range(start..start + q_cols), norm.map(|n| &n.q[..]));
            assert_near(&q.range(token * q_cols..(token + 1) * q_cols), &expected, tolerance, "q");
            if slot == NO_SLOT {
                continue;
            }
            let k = start + q_cols;
            let expected = self.expected(token, &self.qkv.range(k..k + kv_cols), norm.map(|n| &n.k[..]));
            let (block, offset) = (slot as usize / KV_BLOCK, slot as usize % KV_BLOCK);
            let at = block * self.block_stride() + 2 * (self.layers - 1) * self.plane() + offset * kv_cols;
            assert_near(&cache.range(at..at + kv_cols), &expected, tolerance, "k");
            let (v, v_at) = (k + kv_cols, at + self.plane());
            assert!(cache.bits(v_at..v_at + kv_cols) == self.qkv.bits(v..v + kv_cols), "values are copied");
            written[at..at + kv_cols].fill(true);
            written[v_at..v_at + kv_cols].fill(true);
        }
        let untouched = (0..cache.len()).filter(|&i| !written[i]).all(|i| cache.get(i).is_nan());
        assert!(untouched, "nothing but the tokens' slots of the layer is written");
    }
}

/// Checks a step of drawn sizes.
pub(crate) fn check(dtype: Dtype, rng: &mut TestRng) {
    Case::draw(dtype, rng).check();
}

#[test]
fn qkv_is_as_in_f64() {
    let rng = &mut rng();
    for _ in 0..12 {
        dtypes().into_iter().for_each(|dtype| check(dtype, rng));
    }
}

/// Checks that codes are those of the numbers that another cache has, which in f32 are the same before they are rounded.
/// `scale` returns the divisor of an element.
pub(crate) fn check_codes(codes: &[u8], numbers: &Array, scale: impl Fn(usize) -> f32) {
    let dtype = numbers.dtype;
    for (i, (&code, number)) in codes.iter().zip(numbers.values()).enumerate() {
        if code == UNWRITTEN || number.is_nan() {
            assert!(e4m3(code).is_nan() && number.is_nan(), "{dtype:?}: {code:#x} instead of {number}");
            continue;
        }
        let divided = number as f32 / scale(i);
        let error = (f64::from(e4m3(code)) - f64::from(divided.clamp(-448.0, 448.0))).abs();
        let near = error <= f64::from(divided.abs()) * (0.0625 + Tolerance::Elementwise.bound(dtype)) + 1.0 / 1024.0;
        assert!(near, "{dtype:?}: {code:#x} of {divided}");
        assert!(dtype != Dtype::F32 || code == to_e4m3(divided), "{code:#x} of {divided}");
    }
}

#[test]
fn codes_are_those_of_the_numbers() {
    let rng = &mut rng();
    for dtype in dtypes().into_iter().flat_map(|dtype| [dtype; 4]) {
        let mut case = Case::draw(dtype, rng);
        // Some values are not finite, and some keys are beyond the largest code.
        for bad in [f64::NAN, f64::INFINITY, 3e4] {
            case.qkv.set(rng.below(case.qkv.len()), bad);
        }
        let (codes, (_, cache)) = (case.codes(), case.run());
        check_codes(&codes, &cache, |i| if (i / case.plane()).is_multiple_of(2) { K_SCALE } else { V_SCALE });
    }
}

#[test]
fn small_qkv() {
    let rng = &mut rng();
    dtypes().into_iter().for_each(|dtype| check(dtype, rng));
}

/// The rotary embedding changes the length of a head only by the tables' own factor.
#[test]
fn rotary_embedding_keeps_lengths() {
    let rng = &mut rng();
    for interleaved in [false, true] {
        let mut case = Case::draw_rotated(interleaved, rng);
        case.norm = None;
        let (q, _) = case.run();
        let dim = case.rope.as_ref().map_or(0, |rope| rope.dim);
        for token in 0..case.slots.len() {
            for head in 0..case.q_heads {
                let length =
                    |array: &Array, at: usize| array.range(at..at + dim).iter().map(|x| x * x).sum::<f64>().sqrt();
                let before = length(&case.qkv, token * case.row() + head * case.size);
                let after = length(&q, (token * case.q_heads + head) * case.size);
                assert!((after - 1.1 * before).abs() <= 1e-5 * after, "{after}, not 1.1 times {before}");
            }
        }
    }
}

/// Rotating q and k by the same number of additional positions does not change their product.
#[test]
fn rotary_products_depend_on_the_distance_alone() {
    let rng = &mut rng();
    for interleaved in [false, true] {
        let mut case = Case::draw_rotated(interleaved, rng);
        case.slots = vec![KV_BLOCK as u32];
        case.qkv = Array::random(Dtype::F32, case.row(), rng);
        let product = |position: u32, distance: u32| {
            let key = Case { positions: vec![position; STREAMS], ..case.clone() }.run().1;
            let query = Case { positions: vec![position + distance; STREAMS], ..case.clone() }.run().0;
            let at = case.block_stride() + 2 * (case.layers - 1) * case.plane();
            (0..case.size).map(|i| query.get(i) * key.get(at + i)).sum::<f64>()
        };
        let near = product(0, 5);
        for position in [1, 7, 30] {
            let far = product(position, 5);
            assert!((far - near).abs() <= 1e-4 * (1.0 + near.abs()), "{far} at {position}, {near} at 0");
        }
    }
}

/// A value that is not finite is stored as 0 and marked in its key; other tokens and heads keep their bits.
#[test]
fn values_that_are_not_finite_are_told_by_their_keys() {
    let rng = &mut rng();
    for (dtype, bad) in dtypes().into_iter().zip([f64::NAN, f64::INFINITY, f64::NEG_INFINITY].into_iter().cycle()) {
        let mut case = Case::draw(dtype, rng);
        case.slots.iter_mut().zip(KV_BLOCK as u32..).for_each(|(slot, free)| *slot = free);
        let expected = case.run().1;
        let (token, head, element) = (rng.below(case.slots.len()), rng.below(case.kv_heads), rng.below(case.size));
        let (q_cols, kv_cols) = (case.q_heads * case.size, case.kv_heads * case.size);
        case.qkv.set(token * case.row() + q_cols + kv_cols + head * case.size + element, bad);
        let found = case.run().1;
        let keys = case.block_stride() + 2 * (case.layers - 1) * case.plane();
        let key = keys + token * kv_cols + head * case.size;
        let value = key + case.plane() + element;
        for i in 0..found.len() {
            match i {
                _ if (key..key + case.size).contains(&i) => assert!(found.get(i).is_nan(), "{dtype:?}: {i}"),
                _ if i == value => assert_eq!(found.get(i), 0.0, "{dtype:?}"),
                _ => assert!(found.bits(i..i + 1) == expected.bits(i..i + 1), "{dtype:?}: {i}"),
            }
        }
    }
}
