//! Texts are tokenised part by part, so that a long one can be interrupted, shares a processor with others and needs
//! little memory.
//!
//! A text may be cut where every split rule of the pre-tokenizer ends a piece, whatever is around it. The tokens of the
//! parts, joined, are then exactly those of the text. This is known of byte-level BPE with the split rules in
//! [`pre_tokenizer`](super::pre_tokenizer). Without split rules, a text may be cut between two characters that are tokens
//! and that no entry of the vocabulary has side by side, because no token can reach across. That is so before most spaces
//! of SentencePiece vocabularies.
//!
//! A part without such a place may be as long as the text. The [encoder](super::lazy) takes it piece by piece.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::Duration;

use serde_json::Value;
use tokenizers::{Model as _, ModelWrapper};

use super::lazy::{LazyEncoder, Place, Stop, steps};
use super::model::{Model, Stages};
use super::pre_tokenizer::SPLITS_AT_SPACES;
use super::{Entry, Tokenizer, TokenizerError};

/// Bytes of a part, unless the text has no boundary there: a few milliseconds of work.
const PART_BYTES: usize = 16 << 10;

/// Bytes of a text that is encoded without interruption: a few seconds of work, and more tokens than a context has.
const WHOLE_BYTES: usize = 4 << 20;

/// Time between two attempts to encode a text that cannot be interrupted.
const RETRY: Duration = Duration::from_millis(2);

/// The tokens of a text that a caller wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// All of them.
    All,
    /// At most this many at the start.
    First(usize),
    /// At most this many at the end.
    Last(usize),
}

/// The way in which long texts are encoded.
#[derive(Debug)]
pub(super) struct Parts {
    /// Bytes of a part, if the text has a boundary there.
    pub(super) bytes: usize,
    pub(super) lazy: Option<Lazy>,
    /// Held while a text is encoded that cannot be interrupted.
    pub(super) whole: Mutex<()>,
}

/// An encoder whose work can be interrupted.
#[derive(Debug)]
pub(super) struct Lazy {
    pub(super) encoder: LazyEncoder,
    pub(super) cuts: Option<Cuts>,
    /// The tokens that encoding adds before every text, and after it.
    around: (Vec<u32>, Vec<u32>),
}

/// The places where a text may be cut.
#[derive(Debug)]
pub(super) enum Cuts {
    /// All boundaries but those after these characters.
    Words { not_after: HashSet<char> },
    /// Those before a space, after a character that is a token and not among these.
    Spaces { not_after: HashSet<char> },
}

