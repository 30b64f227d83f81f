//! Text to token ids and back.

mod gguf;
mod pieces;
mod pre_tokenizer;

pub use gguf::GgufVocabulary;
use tokenizers::models::bpe::BPE;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl};

pub(crate) use pieces::{PieceDecoder, Pieces};

/// Why a vocabulary could not be used, or a text not encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// tokenizer.json is not what the tokenizers library reads.
    #[error("the tokenizer.json cannot be used: {0}")]
    Json(String),
    /// A kind of vocabulary that is not implemented.
    #[error(
        "the GGUF tokenizer model \"{0}\" is not supported (supported: gpt2, llama); \
         use the model's Hugging Face directory with its tokenizer.json"
    )]
    UnknownModel(String),
    /// The split rules of a byte-level vocabulary are not known, so its token ids would be wrong.
    #[error(
        "the GGUF pre-tokenizer \"{name}\" is not known, and guessing would give wrong token ids (known: {known}); \
         use the model's Hugging Face directory with its tokenizer.json"
    )]
    UnknownPreTokenizer {
        /// `tokenizer.ggml.pre` of the file.
        name: String,
        /// Names that are known.
        known: String,
    },
    /// The parts of a GGUF vocabulary do not fit together.
    #[error("the GGUF vocabulary is broken: {0}")]
    Vocabulary(String),
    /// A special token that the configuration names is not in the vocabulary.
    #[error("the {role} token \"{token}\" is not in the vocabulary")]
    MissingSpecial {
        /// Which special token.
        role: &'static str,
        /// Its text.
        token: String,
    },
    /// The text could not be encoded.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
    /// The ids could not be decoded.
    #[error("the tokens cannot be decoded: {0}")]
    Decode(String),
}

/// The special tokens of a model, by their text, and whether encoding adds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Beginning of sequence.
    pub bos: Option<String>,
    /// End of sequence.
    pub eos: Option<String>,
    /// Stands for what the vocabulary cannot express.
    pub unk: Option<String>,
    /// Fills batches; of no use here but to templates.
    pub pad: Option<String>,
    /// Whether encoding with special tokens starts with `bos`; `None`: as tokenizer.json says.
    pub add_bos: Option<bool>,
    /// Whether encoding with special tokens ends with `eos`; `None`: as tokenizer.json says.
    pub add_eos: Option<bool>,
}

/// A vocabulary with its rules. Cheap to share as `Arc<Tokenizer>`; all methods take `&self`.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The bytes of every token; `None` where the library's decoder has rules that are not per token.
    pieces: Option<Pieces>,
    /// By id: hidden when special tokens are skipped.
    special_ids: Vec<bool>,
    special: SpecialTokens,
    edges: Edges,
}

/// What to change at the ends of the ids the library returns when special tokens are asked for.
#[derive(Debug, Default)]
struct Edges {
    prepend: Option<u32>,
    drop_first: bool,
    append: Option<u32>,
    drop_last: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. `special` adds what the file does not say: the roles of special tokens and, where
    /// `tokenizer_config.json` overrides the file, whether they are added.
    ///
    /// # Errors
    /// The file cannot be read, or a token that is to be added is not in the vocabulary.
    pub fn from_json(tokenizer_json: &[u8], special: SpecialTokens) -> Result<Self, TokenizerError> {
        let mut inner = read(tokenizer_json)?;
        // A file may ask for a maximum length or a padded one; both would silently change a request's tokens.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| TokenizerError::Json(error.to_string()))?;
        let size = inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let added = inner.get_added_vocabulary();
        let entries: Vec<Option<String>> =
            (0..).take(size).map(|id| added.simple_id_to_token(id).or_else(|| inner.id_to_token(id))).collect();
        Self::new(inner, special, &entries)
    }

    /// Builds the tokenizer that a GGUF file describes.
    ///
    /// # Errors
    /// The kind of vocabulary or its split rules are unknown, or the lists do not fit together.
    pub fn from_gguf(vocab: GgufVocabulary) -> Result<Self, TokenizerError> {
        let (inner, special) = gguf::build(&vocab)?;
        let entries: Vec<Option<String>> = vocab.tokens.into_iter().map(Some).collect();
        Self::new(inner, special, &entries)
    }

