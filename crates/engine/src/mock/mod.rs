//! An executor without a model, for the engine, the HTTP stack and their benches.
//!
//! Its next token is a function of all tokens of the sequence so far, so a request has the same output alone or in any
//! batch, in one chunk or many, preempted or not. [`MockConfig::expected_output`] computes it without an engine. The
//! executor does not pass tokens from step to step: it reads them back from fake KV blocks through the block tables that
//! plans have changed. A wrong table, a block reused too early or a stale prefix gives wrong tokens, or a fatal error that names
//! the wrong position. Log-probabilities of prompts and embeddings come from the same blocks.

mod memory;
#[cfg(test)]
mod tests;
mod token;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::{
    Executor, ExecutorError, ImageSpec, InputToken, KvCacheSpec, KvGroupSpec, KvKind, Logprobs, PlannedRow,
    PlannedSequence, PromptImage, RowKind, SamplingParams, StepCost, StepId, StepMasks, StepOutput, StepPlan, StepWork,
    TokenOutput,
};
use memory::{Memory, Occupant};

/// Behaviour of the executor. The default is quick and never fails.
#[derive(Clone, Debug)]
pub struct MockConfig {
    /// Vocabulary size V.
    pub vocab_size: usize,
    /// Range of sampled ids, within the vocabulary and not empty.
    pub tokens: Range<u32>,
    /// Tokens to sample in this order, repeatedly, instead of a function of the tokens so far.
    pub script: Option<Arc<[u32]>>,
    /// Number of tokens after which the request's first end-of-sequence id is sampled, if it has one.
    pub eos_after: Option<u32>,
    /// Number of tokens in a block.
    pub block_size: usize,
    /// Number of blocks, including the null block, which the KV groups share.
    pub blocks: usize,
    /// Kinds of the KV groups; there may be none.
    pub kv_groups: Vec<KvKind>,
    /// Number of tokens of encoded images that are kept; 0 if the model takes no images. A token has 2 × 2 patches of a
    /// byte.
    pub media_rows: usize,
    /// Whether the tokens of an image see each other, so that a step must not end in one.
    pub seen_whole: bool,
    /// Number of slots for adapters.
    pub adapter_slots: usize,
    /// Length H of an embedding.
    pub hidden_size: usize,
    /// Maximum number of rows of a step that reach the head.
    pub max_rows: usize,
    /// Maximum number of steps in flight: 1 or 2.
    pub max_in_flight: usize,
    /// Duration of a step without tokens.
    pub step_latency: Duration,
    /// Additional duration per token.
    pub token_latency: Duration,
    /// Steps that fail.
    pub failures: Vec<MockFailure>,
    /// Reads every position of every sequence in every step instead of only the last.
    pub verify: bool,
}

impl Default for MockConfig {
    fn default() -> Self {
        Self {
            vocab_size: 1000,
            tokens: 0..1000,
            script: None,
            eos_after: None,
            block_size: 16,
            blocks: 4097,
            kv_groups: vec![KvKind::Full],
            media_rows: 0,
            seen_whole: false,
            adapter_slots: 0,
            hidden_size: 8,
            max_rows: 256 + 64,
            max_in_flight: 1,
            step_latency: Duration::ZERO,
            token_latency: Duration::ZERO,
            failures: Vec::new(),
            verify: cfg!(debug_assertions),
        }
    }
}

/// A step that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MockFailure {
    /// Number of the step.
    pub step: StepId,
    /// The call that reports it.
    pub at: FailurePoint,
    /// Whether the failure is fatal.
    pub fatal: bool,
}

/// A call that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailurePoint {
    /// [`Executor::submit`].
    Submit,
    /// [`Executor::sample`].
    Sample,
    /// [`Executor::wait`].
    Wait,
}

/// Counters of a mock executor. They can be read while the engine owns it.
#[derive(Clone, Debug, Default)]
pub struct MockCounters(Arc<[AtomicU64; 5]>);

impl MockCounters {
    /// Returns the number of submitted steps.
    pub fn steps(&self) -> u64 {
        self.0[0].load(Relaxed)
    }

    /// Returns the number of computed tokens.
    pub fn computed_tokens(&self) -> u64 {
        self.0[1].load(Relaxed)
    }

    /// Returns the number of sampled tokens.
    pub fn drawn_tokens(&self) -> u64 {
        self.0[2].load(Relaxed)
    }

    /// Returns the number of encoded images.
    pub fn encoded_images(&self) -> u64 {
        self.0[3].load(Relaxed)
    }

    /// Returns the maximum number of tokens of images that a step encoded.
    pub fn most_encoded_tokens(&self) -> u64 {
        self.0[4].load(Relaxed)
    }

