//! Comparison of encoding and decoding with reference tokenizers.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]
#![allow(unreachable_pub, missing_docs, dead_code, reason = "helpers shared by several test binaries")]

mod support;

use octavo_text::{GgufVocabulary, PairTokens, SpecialTokens, TokenLimit, Tokenizer, TokenizerError, Wanted};
use support::Golden;

/// Compares every text. `add_special_tokens` is off, as in the references.
fn check(golden: &Golden) {
    let tokenizer = golden.tokenizer();
    let mut compared = 0;
    for (text, ids, decoded, with_special) in golden.cases() {
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), decoded, "{text:?}");
        if let Some(with_special) = with_special {
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), with_special, "{text:?}");
        }
        compared += 1;
    }
    assert!(compared > 300);
}

#[test]
fn byte_level_vocabulary_agrees_with_the_tokenizers_library() {
    check(&Golden::byte_level());
}

#[test]
fn sentence_piece_vocabulary_agrees_with_sentencepiece() {
    check(&Golden::sentence_piece());
}

/// Compares the whole vocabulary of the default model, from `generate_tokenizers.py --full`, which is too large to
/// commit.
#[test]
fn full_vocabulary_agrees_where_it_is_given() {
    if let Some(path) = std::env::var_os("OCTAVO_TEST_TOKENIZER_GOLDEN") {
        check(&Golden::parse(&std::fs::read_to_string(path).unwrap()));
    }
}

/// Compares texts of many parts with what the library returns for the whole, with real vocabularies.
fn compare_parts(golden: &Golden) {
    let tokenizer = golden.tokenizer();
    assert!(tokenizer.is_interruptible());
    let cases: String = golden.cases().map(|(text, ..)| text).collect();
    let pieces = [
        "The quick brown fox jumps over the lazy dog. ",
        "the",
        "a",
        "aab",
        "Straße",
        "漢字かな交じり文が続く",
        "我们在这里写一段没有空格的中文，",
        "1",
        "1234567,",
        "a,b;c\n",
        "{\"a\":[1,2,{\"b\":null}]}",
        " ",
        "\n",
        "\t\t\n",
        "!?",
        "e\u{301}",
        "😀👍🏽",
        "\u{915}\u{94d}\u{937}",
        "<s></s>",
        "▁▁ ▁",
        &cases,
    ];
    for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
        let text = piece.repeat((100 << 10) / piece.len() + 1);
        let whole = tokenizer.encode(&text, true).unwrap();
        let parts = |wanted| tokenizer.encode_in_parts::<TokenizerError>(&text, (true, wanted), || Ok(())).unwrap();
        assert!(parts(Wanted::All) == whole, "{piece:?}");
        assert!(parts(Wanted::First(999)) == whole[..999], "the start of {piece:?}");
        assert!(parts(Wanted::Last(999)) == whole[whole.len() - 999..], "the end of {piece:?}");
    }
}

#[test]
fn long_texts_have_the_tokens_of_the_library() {
    for golden in [Golden::byte_level(), Golden::sentence_piece()] {
        compare_parts(&golden);
    }
}

#[test]
fn long_texts_have_the_tokens_of_a_full_vocabulary_where_it_is_given() {
    if let Some(path) = std::env::var_os("OCTAVO_TEST_TOKENIZER_GOLDEN") {
        compare_parts(&Golden::parse(&std::fs::read_to_string(path).unwrap()));
    }
}

#[test]
fn every_text_survives_the_round_trip_through_bytes() {
    for golden in [Golden::byte_level(), Golden::sentence_piece()] {
        let tokenizer = golden.tokenizer();
        for text in ["Ünïcödé 😀 e\u{301}", " two  spaces ", "a\tb\r\n\n", "漢字かなカナ한국어", "\u{10ffff}\u{200d}"]
        {
            let ids = tokenizer.encode(text, false).unwrap();
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
            // The first SentencePiece token contains a space that the text lacks.
            let bytes: Vec<u8> = ids.iter().skip(1).flat_map(|&id| bytes_inside(&tokenizer, id)).collect();
            assert!(text.as_bytes().ends_with(&bytes));
        }
    }
}

