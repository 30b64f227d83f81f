//! Property tests of the header reader. `tests/hostile.rs` tests individual hostile files.

use proptest::prelude::*;

use super::*;
use crate::config::ModelConfig;

/// Returns a committed file, read once.
fn valid() -> &'static [u8] {
    static FILE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    FILE.get_or_init(|| {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/testdata/llama-gguf/model.gguf");
        std::fs::read(path).unwrap()
    })
}

/// Checks that an accepted header describes only bytes of the file, and that everything built from it is a value or an
/// error.
fn check(bytes: &[u8]) {
    let Ok(header) = Header::parse(bytes) else { return };
    let mut ranges: Vec<_> = header.tensors().values().map(|t| (t.range.start, t.range.end)).collect();
    ranges.sort_unstable();
    assert!(ranges.iter().all(|&(start, end)| start < end && end <= bytes.len()));
    assert!(ranges.windows(2).all(|w| w[0].1 <= w[1].0));
    for tensor in header.tensors().values() {
        let storage = tensor.storage.clone().unwrap();
        assert_eq!(storage.bytes_for(tensor.shape.iter().product()), Some(tensor.range.len()));
    }
    let metadata = header.metadata().view(bytes);
    let _ = ModelConfig::from_gguf(&metadata, &|name| header.tensors().contains_key(name));
    let _ = tokenizer_data(&metadata);
    let _ = chat_template(&metadata);
    let _ = generation_config(&metadata);
}

#[test]
fn the_committed_file_is_read_whole() {
    let header = Header::parse(valid()).unwrap();
    assert_eq!(header.tensors().len(), 21);
    let embedding = &header.tensors()["token_embd.weight"];
    assert_eq!((embedding.storage.clone(), embedding.shape.as_slice()), (Ok(StorageType::Q8_0), &[320, 64][..]));
    check(valid());
}

/// A file with metadata and no tensors.
struct Keys {
    count: u64,
    pairs: Vec<u8>,
}

impl Keys {
    fn new() -> Self {
        Self { count: 0, pairs: Vec::new() }
    }

    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }

    /// Adds a pair whose value has the type with the number `kind`.
    fn pair(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.count += 1;
        Self::text(&mut self.pairs, key);
        self.pairs.extend(kind.to_le_bytes());
        self.pairs.extend(value);
    }

    fn id(&mut self, role: &str, id: u32) {
        self.pair(&format!("tokenizer.ggml.{role}_token_id"), 4, &id.to_le_bytes());
    }

    fn tokens(&mut self, tokens: &[&str]) {
        let mut array = [8u32.to_le_bytes().as_slice(), (tokens.len() as u64).to_le_bytes().as_slice()].concat();
        tokens.iter().for_each(|token| Self::text(&mut array, token));
        self.pair("tokenizer.ggml.tokens", 9, &array);
    }

    fn file(&self) -> Vec<u8> {
        let head = [b"GGUF".as_slice(), &3u32.to_le_bytes(), &0u64.to_le_bytes(), &self.count.to_le_bytes()];
        [head.concat(), self.pairs.clone()].concat()
    }
}

#[test]
fn integers_of_every_width_are_one_kind_of_value() {
    let values: [(u32, &[u8]); 8] = [
        (0, &[7]),
        (1, &[7]),
        (2, &[7, 0]),
        (3, &[7, 0]),
        (4, &[7, 0, 0, 0]),
        (5, &[7, 0, 0, 0]),
        (10, &[7, 0, 0, 0, 0, 0, 0, 0]),
        (11, &[7, 0, 0, 0, 0, 0, 0, 0]),
    ];
    let mut keys = Keys::new();
    for (kind, value) in values {
        keys.pair(&format!("k{kind}"), kind, value);
    }
    keys.pair("minus", 1, &[0xff]);
    let file = keys.file();
    let header = Header::parse(&file).unwrap();
    let view = header.metadata().view(&file);
    for (kind, _) in values {
        assert_eq!(view.u64(&format!("k{kind}")), Ok(Some(7)));
        assert_eq!(view.f64(&format!("k{kind}")), Ok(Some(7.0)));
    }
    assert!(view.u64("minus").is_err());
    assert_eq!(view.f64("minus"), Ok(Some(-1.0)));
    assert_eq!(view.u64("absent"), Ok(None));
    assert!(view.str("k0").is_err() && view.bool("k0").is_err() && view.strings("k0").is_err());
}

/// Returns the ids that end a generation, in a file that names ids of these roles.
fn ends(roles: &[(&str, u32)], tokens: &[&str]) -> Vec<u32> {
    let mut keys = Keys::new();
    roles.iter().for_each(|(role, id)| keys.id(role, *id));
    keys.tokens(tokens);
    let file = keys.file();
    let header = Header::parse(&file).unwrap();
    generation_config(&header.metadata().view(&file)).unwrap().eos_token_ids
}

#[test]
fn generations_end_with_the_tokens_of_every_family() {
    assert_eq!(ends(&[], &["a", "b"]), [0; 0]);
    let llama3 = ["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"];
    assert_eq!(ends(&[("eos", 1), ("eot", 2), ("eom", 3)], &llama3), [1, 2, 3]);
    assert_eq!(ends(&[("eos", 2)], &llama3), [2, 1, 3]);
    // Gemma names only the end of a text.
    assert_eq!(ends(&[("eos", 1)], &["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]), [1, 4]);
    let phi3 = ["<unk>", "<|endoftext|>", "<|assistant|>", "<|end|>"];
    assert_eq!(ends(&[("eos", 1)], &phi3), [1, 3]);
    let phi4 = ["a", "<|im_end|>", "<|im_sep|>", "<|endoftext|>"];
    assert_eq!(ends(&[("eos", 1)], &phi4), [1, 3]);
    let granite = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"];
    assert_eq!(ends(&[("eos", 0)], &granite), [0]);
    let mixtral = ["<unk>", "<s>", "</s>", "[INST]"];
    assert_eq!(ends(&[("eos", 2)], &mixtral), [2]);
    let qwen3 = ["a", "<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    assert_eq!(ends(&[("eos", 3)], &qwen3), [3, 1]);
    // The end of a message of harmony is not the end of a turn.
    let gpt_oss = ["<|endoftext|>", "<|return|>", "<|channel|>", "<|end|>", "<|call|>"];
    assert_eq!(ends(&[("eos", 1)], &gpt_oss), [1, 0, 4]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn truncated_files_are_errors(len in 0usize..94_000) {
        prop_assert!(Header::parse(&valid()[..len.min(valid().len() - 1)]).is_err());
    }

    #[test]
    fn changed_bytes_never_panic(changes in prop::collection::vec((0usize..12_000, any::<u8>()), 1..6)) {
        let mut bytes = valid().to_vec();
        for (at, value) in changes {
            bytes[at] = value;
        }
        check(&bytes);
    }

    /// Replaces eight bytes at once, so that lengths, counts and offsets take any value.
    #[test]
    fn changed_words_never_panic(at in 0usize..12_000, word in prop_oneof![
        any::<u64>(), Just(u64::MAX), Just(1 << 63), Just(1 << 40), Just(1 << 32), Just(0), 0u64..100_000,
    ]) {
        let mut bytes = valid().to_vec();
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        check(&bytes);
    }

    #[test]
    fn arbitrary_bytes_after_the_magic_never_panic(tail in prop::collection::vec(any::<u8>(), 0..512)) {
        let bytes = [&b"GGUF\x03\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"[..], &tail].concat();
        check(&bytes);
    }
}
