//! Tests of JSON: objects, schemas and tool calls.

use std::sync::LazyLock;

use octavo_text::{GrammarError, GrammarSpec};
use serde_json::{Value, json};

use crate::support::Golden;
use crate::walk::{Ground, is_set, limits};

pub static GROUND: LazyLock<Ground> =
    LazyLock::new(|| Ground::new(Golden::byte_level().tokenizer(), &[2, 0], 41, limits()));

pub fn schema(schema: Value) -> GrammarSpec {
    GrammarSpec::JsonSchema {
        schema,
        disable_any_whitespace: false,
        whitespace_pattern: None,
        disable_additional_properties: false,
    }
}

/// Compiles the schema, walks it, validates the texts and returns them.
fn valid_texts(document: Value) -> Vec<String> {
    let validator = jsonschema::validator_for(&document).unwrap();
    let texts = GROUND.texts(&schema(document), 12, 120);
    for text in &texts {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        assert!(validator.is_valid(&value), "{text} is not valid");
    }
    texts
}

#[test]
fn json_objects_parse() {
    for text in GROUND.texts(&GrammarSpec::JsonObject, 20, 120) {
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        assert!(value.is_object(), "{text}");
    }
}

#[test]
fn texts_satisfy_their_schema() {
    valid_texts(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8, "pattern": "^[a-z]+$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "ab", 7, null]}, "minItems": 1, "maxItems": 3},
            "when": {"type": "string", "format": "date"},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    }));
}

#[test]
fn references_and_recursion_are_followed() {
    valid_texts(json!({
        "$ref": "#/$defs/no~1de",
        "$defs": {
            "no/de": {
                "type": "object",
                "properties": {"v": {"$ref": "#leaf"}, "next": {"anyOf": [{"$ref": "#/$defs/no~1de"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": false,
            },
            "leaf": {"$anchor": "leaf", "type": "boolean"},
        },
    }));
}

/// Pydantic writes such a schema for a union with a discriminator.
#[test]
fn one_of_through_references_is_enforced_when_constants_tell_them_apart() {
    let texts = valid_texts(json!({
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
        "$defs": {
            "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"], "additionalProperties": false},
            "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"], "additionalProperties": false},
        },
    }));
    assert!(texts.iter().any(|text| text.contains("cat")) && texts.iter().any(|text| text.contains("dog")));
}

#[test]
fn what_cannot_be_enforced_is_named() {
    let refused = |document: Value| GROUND.compile(&schema(document)).unwrap_err().to_string();
    let nested = json!({"properties": {"a/b": {"items": {"not": {"type": "null"}}}}});
    assert_eq!(
        refused(nested),
        "the JSON Schema keyword \"not\" at #/properties/a~1b/items/not is not supported by structured output"
    );
    assert!(refused(json!({"uniqueItems": true})).contains("\"uniqueItems\""));
    assert!(refused(json!({"oneOf": [{"type": "string"}, {"minLength": 2}]})).contains("\"oneOf\""));
    assert!(refused(json!({"const": 9_007_199_254_740_993_u64})).contains("beyond 2^53"));
    for remote in ["https://example.com/s.json", "other.json#/a", "#/$defs/none", "#none", "#/%zz"] {
        let message = refused(json!({"properties": {"p": {"$ref": remote}}}));
        assert!(message.starts_with(&format!("the reference \"{remote}\" at #/properties/p/$ref")), "{message}");
    }
    assert!(refused(json!(false)).contains("false"));
    assert!(refused(json!({"type": "object", "properties": 3})).contains("must be an object of schemas"));
    assert!(refused(json!([])).contains("must be an object or a boolean"));
    assert!(refused(json!({"pattern": "(?=a)"})).contains("invalid JSON schema"));
    assert!(refused(json!({"type": "string", "minLength": 3, "maxLength": 2})).contains("invalid JSON schema"));
}

#[test]
fn keywords_that_demand_nothing_are_no_hindrance() {
    valid_texts(json!({
        "type": "object", "uniqueItems": false, "not": false, "if": {"type": "null"}, "propertyNames": true,
        "properties": {"a": {"type": "array", "uniqueItems": true, "maxItems": 1.0, "items": {"type": "null"}}},
        "required": ["a"], "unevaluatedProperties": false, "format": "of-our-own", "x-guidance": {"lenient": true},
    }));
}

