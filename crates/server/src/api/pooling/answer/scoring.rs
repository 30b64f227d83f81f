//! The answers of POST /score and POST /rerank.

use std::sync::Arc;

use axum::response::Response;
use serde::Serialize;

use super::finish::cosine;
use crate::api::pooling::answer::{Answer, Finish, Head};
use crate::api::shared::response::Null;
use crate::error::ApiError;
use crate::json;
use crate::json::InTurns;

/// How the results of prompts become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// The prompts are so many queries and then documents. One query is compared with all documents.
    Cosine { queries: usize },
    /// Each prompt is a pair with one score.
    Pairs(Finish),
}

impl Comparison {
    /// The scores of the documents, in their order.
    fn scores(self, mut results: Vec<Vec<f32>>) -> Result<Vec<f32>, ApiError> {
        match self {
            Self::Cosine { queries } => {
                let (queries, documents) = results.split_at(queries.min(results.len()));
                let query = |index: usize| queries.get(if queries.len() == 1 { 0 } else { index });
                let scores = documents.iter().enumerate();
                Ok(scores.filter_map(|(index, document)| Some(cosine(query(index)?, document))).collect())
            }
            Self::Pairs(finish) => {
                let one = |result: &mut Vec<f32>| {
                    finish.apply(result);
                    result.first().copied()
                };
                results.iter_mut().map(one).collect::<Option<_>>().ok_or_else(|| {
                    tracing::error!("the engine returned no score of a pair");
                    ApiError::internal()
                })
            }
        }
    }
}

/// The scores of pairs.
pub(crate) struct Scores {
    pub(crate) head: Head,
    pub(crate) comparison: Comparison,
}

#[derive(Serialize)]
struct Score {
    index: usize,
    object: &'static str,
    score: f32,
}

impl Answer for Scores {
    fn respond(self: Box<Self>, results: Vec<Vec<f32>>) -> Result<Response, ApiError> {
        let scores = self.comparison.scores(results)?;
        self.head.list(scores.into_iter().enumerate().map(|(index, score)| Score { index, object: "score", score }))
    }
}

/// Documents in the order of their scores.
pub(crate) struct Ranking {
    pub(crate) head: Head,
    pub(crate) comparison: Comparison,
    pub(crate) documents: Vec<String>,
    /// Number of results.
    pub(crate) top: usize,
}

#[derive(Serialize)]
struct Ranked<'a, R> {
    id: &'a str,
    model: &'a Arc<str>,
    usage: RankedUsage,
    results: R,
}

#[derive(Serialize)]
struct RankedUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

#[derive(Serialize)]
struct RankedDocument<'a> {
    index: usize,
    document: Document<'a>,
    relevance_score: f32,
}

#[derive(Serialize)]
struct Document<'a> {
    text: &'a str,
    multi_modal: Null,
}

impl Answer for Ranking {
    fn respond(self: Box<Self>, results: Vec<Vec<f32>>) -> Result<Response, ApiError> {
        let scores = self.comparison.scores(results)?;
        let order = ranked(&scores, self.top);
        let results = order.iter().map(|&index| RankedDocument {
            index,
            document: Document { text: self.documents.get(index).map_or("", String::as_str), multi_modal: Null },
            relevance_score: scores[index],
        });
        let Head { id, model, prompt_tokens, .. } = &self.head;
        let usage = RankedUsage { prompt_tokens: *prompt_tokens, total_tokens: *prompt_tokens };
        json::written(&Ranked { id, model, usage, results: InTurns(results) }).map(json::response)
    }
}

/// The indices of the highest scores, in descending order; equal ones in the order of the documents.
fn ranked(scores: &[f32], top: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(top);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_query_or_as_many_as_documents() {
        let vectors = || vec![vec![1.0, 0.0], vec![0.0, 2.0], vec![3.0, 0.0], vec![0.0, 4.0]];
        assert_eq!(Comparison::Cosine { queries: 1 }.scores(vectors()).unwrap(), [0.0, 1.0, 0.0]);
        assert_eq!(Comparison::Cosine { queries: 2 }.scores(vectors()).unwrap(), [1.0, 1.0]);
        let pairs = Comparison::Pairs(Finish::Sigmoid);
        assert_eq!(pairs.scores(vec![vec![0.0], vec![1e9]]).unwrap(), [0.5, 1.0]);
        assert_eq!(pairs.scores(vec![vec![]]).unwrap_err().status(), 500);
    }

    #[test]
    fn equal_scores_keep_their_order() {
        assert_eq!(ranked(&[0.5, 0.9, 0.5, 1.0], usize::MAX), [3, 1, 0, 2]);
        assert_eq!(ranked(&[0.5, 0.9, 0.5, 1.0], 3), [3, 1, 0]);
        assert_eq!(ranked(&[], 3), [0_usize; 0]);
    }
}
