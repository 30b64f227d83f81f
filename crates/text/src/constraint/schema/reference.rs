//! Resolution of `$ref` within one document.

use std::collections::HashMap;

use serde_json::Value;

use super::super::{GrammarError, GrammarLimits};
use super::keywords::{KeywordKind, kind};

const NOT_HERE: &str =
    "only references within the schema are followed (#, #/pointer, #anchor, or its own absolute $id)";

/// A schema document and the names in it to which references may point.
pub(super) struct Document<'d> {
    /// Schemas by absolute URI without fragment; `None` if several have the same.
    ids: HashMap<&'d str, Option<&'d Value>>,
    /// Schemas by the address of their resource and their name.
    anchors: HashMap<(usize, &'d str), Option<&'d Value>>,
}

impl<'d> Document<'d> {
    pub(super) fn new(root: &'d Value, limits: &GrammarLimits) -> Result<Self, GrammarError> {
        let mut document = Self { ids: HashMap::new(), anchors: HashMap::new() };
        document.collect(root, root, limits.depth, limits)?;
        Ok(document)
    }

    /// Finds `$id` and `$anchor` everywhere except in constants, where they have no meaning.
    fn collect(
        &mut self,
        value: &'d Value,
        resource: &'d Value,
        levels: usize,
        limits: &GrammarLimits,
    ) -> Result<(), GrammarError> {
        let Some(levels) = levels.checked_sub(1) else {
            return Err(GrammarError::TooDeep { what: "JSON schema", limit: limits.depth });
        };
        match value {
            Value::Array(list) => list.iter().try_for_each(|item| self.collect(item, resource, levels, limits)),
            Value::Object(map) => {
                let inner = Self::resource_of(value, resource);
                if let Some(id) = map.get("$id").and_then(Value::as_str).filter(|id| id.contains(':')) {
                    let id = id.trim_end_matches('#');
                    self.ids.entry(id).and_modify(|known| *known = None).or_insert(Some(value));
                }
                for key in ["$anchor", "$dynamicAnchor"] {
                    if let Some(name) = map.get(key).and_then(Value::as_str) {
                        let key = (std::ptr::from_ref(inner).addr(), name);
                        self.anchors.entry(key).and_modify(|known| *known = None).or_insert(Some(value));
                    }
                }
                map.iter()
                    .filter(|(key, _)| !matches!(key.as_str(), "const" | "enum" | "default" | "examples" | "example"))
                    .try_for_each(|(_, part)| self.collect(part, inner, levels, limits))
            }
            _ => Ok(()),
        }
    }

    /// Returns the resource to which references in `schema` are relative: `schema` itself if it has an `$id`, else the
    /// surrounding resource.
    pub(super) fn resource_of(schema: &'d Value, around: &'d Value) -> &'d Value {
        match schema.get("$id").and_then(Value::as_str) {
            Some(id) if !id.starts_with('#') => schema,
            _ => around,
        }
    }

    /// Returns the schema to which a reference in `resource` points, and its resource.
    ///
    /// # Errors
    /// Returns the reason, the end of a sentence, if it is not in the document.
    pub(super) fn resolve(&self, reference: &str, resource: &'d Value) -> Result<(&'d Value, &'d Value), &'static str> {
        let (uri, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let resource = match uri {
            "" => resource,
            uri => self.ids.get(uri).ok_or(NOT_HERE)?.ok_or("several schemas have this $id")?,
        };
        let fragment = percent_decoded(fragment).ok_or("its percent-encoding is broken")?;
        if fragment.is_empty() {
            return Ok((resource, resource));
        }
        if let Some(pointer) = fragment.strip_prefix('/') {
            return follow(pointer, resource).ok_or("there is nothing at this place of the schema");
        }
        let anchor = self.anchors.get(&(std::ptr::from_ref(resource).addr(), fragment.as_str()));
        let schema = anchor.ok_or("there is no such $anchor")?.ok_or("several schemas have this $anchor")?;
        Ok((schema, resource))
    }
}

/// Returns the value at a JSON pointer without its first slash, and its resource.
fn follow<'d>(pointer: &str, resource: &'d Value) -> Option<(&'d Value, &'d Value)> {
    let (mut value, mut resource) = (resource, resource);
    for segment in pointer.split('/') {
        value = match value {
            Value::Object(map) => map.get(&segment.replace("~1", "/").replace("~0", "~"))?,
            Value::Array(list) => list.get(segment.parse::<usize>().ok()?)?,
            _ => return None,
        };
        resource = Document::resource_of(value, resource);
    }
    Some((value, resource))
}

fn percent_decoded(text: &str) -> Option<String> {
    if !text.contains('%') {
        return Some(text.to_owned());
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte == b'%' {
            let digits = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(byte);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

/// Returns the reference of a schema that consists of nothing else.
pub(super) fn only_reference(schema: &Value) -> Option<&str> {
    let map = schema.as_object()?;
    map.keys().all(|key| matches!(kind(key), KeywordKind::Annotation | KeywordKind::Reference)).then_some(())?;
    map.get("$ref")?.as_str()
}
