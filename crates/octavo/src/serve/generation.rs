//! Sampling defaults: `--generation-config`, then `--override-generation-config`.
//!
//! With `auto` the model's own recommendation counts: that of its `generation_config.json`, or else that of its catalog
//! entry. The two are never mixed.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use octavo_models::GenerationConfig;
use octavo_models::catalog::RecommendedSampling;
use octavo_server::SamplingDefaults;
use serde_json::{Map, Value};

use crate::cli::{GenerationSource, SamplingArgs};

/// Name of the file in a folder.
const FILE: &str = "generation_config.json";

const OVERRIDE: &str = "--override-generation-config";

/// Sampling parameters for requests that leave them out.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Defaults {
    pub(crate) sampling: SamplingDefaults,
    /// Their source, for messages; empty if nothing is set.
    pub(crate) origin: String,
}

impl Defaults {
    /// The recommendation of the model's publisher: the checkpoint's, or else the catalog's.
    pub(crate) fn recommended(checkpoint: &GenerationConfig, catalog: Option<&RecommendedSampling>) -> Self {
        let origin = match catalog {
            Some(catalog) if !checkpoint.recommends() => catalog.source.clone(),
            _ => format!("the model's {FILE}"),
        };
        let sampling = of_model(&checkpoint.clone().or(catalog));
        Self { origin: if sampling == SamplingDefaults::default() { String::new() } else { origin }, sampling }
    }

    /// The log line that reports them; `None` if there are none.
    pub(crate) fn described(&self) -> Option<String> {
        let Self { sampling, origin } = self;
        let hint = "--generation-config vllm turns off what the model recommends";
        (*sampling != SamplingDefaults::default())
            .then(|| format!("Default sampling parameters from {origin}: {sampling} ({hint})"))
    }
}

/// Sampling parameters for requests that leave them out. `checkpoint` and `catalog` are the recommendations that come with
/// the model.
///
/// # Errors
/// A file that cannot be read, or a value that no request could ask for; names the flag and the key.
pub(crate) fn defaults(
    args: &SamplingArgs,
    checkpoint: &GenerationConfig,
    catalog: Option<&RecommendedSampling>,
) -> Result<Defaults> {
    let mut defaults = match &args.generation_config {
        GenerationSource::Model => Defaults::recommended(checkpoint, catalog),
        GenerationSource::Api => Defaults::default(),
        GenerationSource::Path(path) => {
            let origin = format!("--generation-config {}", path.display());
            Defaults { sampling: of_file(path).with_context(|| origin.clone())?, origin }
        }
    };
    for (key, value) in args.override_generation_config.iter().flat_map(|object| &object.0) {
        let known = set_default(&mut defaults.sampling, key, value).context(OVERRIDE)?;
        ensure!(known, "{OVERRIDE}: '{key}' is no sampling default that is served");
    }
    if args.override_generation_config.as_ref().is_some_and(|object| !object.0.is_empty()) {
        let and = if defaults.origin.is_empty() { "" } else { " and " };
        defaults.origin.push_str(&format!("{and}{OVERRIDE}"));
    }
    Ok(defaults)
}

fn of_model(generation: &GenerationConfig) -> SamplingDefaults {
    SamplingDefaults {
        temperature: generation.temperature,
        top_p: generation.top_p,
        top_k: generation.top_k,
        min_p: generation.min_p,
        repetition_penalty: generation.repetition_penalty,
        max_new_tokens: generation.max_new_tokens,
    }
}

/// Ignores keys that are not sampling defaults, which other programs read.
fn of_file(path: &Path) -> Result<SamplingDefaults> {
    let path = if path.is_dir() { path.join(FILE) } else { path.to_owned() };
    let object: Map<String, Value> = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
    let mut defaults = SamplingDefaults::default();
    for (key, value) in &object {
        set_default(&mut defaults, key, value)?;
    }
    Ok(defaults)
}

