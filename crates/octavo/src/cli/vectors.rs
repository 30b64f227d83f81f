//! Flags of models that return vectors.

use clap::{Args, ValueEnum};
use octavo_models::Runner;

use crate::cli::values::{self, JsonObject};

/// Vectors that a model is made to return.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Convert {
    #[default]
    Auto,
    None,
    Embed,
    Classify,
}

/// Models that return embeddings or scores.
#[derive(Debug, Args)]
#[command(next_help_heading = "Embeddings and scores")]
pub(crate) struct VectorArgs {
    /// Use of the model: auto, generate or pooling.
    ///
    /// With `auto`, encoders (BERT), classifiers, models without a head and folders of sentence-transformers return
    /// vectors, and other models generate text.
    #[arg(long, value_parser = values::runner(), default_value = "auto", hide_possible_values = true)]
    pub(crate) runner: Runner,

    /// Vectors of a model that was not made for them: auto, none, embed or classify.
    ///
    /// `embed` returns the hidden state of the last token. `classify` needs a model with classes, or the tokens of
    /// `classifier_from_token` in --hf-overrides.
    #[arg(long, value_enum, default_value_t = Convert::Auto, hide_possible_values = true)]
    pub(crate) convert: Convert,

    /// Reduction of the rows of a text, in place of the model's own.
    ///
    /// Keys: `pooling_type` (CLS, LAST or MEAN) and `normalize`.
    #[arg(long, alias = "override-pooler-config", value_parser = values::json_object, value_name = "JSON")]
    pub(crate) pooler_config: Option<JsonObject>,

    /// Values in place of those of the model's config.json on which embeddings and scores depend.
    ///
    /// Keys: architectures, classifier_from_token, id2label, is_matryoshka, is_original_qwen3_reranker,
    /// matryoshka_dimensions, method, num_labels.
    #[arg(long, value_parser = values::json_object, value_name = "JSON")]
    pub(crate) hf_overrides: Option<JsonObject>,
}
