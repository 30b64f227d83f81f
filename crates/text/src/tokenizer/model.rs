//! The models of tokenizers.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{
    DecoderWrapper, Model as _, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Token,
    TokenizerImpl,
};

use super::bpe::Bpe;

/// The library's stages around a model.
pub(super) type Stages =
    TokenizerImpl<Model, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// The stage that turns a word into tokens.
#[derive(Debug)]
pub(super) enum Model {
    Bpe(Bpe),
    /// Any other model.
    Library(ModelWrapper),
}

impl Model {
    /// Whether it is byte-pair encoding, of whatever variant.
    pub(super) fn is_bpe(&self) -> bool {
        matches!(self, Self::Bpe(_) | Self::Library(ModelWrapper::BPE(_)))
    }

    /// Returns one more than the largest id.
    pub(super) fn end(&self) -> usize {
        match self {
            Self::Bpe(bpe) => bpe.entries().end(),
            Self::Library(model) => model.get_vocab().into_values().max().map_or(0, |id| id as usize + 1),
        }
    }

    /// Returns the entry of an id.
    pub(super) fn entry(&self, id: u32) -> Option<Cow<'_, str>> {
        match self {
            Self::Bpe(bpe) => bpe.entries().text(id).map(Cow::Borrowed),
            Self::Library(model) => model.id_to_token(id).map(Cow::Owned),
        }
    }
}

impl tokenizers::Model for Model {
    type Trainer = BpeTrainer;

    /// The values of the tokens of a byte-pair model are empty: nothing reads them.
    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        let bpe = match self {
            Self::Bpe(bpe) => bpe,
            Self::Library(model) => return model.tokenize(sequence),
        };
        let mut end = 0;
        let token = |symbol: super::bpe::Symbol| {
            let start = end;
            end += symbol.bytes as usize;
            Token::new(symbol.token, String::new(), (start, end))
        };
        Ok(bpe.tokens(sequence).into_iter().map(token).collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Bpe(bpe) => bpe.entries().id(token),
            Self::Library(model) => model.token_to_id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.entry(id).map(Cow::into_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Self::Bpe(bpe) => bpe.entries().iter().map(|(id, text)| (text.to_owned(), id)).collect(),
            Self::Library(model) => model.get_vocab(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Self::Bpe(bpe) => bpe.entries().len(),
            Self::Library(model) => model.get_vocab_size(),
        }
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a tokenizer is only read".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

impl<'de> Deserialize<'de> for Model {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = Box::<RawValue>::deserialize(deserializer)?;
        if let Ok(bpe) = Bpe::from_json(json.get()) {
            return Ok(Self::Bpe(bpe));
        }
        serde_json::from_str(json.get()).map(Self::Library).map_err(Error::custom)
    }
}
