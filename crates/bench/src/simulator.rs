//! A simulated executor, which computes nothing and takes as long as a device would.
//!
//! A step takes the sum of the roofline bounds of its ops on the device plus a fixed overhead: an op that is bound by
//! memory does not hide one that is bound by arithmetic. Steps run one after the other, as
//! on a GPU's stream, while up to two are in flight. Tokens are pseudo-random, a function of the prompt, the request's
//! seed and the output position alone, so that batching, chunking and preemption cannot change them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use octavo_engine::{
    Executor, ExecutorError, Joined, KvCacheSpec, KvGroupSpec, KvKind, Logprobs, RowKind, SamplingParams, Seat, StepId,
    StepMasks, StepOutput, StepPlan, TokenOutput,
};
use octavo_ops::Program;
use octavo_ops::cost::{ElementBytes, StepShape, op_cost};

use crate::Device;

/// Number of prompt rows that a step may score, as many as the runner allows for a large vocabulary.
const SCORED_ROWS: usize = 64;

/// The flow of simulated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clock {
    /// `wait` returns at once, and [`SimulatedTime`] reports the time that the device would have taken. Host time between
    /// steps does not count.
    Virtual,
    /// `wait` sleeps for the time that the device would take.
    Real {
        /// Speed-up: 1 is the device's own speed, 10 is ten times as fast.
        speed_up: f64,
    },
}

/// The configuration of the simulator.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatorConfig {
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks of each KV group, including the null block; `None` for as many as fit beside the weights.
    pub blocks: Option<usize>,
    /// Element sizes.
    pub elements: ElementBytes,
    /// Steps in flight, 1 or 2.
    pub max_in_flight: usize,
    /// The flow of time.
    pub clock: Clock,
    /// Number of seats, which is the engine's `max_num_seqs`.
    pub max_num_seqs: usize,
}

impl Default for SimulatorConfig {
    /// Blocks of 16 tokens that fill the device, 16-bit elements, two steps in flight, real time and 256 seats.
    fn default() -> Self {
        Self {
            block_size: 16,
            blocks: None,
            elements: ElementBytes::HALF,
            max_in_flight: 2,
            clock: Clock::Real { speed_up: 1.0 },
            max_num_seqs: 256,
        }
    }
}

/// The reason why a simulation is impossible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulatorError {
    /// The model does not fit the device.
    #[error("the weights take {weights} bytes and {device} has {memory}: nothing is left for the KV cache")]
    OutOfMemory {
        /// Name of the device.
        device: &'static str,
        /// Size of the weights in bytes.
        weights: u64,
        /// Memory of the device in bytes.
        memory: u64,
    },
    /// A field is out of range.
    #[error("{0}")]
    Config(&'static str),
}

/// A clock of device time, which can be read while the executor runs.
#[derive(Clone, Debug, Default)]
pub struct SimulatedTime(Arc<AtomicU64>);

impl SimulatedTime {
    /// End of the last finished step, counted from the start.
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.0.load(Relaxed))
    }

    fn advance_to(&self, elapsed: Duration) {
        self.0.store(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }
}

/// The simulated executor; see the module.
pub struct SimulatedExecutor {
    program: Arc<Program>,
    device: Device,
    config: SimulatorConfig,
    spec: KvCacheSpec,
    seats: Vec<Option<Sequence>>,
    steps: VecDeque<InFlight>,
    /// Time at which the device finishes all submitted steps.
    busy_until: Duration,
    started: Instant,
    time: SimulatedTime,
    shape: StepShape,
    /// Buffers of finished steps, for reuse.
    spare_tokens: Vec<Vec<TokenOutput>>,
}

/// The state that determines a sequence's tokens.
struct Sequence {
    key: u64,
    params: Arc<SamplingParams>,
    prompt: Arc<[u32]>,
    /// Whether its tokens are drawn under masks.
    constrained: bool,
}

struct InFlight {
    output: StepOutput,
    end: Duration,
    sampled: bool,
}

impl SimulatedExecutor {
    /// Creates an executor with `program` loaded.
    pub fn new(program: Arc<Program>, device: Device, config: SimulatorConfig) -> Result<Self, SimulatorError> {
        check(&config)?;
        let spec = kv_cache_spec(&program, &device, &config)?;
        let seats = (0..config.max_num_seqs).map(|_| None).collect();
        Ok(Self {
            program,
            device,
            config,
            spec,
            seats,
            steps: VecDeque::new(),
            busy_until: Duration::ZERO,
            started: Instant::now(),
            time: SimulatedTime::default(),
            shape: StepShape::default(),
            spare_tokens: Vec::new(),
        })
    }

    /// A handle on the simulated clock, which remains usable after the executor moves into an engine.
    pub fn time(&self) -> SimulatedTime {
        self.time.clone()
    }

