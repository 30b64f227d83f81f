//! Split rules of byte-level vocabularies, by llama.cpp's names (`tokenizer.ggml.pre`).
//!
//! The expressions are those of the models' own tokenizer.json, which llama.cpp reformulates for its regex engine.

use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

use super::TokenizerError;

/// The expression of GPT-2, which the library's byte-level step has built in.
pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3: &[&str] = &[
    r"\p{N}{1,3}",
    r"[一-龥\u{3040}-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
const DEEPSEEK_CODER: &[&str] = &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥\u{800}-一가-\u{D7FF}]+", r"\p{N}"];
/// llama.cpp's rules for files that predate the name.
const DEFAULT: &[&str] = &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"];

/// Expressions of which no match crosses a place before a space and after a visible character, or between a letter, digit
/// or ideograph and an ideographic comma or full stop; see [`parts`](super::parts).
pub(super) const SPLITS_AT_SPACES: &[&str] = &[
    GPT2,
    DIGIT,
    LLAMA3,
    QWEN2,
    QWEN35,
    TEKKEN,
    GPT4O,
    DEEPSEEK_V3[0],
    DEEPSEEK_V3[1],
    DEEPSEEK_V3[2],
    DEFAULT[0],
    DEFAULT[2],
    DEFAULT[3],
];

/// Split rules.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    names: &'static [&'static str],
    /// Expressions, each applied to the pieces of the one before.
    splits: &'static [&'static str],
    /// Whether a piece that is a whole token is kept instead of being merged again.
    pub(super) ignore_merges: bool,
    /// Whether encoding starts with the begin token if the file does not specify it.
    pub(super) add_bos: bool,
    /// Whether the text is normalised to NFC, on which the model was trained.
    nfc: bool,
}

const PLAIN: Rules = Rules { names: &[], splits: &[], ignore_merges: false, add_bos: false, nfc: false };

const RULES: &[Rules] = &[
    Rules { names: &["default"], splits: DEFAULT, ..PLAIN },
    Rules {
        names: &["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "exaone4", "granite-docling"],
        splits: &[GPT2],
        ..PLAIN
    },
    Rules {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        splits: &[DIGIT, GPT2],
        ..PLAIN
    },
    Rules {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"],
        splits: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    Rules { names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], splits: &[LLAMA3], ..PLAIN },
    Rules { names: &["qwen2", "deepseek-r1-qwen", "megrez"], splits: &[QWEN2], nfc: true, ..PLAIN },
    Rules { names: &["stablelm2", "hunyuan"], splits: &[QWEN2], ..PLAIN },
    Rules { names: &["qwen35"], splits: &[QWEN35], nfc: true, ..PLAIN },
    Rules { names: &["tekken"], splits: &[TEKKEN], ignore_merges: true, add_bos: true, ..PLAIN },
    Rules { names: &["gpt-4o", "llama4"], splits: &[GPT4O], ..PLAIN },
    Rules { names: &["deepseek-v3", "hunyuan-dense"], splits: DEEPSEEK_V3, ..PLAIN },
    Rules { names: &["deepseek-coder"], splits: DEEPSEEK_CODER, ..PLAIN },
];

impl Rules {
    /// Finds the rules of a `tokenizer.ggml.pre` name.
    ///
    /// A file without a name gets llama.cpp's default and a warning, because its author tested it with that. An unknown
    /// name is an error: the vocabulary would load and the model would answer slightly worse on every prompt, without a
    /// visible cause.
    pub(super) fn find(name: Option<&str>) -> Result<Self, TokenizerError> {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            tracing::warn!(
                "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre): splitting as llama.cpp's \
                 \"default\", which may differ from the model's training"
            );
            return Self::find(Some("default"));
        };
        RULES.iter().find(|rules| rules.names.contains(&name)).copied().ok_or_else(|| {
            let known = RULES.iter().flat_map(|rules| rules.names).copied().collect::<Vec<_>>().join(", ");
            TokenizerError::UnknownPreTokenizer { name: name.to_owned(), known }
        })
    }

    pub(super) fn normalizer(&self) -> Option<NormalizerWrapper> {
        self.nfc.then_some(NormalizerWrapper::NFC(NFC))
    }

    pub(super) fn pre_tokenizer(&self) -> Result<PreTokenizerWrapper, TokenizerError> {
        let mut steps = Vec::with_capacity(self.splits.len() + 1);
        for split in self.splits {
            let pattern = SplitPattern::Regex((*split).to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(|error| TokenizerError::Vocabulary(error.to_string()))?;
            steps.push(PreTokenizerWrapper::Split(split));
        }
        steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)));
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
    }
}

/// All rules, and whether a text is cut at spaces: if they end with a rule for every character.
#[cfg(test)]
pub(super) fn all_rules() -> impl Iterator<Item = (&'static Rules, bool)> {
    RULES.iter().map(|rules| (rules, rules.splits.iter().all(|split| SPLITS_AT_SPACES.contains(split))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    fn split(name: &str, text: &str) -> Vec<String> {
        let mut pretokenized = PreTokenizedString::from(text);
        Rules::find(Some(name)).unwrap().pre_tokenizer().unwrap().pre_tokenize(&mut pretokenized).unwrap();
        let splits = pretokenized.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| text[start..end].to_owned()).collect()
    }

    #[test]
    fn every_rule_compiles_and_loses_nothing() {
        let text = "Hello,  world!\n\n I'LL've 12345 \u{915}\u{94d}\u{937} 漢字かな e\u{301} 😀\t\r\n  x=1/2;  ";
        for rules in RULES {
            for name in rules.names {
                assert_eq!(split(name, text).concat(), text, "{name}");
            }
        }
    }

    #[test]
    fn digits_and_contractions_split_as_each_model_was_trained() {
        assert_eq!(split("gpt-2", "a 1234 I'll"), ["a", " 1234", " I", "'ll"]);
        assert_eq!(split("smollm", "a 123 I'll"), ["a", " ", "1", "2", "3", " I", "'ll"]);
        assert_eq!(split("llama-bpe", "a 12345 I'LL"), ["a", " ", "123", "45", " I", "'LL"]);
        assert_eq!(split("qwen2", "a 123\n\nb"), ["a", " ", "1", "2", "3", "\n\n", "b"]);
        assert_eq!(split("tekken", "HelloWorld foo/"), ["Hello", "World", " foo", "/"]);
        assert_eq!(split("gpt-4o", "it's"), ["it's"]);
        assert_eq!(split("default", "a, 1234"), ["a", ",", " ", "123", "4"]);
        assert_eq!(split("deepseek-v3", "12345漢字ab"), ["123", "45", "漢字", "ab"]);
        assert_eq!(split("deepseek-coder", "a\n b1"), ["a", "\n", " b", "1"]);
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_the_known() {
        let error = Rules::find(Some("made-up")).unwrap_err().to_string();
        assert!(error.contains("\"made-up\"") && error.contains("llama-bpe"), "{error}");
        assert!(Rules::find(None).is_ok());
    }
}
