//! Models of the Hugging Face hub, through the cache of its Python clients.
//!
//! A model that is complete in the cache is used without a request, so a restarted server serves the same weights, with
//! or without a network. The hub is asked if files are missing or if the caller wants to know of changes.

mod cache;
mod client;
mod download;
mod error;
mod select;

use std::path::{Path, PathBuf};

use crate::config::ConfigError;
use crate::family::check_architecture;
use crate::pieces::{first_piece, pieces};
use crate::progress::Progress;
use crate::resolve::{HubOptions, Retry};

use cache::{Cached, RepoCache, encoder_mark};
use client::Client;
use download::Download;
use select::{
    CONFIG, INDEX, OPTIONAL, Weights, gguf_files, is_safe, mmproj_beside, module_files, of_quant, shards, weights,
};

pub use error::HubError;
pub(crate) use select::{is_gguf, is_mmproj};

/// Choice of a GGUF file in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GgufChoice {
    /// The path in the repository.
    File(String),
    /// The quantisation (`Q4_K_M`), as in llama.cpp.
    Quant(String),
}

/// A model in the cache.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HubModel {
    /// Path of the directory or the GGUF file.
    pub(crate) path: PathBuf,
    /// Commit of the model.
    pub(crate) commit: String,
}

/// The models in the hub's cache: `org/name` or `org/name:file.gguf`, and the path.
pub(crate) fn cached(root: &Path) -> Vec<(String, PathBuf)> {
    let Ok(listing) = std::fs::read_dir(root) else { return vec![] };
    let folders = listing.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    // A name of the hub has no `--`.
    let repos = folders.filter_map(|folder| Some(folder.strip_prefix("models--")?.replacen("--", "/", 1)));
    repos.flat_map(|repo| RepoCache::new(root, &repo).models(&repo)).collect()
}

/// How to get at one revision of one repository.
pub(crate) struct HubRepo<'a> {
    pub(crate) options: &'a HubOptions,
    pub(crate) offline: bool,
    /// Whether the hub is asked even if the model is complete in the cache.
    pub(crate) refresh: bool,
    pub(crate) progress: &'a dyn Progress,
    /// Repository, `org/name`.
    pub(crate) repo: &'a str,
    /// Branch, tag or commit.
    pub(crate) revision: &'a str,
    /// Whether the weights of a directory are fetched.
    pub(crate) with_weights: bool,
    /// Refuse an architecture that has no program, before its weights are fetched.
    pub(crate) require_served: bool,
}

