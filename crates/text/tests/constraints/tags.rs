//! Tests of structural tags.

use octavo_text::{GrammarError, GrammarSpec};
use serde_json::{Value, json};

use crate::json::GROUND;

fn accepted(tag: Value, cases: &[(&str, bool)]) {
    let compiled = GROUND.compile(&GrammarSpec::StructuralTag(tag)).unwrap();
    for (text, valid) in cases {
        assert_eq!(GROUND.accepts(&compiled, text), *valid, "{text:?}");
    }
}

fn arguments(name: &str) -> Value {
    json!({"type": "object", "properties": {name: {"type": "integer"}}, "required": [name], "additionalProperties": false})
}

#[test]
fn structures_after_triggers() {
    let tag = json!({
        "structures": [
            {"begin": "<function=add>", "schema": arguments("x"), "end": "</function>"},
            {"begin": "<function=sub>", "schema": arguments("y"), "end": "</function>"},
            {"begin": "<tool>", "schema": true, "end": "</tool>"},
        ],
        "triggers": ["<function=", "<tool>"],
    });
    let cases = [
        ("just text", true),
        ("", true),
        ("I will <function=add>{\"x\": 1}</function> and <function=sub>{\"y\":2}</function> done", true),
        ("<tool>[1]</tool>", true),
        ("a < b and <func", true),
        ("<function=add>{\"y\": 1}</function>", false),
        ("<function=mul>", false),
        ("<function=add>{\"x\": 1}", false),
        ("<tool>", false),
    ];
    accepted(tag.clone(), &cases);
    for text in GROUND.texts(&GrammarSpec::StructuralTag(tag), 6, 60) {
        assert_eq!(text.matches("<function=").count(), text.matches("</function>").count(), "{text}");
    }
}

#[test]
fn formats_within_formats() {
    let tag = |begin: &str, content: Value| json!({"type": "tag", "begin": begin, "content": content, "end": "</t>"});
    let schema = json!({"type": "json_schema", "json_schema": arguments("x")});
    accepted(
        json!({"format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "ok: "},
            {"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]+"}, tag("<t>", schema.clone())]},
            {"type": "grammar", "grammar": "root ::= \".\" | \"!\" root"},
        ]}}),
        &[("ok: 12.", true), ("ok: <t>{\"x\":3}</t>!!.", true), ("ok: .", false), ("ok: 12", false)],
    );
    accepted(
        json!({"format": {"type": "sequence", "elements": [
            tag("<think>", json!({"type": "any_text"})), schema.clone(),
        ]}}),
        &[("<think>a { b</t>{\"x\":1}", true), ("<think>a", false), ("{\"x\":1}", false)],
    );
    let triggered = |once: bool, one: bool| {
        json!({"format": {"type": "triggered_tags", "triggers": ["<t"], "tags": [tag("<t>", schema.clone())],
            "at_least_one": one, "stop_after_first": once}})
    };
    let call = "<t>{\"x\":1}</t>";
    let (text, two) = (format!("hi {call}"), format!("{call}{call}"));
    accepted(triggered(false, false), &[(&text, true), (&two, true), ("hi", true)]);
    accepted(triggered(true, false), &[(&text, true), (&two, false), ("hi", true)]);
    accepted(triggered(false, true), &[(&text, false), (&two, true), ("hi", false)]);
    accepted(triggered(true, true), &[(call, true), (&two, false), ("hi", false)]);
    let separated = json!({"format": {"type": "tags_with_separator", "separator": ", ", "at_least_one": true,
        "tags": [tag("<t>", schema)]}});
    accepted(separated, &[(call, true), (&format!("{call}, {call}"), true), (&two, false), ("", false)]);
}

#[test]
fn broken_tags_are_refused() {
    for (tag, message) in [
        (json!({}), "it needs \"format\""),
        (json!({"format": {"type": "qwen_xml_parameter"}}), "\"qwen_xml_parameter\" is not supported"),
        (json!({"format": {"type": "sequence", "elements": []}}), "\"elements\" must be a list"),
        (json!({"format": {"type": "const_string"}}), "\"value\" is missing"),
        (json!({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}), "no trigger begins"),
        (json!({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": [""]}), "begins no tag"),
    ] {
        let error = GROUND.compile(&GrammarSpec::StructuralTag(tag)).unwrap_err();
        assert!(matches!(error, GrammarError::StructuralTag(_)) && error.to_string().contains(message), "{error}");
    }
    let schema = json!({"structures": [{"begin": "<a>", "schema": {"not": {}}, "end": ""}], "triggers": ["<a"]});
    let error = GROUND.compile(&GrammarSpec::StructuralTag(schema)).unwrap_err();
    assert!(matches!(error, GrammarError::Keyword { .. }), "{error}");
}
