//! The description of the API. The fields of requests are those that their structs declare; paths, answers and nested objects
//! are written by hand. The table of routes adds which operations need a key.

use std::collections::HashSet;
use std::sync::LazyLock;

use serde_json::{Value, json};

use super::page::Page;
use crate::api::adapters::{LoadAdapterRequest, UnloadAdapterRequest};
use crate::api::chat::request::ChatRequest;
use crate::api::completions::request::CompletionRequest;
use crate::api::messages::request::MessagesRequest;
use crate::api::pooling::request::{
    CohereRequest, EmbeddingRequest, Encoding, PoolingFields, PoolingRequest, RerankRequest, ScoreRequest,
    ScoringFields,
};
use crate::api::responses::request::ResponsesRequest;
use crate::api::shared::common::CommonFields;
use crate::api::tokenize::{DetokenizeRequest, TokenizedText};
use crate::config::ServerConfig;
use crate::route_table::{ROUTES, Route, served};

/// Everything but the schemas.
const PATHS: &str = include_str!("paths.json");

/// Name → schema, without the fields that are declared.
const SCHEMAS: &str = include_str!("schemas.json");

/// The declarations of requests.
const DECLARED: &[fn(&mut Value)] = &[
    CommonFields::describe,
    ChatRequest::describe,
    CompletionRequest::describe,
    ResponsesRequest::describe,
    MessagesRequest::describe,
    PoolingFields::describe,
    Encoding::describe,
    EmbeddingRequest::describe,
    PoolingRequest::describe,
    ScoringFields::describe,
    ScoreRequest::describe,
    RerankRequest::describe,
    CohereRequest::describe,
    TokenizedText::describe,
    DetokenizeRequest::describe,
    LoadAdapterRequest::describe,
    UnloadAdapterRequest::describe,
];

/// The document without what only a running server knows.
static DOCUMENT: LazyLock<Value> = LazyLock::new(|| {
    let mut document: Value = serde_json::from_str(PATHS).expect("the paths are JSON");
    let mut schemas: Value = serde_json::from_str(SCHEMAS).expect("the schemas are JSON");
    DECLARED.iter().for_each(|describe| describe(&mut schemas));
    schemas.as_object_mut().into_iter().flatten().for_each(|(_, schema)| required_first(schema));
    document["components"]["schemas"] = schemas;
    for route in ROUTES {
        let Some(operation) = document["paths"][&described_path(route)].get_mut(route.method.to_lowercase()) else {
            continue;
        };
        if route.open {
            operation["security"] = json!([]);
        } else {
            operation["responses"]["401"] = json!({"$ref": "#/components/responses/401"});
        }
    }
    document
});

/// Puts the required properties of a schema first, as readers expect them.
fn required_first(schema: &mut Value) {
    let required = schema.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else { return };
    let mut others = std::mem::take(properties);
    for name in required.iter().filter_map(Value::as_str) {
        properties.extend(others.shift_remove(name).map(|property| (name.to_owned(), property)));
    }
    properties.append(&mut others);
}

/// The path under which a route is described. The router marks what may have slashes in it.
fn described_path(route: &Route) -> String {
    route.path.replace("{*", "{")
}