/// Sets a default, which `null` clears. Returns false for a key that is not a sampling default.
fn set_default(defaults: &mut SamplingDefaults, key: &str, value: &Value) -> Result<bool> {
    let number = |valid: fn(f64) -> bool, range: &str| -> Result<Option<f32>> {
        match value.as_f64() {
            None if value.is_null() => Ok(None),
            Some(x) if valid(x) => Ok(Some(x as f32)),
            _ => bail!("'{key}' is {value}, but must be {range}"),
        }
    };
    let count = |least: i64| -> Result<Option<u32>> {
        match value.as_i64() {
            None if value.is_null() => Ok(None),
            Some(n) if n >= least => Ok(Some(u32::try_from(n.max(0)).unwrap_or(u32::MAX))),
            _ => bail!("'{key}' is {value}, but must be a whole number of at least {least}"),
        }
    };
    match key {
        "temperature" => defaults.temperature = number(|x| (0.0..=2.0).contains(&x), "from 0 to 2")?,
        "top_p" => defaults.top_p = number(|x| x > 0.0 && x <= 1.0, "above 0 and up to 1")?,
        // Both -1 and 0 disable it.
        "top_k" => defaults.top_k = count(-1)?,
        "min_p" => defaults.min_p = number(|x| (0.0..=1.0).contains(&x), "from 0 to 1")?,
        "repetition_penalty" => defaults.repetition_penalty = number(|x| x > 0.0, "above 0")?,
        "max_new_tokens" | "max_tokens" => defaults.max_new_tokens = count(1)?,
        _ => return Ok(false),
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::JsonObject;

    fn args(source: GenerationSource, over: &str) -> SamplingArgs {
        SamplingArgs {
            seed: None,
            generation_config: source,
            override_generation_config: Some(JsonObject(serde_json::from_str(over).unwrap())),
            max_logprobs: Some(20),
        }
    }

    fn model() -> GenerationConfig {
        GenerationConfig { temperature: Some(0.7), top_k: Some(20), ..GenerationConfig::default() }
    }

    #[test]
    fn the_override_wins_over_the_model() {
        let over = r#"{"temperature": 0.5, "top_k": null, "max_new_tokens": 64}"#;
        let defaults = defaults(&args(GenerationSource::Model, over), &model(), None).unwrap();
        let expected =
            SamplingDefaults { temperature: Some(0.5), max_new_tokens: Some(64), ..SamplingDefaults::default() };
        assert_eq!(defaults.sampling, expected);
        assert_eq!(defaults.origin, "the model's generation_config.json and --override-generation-config");
    }

    fn catalog() -> RecommendedSampling {
        octavo_models::catalog::find(crate::cli::DEFAULT_MODEL).and_then(|entry| entry.sampling.clone()).unwrap()
    }

    #[test]
    fn the_catalog_fills_in_for_a_checkpoint_that_recommends_nothing() {
        let of = |source, checkpoint: GenerationConfig| {
            defaults(&args(source, "{}"), &checkpoint, Some(&catalog())).unwrap()
        };
        let bare = of(GenerationSource::Model, GenerationConfig::default());
        assert_eq!((bare.sampling.temperature, bare.sampling.top_p), (Some(0.2), Some(0.9)));
        let line = bare.described().unwrap();
        let expected = "Default sampling parameters from https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct: \
                        temperature 0.2, top_p 0.9 (";
        assert!(line.starts_with(expected), "{line}");
        let own = of(GenerationSource::Model, model());
        assert_eq!((own.sampling.temperature, own.sampling.top_p), (Some(0.7), None), "never mixed");
        let off = of(GenerationSource::Api, GenerationConfig::default());
        assert_eq!((off.sampling, off.described()), (SamplingDefaults::default(), None));
    }

    #[test]
    fn the_api_knows_no_model() {
        assert_eq!(defaults(&args(GenerationSource::Api, "{}"), &model(), None).unwrap(), Defaults::default());
    }

    #[test]
    fn a_file_or_its_folder_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        std::fs::write(&file, r#"{"top_p": 0.8, "top_k": -1, "eos_token_id": [1, 2], "do_sample": true}"#).unwrap();
        for path in [folder.path(), &file] {
            let defaults = defaults(&args(GenerationSource::Path(path.into()), "{}"), &model(), None).unwrap();
            let defaults = defaults.sampling;
            assert_eq!((defaults.top_p, defaults.top_k, defaults.temperature), (Some(0.8), Some(0), None));
        }
        let missing = args(GenerationSource::Path(folder.path().join("none")), "{}");
        assert!(defaults(&missing, &model(), None).unwrap_err().to_string().contains("--generation-config"));
    }

    #[test]
    fn what_no_request_could_ask_for_is_an_error() {
        for over in [
            r#"{"temperature": -1}"#,
            r#"{"temperature": 3}"#,
            r#"{"top_p": 0}"#,
            r#"{"top_p": "high"}"#,
            r#"{"top_k": -2}"#,
            r#"{"top_k": 1.5}"#,
            r#"{"max_new_tokens": 0}"#,
            r#"{"temprature": 1}"#,
        ] {
            let error = format!("{:#}", defaults(&args(GenerationSource::Model, over), &model(), None).unwrap_err());
            assert!(error.contains("--override-generation-config"), "{over}: {error}");
        }
    }
}
