//! JSON Schemas, resolved and reduced to the keywords that llguidance enforces.
//!
//! A schema comes from a client and is traversed once, as data. References become entries of one flat `$defs`, which
//! llguidance looks up by simple names. Keywords that only annotate are dropped. A keyword that cannot be enforced
//! during generation is an error that names it, unless it excludes no value. The result is limited in depth and size.

mod keywords;
mod links;
mod names;
mod patterns;
mod reference;

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use self::keywords::{KeywordKind, demands_nothing, kind};
use self::links::Links;
use self::names::NamePatterns;
use self::reference::{Document, only_reference};
use super::{GrammarError, GrammarLimits};

/// Whitespace allowed between JSON tokens: one match of this regex, hence never unlimited. Otherwise a small model may
/// print spaces until its limit.
const WHITESPACE: &str = r"\x20{1,2}|\x09|\x0D?\x0A[\x20\x09]{0,64}";

/// Maximum depth of all referenced schemas together, because references may form chains and each level takes stack when
/// it is compiled.
const MAX_LEVELS: usize = 16_384;

/// Layout of the text of a JSON value.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonStyle {
    /// Allows no whitespace outside strings.
    pub(super) compact: bool,
    /// Regex of the whitespace between tokens, which replaces the default.
    pub(super) whitespace: Option<String>,
    /// Allows only named properties in objects.
    pub(super) close_objects: bool,
}

impl JsonStyle {
    /// Returns the style of a call's arguments, which nobody reads as text: one space at most, so that the model wastes
    /// no tokens.
    pub(super) fn call() -> Self {
        Self { whitespace: Some(r"\x20".to_owned()), ..Self::default() }
    }
}

/// Converts `schema` to one that llguidance compiles.
///
/// # Errors
/// Returns an error if it is not a schema, cannot be enforced, refers to something outside itself or exceeds the
/// limits.
pub(super) fn prepare(schema: &Value, style: &JsonStyle, limits: &GrammarLimits) -> Result<Value, GrammarError> {
    let mut schemas = Schemas::new(style, limits);
    let root = schemas.add(schema)?;
    schemas.finish(root)
}

/// Several schemas that become parts of one.
pub(super) struct Schemas<'a> {
    style: &'a JsonStyle,
    limits: &'a GrammarLimits,
    /// Index in `$defs`, by the address of the referenced schema.
    targets: HashMap<usize, usize>,
    definitions: Map<String, Value>,
    /// Distinct divisors found so far.
    divisors: Vec<u64>,
    name_patterns: NamePatterns,
    nodes: usize,
    levels: usize,
}

impl<'a> Schemas<'a> {
    pub(super) fn new(style: &'a JsonStyle, limits: &'a GrammarLimits) -> Self {
        Self {
            style,
            limits,
            targets: HashMap::new(),
            definitions: Map::new(),
            divisors: Vec::new(),
            name_patterns: NamePatterns::default(),
            nodes: 0,
            levels: 0,
        }
    }

    /// Reduces a document. Its references point into the common `$defs`.
    pub(super) fn add(&mut self, schema: &'a Value) -> Result<Value, GrammarError> {
        let document = Document::new(schema, self.limits)?;
        let mut walk = Walk {
            schemas: self,
            document: &document,
            pending: Vec::new(),
            path: Vec::new(),
            deepest: 0,
            inlined: Vec::new(),
            current: None,
            links: Links::default(),
        };
        let root = walk.start("#", schema, schema)?;
        while let Some(target) = walk.pending.pop() {
            walk.current = Some(target.index);
            let value = walk.start(target.reference, target.schema, target.resource)?;
            walk.schemas.definitions.insert(format!("d{}", target.index), value);
        }
        walk.links.check()?;
        Ok(match root {
            Value::Bool(true) => Value::Object(Map::new()),
            root => root,
        })
    }

