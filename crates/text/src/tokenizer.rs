//! Conversion between text and token ids.

mod best_path;
mod bpe;
mod gguf;
mod lazy;
mod local;
mod long_words;
mod model;
mod pair;
mod parts;
mod pieces;
mod pre_tokenizer;

pub use gguf::GgufVocabulary;
pub use pair::{PairTokens, TokenLimit};
pub use parts::Wanted;
use std::borrow::Cow;

use model::Stages;
use parts::Parts;
pub use pieces::byte_character;
pub(crate) use pieces::{PieceDecoder, Pieces};

/// Reason why a vocabulary could not be used or a text not encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The tokenizers library cannot parse tokenizer.json.
    #[error("the tokenizer.json cannot be used: {0}")]
    Json(String),
    /// The kind of vocabulary is not implemented.
    #[error(
        "the GGUF tokenizer model \"{0}\" is not supported (supported: gpt2, llama); \
         use the model's Hugging Face directory with its tokenizer.json"
    )]
    UnknownModel(String),
    /// The split rules of a byte-level vocabulary are unknown, so its token ids would be wrong.
    #[error(
        "the GGUF pre-tokenizer \"{name}\" is not known, and guessing would give wrong token ids (known: {known}); \
         use the model's Hugging Face directory with its tokenizer.json"
    )]
    UnknownPreTokenizer {
        /// Value of `tokenizer.ggml.pre` in the file.
        name: String,
        /// Known names.
        known: String,
    },
    /// The parts of a GGUF vocabulary are inconsistent.
    #[error("the GGUF vocabulary is broken: {0}")]
    Vocabulary(String),
    /// A special token in the configuration is not in the vocabulary.
    #[error("the {role} token \"{token}\" is not in the vocabulary")]
    MissingSpecial {
        /// Role of the special token.
        role: &'static str,
        /// Text of the token.
        token: String,
    },
    /// The text is too long for a tokenizer that cannot be interrupted.
    #[error("this model's tokenizer takes a text of at most {limit} bytes, and the text has {bytes}; shorten it")]
    TooLong {
        /// Length of the text in bytes.
        bytes: usize,
        /// Limit.
        limit: usize,
    },
    /// The text has a run of characters that can only be normalised together.
    #[error("the text has a run of more than {limit} bytes of combining marks or control characters; shorten it")]
    LongRun {
        /// Limit in bytes.
        limit: usize,
    },
    /// The token types of a pair of texts are not those of the first text followed by those of the second.
    #[error("the post-processor of tokenizer.json gives pairs of texts token types other than 0, then 1")]
    TokenTypes,
    /// The text could not be encoded.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
    /// The ids could not be decoded.
    #[error("the tokens cannot be decoded: {0}")]
    Decode(String),
}

/// The special tokens of a model as text, and whether encoding adds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Beginning-of-sequence token.
    pub bos: Option<String>,
    /// End-of-sequence token.
    pub eos: Option<String>,
    /// Token for text that the vocabulary cannot express.
    pub unk: Option<String>,
    /// Padding token, used only by templates.
    pub pad: Option<String>,
    /// Whether encoding with special tokens starts with `bos`; `None` follows tokenizer.json.
    pub add_bos: Option<bool>,
    /// Whether encoding with special tokens ends with `eos`; `None` follows tokenizer.json.
    pub add_eos: Option<bool>,
}

/// A vocabulary with its rules. All methods take `&self`, so it can be shared in an `Arc`.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Stages,
    /// Bytes of every token; `None` if the library's decoder depends on neighbouring tokens.
    pieces: Option<Pieces>,
    /// Whether an id is hidden when special tokens are skipped.
    special_ids: Vec<bool>,
    special: SpecialTokens,
    edges: Edges,
    parts: Parts,
}

/// An entry of a vocabulary; `None` for an id without one.
type Entry<'a> = Option<Cow<'a, str>>;

/// What is derived from the entries of a vocabulary.
struct Tables {
    pieces: Option<Pieces>,
    special_ids: Vec<bool>,
    parts: Parts,
}

/// Changes at the ends of the ids that the library returns with special tokens.
#[derive(Debug, Default)]
struct Edges {
    prepend: Option<u32>,
    /// The first token, if it is to be removed.
    drop_first: Option<u32>,
    append: Option<u32>,
    /// The last token, if it is to be removed.
    drop_last: Option<u32>,
}

