//! The JSON and text files of a Hugging Face directory.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::sentence::Sentence;
use super::{
    CheckpointError, GenerationConfig, KvScheme, OpenOptions, QUANTISATION, Quantisation, TokenizerData, quantised,
};
use crate::config::vectors::{CLASS_TOKEN_IDS, CLASS_TOKENS};
use crate::config::{ConfigError, Fields, ModelConfig};
use crate::family::Family;

/// Limits on files read into memory, each far above any published file.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
pub(super) const MAX_INDEX_BYTES: u64 = 64 << 20;
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Directories of models with images had the template in an object, before there were files of templates alone.
const OLD_CHAT_TEMPLATE: &str = "chat_template.json";
const IMAGE_PROCESSOR: &str = "preprocessor_config.json";
/// Newer directories have one file for the processors of all kinds of input.
const PROCESSORS: &str = "processor_config.json";

/// A directory whose small files have been read. `tokenizer.json` is read on demand.
#[derive(Debug)]
pub(super) struct Texts {
    directory: PathBuf,
    config: Map<String, Value>,
    generation: Map<String, Value>,
    tokenizer_config: Map<String, Value>,
    special_tokens: Map<String, Value>,
    pub(super) sentence: Sentence,
}

impl Texts {
    /// Reads the files. `overrides` stand in place of values of `config.json`.
    pub(super) fn open(directory: &Path, overrides: &Map<String, Value>) -> Result<Self, CheckpointError> {
        let object = |name: &str| read_object(&directory.join(name));
        let mut config = object(CONFIG)?.ok_or_else(|| CheckpointError::Unrecognised {
            path: directory.to_owned(),
            reason: format!("the directory has no {CONFIG}"),
        })?;
        quantised::add_side_file(&mut config, object, |name, reason| malformed(&directory.join(name), reason))?;
        config.extend(overrides.iter().map(|(key, value)| (key.clone(), value.clone())));
        Ok(Self {
            sentence: Sentence::open(directory)?,
            directory: directory.to_owned(),
            config,
            generation: object(GENERATION)?.unwrap_or_default(),
            tokenizer_config: object(TOKENIZER_CONFIG)?.unwrap_or_default(),
            special_tokens: object(SPECIAL_TOKENS)?.unwrap_or_default(),
        })
    }

    pub(super) fn model_config(&self, options: &OpenOptions) -> Result<ModelConfig, CheckpointError> {
        let mut object = self.config.clone();
        if let Some(tokens) = Fields::new(&self.config).strs(CLASS_TOKENS).map_err(self.fail(CONFIG))? {
            object.insert(CLASS_TOKEN_IDS.to_owned(), self.token_ids(&tokens)?.into());
        }
        let fields = Fields::new(&object);
        let config = ModelConfig::from_hf(&fields, self.sentence.modules.as_ref(), options.runner);
        let mut config = config.map_err(self.fail(CONFIG))?;
        if let Some(most) = self.sentence.settings.max_tokens.filter(|_| config.vectors.is_some()) {
            config.max_position_embeddings = config.max_position_embeddings.min(most);
        }
        options.apply(&mut config);
        Ok(config)
    }

    /// Returns whether the weights are quantised in some way.
    pub(super) fn is_quantised(&self) -> bool {
        self.config.get(QUANTISATION).is_some_and(Value::is_object)
    }

    /// Reads how the weights are quantised.
    pub(super) fn quantisation(&self, family: &Family) -> Result<Option<Quantisation>, CheckpointError> {
        Quantisation::read(&Fields::new(&self.config), family).map_err(self.fail(CONFIG))
    }

    /// Reads for which type of the KV cache there are scales.
    pub(super) fn kv_scheme(&self) -> Result<Option<KvScheme>, CheckpointError> {
        quantised::kv_scheme(&Fields::new(&self.config)).map_err(self.fail(CONFIG))
    }