    /// `entries` are the vocabulary's, by id, in the spelling that the decoder reads.
    fn new(
        inner: tokenizers::Tokenizer,
        special: SpecialTokens,
        entries: &[Option<String>],
    ) -> Result<Self, TokenizerError> {
        let mut special_ids = vec![false; entries.len()];
        for (id, token) in inner.get_added_tokens_decoder() {
            if let Some(flag) = special_ids.get_mut(id as usize) {
                *flag = token.special;
            }
        }
        let pieces = Pieces::new(&inner, entries);
        if pieces.is_none() {
            tracing::debug!("the decoder of this tokenizer is not per token: detokenising takes the slower way");
        }
        let edges = Edges::new(&inner, &special)?;
        Ok(Self { inner, pieces, special_ids, special, edges })
    }

    /// Token ids of `text`. Special tokens written out in the text become their ids, as in vLLM. With
    /// `add_special_tokens` the model's begin and end tokens are added where its configuration says so; a rendered
    /// chat template already holds them.
    ///
    /// # Errors
    /// The library refuses the text, which the supported kinds of vocabulary never do.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special_tokens)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        let ids = encoding.get_ids();
        Ok(if add_special_tokens { self.edges.apply(ids) } else { ids.to_vec() })
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD. Unknown ids have no text.
    ///
    /// For byte-fallback vocabularies a run of byte tokens that is not valid UTF-8 keeps the characters in it that
    /// are, where the tokenizers library replaces every byte of the run: only so can text be streamed.
    ///
    /// # Errors
    /// The library refuses the ids, which the supported kinds of vocabulary never do.
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

    /// One more than the largest id that has a token. A model's head may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.special_ids.len()
    }

    /// The vocabulary entry, in the vocabulary's own spelling (`Ġthe`, `▁the`).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a vocabulary entry, in the vocabulary's own spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether the token is left out of text when special tokens are skipped.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.get(id as usize).copied().unwrap_or(false)
    }

    /// The text of one token alone, as vLLM puts it in `token` of log-probabilities: special tokens are shown, and
    /// part of a character is U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        self.decode(&[id], false).unwrap_or_default()
    }

    /// The bytes of one token alone. Those of [`token_text`](Self::token_text), but part of a character is given as it
    /// is, so that a client that joins `bytes` of log-probabilities gets the text (vLLM gives the bytes of U+FFFD).
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match &self.pieces {
            Some(pieces) => pieces.without_leading(pieces.get(id)).to_vec(),
            None => self.token_text(id).into_bytes(),
        }
    }

    /// The special tokens.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    pub(crate) fn pieces(&self) -> Option<&Pieces> {
        self.pieces.as_ref()
    }

    /// The bytes a token adds to the text: none for a special token that is skipped.
    pub(crate) fn visible_piece<'a>(&self, pieces: &'a Pieces, id: u32, skip_special_tokens: bool) -> &'a [u8] {
        if skip_special_tokens && self.is_special(id) { &[] } else { pieces.get(id) }
    }
}

/// Reads a `tokenizer.json`, most of which hold a BPE model: that is read straight into its type. The library's way to a
/// model of any kind copies the whole vocabulary twice first, and takes more than twice the time.
fn read(json: &[u8]) -> Result<tokenizers::Tokenizer, TokenizerError> {
    type OfBpe = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;
    if let Ok(tokenizer) = serde_json::from_slice::<OfBpe>(json) {
        return Ok(tokenizer.into());
    }
    tokenizers::Tokenizer::from_bytes(json).map_err(|error| TokenizerError::Json(error.to_string()))
}

impl Edges {
    fn new(inner: &tokenizers::Tokenizer, special: &SpecialTokens) -> Result<Self, TokenizerError> {
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
        // What the file's own post-processor puts around nothing is what it puts around everything.
        let around = inner.encode_fast("", true).map_err(|error| TokenizerError::Json(error.to_string()))?;
        let mut around = around.get_ids();
        let mut edges = Self::default();
        if let (Some(add), Some(bos)) = (special.add_bos, id("bos", &special.bos)?) {
            let has = around.first() == Some(&bos);
            edges.drop_first = has && !add;
            edges.prepend = (add && !has).then_some(bos);
            around = &around[usize::from(has)..];
        }
        if let (Some(add), Some(eos)) = (special.add_eos, id("eos", &special.eos)?) {
            let has = around.last() == Some(&eos);
            edges.drop_last = has && !add;
            edges.append = (add && !has).then_some(eos);
        }
        Ok(edges)
    }

    fn apply(&self, ids: &[u32]) -> Vec<u32> {
        let ids = if self.drop_first { ids.get(1..).unwrap_or_default() } else { ids };
        let ids = if self.drop_last { &ids[..ids.len().saturating_sub(1)] } else { ids };
        let mut out = Vec::with_capacity(ids.len() + 2);
        out.extend(self.prepend);
        out.extend_from_slice(ids);
        out.extend(self.append);
        out
    }
}