    /// The time that the device takes for a step.
    fn duration(&mut self, plan: &StepPlan) -> Duration {
        self.shape.tokens = plan.tokens.len();
        self.shape.sampled = plan.token_rows();
        self.shape.pooled = plan.pooled_rows();
        self.shape.sequences.clear();
        let sizes = plan.sequences.iter().map(|s| (s.tokens.len(), s.first_position as usize + s.tokens.len()));
        self.shape.sequences.extend(sizes);
        let Self { program, shape, device, config, .. } = self;
        let bound =
            |op| op_cost(program, op, shape, config.elements).roofline_seconds(device.bandwidth, device.peak_flops);
        device.step_overhead + Duration::from_secs_f64(program.ops.iter().map(bound).sum())
    }

    /// Simulated time.
    fn now(&self) -> Duration {
        match self.config.clock {
            Clock::Virtual => self.time.elapsed(),
            Clock::Real { speed_up } => self.started.elapsed().mul_f64(speed_up),
        }
    }

    fn join(&mut self, joined: &Joined) -> Result<(), ExecutorError> {
        let seat = self.seats.get_mut(joined.seat as usize);
        let seat = seat.ok_or_else(|| fatal(format!("seat {} does not exist", joined.seat)))?;
        let key = joined.prompt.iter().fold(joined.params.seed, |key, &id| mix(key ^ u64::from(id)));
        *seat = Some(Sequence {
            key,
            params: Arc::clone(&joined.params),
            prompt: Arc::clone(&joined.prompt),
            constrained: joined.constrained,
        });
        Ok(())
    }

    fn sequence(&self, seat: Seat) -> Result<&Sequence, ExecutorError> {
        let sequence = self.seats.get(seat as usize).and_then(Option::as_ref);
        sequence.ok_or_else(|| fatal(format!("no sequence has joined seat {seat}")))
    }

    /// The prompt token after a position.
    fn score(&self, seat: Seat, position: u32) -> Result<TokenOutput, ExecutorError> {
        let sequence = self.sequence(seat)?;
        let id = sequence.prompt.get(position as usize + 1).copied();
        let id = id.ok_or_else(|| fatal(format!("seat {seat} scores position {position}, its prompt ends there")))?;
        let top = sequence.params.prompt_logprobs.unwrap_or_default();
        Ok(TokenOutput { id, logprobs: Some(logprobs(id, top, self.program.vocab_size as u64)) })
    }

    /// A vector of the model's width with values in [0, 1) that depend on the prompt.
    fn embed(&self, seat: Seat) -> Result<Vec<f32>, ExecutorError> {
        let sequence = self.sequence(seat)?;
        let width = self.program.embedding().map_or(0, |id| self.program.buffers[id.0].cols);
        Ok((0..width as u64).map(|i| (mix(sequence.key ^ mix(i)) >> 40) as f32 / (1u64 << 24) as f32).collect())
    }

    /// The token drawn after a position.
    fn draw(&self, seat: Seat, position: u32, mask: Option<&[u32]>) -> Result<TokenOutput, ExecutorError> {
        let sequence = self.sequence(seat)?;
        let vocab = self.program.vocab_size as u64;
        let number = (u64::from(position) + 1).wrapping_sub(sequence.prompt.len() as u64);
        let first = mix(sequence.key ^ mix(number)) % vocab;
        // Requests end by their token limit, so that a simulation has the requested length.
        let ends = |id: u32| sequence.params.eos_token_ids.contains(&id) || sequence.params.stop_token_ids.contains(id);
        let allowed = |id: u32| mask.is_none_or(|mask| mask[id as usize / 32] >> (id % 32) & 1 == 1);
        let from_first = || (0..vocab).map(|i| ((first + i) % vocab) as u32);
        let id = from_first()
            .find(|&id| allowed(id) && !ends(id))
            .or_else(|| from_first().find(|&id| allowed(id)))
            .unwrap_or(first as u32);
        let logprobs = sequence.params.logprobs.map(|top| logprobs(id, top, vocab));
        Ok(TokenOutput { id, logprobs })
    }
}

impl Executor for SimulatedExecutor {
    fn kv_cache_spec(&self) -> &KvCacheSpec {
        &self.spec
    }

    fn vocab_size(&self) -> usize {
        self.program.vocab_size
    }

    fn max_rows(&self) -> usize {
        self.config.max_num_seqs + SCORED_ROWS
    }

    fn max_in_flight(&self) -> usize {
        self.config.max_in_flight
    }

