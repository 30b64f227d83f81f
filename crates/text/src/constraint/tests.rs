//! Tests of internals: the cache and the reduction of schemas.

use serde_json::{Value, json};

use super::schema::{JsonStyle, prepare};
use super::{GrammarCompiler, GrammarError, GrammarLimits, GrammarSpec};
use crate::{GgufVocabulary, Tokenizer};

/// Returns a tokenizer of letters, a few punctuation marks and an end-of-sequence token.
fn tokenizer() -> Tokenizer {
    let characters = ('!'..='~').map(String::from).collect::<Vec<_>>();
    let tokens: Vec<&str> = characters.iter().map(String::as_str).chain(["<end>"]).collect();
    let mut token_types = vec![1; tokens.len()];
    token_types[tokens.len() - 1] = 3;
    let vocabulary = GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: Some("smollm".to_owned()),
        tokens,
        token_types,
        ..GgufVocabulary::default()
    };
    Tokenizer::from_gguf(&vocabulary).unwrap()
}

#[test]
fn the_cache_is_bounded_in_entries_and_bytes_and_keeps_what_is_used() {
    let compiler = compiler(GrammarLimits { cached_grammars: 3, cached_spec_bytes: 40, ..GrammarLimits::default() });
    let compile = |regex: &str| compiler.compile(&GrammarSpec::Regex(regex.to_owned())).unwrap();
    for regex in ["a", "b", "c", "a", "d"] {
        compile(regex);
    }
    assert_eq!(compiler.cached(), (3, 3 * "regex a".len()), "b was not used for longest");
    assert!(compiler.is_cached("regex a") && !compiler.is_cached("regex b"));
    compile(&"e".repeat(20));
    assert_eq!(compiler.cached(), (3, 14 + 26));
    compile(&"f".repeat(60));
    assert_eq!(compiler.cached(), (3, 14 + 26), "too long to be kept");
}

#[test]
fn a_panic_of_the_library_is_not_a_fault_of_the_specification() {
    let compiler = compiler(GrammarLimits::default());
    let explain = |message: &str| compiler.explain(&GrammarSpec::Regex("a".to_owned()), message);
    assert_eq!(explain("panic: index out of bounds\n<backtrace>\n0: fuel\n</backtrace>"), GrammarError::Panicked);
    assert_eq!(explain("a panic: no"), GrammarError::Regex("a panic: no".to_owned()));
}

fn compiler(limits: GrammarLimits) -> GrammarCompiler {
    let tokenizer = tokenizer();
    let size = tokenizer.vocab_size();
    GrammarCompiler::new(&tokenizer, size, &[size as u32 - 1], limits).unwrap()
}

#[test]
fn a_compilation_that_waits_pauses_and_can_be_given_up() {
    let compiler = compiler(GrammarLimits { compile_threads: 1, ..GrammarLimits::default() });
    let spec = GrammarSpec::Regex("a".to_owned());
    let other = compiler.begin();
    let mut pauses = 0;
    let pause = || {
        pauses += 1;
        if pauses == 3 { Err(GrammarError::Regex("nobody waits".to_owned())) } else { Ok(()) }
    };
    assert_eq!(compiler.compile_in_turns(&spec, pause).unwrap_err(), GrammarError::Regex("nobody waits".to_owned()));
    assert_eq!((compiler.running(), compiler.is_cached("regex a")), ((1, 0), false));
    drop(other);
    assert!(compiler.compile(&spec).is_ok());
    assert_eq!(compiler.running(), (0, 0));
    assert!(!compiler.compile_in_vain(&spec));
}

#[test]
fn compilations_that_take_long_do_not_delay_others_unless_there_are_many() {
    let time = std::time::Duration::from_millis(20);
    let limits = GrammarLimits { compile_threads: 1, slow_threads: 1, ..GrammarLimits::default() };
    let spec = GrammarSpec::Regex("a".to_owned());
    let one = compiler(limits.clone());
    let _slow = one.begin();
    one.make_all_slow();
    assert_eq!(one.running(), (1, 1));
    assert!(one.compile(&spec).is_ok());
    let _recent = one.begin();
    one.make_all_slow();
    assert_eq!(one.running(), (2, 1), "there is no room for a second one");

    let none = compiler(GrammarLimits { slow_threads: 0, compile_time: time, ..limits });
    let _slow = none.begin();
    none.make_all_slow();
    assert_eq!(none.compile(&spec).unwrap_err(), GrammarError::Busy(time));
}