    /// Returns `root`, an object, with its definitions and options.
    pub(super) fn finish(self, root: Value) -> Result<Value, GrammarError> {
        let Value::Object(mut root) = root else {
            return Err(GrammarError::Schema("the schema is false, so no text satisfies it".to_owned()));
        };
        self.name_patterns.check(self.limits)?;
        if !self.definitions.is_empty() {
            root.insert("$defs".to_owned(), Value::Object(self.definitions));
        }
        patterns::check(&root, self.limits)?;
        let style = self.style;
        let whitespace = (!style.compact).then(|| style.whitespace.as_deref().unwrap_or(WHITESPACE));
        root.insert(
            "x-guidance".to_owned(),
            json!({"whitespace_flexible": !style.compact, "whitespace_pattern": whitespace}),
        );
        Ok(Value::Object(root))
    }
}

/// A referenced schema that has not been reduced yet.
struct Target<'d> {
    index: usize,
    reference: &'d str,
    schema: &'d Value,
    /// Resource to which its own references are relative.
    resource: &'d Value,
}

/// A step from a schema to a nested one, for errors.
#[derive(Clone, Copy)]
enum Step<'d> {
    Key(&'d str),
    Index(usize),
}

/// The traversal of one document.
struct Walk<'w, 'a, 'd> {
    schemas: &'w mut Schemas<'a>,
    document: &'w Document<'d>,
    pending: Vec<Target<'d>>,
    path: Vec<Step<'d>>,
    /// Maximum length of `path` since `start`.
    deepest: usize,
    /// Addresses of the enclosing schemas that were inlined in place of a reference.
    inlined: Vec<usize>,
    /// Index of the referenced schema that is being reduced; `None` for the document itself.
    current: Option<usize>,
    links: Links<'d>,
}

impl<'d> Walk<'_, '_, 'd> {
    /// Reduces the document itself or a referenced schema.
    fn start(&mut self, name: &'d str, schema: &'d Value, resource: &'d Value) -> Result<Value, GrammarError> {
        self.path.clear();
        self.inlined.clear();
        self.path.push(Step::Key(name));
        self.deepest = 0;
        let reduced = self.schema(schema, resource)?;
        self.schemas.levels += self.deepest;
        if self.schemas.levels > MAX_LEVELS {
            return Err(GrammarError::TooLarge { what: "JSON schema", limit: MAX_LEVELS });
        }
        Ok(reduced)
    }

    fn schema(&mut self, schema: &'d Value, resource: &'d Value) -> Result<Value, GrammarError> {
        self.count(1)?;
        match schema {
            Value::Bool(_) => Ok(schema.clone()),
            Value::Object(object) => self.object(object, Document::resource_of(schema, resource)),
            _ => Err(GrammarError::Schema(format!("at {}, a schema must be an object or a boolean", self.path()))),
        }
    }

    fn object(&mut self, object: &'d Map<String, Value>, resource: &'d Value) -> Result<Value, GrammarError> {
        let mut out = Map::new();
        for (key, value) in object {
            self.path.push(Step::Key(key));
            if let Some(value) = self.keyword(object, key, value, resource)? {
                out.insert(key.clone(), value);
            }
            self.path.pop();
        }
        self.unevaluated(object, &mut out)?;
        self.schemas.name_patterns.add(object, &out);
        let named = object.contains_key("properties") || object.contains_key("patternProperties");
        if self.schemas.style.close_objects && named && !object.contains_key("additionalProperties") {
            out.insert("additionalProperties".to_owned(), Value::Bool(false));
        }
        Ok(Value::Object(out))
    }