    /// Reads `generation_config.json` and the end-of-sequence ids of `config.json` and of the tokenizer.
    pub(super) fn generation_config(&self) -> Result<GenerationConfig, CheckpointError> {
        let fields = Fields::new(&self.generation);
        let read = || -> Result<GenerationConfig, ConfigError> {
            let float = |key| Ok(fields.f64(key)?.map(|x| x as f32));
            Ok(GenerationConfig {
                temperature: float("temperature")?,
                top_p: float("top_p")?,
                // Some publishers write −1 for "all".
                top_k: fields.f64("top_k")?.map(|k| k as u32),
                min_p: float("min_p")?,
                repetition_penalty: float("repetition_penalty")?,
                max_new_tokens: fields.u32("max_new_tokens")?,
                eos_token_ids: Vec::new(),
            })
        };
        let mut generation = read().map_err(self.fail(GENERATION))?;
        generation.add_eos(self.tokenizer_eos()?);
        for (file, object) in [(CONFIG, &self.config), (GENERATION, &self.generation)] {
            for id in Fields::new(object).ids("eos_token_id").map_err(self.fail(file))? {
                generation.add_eos(Some(id));
            }
        }
        Ok(generation.checked())
    }

    /// Returns `chat_template.jinja`, the template of `chat_template.json` or the (default) one of
    /// `tokenizer_config.json`.
    pub(super) fn chat_template(&self) -> Result<Option<String>, CheckpointError> {
        let path = self.directory.join(CHAT_TEMPLATE);
        if let Some(text) = read_bounded(&path, MAX_CONFIG_BYTES)? {
            let text = String::from_utf8(text);
            return text.map(Some).map_err(|_| malformed(&path, "it is not UTF-8 text"));
        }
        if let Some(object) = read_object(&self.directory.join(OLD_CHAT_TEMPLATE))? {
            let template = Fields::new(&object).str("chat_template").map_err(self.fail(OLD_CHAT_TEMPLATE))?;
            if let Some(template) = template {
                return Ok(Some(template.to_owned()));
            }
        }
        let wrong = || ConfigError::wrong_type("chat_template", "a string or a list of named templates");
        match self.tokenizer_config.get("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(template)) => Ok(Some(template.clone())),
            Some(Value::Array(named)) => {
                let part = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
                let default = named.iter().find(|t| part(t, "name").as_deref() == Some("default")).or(named.first());
                let template = default.map(|t| part(t, "template").ok_or_else(wrong)).transpose();
                template.map_err(self.fail(TOKENIZER_CONFIG))
            }
            Some(_) => Err(self.fail(TOKENIZER_CONFIG)(wrong())),
        }
    }

    /// Returns the settings of the image processor and the file that has them; none if there is no such file.
    pub(super) fn image_processor(&self) -> Result<(&'static str, Map<String, Value>), CheckpointError> {
        if let Some(settings) = read_object(&self.directory.join(IMAGE_PROCESSOR))? {
            return Ok((IMAGE_PROCESSOR, settings));
        }
        let mut all = read_object(&self.directory.join(PROCESSORS))?.unwrap_or_default();
        match all.remove("image_processor") {
            None | Some(Value::Null) => Ok((PROCESSORS, Map::new())),
            Some(Value::Object(settings)) => Ok((PROCESSORS, settings)),
            Some(_) => Err(self.fail(PROCESSORS)(ConfigError::wrong_type("image_processor", "an object"))),
        }
    }

