//! The stages of the tokenizers library, run piece by piece.
//!
//! The library keeps a record of more than a hundred bytes for each byte of a text, runs each stage on the whole text and
//! cannot be interrupted. Here a text passes through the same stages lazily: added tokens are cut out of it, what lies
//! between them is normalised and split with the expressions of the library's own pre-tokenizer, and each piece goes to
//! the library's model. Tokenizers with other stages than those known here have no such encoder.

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use tokenizers::utils::SysRegex;
use tokenizers::{AddedToken, Model as _, ModelWrapper, NormalizedString, Normalizer};
use unicode_categories::UnicodeCategories;

use super::best_path::BestPath;
use super::local::LocalNormalizer;
use super::long_words::LongWords;
use super::model::{Model, Stages};
use super::pieces::byte_characters;
use super::pre_tokenizer::GPT2;
use super::{Entry, Tokenizer, TokenizerError};

/// Bytes of a text between two pauses: a few milliseconds of work.
pub(super) const PAUSE_BYTES: usize = 16 << 10;

/// The stages of a tokenizer.
#[derive(Debug)]
pub(super) struct LazyEncoder {
    /// Tokens that are found in the text as it is.
    raw: Option<AddedTokens>,
    normalizers: Vec<Normalization>,
    /// Tokens that are found in the normalised text.
    normalized: Option<AddedTokens>,
    metaspace: Option<Metaspace>,
    splits: Vec<Split>,
    /// The character of each byte, if the model's entries are spelled in them.
    bytes: Option<Box<[char; 256]>>,
    pub(super) long_words: Option<LongWords>,
    pub(super) best_path: Option<BestPath>,
}

/// A stage that changes the text between added tokens.
#[derive(Debug)]
enum Normalization {
    Local(LocalNormalizer),
    Prepend(String),
    Replace {
        from: String,
        to: String,
    },
    /// White space is removed from the ends.
    Strip {
        left: bool,
        right: bool,
    },
    /// Each run of two spaces or more is replaced.
    SpaceRuns {
        to: String,
    },
}

/// The replacement of spaces by a visible character, which may also be put before the text.
#[derive(Debug)]
struct Metaspace {
    replacement: char,
    prepend: Prepend,
}

/// The texts between added tokens that [`Metaspace`] puts its character before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prepend {
    All,
    First,
    None,
}

/// A rule that splits a piece.
#[derive(Debug)]
enum Split {
    /// Matches and the text between them are pieces.
    Regex(SysRegex),
    /// Each numeric character is a piece.
    EachDigit,
    /// Runs of numeric characters are pieces.
    Digits,
    /// A piece begins at each of these characters.
    Before(char),
    /// White space is removed, and the text between it is pieces.
    WhiteSpace,
    /// A piece gets this character before it, unless it begins with one.
    Prefix(char),
    /// Each punctuation character of BERT is a piece.
    Punctuation,
}

/// Tokens that are cut out of a text before anything else.
#[derive(Debug)]
struct AddedTokens {
    automaton: AhoCorasick,
    tokens: Vec<(u32, AddedToken)>,
    word: SysRegex,
}

/// The place of a text that is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// It begins the whole text.
    Start,
    /// It follows an added token.
    AfterToken,
    /// It follows a boundary inside the text between two added tokens.
    Middle,
}

/// Reason why encoding ended early.
#[derive(Debug)]
pub(super) enum Stop<E> {
    /// There are enough tokens.
    Enough,
    Failed(E),
}

impl<E: From<TokenizerError>> From<tokenizers::Error> for Stop<E> {
    fn from(error: tokenizers::Error) -> Self {
        Self::Failed(TokenizerError::Encode(error.to_string()).into())
    }
}

/// A text that is being encoded.
pub(super) struct Encoding<'a, E> {
    encoder: &'a LazyEncoder,
    pub(super) model: &'a Model,
    pub(super) ids: Vec<u32>,
    bytes: usize,
    /// Called with the number of tokens that are certain.
    pause: &'a mut dyn FnMut(usize) -> Result<(), Stop<E>>,
}

