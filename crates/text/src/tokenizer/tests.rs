//! Comparison of texts that are encoded in parts with the whole, for every kind of tokenizer.

use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::parts::Cuts;
use super::pre_tokenizer::all_rules;
use super::{GgufVocabulary, SpecialTokens, Tokenizer, TokenizerError, Wanted};

/// Pairs that are merged in byte-level vocabularies: what the split rules leave together.
const BYTE_LEVEL_MERGES: [(&str, &str); 10] = [
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

/// Pairs that are merged in SentencePiece vocabularies. One entry has a space after a letter.
const SENTENCE_PIECE_MERGES: [(&str, &str); 9] =
    [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "▁"), ("b", "▁"), ("1", "2"), (".", "."), ("漢", "字"), ("字", "漢")];

/// The parts of a tokenizer.json that the kinds differ in.
struct TokenizerKind {
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    added: Vec<Value>,
    model: Value,
}

fn added(content: &str, flags: &[&str]) -> Value {
    let flag = |name| flags.contains(&name);
    json!({"id": 0, "content": content, "special": true, "single_word": flag("single_word"), "lstrip": flag("lstrip"),
        "rstrip": flag("rstrip"), "normalized": flag("normalized")})
}

impl TokenizerKind {
    fn build(mut self) -> Tokenizer {
        // Added tokens follow the model's entries.
        let entries = self.model["vocab"].as_object().map(Map::len).or(self.model["vocab"].as_array().map(Vec::len));
        for (token, id) in self.added.iter_mut().zip(entries.unwrap()..) {
            token["id"] = json!(id);
        }
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": self.added,
            "normalizer": self.normalizer, "pre_tokenizer": self.pre_tokenizer, "post_processor": self.post_processor,
            "decoder": null, "model": self.model,
        });
        let special = SpecialTokens {
            bos: Some("<s>".into()),
            eos: Some("</s>".into()),
            add_eos: Some(true),
            ..SpecialTokens::default()
        };
        let mut tokenizer = Tokenizer::from_json(json.to_string().as_bytes(), special).unwrap();
        // Short texts have many parts and windows.
        tokenizer.parts.bytes = 24;
        if let Some(lazy) = &mut tokenizer.parts.lazy
            && let Some(long) = &mut lazy.encoder.long_words
        {
            long.window = 16;
        }
        if let Some(lazy) = &mut tokenizer.parts.lazy
            && let Some(search) = &mut lazy.encoder.best_path
        {
            search.window = 16;
        }
        tokenizer
    }
}

fn specials() -> Vec<Value> {
    vec![added("<s>", &[]), added("</s>", &[])]
}

/// Tokens that take white space from their sides, or are found only as words, or in the normalised text.
fn difficult() -> Vec<Value> {
    let more = [
        added("<l>", &["lstrip"]),
        added("<r>", &["rstrip"]),
        added("<b>", &["lstrip", "rstrip"]),
        added("ba", &["single_word"]),
        added("<n>", &["normalized"]),
        added("\n\n", &[]),
    ];
    specials().into_iter().chain(more).collect()
}

/// A byte-pair model with the given characters and merges. More fields replace the usual ones.
fn bpe(characters: impl Iterator<Item = String>, merges: &[(String, String)], more: Value) -> Value {
    let mut vocab = Map::new();
    for token in characters.chain(merges.iter().map(|(a, b)| format!("{a}{b}"))) {
        let id = vocab.len();
        vocab.entry(token).or_insert(json!(id));
    }
    let mut model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
        "vocab": vocab, "merges": merges});
    for (name, value) in more.as_object().unwrap() {
        model[name] = value.clone();
    }
    model
}

fn owned(merges: &[(&str, &str)]) -> Vec<(String, String)> {
    merges.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
}

fn byte_level_model(merges: &[(&str, &str)], ignore_merges: bool) -> Value {
    let mut alphabet: Vec<char> = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    bpe(alphabet.into_iter().map(String::from), &owned(merges), json!({"ignore_merges": ignore_merges}))
}

