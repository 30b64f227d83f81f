//! The files of sentence-transformers beside a model: the modules that make vectors of its rows, and settings of texts.

use std::collections::BTreeMap;
use std::path::Path;

use octavo_ops::GluKind;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::CheckpointError;
use super::hf::{malformed, read_bounded, read_object};
use super::safetensors::is_plain_file_name;
use crate::config::vectors::{self, SentenceModules};
use crate::config::{ConfigError, Fields, HeadLayer, PooledRow};

const MODULES: &str = "modules.json";
const TEXTS: &str = "sentence_bert_config.json";
const SETTINGS: &str = "config_sentence_transformers.json";
const MODULE: &str = "config.json";
const MAX_BYTES: u64 = 16 << 20;

/// Settings of texts that a folder of sentence-transformers has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SentenceSettings {
    /// Maximum number of tokens of a text, with special tokens.
    pub max_tokens: Option<usize>,
    /// Whether texts are put in lower case before they are tokenised.
    pub lowercase: bool,
    /// Texts that a client may ask to put before its own, by name.
    pub prompts: BTreeMap<String, String>,
}

/// A line of `modules.json`.
#[derive(Deserialize)]
struct Module {
    #[serde(default)]
    path: String,
    #[serde(rename = "type")]
    class: String,
}

/// A folder of sentence-transformers.
#[derive(Debug, Default)]
pub(super) struct Sentence {
    /// What follows the model; `None` if the folder lists no modules.
    pub(super) modules: Option<SentenceModules>,
    /// Folders of the modules with weights.
    pub(super) folders: Vec<String>,
    pub(super) settings: SentenceSettings,
}

impl Sentence {
    /// Reads the files, any of which may be missing.
    pub(super) fn open(directory: &Path) -> Result<Self, CheckpointError> {
        let mut sentence = Self { settings: settings(directory)?, ..Self::default() };
        let path = directory.join(MODULES);
        let Some(text) = read_bounded(&path, MAX_BYTES)? else { return Ok(sentence) };
        let lines: Vec<Module> = serde_json::from_slice(&text).map_err(|e| malformed(&path, &e.to_string()))?;
        let mut modules = SentenceModules::default();
        for Module { path: folder, class } in lines {
            if !folder.is_empty() && !is_plain_file_name(&folder) {
                let reason = format!("the module's folder '{}' is not a plain name", folder.escape_debug());
                return Err(malformed(&path, &reason));
            }
            let fail = |source| CheckpointError::Config { path: path.clone(), source };
            match class.rsplit('.').next().unwrap_or(&class) {
                "Transformer" if folder.is_empty() => {}
                "Transformer" => return Err(fail(ConfigError::Unsupported("a model in a folder of its own".into()))),
                "Pooling" => modules.pooling = Some(read(directory, &folder, pooling)?),
                "Dense" => {
                    modules.dense.push(read(directory, &folder, |fields| dense(fields, &folder))?);
                    sentence.folders.push(folder);
                }
                "Normalize" => modules.normalises = true,
                "Dropout" => {}
                other => {
                    let what = format!("the module '{}' of sentence-transformers", other.escape_debug());
                    return Err(fail(ConfigError::Unsupported(what)));
                }
            }
        }
        sentence.modules = Some(modules);
        Ok(sentence)
    }
}

/// Reads the configuration of a module.
fn read<T>(
    directory: &Path,
    folder: &str,
    read: impl FnOnce(&Fields<'_>) -> Result<T, ConfigError>,
) -> Result<T, CheckpointError> {
    let path = directory.join(folder).join(MODULE);
    let object = read_object(&path)?.ok_or_else(|| malformed(&path, "the file is missing"))?;
    read(&Fields::new(&object)).map_err(|source| CheckpointError::Config { path, source })
}

/// Reads the reduction of rows, a name or one flag of several.
fn pooling(fields: &Fields<'_>) -> Result<PooledRow, ConfigError> {
    if !fields.bool("include_prompt")?.unwrap_or(true) {
        return Err(ConfigError::Unsupported("pooling without the prompt's tokens".into()));
    }
    if let Some(name) = fields.str("pooling_mode")? {
        return pooled_row(name);
    }
    const FLAGS: [(&str, &str); 6] = [
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_lasttoken", "lasttoken"),
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
        ("pooling_mode_weightedmean_tokens", "weightedmean"),
    ];
    let mut names = Vec::new();
    for (flag, name) in FLAGS {
        if fields.bool(flag)?.unwrap_or(false) {
            names.push(name);
        }
    }
    match names[..] {
        [name] => pooled_row(name),
        [] => Ok(PooledRow::Mean),
        _ => Err(ConfigError::Unsupported(format!("the poolings {} together", names.join(", ")))),
    }
}

/// Returns the reduction of a name, as sentence-transformers and vLLM call it.
pub(crate) fn pooled_row(name: &str) -> Result<PooledRow, ConfigError> {
    match name.to_ascii_lowercase().as_str() {
        "cls" => Ok(PooledRow::First),
        "mean" => Ok(PooledRow::Mean),
        "last" | "lasttoken" => Ok(PooledRow::Last),
        _ => Err(vectors::unknown_pooling(name)),
    }
}

/// Reads a product. Its tensors are in a folder of their own.
fn dense(fields: &Fields<'_>, folder: &str) -> Result<HeadLayer, ConfigError> {
    let activation = match fields.str("activation_function")? {
        Some(name) => vectors::activation(name)?,
        None => Some(GluKind::Tanh),
    };
    let layer = vectors::layer(&format!("{folder}/linear"), fields.required("out_features")?);
    Ok(HeadLayer { bias: fields.bool("bias")?.unwrap_or(true), activation, ..layer })
}

fn settings(directory: &Path) -> Result<SentenceSettings, CheckpointError> {
    let path = directory.join(TEXTS);
    let object = read_object(&path)?.unwrap_or_default();
    let fields = Fields::new(&object);
    let read = || Ok((fields.usize("max_seq_length")?, fields.bool("do_lower_case")?));
    let (max_tokens, lowercase) = read().map_err(|source| CheckpointError::Config { path, source })?;
    let all: Map<String, Value> = read_object(&directory.join(SETTINGS))?.unwrap_or_default();
    let named = all.get("prompts").and_then(Value::as_object).into_iter().flatten();
    let prompts = named.filter_map(|(name, prompt)| Some((name.clone(), prompt.as_str()?.to_owned()))).collect();
    Ok(SentenceSettings { max_tokens: max_tokens.filter(|&n| n > 0), lowercase: lowercase.unwrap_or(false), prompts })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pooling_of(config: Value) -> Result<PooledRow, String> {
        pooling(&Fields::new(config.as_object().unwrap())).map_err(|error| error.to_string())
    }

    #[test]
    fn a_pooling_is_a_name_or_one_flag() {
        assert_eq!(pooling_of(json!({"pooling_mode": "cls"})), Ok(PooledRow::First));
        assert_eq!(
            pooling_of(json!({"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false})),
            Ok(PooledRow::Last)
        );
        assert_eq!(pooling_of(json!({})), Ok(PooledRow::Mean), "the library's default");
        for (config, word) in [
            (json!({"pooling_mode": "max"}), "max"),
            (json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}), "together"),
            (json!({"pooling_mode_mean_tokens": true, "include_prompt": false}), "prompt"),
            (json!({"pooling_mode_mean_tokens": 1}), "pooling_mode_mean_tokens"),
        ] {
            let error = pooling_of(config).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
