//! The configuration of models that return vectors or scores instead of text.

use std::collections::BTreeMap;

/// A model that returns vectors or scores instead of text, and the form of its prompts.
///
/// The maximum length of a prompt is [`max_model_len`](crate::ServerConfig::max_model_len). The engine returns raw
/// vectors and scores; they are truncated, normalised and activated here.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolingConfig {
    /// The results of the model.
    pub kind: PoolingKind,
    /// Whether the engine accepts [`Pooling::Tokens`](octavo_engine::Pooling::Tokens), which returns a result for each
    /// token: a vector of [`embedding_size`](crate::ServerConfig::embedding_size) elements, or a score for each label.
    pub tokens: bool,
    /// The form in which two texts become the prompt of a classifier.
    pub pairs: PairFormat,
    /// Whether texts are converted to lower case before they are tokenized: `do_lower_case` of
    /// `sentence_bert_config.json`.
    pub lowercase: bool,
    /// Texts that are put before an input, by name: `prompts` of `config_sentence_transformers.json`. A request of
    /// POST /v2/embed names one in `input_type`; no other route adds them.
    pub prompts: BTreeMap<String, String>,
}

impl PoolingConfig {
    /// The vectors of a model that generates text: the hidden states of the last token. Some clients ask for fewer
    /// dimensions of any model.
    pub(crate) fn of_generative() -> Self {
        Self {
            kind: PoolingKind::Embedder { normalise: true, matryoshka: Matryoshka::Any },
            tokens: false,
            pairs: PairFormat::Joined,
            lowercase: false,
            prompts: BTreeMap::new(),
        }
    }

    /// Whether the model compares texts: an embedder by the cosine of two vectors, a classifier with one label by its
    /// score.
    pub(crate) fn compares_texts(&self) -> bool {
        match &self.kind {
            PoolingKind::Embedder { .. } => true,
            PoolingKind::Classifier { labels, .. } => labels.len() == 1,
        }
    }
}

/// The results of a pooling model.
#[derive(Clone, Debug, PartialEq)]
pub enum PoolingKind {
    /// Vectors of [`embedding_size`](crate::ServerConfig::embedding_size) elements.
    Embedder {
        /// Whether vectors are scaled to length 1, unless a request sets `use_activation`.
        normalise: bool,
        /// The shorter vectors that a request may ask for.
        matryoshka: Matryoshka,
    },
    /// A score for each label. A classifier with one label also scores pairs of texts.
    Classifier {
        /// The names of the labels, in the order of the scores.
        labels: Vec<String>,
        /// The function applied to the scores, unless a request sets `use_activation` to false.
        activation: Activation,
    },
}

/// The numbers of dimensions to which the vectors of a model may be truncated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matryoshka {
    /// The model was not trained for it: requests with `dimensions` are refused.
    Unsupported,
    /// Any number up to that of the model.
    Any,
    /// These numbers.
    Dimensions(Vec<usize>),
}

/// A function of the scores of a classifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The scores themselves.
    Identity,
    /// The logistic function of each score.
    Sigmoid,
    /// The softmax of all scores.
    Softmax,
}

/// The form in which two texts become one prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairFormat {
    /// The template for pairs in `tokenizer.json`.
    Template {
        /// Whether the model distinguishes the texts by token types, as BERT does: the engine's requests then have a
        /// [`second_text`](octavo_engine::Request::second_text).
        token_types: bool,
    },
    /// The second text follows the first without a separator, as in vLLM's rerankers made from decoders.
    Joined,
    /// The chat template of [`TextModel`](crate::TextModel), with two messages of the roles `query` and `document`. vLLM
    /// uses only a template that the operator gives, because many checkpoints inherit one from another model.
    ChatTemplate,
}
