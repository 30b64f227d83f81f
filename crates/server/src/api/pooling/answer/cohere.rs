//! The answer of POST /v2/embed.

use axum::response::Response;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::api::pooling::answer::{Answer, Finish};
use crate::api::pooling::request::{ByteOrder, CohereType, ElementType, Encoding, Format};
use crate::error::ApiError;
use crate::json;
use crate::json::InTurns;
use crate::workers::take_turns;

/// The encoding of vectors in Base64.
const BASE64: Encoding = Encoding { format: Format::Base64, element: ElementType::Float32, order: ByteOrder::Little };

/// Vectors in the encodings of Cohere's API.
pub(crate) struct CohereEmbeddings {
    pub(crate) id: String,
    pub(crate) types: Vec<CohereType>,
    pub(crate) finish: Finish,
    /// Number of elements, if not all.
    pub(crate) dimensions: Option<usize>,
    /// The texts of the request, if it has texts.
    pub(crate) texts: Option<Vec<String>>,
    pub(crate) prompt_tokens: usize,
}

#[derive(Serialize)]
struct Embeddings<'a> {
    id: &'a str,
    embeddings: ByType<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    texts: Option<&'a [String]>,
    meta: Value,
    response_type: &'static str,
}

impl Answer for CohereEmbeddings {
    fn respond(self: Box<Self>, mut results: Vec<Vec<f32>>) -> Result<Response, ApiError> {
        for vector in &mut results {
            take_turns()?;
            vector.truncate(self.dimensions.unwrap_or(usize::MAX));
            self.finish.apply(vector);
        }
        let body = json::written(&Embeddings {
            id: &self.id,
            embeddings: ByType { types: &self.types, vectors: &results },
            texts: self.texts.as_deref(),
            meta: json!({
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": self.prompt_tokens, "image_tokens": 0},
            }),
            response_type: "embeddings_by_type",
        })?;
        Ok(json::response(body))
    }
}

/// The vectors in each of these encodings.
struct ByType<'a> {
    types: &'a [CohereType],
    vectors: &'a [Vec<f32>],
}

impl Serialize for ByType<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.types.len()))?;
        let vectors = self.vectors.iter();
        for kind in self.types {
            match kind {
                CohereType::Float => map.serialize_entry("float", &InTurns(vectors.clone()))?,
                CohereType::Binary => {
                    let signed = vectors.clone().map(|vector| bits(vector).map(|byte| i16::from(byte) - 128));
                    map.serialize_entry("binary", &InTurns(signed.map(|bytes| bytes.collect::<Vec<_>>())))?;
                }
                CohereType::UBinary => {
                    let unsigned = vectors.clone().map(|vector| bits(vector).collect::<Vec<_>>());
                    map.serialize_entry("ubinary", &InTurns(unsigned))?;
                }
                CohereType::Base64 => {
                    map.serialize_entry("base64", &InTurns(vectors.clone().map(|vector| BASE64.base64(vector))))?;
                }
            }
        }
        map.end()
    }
}

/// A bit for each element that is not negative, the first one highest.
fn bits(vector: &[f32]) -> impl Iterator<Item = u8> {
    vector
        .chunks(8)
        .map(|eight| eight.iter().enumerate().fold(0, |byte, (index, &x)| byte | (u8::from(x >= 0.0) << (7 - index))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_packed_from_the_highest() {
        let vector = [1.0, -1.0, 0.0, -0.5, -2.0, -1.0, -1.0, 3.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(bits(&vector).collect::<Vec<_>>(), [0b1010_0001, 0b0111_1111]);
        let by_type = ByType { types: &[CohereType::Binary, CohereType::UBinary], vectors: &[vector.to_vec()] };
        let json = serde_json::to_value(&by_type).unwrap();
        assert_eq!(json, json!({"binary": [[33, -1]], "ubinary": [[161, 127]]}));
    }
}