/// Returns the bytes of a token that does not start the text, including a leading space.
fn bytes_inside(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let entry = tokenizer.id_to_token(id).unwrap();
    let mut bytes = tokenizer.token_bytes(id);
    if entry.starts_with('\u{2581}') {
        bytes.insert(0, b' ');
    }
    bytes
}

#[test]
fn token_text_is_what_log_probabilities_show() {
    let golden = Golden::byte_level();
    let tokenizer = golden.tokenizer();
    let the = tokenizer.token_to_id("Ġthe").unwrap();
    assert_eq!((tokenizer.token_text(the), tokenizer.token_bytes(the)), (" the".to_owned(), b" the".to_vec()));
    assert_eq!(tokenizer.token_text(1), "<|im_start|>");
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(the) && !tokenizer.is_special(1 << 20));
    let part = tokenizer.encode("é", false).unwrap();
    assert_eq!(part.len(), 2);
    assert_eq!(tokenizer.token_text(part[0]), "\u{fffd}");
    let bytes: Vec<u8> = part.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
    assert_eq!(bytes, "é".as_bytes());
    assert_eq!(tokenizer.vocab_size(), golden.vocabulary.tokens.len());
    assert_eq!((tokenizer.token_text(1 << 20), tokenizer.id_to_token(1 << 20)), (String::new(), None));

    let tokenizer = Golden::sentence_piece().tokenizer();
    let the = tokenizer.token_to_id("\u{2581}the").unwrap();
    assert_eq!((tokenizer.token_text(the), tokenizer.token_bytes(the)), ("the".to_owned(), b"the".to_vec()));
    let byte = tokenizer.token_to_id("<0xC3>").unwrap();
    assert_eq!((tokenizer.token_text(byte), tokenizer.token_bytes(byte)), ("\u{fffd}".to_owned(), vec![0xC3]));
}

#[test]
fn begin_and_end_tokens_are_added_where_the_file_says() {
    let mut golden = Golden::sentence_piece();
    let plain = golden.tokenizer().encode("a b", false).unwrap();
    for (add_bos, add_eos, first, last) in
        [(None, None, true, false), (Some(false), None, false, false), (Some(true), Some(true), true, true)]
    {
        (golden.vocabulary.add_bos, golden.vocabulary.add_eos) = (add_bos, add_eos);
        let tokenizer = golden.tokenizer();
        let expected = [&[1][..usize::from(first)], &plain, &[2][..usize::from(last)]].concat();
        assert_eq!(tokenizer.encode("a b", true).unwrap(), expected);
        assert_eq!(tokenizer.encode("a b", false).unwrap(), plain);
    }
    let golden = Golden::byte_level();
    let tokenizer = golden.tokenizer();
    assert_eq!(tokenizer.encode("a", true).unwrap(), tokenizer.encode("a", false).unwrap());
}

#[test]
fn a_space_prefix_can_be_off() {
    let mut golden = Golden::sentence_piece();
    golden.vocabulary.add_space_prefix = Some(false);
    let tokenizer = golden.tokenizer();
    let ids = tokenizer.encode("the", false).unwrap();
    assert_ne!(ids, [tokenizer.token_to_id("\u{2581}the").unwrap()]);
    for text in ["the", " the", "  the"] {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap(), true).unwrap(), text);
    }
}

/// Returns a file with the same vocabulary and a template that adds `<s>`.
fn tokenizer_json(decoder: &serde_json::Value) -> Vec<u8> {
    let golden = Golden::sentence_piece();
    let vocab: serde_json::Map<_, _> =
        golden.vocabulary.tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect();
    let added = |id: u32, content: &str| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    serde_json::json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": decoder,
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": []},
    })
    .to_string()
    .into_bytes()
}

