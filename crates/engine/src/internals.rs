//! The engine's parts without its thread, for the benches and tests of this workspace. They are not part of the API and
//! may change at any time.

use std::sync::Arc;

use octavo_telemetry::EngineMetrics;

use crate::engine::Shared;
use crate::engine_loop::{EngineLoop, Turn};
use crate::inbox::Inbox;
use crate::kv::{Extras, KvCache, KvLayout, SequenceKv, TokenHistory};
use crate::scheduler::{ExecutorMemory, Scheduler, StepRecord};
use crate::sequence::Sequence;
use crate::{
    EngineConfig, EngineError, Executor, KvCacheSpec, KvEventSink, Request, RequestStream, SamplingParams, StepId,
    StepPlan, SubmitError, stream,
};

pub use crate::lock::LockWaits;

/// Returns what the calling thread has waited for locks so far. An executor learns that of the engine thread.
pub fn lock_waits() -> LockWaits {
    crate::lock::waits()
}

/// An engine that its owner drives turn by turn.
pub struct ManualEngine {
    pub(crate) shared: Arc<Shared>,
    pub(crate) engine: EngineLoop,
}

impl ManualEngine {
    /// Creates an engine like [`Engine::spawn`](crate::Engine::spawn), without a thread.
    ///
    /// # Errors
    /// Returns the same errors.
    pub fn new(executor: Box<dyn Executor>, config: EngineConfig, metrics: EngineMetrics) -> Result<Self, EngineError> {
        Self::with_events(executor, config, metrics, None)
    }

    /// Creates an engine like [`Engine::spawn_with_events`](crate::Engine::spawn_with_events), without a thread.
    ///
    /// # Errors
    /// Returns the same errors.
    pub fn with_events(
        executor: Box<dyn Executor>,
        config: EngineConfig,
        metrics: EngineMetrics,
        events: Option<Box<dyn KvEventSink>>,
    ) -> Result<Self, EngineError> {
        let shared = Arc::new(Shared::new(&*executor, &config)?);
        Ok(Self { engine: EngineLoop::new(shared.clone(), executor, config, metrics, events), shared })
    }

    /// Submits a request like [`EngineHandle::submit`](crate::EngineHandle::submit).
    ///
    /// # Errors
    /// Returns the same errors.
    pub fn submit(&self, request: Request) -> Result<RequestStream, SubmitError> {
        self.shared.submit(request)
    }

    /// Runs one turn of the engine loop. Returns `false` when it is idle or has ended.
    pub fn turn(&mut self) -> bool {
        self.engine.turn() == Turn::Again
    }
}

/// A scheduler without an executor.
pub struct ManualScheduler {
    scheduler: Scheduler,
    inbox: Arc<Inbox>,
    next: u64,
    step: StepId,
    plan: StepPlan,
    record: StepRecord,
    streams: Vec<RequestStream>,
}

impl ManualScheduler {
    /// Creates an idle scheduler.
    pub fn new(config: EngineConfig, spec: &KvCacheSpec) -> Self {
        Self {
            inbox: Arc::new(Inbox::new(&config)),
            scheduler: Scheduler::new(config, ExecutorMemory { kv: spec, images: None, adapters: 0 }, usize::MAX),
            next: 0,
            step: 0,
            plan: StepPlan::default(),
            record: StepRecord::default(),
            streams: Vec::new(),
        }
    }

    /// Queues a sequence that ends after `max_tokens` generated tokens.
    pub fn add(&mut self, prompt: Arc<[u32]>, max_tokens: u32) {
        let id = self.next;
        self.next += 1;
        let limit = prompt.len() + max_tokens as usize;
        let history = TokenHistory::new(prompt.clone());
        let kv = SequenceKv::new(self.scheduler.kv().layout(), &history, Extras::default());
        let (sender, stream) = stream::mailbox(id, self.inbox.clone());
        let params = SamplingParams { max_tokens, ..SamplingParams::default() };
        let request = Request::new(id.to_string(), prompt, params);
        self.streams.push(stream);
        self.scheduler.enqueue(Sequence::new(id, request, kv, sender, limit));
    }

    /// Plans a step.
    pub fn schedule(&mut self) -> &StepPlan {
        self.step += 1;
        self.scheduler.schedule(self.step, None, &mut self.plan, &mut self.record);
        &self.plan
    }

    /// Completes the step with `token` drawn in every row.
    pub fn retire(&mut self, token: u32) {
        for share in &self.record.shares {
            let alive = self.scheduler.retire(share, 0).is_some();
            if let Some(sequence) = self.scheduler.sequence_mut(share.key).filter(|_| alive && share.rows.draws > 0) {
                sequence.history.output.push(token);
                if sequence.full() {
                    self.scheduler.remove(share.key);
                }
            }
        }
    }

    /// Returns the number of blocks in use.
    pub fn used_blocks(&self) -> usize {
        self.scheduler.kv().used()
    }

    /// Returns the number of running sequences.
    pub fn running(&self) -> usize {
        self.scheduler.running()
    }
}

/// KV blocks with one sequence at a time.
pub struct ManualKv {
    cache: KvCache,
    history: TokenHistory,
    sequence: SequenceKv,
}

impl ManualKv {
    /// Creates a cache of free blocks and a sequence with this prompt.
    pub fn new(spec: &KvCacheSpec, prompt: Arc<[u32]>) -> Self {
        let cache = KvCache::new(spec.blocks, KvLayout::new(spec, true));
        let history = TokenHistory::new(prompt);
        let sequence = SequenceKv::new(cache.layout(), &history, Extras::default());
        Self { cache, history, sequence }
    }

    /// Hashes the prompt's blocks again.
    pub fn hash(&mut self) {
        self.sequence = SequenceKv::new(self.cache.layout(), &self.history, Extras::default());
    }

    /// Allocates the prompt's blocks. Returns `false` if they do not fit.
    pub fn allocate(&mut self) -> bool {
        self.cache.grow(&mut self.sequence, self.history.len())
    }

    /// Indexes the prompt's full blocks.
    pub fn index(&mut self) {
        self.cache.commit(&mut self.sequence, &self.history, self.history.len());
    }

    /// Frees the blocks.
    pub fn free(&mut self) {
        self.cache.release(&mut self.sequence);
    }

    /// Looks up the prompt and returns the number of tokens found.
    pub fn lookup(&mut self) -> usize {
        self.cache.lookup(&mut self.sequence, &self.history, usize::MAX).tokens
    }
}
