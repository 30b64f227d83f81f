//! Errors of resolving the name of a model.

use std::fmt::Write as _;
use std::path::PathBuf;

use crate::fetch::{PipError, StorageError, WheelError};
use crate::hub::HubError;

/// Reason why a name did not lead to a model. Each message is a sentence that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The reference is empty or cannot be a name.
    #[error("{reference:?} is no model: give a path, a catalog name or a hub id (org/name)")]
    BadReference {
        /// Given reference.
        reference: String,
    },
    /// The reference looks like a path, but nothing is there.
    #[error("there is no file or folder {path}")]
    NoSuchPath {
        /// Given path.
        path: PathBuf,
    },
    /// The folder contains no model.
    #[error("the folder {path} holds no model: it has neither config.json nor a single .gguf file")]
    NotAModelFolder {
        /// Given path.
        path: PathBuf,
    },
    /// Neither a path nor in the catalog nor a hub id.
    #[error("there is no model '{name}'{}: give a catalog name, a hub id (org/name) or a path; `octavo pull --list` lists the catalog", did_you_mean(.similar))]
    UnknownName {
        /// Given name.
        name: String,
        /// The closest names of the catalog, the closest first; may be empty.
        similar: Vec<&'static str>,
    },
    /// A revision was requested of a model that has none.
    #[error("{name} does not come from the hub: it has no revision {revision}")]
    NoRevisions {
        /// Name of the model.
        name: String,
        /// Requested revision.
        revision: String,
    },
    /// Offline mode is on and the catalog model is not in the cache.
    #[error(
        "{name} is not in the cache {folder}, and offline mode is on: run `octavo pull {name}` once without it, or give \
         the path of its file"
    )]
    Offline {
        /// Name of the model.
        name: String,
        /// Folder that was searched.
        folder: PathBuf,
    },
    /// No source provided the catalog model.
    #[error("{name} could not be had from any of its sources:{}", listed(.failures))]
    NoSource {
        /// Name of the model.
        name: String,
        /// Sources with their errors.
        failures: Vec<(String, ResolveError)>,
    },
    /// pip failed.
    #[error(transparent)]
    Pip(#[from] PipError),
    /// The wheel from pip could not be used.
    #[error(transparent)]
    Wheel(#[from] WheelError),
    /// The hub failed.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// Octavo's cache could not be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

fn did_you_mean(similar: &[&str]) -> String {
    let quoted: Vec<_> = similar.iter().map(|name| format!("'{name}'")).collect();
    if quoted.is_empty() { String::new() } else { format!(" (did you mean {}?)", quoted.join(" or ")) }
}

fn listed(failures: &[(String, ResolveError)]) -> String {
    failures.iter().fold(String::new(), |mut text, (source, error)| {
        let _ = write!(text, "\n  {source}: {error}");
        text
    })
}