impl Parts {
    /// `entries` are the vocabulary's entries by id.
    pub(super) fn new(inner: &Stages, entries: &[Entry<'_>]) -> Self {
        let lazy = around(inner).zip(LazyEncoder::new(inner, entries)).map(|(around, encoder)| {
            let cuts = Cuts::new(inner, &encoder, entries);
            Lazy { encoder, cuts, around }
        });
        Self { bytes: PART_BYTES, lazy, whole: Mutex::new(()) }
    }

    /// Whether texts are encoded in parts.
    pub(super) fn is_interruptible(&self) -> bool {
        self.lazy.is_some()
    }
}

impl Tokenizer {
    /// Returns the `wanted` tokens of `text`, exactly as [`encode`](Self::encode) has them, and tokenises no more of the
    /// text than it needs for them. `pause` is called between parts of the text and may end the work with an error.
    ///
    /// # Errors
    /// Returns the error of `pause`, or that of the library, which rejects no text for the supported kinds of vocabulary.
    /// A text of more than 4 MiB is an error if the tokenizer has stages that cannot be interrupted.
    pub fn encode_in_parts<E: From<TokenizerError>>(
        &self,
        text: &str,
        (add_special_tokens, wanted): (bool, Wanted),
        mut pause: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<u32>, E> {
        pause()?;
        if text.len() <= self.parts.bytes {
            let mut ids = self.encode(text, add_special_tokens)?;
            wanted.cut(&mut ids);
            return Ok(ids);
        }
        let Some(lazy) = &self.parts.lazy else {
            return self.encode_whole(text, (add_special_tokens, wanted), pause);
        };
        let mut ids = self.lazily(lazy, (text, wanted), pause)?;
        if add_special_tokens {
            let (before, after) = &lazy.around;
            ids.splice(0..0, before.iter().copied());
            ids.extend_from_slice(after);
            self.edges.apply(&mut ids);
        }
        wanted.cut(&mut ids);
        Ok(ids)
    }

    /// Encodes a text that is too long for one part, without special tokens.
    fn lazily<E: From<TokenizerError>>(
        &self,
        Lazy { encoder, cuts, .. }: &Lazy,
        (text, wanted): (&str, Wanted),
        mut pause: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<u32>, E> {
        let (mut rest, mut ids, mut ends) = (text, Vec::new(), Vec::new());
        let mut count = 0;
        while !rest.is_empty() && !wanted.is_met_by(count) {
            let is_boundary = |at| cuts.as_ref().is_some_and(|cuts| cuts.allow(text, at, self.inner.get_model()));
            let begin = text.len() - rest.len();
            let (part, place) = match wanted {
                Wanted::All | Wanted::First(_) => {
                    let from = begin + rest.len().min(self.parts.bytes);
                    let cut = (from..text.len()).find(|&at| is_boundary(at)).unwrap_or(text.len());
                    rest = &text[cut..];
                    (&text[begin..cut], begin)
                }
                Wanted::Last(_) => {
                    let to = rest.len().saturating_sub(self.parts.bytes);
                    let cut = (1..=to).rev().find(|&at| is_boundary(at)).unwrap_or(0);
                    let part = &rest[cut..];
                    rest = &rest[..cut];
                    (part, cut)
                }
            };
            let place = if place == 0 { Place::Start } else { Place::Middle };
            let mut enough = |certain: usize| match wanted {
                Wanted::First(_) if wanted.is_met_by(count + certain) => Err(Stop::Enough),
                _ => pause().map_err(Stop::Failed),
            };
            let tokens = encoder.encode(self.inner.get_model(), (part, place), &mut enough)?;
            count += tokens.len();
            match wanted {
                Wanted::Last(_) => ends.push(tokens),
                _ if ids.is_empty() => ids = tokens,
                _ => ids.extend_from_slice(&tokens),
            }
        }
        ids.extend(ends.into_iter().rev().flatten());
        Ok(ids)
    }

    /// Encodes a text in one piece. One such text at a time is encoded, so that they take neither all processors nor all
    /// memory.
    fn encode_whole<E: From<TokenizerError>>(
        &self,
        text: &str,
        (add_special_tokens, wanted): (bool, Wanted),
        mut pause: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<u32>, E> {
        if text.len() > WHOLE_BYTES {
            return Err(TokenizerError::TooLong { bytes: text.len(), limit: WHOLE_BYTES }.into());
        }
        let _only = loop {
            match self.parts.whole.try_lock() {
                Ok(only) => break only,
                Err(std::sync::TryLockError::Poisoned(only)) => break only.into_inner(),
                Err(std::sync::TryLockError::WouldBlock) => {}
            }
            pause()?;
            std::thread::sleep(RETRY);
        };
        let mut ids = self.encode(text, add_special_tokens)?;
        wanted.cut(&mut ids);
        Ok(ids)
    }
}

impl Wanted {
    fn is_met_by(self, count: usize) -> bool {
        match self {
            Self::All => false,
            Self::First(most) | Self::Last(most) => count >= most.saturating_add(MOST_ADDED),
        }
    }

    fn cut(self, ids: &mut Vec<u32>) {
        match self {
            Self::All => {}
            Self::First(most) => ids.truncate(most),
            Self::Last(most) => {
                ids.drain(..ids.len().saturating_sub(most));
            }
        }
    }
}

/// Most tokens that [`Edges`](super::Edges) take away at one end.
const MOST_ADDED: usize = 1;

impl Cuts {
    /// The cuts that are certain for a tokenizer, if any.
    fn new(inner: &Stages, encoder: &LazyEncoder, entries: &[Entry<'_>]) -> Option<Self> {
        let added = inner.get_added_tokens_decoder();
        if !added.values().all(is_local_token) {
            return None;
        }
        let ends = |token: &tokenizers::AddedToken| token.content.chars().next_back();
        if splits_at_boundaries(inner) {
            let not_after = added.values().filter(|token| token.rstrip).filter_map(ends).collect();
            return Some(Self::Words { not_after });
        }
        // A model may look at a word as a whole, unless words end at spaces.
        let sees_neighbours_only = match inner.get_model() {
            Model::Bpe(bpe) => encoder.long_words.is_some() && !bpe.ignores_merges(),
            Model::Library(model) => matches!(model, ModelWrapper::Unigram(_)),
        };
        let is_certain = encoder.only_replaces_spaces() && (sees_neighbours_only || encoder.splits_words());
        if !is_certain || inner.get_model().token_to_id(SPACE).is_none() {
            return None;
        }
        // A character may be put before the text after an added token.
        let mut not_after: HashSet<char> = added.values().filter_map(ends).collect();
        for entry in entries.iter().flatten() {
            not_after.extend(entry.match_indices(SPACE).filter_map(|(at, _)| entry[..at].chars().next_back()));
        }
        Some(Self::Spaces { not_after })
    }

    /// Whether `text` may be cut at `at`.
    pub(super) fn allow(&self, text: &str, at: usize, model: &Model) -> bool {
        if !is_boundary(text.as_bytes(), at) {
            return false;
        }
        let Some(before) = text[..at].chars().next_back() else { return false };
        match self {
            Self::Words { not_after } => !not_after.contains(&before),
            // No entry of the vocabulary has both characters. Unknown characters may be joined.
            Self::Spaces { not_after } => {
                text.as_bytes()[at] == b' '
                    && !not_after.contains(&before)
                    && model.token_to_id(before.encode_utf8(&mut [0; 4])).is_some()
            }
        }
    }
}

/// SentencePiece's visible space.
const SPACE: &str = "\u{2581}";

/// Whether a text may be cut at `at`: before a space or an ideographic comma or full stop, and after an ASCII letter or
/// digit, a CJK ideograph of the basic plane or ASCII punctuation before a space.
///
/// No split rule has a match that goes on from there, and each begins one. No rule looks behind. One looks ahead, for the
/// end of white space, of which there is none before the boundary.
fn is_boundary(text: &[u8], at: usize) -> bool {
    let (before, after) = (&text[..at], &text[at..]);
    let ascii = |before: &[u8]| before.last().is_some_and(u8::is_ascii_alphanumeric);
    let ideograph = |before: &[u8]| matches!(before, [.., 0xe4, 0xb8..=0xbf, _] | [.., 0xe5..=0xe8, 0x80..=0xbf, _]);
    match after {
        [b' ', ..] => before.last().is_some_and(u8::is_ascii_graphic) || ideograph(before),
        // U+3002, U+FF0C.
        [0xe3, 0x80, 0x82, ..] | [0xef, 0xbc, 0x8c, ..] => ascii(before) || ideograph(before),
        _ => false,
    }
}

/// The tokens before and after every text with special tokens, if they are the same around every text.
fn around(inner: &Stages) -> Option<(Vec<u32>, Vec<u32>)> {
    let ids = |text, special| inner.encode_fast(text, special).ok().map(|encoding| encoding.get_ids().to_vec());
    let (plain, whole, empty) = (ids("a b", false)?, ids("a b", true)?, ids("", true)?);
    let start = whole.windows(plain.len().max(1)).position(|window| window == plain)?;
    let (before, after) = (&whole[..start], &whole[start + plain.len()..]);
    (empty == [before, after].concat()).then(|| (before.to_vec(), after.to_vec()))
}

/// Whether every rule of a byte-level tokenizer sees no further than a boundary, and a piece ends there.
fn splits_at_boundaries(inner: &Stages) -> bool {
    let normalizers = steps(serde_json::to_value(inner.get_normalizer()), "normalizers");
    let steps = steps(serde_json::to_value(inner.get_pre_tokenizer()), "pretokenizers");
    inner.get_model().is_bpe()
        && normalizers.iter().all(|step| step["type"] == "NFC")
        && steps.iter().all(is_local_step)
        && steps.iter().any(splits_at_spaces)
}

/// Whether a step of the pre-tokenizer never joins what a boundary separates.
fn is_local_step(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("ByteLevel") => step["add_prefix_space"] == false,
        Some("Digits") => true,
        Some("Split") => {
            let known = step["pattern"]["Regex"].as_str().is_some_and(|regex| SPLITS_AT_SPACES.contains(&regex));
            known && step["behavior"] == "Isolated" && step["invert"] == false
        }
        _ => false,
    }
}

/// Whether a local step ends a piece at every boundary, as the rules for words do and those for digits do not.
fn splits_at_spaces(step: &Value) -> bool {
    match step["type"].as_str() {
        Some("ByteLevel") => step["use_regex"] == true,
        Some("Split") => step["pattern"]["Regex"].as_str().is_some_and(|regex| regex.contains(r"|\s+(?!\S)|\s+")),
        _ => false,
    }
}

/// Whether an added token neither contains a boundary nor is found depending on what is before one. White space that it
/// takes from its left does not reach across a boundary.
fn is_local_token(token: &tokenizers::AddedToken) -> bool {
    let text = token.content.as_bytes();
    let sees_before = token.single_word && token.content.starts_with([' ', '\u{3002}', '\u{ff0c}']);
    !sees_before && !(1..text.len()).any(|at| is_boundary(text, at))
}
