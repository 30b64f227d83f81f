//! The JSON Schema Test Suite (draft 2020-12): every schema in it is refused with a reason or enforced.
//!
//! For each schema that compiles, an independent validator must accept the results of random walks that end by
//! themselves, and the grammar is tested with the suite's own valid instances. `OCTAVO_JSON_SCHEMA_SUITE` names the
//! suite's folder of the draft; `.ci/run` takes it from the sources of the Python package `jsonschema`.

use fastrand::Rng;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use octavo_text::{GrammarError, GrammarSpec};
use serde_json::Value;

use crate::support::Golden;
use crate::walk::{Ground, Walk, limits};

/// Keywords that may be refused, with the reason why they are not supported.
const REFUSED: &[(&str, &str)] = &[
    ("$dynamicRef", "depends on the path by which a schema was reached"),
    ("$ref", "to a remote document, or relative to a base URI other than the schema's own absolute $id"),
    ("contains", "some item must match: not context-free together with items"),
    ("dependentRequired", "depends on which other properties came"),
    ("dependentSchemas", "depends on which other properties came"),
    ("if", "needs complements of schemas"),
    ("not", "needs complements of schemas"),
    ("propertyNames", "not known to llguidance"),
    ("uniqueItems", "would need memory of all items"),
    ("unevaluatedItems", "depends on what other schemas looked at"),
    ("unevaluatedProperties", "depends on what other schemas looked at"),
    ("oneOf", "only alternatives that are seen to exclude each other"),
    ("unsatisfiable", "no instance is valid, so there is nothing to generate"),
    ("min/maxProperties", "llguidance counts properties only where all named ones are required"),
    ("patternProperties", "llguidance wants patterns that no name matches twice"),
    ("circular", "references that go in a circle without a step into the instance"),
    ("2^53", "constants that an f64 changes"),
    ("multipleOf", "numbers with more digits than llguidance counts in"),
    ("regex", "look-around and anchors in the middle are not regular"),
];

#[derive(Default)]
struct Summary {
    schemas: usize,
    refused: BTreeMap<&'static str, usize>,
    stop: usize,
    length: usize,
    /// Number of walks that ended with a number that the validator, which computes in f64, cannot judge.
    beyond_f64: usize,
    instances: usize,
    accepted: usize,
    /// Valid instances that the grammar does not allow, by file.
    missed: BTreeMap<String, Vec<String>>,
    invalid_accepted: usize,
    violations: Vec<String>,
    unexpected: Vec<String>,
}

fn suite() -> PathBuf {
    let folder = std::env::var_os("OCTAVO_JSON_SCHEMA_SUITE").map(PathBuf::from).filter(|folder| folder.is_dir());
    folder.expect("OCTAVO_JSON_SCHEMA_SUITE names the folder of the JSON Schema Test Suite")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    files
}

/// Returns the row of [`REFUSED`] that matches an error.
fn reason(error: &GrammarError) -> Option<&'static str> {
    let message = error.to_string();
    let name = match error {
        GrammarError::Keyword { hint, .. } if hint.contains("2^53") => "2^53",
        GrammarError::Keyword { keyword, .. } => keyword.as_str(),
        GrammarError::Reference { .. } => "$ref",
        _ if message.contains("nsatisfiable") || message.contains("is false") || message.contains("anyOf is empty") => {
            "unsatisfiable"
        }
        _ if message.contains("min/maxProperties") => "min/maxProperties",
        _ if message.contains("patternProperty") => "patternProperties",
        _ if message.contains("multipleOf") => "multipleOf",
        _ if message.contains("circular") => "circular",
        _ if message.contains("regex") || message.contains("look-around") => "regex",
        _ => return None,
    };
    REFUSED.iter().map(|row| row.0).find(|known| *known == name)
}