impl HubRepo<'_> {
    /// Returns the whole model as a directory. A repository with a single GGUF file and no safetensors gives that file.
    pub(crate) fn directory(&self) -> Result<HubModel, HubError> {
        self.check_revision()?;
        let cache = self.cache();
        let mut missing = String::new();
        let mut fallback = None;
        if let Some(commit) = cache.commit_of(self.revision) {
            match cache.directory(&commit, self.with_weights) {
                Cached::Complete(path) if !self.refresh => return Ok(HubModel { path, commit }),
                Cached::Complete(path) | Cached::Usable(path) => fallback = Some(HubModel { path, commit }),
                Cached::Incomplete(what) => match gguf_files(&cache.files(&commit)).as_slice() {
                    [only] if cache.gguf(&commit, only).is_some() => {
                        fallback = Some(HubModel { path: cache.snapshot(&commit).join(only), commit });
                    }
                    _ => missing = format!("of commit {commit}, {what} is missing"),
                },
            }
        }
        self.cached_or(fallback, missing, |options| self.fetch_directory(options, &cache))
    }

    /// Returns a GGUF file of the repository.
    pub(crate) fn gguf(&self, choice: &GgufChoice) -> Result<HubModel, HubError> {
        self.check_revision()?;
        let cache = self.cache();
        let mut fallback = None;
        if let Some(commit) = cache.commit_of(self.revision) {
            let name = match choice {
                GgufChoice::File(name) => is_safe(name).then(|| first_piece(name)),
                choice => self.pick(&cache.files(&commit), choice).ok(),
            };
            let found = name.and_then(|name| cache.gguf(&commit, &name).map(|path| (path, name)));
            match found {
                Some((path, name)) if !self.refresh && !cache.lacks_encoder(&commit, &name, &path) => {
                    return Ok(HubModel { path, commit });
                }
                Some((path, _)) => fallback = Some(HubModel { path, commit }),
                None => {}
            }
        }
        self.cached_or(fallback, String::new(), |options| self.fetch_gguf(options, &cache, choice))
    }

    fn cache(&self) -> RepoCache {
        RepoCache::new(&self.options.cache_dir, self.repo)
    }

    /// Checks the revision, which becomes a path in the cache.
    fn check_revision(&self) -> Result<(), HubError> {
        if is_safe(self.revision) {
            return Ok(());
        }
        Err(HubError::NoSuchRevision { repo: self.repo.to_owned(), revision: self.revision.to_owned() })
    }

    /// Fetches the model unless offline. If the hub cannot be reached, a usable copy in the cache is returned.
    fn cached_or(
        &self,
        cached: Option<HubModel>,
        missing: String,
        fetch: impl FnOnce(&HubOptions) -> Result<HubModel, HubError>,
    ) -> Result<HubModel, HubError> {
        if self.offline {
            return cached.ok_or_else(|| HubError::NotCached {
                what: format!("{} at {}", self.repo, self.revision),
                folder: self.options.cache_dir.clone(),
                detail: missing,
            });
        }
        let Some(cached) = cached else {
            return fetch(self.options);
        };
        // A usable copy exists, so a single attempt is enough.
        let retry = Retry { attempts: 1, ..self.options.retry };
        match fetch(&HubOptions { retry, ..self.options.clone() }) {
            Err(error) if error.may_pass() => {
                let commit = &cached.commit;
                self.progress.message(&format!("using {} as it is in the cache (commit {commit}): {error}", self.repo));
                Ok(cached)
            }
            other => other,
        }
    }

    /// Returns the commit of the revision and the names of its files.
    fn info(&self, client: &Client<'_>) -> Result<(String, Vec<String>), HubError> {
        let info = client.retried(|| client.repo_info(self.repo, self.revision))?;
        let names: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
        match names.iter().find(|name| !is_safe(name)) {
            Some(name) => Err(HubError::UnsafeName { repo: self.repo.to_owned(), name: name.clone() }),
            None => Ok((info.sha, names)),
        }
    }

    fn fetch_directory(&self, options: &HubOptions, cache: &RepoCache) -> Result<HubModel, HubError> {
        let client = Client::new(options, self.progress)?;
        let (commit, names) = self.info(&client)?;
        let has = |name: &str| names.iter().any(|other| other == name);
        let weights = weights(&names);
        if weights == Weights::None && self.with_weights {
            let name = self.only_gguf(&names)?;
            let path = self.fetch_one(&client, cache, (&commit, &names), &name)?;
            return Ok(HubModel { path, commit });
        }
        if !has(CONFIG) {
            return Err(self.not_a_model(format!("it has no {CONFIG}")));
        }
        let download = Download { client: &client, cache, progress: self.progress, repo: self.repo, commit: &commit };
        // Small files first: what is wrong with them shows before the weights are fetched.
        let config = download.file(CONFIG)?;
        if self.require_served {
            // A file that vanished meanwhile is found missing by whoever opens the model.
            let config = std::fs::read(config).unwrap_or_default();
            let not_served =
                |error: ConfigError| HubError::NotServed { repo: self.repo.to_owned(), reason: error.to_string() };
            check_architecture(&config).map_err(not_served)?;
        }
        for name in OPTIONAL {
            if has(name) {
                download.file(name)?;
            } else {
                cache.mark_missing(&commit, name)?;
            }
        }
        module_files(&names, self.with_weights).try_for_each(|name| download.file(name).map(drop))?;
        match weights {
            _ if !self.with_weights => {}
            Weights::Sharded => self.fetch_shards(&download, &names)?,
            Weights::Files(files) => files.iter().try_for_each(|name| download.file(name).map(drop))?,
            Weights::None => {}
        }
        // The revision is updated last, so that it keeps its former value until all files are there.
        cache.write_ref(self.revision, &commit)?;
        Ok(HubModel { path: cache.snapshot(&commit), commit })
    }

    fn fetch_shards(&self, download: &Download<'_>, names: &[String]) -> Result<(), HubError> {
        let index = download.file(INDEX)?;
        let bad = |reason: String| self.not_a_model(format!("{INDEX} cannot be used: {reason}"));
        let bytes = std::fs::read(&index).map_err(|error| bad(error.to_string()))?;
        let shards = shards(&bytes).map_err(bad)?;
        if let Some(missing) = shards.iter().find(|shard| !names.contains(shard)) {
            return Err(bad(format!("it names {missing}, which the repository lacks")));
        }
        shards.iter().try_for_each(|shard| download.file(shard).map(drop))
    }

    fn fetch_gguf(&self, options: &HubOptions, cache: &RepoCache, choice: &GgufChoice) -> Result<HubModel, HubError> {
        let client = Client::new(options, self.progress)?;
        let (commit, names) = self.info(&client)?;
        let name = self.pick(&names, choice)?;
        let path = self.fetch_one(&client, cache, (&commit, &names), &name)?;
        Ok(HubModel { path, commit })
    }

    /// Returns a GGUF file of a commit, which has the files `names`, and fetches its other pieces and the encoder of its
    /// images, if there are any.
    fn fetch_one(
        &self,
        client: &Client<'_>,
        cache: &RepoCache,
        (commit, names): (&str, &[String]),
        name: &str,
    ) -> Result<PathBuf, HubError> {
        let download = Download { client, cache, progress: self.progress, repo: self.repo, commit };
        let pieces = pieces(name);
        if let Some(missing) = pieces.iter().find(|piece| !names.contains(piece)) {
            return Err(self.not_a_model(format!("{missing} is missing among its files")));
        }
        let path = download.file(name)?;
        pieces[1..].iter().try_for_each(|piece| download.file(piece).map(drop))?;
        if cache.lacks_encoder(commit, name, &path) {
            match mmproj_beside(names, name) {
                Some(encoder) => download.file(encoder).map(drop)?,
                None => cache.mark_missing(commit, &encoder_mark(name))?,
            }
        }
        cache.write_ref(self.revision, commit)?;
        Ok(path)
    }

    /// Returns the chosen GGUF file among the files of the repository.
    fn pick(&self, names: &[String], choice: &GgufChoice) -> Result<String, HubError> {
        let name = match choice {
            GgufChoice::File(name) if names.contains(name) => first_piece(name),
            GgufChoice::File(name) => {
                let available = gguf_files(names);
                if available.is_empty() {
                    let (repo, file, revision) = (self.repo.to_owned(), name.clone(), self.revision.to_owned());
                    return Err(HubError::NoSuchFile { repo, file, revision });
                }
                return Err(self.choose(format!("{} has no file {name}", self.repo), available));
            }
            GgufChoice::Quant(quant) => {
                let available = gguf_files(names);
                match of_quant(&available, quant).as_slice() {
                    [only] => (*only).clone(),
                    [] if available.is_empty() => return Err(self.not_a_model("it has no GGUF file".to_owned())),
                    [] => return Err(self.choose(format!("{} has no GGUF file of {quant}", self.repo), available)),
                    several => {
                        let available = several.iter().map(|name| (*name).clone()).collect();
                        return Err(self.choose(format!("{} has several GGUF files of {quant}", self.repo), available));
                    }
                }
            }
        };
        Ok(name)
    }

    /// Returns the only GGUF file of a repository without safetensors.
    fn only_gguf(&self, names: &[String]) -> Result<String, HubError> {
        match gguf_files(names).as_slice() {
            [only] => Ok(only.clone()),
            [] => {
                let pickled = names.iter().any(|name| name.ends_with(".bin") || name.ends_with(".pt"));
                let hint = if pickled { " (pickled .bin and .pt files are not read: they can run code)" } else { "" };
                Err(self.not_a_model(format!("it has neither safetensors nor GGUF weights{hint}")))
            }
            several => Err(self.choose(format!("{} has several GGUF files", self.repo), several.to_vec())),
        }
    }

    fn not_a_model(&self, reason: String) -> HubError {
        HubError::NotAModel { repo: self.repo.to_owned(), revision: self.revision.to_owned(), reason }
    }

    fn choose(&self, reason: String, available: Vec<String>) -> HubError {
        HubError::Choose { repo: self.repo.to_owned(), reason, available }
    }
}
