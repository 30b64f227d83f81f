//! Why a name did not lead to a model.

use std::fmt::Write as _;
use std::path::PathBuf;

use crate::fetch::{PipError, StorageError, WheelError};
use crate::hub::HubError;

/// Why a name did not lead to a model. Each message is a sentence that says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// Empty, or not text that can be a name.
    #[error("{reference:?} is no model: give a path, a catalog name or a hub id (org/name)")]
    BadReference {
        /// What was given.
        reference: String,
    },
    /// It reads like a path, and there is nothing.
    #[error("there is no file or folder {path}")]
    NoSuchPath {
        /// The path.
        path: PathBuf,
    },
    /// A folder without a model.
    #[error("the folder {path} holds no model: it has neither config.json nor a single .gguf file")]
    NotAModelFolder {
        /// The path.
        path: PathBuf,
    },
    /// Neither a path nor in the catalog nor a hub id.
    #[error("there is no model '{name}'{}: give a catalog name, a hub id (org/name) or a path; `octavo pull --list` lists the catalog", did_you_mean(.similar))]
    UnknownName {
        /// What was given.
        name: String,
        /// The closest names of the catalog, the closest first; may be empty.
        similar: Vec<&'static str>,
    },
    /// In the catalog, but there is no program for its architecture.
    #[error("{name} cannot be served yet: the architecture '{architecture}' is not implemented")]
    NotServed {
        /// Its name.
        name: String,
        /// Its architecture.
        architecture: String,
    },
    /// A revision of a model that has none.
    #[error("{name} does not come from the hub: it has no revision {revision}")]
    NoRevisions {
        /// Its name.
        name: String,
        /// What was asked for.
        revision: String,
    },
    /// A catalog model, and offline.
    #[error(
        "{name} is not in the cache {folder}, and offline mode is on: run `octavo pull {name}` once without it, or give \
         the path of its file"
    )]
    Offline {
        /// Its name.
        name: String,
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// A catalog model, and no source gave it.
    #[error("{name} could not be had from any of its sources:{}", listed(.failures))]
    NoSource {
        /// Its name.
        name: String,
        /// Each source with what went wrong.
        failures: Vec<(String, ResolveError)>,
    },
    /// Through pip.
    #[error(transparent)]
    Pip(#[from] PipError),
    /// What pip brought.
    #[error(transparent)]
    Wheel(#[from] WheelError),
    /// The hub.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// Octavo's cache.
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