impl LazyEncoder {
    /// The encoder with the stages of a tokenizer; `None` if one of them is unknown.
    pub(super) fn new(inner: &Stages, entries: &[Entry<'_>]) -> Option<Self> {
        match inner.get_model() {
            Model::Library(ModelWrapper::BPE(model)) if model.dropout.is_some() => return None,
            // A longer word is unknown. The search takes the square of the length of a shorter one.
            Model::Library(ModelWrapper::WordPiece(model))
                if model.max_input_chars_per_word > WORD_PIECE_CHARACTERS =>
            {
                return None;
            }
            _ => {}
        }
        let (raw, normalized) = AddedTokens::from_tokenizer(inner)?;
        let mut encoder = Self {
            raw,
            normalizers: vec![],
            normalized,
            metaspace: None,
            splits: vec![],
            bytes: None,
            long_words: LongWords::new(inner.get_model(), entries),
            best_path: BestPath::new(inner.get_model()),
        };
        for step in steps(serde_json::to_value(inner.get_normalizer()), "normalizers") {
            encoder.normalizers.push(Normalization::parse(&step)?);
        }
        for step in steps(serde_json::to_value(inner.get_pre_tokenizer()), "pretokenizers") {
            encoder.add_pre_tokenizer(&step)?;
        }
        Some(encoder)
    }

    /// Adds a step of the pre-tokenizer; `None` if it is unknown.
    fn add_pre_tokenizer(&mut self, step: &Value) -> Option<()> {
        // These rewrite the text, so no rule may follow.
        let prefixes = self.splits.iter().any(|split| matches!(split, Split::Prefix(_)));
        if self.bytes.is_some() || self.metaspace.is_some() || prefixes {
            return None;
        }
        match step["type"].as_str()? {
            "ByteLevel" if step["add_prefix_space"] == false => {
                if step["use_regex"] == true {
                    self.splits.push(Split::Regex(SysRegex::new(GPT2).ok()?));
                }
                let mut characters = Box::new(['\0'; 256]);
                for (character, byte) in ('\0'..).zip(byte_characters()) {
                    if let Some(byte) = byte {
                        characters[usize::from(byte)] = character;
                    }
                }
                self.bytes = Some(characters);
            }
            "Digits" if step["individual_digits"] == true => self.splits.push(Split::EachDigit),
            "Digits" => self.splits.push(Split::Digits),
            "WhitespaceSplit" => self.splits.push(Split::WhiteSpace),
            "BertPreTokenizer" => self.splits.extend([Split::WhiteSpace, Split::Punctuation]),
            "Split" if step["pattern"]["String"] == " " && self.replaces_spaces() => {}
            "Split" if step["behavior"] == "Isolated" && step["invert"] == false => {
                self.splits.push(Split::Regex(SysRegex::new(step["pattern"]["Regex"].as_str()?).ok()?));
            }
            "Metaspace" if matches!(self.splits[..], [Split::WhiteSpace]) && step["prepend_scheme"] == "always" => {
                let replacement = step["replacement"].as_str()?.chars().next()?;
                self.splits.push(Split::Prefix(replacement));
                if step["split"] == true {
                    self.splits.push(Split::Before(replacement));
                }
            }
            "Metaspace" if self.splits.is_empty() => {
                let replacement = step["replacement"].as_str()?.chars().next()?;
                let prepend = match step["prepend_scheme"].as_str()? {
                    "always" => Prepend::All,
                    "first" => Prepend::First,
                    "never" => Prepend::None,
                    _ => return None,
                };
                self.metaspace = Some(Metaspace { replacement, prepend });
                if step["split"] == true {
                    self.splits.push(Split::Before(replacement));
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Whether no normalised text has a space.
    pub(super) fn replaces_spaces(&self) -> bool {
        let removes = |step: &Normalization| matches!(step, Normalization::Replace { from, to } if from == " " && !to.contains(' '));
        self.metaspace.is_some() || self.normalizers.last().is_some_and(removes)
    }

    /// Whether nothing happens to a text but that spaces are replaced and pieces begin there.
    pub(super) fn only_replaces_spaces(&self) -> bool {
        let known = |step: &Normalization| matches!(step, Normalization::Prepend(_) | Normalization::Replace { .. });
        let at_spaces = |split: &Split| matches!(split, Split::Before(_));
        self.replaces_spaces() && self.normalizers.iter().all(known) && self.splits.iter().all(at_spaces)
    }

    /// Whether there are rules that split a text into words.
    pub(super) fn splits_words(&self) -> bool {
        !self.splits.is_empty()
    }

    /// Returns the tokens of `text`, which is at `place` of a longer one.
    pub(super) fn encode<E: From<TokenizerError>>(
        &self,
        model: &Model,
        (text, place): (&str, Place),
        pause: &mut dyn FnMut(usize) -> Result<(), Stop<E>>,
    ) -> Result<Vec<u32>, E> {
        let mut encoding = Encoding { encoder: self, model, ids: vec![], bytes: 0, pause };
        match encoding.text(text, place) {
            Ok(()) | Err(Stop::Enough) => Ok(encoding.ids),
            Err(Stop::Failed(error)) => Err(error),
        }
    }

    /// Spells a piece in the characters of the model's entries.
    pub(super) fn spell<'t>(&self, piece: &'t [u8]) -> Cow<'t, str> {
        match &self.bytes {
            Some(characters) => Cow::Owned(piece.iter().map(|&byte| characters[usize::from(byte)]).collect()),
            None => String::from_utf8_lossy(piece),
        }
    }

    /// The number of bytes of a text that this part of its spelling stands for. A token may be a part of a character.
    pub(super) fn spelled_bytes(&self, spelling: &str, part: (usize, usize)) -> usize {
        if self.bytes.is_some() { spelling[part.0..part.1].chars().count() } else { part.1 - part.0 }
    }

    /// The last place at or before `at` where a piece can be cut.
    pub(super) fn floor(&self, piece: &str, at: usize) -> usize {
        let at = at.min(piece.len());
        let is_cut = |&at: &usize| self.bytes.is_some() || piece.is_char_boundary(at);
        (0..=at).rev().find(is_cut).unwrap_or(0)
    }
}

impl<E: From<TokenizerError>> Encoding<'_, E> {
    fn text(&mut self, text: &str, place: Place) -> Result<(), Stop<E>> {
        let (encoder, start) = (self.encoder, text.as_ptr());
        AddedTokens::split(encoder.raw.as_ref(), text, |text, token| match token {
            Some(id) => self.added(id, text),
            None if text.as_ptr() == start => self.between(text, place),
            None => self.between(text, Place::AfterToken),
        })
    }

    /// Encodes the text between two added tokens.
    fn between(&mut self, text: &str, place: Place) -> Result<(), Stop<E>> {
        let encoder = self.encoder;
        let text = self.normalise(text, place)?;
        let start = text.as_ptr();
        AddedTokens::split(encoder.normalized.as_ref(), &text, |text, token| match token {
            Some(id) => self.added(id, text),
            None => {
                let place = if text.as_ptr() == start { place } else { Place::AfterToken };
                let replaced = encoder.metaspace.as_ref().map(|metaspace| metaspace.replace(text, place));
                let text = replaced.unwrap_or(Cow::Borrowed(text));
                self.pieces(&encoder.splits, &text)
            }
        })
    }

    fn added(&mut self, id: u32, text: &str) -> Result<(), Stop<E>> {
        self.ids.push(id);
        self.progress(text.len())
    }

    fn normalise<'t>(&mut self, text: &'t str, place: Place) -> Result<Cow<'t, str>, Stop<E>> {
        let mut text = Cow::Borrowed(text);
        for step in &self.encoder.normalizers {
            match step {
                Normalization::Prepend(prefix) if place != Place::Middle && !text.is_empty() => {
                    text = Cow::Owned(format!("{prefix}{text}"));
                }
                Normalization::Prepend(_) => {}
                Normalization::Replace { from, to } if text.contains(from) => {
                    text = Cow::Owned(text.replace(from, to));
                }
                Normalization::Replace { .. } => {}
                Normalization::Strip { left, right } => {
                    let start = if *left { text.len() - text.trim_start().len() } else { 0 };
                    let end = if *right { text.trim_end().len().max(start) } else { text.len() };
                    text = match text {
                        Cow::Borrowed(text) => Cow::Borrowed(&text[start..end]),
                        Cow::Owned(text) => Cow::Owned(text[start..end].to_owned()),
                    };
                }
                Normalization::SpaceRuns { to } if text.contains("  ") => text = Cow::Owned(without_runs(&text, to)),
                Normalization::SpaceRuns { .. } => {}
                Normalization::Local(local) if local.keeps(&text) => {}
                Normalization::Local(local) => text = Cow::Owned(self.in_parts(local, &text)?),
            }
        }
        Ok(text)
    }

