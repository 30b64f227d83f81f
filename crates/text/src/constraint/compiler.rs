//! Compilation of grammars with a time limit and a cache.

use std::collections::HashMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};

use super::{Grammar, GrammarError, GrammarLimits, GrammarSpec, vocabulary};
use crate::Tokenizer;

/// Stack size of a compiling thread. llguidance recurses along references and nested terms, and the limits allow some
/// ten thousand levels. Only the pages that are used take up memory.
const STACK_BYTES: usize = 256 << 20;

/// Compiles specifications to grammars for one vocabulary. All methods take `&self`, so it can be shared in an `Arc`.
pub struct GrammarCompiler {
    shared: Arc<Shared>,
    cache: Mutex<Cache>,
}

struct Shared {
    factory: ParserFactory,
    limits: GrammarLimits,
    eos: Arc<[u32]>,
    /// Number of running compilations, including abandoned ones.
    running: Mutex<usize>,
    ended: Condvar,
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
        let mut factory =
            ParserFactory::new_simple(&env).map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
        *factory.limits_mut() = limits.parser();
        // By default llguidance neither inserts tokens for the model nor takes tokens back; this is required here.
        debug_assert!(!InferenceCapabilities::default().ff_tokens);
        factory.quiet();
        let (cached, bytes) = (limits.cached_grammars, limits.cached_spec_bytes);
        let eos = eos_token_ids.into();
        let shared = Shared { factory, limits, eos, running: Mutex::new(0), ended: Condvar::new() };
        Ok(Self { shared: Arc::new(shared), cache: Mutex::new(Cache::new(cached, bytes)) })
    }

    /// Returns the grammar of a specification, from the cache if possible. Blocks for up to
    /// [`GrammarLimits::compile_time`], so call it on a worker thread.
    ///
    /// # Errors
    /// Returns an error if the specification is invalid, cannot be enforced or exceeds the limits, or if the compiler is
    /// busy or fails.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let key = spec.key();
        let limit = self.shared.limits.spec_bytes;
        if key.len() > limit {
            return Err(GrammarError::TooLong { bytes: key.len(), limit });
        }
        if let Some(grammar) = lock(&self.cache).get(&key) {
            return Ok(grammar);
        }
        let grammar = self.compile_on_thread(spec)?;
        lock(&self.cache).insert(key, grammar.clone());
        Ok(grammar)
    }

    /// Compiles on a separate thread, which has a sufficient stack and can be abandoned.
    fn compile_on_thread(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let time = self.shared.limits.compile_time;
        let deadline = Instant::now() + time;
        let slot = Slot::take(&self.shared, deadline).ok_or(GrammarError::Busy(time))?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let spec = spec.clone();
        std::thread::Builder::new()
            .name("grammar".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                // After the time limit the receiver is gone.
                let _ = sender.send(slot.0.compile(&spec));
            })
            .map_err(|error| GrammarError::Thread(error.to_string()))?;
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            // A thread that waited for a processor may find the result there although the time is up.
            Ok(_) if Instant::now() >= deadline => Err(GrammarError::TooSlow(time)),
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(GrammarError::TooSlow(time)),
            Err(RecvTimeoutError::Disconnected) => Err(GrammarError::Panicked),
        }
    }
}

impl Shared {
    fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let grammar = spec.lower(&self.limits)?;
        let parser = self.factory.create_parser(grammar).map_err(|error| self.explain(spec, &error.to_string()))?;
        let mut matcher = Matcher::new(Ok(parser));
        // The first mask detects excessive complexity before a request is accepted, and fills the lexer that is copied.
        matcher.compute_mask_or_eos().map_err(|error| self.explain(spec, &error.to_string()))?;
        let vocab_size = self.factory.tok_env().tok_trie().vocab_size();
        Ok(Grammar::new(matcher, Arc::clone(&self.eos), vocab_size))
    }

    /// Converts llguidance's message to an error.
    fn explain(&self, spec: &GrammarSpec, message: &str) -> GrammarError {
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
        // The message of a panic is followed by a backtrace.
        let message = message.split("\n<backtrace>").next().unwrap_or_default();
        let mut message: String = message.chars().take(500).collect();
        message.truncate(message.trim_end().len());
        spec.error(message)
    }
}

/// Permit to compile; released when dropped.
struct Slot(Arc<Shared>);

impl Slot {
    fn take(shared: &Arc<Shared>, deadline: Instant) -> Option<Self> {
        let mut running = lock(&shared.running);
        while *running >= shared.limits.compile_threads.max(1) {
            let left = deadline.checked_duration_since(Instant::now())?;
            running = shared.ended.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *running += 1;
        drop(running);
        Some(Self(Arc::clone(shared)))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *lock(&self.0.running) -= 1;
        self.0.ended.notify_one();
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
}
