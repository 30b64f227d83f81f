//! Property tests of incremental detokenising and of stop strings.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]
#![allow(unreachable_pub, missing_docs, dead_code, reason = "helpers shared by several test binaries")]

mod support;

use std::sync::{Arc, LazyLock};

use octavo_text::{SpecialTokens, TextOptions, TextStream, Tokenizer};
use proptest::prelude::*;
use support::Golden;

static BYTE_LEVEL: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(Golden::byte_level().tokenizer()));
static SENTENCE_PIECE: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(Golden::sentence_piece().tokenizer()));

fn tokenizer(sentence_piece: bool) -> Arc<Tokenizer> {
    Arc::clone(if sentence_piece { &SENTENCE_PIECE } else { &BYTE_LEVEL })
}

/// Returns all text of a stream, and the stop string with the number of tokens it took.
fn run(stream: &mut TextStream, ids: &[u32]) -> (String, Option<(String, usize)>) {
    let mut text = String::new();
    let mut found = None;
    for (at, &id) in ids.iter().enumerate() {
        let delta = stream.push(id);
        text += &delta.text;
        if let Some(stop) = delta.stop {
            assert!(found.is_none(), "one stop string ends the text");
            found = Some((stop, at + 1));
        }
    }
    text += &stream.finish();
    (text, found)
}

/// Generates many byte tokens, hence many invalid characters, and some words and special tokens.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![3 => 3_u32..270, 1 => 0_u32..3, 2 => 270_u32..1200, 1 => 1200_u32..1300], 0..60)
}

/// Returns stop strings that probably occur in the text: substrings of it, and short ones.
fn stops(text: &str, cuts: &[(usize, usize)]) -> Vec<String> {
    let characters: Vec<char> = text.chars().collect();
    cuts.iter()
        .map(|&(start, len)| {
            let start = start.min(characters.len());
            characters[start..(start + len).min(characters.len())].iter().collect::<String>()
        })
        .collect()
}

/// Returns the end of the earliest complete match beyond `tested` bytes; of several, the first in the list.
fn naive<'a>(text: &str, stops: &'a [String], tested: usize) -> Option<(usize, &'a str)> {
    (tested + 1..=text.len()).find_map(|end| {
        let stop = stops.iter().find(|stop| !stop.is_empty() && text.as_bytes()[..end].ends_with(stop.as_bytes()))?;
        Some((end, stop.as_str()))
    })
}

