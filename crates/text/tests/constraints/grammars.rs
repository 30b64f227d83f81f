//! Tests of regexes, choices, and grammars in Lark and EBNF.

use octavo_text::{GrammarError, GrammarSpec};
use proptest::prelude::*;
use serde_json::json;

use crate::json::GROUND;

fn regex(regex: &str) -> GrammarSpec {
    GrammarSpec::Regex(regex.to_owned())
}

fn grammar(text: &str) -> GrammarSpec {
    GrammarSpec::Grammar(text.to_owned())
}

#[test]
fn texts_match_their_regex() {
    for pattern in [r"[a-c]{2,4}-[0-9]{1,3}", r"^(yes|no)!?$", r"a/b\.(c|/)+", "é[αβ]+", r"(\$[0-9]{1,2}){2}"] {
        let bare = pattern.trim_start_matches('^').trim_end_matches('$');
        let whole = jsonschema::validator_for(&json!({"pattern": format!("^(?:{bare})$")})).unwrap();
        for text in GROUND.texts(&regex(pattern), 10, 60) {
            assert!(whole.is_valid(&json!(text)), "{text:?} does not match {pattern}");
        }
    }
    let empty = GROUND.compile(&regex("")).unwrap();
    assert!(GROUND.accepts(&empty, "") && !GROUND.begins(&empty, "a"));
    let dollar = GROUND.compile(&regex(r"a\$")).unwrap();
    assert!(GROUND.accepts(&dollar, "a$") && !GROUND.accepts(&dollar, "a"));
}

#[test]
fn broken_regexes_are_refused() {
    for broken in ["(", "a\\", "[z-a]", "(?=a)b", "(?<n>a)\\k<n>", "*"] {
        let error = GROUND.compile(&regex(broken)).unwrap_err();
        assert!(matches!(error, GrammarError::Regex(_)), "{broken}: {error}");
    }
}

#[test]
fn texts_are_one_of_the_choices() {
    let choices: Vec<String> =
        ["yes", "yes sir", "no", "né\n\"x\"", "\u{1}", "", "i"].iter().map(|text| (*text).to_owned()).collect();
    let spec = GrammarSpec::Choice(choices.clone());
    let compiled = GROUND.compile(&spec).unwrap();
    for choice in &choices {
        assert!(GROUND.accepts(&compiled, choice), "{choice:?}");
    }
    for text in GROUND.texts(&spec, 20, 20) {
        assert!(choices.contains(&text), "{text:?}");
    }
    assert!(!GROUND.begins(&compiled, "yess") && !GROUND.begins(&compiled, "x"));
    assert!(matches!(GROUND.compile(&GrammarSpec::Choice(vec![])), Err(GrammarError::Choice(_))));
}

#[test]
fn lark_grammars_work() {
    let spec = grammar("start: \"(\" item item? \")\"\nitem: /[a-z]/ | start // no ::= here\n");
    for text in GROUND.texts(&spec, 10, 80) {
        assert_eq!(text.matches('(').count(), text.matches(')').count(), "{text}");
    }
    for broken in ["start: missing", "start", "", "  ", "begin: \"a\"", "start: \"a"] {
        assert!(matches!(GROUND.compile(&grammar(broken)), Err(GrammarError::Grammar(_))), "{broken:?}");
    }
    let unsupported = GROUND.compile(&grammar("start: %json {\"not\": {}}")).unwrap_err();
    assert!(matches!(&unsupported, GrammarError::Keyword { keyword, .. } if keyword == "not"), "{unsupported}");
}

/// A grammar without recursion is one terminal, so that no alternative hides another.
#[test]
fn flat_ebnf_is_exact() {
    let spec =
        grammar("# a comment ::= not a rule\nroot ::= \"a\" x | \"ab\" \"c\"{2} | [^\\x00-\\x7f]+ 'q'?\nx ::= \"bd\"");
    let compiled = GROUND.compile(&spec).unwrap();
    for text in ["abd", "abcc", "é", "ééq"] {
        assert!(GROUND.accepts(&compiled, text), "{text}");
    }
    for text in ["abc", "ab", "q", ""] {
        assert!(!GROUND.accepts(&compiled, text), "{text}");
    }
}

