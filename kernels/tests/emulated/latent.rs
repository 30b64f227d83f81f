//! Tests of latent attention, and of what it does before attention itself.

use std::sync::LazyLock;

use octavo_kernels::emulation::Order;
use octavo_kernels::manifest::{self, AttentionTypes, CacheType, Dtype};
use octavo_kernels::params::{KV_BLOCK, LatentPostParams, NO_SLOT};
use octavo_ops::Sight;
use octavo_ops::testing::TestRng;

use crate::attention::{Chunk, Path, Sequence, Setup, check_drawn_step, with_options};
use crate::common::{assert_near, in_every_order, launch, rng};
use crate::launcher::{Kernels, address, address_mut, dtypes, has_sm80};
use crate::qkv_post::check_codes;
use crate::support::{Array, Tolerance, normal, pick};

/// Returns attention over latents: with the kernels of DeepSeek's sizes, if the device has them, and with the plain one.
pub(crate) fn setups(q_heads: usize) -> Vec<Setup> {
    let setup = |dtype, (rank, size), path| Setup {
        dtype,
        q_heads,
        kv_heads: 1,
        size,
        window: None,
        softcap: None,
        sinks: false,
        sight: Sight::Causal,
        prefix: Some(rank),
        cache: CacheType::Activation,
        path,
    };
    let sizes = manifest::LATENT_SIZES[0];
    let mut all = vec![setup(Dtype::F32, (24, 40), Path::Plain), setup(Dtype::F16, sizes, Path::Plain)];
    if has_sm80() {
        all.extend([Dtype::F16, Dtype::Bf16].map(|dtype| setup(dtype, sizes, Path::AMPERE)));
    }
    all
}

#[test]
fn latent_attention_is_as_in_f64() {
    let rng = &mut rng();
    // Fewer and more heads than a CTA has rows, and as many.
    for q_heads in [5, 16, 20] {
        for setup in setups(q_heads) {
            check_drawn_step(&setup, rng, 90);
            check_drawn_step(&with_options(setup, rng), rng, 90);
            check_drawn_step(&Setup { cache: CacheType::E4m3, ..with_options(setup, rng) }, rng, 90);
        }
    }
}

