//! Tests of specifications that waste time, memory or stack: each ends in an error or works, within a short time.

use fastrand::Rng;
use std::time::{Duration, Instant};

use octavo_text::{GrammarError, GrammarLimits, GrammarSpec};
use serde_json::{Map, Value, json};

use crate::json::{GROUND, schema};
use crate::support::Golden;
use crate::walk::{Ground, limits};

/// Time limit, far above the time of any test on a slow machine in a debug build and far below that of unlimited work.
const PATIENCE: Duration = Duration::from_secs(30);

fn wrapped(levels: usize, inner: Value, wrap: impl Fn(Value) -> Value) -> Value {
    (0..levels).fold(inner, |value, _| wrap(value))
}

/// Returns definitions that each refer to the next.
fn chain(length: usize, link: impl Fn(String) -> Value) -> Value {
    let mut definitions = Map::new();
    for index in 0..length {
        definitions.insert(format!("d{index}"), link(format!("#/$defs/d{}", (index + 1) % length)));
    }
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

fn schemas() -> Vec<(&'static str, Value)> {
    let many = |count: usize| (0..count).map(|index| json!(format!("value {index}"))).collect::<Vec<_>>();
    fn all(patterns: impl Iterator<Item = String>) -> Value {
        json!({"allOf": patterns.map(|pattern| json!({"type": "string", "pattern": pattern})).collect::<Vec<_>>()})
    }
    let objects = |count: usize| {
        let properties: Map<String, Value> = (0..count).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect();
        json!({"type": "object", "properties": properties})
    };
    vec![
        ("60 levels", wrapped(25, json!({}), |value| json!({"items": value}))),
        ("1000 levels", wrapped(100, json!({}), |value| json!({"properties": {"a": {"items": value}}}))),
        ("8000 values", json!({"enum": many(8000)})),
        ("2000 optional properties", objects(2000)),
        ("a chain of references", chain(3000, |next| json!({"$ref": next}))),
        (
            "a chain through properties",
            chain(2000, |next| json!({"properties": {"a": {"$ref": next}}, "type": "object"})),
        ),
        ("a loop with siblings", chain(3, |next| json!({"$ref": next, "type": "object"}))),
        ("itself", json!({"$ref": "#"})),
        ("all of itself", json!({"allOf": [{"$ref": "#"}, {"$ref": "#"}]})),
        (
            "any of itself twice",
            json!({"anyOf": [{"$ref": "#"}, {"items": {"$ref": "#"}}, {"properties": {"a": {"$ref": "#"}}}]}),
        ),
        ("long strings", json!({"type": "string", "minLength": 1_000_000, "maxLength": 4_000_000_000_u64})),
        (
            "many items",
            json!({"type": "array", "minItems": 1_000_000, "maxItems": 2_000_000, "items": {"type": "null"}}),
        ),
        ("many properties", json!({"type": "object", "minProperties": 100_000})),
        ("multiples", json!({"type": "integer", "multipleOf": 999_983})),
        ("prime multiples", json!({"type": "integer", "multipleOf": 9973})),
        ("multiples of several", json!({"allOf": [{"multipleOf": 97}, {"multipleOf": 89}, {"multipleOf": 83}]})),
        ("small multiples", json!({"type": "number", "multipleOf": 1e-9, "maximum": 1e300})),
        (
            "a product of unions",
            json!({"allOf": vec![json!({"anyOf": many(40).into_iter().map(|v| json!({"const": v})).collect::<Vec<_>>()}); 12]}),
        ),
        (
            "patterns",
            json!({"type": "object", "patternProperties": (0..40).map(|i| (format!("^.*a{i}.*b"), json!({}))).collect::<Map<_, _>>()}),
        ),
        ("a long string of alternatives", json!({"type": "string", "pattern": "^(ab|cd|ef)*$", "maxLength": 100_000})),
        (
            "long strings of several lengths",
            json!({"anyOf": (0..300).map(|i| json!({"type": "string", "maxLength": 100_000 + i})).collect::<Vec<_>>()}),
        ),
        ("15000 values", json!({"enum": many(15_000)})),
        ("10000 numbers", json!({"enum": (0..10_000).map(|i| json!(f64::from(i) / 7.0)).collect::<Vec<_>>()})),
        (
            "items of items of items",
            wrapped(
                3,
                json!({"type": "integer"}),
                |value| json!({"type": "array", "minItems": 500, "maxItems": 1000, "items": value}),
            ),
        ),
        ("patterns that all apply", all((0..30).map(|i| format!("a.{{{i}}}b")))),
        ("patterns that all apply later", all((0..30).map(|i| format!("^(y|z{{99}}(.*a.{{{i}}}b.*))$")))),
        ("wide patterns that all apply", all((0..3).map(|i| format!("^(a|a.|a..|a...|.a|..a|...a|b.{{{i}}})*$")))),
        (
            "properties whose names match long patterns",
            json!({"type": "object", "patternProperties": (0..2).map(|i| {
                (format!("^({i}{})*$", "|a.|.a.|..a.|...a".repeat(3000)), json!({}))
            }).collect::<Map<_, _>>()}),
        ),
        (
            "objects in objects",
            wrapped(
                30,
                json!({}),
                |value| json!({"type": "object", "properties": {"a": value.clone(), "b": {"enum": [1]}}}),
            ),
        ),
        ("wide objects in a list", json!({"type": "array", "items": objects(1500)})),
        ("a hard pattern", json!({"type": "string", "pattern": "^(.*a.{60}b.*|(a|b)*c.{50})$", "minLength": 500})),
    ]
}

/// Returns patterns that are expensive to intersect: after each letter a, every one of them goes on in two ways.
fn gaps(count: usize) -> Vec<String> {
    (0..count).map(|length| format!("a.{{{length}}}b")).collect()
}

fn terminals_of_gaps() -> Vec<String> {
    gaps(30).iter().map(|gap| format!("/.*{gap}.*/")).collect()
}

/// Schemas in which many patterns apply to one value or to one name.
fn intersections() -> Vec<(&'static str, Value)> {
    let all = |schemas: Vec<Value>| json!({"allOf": schemas});
    let each = |wrap: &dyn Fn(Value) -> Value| all(gaps(30).iter().map(|gap| wrap(json!({"pattern": gap}))).collect());
    let link = |(index, gap)| {
        let next = json!({"$ref": format!("#/$defs/d{}", index + 1)});
        (format!("d{index}"), json!({"allOf": [next, {"pattern": gap}]}))
    };
    let mut linked: Map<String, Value> = gaps(30).into_iter().enumerate().map(link).collect();
    linked.insert("d30".to_owned(), json!({"type": "string"}));
    let either = |gap: &String| json!({"anyOf": [{"pattern": gap}, {"pattern": format!("{gap}c")}]});
    let named = |names: Vec<String>| names.into_iter().map(|name| (name, json!({}))).collect::<Map<_, _>>();
    let formats = ["date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];
    vec![
        ("30 patterns", each(&|pattern| pattern)),
        (
            "30 patterns of strings",
            each(&|mut pattern| {
                pattern["type"] = json!("string");
                pattern["minLength"] = json!(3);
                pattern
            }),
        ),
        ("30 patterns of a property", each(&|pattern| json!({"properties": {"a": pattern}}))),
        ("30 patterns of items", each(&|pattern| json!({"items": pattern}))),
        ("30 patterns of other properties", each(&|pattern| json!({"additionalProperties": pattern}))),
        ("30 patterns in nested lists", json!({"anyOf": [each(&|pattern| all(vec![pattern])), {"type": "null"}]})),
        ("30 patterns through references", json!({"$ref": "#/$defs/d0", "$defs": linked})),
        ("unions of patterns", all(gaps(30).iter().map(either).collect())),
        (
            "formats and patterns",
            all(formats
                .iter()
                .map(|format| json!({"format": format}))
                .chain(gaps(5).iter().map(|gap| json!({"pattern": gap})))
                .collect()),
        ),
        (
            "10000 disjoint names",
            json!({"type": "object", "patternProperties": named((0..10_000).map(|i| format!("^a{i}x")).collect())}),
        ),
        (
            "names of several schemas",
            all((0..300)
                .map(|i| json!({"type": "object", "patternProperties": named(vec![format!("^a{i}x")])}))
                .collect()),
        ),
    ]
}

fn others() -> Vec<(&'static str, GrammarSpec)> {
    let regex = |text: &str| GrammarSpec::Regex(text.to_owned());
    let grammar = GrammarSpec::Grammar;
    let doubled: String = (1..40).map(|i| format!("r{i} ::= r{0} r{0}\n", i - 1)).collect();
    let terminals: String = (1..9000).map(|i| format!("T{i}: T{}\n", i - 1)).collect();
    vec![
        ("a large count", regex("a{1000000}")),
        ("optional letters", regex("(a?){2000}a{2000}")),
        ("ranges of counts", regex("(a{1,100}b{1,100}){1,100}")),
        ("gaps of any length", regex("(.{1,1000}x){10}")),
        ("words that begin alike", regex("((a|ab|abc|abcd)*c){50}")),
        ("classes of classes", regex(&r"([\p{L}&&[^a]]|\p{N}|\w){1,500}".repeat(20))),
        ("intersections", grammar("start: T\nT: /.*a.{40}b.*/ & /.*c.{40}d.*/ & ~/.*e.{40}f.*/".to_owned())),
        ("30 intersections", grammar(format!("start: T\nT: {}", terminals_of_gaps().join(" & ")))),
        (
            "30 intersections through names",
            grammar(
                terminals_of_gaps()
                    .iter()
                    .enumerate()
                    .map(|(i, gap)| format!("T{}: T{i} & {gap}\n", i + 1))
                    .chain(["T0: /(?s:.*)/\nstart: T30".to_owned()])
                    .collect(),
            ),
        ),
        ("30 patterns in a grammar", grammar(format!("start: \"x\" %json {}", intersections()[0].1))),
        ("30 negations", grammar(format!("start: T\nT: ~{}", terminals_of_gaps().join(" & ~")))),
        ("a negated union", grammar(format!("start: T\nT: ~({})", terminals_of_gaps().join(" | ")))),
        ("repeated gaps", grammar("start: T\nT: (/.*a.{20}b/){1000}".to_owned())),
        ("counted rules", grammar("start: a{1,1000}\na: b{1,1000}\nb: /[a-z]{1,1000}/ | c{1000}\nc: \"x\"".to_owned())),
        ("many large classes", regex(&r"\p{L}".repeat(50_000))),
        (
            "many rules",
            grammar(
                (0..6000)
                    .map(|i| format!("r{i} ::= \"x{i}\" | r{} r{}\n", (i + 1) % 6000, (i * 7) % 6000))
                    .chain(["root ::= r0".to_owned()])
                    .collect(),
            ),
        ),
        ("counts of counts", regex("((a{1000}){1000}){1000}")),
        ("exponential", regex("(a|b)*a(a|b){40}")),
        ("exponential with a tail", regex("(.*a.{30}){3}b")),
        ("groups in groups", regex(&format!("{}a{}", "(".repeat(5000), ")".repeat(5000)))),
        ("stars of stars", regex(&format!("a{}", "*".repeat(200)))),
        ("classes", regex(&r"[\p{L}\p{N}]".repeat(300))),
        ("bracketed rules", grammar(format!("root ::= {}\"a\"{}", "(".repeat(9000), ")".repeat(9000)))),
        ("bracketed Lark", grammar(format!("start: {}\"a\"{}", "(".repeat(9000), ")".repeat(9000)))),
        ("rules that double", grammar(format!("root ::= r39\nr0 ::= \"a\"\n{doubled}"))),
        (
            "recursive rules that double",
            grammar(format!("root ::= r39 root | \"b\" root \"c\" | \"\"\nr0 ::= \"a\"\n{doubled}")),
        ),
        (
            "terminals that double",
            grammar(format!(
                "start: T39\nT0: \"a\"\n{}",
                (1..40).map(|i| format!("T{i}: T{0} T{0}\n", i - 1)).collect::<String>()
            )),
        ),
        ("a chain of terminals", grammar(format!("start: T8999\nT0: \"a\"\n{terminals}"))),
        ("left recursion", grammar("root ::= root root | \"a\" | \"\"".to_owned())),
        ("ambiguity", grammar("root ::= root root root | [a-z] | root \"a\" root".to_owned())),
        ("no end", grammar("root ::= \"a\" root".to_owned())),
        ("nothing but itself", grammar("root ::= root".to_owned())),
        ("a large repetition", grammar("root ::= \"(\" (root \"x\"){99999} \")\"".to_owned())),
        ("many choices", GrammarSpec::Choice((0..20_000).map(|index| format!("{index}")).collect())),
        ("long choices", GrammarSpec::Choice((0..20).map(|index| index.to_string().repeat(5000)).collect())),
        ("too long", regex(&"a".repeat(300_000))),
    ]
}

/// Compiles the specification and walks a little if that works, to check that masks are quick too.
fn endure(ground: &Ground, name: &str, spec: &GrammarSpec) {
    let start = Instant::now();
    let result = ground.compile(spec);
    let compiled = start.elapsed();
    assert!(compiled < PATIENCE, "{name}: compiling took {compiled:?}");
    let outcome = match result {
        Err(error) => {
            let message = error.to_string();
            assert!(!message.contains("panic") && message.len() < 1000, "{name}: {message}");
            assert!(!matches!(error, GrammarError::TooSlow(_) | GrammarError::Busy(_)), "{name}: {message}");
            message.chars().take(100).collect()
        }
        Ok(grammar) => {
            let (mut constraint, mut rng) = (grammar.constraint(), Rng::with_seed(1));
            let mut slowest = Duration::ZERO;
            for _ in 0..30 {
                let start = Instant::now();
                let mask = ground.mask(constraint.as_mut());
                slowest = slowest.max(start.elapsed());
                let token = ground.draw(&mask, &mut rng);
                if ground.eos.contains(&token) || !constraint.accept(token) {
                    break;
                }
            }
            assert!(slowest < PATIENCE / 10, "{name}: a mask took {slowest:?}");
            format!("works, slowest mask {slowest:?}")
        }
    };
    println!("{name}: {compiled:?}: {outcome}");
}

#[test]
fn hostile_schemas_end() {
    for (name, document) in schemas() {
        endure(&GROUND, name, &schema(document));
    }
}

#[test]
fn hostile_intersections_end() {
    for (name, document) in intersections() {
        endure(&GROUND, name, &schema(document));
    }
}

#[test]
fn hostile_grammars_end() {
    for (name, spec) in others() {
        endure(&GROUND, name, &spec);
    }
}

#[test]
fn limits_say_what_they_are() {
    let ground = |limits| Ground::new(Golden::byte_level().tokenizer(), &[2], 0, limits);
    let refused = |limits, spec: &GrammarSpec| ground(limits).compile(spec).unwrap_err();

    let deep = schema(wrapped(9, json!({}), |value| json!({"items": value})));
    assert_eq!(
        refused(GrammarLimits { depth: 8, ..limits() }, &deep),
        GrammarError::TooDeep { what: "JSON schema", limit: 8 }
    );
    assert_eq!(
        refused(GrammarLimits { schema_nodes: 8, ..limits() }, &deep),
        GrammarError::TooLarge { what: "JSON schema", limit: 8 }
    );
    let both = schema(json!({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}));
    assert_eq!(
        refused(GrammarLimits { pattern_branches: 3, ..limits() }, &both),
        GrammarError::Intersection { what: "JSON schema", limit: 3 }
    );
    let both = GrammarSpec::Grammar("start: T\nT: /.*a/ & /.*b/".to_owned());
    assert_eq!(
        refused(GrammarLimits { pattern_branches: 3, ..limits() }, &both),
        GrammarError::Intersection { what: "grammar", limit: 3 }
    );
    let long = GrammarSpec::Regex("a".repeat(100));
    assert_eq!(
        refused(GrammarLimits { spec_bytes: 50, ..limits() }, &long),
        GrammarError::TooLong { bytes: 106, limit: 50 }
    );
    let fuel = refused(GrammarLimits { compile_fuel: 50, ..limits() }, &GrammarSpec::JsonObject);
    assert!(matches!(fuel, GrammarError::TooLarge { .. }), "{fuel}");
    let time = refused(GrammarLimits { compile_time: Duration::ZERO, ..limits() }, &GrammarSpec::JsonObject);
    assert!(matches!(time, GrammarError::TooSlow(_) | GrammarError::Busy(_)), "{time}");
}

/// A matcher on which llguidance gives up refuses tokens, and can be rolled back to where it still worked.
#[test]
fn a_matcher_out_of_fuel_refuses_and_recovers() {
    let few = GrammarLimits { lexer_states: 400, ..limits() };
    let ground = Ground::new(Golden::byte_level().tokenizer(), &[2], 0, few);
    let grammar = ground.compile(&GrammarSpec::Regex("(a|b)*a(a|b){14}c?".to_owned())).unwrap();
    let mut constraint = grammar.constraint();
    let (a, b) = (ground.tokenizer.token_to_id("a").unwrap(), ground.tokenizer.token_to_id("b").unwrap());
    let first = ground.mask(constraint.as_mut());
    let mut rng = Rng::with_seed(3);
    let mut taken = 0;
    for _ in 0..2000 {
        if !constraint.accept(if rng.usize(..2) == 0 { a } else { b }) {
            break;
        }
        taken += 1;
    }
    assert!(taken < 2000, "the limit is reached");
    assert_eq!(ground.allowed(&ground.mask(constraint.as_mut())), [2], "only the end");
    assert!(!constraint.accept(2) && !constraint.accept(a), "and that as an error");
    constraint.rollback(taken);
    assert_eq!(ground.mask(constraint.as_mut()), first);
}
