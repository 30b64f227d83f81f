//! The metadata of an mmproj file, and the tokens of images in a vocabulary.

use super::{ConfigError, ModelConfig};
use crate::checkpoint::MetadataView;

/// The keys of the encoder in an mmproj file.
pub(crate) struct EncoderKeys<'a> {
    metadata: &'a MetadataView<'a>,
}

fn key(name: &str) -> String {
    format!("clip.vision.{name}")
}

impl<'a> EncoderKeys<'a> {
    /// Checks that the encoder has the named projector, and that its outputs fit the decoder.
    pub(crate) fn for_projector(
        metadata: &'a MetadataView<'a>,
        projector: &str,
        decoder: &ModelConfig,
    ) -> Result<Self, ConfigError> {
        let keys = Self { metadata };
        let found = match metadata.str("clip.projector_type")? {
            Some(found) => found,
            None => metadata.str(&key("projector_type"))?.unwrap_or("unknown"),
        };
        if found != projector {
            return Err(ConfigError::Invalid(format!(
                "it is the encoder of another model: its projector is '{}', and '{projector}' is needed",
                found.escape_debug()
            )));
        }
        let columns = keys.size("projection_dim")?;
        if columns != decoder.hidden_size {
            return Err(ConfigError::Invalid(format!(
                "it is the encoder of another model: its outputs have {columns} columns, and the model has {}",
                decoder.hidden_size
            )));
        }
        Ok(keys)
    }

    /// Returns a size, which must be there.
    pub(crate) fn size(&self, name: &str) -> Result<usize, ConfigError> {
        self.optional_size(name)?.ok_or_else(|| ConfigError::missing(&key(name)))
    }

    /// Returns a size, if it is there.
    pub(crate) fn optional_size(&self, name: &str) -> Result<Option<usize>, ConfigError> {
        let key = key(name);
        let size = |n| usize::try_from(n).map_err(|_| ConfigError::wrong_type(&key, "a size"));
        self.metadata.u64(&key)?.map(size).transpose()
    }

    /// Returns a number, if it is there.
    pub(crate) fn f64(&self, name: &str) -> Result<Option<f64>, ConfigError> {
        self.metadata.f64(&key(name))
    }

    /// Returns a list of flags, if it is there.
    pub(crate) fn bools(&self, name: &str) -> Result<Option<Vec<bool>>, ConfigError> {
        self.metadata.bools(&key(name))
    }
}

/// The texts of a vocabulary, in which the tokens of images are found: a GGUF file has no keys for them.
pub(crate) struct Vocabulary<'a>(Vec<&'a str>);

impl<'a> Vocabulary<'a> {
    /// Reads the vocabulary of a GGUF file, if it has one.
    pub(crate) fn read(metadata: &MetadataView<'a>) -> Result<Option<Self>, ConfigError> {
        Ok(metadata.strings("tokenizer.ggml.tokens")?.map(Self))
    }

    /// Returns the id of a token.
    pub(crate) fn id(&self, text: &str) -> Result<u32, ConfigError> {
        let found = self.0.iter().position(|token| *token == text).and_then(|id| u32::try_from(id).ok());
        found.ok_or_else(|| ConfigError::Invalid(format!("the vocabulary has no token '{text}'")))
    }
}