/// A SentencePiece model: characters that it knows, and bytes for others if `bytes`.
fn sentence_piece_model(merges: &[(&str, &str)], bytes: bool) -> Value {
    let characters = "▁ab12.漢字\n,".chars().map(String::from);
    let fallback = (0..=255_u8).filter(|_| bytes).map(|byte| format!("<{byte:#04X}>"));
    let characters = ["<unk>".to_owned()].into_iter().chain(fallback).chain(characters);
    bpe(characters, &owned(merges), json!({"unk_token": "<unk>", "fuse_unk": true, "byte_fallback": bytes}))
}

fn word_piece_model() -> Value {
    let entries = [
        "[UNK]", "a", "b", "##a", "##b", "ab", "##ab", "1", "##1", "漢", "字", ".", "'", "s", "か", "e", "##e", "g",
        "$",
    ];
    let vocab: Map<String, Value> =
        entries.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), json!(id))).collect();
    json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 20,
        "vocab": vocab})
}

/// BERT's normaliser, with each of its steps on or off.
fn bert_normalizers() -> impl Iterator<Item = Value> {
    (0..16).map(|bits| {
        let flag = |bit: u32| bits >> bit & 1 == 1;
        json!({"type": "BertNormalizer", "clean_text": flag(0), "handle_chinese_chars": flag(1), "lowercase": flag(2),
            "strip_accents": flag(3)})
    })
}

/// A Unigram model, which spells unknown characters in bytes if `bytes`. Two of them are one entry together.
fn unigram_model(bytes: bool) -> Value {
    let mut vocab = vec![json!(["<unk>", 0.0])];
    let scores = [
        ("▁", -2.0),
        ("a", -3.0),
        ("b", -3.5),
        ("ab", -4.0),
        ("▁a", -3.25),
        ("1", -4.5),
        ("漢", -6.0),
        ("漢字", -7.0),
        (".", -3.0),
        ("か😀", -90.0),
    ];
    vocab.extend(scores.map(|(token, score)| json!([token, score])));
    vocab.extend((0..=255_u8).filter(|_| bytes).map(|byte| json!([format!("<0x{byte:02X}>"), -8.0])));
    json!({"type": "Unigram", "unk_id": 0, "byte_fallback": bytes, "vocab": vocab})
}

fn template() -> Value {
    json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}})
}

fn metaspace(scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split})
}

/// A small table of replacements, the removal of white space at the end, and the replacement of runs of spaces.
pub(super) fn xlm_roberta_normalizer() -> Value {
    let pairs: Value = serde_json::from_str(include_str!("../../tests/data/pairs.json")).unwrap();
    pairs["unigram"]["tokenizer"]["normalizer"].clone()
}

