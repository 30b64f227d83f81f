//! Families of models. A family is a module with all that is particular to it: the readers of its configuration
//! (Hugging Face and GGUF), the names of its tensors and, for images, its encoder and image processor.
//!
//! The readers describe a decoder layer by layer ([`ModelConfig`]), and one builder turns the description into a
//! program ([`crate::program`]). To add a family, add a module here and a line to [`FAMILIES`].

mod bert;
mod deepseek;
mod gemma;
mod gpt_oss;
mod granite;
mod idefics3;
mod llama;
mod mistral;
mod mixtral;
mod modernbert;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_vl;
mod qwen_moe;
mod smollm3;

use std::fmt;

use octavo_ops::Program;
use serde_json::Value;

use crate::checkpoint::{Checkpoint, Derived, MetadataView, ProcessorRules, Quantisation};
use crate::config::vectors::{SentenceModules, VectorReader};
use crate::config::{CLIP, ConfigError, Fields, ImageTokens, Keys, ModelConfig, VisionConfig, hf};
use crate::program::ModelError;
use crate::program::names::Names;

/// Every family.
pub static FAMILIES: [&Family; 23] = [
    &llama::FAMILY,
    &mistral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_vl::FAMILY,
    &idefics3::FAMILY,
    &gemma::GEMMA2,
    &gemma::GEMMA3,
    &gemma::GEMMA3_WITH_IMAGES,
    &phi3::FAMILY,
    &granite::FAMILY,
    &smollm3::FAMILY,
    &olmo2::FAMILY,
    &mixtral::FAMILY,
    &qwen_moe::QWEN2_MOE,
    &qwen_moe::QWEN3_MOE,
    &granite::MOE,
    &gpt_oss::FAMILY,
    &deepseek::V2,
    &deepseek::V3,
    &bert::BERT,
    &bert::ROBERTA,
    &modernbert::FAMILY,
];

/// A family of models that Octavo can run.
pub struct Family {
    /// Names in `model_type` of a Hugging Face configuration. The first one is the family's name.
    model_types: &'static [&'static str],
    /// End of the names of its classes in `architectures`.
    class: &'static str,
    /// Reads a `config.json`.
    hf: fn(&Fields<'_>) -> Result<ModelConfig, ConfigError>,
    /// Its GGUF files, if there are such files.
    gguf: Option<Gguf>,
    /// Names of its tensors.
    pub(crate) names: Names,
    /// Its encoder of images, if it takes images.
    pub(crate) images: Option<Images>,
    /// A layout of its own that tensors of its files have.
    pub(crate) layout: Option<OwnLayout>,
    /// Readers of its vectors, if it has encoders of texts, which predict no tokens.
    pub(crate) vectors: Option<VectorReader>,
}

/// A layout of tensors that only one family has.
pub(crate) struct OwnLayout {
    /// Name in `quant_method`, if the tensors are quantised.
    pub(crate) method: Option<&'static str>,
    /// Returns how a tensor that the file does not have is made from others.
    pub(crate) derived: fn(&Checkpoint, &str) -> Option<Derived<'static>>,
}

/// A family's GGUF files.
struct Gguf {
    /// Name in `general.architecture`, and the beginning of most keys.
    architecture: &'static str,
    /// Reads the metadata.
    read: fn(&Keys<'_>) -> Result<ModelConfig, ConfigError>,
}

/// A family's part for images.
pub(crate) struct Images {
    /// Builds the encoder.
    pub(crate) encoder: fn(&Checkpoint, &VisionConfig) -> Result<Program, ModelError>,
    /// Settings of the image processor.
    pub(crate) processor: &'static ProcessorRules,
    /// Readers of mmproj files, if the encoder of a GGUF file is in such a file beside it.
    pub(crate) mmproj: Option<Mmproj>,
}

/// Readers of an mmproj file.
pub(crate) struct Mmproj {
    /// Finds the tokens of images in the metadata of the model, which has no keys for them.
    pub(crate) tokens: fn(&MetadataView<'_>) -> Result<ImageTokens, ConfigError>,
    /// Reads the encoder's metadata. The second argument is the number of convolutions over patches in the file, one for
    /// each frame.
    pub(crate) vision: fn(&MetadataView<'_>, usize, &ModelConfig, ImageTokens) -> Result<VisionConfig, ConfigError>,
    /// Whether there are models without an encoder, so that none of the mmproj files in a folder may be theirs.
    pub(crate) optional: bool,
}

impl Family {
    /// Returns the name, which is that of `model_type`.
    pub const fn name(&self) -> &'static str {
        self.model_types[0]
    }

    /// Returns whether this is a `model_type` or a `general.architecture` of the family.
    pub fn is_named(&self, name: &str) -> bool {
        self.model_types.contains(&name) || self.gguf_name() == Some(name)
    }

    /// Returns the name in `general.architecture` of GGUF files.
    pub(crate) fn gguf_name(&self) -> Option<&'static str> {
        self.gguf.as_ref().map(|gguf| gguf.architecture)
    }

