//! The answers of POST /v1/embeddings and POST /pooling: a list of vectors, or their bytes.

use std::ops::Range;
use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use http::HeaderValue;
use http::header::CONTENT_TYPE;
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::api::pooling::answer::{Answer, Finish};
use crate::api::pooling::request::{Encoding, Format};
use crate::api::shared::response::{Usage, UsageBody, UsageDetails};
use crate::error::ApiError;
use crate::json;
use crate::json::InTurns;
use crate::workers::take_turns;

/// The fields that the lists of all routes share.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: Arc<str>,
    pub(crate) prompt_tokens: usize,
}

#[derive(Serialize)]
struct List<'a, D> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    data: D,
    usage: UsageBody,
}

impl Head {
    /// The response with a list of these data.
    pub(crate) fn list<D: Serialize>(&self, data: impl Iterator<Item = D> + Clone) -> Result<Response, ApiError> {
        let usage = Usage { prompt_tokens: self.prompt_tokens, ..Usage::default() };
        let body = json::written(&List {
            id: &self.id,
            object: "list",
            created: self.created,
            model: &self.model,
            data: InTurns(data),
            usage: UsageDetails::default().whole(usage),
        })?;
        Ok(json::response(body))
    }
}

/// The name of a vector in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VectorKind {
    Embedding,
    Pooling,
}

/// A list of vectors.
pub(crate) struct Vectors {
    pub(crate) head: Head,
    pub(crate) kind: VectorKind,
    pub(crate) encoding: Encoding,
    pub(crate) finish: Finish,
    /// Number of elements, if not all.
    pub(crate) dimensions: Option<usize>,
    /// Numbers of tokens of the prompts, if each token has a vector.
    pub(crate) tokens: Option<Vec<usize>>,
}

impl Answer for Vectors {
    fn respond(self: Box<Self>, mut results: Vec<Vec<f32>>) -> Result<Response, ApiError> {
        let widths = self.finish(&mut results)?;
        match self.encoding.format {
            Format::Numbers | Format::Base64 => {
                let items = results.iter().zip(&widths).enumerate();
                self.head.list(items.map(|(index, (result, &width))| self.item(index, result, width)))
            }
            Format::Bytes | Format::BytesOnly => self.bytes(&results, &widths),
        }
    }
}

impl Vectors {
    /// Finishes the results and returns the number of elements of the vectors of each.
    fn finish(&self, results: &mut [Vec<f32>]) -> Result<Vec<usize>, ApiError> {
        let mut widths = Vec::with_capacity(results.len());
        for (index, result) in results.iter_mut().enumerate() {
            take_turns()?;
            let rows = self.tokens.as_ref().map_or(1, |tokens| tokens.get(index).copied().unwrap_or(0));
            let width = result.len().checked_div(rows).filter(|width| width * rows == result.len());
            let Some(width) = width.filter(|&width| width > 0) else {
                tracing::error!(rows, elements = result.len(), "the engine returned vectors of unequal lengths");
                return Err(ApiError::internal());
            };
            if rows == 1 {
                result.truncate(self.dimensions.unwrap_or(usize::MAX));
            }
            result.chunks_mut(width).for_each(|row| self.finish.apply(row));
            widths.push(width.min(result.len()));
        }
        Ok(widths)
    }

    fn item<'a>(&self, index: usize, result: &'a [f32], width: usize) -> Item<'a> {
        let vector = match (self.encoding.format, &self.tokens) {
            (Format::Base64, _) => Vector::Base64(self.encoding, result),
            (_, None) => Vector::Numbers(result),
            (_, Some(_)) => Vector::Rows(result, width),
        };
        match self.kind {
            VectorKind::Embedding => Item::Embedding { index, object: "embedding", embedding: vector },
            VectorKind::Pooling => Item::Pooling { index, object: "pooling", data: vector },
        }
    }

    fn bytes(&self, results: &[Vec<f32>], widths: &[usize]) -> Result<Response, ApiError> {
        let (mut body, mut places) = (vec![], Vec::with_capacity(results.len()));
        for result in results {
            take_turns()?;
            let start = body.len();
            self.encoding.append(result, &mut body);
            places.push(start..body.len());
        }
        let mut response = ([(CONTENT_TYPE, "application/octet-stream")], body).into_response();
        if self.encoding.format == Format::Bytes {
            let metadata = self.metadata(results, widths, &places);
            let value = HeaderValue::from_str(&metadata).map_err(|error| {
                tracing::error!(%error, "the description of vectors is no header");
                ApiError::internal()
            })?;
            response.headers_mut().insert("metadata", value);
        }
        Ok(response)
    }

    /// The description of the bytes of vectors, in ASCII.
    fn metadata(&self, results: &[Vec<f32>], widths: &[usize], places: &[Range<usize>]) -> String {
        let item = |(index, place): (usize, &Range<usize>)| {
            let (width, elements) = (widths[index], results[index].len());
            let shape = if self.tokens.is_some() { vec![elements / width, width] } else { vec![elements] };
            json!({
                "index": index,
                "embed_dtype": self.encoding.element.name(),
                "endianness": self.encoding.order.name(),
                "start": place.start,
                "end": place.end,
                "shape": shape,
            })
        };
        let tokens = self.head.prompt_tokens;
        let metadata = json!({
            "id": self.head.id,
            "created": self.head.created,
            "model": self.head.model,
            "data": places.iter().enumerate().map(item).collect::<Vec<_>>(),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        });
        ascii(&metadata.to_string())
    }
}

/// JSON in which other characters than those of ASCII are escaped.
fn ascii(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}' => escaped.push_str("\\u007f"),
            _ if c.is_ascii() => escaped.push(c),
            _ => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| escaped.push_str(&format!("\\u{unit:04x}"))),
        }
    }
    escaped
}

#[derive(Serialize)]
#[serde(untagged)]
enum Item<'a> {
    Embedding { index: usize, object: &'static str, embedding: Vector<'a> },
    Pooling { index: usize, object: &'static str, data: Vector<'a> },
}

/// A vector as JSON has it.
enum Vector<'a> {
    Numbers(&'a [f32]),
    /// Vectors of so many elements.
    Rows(&'a [f32], usize),
    Base64(Encoding, &'a [f32]),
}

impl Serialize for Vector<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Numbers(vector) => vector.serialize(serializer),
            Self::Rows(vectors, width) => serializer.collect_seq(vectors.chunks(*width)),
            Self::Base64(encoding, vector) => serializer.serialize_str(&encoding.base64(vector)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_ascii() {
        let json = json!({"a": "é\u{1f600}\u{7f}\"", "b": [1]}).to_string();
        let escaped = ascii(&json);
        assert!(HeaderValue::from_str(&escaped).is_ok(), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap().to_string(), json);
    }
}