/// The tokenizers of encoders, in which no text can be cut at boundaries.
fn of_encoders() -> Vec<(String, bool, Tokenizer)> {
    let mut made = vec![];
    for (number, normalizer) in bert_normalizers().enumerate() {
        let pre_tokenizer = json!({"type": "BertPreTokenizer"});
        let added = if number % 2 == 0 { specials() } else { difficult() };
        let kind =
            TokenizerKind { normalizer, pre_tokenizer, post_processor: template(), added, model: word_piece_model() };
        made.push((format!("BERT {number}"), false, kind.build()));
    }
    for kind in ["NFD", "NFKC", "NFKD", "StripAccents", "Lowercase"] {
        let normalizer = json!({"type": "Sequence", "normalizers": [{"type": kind}, {"type": "NFC"}]});
        let pre_tokenizer = json!({"type": "WhitespaceSplit"});
        let kind_of = TokenizerKind {
            normalizer,
            pre_tokenizer,
            post_processor: template(),
            added: specials(),
            model: unigram_model(false),
        };
        made.push((kind.to_owned(), false, kind_of.build()));
    }
    for (name, pre_tokenizer) in [("always", metaspace("always", true)), ("words", metaspace("always", true))] {
        let words = json!({"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, pre_tokenizer]});
        for added in [specials(), difficult()] {
            let kind = TokenizerKind {
                normalizer: xlm_roberta_normalizer(),
                pre_tokenizer: if name == "words" { words.clone() } else { pre_tokenizer.clone() },
                post_processor: template(),
                added,
                model: unigram_model(false),
            };
            made.push((format!("XLM-RoBERTa, {name}"), false, kind.build()));
        }
    }
    made
}

/// A tokenizer of each kind, with its name and whether a text can be cut at boundaries.
fn tokenizers() -> &'static [(String, bool, Tokenizer)] {
    static MADE: OnceLock<Vec<(String, bool, Tokenizer)>> = OnceLock::new();
    MADE.get_or_init(|| {
        let mut made = vec![];
        for (rules, at_spaces) in all_rules() {
            for added in [specials(), difficult()] {
                let kind = TokenizerKind {
                    normalizer: serde_json::to_value(rules.normalizer()).unwrap(),
                    pre_tokenizer: serde_json::to_value(rules.pre_tokenizer().unwrap()).unwrap(),
                    post_processor: template(),
                    added,
                    model: byte_level_model(&BYTE_LEVEL_MERGES, rules.ignore_merges),
                };
                made.push((format!("{rules:?}"), at_spaces, kind.build()));
            }
        }
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        for digits in [true, false] {
            let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": [
                {"type": "Digits", "individual_digits": digits}, byte_level]});
            let model = byte_level_model(&BYTE_LEVEL_MERGES, false);
            let kind = TokenizerKind {
                normalizer: Value::Null,
                pre_tokenizer,
                post_processor: byte_level.clone(),
                added: specials(),
                model,
            };
            made.push((format!("digits {digits}"), true, kind.build()));
        }
        made.extend(of_encoders());
        let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let legacy = json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]});
        let gemma =
            json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
        let mut stages = vec![("legacy".to_owned(), legacy, Value::Null), ("gemma".to_owned(), replace, gemma)];
        for scheme in ["always", "first", "never"] {
            for split in [true, false] {
                stages.push((format!("metaspace {scheme} {split}"), Value::Null, metaspace(scheme, split)));
            }
        }
        let models = [
            ("bytes", sentence_piece_model(&SENTENCE_PIECE_MERGES, true)),
            ("unknown", sentence_piece_model(&SENTENCE_PIECE_MERGES[..4], false)),
            ("unigram", unigram_model(false)),
            ("unigram with bytes", unigram_model(true)),
        ];
        for (stage, normalizer, pre_tokenizer) in stages {
            for (name, model) in &models {
                for added in [specials(), difficult()] {
                    let (normalizer, pre_tokenizer) = (normalizer.clone(), pre_tokenizer.clone());
                    let kind = TokenizerKind {
                        normalizer,
                        pre_tokenizer,
                        post_processor: template(),
                        added,
                        model: model.clone(),
                    };
                    made.push((format!("{stage}, {name}"), true, kind.build()));
                }
            }
        }
        made
    })
}

