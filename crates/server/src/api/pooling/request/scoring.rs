//! The bodies of the routes that compare texts: POST /score and POST /rerank.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::api::completions::request::MAX_PROMPTS;
use crate::api::pooling::request::PoolingFields;
use crate::api::shared::fields::{JsonFields, Limited, request_fields};
use crate::error::{ApiError, FieldError};

/// The names of the two lists of texts, in the order in which vLLM tries them.
const SPELLINGS: [(&str, &str); 4] =
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")];

request_fields! {
    /// The fields that both routes share.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub(crate) struct ScoringFields |fields| {
        Scoring {
            /// Variables of the chat template.
            template_kwargs: Map<String, Value> => (template_kwargs(fields)) {
                /// Further variables of the template.
                chat_template_kwargs: Option<Map<String, Value>>,
                /// A variable of the chat template, if pairs have one.
                instruction: Option<String>,
            },
            common: PoolingFields => (PoolingFields::checked(fields)),
            /// Most tokens of a query; 0: no limit.
            max_tokens_per_query: i64 = 0 {"minimum": 0},
            /// Most tokens of a document; 0: no limit.
            max_tokens_per_doc: i64 = 0 {"minimum": 0},
        }
    }
}

fn template_kwargs(fields: &mut JsonFields<'_>) -> Map<String, Value> {
    let mut kwargs: Map<String, Value> = fields.get("chat_template_kwargs").unwrap_or_default();
    if let Some(instruction) = fields.get::<String>("instruction") {
        kwargs.entry("instruction").or_insert(instruction.into());
    }
    kwargs
}

request_fields! {
    /// A well-formed request for scores.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct ScoreRequest |fields, first: &str, second: &str| {
        ScoreRequest {
            fields: ScoringFields => (ScoringFields::read(fields)),
            queries: Vec<String> => (texts(fields, first)) {
                queries: Option<Value> {"$ref": "#/components/schemas/ScoredTexts"},
            },
            documents: Vec<String> => (texts(fields, second)) {
                documents: Option<Value> {"$ref": "#/components/schemas/ScoredTexts"},
            },
        }
    }
}

impl ScoreRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        let has = |name| fields.raw(name).is_some();
        let whole = SPELLINGS.into_iter().find(|(first, second)| has(first) && has(second));
        let half = SPELLINGS.into_iter().find(|(first, second)| has(first) || has(second));
        let (first, second) = whole.or(half).unwrap_or(SPELLINGS[0]);
        let request = Self::read(&mut fields, first, second);
        fields.finish()?;
        check_lengths(request.queries.len(), request.documents.len())?;
        Ok(request)
    }
}

/// Whether a body has a field of [`ScoreRequest`].
pub(crate) fn names_queries(fields: &JsonFields<'_>) -> bool {
    SPELLINGS.into_iter().any(|(first, _)| fields.raw(first).is_some())
}

fn check_lengths(queries: usize, documents: usize) -> Result<(), ApiError> {
    Err(ApiError::bad_request(match (queries, documents) {
        (2.., _) if queries != documents => "Input lengths must be either 1:1, 1:N or N:N",
        (0, _) => "At least one text element must be given",
        (_, 0) => "At least one text_pair element must be given",
        _ => return Ok(()),
    }))
}

request_fields! {
    /// A well-formed request for a ranking.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct RerankRequest |fields| {
        RerankRequest {
            query: String => (query(fields)) {
                query: Option<Value> {"$ref": "#/components/schemas/ScoredText"},
            },
            fields: ScoringFields => (ScoringFields::read(fields)),
            documents: Vec<String> => (texts(fields, "documents")) {
                documents: Option<Value> {"$ref": "#/components/schemas/ScoredTexts"},
            },
            /// Number of results; 0: all.
            top_n: i64 = 0 {"minimum": 0},
        }
    }
}

fn query(fields: &mut JsonFields<'_>) -> String {
    let query = fields.raw("query").map(text);
    match &query {
        None => fields.missing("query"),
        Some(None) => fields.error("query", "string_type", NO_TEXT),
        Some(Some(_)) => {}
    }
    query.flatten().unwrap_or_default()
}

impl RerankRequest {
    /// Reads a body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = JsonFields::parse(body)?;
        let request = Self::read(&mut fields);
        if request.top_n < 0 {
            fields.error("top_n", "greater_than_equal", "Input should be greater than or equal to 0");
        }
        fields.finish()?;
        check_lengths(1, request.documents.len())?;
        Ok(request)
    }
}

const NO_TEXT: &str = "Input should be a valid string, or an object with text and nothing else";

/// The texts of a field, which has one or a list of them.
fn texts(fields: &mut JsonFields<'_>, name: &str) -> Vec<String> {
    let Some(raw) = fields.raw(name) else {
        fields.missing(name);
        return vec![];
    };
    if !raw.get().starts_with('[') {
        let one = text(raw);
        if one.is_none() {
            fields.error(name, "string_type", NO_TEXT);
        }
        return one.into_iter().collect();
    }
    let listed: Limited<&RawValue, MAX_PROMPTS> = serde_json::from_str(raw.get()).unwrap_or_default();
    let listed = fields.within(name, listed);
    let mut texts = Vec::with_capacity(listed.len());
    for (index, raw) in listed.into_iter().enumerate() {
        match text(raw) {
            Some(text) => texts.push(text),
            None => {
                let location = vec![name.to_owned(), index.to_string()];
                fields.absorb(FieldError::new("string_type", location, NO_TEXT, raw.get()));
            }
        }
    }
    texts
}