proptest! {
    #[test]
    fn deltas_are_the_decoded_text(ids in ids(), sentence_piece: bool, skip: bool, split in 0_usize..60) {
        let tokenizer = tokenizer(sentence_piece);
        let options = TextOptions { skip_special_tokens: skip, ..TextOptions::default() };
        let whole = tokenizer.decode(&ids, skip).unwrap();
        let (text, _) = run(&mut TextStream::new(Arc::clone(&tokenizer), &[], options.clone()), &ids);
        prop_assert_eq!(&text, &whole);
        // After a prompt the stream continues where the certain part of the prompt's own text ends.
        let (prompt, output) = ids.split_at(split.min(ids.len()));
        let (text, _) = run(&mut TextStream::new(Arc::clone(&tokenizer), prompt, options), output);
        if !output.is_empty() {
            prop_assert!(whole.ends_with(&text), "{:?} does not end with {:?}", whole, text);
        }
    }

    #[test]
    fn nothing_is_held_back_but_what_must_be(ids in ids(), sentence_piece: bool) {
        let tokenizer = tokenizer(sentence_piece);
        let mut stream = TextStream::new(Arc::clone(&tokenizer), &[], TextOptions::default());
        let mut given = String::new();
        for at in 0..ids.len() {
            given += &stream.push(ids[at]).text;
            let decoded = tokenizer.decode(&ids[..=at], true).unwrap();
            prop_assert!(decoded == given || decoded == format!("{given}\u{fffd}"), "{decoded:?} {given:?}");
        }
    }

    #[test]
    fn stop_strings_are_found_as_defined(
        ids in ids(), sentence_piece: bool, include: bool, min_tokens in 0_u32..20,
        cuts in prop::collection::vec((0_usize..60, 0_usize..6), 1..5),
    ) {
        let tokenizer = tokenizer(sentence_piece);
        let whole = tokenizer.decode(&ids, true).unwrap();
        let stop = stops(&whole, &cuts);
        let options = TextOptions { min_tokens, ..TextOptions::default() };
        // The text that a stream without stop strings has returned after each token is the text that can be searched
        // after it.
        let mut plain = TextStream::new(Arc::clone(&tokenizer), &[], options.clone());
        let mut searchable = vec![0];
        let mut visible = String::new();
        for &id in &ids {
            visible += &plain.push(id).text;
            searchable.push(visible.len());
        }
        let tested = searchable[(min_tokens as usize).min(ids.len())];
        let expected = naive(&visible, &stop, tested);

        let options = TextOptions { stop: stop.clone().into(), include_stop_str_in_output: include, ..options };
        let (text, found) = run(&mut TextStream::new(Arc::clone(&tokenizer), &[], options), &ids);
        match expected {
            Some((end, stop)) => {
                let tokens = searchable.iter().position(|&len| len >= end).unwrap();
                prop_assert_eq!(found, Some((stop.to_owned(), tokens)));
                let end = if include { end } else { end - stop.len() };
                prop_assert_eq!(&text, &visible[..end]);
            }
            None => {
                prop_assert_eq!(found, None);
                prop_assert_eq!(text, whole);
            }
        }
    }

    #[test]
    fn only_the_start_of_a_stop_string_is_held_back(
        ids in ids(), cuts in prop::collection::vec((0_usize..60, 1_usize..8), 1..4),
    ) {
        let whole = BYTE_LEVEL.decode(&ids, true).unwrap();
        let stop = stops(&whole, &cuts);
        let mut plain = TextStream::new(Arc::clone(&BYTE_LEVEL), &[], TextOptions::default());
        let options = TextOptions { stop: stop.clone().into(), ..TextOptions::default() };
        let mut stream = TextStream::new(Arc::clone(&BYTE_LEVEL), &[], options);
        let (mut visible, mut given) = (String::new(), String::new());
        for &id in &ids {
            visible += &plain.push(id).text;
            let delta = stream.push(id);
            given += &delta.text;
            if delta.stop.is_some() {
                break;
            }
            let held = visible.strip_prefix(given.as_str()).unwrap();
            prop_assert!(held.is_empty() || stop.iter().any(|stop| stop.len() > held.len() && stop.starts_with(held)));
        }
    }
}

fn stream(options: TextOptions) -> TextStream {
    TextStream::new(Arc::clone(&BYTE_LEVEL), &[], options)
}

fn stop(stop: &[&str]) -> TextOptions {
    TextOptions { stop: stop.iter().map(|&stop| stop.to_owned()).collect::<Vec<_>>().into(), ..TextOptions::default() }
}

#[test]
fn a_character_comes_whole() {
    let ids = BYTE_LEVEL.encode("é", false).unwrap();
    let mut text = stream(TextOptions::default());
    assert_eq!(text.push(ids[0]).text, "");
    assert_eq!(text.push(ids[1]).text, "é");
    assert_eq!(text.push(ids[0]).text, "");
    assert_eq!(text.finish(), "\u{fffd}");
    assert_eq!(text.finish(), "");

    // A character begun in the prompt is returned whole when completed, and dropped otherwise.
    let mut text = TextStream::new(Arc::clone(&BYTE_LEVEL), &ids[..1], TextOptions::default());
    assert_eq!(text.push(ids[1]).text, "é");
    let mut text = TextStream::new(Arc::clone(&BYTE_LEVEL), &ids[..1], TextOptions::default());
    assert_eq!(text.push(BYTE_LEVEL.encode("a", false).unwrap()[0]).text, "a");
    let mut text = TextStream::new(Arc::clone(&BYTE_LEVEL), &ids[..1], TextOptions::default());
    assert_eq!(text.finish(), "");
}

#[test]
fn the_earliest_completed_wins_and_the_list_breaks_ties() {
    let ids = BYTE_LEVEL.encode("one two three", false).unwrap();
    assert_eq!(run(&mut stream(stop(&["three", "two"])), &ids).0, "one ");
    assert_eq!(run(&mut stream(stop(&["wo", "two"])), &ids).0, "one t");
    assert_eq!(run(&mut stream(stop(&["two", "wo"])), &ids).0, "one ");
    let included = TextOptions { include_stop_str_in_output: true, ..stop(&["tw"]) };
    assert_eq!(run(&mut stream(included), &ids).0, "one tw");
    let taken = (1..).find(|&n| BYTE_LEVEL.decode(&ids[..n], false).unwrap().contains("ne t")).unwrap();
    assert_eq!(run(&mut stream(stop(&["", "ne t"])), &ids), ("o".to_owned(), Some(("ne t".to_owned(), taken))));
}