/// Text with many boundaries and many places that only look like one.
pub(super) fn text() -> impl Strategy<Value = String> {
    let tricky = [
        " ",
        "a",
        "b",
        "ab",
        "ba",
        "1",
        "12",
        ".",
        "..",
        "\n",
        "\n\n",
        "\r\n",
        "  ",
        "\t",
        "'s",
        "'",
        "<s>",
        "</s>",
        "<l>",
        "<r>",
        "<b>",
        "<n>",
        "。",
        "，",
        "漢",
        "字",
        "か",
        "ğ",
        "e\u{301}",
        "\u{301}",
        "\u{a0}",
        "\u{200b}",
        "\u{3000}",
        "😀",
        "$",
        "/",
        "▁",
        "\u{1100}\u{1161}",
        "\u{fb01}",
        "n\u{303}",
        "\u{1f468}\u{200d}\u{1f469}",
        "\u{1f1e9}\u{1f1ea}",
        "\u{915}\u{94d}\u{937}",
        "\u{6dd}",
    ];
    let piece = prop_oneof![
        4 => prop::sample::select(tricky.to_vec()).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
        1 => (prop::sample::select(tricky.to_vec()), 2..40_usize).prop_map(|(piece, times)| piece.repeat(times)),
    ];
    proptest::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

fn in_parts(tokenizer: &Tokenizer, text: &str, how: (bool, Wanted)) -> Vec<u32> {
    tokenizer.encode_in_parts::<TokenizerError>(text, how, || Ok(())).unwrap()
}

/// Compares all that can be wanted of a text with what the library returns for the whole.
fn compare(name: &str, tokenizer: &Tokenizer, text: &str, keep: usize) -> Result<(), TestCaseError> {
    for special in [false, true] {
        let whole = tokenizer.encode(text, special).unwrap();
        prop_assert_eq!(&in_parts(tokenizer, text, (special, Wanted::All)), &whole, "{:?} by {}", text, name);
        let keep = keep.min(whole.len());
        let first = in_parts(tokenizer, text, (special, Wanted::First(keep)));
        prop_assert_eq!(&first[..], &whole[..keep], "the start of {:?} by {}", text, name);
        let last = in_parts(tokenizer, text, (special, Wanted::Last(keep)));
        prop_assert_eq!(&last[..], &whole[whole.len() - keep..], "the end of {:?} by {}", text, name);
    }
    Ok(())
}

/// Returns the configuration of the properties of every kind of tokenizer. `PROPTEST_CASES` changes their number of cases.
fn properties() -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { 64 };
    ProptestConfig { cases, ..default }
}

