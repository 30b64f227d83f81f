//! Texts are tokenised part by part, so that a long one can be interrupted, shares a processor with others and needs
//! little memory.
//!
//! A text may be cut where every split rule of the pre-tokenizer ends a piece, whatever is around it. The tokens of the
//! parts, joined, are then exactly those of the text. This is known of byte-level BPE with the split rules in
//! [`pre_tokenizer`](super::pre_tokenizer); a text of another tokenizer is one part.

use serde_json::Value;
use tokenizers::ModelWrapper;

use super::pre_tokenizer::SPLITS_AT_SPACES;
use super::{Tokenizer, TokenizerError};

/// Bytes of a part, unless the text has no boundary there: a few milliseconds of work.
const PART_BYTES: usize = 16 << 10;

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

/// The tokens that encoding adds around every text; `None` if texts cannot be cut.
#[derive(Debug, Default)]
pub(super) struct Parts(Option<(Vec<u32>, Vec<u32>)>);

impl Parts {
    pub(super) fn new(inner: &tokenizers::Tokenizer) -> Self {
        Self(around(inner).filter(|_| is_local(inner)))
    }
}

impl Tokenizer {
    /// Returns the `wanted` tokens of `text`, exactly as [`encode`](Self::encode) has them, and tokenises no more of the
    /// text than it needs for them. `pause` is called between parts of the text and may end the work with an error.
    ///
    /// # Errors
    /// Returns the error of `pause`, or that of the library, which rejects no text for the supported kinds of vocabulary.
    pub fn encode_in_parts<E: From<TokenizerError>>(
        &self,
        text: &str,
        (add_special_tokens, wanted): (bool, Wanted),
        mut pause: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<u32>, E> {
        let Some((before, after)) = self.parts.0.as_ref().filter(|_| text.len() > PART_BYTES) else {
            pause()?;
            let mut ids = self.encode(text, add_special_tokens)?;
            wanted.cut(&mut ids);
            return Ok(ids);
        };
        let (mut rest, mut parts, mut count) = (text, Vec::new(), 0);
        while !rest.is_empty() && !wanted.is_met_by(count) {
            pause()?;
            let part;
            (part, rest) = match wanted {
                Wanted::All | Wanted::First(_) => rest.split_at(first_part(rest)),
                Wanted::Last(_) => {
                    let (rest, part) = rest.split_at(last_part(rest));
                    (part, rest)
                }
            };
            let ids = self.encode(part, false)?;
            count += ids.len();
            parts.push(ids);
        }
        if let Wanted::Last(_) = wanted {
            parts.reverse();
        }
        let mut ids = parts.concat();
        if add_special_tokens {
            ids = self.edges.apply(&[before, &ids[..], after].concat());
        }
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

/// Length of the first part of `text`.
fn first_part(text: &str) -> usize {
    let from = text.len().min(PART_BYTES);
    (from..text.len()).find(|&at| is_boundary(text.as_bytes(), at)).unwrap_or(text.len())
}

/// Start of the last part of `text`.
fn last_part(text: &str) -> usize {
    let to = text.len().saturating_sub(PART_BYTES);
    (1..=to).rev().find(|&at| is_boundary(text.as_bytes(), at)).unwrap_or(0)
}

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
fn around(inner: &tokenizers::Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let ids = |text, special| inner.encode_fast(text, special).ok().map(|encoding| encoding.get_ids().to_vec());
    let (plain, whole, empty) = (ids("a b", false)?, ids("a b", true)?, ids("", true)?);
    let start = whole.windows(plain.len().max(1)).position(|window| window == plain)?;
    let (before, after) = (&whole[..start], &whole[start + plain.len()..]);
    (empty == [before, after].concat()).then(|| (before.to_vec(), after.to_vec()))
}

/// Whether every rule of the tokenizer sees no further than a boundary.
fn is_local(inner: &tokenizers::Tokenizer) -> bool {
    let json = |part: Option<Value>| part.unwrap_or(Value::Null);
    let normalizer = json(inner.get_normalizer().and_then(|part| serde_json::to_value(part).ok()));
    let pre_tokenizer = json(inner.get_pre_tokenizer().and_then(|part| serde_json::to_value(part).ok()));
    let steps = match pre_tokenizer["type"].as_str() {
        Some("Sequence") => pre_tokenizer["pretokenizers"].as_array().cloned().unwrap_or_default(),
        _ => vec![pre_tokenizer],
    };
    matches!(inner.get_model(), ModelWrapper::BPE(model) if model.dropout.is_none())
        && (normalizer.is_null() || normalizer["type"] == "NFC")
        && steps.iter().all(is_local_step)
        && steps.iter().any(splits_at_spaces)
        && inner.get_added_tokens_decoder().values().all(is_local_token)
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

/// Whether an added token neither contains a boundary nor depends on the text around it.
fn is_local_token(token: &tokenizers::AddedToken) -> bool {
    let text = token.content.as_bytes();
    !token.single_word && !token.lstrip && !token.rstrip && !(1..text.len()).any(|at| is_boundary(text, at))
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::SpecialTokens;
    use crate::tokenizer::pre_tokenizer::{Rules, rules_that_split_at_spaces};

    /// A vocabulary whose merges join what the split rules leave together: spaces, digits, letters and punctuation.
    fn tokenizer(rules: &Rules, post_processor: &Value) -> Tokenizer {
        let mut tokens: Vec<String> = Vec::new();
        let bytes = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let mut alphabet: Vec<char> = bytes.into_iter().collect();
        alphabet.sort_unstable();
        tokens.extend(alphabet.iter().map(char::to_string));
        let pairs = [
            ("Ġ", "a"),
            ("a", "b"),
            ("Ġa", "b"),
            ("Ġ", "Ġ"),
            ("1", "2"),
            (".", "Ġ"),
            ("b", "Ġ"),
            (".", "."),
            ("Ġ", "."),
            ("Ċ", "Ċ"),
        ];
        let merges: Vec<Value> = pairs.iter().map(|(a, b)| json!([a, b])).collect();
        tokens.extend(pairs.iter().map(|(a, b)| format!("{a}{b}")));
        let special = tokens.len();
        let vocab: serde_json::Map<String, Value> =
            tokens.into_iter().zip(0..).map(|(token, id)| (token, Value::from(id))).collect();
        let added: Vec<Value> = ["<s>", "</s>"].iter().zip(special..).map(|(token, id)| {
            json!({"id": id, "content": token, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
        }).collect();
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": rules.normalizer(), "pre_tokenizer": rules.pre_tokenizer().unwrap(), "post_processor": post_processor,
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                      "ignore_merges": rules.ignore_merges, "vocab": vocab, "merges": merges},
        });
        let special = SpecialTokens {
            bos: Some("<s>".into()),
            eos: Some("</s>".into()),
            add_eos: Some(true),
            ..SpecialTokens::default()
        };
        Tokenizer::from_json(json.to_string().as_bytes(), special).unwrap()
    }

    fn template(special: usize) -> Value {
        json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [special], "tokens": ["<s>"]}}})
    }

    /// A tokenizer for each set of rules that splits at spaces.
    fn tokenizers() -> &'static [(&'static Rules, Tokenizer)] {
        static MADE: OnceLock<Vec<(&'static Rules, Tokenizer)>> = OnceLock::new();
        MADE.get_or_init(|| {
            rules_that_split_at_spaces().map(|rules| (rules, tokenizer(rules, &template(BOS)))).collect()
        })
    }

    /// Id of `<s>`: after 256 bytes and 10 merges.
    const BOS: usize = 266;

    /// Text with many boundaries and many places that only look like one.
    fn text() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            4 => prop::sample::select(vec![" ", "a", "b", "ab", "1", "12", ".", "..", "\n", "\r\n", "  ", "\t", "'s", "'", "<s>", "</s>", "。", "，", "漢", "字", "か", "ğ", "e\u{301}", "\u{301}", "\u{a0}", "\u{200b}", "\u{3000}", "😀", "$", "/"]).prop_map(str::to_owned),
            1 => any::<char>().prop_map(String::from),
        ];
        proptest::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
    }

    fn in_parts(tokenizer: &Tokenizer, text: &str, how: (bool, Wanted)) -> Vec<u32> {
        tokenizer.encode_in_parts::<TokenizerError>(text, how, || Ok(())).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn a_text_cut_at_its_boundaries_has_the_same_tokens(text in text()) {
            for (rules, tokenizer) in tokenizers() {
                let whole = tokenizer.encode(&text, false).unwrap();
                let cuts: Vec<usize> = (1..text.len()).filter(|&at| is_boundary(text.as_bytes(), at)).collect();
                for &at in &cuts {
                    let parts = [&text[..at], &text[at..]].map(|part| tokenizer.encode(part, false).unwrap());
                    prop_assert_eq!(parts.concat(), &whole[..], "{:?} cut at {} by {:?}", text, at, rules);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4))]

        #[test]
        fn parts_and_truncation_give_the_tokens_of_the_whole(
            pieces in proptest::collection::vec(text(), 1..4), repeats in 400..1_500_usize, keep in 1..20_000_usize, special in any::<bool>(),
        ) {
            let text: String = pieces.iter().cycle().take(repeats).map(String::as_str).collect();
            for (_, tokenizer) in &tokenizers()[..2] {
                let whole = tokenizer.encode(&text, special).unwrap();
                prop_assert_eq!(&in_parts(tokenizer, &text, (special, Wanted::All)), &whole);
                let keep = keep.min(whole.len());
                prop_assert_eq!(&in_parts(tokenizer, &text, (special, Wanted::First(keep)))[..], &whole[..keep]);
                prop_assert_eq!(&in_parts(tokenizer, &text, (special, Wanted::Last(keep)))[..], &whole[whole.len() - keep..]);
            }
        }
    }

    #[test]
    fn every_set_of_rules_for_words_is_used_in_parts() {
        assert!(tokenizers().len() > 8);
        for (rules, tokenizer) in tokenizers() {
            assert!(tokenizer.parts.0.is_some(), "{rules:?}");
        }
    }

    #[test]
    fn truncation_reads_only_the_side_that_it_keeps() {
        let tokenizer = tokenizer(rules_that_split_at_spaces().next().unwrap(), &Value::Null);
        let text = "ab ".repeat(1 << 20);
        for wanted in [Wanted::First(100), Wanted::Last(100)] {
            let mut parts = 0;
            let count = || -> Result<(), TokenizerError> {
                parts += 1;
                Ok(())
            };
            assert_eq!(tokenizer.encode_in_parts(&text, (true, wanted), count).unwrap().len(), 100);
            assert_eq!(parts, 1);
        }
    }

    #[test]
    fn work_ends_at_the_pause_that_fails() {
        let tokenizer = tokenizer(rules_that_split_at_spaces().next().unwrap(), &Value::Null);
        let text = "ab ".repeat(1 << 20);
        let mut left = 3;
        let pause = || {
            left -= 1;
            if left == 0 { Err(TokenizerError::Encode("cancelled".into())) } else { Ok(()) }
        };
        assert!(tokenizer.encode_in_parts(&text, (true, Wanted::All), pause).is_err());
        assert_eq!(left, 0);
    }

    #[test]
    fn tokens_that_reach_across_a_boundary_forbid_parts() {
        let token = |content: &str| tokenizers::AddedToken::from(content, true);
        assert!(is_local_token(&token("<|im_end|>")) && is_local_token(&token("  ")));
        assert!(!is_local_token(&token("a b")) && !is_local_token(&token("a ")));
        assert!(!is_local_token(&token("x").rstrip(true)) && !is_local_token(&token("x").single_word(true)));
    }
}
