//! Public interface of the engine: start, submit, status and stop.

use std::sync::Arc;
use std::thread::JoinHandle;

use octavo_telemetry::EngineMetrics;

use crate::engine_loop::{EngineLoop, Exit};
use crate::image;
use crate::inbox::{Command, Inbox};
use crate::kv::{Extras, KvLayout, SequenceKv, TokenHistory};
use crate::sequence::Sequence;
use crate::status::StatusCells;
use crate::{
    EngineConfig, EngineError, EngineState, EngineStatus, Executor, ImageSpec, KvEventSink, Request, RequestStream,
    SubmitError, Task,
};

/// State that the engine thread and the handles share.
pub(crate) struct Shared {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) status: StatusCells,
    layout: KvLayout,
    max_model_len: usize,
    images: Option<ImageSpec>,
    /// Maximum number of tokens of an image.
    max_image_tokens: usize,
    /// Whether the executor has slots for adapters.
    has_adapters: bool,
}

impl Shared {
    /// # Errors
    /// Returns an error if the configuration contradicts itself or does not fit the executor.
    pub(crate) fn new(executor: &dyn Executor, config: &EngineConfig) -> Result<Self, EngineError> {
        let spec = executor.kv_cache_spec();
        config.check(spec, executor.max_rows())?;
        let images = executor.image_spec();
        let blocks = if spec.groups.is_empty() { 0 } else { spec.blocks.saturating_sub(1) };
        Ok(Self {
            inbox: Arc::new(Inbox::new(config)),
            status: StatusCells::new(blocks, config.stuck_after),
            layout: KvLayout::for_engine(spec, config),
            max_model_len: config.max_model_len,
            images,
            has_adapters: executor.adapter_slots() > 0,
            max_image_tokens: config.max_image_tokens(images.is_some_and(|spec| spec.seen_whole)),
        })
    }

    pub(crate) fn submit(&self, request: Request) -> Result<RequestStream, SubmitError> {
        let tokens = request.prompt.len();
        if tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        let max_tokens = max_tokens(&request);
        let longest = self.max_model_len - usize::from(max_tokens > 0);
        if tokens > longest {
            return Err(SubmitError::PromptTooLong { tokens, limit: longest });
        }
        image::check(&request.images, tokens, self.images.as_ref(), self.max_image_tokens)?;
        let scored = request.params.prompt_logprobs.is_some() && !request.images.is_empty();
        if scored && self.images.is_some_and(|spec| spec.seen_whole) {
            return Err(SubmitError::ScoredImages);
        }
        self.inbox.check(tokens)?;
        let history = TokenHistory::new(request.prompt.clone());
        if request.adapter.is_some() && !self.has_adapters {
            return Err(SubmitError::NoAdapters);
        }
        let extras = Extras {
            salt: request.cache_salt.clone(),
            images: request.images.clone(),
            adapter: request.adapter.clone(),
        };
        let kv = SequenceKv::new(&self.layout, &history, extras);
        let limit = tokens.saturating_add(max_tokens).min(self.max_model_len);
        self.inbox.submit(tokens, |id, sender| Sequence::new(id, request, kv, sender, limit))
    }
}

/// Returns the maximum number of tokens to sample: 0 for an embedding and for a prompt that is only scored.
fn max_tokens(request: &Request) -> usize {
    match request.task {
        Task::Generate if request.params.prompt_logprobs.is_some() => request.params.max_tokens as usize,
        Task::Generate => request.params.max_tokens.max(1) as usize,
        Task::Embed(_) => 0,
    }
}

/// A running engine, which owns its thread. Dropping it asks the engine to stop and does not wait for it.
pub struct Engine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Submits requests to an engine and reads its status.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

impl Engine {
    /// Starts an engine thread over `executor`.
    ///
    /// # Errors
    /// Returns an error if a limit is 0, if limits contradict each other, or if a sequence of `max_model_len` tokens
    /// does not fit.
    pub fn spawn(
        executor: Box<dyn Executor>,
        config: EngineConfig,
        metrics: EngineMetrics,
    ) -> Result<Engine, EngineError> {
        Self::spawn_with_events(executor, config, metrics, None)
    }