/// Returns whether a number in `text` has more digits than an f64 stores, or an exponent near its limit.
fn beyond_f64(text: &str) -> bool {
    text.split(|c: char| !(c.is_ascii_digit() || "+-.eE".contains(c))).any(|number| {
        let (digits, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
        let exponent: f64 = exponent.parse().unwrap_or(0.0);
        digits.chars().filter(char::is_ascii_digit).count() > 15 || exponent.abs() > 250.0
    })
}

fn run_schema(ground: &Ground, place: &str, file: &str, group: &Value, summary: &mut Summary) {
    summary.schemas += 1;
    let schema = &group["schema"];
    let spec = GrammarSpec::JsonSchema {
        schema: schema.clone(),
        disable_any_whitespace: false,
        whitespace_pattern: None,
        disable_additional_properties: false,
    };
    let grammar = match ground.compile(&spec) {
        Ok(grammar) => grammar,
        Err(error) => {
            match reason(&error) {
                Some(reason) => *summary.refused.entry(reason).or_default() += 1,
                None => summary.unexpected.push(format!("{place}: {error}")),
            }
            return;
        }
    };
    let mut schema = schema.clone();
    let validator = jsonschema::draft202012::new(&schema).or_else(|_| {
        // The schema refers to the suite's own meta-schema, which is not available here.
        schema.as_object_mut().map(|schema| schema.remove("$schema"));
        jsonschema::draft202012::new(&schema)
    });
    let validator = match validator {
        Ok(validator) => validator,
        Err(error) => return summary.unexpected.push(format!("{place}: the validator cannot use it: {error}")),
    };
    let mut rng = Rng::with_seed(summary.schemas as u64);
    for _ in 0..6 {
        match ground.walk(grammar.constraint().as_mut(), &mut rng, 60) {
            Walk::Length => summary.length += 1,
            Walk::Stop(text) => {
                summary.stop += 1;
                if beyond_f64(&text) {
                    summary.beyond_f64 += 1;
                    continue;
                }
                match serde_json::from_str::<Value>(&text) {
                    Ok(instance) if validator.is_valid(&instance) => {}
                    Ok(_) => summary.violations.push(format!("{place}: {text} is not valid")),
                    Err(error) => summary.violations.push(format!("{place}: {text:?} is not JSON: {error}")),
                }
            }
        }
    }
    for case in group["tests"].as_array().unwrap() {
        let text = case["data"].to_string();
        let accepted = ground.accepts(&grammar, &text);
        if case["valid"] == true {
            summary.instances += 1;
            summary.accepted += usize::from(accepted);
            if !accepted {
                summary.missed.entry(file.to_owned()).or_default().push(format!("{place}: {text}"));
            }
        } else if accepted && !validator.is_valid(&case["data"]) {
            summary.invalid_accepted += 1;
            summary.violations.push(format!("{place}: the invalid {text} is accepted"));
        }
    }
}

#[test]
#[ignore = "needs OCTAVO_JSON_SCHEMA_SUITE, the folder of the JSON Schema Test Suite"]
fn every_schema_is_refused_by_name_or_enforced() {
    let folder = suite();
    let ground = Ground::new(Golden::byte_level().tokenizer(), &[2], 0, limits());
    let mut summary = Summary::default();
    for path in files(&folder) {
        let file = path.file_stem().unwrap().to_string_lossy().into_owned();
        let groups: Vec<Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        for group in &groups {
            let place = format!("{file}: {}", group["description"].as_str().unwrap_or_default());
            run_schema(&ground, &place, &file, group, &mut summary);
        }
    }
    let refused: usize = summary.refused.values().sum();
    println!("{} schemas, {refused} refused: {:?}", summary.schemas, summary.refused);
    println!(
        "walks: {} stop ({} of them with numbers beyond the validator), {} length, {} violations",
        summary.stop,
        summary.beyond_f64,
        summary.length,
        summary.violations.len()
    );
    println!("valid instances: {} of {} accepted as they are written", summary.accepted, summary.instances);
    println!("invalid instances accepted: {}", summary.invalid_accepted);
    for (file, missed) in &summary.missed {
        println!("  {file}: {}", missed.len());
        missed.iter().for_each(|case| println!("    {case}"));
    }
    assert!(summary.schemas > 300, "this is not the suite");
    assert!(summary.unexpected.is_empty(), "refused for no stated reason: {:#?}", summary.unexpected);
    assert!(summary.violations.is_empty(), "{:#?}", summary.violations);
    assert!(summary.stop > summary.length, "most walks end by themselves");
    assert!(summary.beyond_f64 * 20 < summary.stop, "nearly all are judged");
}