#[test]
fn tokenizer_json_and_its_configuration() {
    let json = tokenizer_json(&serde_json::json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}));
    let special =
        SpecialTokens { bos: Some("<s>".to_owned()), eos: Some("</s>".to_owned()), ..SpecialTokens::default() };
    let plain = Tokenizer::from_json(&json, special.clone()).unwrap();
    let text = "hello é world";
    let ids = plain.encode(text, false).unwrap();
    assert!(ids.len() > 4, "the file's truncation is not applied");
    assert_eq!(plain.decode(&ids, true).unwrap(), text);
    assert_eq!(plain.encode(text, true).unwrap(), [&[1], &ids[..]].concat());

    let configured = |add_bos, add_eos| {
        Tokenizer::from_json(&json, SpecialTokens { add_bos, add_eos, ..special.clone() })
            .unwrap()
            .encode(text, true)
            .unwrap()
    };
    assert_eq!(configured(Some(true), Some(true)), [&[1], &ids[..], &[2]].concat());
    assert_eq!(configured(Some(false), Some(false)), ids);

    let missing = SpecialTokens { bos: Some("<nope>".to_owned()), add_bos: Some(true), ..SpecialTokens::default() };
    let error = Tokenizer::from_json(&json, missing).unwrap_err();
    assert_eq!(error.to_string(), "the bos token \"<nope>\" is not in the vocabulary");
    assert!(matches!(Tokenizer::from_json(b"{", SpecialTokens::default()), Err(TokenizerError::Json(_))));
    assert!(matches!(Tokenizer::from_json(b"{}", SpecialTokens::default()), Err(TokenizerError::Json(_))));
}

#[test]
fn a_decoder_that_is_not_per_token_still_works() {
    let metaspace =
        serde_json::json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    let tokenizer = Tokenizer::from_json(&tokenizer_json(&metaspace), SpecialTokens::default()).unwrap();
    let ids = tokenizer.encode("the end", false).unwrap();
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "the end");
}

#[test]
fn broken_vocabularies_are_errors() {
    let error = |change: &dyn Fn(&mut GgufVocabulary)| {
        let mut vocabulary = Golden::byte_level().vocabulary;
        change(&mut vocabulary);
        Tokenizer::from_gguf(&vocabulary).unwrap_err().to_string()
    };
    assert!(error(&|v| v.tokens.clear()).contains("it has no tokens"));
    assert!(error(&|v| v.token_types.truncate(3)).contains("1200 tokens, but 3 token types"));
    assert!(error(&|v| v.scores = vec![0.0; 5]).contains("1200 tokens, but 5 scores"));
    assert!(error(&|v| v.bos_id = Some(1200)).contains("the bos id is 1200, but there are 1200 tokens"));
    assert!(error(&|v| v.merges.push("nospace")).contains("is not two entries"));
    assert!(error(&|v| v.merges.push("never there")).contains("never"));
    assert!(error(&|v| v.pre = Some("what".to_owned())).contains("pre-tokenizer \"what\" is not known"));
    assert!(error(&|v| v.model = "bert".to_owned()).contains("tokenizer model \"bert\" is not supported"));
    assert!(error(&|v| v.model = "llama".to_owned()).contains("needs scores"));
}

#[test]
fn doubled_entries_keep_their_ids() {
    let mut vocabulary = Golden::byte_level().vocabulary;
    vocabulary.tokens.push("Ġthe");
    vocabulary.token_types.push(1);
    let tokenizer = Tokenizer::from_gguf(&vocabulary).unwrap();
    assert_eq!(tokenizer.vocab_size(), 1201);
    assert_eq!(tokenizer.token_text(1200), " the");
    assert_ne!(tokenizer.encode(" the", false).unwrap(), [1200]);
}