proptest! {
    #![proptest_config(properties())]

    #[test]
    fn parts_have_the_tokens_of_the_whole(text in text(), keep in 1..40_usize) {
        for (name, _, tokenizer) in tokenizers() {
            compare(name, tokenizer, &text, keep)?;
        }
    }

    #[test]
    fn a_text_cut_anywhere_it_may_be_has_the_same_tokens(text in text()) {
        for (name, _, tokenizer) in tokenizers() {
            let lazy = tokenizer.parts.lazy.as_ref().unwrap();
            let Some(cuts) = &lazy.cuts else { continue };
            let whole = tokenizer.encode(&text, false).unwrap();
            for at in (1..text.len()).filter(|&at| cuts.allow(&text, at, tokenizer.inner.get_model())) {
                let mut last = in_parts(tokenizer, &text[..at], (false, Wanted::All));
                let place = (&text[at..], super::lazy::Place::Middle);
                let rest = lazy.encoder.encode::<TokenizerError>(tokenizer.inner.get_model(), place, &mut |_| Ok(()));
                last.extend(rest.unwrap());
                prop_assert_eq!(last, &whole[..], "{:?} cut at {} by {}", text, at, name);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// Merges of any rank, so that one of a good rank may only become possible after one of a bad rank.
    #[test]
    fn windows_have_the_tokens_of_the_word_for_any_merges(
        pairs in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..12),
        order in any::<u64>(), words in proptest::collection::vec("[abc]{1,8}", 1..6), repeats in 1..60_usize,
    ) {
        let mut entries: Vec<String> = ["a", "b", "c"].map(String::from).to_vec();
        let mut merges = vec![];
        for (a, b) in &pairs {
            let (a, b) = (a.get(&entries).clone(), b.get(&entries).clone());
            if a.len() + b.len() <= 8 && !merges.contains(&(a.clone(), b.clone())) {
                entries.push(format!("{a}{b}"));
                merges.push((a, b));
            }
        }
        let rank = |(a, b): &(String, String)| (format!("{a} {b}").bytes().fold(order, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))) >> 7;
        merges.sort_by_key(rank);
        let model = bpe(["a", "b", "c"].into_iter().map(String::from), &merges, json!({}));
        let kind = TokenizerKind { normalizer: Value::Null, pre_tokenizer: Value::Null, post_processor: Value::Null, added: specials(), model };
        let tokenizer = kind.build();
        compare(&format!("{merges:?}"), &tokenizer, &words.concat().repeat(repeats), 7)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Scores of any size, also equal ones, so that the best path changes far behind the place of the search.
    #[test]
    fn a_search_has_the_tokens_of_the_word_for_any_scores(
        entries in proptest::collection::btree_map("[abc]{1,7}", -4..0_i32, 1..14), unknown in -4..0_i32,
        words in proptest::collection::vec("[abcdé]{1,8}", 1..6), repeats in 1..60_usize, bytes in any::<bool>(),
    ) {
        let mut vocab = vec![json!(["<unk>", unknown])];
        vocab.extend(entries.iter().map(|(entry, score)| json!([entry, f64::from(*score) * 3.1])));
        vocab.extend((0..=255_u8).filter(|_| bytes).map(|byte| json!([format!("<0x{byte:02X}>"), -8.0])));
        let model = json!({"type": "Unigram", "unk_id": 0, "byte_fallback": bytes, "vocab": vocab});
        let kind = TokenizerKind { normalizer: Value::Null, pre_tokenizer: Value::Null, post_processor: Value::Null, added: specials(), model };
        let tokenizer = kind.build();
        prop_assert!(tokenizer.parts.lazy.as_ref().unwrap().encoder.best_path.is_some());
        compare(&format!("{entries:?}"), &tokenizer, &words.concat().repeat(repeats), 7)?;
    }
}

#[test]
fn every_kind_is_interruptible_and_cut_where_it_can_be() {
    assert!(tokenizers().len() > 60);
    for (name, cut, tokenizer) in tokenizers() {
        assert!(tokenizer.is_interruptible(), "{name}");
        assert_eq!(tokenizer.parts.lazy.as_ref().unwrap().cuts.is_some(), *cut, "{name}");
    }
    let cuts = |tokenizer: &'static Tokenizer| tokenizer.parts.lazy.as_ref().unwrap().cuts.as_ref().unwrap();
    let (.., legacy) = tokenizers().iter().find(|(name, ..)| name == "legacy, bytes").unwrap();
    let Cuts::Spaces { not_after } = cuts(legacy) else { panic!("no cuts at spaces") };
    assert!(not_after.contains(&'b') && not_after.contains(&'>') && !not_after.contains(&'a'), "{not_after:?}");
}

#[test]
fn a_gguf_vocabulary_is_interruptible() {
    let pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab"];
    let vocab = GgufVocabulary {
        model: "llama".into(),
        tokens: pieces.to_vec(),
        scores: vec![0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0],
        token_types: vec![2, 3, 3, 1, 1, 1, 1, 1],
        bos_id: Some(1),
        eos_id: Some(2),
        unk_id: Some(0),
        ..GgufVocabulary::default()
    };
    let tokenizer = Tokenizer::from_gguf(&vocab).unwrap();
    assert!(tokenizer.is_interruptible());
    for text in ["ab ba ".repeat(10_000), "ab".repeat(30_000), "\u{4e00}".repeat(30_000)] {
        assert_eq!(in_parts(&tokenizer, &text, (true, Wanted::All)), tokenizer.encode(&text, true).unwrap());
    }
}

/// A tokenizer with the sizes of parts and windows that a server has.
fn of_full_size(name: &str) -> Tokenizer {
    let model = match name {
        "BERT" => word_piece_model(),
        "unigram" => unigram_model(true),
        "byte level" => byte_level_model(&BYTE_LEVEL_MERGES, true),
        _ => sentence_piece_model(&SENTENCE_PIECE_MERGES, true),
    };
    let (normalizer, pre_tokenizer) = match name {
        "byte level" => {
            (Value::Null, serde_json::to_value(all_rules().nth(3).unwrap().0.pre_tokenizer().unwrap()).unwrap())
        }
        "BERT" => (bert_normalizers().last().unwrap(), json!({"type": "BertPreTokenizer"})),
        _ => (json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}), Value::Null),
    };
    let kind = TokenizerKind { normalizer, pre_tokenizer, post_processor: Value::Null, added: specials(), model };
    let mut tokenizer = kind.build();
    tokenizer.parts.bytes = 16 << 10;
    let lazy = tokenizer.parts.lazy.as_mut().unwrap();
    if let Some(long) = &mut lazy.encoder.long_words {
        long.window = 16 << 10;
    }
    if let Some(search) = &mut lazy.encoder.best_path {
        search.window = 16 << 10;
    }
    tokenizer
}