    fn add(&self, plan: &StepPlan) {
        let drawn = plan.rows.iter().filter(|row| row.kind.draws()).count();
        for (counter, value) in self.0.iter().zip([1, plan.tokens.len(), drawn, plan.encode.len()]) {
            counter.fetch_add(value as u64, Relaxed);
        }
        let encoded: usize = plan.encode.iter().flat_map(|planned| &planned.media).map(|rows| rows.len()).sum();
        self.0[4].fetch_max(encoded as u64, Relaxed);
    }
}

/// A step between `submit` and `wait`.
struct MockStep {
    plan: StepPlan,
    tokens: Vec<TokenOutput>,
    vectors: Vec<f32>,
    sampled: bool,
    ready: Instant,
}

/// Cost model of the mock: its latencies, or a nanosecond where there is none.
struct MockCost {
    step: f64,
    token: f64,
}

impl StepCost for MockCost {
    fn step(&self) -> StepWork {
        StepWork { step: self.step, ..StepWork::default() }
    }

    fn share(&self, tokens: usize, _context: usize, _rows: usize) -> StepWork {
        StepWork { tokens: self.token * tokens as f64, ..StepWork::default() }
    }
}

/// An [`Executor`] without a model.
pub struct MockExecutor {
    config: MockConfig,
    spec: KvCacheSpec,
    memory: Memory,
    in_flight: VecDeque<MockStep>,
    /// Tokens of the latest sampled step's rows.
    drawn: Vec<u32>,
    spare_tokens: Vec<Vec<TokenOutput>>,
    spare_masks: StepMasks,
    counters: MockCounters,
}

fn broken(message: String) -> ExecutorError {
    ExecutorError { message, fatal: true }
}

impl MockExecutor {
    /// Creates an executor with empty memory.
    pub fn new(config: MockConfig) -> Self {
        Self {
            memory: Memory::new(&config),
            spec: config.kv_cache_spec(),
            config,
            in_flight: VecDeque::new(),
            drawn: Vec::new(),
            spare_tokens: Vec::new(),
            spare_masks: StepMasks::default(),
            counters: MockCounters::default(),
        }
    }

    /// Returns the counters of this executor.
    pub fn counters(&self) -> MockCounters {
        self.counters.clone()
    }

    /// Returns the configured failure of this step and call. Clears the tokens sampled last.
    fn fails(&mut self, step: StepId, at: FailurePoint) -> Result<(), ExecutorError> {
        match self.config.failures.iter().find(|failure| failure.step == step && failure.at == at) {
            Some(failure) => {
                self.drawn.clear();
                Err(ExecutorError { message: format!("step {step} was told to fail"), fatal: failure.fatal })
            }
            None => Ok(()),
        }
    }

    /// Writes one sequence's tokens into its blocks.
    fn forward(&mut self, plan: &StepPlan, sequence: &PlannedSequence) -> Result<(), ExecutorError> {
        for (offset, token) in plan.tokens[sequence.tokens.clone()].iter().enumerate() {
            let token = match *token {
                InputToken::Id(id) => id,
                InputToken::Drawn { row } => *self
                    .drawn
                    .get(row as usize)
                    .ok_or_else(|| broken(format!("step {} names row {row}, which was not drawn", plan.step)))?,
            };
            let position = sequence.first_position as usize + offset;
            let content = self.memory.content(plan, sequence, position, token).map_err(broken)?;
            self.memory.write(sequence.seat, position, (token, content)).map_err(broken)?;
        }
        let end = sequence.first_position as usize + sequence.tokens.len();
        if self.config.seen_whole {
            self.memory.check_whole(sequence.seat, end).map_err(broken)?;
        }
        if self.config.verify {
            self.memory.verify(sequence.seat, sequence.first_position as usize..end).map_err(broken)?;
        }
        Ok(())
    }
}

/// Output of a row.
enum RowOutput {
    Token(TokenOutput),
    Vector(Vec<f32>),
}

