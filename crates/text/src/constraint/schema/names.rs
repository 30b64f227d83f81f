//! Bound on the comparisons of patterns of property names.
//!
//! llguidance tests every two patterns of an object for names that match both, and does so again for each pair of objects
//! that it intersects, without a limit.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::constraint::{GrammarError, GrammarLimits};

/// The patterns of property names of a specification.
#[derive(Debug, Default)]
pub(super) struct NamePatterns {
    /// All of them, which may meet in one object if objects are intersected.
    distinct: HashSet<String>,
    /// Pairs of patterns of the same `patternProperties`.
    pairs: usize,
    /// Length in bytes of the longest pattern that has others in the same `patternProperties`.
    longest: usize,
    /// Number of schemas that are intersected with others.
    intersected: usize,
}

impl NamePatterns {
    /// Adds those of one schema, without the nested ones. `reduced` has the keywords that are enforced.
    pub(super) fn add(&mut self, schema: &Map<String, Value>, reduced: &Map<String, Value>) {
        if let Some(Value::Object(named)) = schema.get("patternProperties") {
            self.pairs = self.pairs.saturating_add(pairs(named.len()));
            self.distinct.extend(named.keys().cloned());
            if named.len() > 1 {
                self.longest = named.keys().map(String::len).max().unwrap_or(0).max(self.longest);
            }
        }
        let applicators = ["$ref", "anyOf", "oneOf"].into_iter().filter(|key| reduced.contains_key(*key)).count();
        let all = reduced.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
        let own = reduced.len() > applicators + usize::from(all > 0);
        let operands = applicators + all + usize::from(own);
        if operands > 1 {
            self.intersected += operands;
        }
    }

    /// # Errors
    /// Returns an error if there are too many comparisons, or one of them is of a pattern that is too long.
    pub(super) fn check(&self, limits: &GrammarLimits) -> Result<(), GrammarError> {
        let meet = self.intersected > 0 && self.distinct.len() > 1;
        let longest = if meet { self.distinct.iter().map(String::len).max().unwrap_or(0) } else { self.longest };
        if longest > limits.name_pattern_bytes {
            return Err(GrammarError::Schema(format!(
                "a pattern of property names has {longest} bytes; at most {} are allowed if it meets others",
                limits.name_pattern_bytes
            )));
        }
        let again = pairs(self.distinct.len()).saturating_mul(self.intersected);
        if self.pairs.saturating_add(again) > limits.name_pattern_pairs {
            return Err(GrammarError::NamePatterns { limit: limits.name_pattern_pairs });
        }
        Ok(())
    }
}

fn pairs(count: usize) -> usize {
    count.saturating_mul(count.saturating_sub(1)) / 2
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::constraint::schema::{JsonStyle, prepare};

    fn is_allowed(schema: &Value) -> bool {
        match prepare(schema, &JsonStyle::default(), &GrammarLimits::default()) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error, GrammarError::NamePatterns { limit: GrammarLimits::default().name_pattern_pairs });
                false
            }
        }
    }

    fn names(range: std::ops::Range<usize>) -> Value {
        let named: Map<String, Value> = range.map(|i| (format!("^a{i}x$"), json!({}))).collect();
        json!({"type": "object", "patternProperties": named})
    }

    #[test]
    fn pairs_of_names_are_limited() {
        assert!(is_allowed(&names(0..200)));
        assert!(!is_allowed(&names(0..1000)));
        let objects = |count: usize| (0..count).map(|_| names(0..100)).collect::<Vec<_>>();
        assert!(is_allowed(&json!({"anyOf": objects(5)})));
        assert!(!is_allowed(&json!({"anyOf": objects(50)})));
    }

    #[test]
    fn a_long_pattern_may_not_meet_others() {
        let named = |name: &str| json!({"patternProperties": {name: {}}});
        let prepared = |schema: Value| prepare(&schema, &JsonStyle::default(), &GrammarLimits::default());
        let long = format!("^{}$", "a".repeat(1000));
        assert!(prepared(named(&long)).is_ok());
        assert!(prepared(json!({"prefixItems": [named(&long), named("b")]})).is_ok());
        for schema in
            [json!({"patternProperties": {&*long: {}, "b": {}}}), json!({"allOf": [named(&long), named("b")]})]
        {
            let error = prepared(schema).unwrap_err();
            assert!(matches!(&error, GrammarError::Schema(reason) if reason.contains("1002 bytes")), "{error}");
        }
    }

    #[test]
    fn names_of_intersected_schemas_count_for_each_of_them() {
        let parts = |count: usize| (0..count).map(|i| names(i..i + 1)).collect::<Vec<_>>();
        assert!(is_allowed(&json!({"allOf": parts(20)})));
        assert!(!is_allowed(&json!({"allOf": parts(200)})));
        assert!(is_allowed(&json!({"prefixItems": parts(200)})));
        let same: Vec<Value> = (0..2000).map(|_| json!({"allOf": [names(0..1), {"required": ["a"]}]})).collect();
        assert!(is_allowed(&json!({"anyOf": same})), "a pattern need not be compared with itself");
    }
}