#[test]
fn whitespace_is_bounded_by_default_and_can_be_turned_off() {
    let grammar = GROUND.compile(&GrammarSpec::JsonObject).unwrap();
    for text in ["{\"a\":1}", "{ \"a\": [1, 2] }", "{\n    \"a\": {\n\t\"b\": null\n  }\r\n}"] {
        assert!(GROUND.accepts(&grammar, text), "{text:?}");
    }
    assert!(!GROUND.begins(&grammar, &format!("{{{}", " ".repeat(4))));
    // The walk takes every allowed whitespace for as long as possible.
    let mut constraint = grammar.constraint();
    assert!(constraint.accept(GROUND.tokenizer.token_to_id("{").unwrap()));
    let mut bytes = 0;
    loop {
        let mask = GROUND.mask(constraint.as_mut());
        let space = (0..GROUND.tokenizer.vocab_size() as u32)
            .filter(|&id| is_set(&mask, id))
            .find(|&id| GROUND.tokenizer.token_bytes(id).iter().all(u8::is_ascii_whitespace));
        let Some(id) = space else { break };
        assert!(constraint.accept(id));
        bytes += GROUND.tokenizer.token_bytes(id).len();
        assert!(bytes <= 66, "whitespace goes on");
    }
    let with = |compact, pattern: Option<&str>| GrammarSpec::JsonSchema {
        schema: json!({"type": "object"}),
        disable_any_whitespace: compact,
        whitespace_pattern: pattern.map(str::to_owned),
        disable_additional_properties: false,
    };
    let compact = GROUND.compile(&with(true, None)).unwrap();
    assert!(GROUND.accepts(&compact, "{\"a\":[1,2]}") && !GROUND.begins(&compact, "{\"a\": "));
    let own = GROUND.compile(&with(false, Some("[ ]?"))).unwrap();
    assert!(GROUND.accepts(&own, "{\"a\": 1}") && GROUND.accepts(&own, "{\"a\":1}") && !GROUND.begins(&own, "{\n"));
}

#[test]
fn other_properties_can_be_turned_off() {
    let spec = |closed| GrammarSpec::JsonSchema {
        schema: json!({"properties": {"a": {"type": "object", "properties": {"b": {"type": "null"}}}}, "type": "object"}),
        disable_any_whitespace: false,
        whitespace_pattern: None,
        disable_additional_properties: closed,
    };
    let (open, closed) = (GROUND.compile(&spec(false)).unwrap(), GROUND.compile(&spec(true)).unwrap());
    let text = "{\"a\":{\"b\":null,\"c\":1}}";
    assert!(GROUND.accepts(&open, text) && !GROUND.accepts(&closed, text));
    assert!(GROUND.accepts(&closed, "{\"a\":{\"b\":null}}"));
}

#[test]
fn calls_of_tools_are_an_array_of_name_and_parameters() {
    let tools = vec![
        // Both schemas have a definition with the same name, and each refers to its own.
        (
            "add".to_owned(),
            json!({"type": "object", "properties": {"x": {"$ref": "#/$defs/N"}}, "required": ["x"],
            "additionalProperties": false, "$defs": {"N": {"type": "integer", "maximum": 9, "minimum": 0}}}),
        ),
        (
            "say".to_owned(),
            json!({"type": "object", "properties": {"t": {"$ref": "#/$defs/N"}}, "required": ["t"],
            "additionalProperties": false, "$defs": {"N": {"type": "boolean"}}}),
        ),
    ];
    for parallel in [false, true] {
        let spec = GrammarSpec::ToolCalls { tools: tools.clone(), parallel };
        for text in GROUND.texts(&spec, 8, 150) {
            let calls: Vec<Value> = serde_json::from_str(&text).unwrap();
            assert!(!calls.is_empty() && (parallel || calls.len() == 1), "{text}");
            for call in calls {
                match call["name"].as_str() {
                    Some("add") => assert!(call["parameters"]["x"].is_i64(), "{text}"),
                    Some("say") => assert!(call["parameters"]["t"].is_boolean(), "{text}"),
                    _ => panic!("{text}"),
                }
            }
        }
        let grammar = GROUND.compile(&spec).unwrap();
        let two = r#"[{"name":"add","parameters":{"x":1}},{"name":"say","parameters":{"t":true}}]"#;
        assert_eq!(GROUND.accepts(&grammar, two), parallel);
        assert!(!GROUND.begins(&grammar, "[]"));
    }
    for text in GROUND.texts(&GrammarSpec::NamedTool { parameters: tools[0].1.clone() }, 4, 60) {
        assert!(serde_json::from_str::<Value>(&text).unwrap()["x"].is_i64(), "{text}");
    }
    let none = GrammarSpec::ToolCalls { tools: vec![], parallel: true };
    assert!(matches!(GROUND.compile(&none), Err(GrammarError::Tools(_))));
}