/// Computes the output of a row of a step from the blocks.
fn output(
    config: &MockConfig,
    memory: &Memory,
    plan: &StepPlan,
    row: &PlannedRow,
    mask: Option<&[u32]>,
) -> Result<RowOutput, String> {
    let sequence = plan.sequence(row).ok_or_else(|| format!("a row is of sequence {}", row.sequence))?;
    let seat = sequence.seat;
    let outside = || format!("seat {seat} has a row {:?} at position {}", row.kind, row.position);
    let offset = row.position.checked_sub(sequence.first_position).ok_or_else(outside)?;
    if offset as usize >= sequence.tokens.len() {
        return Err(outside());
    }
    let state = memory.read(seat, row.position as usize, row.position as usize)?;
    let Occupant { params, prompt, .. } = memory.occupant(seat)?;
    Ok(match row.kind {
        RowKind::Pool => RowOutput::Vector(token::embedding(config, state)),
        RowKind::Score => {
            let &id = prompt.get(row.position as usize + 1).ok_or_else(outside)?;
            let alternatives = params.prompt_logprobs.ok_or_else(outside)?;
            RowOutput::Token(TokenOutput { id, logprobs: Some(token::score(config, state, id, alternatives)) })
        }
        RowKind::Draw | RowKind::Verify => {
            let number = (row.position + 1).checked_sub(prompt.len() as u32).ok_or_else(outside)?;
            let id = token::draw(config, params, state, number, mask);
            RowOutput::Token(TokenOutput { id, logprobs: token::logprobs(config, params, id) })
        }
    })
}

impl Executor for MockExecutor {
    fn kv_cache_spec(&self) -> &KvCacheSpec {
        &self.spec
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn max_rows(&self) -> usize {
        self.config.max_rows
    }

    fn step_cost(&self) -> Option<Box<dyn StepCost>> {
        let seconds = |latency: Duration| latency.max(Duration::from_nanos(1)).as_secs_f64();
        let (step, token) = (seconds(self.config.step_latency), seconds(self.config.token_latency));
        Some(Box::new(MockCost { step, token }))
    }

    fn max_in_flight(&self) -> usize {
        self.config.max_in_flight
    }

    fn image_spec(&self) -> Option<ImageSpec> {
        let cache_tokens = self.config.media_rows;
        (cache_tokens > 0).then_some(ImageSpec {
            cache_tokens,
            merge: 2,
            patch_bytes: 1,
            frame_bytes: 1,
            seen_whole: self.config.seen_whole,
        })
    }

    fn adapter_slots(&self) -> usize {
        self.config.adapter_slots
    }

    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        if self.in_flight.len() >= self.config.max_in_flight {
            return Err(broken(format!("step {} is one too many in flight", plan.step)));
        }
        if self.in_flight.back().is_some_and(|step| !step.sampled) {
            return Err(broken(format!("step {} was submitted before the one before was sampled", plan.step)));
        }
        if plan.token_rows() > self.config.max_rows {
            return Err(broken(format!("step {} has {} rows", plan.step, plan.token_rows())));
        }
        for &seat in &plan.left {
            self.memory.leave(seat).map_err(broken)?;
        }
        for change in &plan.adapters {
            self.memory.change_adapter(change).map_err(broken)?;
        }
        for joined in &plan.joined {
            self.memory.join(joined).map_err(broken)?;
        }
        for change in &plan.tables {
            self.memory.change_table(change, &plan.blocks).map_err(broken)?;
        }
        for passed in &plan.passed {
            self.memory.pass(passed).map_err(broken)?;
        }
        for planned in &plan.encode {
            self.memory.encode(planned).map_err(broken)?;
        }
        for sequence in &plan.sequences {
            self.forward(&plan, sequence)?;
        }
        self.counters.add(&plan);
        self.fails(plan.step, FailurePoint::Submit)?;
        let started = self.in_flight.back().map_or_else(Instant::now, |step| step.ready.max(Instant::now()));
        let count = u32::try_from(plan.tokens.len()).unwrap_or(u32::MAX);
        let ready = started + self.config.step_latency + self.config.token_latency * count;
        let tokens = self.spare_tokens.pop().unwrap_or_default();
        self.in_flight.push_back(MockStep { plan, tokens, vectors: Vec::new(), sampled: false, ready });
        Ok(())
    }

    fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError> {
        let newest = self.in_flight.back().map(|newest| (newest.plan.step, newest.sampled));
        if newest != Some((step, false)) {
            return Err(broken(format!("step {step} cannot be sampled, the newest is {newest:?}")));
        }
        if let Err(error) = self.fails(step, FailurePoint::Sample) {
            self.in_flight.pop_back();
            return Err(error);
        }
        let Some(newest) = self.in_flight.back_mut() else { return Ok(()) };
        newest.sampled = true;
        self.drawn.clear();
        let mut spare = masks.rows.iter().map(Vec::as_slice);
        // The token that the row before drew, if it counts, and the first draft of a seat that does not.
        let (mut before, mut failed) = (None, None);
        for row in &newest.plan.rows {
            let seat = newest.plan.sequence(row).map_or(0, |sequence| sequence.seat);
            let constrained = row.kind.draws() && self.memory.occupant(seat).map_err(broken)?.constrained;
            let mask = if constrained { spare.next() } else { None };
            if constrained && mask.is_none() {
                return Err(broken(format!("step {step} lacks a mask")));
            }
            if row.kind != RowKind::Verify {
                self.memory.forget(failed.take());
            }
            match output(&self.config, &self.memory, &newest.plan, row, mask).map_err(broken)? {
                RowOutput::Token(token) => {
                    let draft = self.memory.occupant(seat).map_err(broken)?.token(row.position as usize);
                    if row.kind == RowKind::Verify && draft != before {
                        (before, failed) = (None, failed.or(Some((seat, row.position as usize))));
                    } else {
                        before = Some(token.id);
                    }
                    newest.tokens.push(token);
                }
                RowOutput::Vector(vector) => newest.vectors.extend(vector),
            }
        }
        self.memory.forget(failed);
        self.drawn.extend(newest.tokens.iter().map(|token| token.id));
        self.spare_masks = masks;
        Ok(())
    }

