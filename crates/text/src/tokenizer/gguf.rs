//! Vocabularies in GGUF files.

use tokenizers::AddedToken;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as DecoderSequence;
use tokenizers::decoders::strip::Strip;
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace, Sequence as NormalizerSequence};

use super::bpe::{Bpe, Entries, Settings};
use super::model::{Model, Stages};
use super::pieces::byte_token;
use super::pre_tokenizer::Rules;
use super::{SpecialTokens, TokenizerError};

/// SentencePiece's visible space.
const SPACE: char = '\u{2581}';

/// The tokenizer of a GGUF file, from its `tokenizer.ggml.*` keys.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocabulary<'a> {
    /// Key `model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE).
    pub model: String,
    /// Key `pre`: split rules of a byte-level vocabulary.
    pub pre: Option<String>,
    /// Key `tokens`, by id.
    pub tokens: Vec<&'a str>,
    /// Key `scores`, by id: order of merges of a SentencePiece vocabulary. May be empty for a byte-level one.
    pub scores: Vec<f32>,
    /// Key `token_type`, by id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Empty means all
    /// normal.
    pub token_types: Vec<i32>,
    /// Key `merges` of a byte-level vocabulary, best first: two entries separated by a space.
    pub merges: Vec<&'a str>,
    /// Key `bos_token_id`.
    pub bos_id: Option<u32>,
    /// Key `eos_token_id`.
    pub eos_id: Option<u32>,
    /// Key `unknown_token_id`.
    pub unk_id: Option<u32>,
    /// Key `padding_token_id`.
    pub pad_id: Option<u32>,
    /// Key `add_bos_token`.
    pub add_bos: Option<bool>,
    /// Key `add_eos_token`.
    pub add_eos: Option<bool>,
    /// Key `add_space_prefix`: whether encoding inserts a space before a SentencePiece text.
    pub add_space_prefix: Option<bool>,
}

const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

impl<'a> GgufVocabulary<'a> {
    fn token(&self, role: &str, id: Option<u32>) -> Result<Option<&'a str>, TokenizerError> {
        let Some(id) = id else { return Ok(None) };
        let token = self.tokens.get(id as usize).ok_or_else(|| {
            TokenizerError::Vocabulary(format!("the {role} id is {id}, but there are {} tokens", self.tokens.len()))
        })?;
        Ok(Some(token))
    }

    fn check(&self) -> Result<(), TokenizerError> {
        let tokens = self.tokens.len();
        if tokens == 0 {
            return Err(TokenizerError::Vocabulary("it has no tokens".to_owned()));
        }
        if u32::try_from(tokens).is_err() {
            return Err(TokenizerError::Vocabulary(format!("{tokens} tokens are more than ids can number")));
        }
        for (name, len) in [("scores", self.scores.len()), ("token types", self.token_types.len())] {
            if len != 0 && len != tokens {
                return Err(TokenizerError::Vocabulary(format!("it has {tokens} tokens, but {len} {name}")));
            }
        }
        Ok(())
    }

    /// Returns the tokens that are matched in text before anything else. Control tokens are special, user-defined ones
    /// are not.
    fn added_tokens(&self) -> Vec<AddedToken> {
        let typed = self.tokens.iter().zip(&self.token_types);
        typed
            .filter(|(token, _)| !token.is_empty())
            .filter_map(|(token, &kind)| match kind {
                UNKNOWN | CONTROL => Some(AddedToken::from(*token, true)),
                USER_DEFINED => Some(AddedToken::from(*token, false).normalized(false)),
                _ => None,
            })
            .collect()
    }

    /// Returns the entries. The lower id wins for an entry that occurs twice.
    fn entries(&self) -> Result<Entries, TokenizerError> {
        let tokens = self.tokens.iter().enumerate().map(|(id, &token)| (id as u32, token));
        Entries::new(tokens).map_err(TokenizerError::Vocabulary)
    }
}

/// Builds the stages of a vocabulary's tokenizer, and its special tokens.
pub(super) fn build(vocab: &GgufVocabulary<'_>) -> Result<(Stages, SpecialTokens), TokenizerError> {
    vocab.check()?;
    let token = |role, id| vocab.token(role, id).map(|token| token.map(str::to_owned));
    let mut special = SpecialTokens {
        bos: token("bos", vocab.bos_id)?,
        eos: token("eos", vocab.eos_id)?,
        unk: token("unknown", vocab.unk_id)?,
        pad: token("padding", vocab.pad_id)?,
        add_bos: vocab.add_bos,
        add_eos: Some(vocab.add_eos.unwrap_or(false)),
    };
    let mut tokenizer = match vocab.model.as_str() {
        "gpt2" => {
            let rules = Rules::find(vocab.pre.as_deref())?;
            special.add_bos.get_or_insert(rules.add_bos);
            byte_level(vocab, &rules)?
        }
        "llama" => {
            special.add_bos.get_or_insert(true);
            sentence_piece(vocab)?
        }
        other => return Err(TokenizerError::UnknownModel(other.to_owned())),
    };
    tokenizer.add_tokens(vocab.added_tokens()).map_err(broken)?;
    Ok((tokenizer, special))
}