/// Returns the tokenizers of pairs.json with their names and cases.
fn pairs() -> Vec<(String, Tokenizer, Vec<serde_json::Value>)> {
    let data: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(include_str!("data/pairs.json")).unwrap();
    data.into_iter()
        .map(|(name, kind)| {
            let json = kind["tokenizer"].to_string();
            let tokenizer = Tokenizer::from_json(json.as_bytes(), SpecialTokens::default()).unwrap();
            (name, tokenizer, kind["cases"].as_array().unwrap().clone())
        })
        .collect()
}

fn numbers(list: &serde_json::Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

#[test]
fn pairs_and_truncated_texts_are_those_of_the_library() {
    let mut compared = 0;
    for (name, tokenizer, cases) in pairs() {
        assert!(tokenizer.is_interruptible(), "{name}");
        for case in cases {
            let most = case[2].as_u64().map_or(usize::MAX, |most| usize::try_from(most).unwrap());
            let limit = TokenLimit { most, keep_end: case[3] == "end" };
            let text = |index: usize| case[index].as_str().map(|text| tokenizer.encode(text, false).unwrap());
            let (ids, types) = (numbers(&case[4]), numbers(&case[5]));
            let first = text(0).unwrap();
            let Some(second) = text(1) else {
                assert_eq!(tokenizer.assemble(&first, limit).unwrap(), ids, "{name}: {case}");
                continue;
            };
            let position = types.iter().position(|&kind| kind == 1);
            let pair = tokenizer.assemble_pair(&first, &second, limit).unwrap();
            assert_eq!(pair, PairTokens { ids, second: position }, "{name}: {case}");
            compared += 1;
        }
    }
    assert!(compared > 1000);
}

#[test]
fn special_tokens_alone_are_cut_to_the_limit() {
    for (name, tokenizer, _) in pairs() {
        for keep_end in [false, true] {
            let limit = TokenLimit { most: 1, keep_end };
            let pair = tokenizer.assemble_pair(&[5], &[6], limit).unwrap();
            assert_eq!(pair.ids.len(), 1, "{name}");
            assert!(pair.second.is_none_or(|second| second == 0), "{name}: {pair:?}");
            assert_eq!(tokenizer.assemble(&[5], limit).unwrap().len(), 1, "{name}");
        }
    }
}

#[test]
fn only_tokens_of_bytes_bound_the_length_of_a_text() {
    let longest: Vec<_> =
        pairs().iter().map(|(name, tokenizer, _)| (name.clone(), tokenizer.longest_token())).collect();
    for (name, bytes) in longest {
        assert_eq!(bytes.is_some(), !matches!(name.as_str(), "word_piece" | "unigram"), "{name}");
    }
    let tokenizer = Golden::byte_level().tokenizer();
    let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap();
    assert_eq!(tokenizer.longest_token(), ids.map(|id| tokenizer.token_bytes(id).len()).max());
}

#[test]
fn configured_edges_move_the_second_text() {
    let json = tokenizer_json(&serde_json::Value::Null);
    let pair = |bos: &str, add_bos, add_eos| {
        let special = SpecialTokens {
            bos: Some(bos.to_owned()),
            eos: Some("</s>".to_owned()),
            add_bos,
            add_eos,
            ..SpecialTokens::default()
        };
        let tokenizer = Tokenizer::from_json(&json, special).unwrap();
        let PairTokens { ids, second } = tokenizer.assemble_pair(&[10, 11], &[12], TokenLimit::NONE).unwrap();
        (ids, second)
    };
    // The file's template for pairs has no special token, in contrast to that for texts.
    assert_eq!(pair("<s>", None, None), (vec![10, 11, 12], Some(2)));
    assert_eq!(pair("<s>", Some(true), Some(true)), (vec![10, 11, 12, 2], Some(2)));
    assert_eq!(pair("<s>", Some(false), Some(false)), (vec![10, 11, 12], Some(2)));
    assert_eq!(pair("</s>", Some(true), None), (vec![2, 10, 11, 12], Some(3)));
}
