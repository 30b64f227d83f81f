//! The answer of POST /classify.

use std::sync::Arc;

use axum::response::Response;
use serde::Serialize;

use crate::api::pooling::answer::{Answer, Finish, Head};
use crate::app::App;
use crate::config::PoolingKind;
use crate::error::ApiError;

/// The labels of texts.
pub(crate) struct Classification {
    pub(crate) head: Head,
    pub(crate) app: Arc<App>,
    pub(crate) finish: Finish,
}

#[derive(Serialize)]
struct Item<'a> {
    index: usize,
    label: Option<&'a str>,
    probs: &'a [f32],
    num_classes: usize,
}

impl Answer for Classification {
    fn respond(self: Box<Self>, mut results: Vec<Vec<f32>>) -> Result<Response, ApiError> {
        let labels = match &self.app.pooling.kind {
            PoolingKind::Classifier { labels, .. } => &labels[..],
            PoolingKind::Embedder { .. } => &[],
        };
        results.iter_mut().for_each(|scores| self.finish.apply(scores));
        self.head.list(results.iter().enumerate().map(|(index, scores)| Item {
            index,
            label: likeliest(scores).and_then(|label| labels.get(label)).map(String::as_str),
            probs: scores,
            num_classes: scores.len(),
        }))
    }
}

/// The index of the highest score, the first of several.
fn likeliest(scores: &[f32]) -> Option<usize> {
    (0..scores.len()).reduce(|best, index| if scores[index] > scores[best] { index } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_highest_scores_wins() {
        assert_eq!(likeliest(&[0.1, 0.7, 0.7]), Some(1));
        assert_eq!(likeliest(&[-3.0]), Some(0));
        assert_eq!(likeliest(&[]), None);
    }
}
