//! Comparison with the model of the tokenizers library.

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

use super::{Bpe, Entries, Settings};

/// Characters of words: entries, characters that only bytes spell, and one that some vocabularies do not know.
const CHARACTERS: [&str; 6] = ["a", "b", "c", "▁", "é", "漢"];

/// Returns the `model` of a tokenizer.json with these entries, merges and flags.
fn model(known: usize, pairs: &[(usize, usize)], [unknown, fuse, bytes, half, ignore]: [bool; 5]) -> Value {
    let mut entries: Vec<String> = CHARACTERS[..known].iter().map(|&character| character.to_owned()).collect();
    let mut merges = vec![];
    for &(left, right) in pairs {
        let (left, right) = (entries[left % entries.len()].clone(), entries[right % entries.len()].clone());
        let union = format!("{left}{right}");
        if !entries.contains(&union) {
            entries.push(union);
        }
        merges.push(json!([left, right]));
    }
    let spelled = if half { 0x00..=0xc3 } else { 0x00..=0xff_u8 };
    entries.extend(spelled.filter(|_| bytes).map(|byte| format!("<0x{byte:02X}>")));
    entries.extend(unknown.then(|| "<unk>".to_owned()));
    let vocab: Map<String, Value> = entries.into_iter().zip(0..).map(|(text, id)| (text, json!(id))).collect();
    json!({"type": "BPE", "dropout": null, "unk_token": unknown.then_some("<unk>"), "fuse_unk": fuse,
        "continuing_subword_prefix": null, "end_of_word_suffix": "", "byte_fallback": bytes, "ignore_merges": ignore,
        "vocab": vocab, "merges": merges})
}

fn word() -> impl Strategy<Value = String> {
    let character = prop_oneof![proptest::sample::select(&CHARACTERS[..]), Just("\u{1f600}"), Just("z")];
    proptest::collection::vec(character, 0..24).prop_map(|characters| characters.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn tokens_and_their_places_are_those_of_the_library(
        known in 1..=CHARACTERS.len(),
        pairs in proptest::collection::vec((0..40_usize, 0..40_usize), 0..30),
        flags in any::<[bool; 5]>(),
        words in proptest::collection::vec(word(), 1..8),
    ) {
        let json = model(known, &pairs, flags).to_string();
        let library: BPE = serde_json::from_str(&json).unwrap();
        let bpe = Bpe::from_json(&json).unwrap();
        for word in &words {
            let expected: Vec<_> = library.tokenize(word).unwrap().iter().map(|token| (token.id, token.offsets.1 - token.offsets.0)).collect();
            let found: Vec<_> = bpe.tokens(word).iter().map(|symbol| (symbol.token, symbol.bytes as usize)).collect();
            prop_assert_eq!(found, expected, "{}", word);
        }
        for (text, id) in library.get_vocab() {
            prop_assert_eq!(bpe.entries().id(&text), Some(id));
            prop_assert_eq!(bpe.entries().text(id), Some(&*text));
        }
        prop_assert_eq!(bpe.entries().len(), library.get_vocab_size());
    }
}

#[test]
fn older_files_have_merges_as_lines() {
    let mut json = model(3, &[(0, 1), (3, 2)], [false; 5]);
    let pairs = Bpe::from_json(&json.to_string()).unwrap();
    json["merges"] = json!(["#version: 0.2", "a b", "ab c"]);
    json.as_object_mut().unwrap().remove("type");
    let lines = Bpe::from_json(&json.to_string()).unwrap();
    for word in ["abc", "aabcb", "bca"] {
        let tokens = |bpe: &Bpe| bpe.tokens(word).iter().map(|symbol| symbol.token).collect::<Vec<_>>();
        assert_eq!(tokens(&lines), tokens(&pairs));
    }
    assert_eq!(pairs.tokens("abc").len(), 1);
    json["merges"] = json!(["a b c"]);
    assert!(Bpe::from_json(&json.to_string()).is_err());
}

#[test]
fn what_only_the_library_reads_is_an_error() {
    let changes = [
        ("dropout", json!(0.5)),
        ("end_of_word_suffix", json!("</w>")),
        ("continuing_subword_prefix", json!("##")),
        ("type", json!("WordPiece")),
        ("unk_token", json!("[UNK]")),
        ("merges", json!([["a", "zz"]])),
        ("merges", json!([["a"]])),
        ("vocab", json!({"a": 0, "b": 0})),
        ("vocab", json!({"a": 0, "b": 4_000_000_000_u32})),
    ];
    for (key, value) in changes {
        let mut json = model(2, &[], [false; 5]);
        assert!(Bpe::from_json(&json.to_string()).is_ok());
        json[key] = value;
        assert!(Bpe::from_json(&json.to_string()).is_err(), "{json}");
    }
}

#[test]
fn ids_may_have_gaps_and_the_first_of_equal_entries_counts() {
    let entries = Entries::new([(1, "a"), (4, "b"), (5, "a"), (6, "")].into_iter()).unwrap();
    assert_eq!((entries.end(), entries.len()), (7, 3));
    assert_eq!(
        (0..8).map(|id| entries.text(id)).collect::<Vec<_>>(),
        [None, Some("a"), None, None, Some("b"), None, Some(""), None]
    );
    assert_eq!(["a", "b", "", "c"].map(|text| entries.id(text)), [Some(1), Some(4), Some(6), None]);
    assert!(Bpe::new(entries, [("a", "b")].into_iter(), Settings::default()).is_err());
}
