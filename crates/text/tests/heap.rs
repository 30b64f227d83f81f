//! The heap of a byte-pair tokenizer: its tables, what reading them takes beside, and that nothing is kept of a word.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use octavo_text::{GgufVocabulary, SpecialTokens, Tokenizer, byte_character};
use peak_alloc::PeakAlloc;
use serde_json::{Map, json};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Number of entries, about as many as the vocabulary of a small model has.
const ENTRIES: usize = 50_000;

/// Most bytes of the tables for each entry, of which about twelve are its text, twice.
const TABLES: usize = 64;

/// Most bytes for each entry while a tokenizer is read, beside the file: strings are borrowed from it.
const READING: usize = 256;

/// Number of words of a text. Kept with their tokens, they would take megabytes.
const WORDS: usize = 8000;

/// Bytes that do not depend on the number of entries, such as those of expressions.
const ALLOWANCE: usize = 1 << 20;

/// Returns entries and merges: the characters of all bytes, and unions of two entries that came before.
fn vocabulary() -> (Vec<String>, Vec<[String; 2]>) {
    let mut entries: Vec<String> = (0..=u8::MAX).map(|byte| byte_character(byte).to_string()).collect();
    let mut known: std::collections::HashSet<String> = entries.iter().cloned().collect();
    let (mut merges, mut random) = (vec![], fastrand::Rng::with_seed(7));
    while entries.len() < ENTRIES {
        let pair = [(); 2].map(|()| entries[random.usize(..entries.len().min(4096))].clone());
        let union = pair.concat();
        if union.chars().count() <= 8 && known.insert(union.clone()) {
            entries.push(union);
            merges.push(pair);
        }
    }
    (entries, merges)
}

/// Returns what `read` returns, the bytes that it keeps and the most that it takes meanwhile.
fn measured(read: impl FnOnce() -> Tokenizer) -> (Tokenizer, usize, usize) {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let tokenizer = read();
    (tokenizer, HEAP.current_usage() - before, HEAP.peak_usage() - before)
}

/// Encodes a text of random words, which has more than one token for most of them.
fn encode(tokenizer: &Tokenizer, entries: &[String], seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let words: Vec<&str> = (0..WORDS).map(|_| entries[random.usize(256..entries.len())].as_str()).collect();
    assert!(tokenizer.encode(&words.join(" "), false).unwrap().len() > WORDS);
}

/// One test, because all tests of a process share its heap.
#[test]
fn tables_take_few_bytes_for_each_entry_and_words_none() {
    let (entries, merges) = vocabulary();
    let lines: Vec<String> = merges.iter().map(|pair| pair.join(" ")).collect();
    let borrowed = GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: Some("gpt-2".to_owned()),
        tokens: entries.iter().map(String::as_str).collect(),
        merges: lines.iter().map(String::as_str).collect(),
        ..GgufVocabulary::default()
    };
    let vocab: Map<_, _> = entries.iter().zip(0..).map(|(text, id)| (text.clone(), json!(id))).collect();
    let file = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    });
    let file = file.to_string().into_bytes();
    let of_gguf = measured(|| Tokenizer::from_gguf(&borrowed).unwrap());
    let of_json = measured(|| Tokenizer::from_json(&file, SpecialTokens::default()).unwrap());
    for (name, beside, (tokenizer, kept, most)) in [("GGUF", 0, of_gguf), ("JSON", file.len(), of_json)] {
        println!("{name}: {kept} bytes kept, {most} at most while reading {} bytes", file.len());
        assert!(kept < ENTRIES * TABLES + ALLOWANCE, "{name} keeps {kept} bytes");
        assert!(most < ENTRIES * READING + beside + ALLOWANCE, "{name} takes {most} bytes");
        // The first text sets up what expressions keep for a thread.
        encode(&tokenizer, &entries, 1);
        let before = HEAP.current_usage();
        encode(&tokenizer, &entries, 2);
        let left = HEAP.current_usage().saturating_sub(before);
        assert!(left < ALLOWANCE / 4, "{name}: {left} bytes are left");
    }
}