#[test]
fn a_latent_row_depends_neither_on_the_batch_nor_on_the_chunks() {
    let rng = &mut rng();
    for setup in setups(6) {
        let setup = with_options(setup, rng);
        let s: Vec<Sequence> = [70, 33].map(|len| setup.sequence(len, rng)).into();
        let whole = &setup.run(&[(&s[0], 0..70)], 1)[0];
        let cols = setup.out_cols();
        let chunks: [Chunk<'_>; 3] = [(&s[0], 0..21), (&s[1], 32..33), (&s[0], 21..70)];
        let found = setup.run(&chunks, 2);
        assert!(found[0].bits(0..21 * cols) == whole.bits(0..21 * cols), "{setup:?}: the first chunk");
        assert!(found[2].bits(0..49 * cols) == whole.bits(21 * cols..70 * cols), "{setup:?}: the second chunk");
        assert!(found[1] == setup.run_alone(&chunks[1], 3), "{setup:?}: alone");
        let decode = setup.run(&[(&s[0], 69..70)], 4)[0].values();
        let last = whole.range(69 * cols..70 * cols);
        assert_near(&decode, &last, 2.0 * Tolerance::Attention.bound(setup.dtype), &format!("{setup:?}: decode"));
    }
}

/// A row of the cache whose key is NaN and whose latent is 0 is that of a latent that is not finite.
#[test]
fn a_spoilt_row_reaches_only_what_sees_it() {
    let rng = &mut rng();
    for setup in setups(3).into_iter().flat_map(|setup| CacheType::ALL.map(|cache| Setup { cache, ..setup })) {
        let mut s = setup.sequence(60, rng);
        let (at, rank) = (40, setup.prefix.expect("a latent"));
        for i in 0..setup.size {
            s.k.set(at * setup.size + i, if i < rank { 0.0 } else { f64::NAN });
        }
        let out = setup.run(&[(&s, 0..60)], 1)[0].values();
        let (before, after) = out.split_at(at * setup.out_cols());
        assert!(before.iter().all(|x| x.is_finite()) && after.iter().all(|x| x.is_nan()), "{setup:?}, prefill");
        let decode = setup.run(&[(&s, 59..60)], 2)[0].values();
        assert!(decode.iter().all(|x| x.is_nan()), "{setup:?}, decode");
    }
}

#[test]
fn splits_of_latents_agree() {
    let rng = &mut rng();
    for setup in setups(18).into_iter().filter(|setup| setup.path != Path::Plain) {
        let setup = with_options(setup, rng);
        let s = setup.sequence(150, rng);
        let chunks: [Chunk<'_>; 1] = [(&s, 149..150)];
        for split_tokens in [16, 48, 128, 2048] {
            let Path::Fast { chip, .. } = setup.path else { unreachable!("the plain path was left out") };
            let run = |columns| {
                let path = Path::Fast { chip, split_tokens, columns };
                Setup { path, ..setup }.run(&chunks, 5)
            };
            let out = run(1);
            setup.check(&chunks, &out);
            assert!(out == run(7), "splits of {split_tokens}");
        }
    }
}

static KERNELS: LazyLock<Kernels> = LazyLock::new(|| {
    let types = dtypes().into_iter().flat_map(|dtype| CacheType::ALL.map(|cache| AttentionTypes { dtype, cache }));
    Kernels::new(&types.map(manifest::latent_post).collect::<Vec<_>>())
});

const EPS: f32 = 1e-3;
/// Scale of a cache in e4m3.
const SCALE: f32 = 0.21;
const POSITIONS: usize = 40;
const LAYERS: usize = 2;
const BLOCKS: usize = 3;

/// A step of the operations before attention. The second of two layers is written.
#[derive(Clone)]
struct Case {
    dtype: Dtype,
    heads: usize,
    content: usize,
    rank: usize,
    rotary: usize,
    interleaved: bool,
    weight: Vec<f32>,
    cosine: Vec<f32>,
    sine: Vec<f32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    q: Array,
    kv: Array,
    /// Absorbed queries before the call.
    absorbed: Array,
}

impl Case {
    fn draw(dtype: Dtype, rng: &mut TestRng) -> Self {
        let (rank, rotary) = pick(rng, &[(512, 64), (24, 16), (33, 2), (480, 160)]);
        let (heads, content, tokens) = (1 + rng.below(9), rng.below(40), 1 + rng.below(5));
        let mut free: Vec<u32> = (KV_BLOCK as u32..(BLOCKS * KV_BLOCK) as u32).collect();
        let mut slot = || free.swap_remove(rng.below(free.len()));
        let slots: Vec<u32> = (0..tokens).map(|token| if token == 2 { NO_SLOT } else { slot() }).collect();
        let angle = |i: usize| (i / (rotary / 2)) as f64 * 0.7f64.powi((i % (rotary / 2)) as i32);
        let table = |f: fn(f64) -> f64| (0..POSITIONS * rotary / 2).map(|i| f(angle(i)) as f32).collect();
        Self {
            dtype,
            heads,
            content,
            rank,
            rotary,
            interleaved: rng.below(2) == 0,
            weight: (0..rank).map(|_| normal(rng) as f32).collect(),
            cosine: table(f64::cos),
            sine: table(f64::sin),
            positions: rng.tokens(tokens, POSITIONS),
            slots,
            q: Array::random(dtype, tokens * heads * (content + rotary), rng),
            kv: Array::random(dtype, tokens * (rank + rotary), rng),
            absorbed: Array::random(dtype, tokens * heads * (rank + rotary), rng),
        }
    }

    fn row(&self) -> usize {
        self.rank + self.rotary
    }

    /// Returns the queries and the cache.
    fn run(&self) -> (Array, Array) {
        in_every_order(|order| {
            let mut cache = Array::poisoned(self.dtype, BLOCKS * LAYERS * KV_BLOCK * self.row());
            let out = self.launch(order, CacheType::Activation, cache.ptr_mut());
            (out, cache)
        })
    }

    /// Returns the cache in e4m3.
    fn codes(&self) -> Vec<u8> {
        in_every_order(|order| {
            let mut codes = vec![u8::MAX; BLOCKS * LAYERS * KV_BLOCK * self.row()];
            self.launch(order, CacheType::E4m3, address_mut(&mut codes));
            codes
        })
    }

    /// Returns the queries, and writes a cache that begins at `base`.
    fn launch(&self, order: Order, cache: CacheType, base: u64) -> Array {
        let mut out = self.absorbed.clone();
        let plane = KV_BLOCK * self.row();
        let params = LatentPostParams {
            out: out.ptr_mut(),
            cache: base + (plane * cache.bytes(self.dtype)) as u64,
            q: self.q.ptr(),
            kv: self.kv.ptr(),
            weight: address(&self.weight),
            cosine: address(&self.cosine),
            sine: address(&self.sine),
            positions: address(&self.positions),
            streams: 0,
            slots: address(&self.slots),
            block_stride: (LAYERS * plane) as u64,
            tokens: self.slots.len() as u32,
            q_heads: self.heads as u32,
            q_size: (self.content + self.rotary) as u32,
            rank: self.rank as u32,
            rotary_dim: self.rotary as u32,
            rope_interleaved: self.interleaved.into(),
            position_stride: self.slots.len() as u32,
            eps: EPS,
            scale: SCALE,
            reserved: 0,
        };
        let instance = manifest::latent_post(AttentionTypes { dtype: self.dtype, cache });
        launch(&KERNELS, order, &instance, params.grid(), &params);
        out
    }

    fn rotated(&self, token: usize, mut x: Vec<f64>) -> Vec<f64> {
        for i in 0..self.rotary / 2 {
            let (a, b) = if self.interleaved { (2 * i, 2 * i + 1) } else { (i, i + self.rotary / 2) };
            let at = self.positions[token] as usize * self.rotary / 2 + i;
            let (cosine, sine) = (f64::from(self.cosine[at]), f64::from(self.sine[at]));
            (x[a], x[b]) = (x[a] * cosine - x[b] * sine, x[b] * cosine + x[a] * sine);
        }
        x
    }

    /// Returns the place of a slot in the cache.
    fn place(&self, slot: u32) -> usize {
        let (block, offset) = (slot as usize / KV_BLOCK, slot as usize % KV_BLOCK);
        ((block * LAYERS + 1) * KV_BLOCK + offset) * self.row()
    }

    fn check(&self) {
        let (out, cache) = self.run();
        let tolerance = Tolerance::Elementwise.bound(self.dtype);
        let mut written = vec![false; cache.len()];
        for (token, &slot) in self.slots.iter().enumerate() {
            for head in 0..self.heads {
                let row = token * self.heads + head;
                let end = (row + 1) * (self.content + self.rotary);
                let at = row * self.row();
                assert!(
                    out.bits(at..at + self.rank) == self.absorbed.bits(at..at + self.rank),
                    "what is absorbed stays"
                );
                let expected = self.rotated(token, self.q.range(end - self.rotary..end));
                assert_near(&out.range(at + self.rank..at + self.row()), &expected, tolerance, "q");
            }
            if slot == NO_SLOT {
                continue;
            }
            let kv = self.kv.range(token * self.row()..(token + 1) * self.row());
            let (latent, key) = kv.split_at(self.rank);
            let mean = latent.iter().map(|x| x * x).sum::<f64>() / self.rank as f64;
            let root = (mean + f64::from(EPS)).sqrt();
            let mut expected: Vec<f64> =
                latent.iter().zip(&self.weight).map(|(x, w)| x / root * f64::from(*w)).collect();
            expected.extend(self.rotated(token, key.to_vec()));
            let at = self.place(slot);
            assert_near(&cache.range(at..at + self.row()), &expected, tolerance, "the row");
            written[at..at + self.row()].fill(true);
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
fn queries_and_rows_are_as_in_f64() {
    let rng = &mut rng();
    for _ in 0..10 {
        dtypes().into_iter().for_each(|dtype| check(dtype, rng));
    }
}

#[test]
fn codes_are_those_of_the_numbers() {
    let rng = &mut rng();
    for dtype in dtypes().into_iter().flat_map(|dtype| [dtype; 3]) {
        let mut case = Case::draw(dtype, rng);
        case.kv.set(rng.below(case.kv.len()), f64::INFINITY);
        let (codes, (_, cache)) = (case.codes(), case.run());
        check_codes(&codes, &cache, |_| SCALE);
    }
}

/// A latent that is not finite is stored as 0, and the key beside it as NaN; other tokens keep their bits.
#[test]
fn a_latent_that_is_not_finite_is_told_by_its_key() {
    let rng = &mut rng();
    for (dtype, bad) in dtypes().into_iter().zip([f64::NAN, f64::INFINITY, f64::NEG_INFINITY].into_iter().cycle()) {
        let mut case = Case::draw(dtype, rng);
        let expected = case.run().1;
        let element = rng.below(case.row());
        case.kv.set(element, bad);
        let found = case.run().1;
        let at = case.place(case.slots[0]);
        for i in 0..found.len() {
            match i.checked_sub(at).filter(|&column| column < case.row()) {
                Some(column) if column < case.rank => assert_eq!(found.get(i), 0.0, "{dtype:?}"),
                Some(_) => assert!(found.get(i).is_nan(), "{dtype:?}: {i}"),
                None => assert!(found.bits(i..i + 1) == expected.bits(i..i + 1), "{dtype:?}: {i}"),
            }
        }
    }
}
