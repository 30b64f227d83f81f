//! The models on this machine.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::catalog::{self, CatalogEntry, SourceKind};
use crate::hub::{self, is_gguf};
use crate::pieces::pieces;
use crate::resolve::ResolveOptions;

/// A model in one of the caches.
#[derive(Clone, Debug, PartialEq)]
pub struct InstalledModel {
    /// The name to serve it by.
    pub name: String,
    /// The entry of the catalog that is this model.
    pub entry: Option<&'static CatalogEntry>,
    /// Bytes of its files.
    pub bytes: u64,
    /// When its newest file was written.
    pub modified: Option<SystemTime>,
    /// A GGUF file, or a Hugging Face directory.
    pub path: PathBuf,
}

/// The models in Octavo's cache and in the hub's, the newest first. Folders that cannot be read are left out.
pub fn installed(options: &ResolveOptions) -> Vec<InstalledModel> {
    let mut models: Vec<_> = catalog::entries().iter().filter_map(|entry| packaged(entry, options)).collect();
    models.extend(hub::cached(&options.hub.cache_dir).into_iter().map(|(name, path)| {
        let entry = catalog::entries().iter().find(|entry| comes_from(entry, &name));
        measured(name, entry, path)
    }));
    models.sort_by(|a, b| b.modified.cmp(&a.modified).then_with(|| a.name.cmp(&b.name)));
    models
}

/// The file of an entry in Octavo's own cache.
fn packaged(entry: &'static CatalogEntry, options: &ResolveOptions) -> Option<InstalledModel> {
    let (file, size, _) = entry.cache_file()?;
    let path = options.cache_dir.join("models").join(&entry.id).join(file);
    let complete = path.metadata().is_ok_and(|data| data.len() == size);
    complete.then(|| measured(entry.id.clone(), Some(entry), path))
}

/// Whether `name`, a reference to the hub, is one of the entry's sources.
fn comes_from(entry: &CatalogEntry, name: &str) -> bool {
    entry.is_called(name)
        || entry.sources.iter().any(|source| match &source.kind {
            SourceKind::Hub { repo, file: Some(file), .. } => name == format!("{repo}:{file}"),
            SourceKind::Hub { repo, file: None, .. } => name == repo,
            _ => false,
        })
}

fn measured(name: String, entry: Option<&'static CatalogEntry>, path: PathBuf) -> InstalledModel {
    let (mut bytes, mut modified) = (0, None);
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    for piece in pieces(file) {
        measure(&path.with_file_name(piece), &mut bytes, &mut modified);
    }
    InstalledModel { name, entry, bytes, modified, path }
}

/// Adds up a file or a folder, following links: those of the hub's cache lead to its blobs.
fn measure(path: &Path, bytes: &mut u64, modified: &mut Option<SystemTime>) {
    let Ok(data) = path.metadata() else { return };
    if !data.is_dir() {
        *bytes += data.len();
        *modified = (*modified).max(data.modified().ok());
        return;
    }
    let Ok(listing) = path.read_dir() else { return };
    // The weights of GGUF files are listed by themselves.
    let files = listing.flatten().map(|entry| entry.path());
    for file in files.filter(|file| !file.to_str().is_some_and(is_gguf)) {
        measure(&file, bytes, modified);
    }
}
