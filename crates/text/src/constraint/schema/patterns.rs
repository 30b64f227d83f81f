//! Bound on the patterns of a schema that meet in one string.
//!
//! llguidance intersects the patterns of `allOf`, references and their siblings and decides whether the result is empty
//! while it translates a schema, before [`intersection`] can look at the lexer. So the combinations are bounded from
//! the schema: those of a pattern by its expression, those of several as their product.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::constraint::{GrammarError, GrammarLimits, intersection};

/// An upper bound for the branches of a `format`, whose pattern is llguidance's own.
const FORMAT: u64 = 4;

/// Combinations of patterns at one place, or the most at any of several places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Count {
    branches: u64,
    /// Leads back to a schema that contains the place, whose patterns are not counted.
    circular: bool,
}

impl Count {
    /// No pattern, or only such as have one branch.
    const NONE: Self = Self { branches: 1, circular: false };

    /// Both apply to the same text.
    fn and(self, other: Self) -> Self {
        let unknown = (self.circular && other != Self::NONE) || (other.circular && self != Self::NONE);
        let branches = if unknown { u64::MAX } else { self.branches.saturating_mul(other.branches) };
        Self { branches, circular: self.circular || other.circular }
    }

    /// They apply to different texts.
    fn or(self, other: Self) -> Self {
        Self { branches: self.branches.max(other.branches), circular: self.circular || other.circular }
    }
}

/// The patterns of a schema: those of the value itself, of its named properties, and the most of any further property
/// and of any item.
#[derive(Clone, Debug)]
struct Patterns {
    own: Count,
    named: HashMap<String, Count>,
    rest: Count,
    items: Count,
}

impl Patterns {
    fn none() -> Self {
        Self { own: Count::NONE, named: HashMap::new(), rest: Count::NONE, items: Count::NONE }
    }

    /// The most at any place.
    fn most(&self) -> Count {
        self.named.values().fold(self.own.or(self.rest).or(self.items), |most, count| most.or(*count))
    }

    /// Both apply to the same value. A name that only one of them has may be among the other's further properties.
    fn and(mut self, mut other: Self) -> Self {
        if other.named.len() > self.named.len() {
            std::mem::swap(&mut self, &mut other);
        }
        if other.rest != Count::NONE {
            for (name, count) in &mut self.named {
                if !other.named.contains_key(name) {
                    *count = count.and(other.rest);
                }
            }
        }
        for (name, count) in other.named {
            let rest = self.rest;
            self.named.entry(name).and_modify(|mine| *mine = mine.and(count)).or_insert_with(|| count.and(rest));
        }
        Self {
            own: self.own.and(other.own),
            named: self.named,
            rest: self.rest.and(other.rest),
            items: self.items.and(other.items),
        }
    }

    /// One of them applies.
    fn or(mut self, other: Self) -> Self {
        for (name, count) in other.named {
            self.named.entry(name).and_modify(|mine| *mine = mine.or(count)).or_insert(count);
        }
        Self {
            own: self.own.or(other.own),
            named: self.named,
            rest: self.rest.or(other.rest),
            items: self.items.or(other.items),
        }
    }
}

/// Checks a schema that was reduced, with its `$defs`.
///
/// # Errors
/// Returns an error if patterns that apply to the same text have more combinations than the limit.
pub(super) fn check(schema: &Map<String, Value>, limits: &GrammarLimits) -> Result<(), GrammarError> {
    if bound(schema) > limits.pattern_branches {
        return Err(GrammarError::Intersection { what: "JSON schema", limit: limits.pattern_branches });
    }
    Ok(())
}

/// Returns the most branches at any place. A pattern that meets itself counts once, so all patterns together are a bound
/// too.
fn bound(schema: &Map<String, Value>) -> u64 {
    let definitions = schema.get("$defs").and_then(Value::as_object);
    let mut walk = Walk { definitions, known: HashMap::new(), patterns: HashMap::new() };
    let most = walk.object(schema).most();
    walk.patterns.values().fold(1, |all: u64, branches| all.saturating_mul(*branches)).min(most.branches)
}

struct Walk<'a> {
    definitions: Option<&'a Map<String, Value>>,
    /// The patterns of each reference; `None` while they are being determined.
    known: HashMap<&'a str, Option<Patterns>>,
    /// The branches of each pattern.
    patterns: HashMap<&'a str, u64>,
}

impl<'a> Walk<'a> {
    fn schema(&mut self, schema: &'a Value) -> Patterns {
        schema.as_object().map_or_else(Patterns::none, |object| self.object(object))
    }