impl Tokenizer {
    /// Parses a `tokenizer.json`. `special` adds information that the file lacks: the roles of special tokens and, if
    /// `tokenizer_config.json` overrides the file, whether they are added.
    ///
    /// # Errors
    /// Returns an error if the file cannot be parsed or a token to be added is not in the vocabulary.
    pub fn from_json(tokenizer_json: &[u8], special: SpecialTokens) -> Result<Self, TokenizerError> {
        let mut inner: Stages =
            serde_json::from_slice(tokenizer_json).map_err(|error| TokenizerError::Json(error.to_string()))?;
        // The file may set a maximum length or padding; both would silently change a request's tokens.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| TokenizerError::Json(error.to_string()))?;
        let (model, added) = (inner.get_model(), inner.get_added_vocabulary());
        let after_added = added.get_vocab().values().max().map_or(0, |&id| id as usize + 1);
        let entry = |id| added.simple_id_to_token(id).map(Cow::Owned).or_else(|| model.entry(id));
        let entries: Vec<Entry<'_>> = (0..).take(model.end().max(after_added)).map(entry).collect();
        let tables = Tables::new(&inner, &entries);
        Self::new(inner, special, tables)
    }

    /// Builds the tokenizer that a GGUF file describes.
    ///
    /// # Errors
    /// Returns an error if the kind of vocabulary or its split rules are unknown, or if the lists are inconsistent.
    pub fn from_gguf(vocab: &GgufVocabulary<'_>) -> Result<Self, TokenizerError> {
        let (inner, special) = gguf::build(vocab)?;
        let entries: Vec<Entry<'_>> = vocab.tokens.iter().map(|&token| Some(Cow::Borrowed(token))).collect();
        let tables = Tables::new(&inner, &entries);
        Self::new(inner, special, tables)
    }

    fn new(inner: Stages, special: SpecialTokens, tables: Tables) -> Result<Self, TokenizerError> {
        let edges = Edges::new(&inner, &special)?;
        let Tables { pieces, special_ids, parts } = tables;
        Ok(Self { inner, pieces, special_ids, special, edges, parts })
    }

    /// Returns the token ids of `text`. Special tokens that occur as text become their ids, as in vLLM. With
    /// `add_special_tokens` the model's begin and end tokens are added according to its configuration; a rendered chat
    /// template already contains them.
    ///
    /// # Errors
    /// Returns an error if the library rejects the text, which it never does for the supported kinds of vocabulary.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        let mut ids = encoding.get_ids().to_vec();
        if add_special_tokens {
            self.edges.apply(&mut ids);
        }
        Ok(ids)
    }

    /// Returns the text of `ids`. Bytes that are not UTF-8 become U+FFFD. Unknown ids have no text.
    ///
    /// In byte-fallback vocabularies, a run of byte tokens that is not valid UTF-8 keeps its valid characters, whereas
    /// the tokenizers library replaces every byte of the run. Only this allows text to be streamed.
    ///
    /// # Errors
    /// Returns an error if the library rejects the ids, which it never does for the supported kinds of vocabulary.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokenizerError> {
        let Some(pieces) = &self.pieces else {
            return self
                .inner
                .decode(ids, skip_special_tokens)
                .map_err(|error| TokenizerError::Decode(error.to_string()));
        };
        let mut text = String::new();
        let mut decoder = PieceDecoder::new(pieces);
        for &id in ids {
            decoder.push(self.visible_piece(pieces, id, skip_special_tokens), &mut text);
        }
        decoder.finish(&mut text);
        Ok(text)
    }

    /// Returns one more than the largest id that has a token. A model's head may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.special_ids.len()
    }

    /// Returns the bytes of the longest token; `None` if a token may stand for a text of any length, because the tokenizer
    /// drops white space or replaces whole words by an unknown token. A text has at least its length divided by this as
    /// tokens.
    pub fn longest_token(&self) -> Option<usize> {
        let pieces = self.pieces.as_ref()?;
        let size = u32::try_from(self.vocab_size()).unwrap_or(u32::MAX);
        (0..size).map(|id| pieces.get(id).len()).max().filter(|&bytes| bytes > 0)
    }

    /// Returns the vocabulary entry in the vocabulary's own spelling (`Ġthe`, `▁the`).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns the id of a vocabulary entry in the vocabulary's own spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns whether the token is omitted from text when special tokens are skipped.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.get(id as usize).copied().unwrap_or(false)
    }

    /// Returns whether decoding passes the token to the decoder: not an unknown id, nor a skipped special token.
    pub(crate) fn is_decoded(&self, id: u32, skip_special_tokens: bool) -> bool {
        !(skip_special_tokens && self.is_special(id)) && self.inner.id_to_token(id).is_some()
    }

    /// Returns the text of a single token, as in vLLM's `token` of log-probabilities: special tokens are shown, and a
    /// partial character is U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        self.decode(&[id], false).unwrap_or_default()
    }

    /// Returns the bytes of a single token. They are those of [`token_text`](Self::token_text), except that a partial
    /// character is kept, so that a client that joins the `bytes` of log-probabilities gets the text (vLLM returns the
    /// bytes of U+FFFD).
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match &self.pieces {
            Some(pieces) => pieces.without_leading(pieces.get(id)).to_vec(),
            None => self.token_text(id).into_bytes(),
        }
    }

    /// Returns the special tokens.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    pub(crate) fn pieces(&self) -> Option<&Pieces> {
        self.pieces.as_ref()
    }

    /// Returns the bytes that a token adds to the text: none for a skipped special token.
    pub(crate) fn visible_piece<'a>(&self, pieces: &'a Pieces, id: u32, skip_special_tokens: bool) -> &'a [u8] {
        if skip_special_tokens && self.is_special(id) { &[] } else { pieces.get(id) }
    }
}

