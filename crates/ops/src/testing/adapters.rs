//! Random adapters, and the tests of backends that hold them.

use std::collections::HashMap;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::suite::{BLOCK, BLOCKS, Suite, draw_parts, run, same_rows};
use super::{MemoryWeights, PagedBatches, Reference, Rounding, TestRng, TinyExperts, TinyModel};
use crate::{AdapterSource, Backend, LoraMatrices, Program, SiteId, StepBatch};

/// Largest rank of the adapters under test.
const RANK: usize = 20;

/// An adapter in memory.
#[derive(Clone, Debug, Default)]
pub struct TestAdapter {
    /// Matrices by site and part.
    matrices: HashMap<(SiteId, usize), Matrices>,
    rank: usize,
}

#[derive(Clone, Debug)]
struct Matrices {
    rank: usize,
    scaling: f32,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl TestAdapter {
    /// Returns a random adapter for most of the sites of a program.
    pub fn random(program: &Program, rank: usize, rng: &mut TestRng) -> Self {
        let mut matrices = HashMap::new();
        for site in (0..program.sites.len()).map(SiteId) {
            for (part, [rows, cols]) in program.site_parts(site).into_iter().enumerate() {
                if rng.below(4) == 0 {
                    continue;
                }
                let rank = 1 + rng.below(rank);
                let mut draw = |count: usize, gain: f32| (0..count).map(|_| gain * rng.signed()).collect();
                let (a, b) = (draw(rank * cols, 1.5 / (cols.min(64) as f32).sqrt()), draw(rows * rank, 0.5));
                let scaling = 0.25 + 0.25 * rng.below(4) as f32;
                matrices.insert((site, part), Matrices { rank, scaling, a, b });
            }
        }
        Self { matrices, rank }
    }
}

impl AdapterSource for TestAdapter {
    fn matrices(&self, site: SiteId, part: usize) -> Option<LoraMatrices<'_>> {
        let Matrices { rank, scaling, a, b } = self.matrices.get(&(site, part))?;
        Some(LoraMatrices { rank: *rank, scaling: *scaling, a, b })
    }

    fn rank(&self) -> usize {
        self.rank
    }
}

/// Input of a row to which an adapter adds.
pub(super) enum AdaptedInput<'a> {
    /// A token, which has a column of A.
    Token(usize),
    Values(&'a [f64]),
}

/// Adds `scale · s · B (A input)` to a row of outputs at a site, with the matrices for an expert if the site has experts.
pub(super) fn add(
    program: &Program,
    adapter: &dyn AdapterSource,
    (site, expert): (SiteId, usize),
    input: &AdaptedInput<'_>,
    scale: f32,
    row: &mut [f64],
) {
    let each = program.parts_each(site);
    for (part, columns) in program.site_outputs(site).into_iter().enumerate().skip(expert * each).take(each) {
        let Some(LoraMatrices { rank, scaling, a, b }) = adapter.matrices(site, part) else { continue };
        let shrunk = |j: usize| match input {
            AdaptedInput::Token(token) => f64::from(a[token * rank + j]),
            AdaptedInput::Values(values) => {
                let weights = a[j * values.len()..][..values.len()].iter();
                values.iter().zip(weights).map(|(x, a)| x * f64::from(*a)).sum()
            }
        };
        let shrunk: Vec<f64> = (0..rank).map(shrunk).collect();
        for (x, b) in row[columns].iter_mut().zip(b.chunks(rank)) {
            let sum: f64 = shrunk.iter().zip(b).map(|(t, b)| t * f64::from(*b)).sum();
            *x += f64::from(scale) * f64::from(scaling) * sum;
        }
    }
}

/// A program with adapters, in a backend.
struct Adapted {
    program: Program,
    weights: MemoryWeights,
    adapters: Vec<TestAdapter>,
}

impl Adapted {
    fn new(model: &TinyModel, adapters: usize, rng: &mut TestRng) -> Self {
        let (program, weights) = model.build().expect("the model is well formed");
        let program = program.with_adapters();
        let adapters = (0..adapters).map(|_| TestAdapter::random(&program, RANK, rng)).collect();
        Self { program, weights, adapters }
    }

    fn load(&self, suite: &Suite<'_>) -> Box<dyn Backend> {
        let mut backend = suite.loaded(&self.program, &self.weights);
        backend.allocate_adapters(self.adapters.len(), RANK).expect("there is room");
        // The content of a slot is replaced.
        for (slot, adapter) in self.adapters.iter().rev().enumerate().chain(self.adapters.iter().enumerate()) {
            backend.set_adapter(slot, adapter).expect("it fits");
        }
        backend
    }

    /// Returns the results of every token of a sequence that runs alone with an adapter: 0 for none, or 1 + its slot.
    fn alone(&self, suite: &Suite<'_>, tokens: &[u32], adapter: u32) -> Vec<Vec<u32>> {
        let mut batches = PagedBatches::for_program(&self.program, BLOCK, BLOCKS, &mut TestRng(1));
        let sequence = batches.add(tokens.to_vec());
        let mut batch = batches.step(&[(sequence, tokens.len())]);
        batch.adapters = vec![adapter];
        run(&mut *self.load(suite), &self.program, &batch)
    }
}