    fn object(&mut self, object: &'a Map<String, Value>) -> Patterns {
        let mut all = Patterns::none();
        for (key, value) in object {
            let part = match (key.as_str(), value) {
                ("pattern", Value::String(pattern)) => Self::of_value(self.branches(pattern)),
                ("format", Value::String(format)) => Self::of_value(*self.patterns.entry(format).or_insert(FORMAT)),
                ("$ref", Value::String(reference)) => self.reference(reference),
                ("allOf", Value::Array(schemas)) => {
                    schemas.iter().fold(Patterns::none(), |all, schema| all.and(self.schema(schema)))
                }
                ("anyOf" | "oneOf", Value::Array(schemas)) => {
                    schemas.iter().fold(Patterns::none(), |any, schema| any.or(self.schema(schema)))
                }
                ("properties", Value::Object(schemas)) => {
                    let named = schemas.iter().map(|(name, schema)| (name.clone(), self.schema(schema).most()));
                    Patterns { named: named.collect(), ..Patterns::none() }
                }
                ("$defs" | "const" | "enum" | "x-guidance", _) => continue,
                // The names of several patterns may be the same.
                ("patternProperties", Value::Object(schemas)) => {
                    let rest = schemas.values().fold(Count::NONE, |all, schema| all.and(self.schema(schema).most()));
                    Patterns { rest, ..Patterns::none() }
                }
                ("additionalProperties", schema) => Patterns { rest: self.schema(schema).most(), ..Patterns::none() },
                (_, Value::Object(schema)) => Patterns { items: self.object(schema).most(), ..Patterns::none() },
                (_, Value::Array(schemas)) => {
                    let items = schemas.iter().fold(Count::NONE, |most, schema| most.or(self.schema(schema).most()));
                    Patterns { items, ..Patterns::none() }
                }
                _ => continue,
            };
            all = all.and(part);
        }
        all
    }

    fn of_value(branches: u64) -> Patterns {
        Patterns { own: Count { branches, circular: false }, ..Patterns::none() }
    }

    fn reference(&mut self, reference: &'a str) -> Patterns {
        match self.known.get(reference) {
            Some(Some(known)) => return known.clone(),
            Some(None) => {
                let circular = Count { branches: 1, circular: true };
                return Patterns { own: circular, named: HashMap::new(), rest: circular, items: circular };
            }
            None => {}
        }
        let name = reference.strip_prefix("#/$defs/");
        let Some(target) = name.and_then(|name| self.definitions?.get(name)) else { return Patterns::none() };
        self.known.insert(reference, None);
        let patterns = self.schema(target);
        self.known.insert(reference, Some(patterns.clone()));
        patterns
    }

    fn branches(&mut self, pattern: &'a str) -> u64 {
        *self.patterns.entry(pattern).or_insert_with(|| intersection::branches_of(pattern))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn bound(schema: &Value) -> u64 {
        super::bound(schema.as_object().unwrap())
    }

    #[test]
    fn patterns_of_one_text_multiply() {
        let two = json!({"pattern": "a"});
        assert_eq!(bound(&two), 2);
        let four: Vec<_> = ["b", "c", "d"].map(|pattern| json!({"pattern": pattern})).into();
        assert_eq!(bound(&json!({"allOf": [two, {"allOf": four}]})), 16);
        assert_eq!(bound(&json!({"allOf": [two, two, {"allOf": [two]}]})), 2, "equal patterns are one");
        assert_eq!(bound(&json!({"anyOf": [two, {"pattern": "c"}], "pattern": "b"})), 4);
        let reference = json!({"$ref": "#/$defs/d0", "pattern": "c", "$defs": {"d0": two}});
        assert_eq!(bound(&reference), 4);
        assert_eq!(bound(&json!({"pattern": "^[a-z]+$", "minLength": 3})), 1);
    }

    #[test]
    fn patterns_of_different_texts_do_not() {
        let [one, two, three] = ["a", "b", "c"].map(|pattern| json!({"pattern": pattern}));
        let (a, b, c) =
            (json!({"properties": {"a": one}}), json!({"properties": {"b": two}}), json!({"properties": {"a": three}}));
        assert_eq!(bound(&json!({"allOf": [a, b]})), 2);
        assert_eq!(bound(&json!({"allOf": [a, b, c]})), 4);
        assert_eq!(bound(&json!({"properties": {"a": one, "b": two}, "items": three})), 2);
        assert_eq!(bound(&json!({"prefixItems": [one, two]})), 2);
    }

    #[test]
    fn further_properties_meet_named_ones() {
        let [one, two, three] = ["a", "b", "c"].map(|pattern| json!({"pattern": pattern}));
        let named = json!({"properties": {"a": one}});
        assert_eq!(bound(&json!({"allOf": [named, {"additionalProperties": two}]})), 4);
        assert_eq!(bound(&json!({"patternProperties": {"^a": one, "b$": two}, "properties": {"ab": three}})), 8);
    }

    #[test]
    fn all_patterns_may_meet_where_a_schema_meets_itself() {
        let tree = json!({
            "$ref": "#/$defs/d0",
            "$defs": {"d0": {"properties": {"name": {"pattern": "a"}, "other": {"pattern": "b"}, "next": {"$ref": "#/$defs/d0"}}}},
        });
        assert_eq!(bound(&tree), 2);
        let growing = json!({
            "$ref": "#/$defs/d0",
            "$defs": {
                "d0": {"pattern": "a", "properties": {"x": {"allOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d1"}]}}},
                "d1": {"pattern": "b", "properties": {"y": {"pattern": "c"}}},
            },
        });
        assert_eq!(bound(&growing), 8);
    }
}
