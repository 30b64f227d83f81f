//! Compiles grammars in bounded time, and keeps them.

use std::collections::HashMap;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};

use super::{Grammar, GrammarError, GrammarLimits, GrammarSpec, vocabulary};
use crate::Tokenizer;

/// Stack of a compiling thread. llguidance recurses along references and nested terms, and the limits on those let
/// through some ten thousand levels. Only what is touched takes memory.
const STACK_BYTES: usize = 256 << 20;

/// Turns specifications into grammars for one vocabulary. All methods take `&self`: share it as `Arc`.
pub struct GrammarCompiler {
    shared: Arc<Shared>,
    cache: Mutex<Cache>,
}

struct Shared {
    factory: ParserFactory,
    limits: GrammarLimits,
    eos: Arc<[u32]>,
    /// Compilations that run, abandoned ones too.
    running: Mutex<usize>,
    ended: Condvar,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// A compiler for the vocabulary of `tokenizer`, with masks of `vocab_size` bits (the model's head may have more
    /// rows than the tokenizer has tokens). Takes some hundred milliseconds for a large vocabulary.
    ///
    /// # Errors
    /// The vocabulary is too large, or has no usable end-of-sequence token.
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
        // The default, said again: no tokens are put in for the model, none are taken back.
        debug_assert!(!InferenceCapabilities::default().ff_tokens);
        factory.quiet();
        let (cached, bytes) = (limits.cached_grammars, limits.cached_spec_bytes);
        let eos = eos_token_ids.into();
        let shared = Shared { factory, limits, eos, running: Mutex::new(0), ended: Condvar::new() };
        Ok(Self { shared: Arc::new(shared), cache: Mutex::new(Cache::new(cached, bytes)) })
    }

    /// The grammar of a specification, from the cache if it is there. Blocks for up to
    /// [`GrammarLimits::compile_time`]: call it on a worker thread.
    ///
    /// # Errors
    /// The specification is invalid, asks for what cannot be enforced, or is beyond the limits.
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

    /// A thread of its own gives the compilation the stack it needs, and lets it be abandoned.
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
                // Nobody waits any more if this is late.
                let _ = sender.send(slot.0.compile(&spec));
            })
            .map_err(|error| GrammarError::Grammar(format!("no thread to compile it ({error})")))?;
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(GrammarError::TooSlow(time)),
            Err(RecvTimeoutError::Disconnected) => Err(GrammarError::Grammar("the compiler failed on it".to_owned())),
        }
    }
}

impl Shared {
    fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let grammar = spec.lower(&self.limits)?;
        let parser = self.factory.create_parser(grammar).map_err(|error| self.explain(spec, &error.to_string()))?;
        let mut matcher = Matcher::new(Ok(parser));
        // The first mask finds what is too complex before a request is accepted, and fills the lexer that is copied.
        matcher.compute_mask_or_eos().map_err(|error| self.explain(spec, &error.to_string()))?;
        let vocab_size = self.factory.tok_env().tok_trie().vocab_size();
        Ok(Grammar::new(matcher, Arc::clone(&self.eos), vocab_size))
    }

    /// llguidance's message as one of our errors.
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
        // A panic's message goes on with a backtrace.
        let message = message.split("\n<backtrace>").next().unwrap_or_default();
        let mut message: String = message.chars().take(500).collect();
        message.truncate(message.trim_end().len());
        spec.error(message)
    }
}

/// The right to compile; given back when dropped.
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

/// Compiled grammars by their specification, the least recently used ones dropped first.
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
            // Two requests compiled it at a time.
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

/// Nothing that holds these locks can panic half way through a change.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
impl GrammarCompiler {
    /// Grammars in the cache, and bytes of their specifications.
    pub(super) fn cached(&self) -> (usize, usize) {
        let cache = lock(&self.cache);
        (cache.entries.len(), cache.bytes)
    }

    pub(super) fn is_cached(&self, key: &str) -> bool {
        lock(&self.cache).entries.contains_key(key)
    }
}
