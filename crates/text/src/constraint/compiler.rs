//! Compilation of grammars with a time limit and a cache.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llguidance::api::{GrammarInit, TopLevelGrammar};
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{CancellationHandle, Logger, Matcher, ParserFactory, TokenParser};

use super::{Grammar, GrammarError, GrammarLimits, GrammarSpec, intersection, vocabulary};
use crate::Tokenizer;

/// Stack size of a compiling thread. llguidance recurses along references and nested terms, and the limits allow some
/// ten thousand levels. Only the pages that are used take up memory.
const STACK_BYTES: usize = 256 << 20;

/// Time between two pauses of a caller that waits.
const PAUSE: Duration = Duration::from_millis(5);

/// Compiles specifications to grammars for one vocabulary. All methods take `&self`, so it can be shared in an `Arc`.
pub struct GrammarCompiler {
    shared: Arc<Shared>,
    cache: Mutex<Cache>,
}

struct Shared {
    factory: ParserFactory,
    limits: GrammarLimits,
    eos: Arc<[u32]>,
    running: Mutex<Running>,
    ended: Condvar,
}

/// The running compilations, including those that were given up and have not ended yet.
#[derive(Default)]
struct Running {
    begun: u64,
    /// The number of each one, and whether it has taken long. Then it does not keep others from beginning.
    compilations: Vec<(u64, bool)>,
}

impl Running {
    fn slow(&self) -> usize {
        self.compilations.iter().filter(|(_, slow)| *slow).count()
    }
}

/// The part of a compilation that its caller can reach.
#[derive(Default)]
struct Job {
    given_up: AtomicBool,
    /// Ends the computation of the first mask.
    mask: Mutex<Option<CancellationHandle>>,
}

impl Job {
    /// `None` if the compilation was given up.
    fn go_on(&self) -> Option<()> {
        (!self.given_up.load(Ordering::Relaxed)).then_some(())
    }

    fn give_up(&self) {
        let mask = lock(&self.mask);
        self.given_up.store(true, Ordering::Relaxed);
        if let Some(mask) = &*mask {
            mask.cancel();
        }
    }
}

/// Gives a compilation up when its caller no longer waits for it.
struct GiveUpOnDrop(Arc<Job>);

impl Drop for GiveUpOnDrop {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// Creates a compiler for the vocabulary of `tokenizer`, with masks of `vocab_size` bits (the model's head may have
    /// more rows than the tokenizer has tokens). Takes some hundred milliseconds for a large vocabulary.
    ///
    /// # Errors
    /// Returns an error if the vocabulary is too large or has no usable end-of-sequence token.
    pub fn new(
        tokenizer: &Tokenizer,
        vocab_size: usize,
        eos_token_ids: &[u32],
        limits: GrammarLimits,
    ) -> Result<Self, GrammarError> {
        let env = vocabulary::token_env(tokenizer, vocab_size, eos_token_ids)?;
        let factory = ParserFactory::new_simple(&env).map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
        // By default llguidance neither inserts tokens for the model nor takes tokens back; this is required here.
        debug_assert!(!InferenceCapabilities::default().ff_tokens);
        let (cached, bytes) = (limits.cached_grammars, limits.cached_spec_bytes);
        let eos = eos_token_ids.into();
        let shared = Shared { factory, limits, eos, running: Mutex::default(), ended: Condvar::new() };
        Ok(Self { shared: Arc::new(shared), cache: Mutex::new(Cache::new(cached, bytes)) })
    }

