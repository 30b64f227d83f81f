//! Tests of allowed tokens, bad words, thinking budgets and their combination.

use octavo_engine::Constraint;
use octavo_text::{AfterReasoning, AllowedTokens, BadWords, GrammarError, GrammarSpec, ThinkingBudget, all_of};
use proptest::prelude::*;

use crate::json::GROUND;
use crate::walk::is_set;

const VOCAB: usize = 40;

fn allowed(constraint: &mut dyn Constraint) -> Vec<u32> {
    let mut mask = vec![0x5555_5555; VOCAB.div_ceil(32)];
    constraint.fill_mask(&mut mask);
    (0..64).filter(|&id| is_set(&mask, id)).collect()
}

fn all() -> Vec<u32> {
    (0..VOCAB as u32).collect()
}

#[test]
fn only_listed_tokens_are_allowed() {
    let mut constraint = AllowedTokens::new(&[3, 39, 3], VOCAB).unwrap();
    assert_eq!(allowed(&mut constraint), [3, 39]);
    assert!(constraint.accept(39) && !constraint.accept(4) && !constraint.accept(u32::MAX));
    for bad in [&[][..], &[40]] {
        assert!(matches!(AllowedTokens::new(bad, VOCAB), Err(GrammarError::Tokens(_))));
    }
}

#[test]
fn bad_words_are_never_completed() {
    let words = ["the", "hello world"].map(str::to_owned);
    let mut constraint = BadWords::new(&GROUND.tokenizer, GROUND.vocab_size, &words).unwrap();
    let encode = |text: &str| GROUND.tokenizer.encode(text, false).unwrap();
    let mask = GROUND.mask(&mut constraint);
    for text in ["the", " the"] {
        let [id] = encode(text)[..] else { panic!("{text:?} is one token") };
        assert!(!is_set(&mask, id), "{text:?} is masked always");
    }
    let long = encode("hello world");
    let (&last, before) = long.split_last().unwrap();
    assert!(!before.is_empty() && is_set(&mask, last));
    assert!(before.iter().all(|&id| constraint.accept(id)));
    assert!(!is_set(&GROUND.mask(&mut constraint), last));
    assert!(!constraint.accept(last), "completing one is refused");
    constraint.rollback(2);
    assert!(is_set(&GROUND.mask(&mut constraint), last));
    assert!(constraint.accept(last));
    // A hundred words with two spellings each exceed 128 sequences.
    for bad in [vec![String::new()], vec!["a".to_owned(); 129], vec!["b".to_owned(); 100]] {
        assert!(BadWords::new(&GROUND.tokenizer, GROUND.vocab_size, &bad).is_err(), "{}", bad.len());
    }
    assert!(BadWords::new(&GROUND.tokenizer, 20, &words).is_err(), "the model has not these tokens");
}

#[test]
fn thinking_ends_after_its_budget() {
    let mut constraint = ThinkingBudget::new(2, &[], &[7, 8], VOCAB);
    for token in [1, 7] {
        assert_eq!(allowed(&mut constraint), all());
        assert!(constraint.accept(token));
    }
    // The 7 may begin the end sequence; then it is not counted, and if the sequence does not follow, it is.
    assert_eq!(allowed(&mut constraint), all());
    assert!(constraint.accept(1));
    assert_eq!(allowed(&mut constraint), [7]);
    assert!(constraint.accept(7));
    assert_eq!(allowed(&mut constraint), [8]);
    assert!(!constraint.accept(9));
    constraint.rollback(1);
    assert!(constraint.accept(8));
    assert_eq!(allowed(&mut constraint), all(), "the answer is free");
    assert!((0..9).all(|token| constraint.accept(token)));
    assert_eq!(allowed(&mut constraint), all());

    let mut constraint = ThinkingBudget::new(0, &[5, 6], &[7], VOCAB);
    assert!(constraint.accept(5) && constraint.accept(5));
    assert_eq!(allowed(&mut constraint), all(), "not thinking yet");
    assert!(constraint.accept(6));
    assert_eq!(allowed(&mut constraint), [7]);
    assert!(constraint.accept(7));
    assert_eq!(allowed(&mut constraint), all());
    assert!(constraint.accept(5) && constraint.accept(6));
    assert_eq!(allowed(&mut constraint), [7], "thinking again");
}

#[test]
fn a_grammar_can_wait_for_the_end_of_thinking() {
    let answer = Box::new(AllowedTokens::new(&[3], VOCAB).unwrap());
    let mut constraint = AfterReasoning::new(answer, &[7, 7, 8], VOCAB);
    for token in [7, 7, 7, 9, 7, 7] {
        assert_eq!(allowed(&mut constraint), all());
        assert!(constraint.accept(token));
    }
    assert!(constraint.accept(8));
    assert_eq!(allowed(&mut constraint), [3]);
    assert!(constraint.accept(3) && !constraint.accept(4));
    constraint.rollback(3);
    assert_eq!(allowed(&mut constraint), all());
    assert!(constraint.accept(8));
    assert_eq!(allowed(&mut constraint), [3]);

    let grammar = GROUND.compile(&GrammarSpec::Choice(vec!["a".to_owned()])).unwrap();
    let mut constraint = AfterReasoning::new(grammar.constraint(), &[5], GROUND.vocab_size);
    assert!([9, 1, 5, GROUND.tokenizer.token_to_id("a").unwrap(), 2].iter().all(|&id| constraint.accept(id)));
}