impl Suite<'_> {
    /// Checks that the rows of a sequence with an adapter are close to the exact f64 results. `margin` is that of
    /// [`Suite::near_meaning`].
    pub fn near_adapted(
        &self,
        model: &TinyModel,
        tokens: usize,
        rounding: Rounding,
        margin: f64,
    ) -> Result<(), TestCaseError> {
        let adapted = Adapted::new(model, 2, &mut TestRng(model.seed ^ 7));
        let reference = Reference::with_adapter(model, tokens, rounding, &adapted.adapters[1]);
        prop_assume!(reference.chooses_clearly(0.1 * self.worst), "rounding may change the choice of experts");
        let found = adapted.alone(self, &reference.tokens, 2);
        self.near_rows(&reference, &found, margin)
    }

    /// Divides sequences with several adapters and with none into random steps, and compares every row's bits with those
    /// of the sequence alone. Sequences without an adapter have the bits of a program without sites.
    pub fn same_bits_adapted(&self, model: &TinyModel, seed: u64) -> Result<(), TestCaseError> {
        let mut rng = TestRng(seed);
        let adapted = Adapted::new(model, 2, &mut rng);
        let Adapted { program, weights, .. } = &adapted;
        let (plain, _) = model.build().expect("the model is well formed");
        let mut batches = PagedBatches::for_program(program, BLOCK, BLOCKS, &mut rng);
        let mut expected = Vec::new();
        let adapters = [0, 1, 2, 1, 0];
        for adapter in adapters {
            let length = 1 + rng.below(40);
            let tokens = rng.tokens(length, program.vocab_size);
            expected.push(match adapter {
                0 => self.alone(&plain, weights, &tokens),
                _ => adapted.alone(self, &tokens, adapter),
            });
            batches.add(tokens);
        }
        let mut backend = adapted.load(self);
        while (0..adapters.len()).any(|s| batches.left(s) > 0) {
            let parts = draw_parts(&batches, adapters.len(), &mut rng);
            let starts: Vec<_> = parts.iter().map(|&(sequence, _)| batches.computed(sequence)).collect();
            let mut batch = batches.step(&parts);
            batch.adapters = parts.iter().map(|&(sequence, _)| adapters[sequence]).collect();
            same_rows(&run(&mut *backend, program, &batch), &parts, &starts, &expected)?;
        }
        Ok(())
    }

    /// Checks that adapters which do not fit, and batches that name none, are errors.
    pub fn unfit_adapters_are_errors(&self) {
        let adapted = Adapted::new(&TinyModel::default(), 1, &mut TestRng(1));
        let mut backend = self.loaded(&adapted.program, &adapted.weights);
        assert!(backend.set_adapter(0, &adapted.adapters[0]).is_err(), "there is no slot");
        backend.allocate_adapters(1, 8).expect("there is room");
        let error = backend.set_adapter(0, &adapted.adapters[0]).expect_err("the rank is 20").to_string();
        assert!(error.contains("rank 20") && error.contains('8'), "{error}");
        backend.allocate_adapters(1, RANK).expect("there is room");
        assert!(backend.set_adapter(1, &adapted.adapters[0]).is_err(), "there is one slot");
        let mut batches = PagedBatches::for_program(&adapted.program, BLOCK, BLOCKS, &mut TestRng(1));
        let sequence = batches.add(vec![1, 2, 3]);
        let mut batch = batches.step(&[(sequence, 3)]);
        batch.adapters = vec![2];
        let error = backend.forward(&batch).expect_err("there is one slot").to_string();
        assert!(error.ends_with("the batch is malformed: an adapter beyond the slots"), "{error}");
        batch.adapters = vec![1];
        backend.forward(&batch).expect("an empty slot adds nothing");
    }

    /// Checks that a program without adapters may follow one with them.
    pub fn adapters_end_with_their_program(&self) {
        let model = TinyModel { experts: Some(TinyExperts::default()), ..TinyModel::default() };
        let adapted = Adapted::new(&model, 1, &mut TestRng(1));
        let Adapted { program, weights, .. } = &adapted;
        let (plain, _) = model.build().expect("the model is well formed");
        let tokens = TestRng(2).tokens(9, plain.vocab_size);
        let step = |program: &Program, count: usize, adapters: &[u32]| {
            let mut batches = PagedBatches::for_program(program, BLOCK, BLOCKS, &mut TestRng(1));
            let sequence = batches.add(tokens.clone());
            StepBatch { adapters: adapters.to_vec(), ..batches.step(&[(sequence, count)]) }
        };
        let mut backend = adapted.load(self);
        let with = run(&mut *backend, program, &step(program, 5, &[1]));
        backend.load(&plain, weights, &mut |_| {}).expect("the weights are loaded");
        backend.allocate_kv(BLOCK, BLOCKS).expect("there is memory");
        // More tokens than before.
        let without = run(&mut *backend, &plain, &step(&plain, tokens.len(), &[]));
        assert_ne!(with, without[..5]);
        assert_eq!(without, self.alone(&plain, weights, &tokens));
    }
}
