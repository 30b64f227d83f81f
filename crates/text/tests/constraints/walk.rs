//! Walks through a constraint: texts sampled at random from its masks, and given texts.

use fastrand::Rng;
use std::time::Duration;

use octavo_engine::Constraint;
use octavo_text::{Grammar, GrammarCompiler, GrammarError, GrammarLimits, GrammarSpec, Tokenizer};

/// A vocabulary with a compiler for it.
pub struct Ground {
    /// The vocabulary.
    pub tokenizer: Tokenizer,
    /// The compiler.
    pub compiler: GrammarCompiler,
    /// Number of bits in a mask.
    pub vocab_size: usize,
    /// End-of-sequence tokens.
    pub eos: Vec<u32>,
    /// Tokens that end strings, lists and objects. They are sampled often, because random texts would not end
    /// otherwise.
    closers: Vec<u32>,
}

/// End of a random walk.
pub enum Walk {
    /// The sequence ended with this text.
    Stop(String),
    /// The walk reached the limit of tokens.
    Length,
}

pub fn is_set(mask: &[u32], id: u32) -> bool {
    mask[id as usize / 32] >> (id % 32) & 1 == 1
}

/// Returns the default limits with more time, for a debug build on a busy machine: the other limits must end hostile
/// compilations soon.
pub fn limits() -> GrammarLimits {
    GrammarLimits { compile_time: Duration::from_secs(60), ..GrammarLimits::default() }
}

impl Ground {
    /// Creates a vocabulary with `extra` more ids than the tokenizer has, as in a padded head.
    pub fn new(tokenizer: Tokenizer, eos: &[u32], extra: usize, limits: GrammarLimits) -> Self {
        let vocab_size = tokenizer.vocab_size() + extra;
        let compiler = GrammarCompiler::new(&tokenizer, vocab_size, eos, limits).unwrap();
        let closers = (0..tokenizer.vocab_size() as u32)
            .filter(|&id| matches!(tokenizer.token_bytes(id).as_slice(), b"\"" | b"}" | b"]" | b"," | b"\"}" | b"0"))
            .collect();
        Self { tokenizer, compiler, vocab_size, eos: eos.to_vec(), closers }
    }

    pub fn mask(&self, constraint: &mut dyn Constraint) -> Vec<u32> {
        // The former content of the mask must not matter.
        let mut mask = vec![0xAAAA_AAAA; self.vocab_size.div_ceil(32)];
        constraint.fill_mask(&mut mask);
        mask
    }

    pub fn allowed(&self, mask: &[u32]) -> Vec<u32> {
        (0..mask.len() as u32 * 32).filter(|&id| is_set(mask, id)).collect()
    }

    /// Samples a token, often the end if it is possible, and often a closing token.
    pub fn draw(&self, mask: &[u32], rng: &mut Rng) -> u32 {
        let allowed = self.allowed(mask);
        assert!(!allowed.is_empty(), "nothing is allowed");
        let last = self.eos.iter().copied().find(|&id| is_set(mask, id));
        let closers: Vec<u32> = self.closers.iter().copied().filter(|&id| is_set(mask, id)).collect();
        match (rng.usize(..4), last) {
            (0, Some(eos)) => eos,
            (1 | 2, _) if !closers.is_empty() => closers[rng.usize(..closers.len())],
            _ => allowed[rng.usize(..allowed.len())],
        }
    }

    /// Walks at random for at most `limit` tokens.
    pub fn walk(&self, constraint: &mut dyn Constraint, rng: &mut Rng, limit: usize) -> Walk {
        let mut tokens = Vec::new();
        while tokens.len() < limit {
            let mask = self.mask(constraint);
            let token = self.draw(&mask, rng);
            assert!(constraint.accept(token), "token {token} was in the mask and is refused");
            if self.eos.contains(&token) {
                let mut left = self.allowed(&self.mask(constraint));
                left.retain(|id| !self.eos.contains(id));
                assert!(left.is_empty(), "after the end only the end is allowed");
                return Walk::Stop(self.text(&tokens));
            }
            assert!((token as usize) < self.tokenizer.vocab_size(), "token {token} has no text");
            assert!(!self.tokenizer.is_special(token), "token {token} is special");
            tokens.push(token);
        }
        Walk::Length
    }

    pub fn text(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|&id| self.tokenizer.token_bytes(id)).collect();
        String::from_utf8(bytes).expect("whole characters")
    }

    /// Feeds the tokens of `text`. Returns the number of accepted bytes, or `Ok` if all are accepted and the text may
    /// end there.
    pub fn feed(&self, constraint: &mut dyn Constraint, text: &str) -> Result<(), usize> {
        let mut taken = 0;
        for id in self.tokenizer.encode(text, false).unwrap() {
            let allowed = is_set(&self.mask(constraint), id);
            assert_eq!(constraint.accept(id), allowed, "mask and accept agree on token {id} of {text:?}");
            if !allowed {
                return Err(taken);
            }
            taken += self.tokenizer.token_bytes(id).len();
        }
        if is_set(&self.mask(constraint), self.eos[0]) { Ok(()) } else { Err(taken) }
    }

    pub fn accepts(&self, grammar: &Grammar, text: &str) -> bool {
        self.feed(grammar.constraint().as_mut(), text).is_ok()
    }

    /// Returns whether `text` is accepted as a prefix.
    pub fn begins(&self, grammar: &Grammar, text: &str) -> bool {
        match self.feed(grammar.constraint().as_mut(), text) {
            Ok(()) => true,
            Err(taken) => taken == text.len(),
        }
    }

    pub fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        self.compiler.compile(spec)
    }

    /// Returns the texts of `count` walks that ended by themselves within `limit` tokens.
    pub fn texts(&self, spec: &GrammarSpec, count: usize, limit: usize) -> Vec<String> {
        let grammar = self.compile(spec).unwrap();
        let mut rng = Rng::with_seed(7);
        let mut texts = Vec::new();
        for _ in 0..count * 4 {
            if let Walk::Stop(text) = self.walk(grammar.constraint().as_mut(), &mut rng, limit) {
                texts.push(text);
            }
            if texts.len() == count {
                break;
            }
        }
        assert!(texts.len() * 2 >= count, "only {} of {count} walks ended", texts.len());
        texts
    }
}