#[test]
fn truncation_reads_only_the_side_that_it_keeps() {
    for name in ["byte level", "sentence piece"] {
        let tokenizer = of_full_size(name);
        let text = "a12 ".repeat(1 << 18);
        for wanted in [Wanted::First(100), Wanted::Last(100)] {
            let mut pauses = 0;
            let count = || -> Result<(), TokenizerError> {
                pauses += 1;
                Ok(())
            };
            assert_eq!(tokenizer.encode_in_parts(&text, (true, wanted), count).unwrap().len(), 100);
            assert!(pauses <= 4, "{name}: {pauses} pauses");
        }
    }
}

/// Texts without boundaries, and with added tokens and white space only.
#[test]
fn work_ends_at_the_pause_that_fails_in_any_text() {
    for name in ["byte level", "sentence piece", "unigram", "BERT"] {
        let tokenizer = of_full_size(name);
        for piece in ["a", "ab", "漢", "1", "!", "\n", " ", "<s>", "a1", "é", "\u{1100}"] {
            let text = piece.repeat((128 << 10) / piece.len());
            let (mut pauses, mut left) = (0, 3);
            let count = || -> Result<(), TokenizerError> {
                pauses += 1;
                Ok(())
            };
            tokenizer.encode_in_parts(&text, (true, Wanted::All), count).unwrap();
            assert!(pauses > 4, "{name}: {pauses} pauses in {piece:?}");
            let pause = || {
                left -= 1;
                if left == 0 { Err(TokenizerError::Encode("cancelled".into())) } else { Ok(()) }
            };
            assert!(tokenizer.encode_in_parts(&text, (true, Wanted::All), pause).is_err());
            assert_eq!(left, 0, "{name}: {piece:?}");
        }
    }
}

/// The library would take gigabytes for a long one.
#[test]
fn a_run_of_marks_that_is_too_long_is_an_error() {
    let kind = TokenizerKind {
        normalizer: json!({"type": "NFC"}),
        pre_tokenizer: Value::Null,
        post_processor: Value::Null,
        added: specials(),
        model: byte_level_model(&[], false),
    };
    let tokenizer = kind.build();
    let encode = |text: &str| tokenizer.encode_in_parts::<TokenizerError>(text, (false, Wanted::All), || Ok(()));
    assert!(encode(&"e\u{301}".repeat(1 << 20)).is_ok());
    assert!(matches!(encode(&"\u{301}".repeat(1 << 20)), Err(TokenizerError::LongRun { .. })));
}

#[test]
fn a_tokenizer_with_unknown_stages_encodes_one_long_text_at_a_time() {
    let kind = TokenizerKind {
        normalizer: json!({"type": "Lowercase"}),
        pre_tokenizer: json!({"type": "Whitespace"}),
        post_processor: Value::Null,
        added: specials(),
        model: byte_level_model(&[], false),
    };
    let tokenizer = kind.build();
    assert!(!tokenizer.is_interruptible());
    let text = "AB ba ".repeat(100);
    let other = tokenizer.parts.whole.lock().unwrap();
    let mut waits = 0;
    let pause = || {
        waits += 1;
        if waits == 5 { Err(TokenizerError::Encode("cancelled".into())) } else { Ok(()) }
    };
    assert!(tokenizer.encode_in_parts(&text, (false, Wanted::All), pause).is_err(), "it waits, and can be cancelled");
    drop(other);
    let long = "a".repeat((4 << 20) + 1);
    let refused = tokenizer.encode_in_parts::<TokenizerError>(&long, (false, Wanted::All), || Ok(()));
    assert!(matches!(refused, Err(TokenizerError::TooLong { limit: 4_194_304, .. })));
    assert_eq!(in_parts(&tokenizer, &text, (false, Wanted::All)), tokenizer.encode(&text, false).unwrap());
}