    /// Does the same as [`Engine::spawn`] and reports changes of the prefix cache to `events`.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::spawn`].
    pub fn spawn_with_events(
        executor: Box<dyn Executor>,
        config: EngineConfig,
        metrics: EngineMetrics,
        events: Option<Box<dyn KvEventSink>>,
    ) -> Result<Engine, EngineError> {
        let shared = Arc::new(Shared::new(&*executor, &config)?);
        let thread = std::thread::Builder::new().name("octavo-engine".into()).spawn({
            let shared = shared.clone();
            move || {
                let mut last_words = LastWords { shared: shared.clone(), state: EngineState::Failed };
                if EngineLoop::new(shared, executor, config, metrics, events).run() == Exit::Stopped {
                    last_words.state = EngineState::Stopped;
                }
            }
        })?;
        Ok(Engine { shared, thread: Some(thread) })
    }

    /// Returns a handle. Any number of handles may exist, and they may outlive the engine.
    pub fn handle(&self) -> EngineHandle {
        EngineHandle { shared: self.shared.clone() }
    }

    /// Stops the engine: every request ends with [`FinishReason::Abort`](crate::FinishReason::Abort), and steps in
    /// flight complete first.
    pub fn join(mut self) {
        self.shared.inbox.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine thread had panicked");
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shared.inbox.stop();
    }
}

/// Closes the inbox and releases all waiters when the engine thread ends, even by a panic.
struct LastWords {
    shared: Arc<Shared>,
    state: EngineState,
}

impl Drop for LastWords {
    fn drop(&mut self) {
        self.shared.status.set_load(0, 0, 0);
        self.shared.status.idle();
        self.shared.status.set_state(self.state);
        self.shared.inbox.close();
    }
}

impl EngineHandle {
    /// Submits a request. Never blocks on the engine. Hashing the prompt's blocks takes about 10 ns per token.
    ///
    /// # Errors
    /// Returns an error if the prompt can never run, if the queue is full, or if the engine does not run.
    pub fn submit(&self, request: Request) -> Result<RequestStream, SubmitError> {
        self.shared.submit(request)
    }

    /// Returns the current status of the engine. Takes no lock.
    pub fn status(&self) -> EngineStatus {
        self.shared.status.read(self.shared.inbox.queued_requests())
    }

    /// Ends every request submitted so far with [`FinishReason::Abort`](crate::FinishReason::Abort).
    pub fn abort_all(&self) {
        self.shared.inbox.abort_all();
    }

    /// Refuses new requests with [`SubmitError::Paused`] until [`EngineHandle::resume`]. If `abort` is set, every
    /// request submitted so far ends with [`FinishReason::Abort`](crate::FinishReason::Abort), else it completes.
    pub fn pause(&self, abort: bool) {
        self.shared.inbox.pause(abort);
        self.shared.inbox.command(Command::Freeze(false));
    }

    /// Stops to plan steps until [`EngineHandle::resume`]. Requests keep their blocks, and new ones wait.
    pub fn freeze(&self) {
        self.shared.inbox.resume();
        self.shared.inbox.command(Command::Freeze(true));
    }

    /// Ends a pause and a freeze.
    pub fn resume(&self) {
        self.shared.inbox.resume();
        self.shared.inbox.command(Command::Freeze(false));
    }

    /// Calls `reply` on the engine's thread with `true` once no step is in flight and no request is left, or the engine
    /// is frozen. `reply` must not block; it is dropped if the engine ends first.
    pub fn when_idle(&self, reply: impl FnOnce(bool) + Send + 'static) {
        self.shared.inbox.command(Command::WhenIdle(Box::new(reply)));
    }

    /// Forgets the content of the prefix cache and calls `reply` on the engine's thread with the result: `false` if
    /// running requests hold blocks. With `preempt` they give up their blocks first and are recomputed later. `reply`
    /// must not block; it is dropped if the engine ends first.
    pub fn reset_prefix_cache(&self, preempt: bool, reply: impl FnOnce(bool) + Send + 'static) {
        self.shared.inbox.command(Command::ResetPrefixCache { preempt, reply: Box::new(reply) });
    }
}
