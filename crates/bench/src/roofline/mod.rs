//! Steps of a backend, each held against the least time that its bytes and FLOPs take on the device.
//!
//! The keys and values that a step reads are those of a prompt, in blocks of each sequence's own: no step reads zeros, and none
//! finds in a cache what another sequence has just read.

mod layout;
mod report;

use std::time::{Duration, Instant};

use octavo_ops::cost::{Cost, ElementBytes, StepShape, step_cost};
use octavo_ops::sampling::{SampleBatch, SampleParams, SampleRow, SampledToken};
use octavo_ops::{Backend, BackendError, Program, StepBatch};

pub use layout::StepLayout;
pub use report::{BoundSeconds, Bounds, Figures, Limits, RooflineReport, milliseconds, table};

/// Repetitions of a step, at least; the median counts.
pub const FEWEST: usize = 5;

/// Repetitions of a step, at most.
const MOST: usize = 1000;

/// The steps to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RooflineConfig {
    /// Sequences that decode together.
    pub batch_sizes: Vec<usize>,
    /// Tokens that each of them has, the one of the step included.
    pub contexts: Vec<usize>,
    /// Tokens of prompts.
    pub prefill: Vec<usize>,
    /// Tokens of a step, at most: longer prompts are computed in several.
    pub max_num_batched_tokens: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// For how long each step is repeated.
    pub min_time: Duration,
}

/// A step, or the steps of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// So many sequences that each have `context` tokens afterwards.
    Decode {
        /// Sequences.
        sequences: usize,
        /// Tokens of each.
        context: usize,
    },
    /// A prompt.
    Prefill {
        /// Its tokens.
        tokens: usize,
    },
}

impl Step {
    /// Sequences, and tokens that each has afterwards.
    const fn extent(self) -> (usize, usize) {
        match self {
            Self::Decode { sequences, context } => (sequences, context),
            Self::Prefill { tokens } => (1, tokens),
        }
    }

    /// Its kind and sizes, for people: `decode 32 x 1024`.
    pub fn name(self) -> String {
        match self {
            Self::Decode { sequences, context } => format!("decode {sequences} x {context}"),
            Self::Prefill { tokens } => format!("prefill {tokens}"),
        }
    }

    /// Tokens that are computed.
    pub const fn tokens(self) -> usize {
        match self {
            Self::Decode { sequences, .. } => sequences,
            Self::Prefill { tokens } => tokens,
        }
    }
}

impl RooflineConfig {
    /// The steps in the order in which they are measured.
    pub fn steps(&self) -> impl Iterator<Item = Step> {
        let decodes = self
            .contexts
            .iter()
            .flat_map(|&context| self.batch_sizes.iter().map(move |&sequences| Step::Decode { sequences, context }));
        decodes.chain(self.prefill.iter().map(|&tokens| Step::Prefill { tokens }))
    }

    /// Blocks that a step of a model with `groups` KV groups needs, the null block included.
    pub fn blocks(&self, step: Step, groups: usize) -> usize {
        let (sequences, tokens) = step.extent();
        1 + sequences * groups * tokens.div_ceil(self.block_size.max(1))
    }

    fn layout(&self, program: &Program, tokens: usize) -> StepLayout {
        let block_size = self.block_size.max(1);
        StepLayout {
            groups: program.kv_groups.len(),
            streams: program.position_streams(),
            block_size,
            blocks_each: tokens.div_ceil(block_size),
            vocab_size: program.vocab_size,
        }
    }

    /// The batches of a step of a program: one, or the chunks of a prompt.
    pub fn batches(&self, program: &Program, step: Step) -> Vec<StepBatch> {
        match step {
            Step::Decode { sequences, context } => {
                vec![self.layout(program, context).batch(sequences, context - 1, 1)]
            }
            Step::Prefill { tokens } => self.chunks(&self.layout(program, tokens), tokens),
        }
    }

    /// A prompt of the first sequence, in steps of the budget.
    fn chunks(&self, layout: &StepLayout, tokens: usize) -> Vec<StepBatch> {
        let budget = self.max_num_batched_tokens.max(1);
        let starts = (0..tokens).step_by(budget);
        starts.map(|start| layout.batch(1, start, budget.min(tokens - start))).collect()
    }
}