    /// Does the same as [`compile_in_turns`](Self::compile_in_turns) without pauses.
    ///
    /// # Errors
    /// See there.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        self.compile_in_turns(spec, || Ok(()))
    }

    /// Returns the grammar of a specification, from the cache if possible. Blocks for up to
    /// [`GrammarLimits::compile_time`], so call it on a worker thread. Every few milliseconds it calls `pause`, which may
    /// end the compilation with an error.
    ///
    /// A compilation that was given up ends between its stages (translation, construction of the parser, first mask) or
    /// during the mask; each of them is limited by [`GrammarLimits`].
    ///
    /// # Errors
    /// Returns the error of `pause`, or an error if the specification is invalid, cannot be enforced or exceeds the
    /// limits, or if the compiler is busy or fails.
    pub fn compile_in_turns<E: From<GrammarError>>(
        &self,
        spec: &GrammarSpec,
        pause: impl FnMut() -> Result<(), E>,
    ) -> Result<Grammar, E> {
        let key = spec.key();
        let limit = self.shared.limits.spec_bytes;
        if key.len() > limit {
            return Err(GrammarError::TooLong { bytes: key.len(), limit }.into());
        }
        if let Some(grammar) = lock(&self.cache).get(&key) {
            return Ok(grammar);
        }
        let grammar = self.compile_on_thread(spec, pause)?;
        lock(&self.cache).insert(key, grammar.clone());
        Ok(grammar)
    }

    /// Compiles on a separate thread, which has a sufficient stack and can be abandoned.
    fn compile_on_thread<E: From<GrammarError>>(
        &self,
        spec: &GrammarSpec,
        mut pause: impl FnMut() -> Result<(), E>,
    ) -> Result<Grammar, E> {
        let limits = &self.shared.limits;
        let begun = Instant::now();
        let deadline = begun + limits.compile_time;
        let slot = Slot::take(&self.shared, deadline, &mut pause)?;
        let (number, slow_at) = (slot.number, Instant::now() + limits.slow_after);
        let job = GiveUpOnDrop(Arc::default());
        let (sender, receiver) = mpsc::sync_channel(1);
        let (spec, running) = (spec.clone(), Arc::clone(&job.0));
        std::thread::Builder::new()
            .name("grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let result = slot.shared.compile(&spec, &running);
                // The next compilation of the caller finds it free.
                drop(slot);
                // If the compilation was given up, the receiver is gone.
                let _ = result.map(|result| sender.send(result));
            })
            .map_err(|error| GrammarError::Thread(error.to_string()))?;
        loop {
            let now = Instant::now();
            match receiver.recv_timeout(deadline.saturating_duration_since(now).min(PAUSE)) {
                // A thread that waited for a processor may find the result there although the time is up.
                Ok(_) if Instant::now() >= deadline => return Err(GrammarError::TooSlow(limits.compile_time).into()),
                Ok(result) => return result.map_err(E::from),
                Err(RecvTimeoutError::Timeout) if now >= deadline => {
                    return Err(GrammarError::TooSlow(limits.compile_time).into());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(GrammarError::Panicked.into()),
            }
            if now >= slow_at {
                self.shared.make_slow(number);
            }
            pause()?;
        }
    }
}

impl Shared {
    /// `None` if the compilation was given up.
    fn compile(&self, spec: &GrammarSpec, job: &Job) -> Option<Result<Grammar, GrammarError>> {
        job.go_on()?;
        let grammar = match spec.lower(&self.limits) {
            Ok(grammar) => grammar,
            Err(error) => return Some(Err(error)),
        };
        job.go_on()?;
        let parser = match self.parser(spec, grammar, job)? {
            Ok(parser) => parser,
            Err(error) => return Some(Err(error)),
        };
        let matcher = Matcher::new(Ok(parser));
        // The first mask detects excessive complexity before a request is accepted, and fills the lexer that is copied.
        // The clone shares that lexer, but not the handle.
        let mut first = matcher.clone().into_cancellable();
        *lock(&job.mask) = first.cancellation_handle();
        job.go_on()?;
        if let Err(error) = first.compute_mask_or_eos() {
            job.go_on()?;
            return Some(Err(self.explain(spec, &error.to_string())));
        }
        let vocab_size = self.factory.tok_env().tok_trie().vocab_size();
        Some(Ok(Grammar::new(matcher, Arc::clone(&self.eos), vocab_size)))
    }

    /// Builds the parser. `None` if the compilation was given up.
    fn parser(
        &self,
        spec: &GrammarSpec,
        grammar: TopLevelGrammar,
        job: &Job,
    ) -> Option<Result<TokenParser, GrammarError>> {
        let env = self.factory.tok_env().clone();
        let translate = || GrammarInit::Serialized(grammar).to_internal(Some(env), self.limits.parser(1));
        let (grammar, lexer) = match catch_unwind(AssertUnwindSafe(translate)) {
            Ok(parts) => parts,
            Err(error) => return Some(Err(self.explain(spec, &error.to_string()))),
        };
        job.go_on()?;
        let (branches, limit) = (intersection::branches(&lexer), self.limits.pattern_branches);
        if branches > limit {
            return Some(Err(GrammarError::Intersection { what: spec.noun(), limit }));
        }
        let parser = self.factory.create_parser_from_init_ext(
            GrammarInit::Internal(grammar, lexer),
            Logger::new(0, 0),
            InferenceCapabilities::default(),
            self.limits.parser(branches),
        );
        Some(parser.map_err(|error| self.explain(spec, &error.to_string())))
    }

    /// Lets another compilation begin beside this one, unless many have already taken long.
    fn make_slow(&self, number: u64) {
        let mut running = lock(&self.running);
        if running.slow() >= self.limits.slow_threads {
            return;
        }
        for (_, slow) in running.compilations.iter_mut().filter(|(other, _)| *other == number) {
            *slow = true;
        }
        self.ended.notify_one();
    }

