//! The cache shared with the hub's Python clients.
//!
//! ```text
//! HF_HUB_CACHE/
//!   .locks/models--org--name/<etag>.lock     held (flock) while a blob is written, as the Python client holds it
//!   models--org--name/
//!     refs/<revision>                        the commit that a branch or tag stood for
//!     blobs/<etag>                           content; <etag>.incomplete while it is fetched
//!     snapshots/<commit>/<file>              relative links to blobs
//!     .no_exist/<commit>/<file>              empty: this commit has no such file
//! ```

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use hf_hub::{Cache, CacheRepo, Repo};

use crate::checkpoint::takes_images;
use crate::fetch::{Place, StorageError};
use crate::pieces::pieces;

use super::select::{CONFIG, INDEX, OPTIONAL, SINGLE, Weights, gguf_files, is_safe, mmproj_beside, shards, weights};

/// Maximum depth of folders searched in a snapshot.
const DEPTH: usize = 4;

/// A repository in the cache.
#[derive(Debug)]
pub(super) struct RepoCache {
    root: PathBuf,
    folder: String,
    /// hf-hub's view of the repository: the places of blobs and snapshots.
    layout: CacheRepo,
}

/// State of a model directory in the cache.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Cached {
    /// All files are there.
    Complete(PathBuf),
    /// All required files are there; the hub has not been asked for optional files such as `generation_config.json`.
    Usable(PathBuf),
    /// This file is missing.
    Incomplete(String),
}

impl RepoCache {
    /// Creates the cache of `repo`, a checked `org/name`.
    pub(super) fn new(root: &Path, repo: &str) -> Self {
        let repo = Repo::model(repo.to_owned());
        let folder = repo.folder_name();
        Self { root: root.to_owned(), folder, layout: Cache::new(root.to_owned()).repo(repo) }
    }

    fn repo(&self) -> PathBuf {
        self.root.join(&self.folder)
    }

    /// Returns the commit to which a revision pointed at its last look-up.
    pub(super) fn commit_of(&self, revision: &str) -> Option<String> {
        if !is_safe(revision) {
            return None;
        }
        match std::fs::read_to_string(self.repo().join("refs").join(revision)) {
            Ok(commit) => Some(commit.trim().to_owned()).filter(|commit| is_commit(commit)),
            Err(_) => (is_commit(revision) && self.snapshot(revision).is_dir()).then(|| revision.to_owned()),
        }
    }

    pub(super) fn write_ref(&self, revision: &str, commit: &str) -> Result<(), StorageError> {
        let path = self.repo().join("refs").join(revision);
        if revision == commit || self.commit_of(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        write_small(&path, commit)
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.layout.pointer_path(commit)
    }

    /// Returns a file of a commit, if it is there. A link to a missing blob does not count.
    pub(super) fn file(&self, commit: &str, name: &str) -> Option<PathBuf> {
        let path = self.snapshot(commit).join(name);
        path.is_file().then_some(path)
    }

    /// Returns a GGUF file of a commit, if all of its pieces are there.
    pub(super) fn gguf(&self, commit: &str, name: &str) -> Option<PathBuf> {
        let is_there = |piece: &String| self.file(commit, piece).is_some();
        pieces(name).iter().all(is_there).then(|| self.file(commit, name)).flatten()
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.layout.blob_path(etag)
    }

    pub(super) fn lock(&self, etag: &str) -> PathBuf {
        self.root.join(".locks").join(&self.folder).join(format!("{etag}.lock"))
    }

    /// Records that a commit has no such file, so that the hub is not asked again.
    pub(super) fn mark_missing(&self, commit: &str, name: &str) -> Result<(), StorageError> {
        let path = self.missing_mark(commit, name);
        if path.exists() { Ok(()) } else { write_small(&path, "") }
    }

    fn missing_mark(&self, commit: &str, name: &str) -> PathBuf {
        self.repo().join(".no_exist").join(commit).join(name)
    }

    /// Returns whether a GGUF file at `path`, `name` in the commit, takes images and its encoder has not been looked for.
    pub(super) fn lacks_encoder(&self, commit: &str, name: &str, path: &Path) -> bool {
        // The header of the file is read last, because its vocabulary is large.
        !self.missing_mark(commit, &encoder_mark(name)).exists()
            && mmproj_beside(&self.files(commit), name).is_none()
            && takes_images(path)
    }

    /// Creates `name` of `commit` as a link to the blob.
    pub(super) fn link(&self, commit: &str, name: &str, etag: &str) -> Result<PathBuf, StorageError> {
        let place = Place::HUB;
        let path = self.snapshot(commit).join(name);
        if let Some(folder) = path.parent() {
            place.create_folder(folder)?;
        }
        // The link goes from snapshots/<commit>/<name> up to the repository's folder.
        let up = "../".repeat(name.split('/').count() + 1);
        let target = format!("{up}blobs/{etag}");
        let fresh = path.with_file_name(format!(".{}.{etag}.link", std::process::id()));
        let _ = std::fs::remove_file(&fresh);
        let made = match symlink(Path::new(&target), &fresh) {
            Ok(()) => std::fs::rename(&fresh, &path),
            // On a file system without links, the content itself replaces the link.
            Err(_) => std::fs::rename(self.blob(etag), &path),
        };
        made.map_err(|source| place.error("link", &path, 0, source))?;
        Ok(path)
    }

    /// Returns the names of the files in a snapshot.
    pub(super) fn files(&self, commit: &str) -> Vec<String> {
        let base = self.snapshot(commit);
        let mut names = Vec::new();
        list(&base, &base, DEPTH, &mut names);
        names.retain(|name| is_safe(name));
        names.sort();
        names
    }

    /// The models of the commit that `main` stands for, or of the newest one that is there, as references and paths.
    pub(super) fn models(&self, repo: &str) -> Vec<(String, PathBuf)> {
        let Some(commit) = self.commit_of("main").or_else(|| self.newest_commit()) else { return vec![] };
        let mut models = Vec::new();
        if let Cached::Complete(path) | Cached::Usable(path) = self.directory(&commit, true) {
            models.push((repo.to_owned(), path));
        }
        let files = gguf_files(&self.files(&commit));
        let complete = files.iter().filter_map(|file| Some((format!("{repo}:{file}"), self.gguf(&commit, file)?)));
        models.extend(complete);
        models
    }

    fn newest_commit(&self) -> Option<String> {
        let snapshots = std::fs::read_dir(self.repo().join("snapshots")).ok()?.flatten();
        let newest = snapshots.max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok())?;
        newest.file_name().into_string().ok().filter(|commit| is_commit(commit))
    }