    /// Converts one keyword; `None` if it is dropped.
    fn keyword(
        &mut self,
        object: &'d Map<String, Value>,
        key: &'d str,
        value: &'d Value,
        resource: &'d Value,
    ) -> Result<Option<Value>, GrammarError> {
        let value = match kind(key) {
            KeywordKind::Annotation | KeywordKind::Unevaluated => return Ok(None),
            KeywordKind::Reference => self.reference(value, resource)?,
            KeywordKind::Schema if value.is_array() => self.list(value, resource)?,
            KeywordKind::Schema => self.schema(value, resource)?,
            KeywordKind::Schemas => self.list(value, resource)?,
            KeywordKind::Alternatives => self.alternatives(value, resource)?,
            KeywordKind::Named => self.named(key, value, resource)?,
            KeywordKind::Size => keywords::whole_number(value),
            KeywordKind::Lower => keywords::bound(value, false),
            KeywordKind::Upper => keywords::bound(value, true),
            KeywordKind::Data => {
                self.data(value)?;
                keywords::exact(value).map_err(|hint| self.unsupported(key, hint))?;
                value.clone()
            }
            KeywordKind::Divisor => {
                keywords::exact(value).map_err(|hint| self.unsupported(key, hint))?;
                self.divisor(key, value)?;
                value.clone()
            }
            KeywordKind::Format => return Ok(keywords::is_enforced_format(value).then(|| value.clone())),
            KeywordKind::Pattern => {
                if let Some(pattern) = value.as_str() {
                    super::lower::check_regex(pattern, self.schemas.limits)?;
                }
                value.clone()
            }
            KeywordKind::Unsupported if demands_nothing(key, object) => return Ok(None),
            KeywordKind::Unsupported => return Err(self.unsupported(key, "")),
        };
        Ok(Some(value))
    }

    fn list(&mut self, value: &'d Value, resource: &'d Value) -> Result<Value, GrammarError> {
        let list = value.as_array().ok_or_else(|| self.wrong_type("an array of schemas"))?;
        let mut out = Vec::with_capacity(list.len());
        for (index, schema) in list.iter().enumerate() {
            self.path.push(Step::Index(index));
            out.push(self.schema(schema, resource)?);
            self.path.pop();
        }
        Ok(Value::Array(out))
    }

    fn named(&mut self, key: &str, value: &'d Value, resource: &'d Value) -> Result<Value, GrammarError> {
        let map = value.as_object().ok_or_else(|| self.wrong_type("an object of schemas"))?;
        let mut out = Map::new();
        for (name, schema) in map {
            if key == "patternProperties" {
                super::lower::check_regex(name, self.schemas.limits)?;
            }
            self.path.push(Step::Key(name));
            out.insert(name.clone(), self.schema(schema, resource)?);
            self.path.pop();
        }
        Ok(Value::Object(out))
    }

    /// Converts the schemas of a `oneOf`. llguidance accepts it only if its alternatives visibly exclude each other,
    /// and does not follow references for that, so references are inlined (a pydantic union with a discriminator is
    /// such a list).
    fn alternatives(&mut self, value: &'d Value, resource: &'d Value) -> Result<Value, GrammarError> {
        let list = value.as_array().ok_or_else(|| self.wrong_type("an array of schemas"))?;
        let mut out = Vec::with_capacity(list.len());
        for (index, schema) in list.iter().enumerate() {
            self.path.push(Step::Index(index));
            let depth = self.inlined.len();
            let (mut schema, mut resource) = (schema, resource);
            while let Some(reference) = only_reference(schema) {
                let (target, of) = self.resolve(reference, resource)?;
                let address = std::ptr::from_ref(target).addr();
                if self.inlined.contains(&address) {
                    break;
                }
                self.inlined.push(address);
                (schema, resource) = (target, of);
            }
            out.push(self.schema(schema, resource)?);
            self.inlined.truncate(depth);
            self.path.pop();
        }
        Ok(Value::Array(out))
    }

    /// Returns the reference in its new spelling.
    fn reference(&mut self, value: &'d Value, resource: &'d Value) -> Result<Value, GrammarError> {
        let reference = value.as_str().ok_or_else(|| self.wrong_type("a string"))?;
        let (schema, of) = self.resolve(reference, resource)?;
        let next = self.schemas.targets.len();
        let index = *self.schemas.targets.entry(std::ptr::from_ref(schema).addr()).or_insert_with(|| {
            self.pending.push(Target { index: next, reference, schema, resource: of });
            next
        });
        if let Some(from) = self.current.filter(|_| self.in_place()) {
            self.links.add(from, index, reference);
        }
        Ok(Value::String(format!("#/$defs/d{index}")))
    }