/// The document of a server: with its version, its names as examples of a model, and without routes that it does not serve.
pub(super) fn page(config: &ServerConfig) -> Page {
    let mut document = DOCUMENT.clone();
    document["info"]["version"] = config.version.as_str().into();
    document["components"]["schemas"]["Model"]["examples"] = config.served_model_names.as_slice().into();
    if let Some(paths) = document["paths"].as_object_mut() {
        if !config.tokenizer_info {
            paths.remove("/tokenizer_info");
        }
        let served: HashSet<String> = served(config).map(described_path).collect();
        paths.retain(|path, _| served.contains(path));
    }
    Page::json(document.to_string().into_bytes())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::api::pooling::request::ClassifyRequest;
    use crate::api::shared::fields::recorded;
    use crate::api::shared::sampling::{OutputLimit, Sampling};
    use crate::api::shared::unserved;

    /// Every object of a document that has `key`, with the value there.
    fn having<'a>(node: &'a Value, key: &str, found: &mut Vec<&'a Value>) {
        match node {
            Value::Object(fields) => {
                found.extend(fields.get(key));
                fields.values().for_each(|value| having(value, key, found));
            }
            Value::Array(items) => items.iter().for_each(|item| having(item, key, found)),
            _ => {}
        }
    }

    /// Every operation, as ("GET /path", operation).
    fn operations(document: &Value) -> Vec<(String, &Value)> {
        let paths = document["paths"].as_object().unwrap().iter();
        paths
            .flat_map(|(path, item)| {
                let methods = item.as_object().unwrap().iter();
                methods.map(move |(method, operation)| (format!("{} {path}", method.to_uppercase()), operation))
            })
            .collect()
    }

    fn all() -> BTreeSet<String> {
        ROUTES.iter().map(|route| format!("{} {}", route.method, described_path(route))).collect()
    }

    fn names(document: &Value) -> BTreeSet<String> {
        operations(document).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn every_route_is_described_and_every_description_is_a_route() {
        assert_eq!(names(&DOCUMENT), all());
    }

    #[test]
    fn required_fields_come_first() {
        for (name, schema) in DOCUMENT["components"]["schemas"].as_object().unwrap() {
            let Some(properties) = schema["properties"].as_object() else { continue };
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let required: Vec<&str> = required.filter(|name| properties.contains_key(*name)).collect();
            let first: Vec<&str> = properties.keys().take(required.len()).map(String::as_str).collect();
            assert_eq!(first, required, "{name}");
        }
    }

    /// The names of a schema's properties, with those of the schemas that it is made of.
    fn properties(schema: &Value) -> BTreeSet<String> {
        let reference = schema["$ref"].as_str().and_then(|path| DOCUMENT.pointer(path.strip_prefix('#')?));
        let parts = ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|key| schema[key].as_array()).flatten();
        let own = schema["properties"].as_object().into_iter().flat_map(|own| own.keys().cloned());
        own.chain(reference.into_iter().chain(parts).flat_map(properties)).collect()
    }

    /// A request whose fields are compared with their description.
    struct Compared {
        schema: &'static str,
        read: fn(&[u8]),
        /// A body that makes the parser read all fields.
        body: &'static str,
        /// Fields that are described and not read: they are accepted and ignored.
        ignored: &'static [&'static str],
        /// Fields that are read and not described, beside those that are refused because they are not supported.
        hidden: &'static [&'static str],
        /// Whether vLLM's extensions of the chat API are read too, although the API does not have them.
        extends_chat: bool,
    }

    /// Fields of earlier releases that requests for vectors and scores refuse.
    const REMOVED_FIELDS: &[&str] = &["activation", "normalize", "padding", "softmax"];

    /// A request for vectors or scores.
    const POOLING: Compared = Compared {
        schema: "",
        read: |_| {},
        body: r#"{"input": "x"}"#,
        ignored: &["user"],
        hidden: REMOVED_FIELDS,
        extends_chat: false,
    };

    const COMPARED: &[Compared] = &[
        Compared {
            schema: "ChatRequest",
            read: |body| drop(ChatRequest::parse(body)),
            body: r#"{"messages": [{"role": "user", "content": "hi"}]}"#,
            ignored: &["length_penalty", "spaces_between_special_tokens", "user", "vllm_xargs"],
            hidden: &[],
            extends_chat: false,
        },
        Compared {
            schema: "CompletionRequest",
            read: |body| drop(CompletionRequest::parse(body)),
            body: r#"{"prompt": "x"}"#,
            ignored: &["length_penalty", "spaces_between_special_tokens", "user", "vllm_xargs"],
            hidden: &[],
            extends_chat: false,
        },
        Compared {
            schema: "ResponsesRequest",
            read: |body| drop(ResponsesRequest::parse(body)),
            body: r#"{"input": "x"}"#,
            ignored: &["spaces_between_special_tokens", "user"],
            hidden: &["prompt_cache_key", "safety_identifier", "service_tier"],
            extends_chat: true,
        },
        Compared {
            schema: "MessagesRequest",
            read: |body| drop(MessagesRequest::parse(body)),
            body: r#"{"max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}"#,
            ignored: &["metadata"],
            hidden: &["output_config", "output_format"],
            extends_chat: true,
        },
        Compared { schema: "EmbeddingRequest", read: |body| drop(EmbeddingRequest::parse(body, true)), ..POOLING },
        Compared {
            schema: "PoolingRequest",
            read: |body| drop(PoolingRequest::parse(body)),
            hidden: &["activation", "dimensions", "normalize", "padding", "softmax"],
            ..POOLING
        },
        Compared { schema: "ClassifyRequest", read: |body| drop(ClassifyRequest::parse(body)), ..POOLING },
        Compared {
            schema: "ScoreRequest",
            read: |body| drop(ScoreRequest::parse(body)),
            body: r#"{"queries": "x", "documents": "y"}"#,
            ..POOLING
        },
        Compared {
            schema: "RerankRequest",
            read: |body| drop(RerankRequest::parse(body)),
            body: r#"{"query": "x", "documents": ["y"]}"#,
            ..POOLING
        },
        Compared {
            schema: "CohereRequest",
            read: |body| drop(CohereRequest::parse(body)),
            body: r#"{"texts": ["x"]}"#,
            ignored: &[],
            hidden: &["images"],
            extends_chat: false,
        },
    ];

    #[test]
    fn the_fields_that_are_described_are_those_that_are_read() {
        let mut problems = vec![];
        let chat = properties(&DOCUMENT["components"]["schemas"]["ChatRequest"]);
        let unserved: BTreeSet<String> = unserved::names().map(str::to_owned).collect();
        for Compared { schema, read, body, ignored, hidden, extends_chat } in COMPARED {
            recorded::take();
            read(body.as_bytes());
            let mut read = recorded::take();
            let mut described = properties(&DOCUMENT["components"]["schemas"][schema]);
            assert!(!described.is_empty(), "{schema}");
            for (names, set) in [(ignored, &mut described), (hidden, &mut read)] {
                problems
                    .extend(names.iter().filter(|name| !set.remove(**name)).map(|name| format!("{schema}: no {name}")));
            }
            problems.extend(described.difference(&read).map(|name| format!("{schema}: {name} is not read")));
            let inherited = if *extends_chat { &chat } else { &unserved };
            let undescribed =
                read.difference(&described).filter(|name| !unserved.contains(*name) && !inherited.contains(*name));
            problems.extend(undescribed.map(|name| format!("{schema}: {name} is not described")));
        }
        assert!(problems.is_empty(), "{problems:#?}");
    }

    /// Whether a chat request with this field has sampling parameters.
    fn is_accepted(name: &str, value: &Value) -> bool {
        let mut body = json!({"messages": [], "logprobs": true});
        body[name] = value.clone();
        let config = ServerConfig { vocab_size: 16, ..ServerConfig::default() };
        ChatRequest::parse(body.to_string().as_bytes()).is_ok_and(|request| {
            let (field, max_tokens) = request.limit;
            let limit = OutputLimit { field, max_tokens, default: None, least: 1 };
            let logprobs = request.logprobs.map(|count| ("top_logprobs", count));
            Sampling::new(&request.common, limit, logprobs, &config).is_ok()
        })
    }

    #[test]
    fn the_bounds_that_are_described_are_those_that_are_checked() {
        let mut checked = 0;
        for schema in ["Logits", "Handling", "Answer"] {
            let properties = DOCUMENT["components"]["schemas"][schema]["properties"].as_object().unwrap();
            for (name, property) in properties.iter().filter(|(name, _)| *name != "length_penalty") {
                for (bound, beyond) in [("minimum", -1), ("maximum", 1), ("exclusiveMinimum", -1)] {
                    let Some(limit) = property[bound].as_i64() else { continue };
                    let is_inside = is_accepted(name, &limit.into());
                    assert_eq!(is_inside, bound != "exclusiveMinimum", "{name}: {bound} {limit}");
                    if let Some(outside) = limit.checked_add(beyond) {
                        assert!(!is_accepted(name, &outside.into()), "{name}: {outside}");
                        checked += 1;
                    }
                }
            }
        }
        assert!(checked >= 20, "{checked}");
    }

    #[test]
    fn every_reference_leads_somewhere() {
        let document = &*DOCUMENT;
        let mut references = vec![];
        having(document, "$ref", &mut references);
        assert!(references.len() > 100);
        for reference in references {
            let pointer = reference.as_str().unwrap().strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
    }

    #[test]
    fn every_operation_is_complete() {
        let document = &*DOCUMENT;
        let tags: Vec<_> = document["tags"].as_array().unwrap().iter().map(|tag| &tag["name"]).collect();
        let mut ids = BTreeSet::new();
        for (name, operation) in operations(document) {
            assert!(ids.insert(operation["operationId"].as_str().unwrap()), "{name}");
            assert!(operation["summary"].is_string(), "{name}");
            assert!(tags.contains(&&operation["tags"][0]), "{name}");
            let responses = operation["responses"].as_object().unwrap();
            let stored = name.contains("{response_id}");
            assert!(responses.contains_key("200"), "{name}");
            let open = operation["security"].as_array().is_some_and(Vec::is_empty);
            assert_eq!(responses.contains_key("401"), !open, "{name}");
            let body = &operation["requestBody"]["content"]["application/json"];
            assert_eq!(
                body["schema"].is_object(),
                name.starts_with("POST") && name != "POST /ping" && !stored && operation["tags"][0] != "Development",
                "{name}"
            );
            assert_eq!(body["schema"].is_object(), body["example"].is_object(), "{name}");
        }
    }

    #[test]
    fn a_document_carries_the_names_and_the_version_of_its_server() {
        let names = vec!["a".to_owned(), "\"b\"".to_owned()];
        let config =
            ServerConfig { served_model_names: names.clone(), version: "9.9".into(), ..ServerConfig::default() };
        let document: Value = serde_json::from_slice(page(&config).body()).unwrap();
        assert_eq!(document["info"]["version"], "9.9");
        assert!(document["paths"].get("/tokenizer_info").is_none());
        let config = ServerConfig { tokenizer_info: true, ..config };
        let document: Value = serde_json::from_slice(page(&config).body()).unwrap();
        assert!(document["paths"]["/tokenizer_info"].is_object());
        let mut examples = vec![];
        having(&document["components"]["schemas"], "Model", &mut examples);
        assert_eq!(examples[0]["examples"], serde_json::json!(names));
    }
}