impl Tables {
    /// `entries` are those of the vocabulary by id, in the spelling that the decoder reads.
    fn new(inner: &Stages, entries: &[Entry<'_>]) -> Self {
        let mut special_ids = vec![false; entries.len()];
        for (id, token) in inner.get_added_tokens_decoder() {
            if let Some(flag) = special_ids.get_mut(id as usize) {
                *flag = token.special;
            }
        }
        let pieces = Pieces::new(inner.get_decoder(), entries);
        if pieces.is_none() {
            tracing::debug!("the decoder of this tokenizer is not per token: detokenising takes the slower way");
        }
        Self { pieces, special_ids, parts: Parts::new(inner, entries) }
    }
}

impl Edges {
    fn new(inner: &Stages, special: &SpecialTokens) -> Result<Self, TokenizerError> {
        if special.add_bos.is_none() && special.add_eos.is_none() {
            return Ok(Self::default());
        }
        let id = |role, token: &Option<String>| match token {
            Some(token) => inner
                .token_to_id(token)
                .map(Some)
                .ok_or_else(|| TokenizerError::MissingSpecial { role, token: token.clone() }),
            None => Ok(None),
        };
        // The file's own post-processor adds the same tokens around every text, so an empty text shows them.
        let around = inner.encode_fast("", true).map_err(|error| TokenizerError::Json(error.to_string()))?;
        let mut around = around.get_ids();
        let mut edges = Self::default();
        if let (Some(add), Some(bos)) = (special.add_bos, id("bos", &special.bos)?) {
            let has = around.first() == Some(&bos);
            edges.drop_first = (has && !add).then_some(bos);
            edges.prepend = (add && !has).then_some(bos);
            around = &around[usize::from(has)..];
        }
        if let (Some(add), Some(eos)) = (special.add_eos, id("eos", &special.eos)?) {
            let has = around.last() == Some(&eos);
            edges.drop_last = (has && !add).then_some(eos);
            edges.append = (add && !has).then_some(eos);
        }
        Ok(edges)
    }

    /// Changes the ends of `ids`. Returns by how much the tokens between them move.
    fn apply(&self, ids: &mut Vec<u32>) -> isize {
        // The template for pairs may not add the tokens that the one for texts does.
        let dropped = self.drop_first.is_some() && self.drop_first == ids.first().copied();
        if dropped {
            ids.remove(0);
        }
        if self.drop_last.is_some() && self.drop_last == ids.last().copied() {
            ids.pop();
        }
        ids.splice(0..0, self.prepend);
        ids.extend(self.append);
        isize::from(self.prepend.is_some()) - isize::from(dropped)
    }
}

#[cfg(test)]
mod tests;
