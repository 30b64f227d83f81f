//! The vectors that a model returns in place of tokens: embeddings, or the scores of a classifier.

use octavo_ops::GluKind;

use super::{ConfigError, Fields, MAX_HIDDEN, ModelConfig, hf, range};

/// Maximum number of classes, far above that of any published model.
const MAX_LABELS: usize = 1 << 16;

/// The vectors of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct VectorConfig {
    /// Rows of a text that become its vector.
    pub pooling: PooledRow,
    /// Products that follow, in order.
    pub head: Vec<HeadLayer>,
    /// Meaning of the vectors.
    pub kind: VectorKind,
}

/// Reduction of the rows of a text to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PooledRow {
    /// The first row, of the token `[CLS]`.
    First,
    /// The last row.
    Last,
    /// The mean of all rows.
    Mean,
}

/// Meaning of the vectors.
#[derive(Clone, Debug, PartialEq)]
pub enum VectorKind {
    /// Embeddings of texts.
    Embedding {
        /// Whether a client gets them scaled to length 1 unless it asks otherwise.
        normalise: bool,
        /// Numbers of dimensions to which they may be cut.
        dimensions: Dimensions,
    },
    /// Scores of classes.
    Scores {
        /// Names of the classes.
        labels: Vec<String>,
        /// Function that a client gets them through unless it asks otherwise.
        activation: ScoreActivation,
    },
}

/// Numbers of dimensions to which an embedding may be cut (matryoshka).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dimensions {
    /// Its own only.
    Whole,
    /// Any.
    Any,
    /// Some.
    Some(Vec<usize>),
}

/// Function of the scores of a classifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreActivation {
    /// None.
    Identity,
    /// Each score for itself.
    Sigmoid,
    /// All scores together.
    Softmax,
}

/// A product after pooling.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadLayer {
    /// Name of its tensors, without `.weight` and `.bias`.
    pub tensor: String,
    /// The tokens whose rows of the language-model head are the weight, if the checkpoint has no tensor for it.
    pub tokens: Option<TokenRows>,
    /// Number of outputs.
    pub outputs: usize,
    /// Whether it has a bias.
    pub bias: bool,
    /// Activation of the outputs.
    pub activation: Option<GluKind>,
    /// Norm of the outputs.
    pub norm: Option<HeadNorm>,
}

/// Rows of the language-model head that score a text (Qwen3-Reranker, which was trained to answer yes or no).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenRows {
    /// A row for each class.
    Each(Vec<usize>),
    /// The row of the second token minus that of the first. The logistic function of this score is the second of the two
    /// tokens' probabilities.
    Difference(usize, usize),
}

/// A layer norm of the head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadNorm {
    /// Name of its tensors, without `.weight` and `.bias`.
    pub tensor: String,
    /// Whether it has a bias.
    pub bias: bool,
}

impl VectorConfig {
    /// Returns the number of elements of a vector.
    pub fn size(&self, hidden_size: usize) -> usize {
        self.head.last().map_or(hidden_size, |layer| layer.outputs)
    }

    pub(super) fn check(&self, config: &ModelConfig) -> Result<(), ConfigError> {
        for layer in &self.head {
            range("the size of a vector", layer.outputs, 1, MAX_HIDDEN)?;
        }
        match &self.kind {
            VectorKind::Scores { labels, .. } => {
                let (found, expected) = (labels.len(), self.size(config.hidden_size));
                if found != expected {
                    return Err(ConfigError::Invalid(format!("{found} names of classes for {expected} scores")));
                }
            }
            VectorKind::Embedding { .. } => {}
        }
        Ok(())
    }
}

/// How the models of a family return vectors.
pub(crate) struct VectorReader {
    /// Rows of a text that become its vector, unless the checkpoint says otherwise.
    pub(crate) pooling: PooledRow,
    /// Returns the products of a classifier with so many classes.
    pub(crate) classifier: fn(&ModelConfig, &Fields<'_>, usize) -> Result<Vec<HeadLayer>, ConfigError>,
}

impl VectorReader {
    /// The vectors of decoders.
    pub(crate) const DECODER: Self = Self {
        pooling: PooledRow::Last,
        classifier: |_, fields, labels| {
            Ok(vec![HeadLayer { bias: false, tokens: token_rows(fields, labels)?, ..layer("score", labels) }])
        },
    };

    /// Reads the scores of a classifier.
    pub(crate) fn scores(&self, config: &ModelConfig, fields: &Fields<'_>) -> Result<VectorConfig, ConfigError> {
        let labels = labels(fields)?;
        let pooling = match fields.str("classifier_pooling")? {
            None => self.pooling,
            Some("cls") => PooledRow::First,
            Some("mean") => PooledRow::Mean,
            Some(other) => return Err(unknown_pooling(other)),
        };
        let head = (self.classifier)(config, fields, labels.len())?;
        let activation = score_activation(fields, labels.len())?;
        Ok(VectorConfig { pooling, head, kind: VectorKind::Scores { labels, activation } })
    }