    fn wait(&mut self) -> Result<StepOutput, ExecutorError> {
        let Some(MockStep { plan, tokens, vectors, sampled, ready }) = self.in_flight.pop_front() else {
            return Err(broken("there is no step to wait for".into()));
        };
        if !sampled {
            return Err(broken(format!("step {} is waited for but was never sampled", plan.step)));
        }
        std::thread::sleep(ready.saturating_duration_since(Instant::now()));
        self.fails(plan.step, FailurePoint::Wait)?;
        Ok(StepOutput { tokens, vectors, busy: self.config.step_latency, plan })
    }

    fn recycle(&mut self, tokens: Vec<TokenOutput>) {
        self.spare_tokens.push(tokens);
    }

    fn spare_masks(&mut self) -> StepMasks {
        std::mem::take(&mut self.spare_masks)
    }
}

impl MockConfig {
    /// Returns the division of its KV cache.
    pub fn kv_cache_spec(&self) -> KvCacheSpec {
        let groups = self.kv_groups.iter().map(|&kind| KvGroupSpec { layers: 1, kind }).collect();
        KvCacheSpec { block_size: self.block_size, block_bytes: 1, blocks: self.blocks, groups }
    }

    /// Returns a prompt as the mock sees it, with the encoder's output in place of tokens of images.
    /// [`MockConfig::expected_output`] and [`MockConfig::expected_embedding`] take it instead of the prompt.
    pub fn with_images(&self, prompt: &[u32], images: &[PromptImage]) -> Vec<u32> {
        memory::contents(prompt, images)
    }

    /// Returns such a prompt as the mock sees it with the adapter of a number.
    pub fn with_adapter(&self, mut contents: Vec<u32>, adapter: u64) -> Vec<u32> {
        if let Some(first) = contents.first_mut() {
            *first = memory::adapted(*first, adapter);
        }
        contents
    }

    /// Returns the tokens that a request without a grammar will get, including its end-of-sequence or stop token: at
    /// most `max_len − prompt` of them, where `max_len` is the engine's `max_model_len`.
    pub fn expected_output(&self, prompt: &[u32], params: &SamplingParams, max_len: usize) -> Vec<u32> {
        let mut state = memory::state_after(prompt);
        let least = u32::from(params.prompt_logprobs.is_none());
        let most = (params.max_tokens.max(least) as usize).min(max_len.saturating_sub(prompt.len()));
        let mut output = Vec::new();
        while output.len() < most {
            let id = token::draw(self, params, state, output.len() as u32, None);
            output.push(id);
            let ends = (!params.ignore_eos && params.eos_token_ids.contains(&id)) || params.stop_token_ids.contains(id);
            if ends {
                break;
            }
            state = memory::extend(state, id);
        }
        output
    }

    /// Returns the prompt log-probabilities that a request will get.
    pub fn expected_prompt_logprobs(&self, prompt: &[u32], alternatives: u32) -> Vec<Logprobs> {
        self.expected_scores(prompt, prompt, alternatives)
    }

    /// Returns the prompt log-probabilities that a request will get whose prompt the mock sees as `contents`.
    pub fn expected_scores(&self, contents: &[u32], prompt: &[u32], alternatives: u32) -> Vec<Logprobs> {
        let mut state = memory::EMPTY;
        let mut logprobs = Vec::new();
        for (&content, next) in contents.iter().zip(&prompt[1..]) {
            state = memory::extend(state, content);
            logprobs.push(token::score(self, state, *next, alternatives));
        }
        logprobs
    }

    /// Returns the embedding of a prompt.
    pub fn expected_embedding(&self, prompt: &[u32]) -> Vec<f32> {
        token::embedding(self, memory::state_after(prompt))
    }
}