    /// Converts llguidance's message to an error.
    fn explain(&self, spec: &GrammarSpec, message: &str) -> GrammarError {
        // The message of a panic is followed by a backtrace.
        let message = message.split("\n<backtrace>").next().unwrap_or_default();
        if message.starts_with("panic: ") {
            tracing::error!(message, "the grammar library panicked");
            return GrammarError::Panicked;
        }
        let what = spec.noun();
        if message.contains("oneOf constraints are not supported") {
            return GrammarError::Keyword {
                keyword: "oneOf".to_owned(),
                path: "#".to_owned(),
                hint: " unless its alternatives exclude each other by type or by a required constant; use anyOf",
            };
        }
        if message.contains("initial lexer configuration") || message.contains("fuel") {
            return GrammarError::TooLarge { what, limit: self.limits.compile_fuel as usize };
        }
        if message.contains("grammar size") {
            return GrammarError::TooLarge { what, limit: self.limits.grammar_symbols };
        }
        let mut message: String = message.chars().take(500).collect();
        message.truncate(message.trim_end().len());
        spec.error(message)
    }
}

/// Permit to compile; released when dropped.
struct Slot {
    shared: Arc<Shared>,
    number: u64,
}

impl Slot {
    /// Waits for a permit until the deadline.
    fn take<E: From<GrammarError>>(
        shared: &Arc<Shared>,
        deadline: Instant,
        pause: &mut impl FnMut() -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut running = lock(&shared.running);
        while running.compilations.len() - running.slow() >= shared.limits.compile_threads.max(1) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(GrammarError::Busy(shared.limits.compile_time).into());
            }
            drop(shared.ended.wait_timeout(running, left.min(PAUSE)).unwrap_or_else(PoisonError::into_inner));
            pause()?;
            running = lock(&shared.running);
        }
        running.begun += 1;
        let number = running.begun;
        running.compilations.push((number, false));
        drop(running);
        Ok(Self { shared: Arc::clone(shared), number })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.shared.running).compilations.retain(|(number, _)| *number != self.number);
        self.shared.ended.notify_one();
    }
}

/// Compiled grammars by specification. The least recently used ones are dropped first.
struct Cache {
    entries: HashMap<String, (Grammar, u64)>,
    bytes: usize,
    max_entries: usize,
    max_bytes: usize,
    uses: u64,
}

impl Cache {
    fn new(max_entries: usize, max_bytes: usize) -> Self {
        Self { entries: HashMap::new(), bytes: 0, max_entries, max_bytes, uses: 0 }
    }

    fn get(&mut self, key: &str) -> Option<Grammar> {
        self.uses += 1;
        let (grammar, used) = self.entries.get_mut(key)?;
        *used = self.uses;
        Some(grammar.clone())
    }

    fn insert(&mut self, key: String, grammar: Grammar) {
        if key.len() > self.max_bytes || self.max_entries == 0 {
            return;
        }
        self.uses += 1;
        self.bytes += key.len();
        if let Some(old) = self.entries.insert(key, (grammar, self.uses)) {
            // Two requests compiled the same specification at the same time.
            drop(old);
            self.bytes = self.entries.keys().map(String::len).sum();
        }
        while self.entries.len() > self.max_entries || self.bytes > self.max_bytes {
            let oldest = self.entries.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { break };
            self.entries.remove(&oldest);
            self.bytes -= oldest.len();
        }
    }
}

/// Locks a mutex. No holder can panic in the middle of a change, so a poisoned mutex is usable.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
impl GrammarCompiler {
    /// Returns the number of cached grammars and the total size of their specifications in bytes.
    pub(super) fn cached(&self) -> (usize, usize) {
        let cache = lock(&self.cache);
        (cache.entries.len(), cache.bytes)
    }

    pub(super) fn is_cached(&self, key: &str) -> bool {
        lock(&self.cache).entries.contains_key(key)
    }

    /// Returns the number of running compilations, and how many of them have taken long.
    pub(super) fn running(&self) -> (usize, usize) {
        let running = lock(&self.shared.running);
        (running.compilations.len(), running.slow())
    }

    /// Begins a compilation that goes on until the result is dropped.
    pub(super) fn begin(&self) -> impl Sized {
        Slot::take::<GrammarError>(&self.shared, Instant::now() + PAUSE, &mut || Ok(())).unwrap()
    }

    pub(super) fn explain(&self, spec: &GrammarSpec, message: &str) -> GrammarError {
        self.shared.explain(spec, message)
    }

    /// Compiles as after the request was given up. Returns whether there is a result.
    pub(super) fn compile_in_vain(&self, spec: &GrammarSpec) -> bool {
        let job = Job::default();
        job.give_up();
        self.shared.compile(spec, &job).is_some()
    }

    /// Counts all compilations as having taken long, as far as there is room.
    pub(super) fn make_all_slow(&self) {
        let numbers: Vec<u64> = lock(&self.shared.running).compilations.iter().map(|(number, _)| *number).collect();
        numbers.into_iter().for_each(|number| self.shared.make_slow(number));
    }
}