    pub(super) fn tokenizer(&self) -> Result<TokenizerData<'static>, CheckpointError> {
        let fields = Fields::new(&self.tokenizer_config);
        let flag = |key| fields.bool(key).map_err(self.fail(TOKENIZER_CONFIG));
        Ok(TokenizerData::Json {
            tokenizer_json: self.tokenizer_json()?.ok_or_else(|| CheckpointError::Unrecognised {
                path: self.directory.clone(),
                reason: format!("the directory has no {TOKENIZER} (other tokenizer files are not supported)"),
            })?,
            bos: self.special_token("bos_token"),
            eos: self.special_token("eos_token"),
            unk: self.special_token("unk_token"),
            pad: self.special_token("pad_token"),
            add_bos: flag("add_bos_token")?,
            add_eos: flag("add_eos_token")?,
        })
    }

    pub(super) fn has_tokenizer(&self) -> bool {
        self.directory.join(TOKENIZER).exists()
    }

    fn tokenizer_json(&self) -> Result<Option<Vec<u8>>, CheckpointError> {
        read_bounded(&self.directory.join(TOKENIZER), MAX_TOKENIZER_BYTES)
    }

    /// Returns a special token, which is a string or an object with its text in `content`.
    fn special_token(&self, key: &str) -> Option<String> {
        let text = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Object(token) => token.get("content").and_then(Value::as_str).map(str::to_owned),
            _ => None,
        };
        [&self.tokenizer_config, &self.special_tokens].iter().find_map(|file| file.get(key).and_then(text))
    }

    /// Returns the id of the tokenizer's end-of-sequence token. Fine-tuned models often change it without changing
    /// `config.json`.
    fn tokenizer_eos(&self) -> Result<Option<u32>, CheckpointError> {
        #[derive(Deserialize)]
        struct Added {
            id: u32,
            content: String,
        }
        #[derive(Deserialize)]
        struct Tokenizer {
            #[serde(default)]
            added_tokens: Vec<Added>,
        }
        let Some(eos) = self.special_token("eos_token") else { return Ok(None) };
        let Some(json) = self.tokenizer_json()? else { return Ok(None) };
        let tokenizer: Tokenizer =
            serde_json::from_slice(&json).map_err(|e| malformed(&self.directory.join(TOKENIZER), &e.to_string()))?;
        Ok(tokenizer.added_tokens.into_iter().find(|token| token.content == eos).map(|token| token.id))
    }

    /// Returns the ids of tokens of the vocabulary.
    fn token_ids(&self, tokens: &[&str]) -> Result<Vec<u32>, CheckpointError> {
        let path = self.directory.join(TOKENIZER);
        let json = self.tokenizer_json()?.ok_or_else(|| malformed(&path, "the file is missing"))?;
        let tokenizer: Value = serde_json::from_slice(&json).map_err(|e| malformed(&path, &e.to_string()))?;
        let added = tokenizer["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
        let id = |token: &&str| {
            let special = added.iter().find(|added| added["content"] == **token).map(|added| &added["id"]);
            let id = special.or_else(|| tokenizer["model"]["vocab"].get(*token)).and_then(Value::as_u64);
            let id = id.and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| malformed(&path, &format!("the vocabulary has no token '{}'", token.escape_debug())))
        };
        tokens.iter().map(id).collect()
    }

    fn fail(&self, file: &str) -> impl Fn(ConfigError) -> CheckpointError {
        let path = self.directory.join(file);
        move |source| CheckpointError::Config { path: path.clone(), source }
    }
}

pub(super) fn malformed(path: &Path, reason: &str) -> CheckpointError {
    CheckpointError::Malformed { path: path.to_owned(), reason: reason.to_owned() }
}

pub(crate) fn read_object(path: &Path) -> Result<Option<Map<String, Value>>, CheckpointError> {
    let Some(text) = read_bounded(path, MAX_CONFIG_BYTES)? else { return Ok(None) };
    serde_json::from_slice(&text).map(Some).map_err(|e| malformed(path, &format!("it is not a JSON object: {e}")))
}

/// Reads a whole regular file of at most `limit` bytes. Returns `None` if there is none.
pub(super) fn read_bounded(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, CheckpointError> {
    let fail = |source| CheckpointError::Io { path: path.to_owned(), source };
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err(malformed(path, "it is not a regular file")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(fail(e)),
    }
    let mut text = Vec::new();
    File::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut text)).map_err(fail)?;
    if text.len() as u64 > limit {
        return Err(malformed(path, &format!("it is larger than {limit} bytes")));
    }
    Ok(Some(text))
}