#[test]
fn a_special_token_is_hidden_or_can_be_a_stop_string() {
    let ids = BYTE_LEVEL.encode("a<|im_end|>b", false).unwrap();
    assert_eq!(run(&mut stream(TextOptions::default()), &ids).0, "ab");
    let shown = TextOptions { skip_special_tokens: false, ..stop(&["<|im_end|>"]) };
    assert_eq!(run(&mut stream(shown), &ids).0, "a");
    assert_eq!(run(&mut stream(stop(&["<|im_end|>"])), &ids).0, "ab");
}

#[test]
fn a_leading_space_belongs_to_a_continuation_only() {
    let ids = SENTENCE_PIECE.encode("the end", false).unwrap();
    let text = |prompt: &[u32]| {
        let mut stream = TextStream::new(Arc::clone(&SENTENCE_PIECE), prompt, TextOptions::default());
        run(&mut stream, &ids).0
    };
    assert_eq!(text(&[]), "the end");
    assert_eq!(text(&[1]), "the end");
    assert_eq!(text(&[1, ids[0]]), " the end");
}

#[test]
fn ten_thousand_stop_strings_are_not_slow() {
    let strings: Vec<String> = (0..10_000).map(|i| format!("{i:05}{}", "x".repeat(20))).collect();
    let options = TextOptions { stop: strings.into(), ..TextOptions::default() };
    let ids = BYTE_LEVEL.encode(&"00000xxxxxxxxx".repeat(2000), false).unwrap();
    let (text, found) = run(&mut stream(options), &ids);
    assert_eq!((text.len(), found), (28_000, None));
}

#[test]
fn decoders_that_are_not_per_token_stream_too() {
    let vocab: serde_json::Map<_, _> = ["[UNK]", "hello", "##s", "world", "!", "é"]
        .iter()
        .enumerate()
        .map(|(id, t)| ((*t).to_owned(), id.into()))
        .collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": false},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab},
    });
    let tokenizer = Arc::new(Tokenizer::from_json(json.to_string().as_bytes(), SpecialTokens::default()).unwrap());
    let ids = [1, 2, 3, 5, 4, 1, 1, 2];
    let expected = tokenizer.decode(&ids, true).unwrap();
    assert_eq!(expected, "hellos world é ! hello hellos");
    assert_eq!(run(&mut TextStream::new(Arc::clone(&tokenizer), &[], TextOptions::default()), &ids).0, expected);
    let after_prompt = run(&mut TextStream::new(tokenizer, &ids[..2], stop(&["! hello "])), &ids[2..]);
    assert_eq!(after_prompt, (" world é ".to_owned(), Some(("! hello ".to_owned(), 5))));
}

/// A tokenizer with a vocabulary of words and a decoder of tokenizer.json.
fn of_words(words: &[&str], decoder: &serde_json::Value) -> Arc<Tokenizer> {
    let vocab: serde_json::Map<_, _> = words.iter().enumerate().map(|(id, t)| ((*t).to_owned(), id.into())).collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": decoder,
        "model": {"type": "WordLevel", "unk_token": words[0], "vocab": vocab},
    });
    Arc::new(Tokenizer::from_json(json.to_string().as_bytes(), SpecialTokens::default()).unwrap())
}

#[test]
fn text_continues_after_a_token_that_changed_what_was_passed_on() {
    let decoder = serde_json::json!({"type": "Sequence", "decoders": [
        {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "ab"}, "content": "X"}]});
    let tokenizer = of_words(&["?", "a", "b", "c"], &decoder);
    assert_eq!(tokenizer.decode(&[1, 2, 3], true).unwrap(), "Xc");
    let mut stream = TextStream::new(Arc::clone(&tokenizer), &[], TextOptions::default());
    let deltas: Vec<String> = [1, 2, 3, 3, 1].into_iter().map(|id| stream.push(id).text).collect();
    assert_eq!(deltas, ["a", "X", "c", "c", "a"]);
}
