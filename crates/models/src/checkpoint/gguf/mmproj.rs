//! The encoder of images of a GGUF model: a second file of the architecture `clip` in the same folder ("mmproj").

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use octavo_ops::{TensorData, WeightError};

use super::GgufFile;
use crate::checkpoint::CheckpointError;
use crate::config::{CLIP, ConfigError, ImageTokens, ModelConfig, VisionConfig};
use crate::family::{Family, Mmproj};
use crate::hub::is_mmproj;

/// Convolution over the patches of the first frame; that of the second frame has a suffix.
const PATCHES: &str = "v.patch_embd.weight";
const SECOND_FRAME: &str = "v.patch_embd.weight.1";

/// Returns whether a GGUF file is a model whose images an mmproj file encodes. A file that cannot be read is not.
pub(crate) fn takes_images(path: &Path) -> bool {
    let Ok(file) = GgufFile::open_one(path) else { return false };
    let Ok(Some(architecture)) = file.metadata().str("general.architecture") else { return false };
    Family::of_gguf(architecture).is_ok_and(|family| family.mmproj().is_some())
}

/// Finds the encoder of a model among the mmproj files beside it, and reads its configuration. `None` means that there is
/// no such file. If several fit, one with the model's name is preferred, then the first by file name.
///
/// # Errors
/// Returns the defect of the first file if there are files and none fits, unless the family has models without an encoder.
pub(in crate::checkpoint) fn encoder_beside(
    text: &GgufFile,
    model: &ModelConfig,
    reader: &Mmproj,
) -> Result<Option<(GgufFile, VisionConfig)>, CheckpointError> {
    let paths = mmproj_files(text.path())?;
    if paths.is_empty() {
        if !reader.optional {
            tracing::warn!(
                "{}: there is no mmproj file beside it, so the model takes no images",
                text.path().display()
            );
        }
        return Ok(None);
    }
    let fail = |source| CheckpointError::Config { path: text.path().to_owned(), source };
    let tokens = match (reader.tokens)(&text.metadata()) {
        Err(_) if reader.optional => return Ok(None),
        tokens => tokens.map_err(fail)?,
    };
    let name = text.metadata().str("general.name").map_err(fail)?;
    let (mut fitting, mut refused) = (Vec::new(), None);
    for path in paths {
        match open(&path, text, model, tokens, reader) {
            Ok(found) => fitting.push(found),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    let is_namesake = |(file, _): &(GgufFile, _)| name.is_some() && file.metadata().str("general.name") == Ok(name);
    let best = fitting.iter().position(is_namesake).unwrap_or(0);
    match refused {
        Some(error) if fitting.is_empty() && reader.optional => {
            tracing::warn!("{error}, so the model takes no images");
            Ok(None)
        }
        Some(error) if fitting.is_empty() => Err(error),
        _ => Ok(fitting.into_iter().nth(best)),
    }
}

/// Returns the mmproj files in the folder of a model, by name.
fn mmproj_files(model: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let folder = match model.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let listing =
        std::fs::read_dir(folder).map_err(|source| CheckpointError::Io { path: folder.to_owned(), source })?;
    let is_named = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(is_mmproj);
    let mut paths: Vec<_> = listing.flatten().map(|entry| entry.path()).filter(is_named).collect();
    paths.sort();
    Ok(paths)
}

fn open(
    path: &Path,
    text: &GgufFile,
    model: &ModelConfig,
    tokens: ImageTokens,
    reader: &Mmproj,
) -> Result<(GgufFile, VisionConfig), CheckpointError> {
    let file = GgufFile::open(path)?;
    let vision = read(&file, text, model, tokens, reader)
        .map_err(|source| CheckpointError::Config { path: path.to_owned(), source })?;
    Ok((file, vision))
}

fn read(
    file: &GgufFile,
    text: &GgufFile,
    model: &ModelConfig,
    tokens: ImageTokens,
    reader: &Mmproj,
) -> Result<VisionConfig, ConfigError> {
    let metadata = file.metadata();
    let architecture = metadata.str("general.architecture")?.unwrap_or("unknown");
    if architecture != CLIP {
        let found = architecture.escape_debug();
        return Err(ConfigError::Invalid(format!(
            "it is no image encoder: its architecture is '{found}', not '{CLIP}'"
        )));
    }
    let frames = 1 + usize::from(file.find(SECOND_FRAME).is_some());
    let vision = (reader.vision)(&metadata, frames, model, tokens)?;
    let key = format!("{}.n_deepstack_layers", model.family.gguf_name().unwrap_or_default());
    let (found, needed) = (vision.deepstack_layers.len() as u64, text.metadata().u64(&key)?);
    match needed.filter(|&needed| needed != found) {
        None => Ok(vision),
        Some(needed) => Err(ConfigError::Invalid(format!(
            "it is the encoder of another model: it has {found} deepstack layers, and the model takes {needed}"
        ))),
    }
}

impl GgufFile {
    /// Returns the convolution over the patches of two frames, which the file stores as one for each. `None` if `name` is
    /// another tensor, or if there is one frame.
    pub(in crate::checkpoint) fn joined_frames(&self, name: &str) -> Result<Option<TensorData<'_>>, WeightError> {
        let (true, Some(second)) = (name == PATCHES, self.find(SECOND_FRAME)) else { return Ok(None) };
        let invalid = |reason: &str| WeightError::Invalid { name: SECOND_FRAME.to_owned(), reason: reason.to_owned() };
        let found = self.find(PATCHES).ok_or_else(|| WeightError::Missing(PATCHES.to_owned()))?;
        let first = found.0;
        let (Ok(storage), &[rows, channels, height, width]) = (&first.storage, &first.shape[..]) else {
            return Err(invalid("the convolution is not of four dimensions"));
        };
        if (&first.shape, &first.storage) != (&second.0.shape, &second.0.storage) {
            return Err(invalid("its shape or type is not that of the first frame"));
        }
        // The planes of a channel are whole blocks only if the type has no blocks.
        let plane = storage.bytes_for(1).map(|element| element * height * width);
        let plane = plane.ok_or_else(|| invalid("its type is quantised (supported: F32, F16, BF16)"))?;
        let frames = [found, second].map(|(info, bytes)| bytes[info.range.clone()].chunks_exact(plane));
        let [first, second] = frames;
        let joined: Vec<u8> = first.zip(second).flat_map(|(first, second)| [first, second].concat()).collect();
        let shape = vec![rows, channels, 2, height, width];
        Ok(Some(TensorData { storage: *storage, shape, bytes: joined.into() }))
    }
}