    /// Returns the family of a `model_type`.
    fn of_model_type(name: &str) -> Result<&'static Self, ConfigError> {
        let known = FAMILIES.iter().flat_map(|family| family.model_types.iter().map(move |name| (*name, *family)));
        find(name, known)
    }

    /// Returns the readers of mmproj files, if the family has such files.
    pub(crate) fn mmproj(&self) -> Option<&Mmproj> {
        self.images.as_ref()?.mmproj.as_ref()
    }

    /// Returns the family of a `general.architecture`.
    pub(crate) fn of_gguf(name: &str) -> Result<&'static Self, ConfigError> {
        find(name, FAMILIES.iter().filter_map(|family| Some((family.gguf_name()?, *family))))
    }
}

/// Families are equal if they have the same name.
impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn find(
    name: &str,
    mut known: impl Iterator<Item = (&'static str, &'static Family)> + Clone,
) -> Result<&'static Family, ConfigError> {
    let supported = known.clone().map(|(name, _)| name);
    let found = known.find(|(known, _)| *known == name).map(|(_, family)| family);
    found.ok_or_else(|| ConfigError::UnknownArchitecture {
        found: name.escape_debug().to_string(),
        supported: supported.collect::<Vec<_>>().join(", "),
    })
}

/// Checks that a `config.json` names a family. One that cannot be read is left to the reader of the whole
/// configuration.
pub(crate) fn check_architecture(config: &[u8]) -> Result<(), ConfigError> {
    let config: Value = serde_json::from_slice(config).unwrap_or_default();
    config["model_type"].as_str().map_or(Ok(()), |name| Family::of_model_type(name).map(drop))
}

impl ModelConfig {
    /// Reads a `config.json`. The folder may have `modules` of sentence-transformers.
    pub(crate) fn from_hf(
        fields: &Fields<'_>,
        modules: Option<&SentenceModules>,
        runner: Runner,
    ) -> Result<Self, ConfigError> {
        let name = fields.str("model_type")?.ok_or_else(|| ConfigError::missing("model_type"))?;
        let family = Family::of_model_type(name)?;
        let task = task(fields, family, modules.is_some(), runner)?;
        Quantisation::read(fields, family)?;
        let mut config = (family.hf)(fields)?;
        let reader = family.vectors.as_ref().unwrap_or(&VectorReader::DECODER);
        config.vectors = match task {
            Task::Generate => None,
            Task::Embed => Some(reader.embedding(fields, modules)?),
            Task::Classify => Some(reader.scores(&config, fields)?),
        };
        config.checked()
    }

    /// Reads the metadata of a GGUF file. `has_tensor` returns whether the file contains a tensor: only the tensors show
    /// whether the head is tied and where there are biases.
    pub(crate) fn from_gguf(
        metadata: &MetadataView<'_>,
        has_tensor: &dyn Fn(&str) -> bool,
    ) -> Result<Self, ConfigError> {
        let name = metadata.str("general.architecture")?.ok_or_else(|| ConfigError::missing("general.architecture"))?;
        if name == CLIP {
            return Err(ConfigError::Unsupported(
                "an image encoder without its model (give the model's GGUF file, and keep this mmproj file beside it)"
                    .into(),
            ));
        }
        let family = Family::of_gguf(name)?;
        let Gguf { architecture, read } = family.gguf.as_ref().expect("the family was found by this name");
        read(&Keys::new(metadata, architecture, has_tensor))?.checked()
    }
}

/// What a model is served for (`--runner`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Runner {
    /// What its files say: vectors if it is an encoder of texts, a classifier, a model without a head or a folder of
    /// sentence-transformers, else tokens.
    #[default]
    Auto,
    /// Tokens.
    Generate,
    /// Vectors.
    Pooling,
}

/// Task of a model.
enum Task {
    Generate,
    Embed,
    Classify,
}

/// Returns the task of a model. Refuses models that share a `model_type` with those of a family without being one.
fn task(fields: &Fields<'_>, family: &Family, has_modules: bool, runner: Runner) -> Result<Task, ConfigError> {
    let classes = fields.strs("architectures")?.unwrap_or_default();
    let is_class = |end: &str| classes.iter().any(|class| class.ends_with(end));
    let is_known = classes.is_empty() || is_class(family.class);
    let is_encoder = family.vectors.is_some();
    match runner {
        Runner::Generate if is_encoder || is_class(hf::CLASSIFIER) => Err(ConfigError::Unsupported(format!(
            "tokens from {}, which predicts none",
            classes.join(", ").escape_debug()
        ))),
        Runner::Generate if is_known => Ok(Task::Generate),
        _ if is_class(hf::CLASSIFIER) => Ok(Task::Classify),
        _ if is_class(hf::BARE) => Ok(Task::Embed),
        _ if is_known && (is_encoder || has_modules || runner == Runner::Pooling) => Ok(Task::Embed),
        _ if is_known => Ok(Task::Generate),
        _ => Err(ConfigError::Unsupported(format!("a model of class {}", classes.join(", ").escape_debug()))),
    }
}
