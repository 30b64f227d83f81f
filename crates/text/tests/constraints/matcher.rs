//! Tests of properties of every grammar: ends, rollback, independence, and the ids that no mask allows.

use fastrand::Rng;
use octavo_text::{GrammarCompiler, GrammarError, GrammarSpec};
use proptest::prelude::*;
use serde_json::json;

use crate::json::{GROUND, schema};
use crate::support::Golden;
use crate::walk::{Ground, Walk, is_set, limits};

/// Returns a specification of each kind.
fn specs() -> Vec<GrammarSpec> {
    vec![
        GrammarSpec::JsonObject,
        schema(json!({"type": "array", "items": {"enum": ["a", "ab", 1]}, "maxItems": 4})),
        GrammarSpec::Regex("(ab?|c)+d".to_owned()),
        GrammarSpec::Choice(vec!["one".to_owned(), "once".to_owned(), "two".to_owned()]),
        GrammarSpec::Grammar("root ::= \"(\" root* \")\"".to_owned()),
        GrammarSpec::Grammar("start: /[0-9]+/ (\"+\" start)?".to_owned()),
        GrammarSpec::StructuralTag(
            json!({"structures": [{"begin": "<a>", "schema": {"type": "null"}, "end": "</a>"}], "triggers": ["<a>"]}),
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// A rollback restores the masks, and continuing from them works.
    #[test]
    fn rollback_restores_every_mask(kind in 0..7_usize, seed: u64, steps in prop::collection::vec((1..6_usize, 0..5_usize), 1..6)) {
        let grammar = GROUND.compile(&specs()[kind]).unwrap();
        let mut constraint = grammar.constraint();
        let mut rng = Rng::with_seed(seed);
        let mut masks = vec![GROUND.mask(constraint.as_mut())];
        for (forward, back) in steps {
            for _ in 0..forward {
                let token = GROUND.draw(masks.last().unwrap(), &mut rng);
                prop_assert!(constraint.accept(token));
                masks.push(GROUND.mask(constraint.as_mut()));
            }
            let back = back.min(masks.len() - 1);
            constraint.rollback(back);
            masks.truncate(masks.len() - back);
            prop_assert_eq!(&GROUND.mask(constraint.as_mut()), masks.last().unwrap());
        }
    }

    /// Two matchers of one grammar do not affect each other.
    #[test]
    fn matchers_are_independent(kind in 0..7_usize, seed: u64) {
        let grammar = GROUND.compile(&specs()[kind]).unwrap();
        let start = GROUND.mask(grammar.constraint().as_mut());
        let (mut one, mut two) = (grammar.constraint(), grammar.constraint());
        let mut rng = Rng::with_seed(seed);
        for _ in 0..8 {
            let token = GROUND.draw(&GROUND.mask(one.as_mut()), &mut rng);
            prop_assert!(one.accept(token));
        }
        prop_assert_eq!(&GROUND.mask(two.as_mut()), &start);
        let ended = matches!(GROUND.walk(two.as_mut(), &mut rng, 40), Walk::Stop(_));
        let mask = GROUND.mask(one.as_mut());
        prop_assert!(ended || one.accept(GROUND.draw(&mask, &mut rng)));
    }
}

#[test]
fn the_end_is_allowed_where_the_text_may_end_and_nothing_after_it() {
    let grammar = GROUND.compile(&GrammarSpec::Choice(vec!["a".to_owned(), "ab".to_owned()])).unwrap();
    let id = |token: &str| GROUND.tokenizer.token_to_id(token).unwrap();
    let mut constraint = grammar.constraint();
    let mask = GROUND.mask(constraint.as_mut());
    assert!(!is_set(&mask, 2) && !is_set(&mask, 0), "not at the start");
    assert!(!constraint.accept(2), "nor accepted");
    assert!(constraint.accept(id("a")));
    let mask = GROUND.mask(constraint.as_mut());
    assert!(is_set(&mask, 2) && is_set(&mask, 0), "both ends");
    assert_eq!(GROUND.allowed(&mask).len(), 3, "the ends and b");
    assert!(constraint.accept(0));
    assert_eq!(GROUND.allowed(&GROUND.mask(constraint.as_mut())), [0, 2]);
    assert!(!constraint.accept(id("b")) && constraint.accept(2), "only ends after the end");
    constraint.rollback(2);
    assert_eq!(GROUND.mask(constraint.as_mut()), mask);
    assert!(constraint.accept(id("b")));
    assert_eq!(GROUND.allowed(&GROUND.mask(constraint.as_mut())), [0, 2], "nothing can follow");
    assert!(!constraint.accept(id("b")) && constraint.accept(2));
}

#[test]
fn ids_without_text_and_special_tokens_are_in_no_mask() {
    let anything = GROUND.compile(&GrammarSpec::Regex("(?s:.*)".to_owned())).unwrap();
    let mask = GROUND.mask(anything.constraint().as_mut());
    let tokens = GROUND.tokenizer.vocab_size() as u32;
    for id in 0..mask.len() as u32 * 32 {
        let special = id < tokens && GROUND.tokenizer.is_special(id);
        if (special || id >= tokens) && !GROUND.eos.contains(&id) {
            assert!(!is_set(&mask, id), "{id}");
        }
    }
    assert!(GROUND.allowed(&mask).len() > 900, "nearly all text");
    let mut constraint = anything.constraint();
    assert!(!constraint.accept(tokens) && !constraint.accept(u32::MAX) && !constraint.accept(1));
    assert!(constraint.accept(GROUND.tokenizer.token_to_id("a").unwrap()), "a refusal changes nothing");
    let named = GROUND.compile(&GrammarSpec::Grammar("start: \"a\" <|im_start|>".to_owned())).unwrap();
    let mut constraint = named.constraint();
    assert!(constraint.accept(GROUND.tokenizer.token_to_id("a").unwrap()));
    assert_eq!(GROUND.allowed(&GROUND.mask(constraint.as_mut())), [1], "but a grammar may name one");
}

/// The masks allow the tokenizer's own tokenization of a text, token by token.
#[test]
fn all_text_is_accepted_as_it_is_tokenized() {
    let anything = GROUND.compile(&GrammarSpec::Regex("(?s:.*)".to_owned())).unwrap();
    let golden = Golden::byte_level();
    let mut plain = 0;
    for (text, ids, ..) in golden.cases() {
        if !ids.iter().any(|&id| GROUND.tokenizer.is_special(id)) {
            assert!(GROUND.accepts(&anything, text), "{text:?}");
            plain += 1;
        }
    }
    assert!(plain > 100, "{plain} of them");
}

#[test]
fn sentence_piece_vocabularies_work() {
    let ground = Ground::new(Golden::sentence_piece().tokenizer(), &[2], 3, limits());
    for text in ground.texts(&GrammarSpec::JsonObject, 8, 160) {
        serde_json::from_str::<serde_json::Value>(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    }
}

#[test]
fn vocabularies_without_a_usable_end_are_refused() {
    let tokenizer = Golden::byte_level().tokenizer();
    for (vocab_size, eos) in [(1200, &[][..]), (1200, &[1200]), (0, &[0]), (1 << 24, &[0])] {
        let compiler = GrammarCompiler::new(&tokenizer, vocab_size, eos, limits());
        assert!(matches!(compiler, Err(GrammarError::Vocabulary(_))), "{vocab_size} {eos:?}");
    }
}
