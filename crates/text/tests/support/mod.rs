//! The small vocabularies of tests/data.

use octavo_text::{GgufVocabulary, Tokenizer};
use serde_json::Value;

/// A vocabulary with the results of a reference tokenizer.
pub struct Golden {
    /// Content of the file.
    pub data: &'static Value,
    /// The vocabulary in it.
    pub vocabulary: GgufVocabulary<'static>,
}

impl Golden {
    /// Parses a file written by generate_tokenizers.py.
    pub fn parse(json: &str) -> Self {
        // The vocabulary has the texts of the file, which a test needs until it ends.
        let data: &'static Value = Box::leak(Box::new(serde_json::from_str(json).unwrap()));
        let strings = |key: &str| -> Vec<&'static str> {
            data[key].as_array().into_iter().flatten().map(|item| item.as_str().unwrap()).collect()
        };
        let id = |key: &str| data[key].as_u64().map(|id| u32::try_from(id).unwrap());
        let vocabulary = GgufVocabulary {
            model: data["model"].as_str().unwrap().to_owned(),
            pre: data["pre"].as_str().map(str::to_owned),
            tokens: strings("tokens"),
            scores: data["scores"].as_array().into_iter().flatten().map(|item| item.as_f64().unwrap() as f32).collect(),
            token_types: ids(&data["token_types"]).into_iter().map(|kind| i32::try_from(kind).unwrap()).collect(),
            merges: strings("merges"),
            bos_id: id("bos_id"),
            eos_id: id("eos_id"),
            unk_id: id("unk_id"),
            ..GgufVocabulary::default()
        };
        Self { data, vocabulary }
    }

    /// Returns the first tokens of SmolLM2.
    pub fn byte_level() -> Self {
        Self::parse(include_str!("../data/byte_level.json"))
    }

    /// Returns a byte-fallback SentencePiece model.
    pub fn sentence_piece() -> Self {
        Self::parse(include_str!("../data/sentence_piece.json"))
    }

    /// Builds the tokenizer.
    pub fn tokenizer(&self) -> Tokenizer {
        Tokenizer::from_gguf(&self.vocabulary).unwrap()
    }

    /// Returns text, ids, decoded text, and decoded text with special tokens if the file has it.
    pub fn cases(&self) -> impl Iterator<Item = (&str, Vec<u32>, &str, Option<&str>)> {
        self.data["cases"].as_array().unwrap().iter().map(|case| {
            (case[0].as_str().unwrap(), ids(&case[1]), case[2].as_str().unwrap(), case.get(3).and_then(Value::as_str))
        })
    }
}

fn ids(list: &Value) -> Vec<u32> {
    list.as_array().into_iter().flatten().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}