    fn in_parts(&mut self, local: &LocalNormalizer, mut text: &str) -> Result<String, Stop<E>> {
        let mut normalized = String::with_capacity(text.len());
        while !text.is_empty() {
            self.wait(self.ids.len())?;
            let (part, rest) = local.split_part(text).map_err(|error| Stop::Failed(error.into()))?;
            normalized.push_str(&local.normalise(part)?);
            text = rest;
        }
        Ok(normalized)
    }

    /// Splits a piece by the rules that are left and encodes the results.
    fn pieces(&mut self, splits: &[Split], piece: &str) -> Result<(), Stop<E>> {
        let Some((split, rest)) = splits.split_first() else { return self.word(piece) };
        match split {
            Split::Regex(regex) => {
                let mut done = 0;
                for (start, end) in regex.find_iter(piece) {
                    self.pieces(rest, &piece[done..start])?;
                    self.pieces(rest, &piece[start..end])?;
                    done = end;
                }
                self.pieces(rest, &piece[done..])
            }
            Split::EachDigit => self.isolate(piece, rest, char::is_numeric),
            Split::Digits => self.runs(piece, rest),
            Split::WhiteSpace => piece.split_inclusive(char::is_whitespace).try_for_each(|piece| {
                let word = piece.trim_end_matches(char::is_whitespace);
                self.pieces(rest, word)?;
                self.progress(piece.len() - word.len())
            }),
            Split::Punctuation => self.isolate(piece, rest, is_punctuation),
            Split::Prefix(character) if piece.is_empty() || piece.starts_with(*character) => self.pieces(rest, piece),
            Split::Prefix(character) => self.pieces(rest, &format!("{character}{piece}")),
            Split::Before(character) => {
                let mut start = 0;
                for (at, _) in piece.match_indices(*character) {
                    self.pieces(rest, &piece[start..at])?;
                    start = at;
                }
                self.pieces(rest, &piece[start..])
            }
        }
    }