/// A step's time, and what it costs.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    /// The step.
    pub step: Step,
    /// Median and least, in seconds; `None` where the KV cache has no room for it.
    pub seconds: Option<(f64, f64)>,
    /// Of all of its steps.
    pub cost: Cost,
    /// Shortest times of its steps, added up.
    pub bound: BoundSeconds,
}

/// The cost of some steps, and the shortest time that they take one after the other.
fn price(program: &Program, batches: &[StepBatch], elements: ElementBytes, bounds: &Bounds) -> (Cost, BoundSeconds) {
    let (mut total, mut bound) = (Cost::default(), bounds.seconds(|_| 0.0));
    for batch in batches {
        let cost = step_cost(program, &StepShape::from_batch(batch), elements);
        total += cost;
        bound += bounds.seconds(|peaks| cost.bound_seconds(peaks));
    }
    (total, bound)
}

/// Measures steps on a backend that has the program and the KV cache loaded.
pub struct RooflineBench<'a> {
    backend: &'a mut dyn Backend,
    program: &'a Program,
    config: &'a RooflineConfig,
    bounds: &'a Bounds,
    /// Blocks of the KV cache.
    blocks: usize,
    sampled: Vec<SampledToken>,
}

impl<'a> RooflineBench<'a> {
    /// A bench on a backend with `blocks` KV blocks, which compares times with `bounds`.
    pub fn new(
        backend: &'a mut dyn Backend,
        program: &'a Program,
        blocks: usize,
        config: &'a RooflineConfig,
        bounds: &'a Bounds,
    ) -> Self {
        Self { backend, program, config, bounds, blocks, sampled: Vec::new() }
    }

    /// Measures a step, unless the KV cache has no room for it.
    ///
    /// # Errors
    /// The backend fails.
    pub fn measure(&mut self, step: Step) -> Result<StepTime, BackendError> {
        let batches = self.config.batches(self.program, step);
        let (cost, bound) = price(self.program, &batches, self.backend.device_profile().elements, self.bounds);
        let needed = self.config.blocks(step, self.program.kv_groups.len());
        let seconds = if needed <= self.blocks { Some(self.repeat(step, &batches)?) } else { None };
        Ok(StepTime { step, seconds, cost, bound })
    }

    /// Median and shortest time of a step, in seconds.
    fn repeat(&mut self, step: Step, batches: &[StepBatch]) -> Result<(f64, f64), BackendError> {
        self.fill(step)?;
        // What happens on first use is no part of a step.
        self.run(batches)?;
        let mut times = Vec::new();
        let begun = Instant::now();
        while times.len() < FEWEST || (begun.elapsed() < self.config.min_time && times.len() < MOST) {
            times.push(self.run(batches)?.as_secs_f64());
        }
        times.sort_by(f64::total_cmp);
        Ok((times[times.len() / 2], times[0]))
    }

    /// Gives every sequence of a decode step the keys and values of a prompt: computed once, and copied.
    fn fill(&mut self, step: Step) -> Result<(), BackendError> {
        let Step::Decode { sequences, context } = step else { return Ok(()) };
        let layout = self.config.layout(self.program, context);
        debug_assert!(layout.blocks(sequences) <= self.blocks);
        let prompt = self.config.chunks(&layout, context);
        self.run(&prompt)?;
        for sequence in 1..sequences {
            let indices = 0..layout.groups * layout.blocks_each;
            let pairs: Vec<_> = indices.map(|index| (layout.block(0, index), layout.block(sequence, index))).collect();
            self.backend.copy_blocks(&pairs)?;
        }
        Ok(())
    }

    /// Runs steps one after the other, each until its tokens are there.
    fn run(&mut self, batches: &[StepBatch]) -> Result<Duration, BackendError> {
        let params = SampleParams::default();
        let mut taken = Duration::ZERO;
        for batch in batches {
            let rows = vec![SampleRow::new(&params); batch.sampled_rows.len()];
            let begun = Instant::now();
            self.backend.forward(batch)?;
            self.backend.sample(&SampleBatch { rows: &rows }, &mut self.sampled)?;
            taken += begun.elapsed();
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests;