fn byte_level(vocab: &GgufVocabulary<'_>, rules: &Rules) -> Result<Stages, TokenizerError> {
    let mut merges = Vec::with_capacity(vocab.merges.len());
    for (rank, merge) in vocab.merges.iter().enumerate() {
        // Entries spell spaces differently, so the first space after the first character is the separator.
        let pair = merge.char_indices().skip(1).find(|&(_, character)| character == ' ');
        let (left, right) = pair.map(|(at, _)| (&merge[..at], &merge[at + 1..])).ok_or_else(|| {
            TokenizerError::Vocabulary(format!("merge {rank} (\"{merge}\") is not two entries with a space between"))
        })?;
        merges.push((left, right));
    }
    let settings = Settings { ignore_merges: rules.ignore_merges, ..Settings::default() };
    let mut tokenizer = Stages::new(bpe(vocab.entries()?, merges, settings)?);
    tokenizer.with_normalizer(rules.normalizer()).map_err(broken)?;
    tokenizer.with_pre_tokenizer(Some(rules.pre_tokenizer()?));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    Ok(tokenizer)
}

fn sentence_piece(vocab: &GgufVocabulary<'_>) -> Result<Stages, TokenizerError> {
    if vocab.scores.is_empty() {
        return Err(TokenizerError::Vocabulary("a SentencePiece vocabulary needs scores".to_owned()));
    }
    let bytes = vocab.tokens.iter().filter(|token| byte_token(token).is_some()).count();
    let settings = Settings {
        unknown: vocab.token("unknown", vocab.unk_id)?,
        fuse_unknown: true,
        byte_fallback: bytes == 256,
        ignore_merges: false,
    };
    let entries = vocab.entries()?;
    let merges = merges_from_scores(vocab, &entries);
    let mut tokenizer = Stages::new(bpe(entries, merges, settings)?);

    let space_prefix = vocab.add_space_prefix.unwrap_or(true);
    let mut normalizers = Vec::new();
    if space_prefix {
        normalizers.push(NormalizerWrapper::Prepend(Prepend::new(SPACE.to_string())));
    }
    normalizers.push(NormalizerWrapper::Replace(Replace::new(" ", SPACE).map_err(broken)?));
    tokenizer.with_normalizer(Some(NormalizerSequence::new(normalizers))).map_err(broken)?;

    let mut decoders = vec![
        DecoderWrapper::Replace(Replace::new(SPACE.to_string(), " ").map_err(broken)?),
        DecoderWrapper::ByteFallback(ByteFallback::default()),
        DecoderWrapper::Fuse(Fuse::default()),
    ];
    if space_prefix {
        decoders.push(DecoderWrapper::Strip(Strip::new(' ', 1, 0)));
    }
    tokenizer.with_decoder(Some(DecoderSequence::new(decoders)));
    Ok(tokenizer)
}

/// Derives merges from scores. SentencePiece merges the neighbours whose union has the best score. As ordered pairs,
/// these are all ways to split a token in two, best token first; within one token, in the order of the two ids, as in
/// converters to tokenizer.json.
fn merges_from_scores<'a>(vocab: &GgufVocabulary<'a>, entries: &Entries) -> Vec<(&'a str, &'a str)> {
    let mergeable = |id: usize| {
        let kind = vocab.token_types.get(id).copied().unwrap_or(1);
        !matches!(kind, UNKNOWN | CONTROL | USER_DEFINED) && byte_token(vocab.tokens[id]).is_none()
    };
    let mut order: Vec<usize> = (0..vocab.tokens.len()).filter(|&id| mergeable(id)).collect();
    order.sort_by(|&a, &b| vocab.scores[b].total_cmp(&vocab.scores[a]));
    let mut merges = Vec::new();
    let mut pairs = Vec::new();
    for id in order {
        let token = vocab.tokens[id];
        pairs.clear();
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(left_id), Some(right_id)) = (entries.id(left), entries.id(right)) {
                pairs.push((left_id, right_id, left, right));
            }
        }
        pairs.sort_unstable_by_key(|&(left_id, right_id, ..)| (left_id, right_id));
        merges.extend(pairs.iter().map(|&(_, _, left, right)| (left, right)));
    }
    merges
}

fn bpe(entries: Entries, merges: Vec<(&str, &str)>, settings: Settings<'_>) -> Result<Model, TokenizerError> {
    Bpe::new(entries, merges.into_iter(), settings).map(Model::Bpe).map_err(TokenizerError::Vocabulary)
}

fn broken(error: tokenizers::Error) -> TokenizerError {
    TokenizerError::Vocabulary(error.to_string())
}