    /// Splits a piece before and after each of these characters.
    fn isolate(&mut self, piece: &str, rest: &[Split], is_isolated: fn(char) -> bool) -> Result<(), Stop<E>> {
        piece.split_inclusive(is_isolated).try_for_each(|piece| {
            let last = piece.chars().next_back().filter(|last| is_isolated(*last)).map_or(0, char::len_utf8);
            let (before, last) = piece.split_at(piece.len() - last);
            self.pieces(rest, before)?;
            self.pieces(rest, last)
        })
    }

    /// Splits a piece where runs of numeric characters begin and end.
    fn runs(&mut self, mut piece: &str, rest: &[Split]) -> Result<(), Stop<E>> {
        while let Some(first) = piece.chars().next() {
            let end = piece.find(|c: char| c.is_numeric() != first.is_numeric()).unwrap_or(piece.len());
            let (run, others) = piece.split_at(end);
            self.pieces(rest, run)?;
            piece = others;
        }
        Ok(())
    }

    fn word(&mut self, piece: &str) -> Result<(), Stop<E>> {
        if piece.is_empty() {
            return Ok(());
        }
        let encoder = self.encoder;
        if let Some(long) = encoder.long_words.as_ref().filter(|long| long.applies_to(piece)) {
            long.encode(encoder, self, piece)?;
        } else if let Some(search) = encoder.best_path.as_ref().filter(|search| search.applies_to(piece)) {
            search.encode(self, &encoder.spell(piece.as_bytes()))?;
        } else {
            let tokens = self.model.tokenize(&encoder.spell(piece.as_bytes()))?;
            self.ids.extend(tokens.iter().map(|token| token.id));
        }
        self.progress(piece.len())
    }

    /// Counts the bytes that were encoded, and pauses now and then.
    fn progress(&mut self, bytes: usize) -> Result<(), Stop<E>> {
        self.bytes += bytes;
        if self.bytes < PAUSE_BYTES {
            return Ok(());
        }
        self.bytes = 0;
        self.wait(self.ids.len())
    }

    /// Pauses; `certain` tokens will not change any more.
    pub(super) fn wait(&mut self, certain: usize) -> Result<(), Stop<E>> {
        (self.pause)(certain)
    }
}

impl Normalization {
    fn parse(step: &Value) -> Option<Self> {
        match step["type"].as_str()? {
            "Prepend" => Some(Self::Prepend(step["prepend"].as_str()?.to_owned())),
            "Strip" => Some(Self::Strip { left: step["strip_left"].as_bool()?, right: step["strip_right"].as_bool()? }),
            "Replace" if step["pattern"]["Regex"] == " {2,}" => {
                Some(Self::SpaceRuns { to: step["content"].as_str()?.to_owned() })
            }
            "Replace" => {
                let from = step["pattern"]["String"].as_str().filter(|from| !from.is_empty())?.to_owned();
                Some(Self::Replace { from, to: step["content"].as_str()?.to_owned() })
            }
            _ => LocalNormalizer::parse(step).map(Self::Local),
        }
    }
}