#[test]
fn a_model_that_does_not_think_is_constrained_at_once() {
    let optional = || AfterReasoning::optional(Box::new(AllowedTokens::new(&[3], VOCAB).unwrap()), 7, &[8], VOCAB);
    let mut constraint = optional();
    assert_eq!(allowed(&mut constraint), [3, 7]);
    assert!(constraint.accept(3));
    assert_eq!(allowed(&mut constraint), [3], "thinking comes first");
    assert!(!constraint.accept(7));
    constraint.rollback(2);
    assert_eq!(allowed(&mut constraint), [3, 7]);
    assert!(constraint.accept(7));
    assert_eq!(allowed(&mut constraint), all());
    assert!(constraint.accept(3) && constraint.accept(8));
    assert_eq!(allowed(&mut constraint), [3]);
    assert!(constraint.accept(3));
    constraint.rollback(4);
    assert_eq!(allowed(&mut constraint), [3, 7]);
    assert!(!optional().accept(9));
}

#[test]
fn a_header_before_the_answer_may_name_its_type() {
    let answer = || Box::new(AllowedTokens::new(&[3], VOCAB).unwrap());
    for (header, answered) in
        [(&[7, 8, 9][..], true), (&[7, 8, 1, 2, 9], true), (&[7, 7, 8, 8, 9], true), (&[7, 1, 8, 9], false)]
    {
        let mut constraint = AfterReasoning::new(answer(), &[7, 8, 9], VOCAB).with_gap();
        assert!(header.iter().all(|&token| constraint.accept(token)));
        assert_eq!(allowed(&mut constraint), if answered { vec![3] } else { all() }, "{header:?}");
    }
}

#[test]
fn reasoning_can_be_led_to_the_answer() {
    let answer = Box::new(AllowedTokens::new(&[3], VOCAB).unwrap());
    let mut constraint = AfterReasoning::new(answer, &[7, 8, 9], VOCAB).with_choice(7, [8, 5].into());
    assert!(constraint.accept(7));
    assert_eq!(allowed(&mut constraint), [5, 8]);
    assert!(constraint.accept(5) && constraint.accept(1) && constraint.accept(7));
    assert!(!constraint.accept(6));
    constraint.rollback(1);
    assert_eq!(allowed(&mut constraint), [5, 8]);
    assert!(constraint.accept(8) && constraint.accept(9));
    assert_eq!(allowed(&mut constraint), [3]);
}

#[test]
fn several_constraints_allow_what_all_do() {
    assert!(all_of(vec![]).is_none());
    let tokens = |ids: &[u32]| Box::new(AllowedTokens::new(ids, VOCAB).unwrap()) as Box<dyn Constraint>;
    let mut one = all_of(vec![tokens(&[1])]).unwrap();
    assert_eq!(allowed(one.as_mut()), [1]);
    let budget = Box::new(ThinkingBudget::new(1, &[], &[2], VOCAB));
    let mut both = all_of(vec![tokens(&[1, 2, 33]), budget]).unwrap();
    assert_eq!(allowed(both.as_mut()), [1, 2, 33]);
    assert!(both.accept(33));
    assert_eq!(allowed(both.as_mut()), [2]);
    both.rollback(1);
    assert_eq!(allowed(both.as_mut()), [1, 2, 33]);
    let mut none = all_of(vec![tokens(&[1]), tokens(&[2])]).unwrap();
    assert!(allowed(none.as_mut()).is_empty() && !none.accept(1), "the request ends with an error");
}

proptest! {
    /// After a rollback, the state is the same as if only the remaining tokens had come.
    #[test]
    fn rollback_is_as_if_it_had_not_happened(
        budget in 0..4_usize,
        first in prop::option::of(0..3_u32),
        start in prop::collection::vec(0..3_u32, 0..3),
        end in prop::collection::vec(0..3_u32, 1..4),
        steps in prop::collection::vec((prop::collection::vec(0..4_u32, 0..8), 0..9_usize), 1..5),
    ) {
        let fresh = || {
            let words = BadWords::new(&GROUND.tokenizer, GROUND.vocab_size, &["hello world".to_owned()]).unwrap();
            let inner = Box::new(ThinkingBudget::new(budget, &start, &end, VOCAB));
            let answer = Box::new(AllowedTokens::new(&[1, 2], VOCAB).unwrap());
            let late = Box::new(match first {
                Some(first) => AfterReasoning::optional(answer, first, &end, VOCAB),
                None => AfterReasoning::new(answer, &end, VOCAB),
            });
            all_of(vec![inner, late, Box::new(words)]).unwrap()
        };
        let mut constraint = fresh();
        let mut taken: Vec<u32> = Vec::new();
        for (tokens, back) in steps {
            for token in tokens {
                constraint.accept(token);
                taken.push(token);
            }
            constraint.rollback(back);
            taken.truncate(taken.len().saturating_sub(back));
            let mut again = fresh();
            taken.iter().for_each(|&token| { again.accept(token); });
            prop_assert_eq!(allowed(constraint.as_mut()), allowed(again.as_mut()));
        }
    }
}