/// Tests llama.cpp's grammar of arithmetic, and its grammar of JSON with recursive whitespace.
#[test]
fn recursive_ebnf_works() {
    let sums = grammar(
        "root ::= expr\nexpr ::= term ([-+*/] term)*\nterm ::= num | \"(\" expr \")\"\nnum ::= [0-9]+ (\".\" [0-9]{1,2})?",
    );
    let compiled = GROUND.compile(&sums).unwrap();
    for (text, valid) in
        [("1", true), ("(1+2.5)*3", true), ("((7))", true), ("(1", false), ("1.", false), ("+1", false)]
    {
        assert_eq!(GROUND.accepts(&compiled, text), valid, "{text}");
    }
    for text in GROUND.texts(&sums, 10, 60) {
        assert_eq!(text.matches('(').count(), text.matches(')').count(), "{text}");
    }
    let json = grammar(
        r#"root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,2})? ws
# Optional space
ws ::= | " " | "\n" [ \t]{0,20}"#,
    );
    let compiled = GROUND.compile(&json).unwrap();
    for text in [r#"{"a": [1, -2.5e3, true], "b": {"c": "d\n"}}"#, "{}", "{ \"a\":\n  null}"] {
        assert!(GROUND.accepts(&compiled, text), "{text}");
    }
    for text in GROUND.texts(&json, 10, 120) {
        serde_json::from_str::<serde_json::Value>(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
    }
    let tail = GROUND.compile(&grammar("root ::= \"x\" ws \"y\"\nws ::= ([ \\n] ws)?")).unwrap();
    assert!(GROUND.accepts(&tail, "x \n y") && GROUND.accepts(&tail, "xy"));
}

#[test]
fn broken_ebnf_is_refused_with_its_place() {
    for (broken, message) in [
        ("root ::= missing", "no rule named \"missing\""),
        ("rule ::= \"a\"", "no rule named root"),
        ("root ::= \"a", "line 1, column"),
        ("root ::= \"a\"\nroot ::= \"b\"", "defined twice at line 2"),
        ("root ::= (\"a\"", "\")\" is expected"),
        ("root ::= [z-a]", "backwards"),
        ("root ::= \"a\"{3,2}", "repetition"),
        ("root ::= \"\\q\"", "escape"),
    ] {
        let error = GROUND.compile(&grammar(broken)).unwrap_err().to_string();
        assert!(error.contains(message), "{broken}: {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Any text from a client is compiled or refused.
    #[test]
    fn no_text_breaks_the_compiler(text in "[-a-c\"'\\[\\](){}|*+?.,:=/\\\\^$<>0-2 \n#~&%]{0,40}", kind in 0..4) {
        let spec = match kind {
            0 => regex(&text),
            1 => grammar(&text),
            2 => grammar(&format!("root ::= {text}")),
            _ => grammar(&format!("start: {text}")),
        };
        if let Err(error) = GROUND.compile(&spec) {
            prop_assert!(!error.to_string().contains("panic"), "{error}");
        }
    }

    /// A regular grammar accepts exactly the texts that can be composed from its parts.
    #[test]
    fn repeated_literals_are_accepted(words in prop::collection::vec("[ab]{1,3}", 1..4), picks in prop::collection::vec(0..4_usize, 0..6)) {
        let options: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
        let compiled = GROUND.compile(&grammar(&format!("root ::= ({})* \"!\"", options.join(" | ")))).unwrap();
        let text: String = picks.iter().map(|pick| words[pick % words.len()].as_str()).collect();
        prop_assert!(GROUND.accepts(&compiled, &(text.clone() + "!")));
        prop_assert!(!GROUND.accepts(&compiled, &(text + "c!")));
    }
}