    /// Returns whether the current reference applies to the same value as the referenced schema that contains it.
    fn in_place(&self) -> bool {
        self.path[1..].iter().all(|step| matches!(step, Step::Key("allOf" | "$ref") | Step::Index(_)))
    }

    fn resolve(&self, reference: &str, resource: &'d Value) -> Result<(&'d Value, &'d Value), GrammarError> {
        self.document.resolve(reference, resource).map_err(|reason| GrammarError::Reference {
            reference: reference.to_owned(),
            path: self.path(),
            reason,
        })
    }

    /// Converts `unevaluatedProperties` and `unevaluatedItems` to simpler keywords, which is possible if no other
    /// schema applies to the same value.
    fn unevaluated(&self, object: &Map<String, Value>, out: &mut Map<String, Value>) -> Result<(), GrammarError> {
        const APPLICATORS: [&str; 5] = ["$ref", "allOf", "anyOf", "oneOf", "$dynamicRef"];
        for (key, rest) in [("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")] {
            match object.get(key) {
                None | Some(Value::Bool(true)) => {}
                Some(value) if value.as_object().is_some_and(Map::is_empty) => {}
                Some(Value::Bool(false)) if !APPLICATORS.iter().any(|key| object.contains_key(*key)) => {
                    out.entry(rest).or_insert(Value::Bool(false));
                }
                Some(_) => return Err(self.unsupported(key, "; use additionalProperties or items")),
            }
        }
        Ok(())
    }

    /// Limits the divisors of a schema together: if several apply to one number, their product counts.
    fn divisor(&mut self, key: &str, value: &Value) -> Result<(), GrammarError> {
        let Some(divisor) = keywords::divisor(value) else { return Ok(()) };
        let divisors = &mut self.schemas.divisors;
        if !divisors.contains(&divisor) {
            divisors.push(divisor);
        }
        let product = divisors.iter().fold(1_u64, |product, divisor| product.saturating_mul(*divisor));
        if product > self.schemas.limits.divisors {
            return Err(self.unsupported(key, " with so many remainders; use a smaller or rounder divisor"));
        }
        Ok(())
    }

    /// Counts the parts of a constant.
    fn data(&mut self, value: &'d Value) -> Result<(), GrammarError> {
        self.count(1)?;
        let parts: Vec<&Value> = match value {
            Value::Array(list) => list.iter().collect(),
            Value::Object(map) => map.values().collect(),
            _ => return Ok(()),
        };
        self.path.push(Step::Index(0));
        parts.into_iter().try_for_each(|part| self.data(part))?;
        self.path.pop();
        Ok(())
    }

    fn count(&mut self, nodes: usize) -> Result<(), GrammarError> {
        let limits = self.schemas.limits;
        if self.path.len() > limits.depth {
            return Err(GrammarError::TooDeep { what: "JSON schema", limit: limits.depth });
        }
        self.schemas.nodes += nodes;
        if self.schemas.nodes > limits.schema_nodes {
            return Err(GrammarError::TooLarge { what: "JSON schema", limit: limits.schema_nodes });
        }
        self.deepest = self.deepest.max(self.path.len());
        Ok(())
    }

    fn unsupported(&self, key: &str, hint: &'static str) -> GrammarError {
        GrammarError::Keyword { keyword: key.to_owned(), path: self.path(), hint }
    }

    fn wrong_type(&self, wanted: &str) -> GrammarError {
        GrammarError::Schema(format!("{} must be {wanted}", self.path()))
    }

    /// Returns the current location as a JSON pointer.
    fn path(&self) -> String {
        let mut path = String::new();
        for (depth, step) in self.path.iter().enumerate() {
            match step {
                // The first step is the reference that led here, which is a pointer already.
                Step::Key(start) if depth == 0 => path.push_str(start),
                _ => path.push('/'),
            }
            match step {
                Step::Key(_) if depth == 0 => {}
                Step::Key(key) => path.push_str(&key.replace('~', "~0").replace('/', "~1")),
                Step::Index(index) => path.push_str(&index.to_string()),
            }
        }
        path
    }
}
