//! Models that return embeddings or scores: what the flags say of them, and what the server needs to know.

use anyhow::{Context, Result, bail};
use octavo_engine::EngineConfig;
use octavo_models::{
    Checkpoint, Dimensions, OpenOptions, PooledRow, Runner, ScoreActivation, SentenceSettings, VectorConfig, VectorKind,
};
use octavo_ops::Program;
use octavo_server::{Activation, Matryoshka, PairFormat, PoolingConfig, PoolingKind};
use serde_json::{Map, Value};
use tracing::info;

use crate::cli::{ComposeArgs, Convert, VectorArgs};

/// Keys of `config.json` that may be overridden: those that only vectors depend on.
const OVERRIDES: [&str; 8] = [
    "architectures",
    "classifier_from_token",
    "id2label",
    "is_matryoshka",
    "is_original_qwen3_reranker",
    "matryoshka_dimensions",
    "method",
    "num_labels",
];

/// Returns what the flags say of a checkpoint.
pub(crate) fn open_options(args: &VectorArgs) -> Result<OpenOptions> {
    let overrides = args.hf_overrides.as_ref().map(|object| object.0.clone()).unwrap_or_default();
    if let Some(key) = overrides.keys().find(|key| !OVERRIDES.contains(&key.as_str())) {
        bail!(
            "--hf-overrides: the key '{key}' changes what the model computes, and only the model's own configuration is \
             supported (keys that may be given: {})",
            OVERRIDES.join(", ")
        );
    }
    let mut options = OpenOptions { overrides, runner: runner(args)?, ..OpenOptions::default() };
    if let Some(object) = &args.pooler_config {
        pooler(&mut options, &object.0).context("--pooler-config")?;
    }
    Ok(options)
}

fn runner(args: &VectorArgs) -> Result<Runner> {
    match (args.runner, args.convert) {
        (Runner::Generate, Convert::Embed | Convert::Classify) => {
            bail!("--convert makes a model return vectors, and --runner generate makes it generate text")
        }
        (Runner::Generate, _) => Ok(Runner::Generate),
        (Runner::Pooling, _) | (_, Convert::Embed | Convert::Classify) => Ok(Runner::Pooling),
        (Runner::Auto, Convert::Auto | Convert::None) => Ok(Runner::Auto),
    }
}

fn pooler(options: &mut OpenOptions, object: &Map<String, Value>) -> Result<()> {
    for (key, value) in object {
        match (key.as_str(), value) {
            (_, Value::Null) => {}
            ("pooling_type" | "seq_pooling_type", Value::String(name)) => options.pooling = Some(pooled_row(name)?),
            ("normalize" | "use_activation", Value::Bool(on)) => options.normalise = Some(*on),
            ("pooling_type" | "seq_pooling_type" | "normalize" | "use_activation", other) => {
                bail!("'{key}' is {other}, expected a name of a pooling or true or false")
            }
            _ => bail!("unknown key '{key}' (known: pooling_type, normalize)"),
        }
    }
    Ok(())
}

fn pooled_row(name: &str) -> Result<PooledRow> {
    match name.to_ascii_uppercase().as_str() {
        "CLS" => Ok(PooledRow::First),
        "LAST" => Ok(PooledRow::Last),
        "MEAN" => Ok(PooledRow::Mean),
        _ => bail!("the pooling '{name}' is not supported (CLS, LAST or MEAN)"),
    }
}

/// Checks that the model is of the kind that the flags ask for.
pub(crate) fn check(args: &VectorArgs, checkpoint: &Checkpoint) -> Result<()> {
    let kind = checkpoint.config().vectors.as_ref().map(|vectors| &vectors.kind);
    if args.convert == Convert::Classify && !matches!(kind, Some(VectorKind::Scores { .. })) {
        bail!("--convert classify: the model has no classes; name tokens with classifier_from_token in --hf-overrides");
    }
    Ok(())
}

/// Returns what the server needs to know of a model that returns vectors; `None` of a model that generates text.
pub(crate) fn pooling_config(args: &ComposeArgs, checkpoint: &Checkpoint, program: &Program) -> Option<PoolingConfig> {
    let VectorConfig { kind, .. } = checkpoint.config().vectors.as_ref()?;
    let SentenceSettings { lowercase, prompts, .. } = checkpoint.sentence_settings();
    let kind = match kind {
        VectorKind::Embedding { normalise, dimensions } => PoolingKind::Embedder {
            normalise: *normalise,
            matryoshka: match dimensions {
                Dimensions::Whole => Matryoshka::Unsupported,
                Dimensions::Any => Matryoshka::Any,
                Dimensions::Some(sizes) => Matryoshka::Dimensions(sizes.clone()),
            },
        },
        VectorKind::Scores { labels, activation } => PoolingKind::Classifier {
            labels: labels.clone(),
            activation: match activation {
                ScoreActivation::Identity => Activation::Identity,
                ScoreActivation::Sigmoid => Activation::Sigmoid,
                ScoreActivation::Softmax => Activation::Softmax,
            },
        },
    };
    let pairs = match (args.chat.chat_template.is_some(), checkpoint.config().is_causal()) {
        (true, _) => PairFormat::ChatTemplate,
        (false, true) => PairFormat::Joined,
        (false, false) => PairFormat::Template { token_types: program.token_types() > 1 },
    };
    Some(PoolingConfig { kind, tokens: true, pairs, lowercase, prompts })
}

/// Changes the engine's configuration for a model whose vectors depend on all rows of a text: a step then has whole texts
/// only, and no prefix is kept.
pub(crate) fn schedule_whole(program: &Program, engine: &mut EngineConfig) {
    if program.reduces_rows() {
        (engine.enable_chunked_prefill, engine.enable_prefix_caching) = (false, false);
        info!("a step holds whole texts, up to {} tokens", engine.max_num_batched_tokens);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: VectorArgs,
    }

    fn options(line: &[&str]) -> Result<OpenOptions, String> {
        let line = Line::try_parse_from([&["test"], line].concat()).map_err(|error| error.to_string())?;
        open_options(&line.args).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn flags_change_what_is_opened() {
        let found =
            options(&["--runner", "pooling", "--pooler-config", r#"{"pooling_type": "mean", "normalize": false}"#]);
        let expected = OpenOptions {
            runner: Runner::Pooling,
            pooling: Some(PooledRow::Mean),
            normalise: Some(false),
            ..OpenOptions::default()
        };
        assert_eq!(found.unwrap(), expected);
        assert_eq!(options(&["--convert", "embed"]).unwrap().runner, Runner::Pooling);
        assert_eq!(options(&["--convert", "none"]).unwrap(), OpenOptions::default());
        let overridden = options(&["--hf-overrides", r#"{"is_matryoshka": true}"#]).unwrap();
        assert_eq!(overridden.overrides["is_matryoshka"], true);
    }

    #[test]
    fn what_cannot_be_done_is_an_error_that_names_the_flag() {
        for (line, words) in [
            (["--hf-overrides", r#"{"rope_theta": 1}"#], "--hf-overrides: the key 'rope_theta'"),
            (["--pooler-config", r#"{"pooling_type": "MAX"}"#], "--pooler-config: the pooling 'MAX'"),
            (["--pooler-config", r#"{"x": 1}"#], "unknown key 'x'"),
            (["--pooler-config", r#"{"normalize": 1}"#], "'normalize' is 1"),
        ] {
            let error = options(&line).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert!(options(&["--runner", "generate", "--convert", "embed"]).unwrap_err().contains("--convert"));
    }
}