/// A document as an object. Other models of vLLM take images in its content.
#[derive(Deserialize)]
struct Document {
    text: Option<String>,
    content: Option<Vec<Part>>,
}

#[derive(Deserialize)]
struct Part {
    r#type: String,
    text: Option<String>,
}

/// The text of a string or of an object with text; `None` for anything else.
fn text(raw: &RawValue) -> Option<String> {
    if raw.get().starts_with('"') {
        return serde_json::from_str(raw.get()).ok();
    }
    match serde_json::from_str(raw.get()).ok()? {
        Document { text: Some(text), content: None } => Some(text),
        Document { text: None, content: Some(parts) } => {
            let texts: Option<Vec<String>> =
                parts.into_iter().map(|part| part.text.filter(|_| part.r#type == "text")).collect();
            texts.map(|texts| texts.join("\n"))
        }
        Document { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(body: &str) -> Result<ScoreRequest, String> {
        ScoreRequest::parse(body.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn texts_have_four_pairs_of_names() {
        for (first, second) in SPELLINGS {
            let request = score(&format!(r#"{{"{first}": "q", "{second}": ["a", "b"]}}"#)).unwrap();
            assert_eq!((request.queries, request.documents), (vec!["q".into()], vec!["a".into(), "b".into()]));
        }
        let both = score(r#"{"queries": "q", "items": "i", "text_1": "a", "text_2": "b"}"#).unwrap();
        assert_eq!((both.queries, both.documents), (vec!["q".to_owned()], vec!["i".to_owned()]));
        for (body, field) in [("{}", "queries"), (r#"{"text_2": "a"}"#, "text_1"), (r#"{"queries": "a"}"#, "documents")]
        {
            let error = score(body).unwrap_err();
            assert!(error.contains(&format!("('body', '{field}')")) && error.contains("Field required"), "{error}");
        }
    }

    #[test]
    fn a_document_may_be_an_object() {
        let request = RerankRequest::parse(
            br#"{"query": "q", "documents": ["a", {"text": "b"}, {"content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]}]}"#,
        )
        .unwrap();
        assert_eq!(request.documents, ["a", "b", "c\nd"]);
        for document in [
            "1",
            "null",
            "{}",
            r#"{"text": 1}"#,
            r#"{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}"#,
            r#"{"content": [{"type": "image_url", "text": "x"}]}"#,
        ] {
            let body = format!(r#"{{"query": "q", "documents": ["a", {document}]}}"#);
            let error = RerankRequest::parse(body.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("('body', 'documents', 1)"), "{document}: {error}");
        }
    }

    #[test]
    fn lengths_are_one_to_many_or_equal() {
        for (body, message) in [
            (r#"{"queries": ["a", "b"], "documents": ["c"]}"#, "Input lengths must be either 1:1, 1:N or N:N"),
            (r#"{"queries": [], "documents": ["c"]}"#, "At least one text element must be given"),
            (r#"{"queries": "a", "documents": []}"#, "At least one text_pair element must be given"),
        ] {
            assert_eq!(score(body).unwrap_err(), message);
        }
        let many = format!(r#"{{"queries": "a", "documents": [{}"b"]}}"#, r#""b","#.repeat(MAX_PROMPTS));
        assert!(score(&many).unwrap_err().contains("documents accepts at most 1024 elements, got 1025."));
    }

    #[test]
    fn an_instruction_is_a_variable_of_the_template() {
        let body = |kwargs: &str| format!(r#"{{"queries": "q", "documents": "d", "instruction": "i"{kwargs}}}"#);
        let kwargs = |body: &str| Value::Object(score(body).unwrap().fields.template_kwargs);
        assert_eq!(kwargs(&body("")), serde_json::json!({"instruction": "i"}));
        let own = body(r#", "chat_template_kwargs": {"instruction": "own", "x": 1}"#);
        assert_eq!(kwargs(&own), serde_json::json!({"instruction": "own", "x": 1}));
    }

    #[test]
    fn a_ranking_has_a_query_and_a_number_of_results() {
        let parse = |body: &str| RerankRequest::parse(body.as_bytes()).map_err(|error| error.to_string());
        assert_eq!(parse(r#"{"query": "q", "documents": "d", "top_n": 2}"#).unwrap().top_n, 2);
        for (body, message) in [
            (r#"{"documents": "d"}"#, "Field required"),
            (r#"{"query": ["q"], "documents": "d"}"#, "('body', 'query')"),
            (r#"{"query": "q"}"#, "('body', 'documents')"),
            (r#"{"query": "q", "documents": "d", "top_n": -1}"#, "Input should be greater than or equal to 0"),
            (r#"{"query": "q", "documents": []}"#, "At least one text_pair element must be given"),
        ] {
            let error = parse(body).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