impl Metaspace {
    fn replace<'t>(&self, text: &'t str, place: Place) -> Cow<'t, str> {
        let prepends = match self.prepend {
            Prepend::All => place != Place::Middle,
            Prepend::First => place == Place::Start,
            Prepend::None => false,
        };
        let mut text = if text.contains(' ') {
            Cow::Owned(text.replace(' ', self.replacement.encode_utf8(&mut [0; 4])))
        } else {
            Cow::Borrowed(text)
        };
        if prepends && !text.is_empty() && !text.starts_with(self.replacement) {
            text.to_mut().insert(0, self.replacement);
        }
        text
    }
}

impl AddedTokens {
    /// The tokens that are found before and after normalisation; `None` if one of them cannot be normalised.
    fn from_tokenizer(inner: &Stages) -> Option<(Option<Self>, Option<Self>)> {
        let (mut raw, mut normalized) = (vec![], vec![]);
        for (id, token) in inner.get_added_tokens_decoder() {
            if !token.normalized {
                raw.push((token.content.clone(), id, token));
                continue;
            }
            let mut content = NormalizedString::from(token.content.as_str());
            if let Some(normalizer) = inner.get_normalizer() {
                normalizer.normalize(&mut content).ok()?;
            }
            normalized.push((content.get().to_owned(), id, token));
        }
        Some((Self::new(raw)?, Self::new(normalized)?))
    }

    fn new(mut tokens: Vec<(String, u32, AddedToken)>) -> Option<Option<Self>> {
        if tokens.is_empty() {
            return Some(None);
        }
        tokens.sort_by(|a, b| a.0.cmp(&b.0));
        if tokens.windows(2).any(|pair| pair[0].0 == pair[1].0) || tokens[0].0.is_empty() {
            return None;
        }
        let patterns = tokens.iter().map(|(pattern, ..)| pattern);
        let automaton = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(patterns).ok()?;
        let tokens = tokens.into_iter().map(|(_, id, token)| (id, token)).collect();
        Some(Some(Self { automaton, tokens, word: SysRegex::new(r"\w").ok()? }))
    }

    /// Calls `each` for every added token in `text` and for every text between them.
    fn split<E>(
        added: Option<&Self>,
        text: &str,
        mut each: impl FnMut(&str, Option<u32>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        if let Some(added) = added {
            for found in added.automaton.find_iter(text) {
                let (id, token) = &added.tokens[found.pattern().as_usize()];
                let (mut start, mut end) = (found.start(), found.end());
                if token.single_word && !added.is_single_word(text, start, end) {
                    continue;
                }
                if token.lstrip && start > done {
                    start = done + text[done..start].trim_end().len();
                } else if token.lstrip {
                    start = done;
                }
                if token.rstrip {
                    end = text.len() - text[end..].trim_start().len();
                }
                if done < start {
                    each(&text[done..start], None)?;
                }
                each(&text[start..end], Some(*id))?;
                done = end;
            }
        }
        if done < text.len() { each(&text[done..], None) } else { Ok(()) }
    }

    fn is_single_word(&self, text: &str, start: usize, end: usize) -> bool {
        let is_word = |character: Option<char>| {
            character.is_some_and(|c| self.word.find_iter(c.encode_utf8(&mut [0; 4])).next().is_some())
        };
        !is_word(text[..start].chars().next_back()) && !is_word(text[end..].chars().next())
    }
}

impl Tokenizer {
    /// Whether a text of any length is encoded in parts, between which it can be interrupted.
    pub fn is_interruptible(&self) -> bool {
        self.parts.is_interruptible()
    }
}

/// A text in which `to` replaces each run of two spaces or more.
fn without_runs(text: &str, to: &str) -> String {
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("  ") {
        replaced.push_str(&rest[..start]);
        replaced.push_str(to);
        rest = rest[start..].trim_start_matches(' ');
    }
    replaced.push_str(rest);
    replaced
}

/// The most characters of a word that a WordPiece model may look at.
const WORD_PIECE_CHARACTERS: usize = 1000;

/// Whether a character separates words in BERT's pre-tokenizer.
fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.is_punctuation()
}

/// The steps of a stage of the library, in their order.
pub(super) fn steps(stage: serde_json::Result<Value>, list: &str) -> Vec<Value> {
    match stage {
        Ok(Value::Null) => vec![],
        Ok(mut stage) if stage["type"] == "Sequence" => match stage[list].take() {
            Value::Array(inner) => inner.into_iter().flat_map(|step| steps(Ok(step), list)).collect(),
            other => vec![other],
        },
        Ok(step) => vec![step],
        Err(_) => vec![Value::Null],
    }
}