    fn submit(&mut self, plan: StepPlan) -> Result<(), ExecutorError> {
        if self.steps.len() == self.config.max_in_flight {
            return Err(fatal(format!("step {} is one more than may be in flight", plan.step)));
        }
        for joined in &plan.joined {
            self.join(joined)?;
        }
        let start = self.busy_until.max(self.now());
        let busy = self.duration(&plan);
        self.busy_until = start + busy;
        let tokens = self.spare_tokens.pop().unwrap_or_default();
        let output = StepOutput { tokens, vectors: Vec::new(), busy, plan };
        self.steps.push_back(InFlight { output, end: self.busy_until, sampled: false });
        Ok(())
    }

    fn sample(&mut self, step: StepId, masks: StepMasks) -> Result<(), ExecutorError> {
        let index = self.steps.iter().position(|s| s.output.plan.step == step);
        // Removed first, so that a failed step is over.
        let flight = index.and_then(|index| self.steps.remove(index));
        let mut flight = flight.ok_or_else(|| fatal(format!("step {step} is not in flight")))?;
        let mut masks = masks.rows.iter().map(Vec::as_slice);
        let StepOutput { tokens, vectors, plan, .. } = &mut flight.output;
        for row in &plan.rows {
            let planned = plan.sequence(row).ok_or_else(|| fatal(format!("a row is of sequence {}", row.sequence)))?;
            let seat = planned.seat;
            match row.kind {
                RowKind::Score => tokens.push(self.score(seat, row.position)?),
                RowKind::Draw | RowKind::Verify => {
                    let mask = if self.sequence(seat)?.constrained { masks.next() } else { None };
                    tokens.push(self.draw(seat, row.position, mask)?);
                }
                RowKind::Pool => vectors.extend(self.embed(seat)?),
            }
        }
        flight.sampled = true;
        // A late start of sampling delays its end.
        flight.end = flight.end.max(self.now());
        self.busy_until = self.busy_until.max(flight.end);
        self.steps.insert(index.unwrap_or_default(), flight);
        Ok(())
    }

    fn wait(&mut self) -> Result<StepOutput, ExecutorError> {
        let step = self.steps.pop_front().filter(|step| step.sampled);
        let step = step.ok_or_else(|| fatal("there is no sampled step to wait for".into()))?;
        if let Clock::Real { speed_up } = self.config.clock {
            thread::sleep(step.end.saturating_sub(self.now()).div_f64(speed_up));
        }
        self.time.advance_to(step.end);
        Ok(step.output)
    }

    fn recycle(&mut self, mut tokens: Vec<TokenOutput>) {
        tokens.clear();
        self.spare_tokens.push(tokens);
    }
}

fn check(config: &SimulatorConfig) -> Result<(), SimulatorError> {
    let error = match config.clock {
        Clock::Real { speed_up } if !(speed_up.is_finite() && speed_up > 0.0) => "the speed-up must be above 0",
        _ if !(1..=2).contains(&config.max_in_flight) => "one or two steps may be in flight",
        _ if config.block_size == 0 => "a block holds at least one token",
        _ => return Ok(()),
    };
    Err(SimulatorError::Config(error))
}

fn kv_cache_spec(program: &Program, device: &Device, config: &SimulatorConfig) -> Result<KvCacheSpec, SimulatorError> {
    let bytes =
        |group: &octavo_ops::KvGroup| (group.elements_per_token() * config.block_size) as u64 * config.elements.kv;
    let block_bytes = program.kv_groups.iter().map(bytes).max().unwrap_or(0);
    let weights = program.weight_bytes();
    let fitting = device.memory_bytes.saturating_sub(weights) / block_bytes.max(1);
    let blocks = config.blocks.unwrap_or(usize::try_from(fitting).unwrap_or(usize::MAX));
    if blocks < 2 && block_bytes > 0 {
        return Err(SimulatorError::OutOfMemory { device: device.name, weights, memory: device.memory_bytes });
    }
    let group = |group: &octavo_ops::KvGroup| KvGroupSpec {
        layers: group.layers.len(),
        kind: group.window.map_or(KvKind::Full, KvKind::Window),
    };
    let groups = program.kv_groups.iter().map(group).collect();
    Ok(KvCacheSpec { block_size: config.block_size, block_bytes, blocks, groups })
}

/// Plausible log-probabilities: the sampled token is the most likely one, and each further token is half as likely.
fn logprobs(id: u32, top: u32, vocab: u64) -> Logprobs {
    let logprob = |rank: u32| -std::f32::consts::LN_2 * rank as f32;
    let other = |rank: u32| (((u64::from(id) + u64::from(rank) - 1) % vocab) as u32, logprob(rank));
    Logprobs { logprob: logprob(1), rank: 1, top: (1..=top).map(other).collect() }
}

/// A value in which every bit depends on every bit of the input.
pub(crate) fn mix(value: u64) -> u64 {
    fastrand::Rng::with_seed(value).u64(..)
}

fn fatal(message: String) -> ExecutorError {
    ExecutorError { message, fatal: true }
}

#[cfg(test)]
#[path = "simulator_tests.rs"]
mod tests;