    /// Reads the embeddings of a model, whose folder has these modules of sentence-transformers. Without modules, they are
    /// normalised.
    pub(crate) fn embedding(
        &self,
        fields: &Fields<'_>,
        modules: Option<&SentenceModules>,
    ) -> Result<VectorConfig, ConfigError> {
        let kind = VectorKind::Embedding {
            normalise: modules.is_none_or(|modules| modules.normalises),
            dimensions: dimensions(fields)?,
        };
        let pooling = modules.and_then(|modules| modules.pooling).unwrap_or(self.pooling);
        Ok(VectorConfig { pooling, head: modules.map(|modules| modules.dense.clone()).unwrap_or_default(), kind })
    }
}

/// The modules of a folder of sentence-transformers that follow the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SentenceModules {
    /// Reduction of the rows of a text.
    pub(crate) pooling: Option<PooledRow>,
    /// Products that follow.
    pub(crate) dense: Vec<HeadLayer>,
    /// Whether the vectors are scaled to length 1.
    pub(crate) normalises: bool,
}

/// Returns the error of an unknown pooling.
pub(crate) fn unknown_pooling(found: &str) -> ConfigError {
    ConfigError::Unsupported(format!("the pooling '{}' (supported: cls, last, mean)", found.escape_debug()))
}

/// Key of the tokens of the classes, and the key of their ids, which take their place once the tokenizer is known.
pub(crate) const CLASS_TOKENS: &str = "classifier_from_token";
pub(crate) const CLASS_TOKEN_IDS: &str = "classifier_token_ids";

/// Reads the tokens whose rows score a text, under vLLM's keys.
fn token_rows(fields: &Fields<'_>, labels: usize) -> Result<Option<TokenRows>, ConfigError> {
    let Some(ids) = fields.usizes(CLASS_TOKEN_IDS)? else { return Ok(None) };
    match ids[..] {
        [from, to] if is_difference(fields)? => Ok(Some(TokenRows::Difference(from, to))),
        _ if ids.len() == labels => Ok(Some(TokenRows::Each(ids))),
        _ => Err(ConfigError::Invalid(format!("'{CLASS_TOKENS}' has {} tokens for {labels} classes", ids.len()))),
    }
}

/// Returns whether the score is the difference of those of two tokens.
fn is_difference(fields: &Fields<'_>) -> Result<bool, ConfigError> {
    Ok(hf::flag(fields, "is_original_qwen3_reranker")? || fields.str("method")? == Some("from_2_way_softmax"))
}

/// Returns a product with a bias and nothing else.
pub(crate) fn layer(tensor: &str, outputs: usize) -> HeadLayer {
    HeadLayer { tensor: tensor.into(), tokens: None, outputs, bias: true, activation: None, norm: None }
}

/// Returns the activation of a name in `config.json` or in a module of sentence-transformers. Those have the path of a
/// Python class.
pub(crate) fn activation(name: &str) -> Result<Option<GluKind>, ConfigError> {
    match name.rsplit('.').next().unwrap_or(name) {
        "Identity" | "linear" => Ok(None),
        "Tanh" | "tanh" => Ok(Some(GluKind::Tanh)),
        "GELU" => Ok(Some(GluKind::Gelu)),
        "SiLU" => Ok(Some(GluKind::Silu)),
        other => hf::activation(other).map(Some),
    }
}

/// Reads the names of the classes. A configuration that has only their number names them by it.
pub(crate) fn labels(fields: &Fields<'_>) -> Result<Vec<String>, ConfigError> {
    let default = |index: usize| format!("LABEL_{index}");
    if is_difference(fields)? {
        return Ok(vec![default(0)]);
    }
    if let Some(ids) = fields.usizes(CLASS_TOKEN_IDS)? {
        return Ok((0..ids.len()).map(default).collect());
    }
    let Some(names) = fields.object("id2label")? else {
        let count = fields.usize("num_labels")?.unwrap_or(2);
        range("the number of classes", count, 1, MAX_LABELS)?;
        return Ok((0..count).map(default).collect());
    };
    let count = names.len();
    range("the number of classes", count, 1, MAX_LABELS)?;
    (0..count).map(|index| Ok(names.str(&index.to_string())?.map_or_else(|| default(index), str::to_owned))).collect()
}

/// Reads the function of the scores: that of sentence-transformers if it is given, else sigmoid for one score and
/// softmax for several.
pub(crate) fn score_activation(fields: &Fields<'_>, labels: usize) -> Result<ScoreActivation, ConfigError> {
    const OLD: &str = "sbert_ce_default_activation_function";
    let given = match fields.object("sentence_transformers")? {
        Some(settings) => settings.str("activation_fn")?,
        None => fields.str(OLD)?,
    };
    match given.map(|path| path.rsplit('.').next().unwrap_or(path)) {
        None if labels == 1 => Ok(ScoreActivation::Sigmoid),
        None => Ok(ScoreActivation::Softmax),
        Some("Sigmoid") => Ok(ScoreActivation::Sigmoid),
        Some("Softmax") => Ok(ScoreActivation::Softmax),
        Some("Identity") => Ok(ScoreActivation::Identity),
        Some(other) => Err(ConfigError::Unsupported(format!("the activation '{}' of scores", other.escape_debug()))),
    }
}

/// Reads the numbers of dimensions to which embeddings may be cut.
pub(crate) fn dimensions(fields: &Fields<'_>) -> Result<Dimensions, ConfigError> {
    match fields.usizes("matryoshka_dimensions")? {
        Some(sizes) => Ok(Dimensions::Some(sizes)),
        None if hf::flag(fields, "is_matryoshka")? => Ok(Dimensions::Any),
        None => Ok(Dimensions::Whole),
    }
}