fn reduced(schema: &Value) -> Value {
    let mut reduced = prepare(schema, &JsonStyle::default(), &GrammarLimits::default()).unwrap();
    reduced.as_object_mut().unwrap().remove("x-guidance").unwrap();
    reduced
}

#[test]
fn references_become_one_flat_list() {
    let schema = json!({
        "title": "dropped", "x-guidance": {"whitespace_flexible": true},
        "properties": {"a": {"$ref": "#/definitions/x%20y"}, "b": {"$ref": "#"}, "c": {"$ref": "urn:x#in"}},
        "definitions": {
            "x y": {"$ref": "#/definitions/x%20y/properties/z", "properties": {"z": true}},
            "own": {"$id": "urn:x", "$defs": {"i": {"$anchor": "in", "items": {"$ref": "#"}}}},
            "unused": {"not": {}},
        },
    });
    let definition = |index: usize| json!({"$ref": format!("#/$defs/d{index}")});
    let properties = json!({"a": definition(0), "b": definition(1), "c": definition(2)});
    assert_eq!(
        reduced(&schema),
        json!({
            "properties": properties,
            "$defs": {
                "d2": {"items": definition(3)},
                "d3": {},
                "d1": {"properties": properties},
                "d0": {"$ref": "#/$defs/d4", "properties": {"z": true}},
                "d4": true,
            },
        })
    );
}

#[test]
fn alternatives_stand_in_place_unless_they_hold_themselves() {
    let schema = json!({
        "oneOf": [{"$ref": "#/$defs/n"}, {"type": "null"}],
        "$defs": {"n": {"items": {"oneOf": [{"$ref": "#/$defs/n", "title": "again"}, {"type": "string"}]}}},
    });
    let again = json!({"oneOf": [{"$ref": "#/$defs/d0"}, {"type": "string"}]});
    assert_eq!(
        reduced(&schema),
        json!({"oneOf": [{"items": again}, {"type": "null"}], "$defs": {"d0": {"items": {"oneOf": [{"items": again}, {"type": "string"}]}}}})
    );
}

#[test]
fn bounds_are_no_wider_and_counts_are_integers() {
    let schema = json!({"maximum": u64::MAX, "minimum": i64::MIN, "minLength": 2.0, "maxItems": 3});
    let reduced = reduced(&schema);
    assert!(reduced["maximum"].as_f64().unwrap() < u64::MAX as f64);
    assert_eq!(reduced["minLength"], json!(2));
    assert_eq!(reduced["maxItems"], json!(3));
    assert!(reduced["minimum"].as_f64().unwrap() >= i64::MIN as f64);
}

#[test]
fn a_schema_that_leads_back_to_itself_is_refused() {
    let prepare = |schema: Value| prepare(&schema, &JsonStyle::default(), &GrammarLimits::default());
    for schema in [
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}]}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{}, {"$ref": "#/$defs/a"}]}}}),
        json!({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a", "type": "object"}}}),
    ] {
        let error = prepare(schema.clone()).unwrap_err();
        assert!(matches!(error, GrammarError::Circular(_)), "{schema}: {error}");
        assert!(error.to_string().starts_with("the JSON schema is circular: the reference \"#"), "{error}");
    }
    for schema in [
        json!({"properties": {"a": {"$ref": "#"}}}),
        json!({"items": {"allOf": [{"$ref": "#"}]}}),
        json!({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"items": {"$ref": "#"}}}}),
        json!({"properties": {"allOf": {"$ref": "#"}, "$ref": {"$ref": "#"}}}),
    ] {
        assert!(prepare(schema.clone()).is_ok(), "{schema}");
    }
}