    /// What is there of a model directory at `commit`.
    pub(super) fn directory(&self, commit: &str, with_weights: bool) -> Cached {
        let folder = self.snapshot(commit);
        let has = |name: &str| folder.join(name).is_file();
        if !has(CONFIG) {
            return Cached::Incomplete(CONFIG.to_owned());
        }
        if with_weights && let Err(missing) = self.weights_are_there(commit, &folder) {
            return Cached::Incomplete(missing);
        }
        let known = |name: &&str| has(name) || self.missing_mark(commit, name).exists();
        if OPTIONAL.iter().all(known) { Cached::Complete(folder) } else { Cached::Usable(folder) }
    }

    fn weights_are_there(&self, commit: &str, folder: &Path) -> Result<(), String> {
        match weights(&self.files(commit)) {
            Weights::Sharded => {
                let index = std::fs::read(folder.join(INDEX)).map_err(|_| INDEX.to_owned())?;
                let shards = shards(&index).map_err(|error| format!("a readable {INDEX}: {error}"))?;
                shards.into_iter().find(|shard| !folder.join(shard).is_file()).map_or(Ok(()), Err)
            }
            // Shards without their index are an interrupted download of another program.
            Weights::Files(files) if files.iter().any(|file| file.contains("-of-")) => Err(INDEX.to_owned()),
            Weights::Files(_) => Ok(()),
            Weights::None => Err(SINGLE.to_owned()),
        }
    }
}

/// Returns the name under which it is recorded that a GGUF file has no mmproj file beside it.
pub(super) fn encoder_mark(name: &str) -> String {
    match name.rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/mmproj.gguf"),
        None => "mmproj.gguf".to_owned(),
    }
}

/// Returns whether `text` is a commit in hex, which is safe as the name of a folder.
pub(super) fn is_commit(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Writes to another file and renames it, so that readers see either the old or the new content.
fn write_small(path: &Path, text: &str) -> Result<(), StorageError> {
    let place = Place::HUB;
    if let Some(folder) = path.parent() {
        place.create_folder(folder)?;
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Several threads may write the same mark at the same time.
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
    let fresh = path.with_file_name(format!(".{name}.{}.{unique}", std::process::id()));
    std::fs::write(&fresh, text)
        .and_then(|()| std::fs::rename(&fresh, path))
        .map_err(|source| place.error("write", path, text.len() as u64, source))
}

fn list(base: &Path, folder: &Path, depth: usize, names: &mut Vec<String>) {
    let Ok(listing) = std::fs::read_dir(folder) else {
        return;
    };
    for path in listing.flatten().map(|entry| entry.path()) {
        if path.is_dir() && depth > 0 {
            list(base, &path, depth - 1, names);
        } else if path.is_file()
            && let Ok(name) = path.strip_prefix(base)
        {
            names.push(name.to_string_lossy().replace('\\', "/"));
        }
    }
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_target: &Path, _link: &Path) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}
