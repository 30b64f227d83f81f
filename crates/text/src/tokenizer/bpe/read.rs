//! The models of tokenizer.json.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Bpe, Entries, Settings};

impl Bpe {
    /// Parses the `model` of a tokenizer.json.
    ///
    /// # Errors
    /// Returns an error for another kind of model, and for a byte-pair model with dropout or marks at the ends of words.
    pub(in crate::tokenizer) fn from_json(json: &str) -> serde_json::Result<Self> {
        let file: File<'_> = serde_json::from_str(json)?;
        if file.kind.is_some_and(|kind| kind.0 != "BPE") {
            return Err(Error::custom("the model is not a byte-pair model"));
        }
        let marks = [file.continuing_subword_prefix, file.end_of_word_suffix];
        if file.dropout.is_some() || marks.iter().flatten().any(|mark| !mark.0.is_empty()) {
            return Err(Error::custom("the model has dropout or marks at the ends of words"));
        }
        let mut vocab = file.vocab.0;
        vocab.sort_by_key(|(id, _)| *id);
        let entries = Entries::new(vocab.iter().map(|(id, text)| (*id, &**text))).map_err(Error::custom)?;
        if entries.len() != vocab.len() {
            return Err(Error::custom("two entries have the same text"));
        }
        let merges = file.merges.iter().filter_map(|Merge(pair)| pair.as_ref());
        let settings = Settings {
            unknown: file.unk_token.as_ref().map(|token| &*token.0),
            fuse_unknown: file.fuse_unk.unwrap_or(false),
            byte_fallback: file.byte_fallback.unwrap_or(false),
            ignore_merges: file.ignore_merges.unwrap_or(false),
        };
        Self::new(entries, merges.map(|(left, right)| (&**left, &**right)), settings).map_err(Error::custom)
    }
}

/// The fields of a model.
#[derive(Deserialize)]
struct File<'a> {
    #[serde(borrow, rename = "type")]
    kind: Option<Text<'a>>,
    dropout: Option<f32>,
    unk_token: Option<Text<'a>>,
    continuing_subword_prefix: Option<Text<'a>>,
    end_of_word_suffix: Option<Text<'a>>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: Vocab<'a>,
    merges: Vec<Merge<'a>>,
}

/// A string that is copied only if it has escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// The entries of a vocabulary in the order of the file.
struct Vocab<'a>(Vec<(u32, Cow<'a, str>)>);

impl<'de: 'a, 'a> Deserialize<'de> for Vocab<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vocab<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tokens to ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some((text, id)) = map.next_entry::<Text<'de>, u32>()? {
                    entries.push((id, text.0));
                }
                Ok(Vocab(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A merge: a list of two entries, or in older files both with a space between. A line about the version is none.
struct Merge<'a>(Option<(Cow<'a, str>, Cow<'a, str>)>);

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pair;
        impl<'de> Visitor<'de> for Pair {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two tokens")
            }

            fn visit_borrowed_str<E: Error>(self, line: &'de str) -> Result<Self::Value, E> {
                Ok(Merge(halves(line)?.map(|(left, right)| (left.into(), right.into()))))
            }

            fn visit_str<E: Error>(self, line: &str) -> Result<Self::Value, E> {
                Ok(Merge(halves(line)?.map(|(left, right)| (left.to_owned().into(), right.to_owned().into()))))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<Self::Value, A::Error> {
                let mut next = || pair.next_element::<Text<'de>>()?.ok_or_else(|| Error::invalid_length(0, &self));
                Ok(Merge(Some((next()?.0, next()?.0))))
            }
        }
        deserializer.deserialize_any(Pair)
    }
}

/// Returns the two entries of a line; `None` if the line is about the version.
fn halves<E: Error>(line: &str) -> Result<Option<(&str, &str)>, E> {
    if line.starts_with("#version") {
        return Ok(None);
    }
    let halves = line.split_once(' ').filter(|(_, right)| !right.contains(' '));
    halves.map(Some).ok_or_else(|| E::custom(format!("the merge \"{line}\" is not two tokens with a space between")))
}
