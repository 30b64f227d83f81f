//! Download of one file of a repository into the cache.
//!
//! hf-hub's own download is not used for these reasons: it compares neither size nor checksum, so that a truncated file
//! becomes a model; it has no time limits, so that a silent hub stops the start; it trusts only Mozilla's authorities,
//! so that a private mirror cannot be used; and it returns a 401 as a bare status.

use std::path::{Path, PathBuf};

use ureq::http::header;

use crate::fetch::{Leftover, Lock, Place, StagedFile, WriteError};
use crate::progress::{Progress, ProgressTask};

use super::HubError;
use super::cache::RepoCache;
use super::client::{About, Client, FileMetadata};

/// Number of bytes after which an attempt does not count as failed: large files survive many disconnects.
const PROGRESS: u64 = 1 << 20;

/// A repository at one commit that is being fetched.
pub(super) struct Download<'a> {
    pub(super) client: &'a Client<'a>,
    pub(super) cache: &'a RepoCache,
    pub(super) progress: &'a dyn Progress,
    pub(super) repo: &'a str,
    pub(super) commit: &'a str,
}

impl Download<'_> {
    /// Returns the file in the cache and downloads it if necessary.
    pub(super) fn file(&self, name: &str) -> Result<PathBuf, HubError> {
        if let Some(path) = self.cache.file(self.commit, name) {
            return Ok(path);
        }
        let url = self.client.file_url(self.repo, self.commit, name);
        let about = About { repo: self.repo, revision: self.commit, file: Some(name) };
        let metadata = self.client.retried(|| self.client.metadata(&url, about))?;
        let blob = self.cache.blob(&metadata.etag);
        let _lock = Lock::acquire(Place::HUB, &self.cache.lock(&metadata.etag), name, self.progress)?;
        // Another process may have fetched it during the wait for the lock. A blob of the wrong size is left over from
        // a crash of a less careful program.
        let there =
            blob.metadata().is_ok_and(|data| data.is_file() && metadata.size.is_none_or(|size| data.len() == size));
        if !there {
            if let Some(folder) = blob.parent() {
                Place::HUB.create_folder(folder)?;
            }
            self.blob(&url, about, &metadata, &blob)?;
        }
        Ok(self.cache.link(self.commit, name, &metadata.etag)?)
    }

    fn blob(&self, url: &str, about: About<'_>, metadata: &FileMetadata, blob: &Path) -> Result<(), HubError> {
        let name = about.file.unwrap_or_default();
        let task = self.progress.begin(name, metadata.size);
        // A partial download of another program is resumed only if the whole file can be verified afterwards.
        let mut staged = match (metadata.sha256(), metadata.size) {
            (Some(_), Some(size)) => StagedFile::resume(Place::HUB, blob, size)?,
            _ => StagedFile::create(Place::HUB, blob, Leftover::Remove)?,
        };
        let mut resumed = staged.written() > 0;
        let mut failures = 0;
        loop {
            let before = staged.written();
            match self.attempt(url, about, metadata, &mut staged, &*task) {
                Ok(()) => match self.checked(name, metadata, &staged) {
                    Ok(()) => break,
                    Err(error) => {
                        staged.discard();
                        if !resumed {
                            return Err(error);
                        }
                        // The old part belongs to another file, so the download starts again.
                        resumed = false;
                        staged = StagedFile::create(Place::HUB, blob, Leftover::Keep)?;
                    }
                },
                Err(error) if error.may_pass() => {
                    let advanced = metadata.sha256().is_some() && staged.written() >= before + PROGRESS;
                    failures = if advanced { 1 } else { failures + 1 };
                    self.client.pause(failures, error)?;
                    if metadata.sha256().is_none() {
                        staged = StagedFile::create(Place::HUB, blob, Leftover::Remove)?;
                    }
                }
                Err(error) => return Err(error),
            }
        }
        staged.commit()?;
        task.finish();
        Ok(())
    }

    /// Requests the missing part and reads it to its end.
    fn attempt(
        &self,
        url: &str,
        about: About<'_>,
        metadata: &FileMetadata,
        staged: &mut StagedFile,
        task: &dyn ProgressTask,
    ) -> Result<(), HubError> {
        if metadata.size == Some(staged.written()) {
            return Ok(());
        }
        task.advance_to(staged.written());
        let reply = self.client.content(url, staged.written(), about)?;
        let status = reply.status().as_u16();
        let bad = |reason: String| HubError::BadReply { url: url.to_owned(), reason };
        if status == 206 {
            let range = reply.headers().get(header::CONTENT_RANGE).and_then(|range| range.to_str().ok()).unwrap_or("");
            if !range.starts_with(&format!("bytes {}-", staged.written())) {
                return Err(bad(format!("it sent the range {range:?} in place of the one from {}", staged.written())));
            }
        } else {
            // 200 means that the server does not support ranges, 416 that there is nothing to continue. Both start from
            // the beginning.
            staged.restart()?;
            if status == 416 {
                return Err(self.truncated(about, metadata, staged, "the server refused to continue it".to_owned()));
            }
        }
        let limit = metadata.size.map_or(u64::MAX, |size| size - staged.written());
        let mut body = reply.into_body().into_with_config().limit(u64::MAX).reader();
        match staged.append(&mut body, limit, &mut |done| task.advance_to(done)) {
            Ok(()) if metadata.size.is_none_or(|size| size == staged.written()) => Ok(()),
            Ok(()) => Err(self.truncated(about, metadata, staged, "the connection was closed".to_owned())),
            Err(WriteError::Source(error)) => Err(self.truncated(about, metadata, staged, error.to_string())),
            Err(WriteError::TooLong) => {
                staged.restart()?;
                Err(bad(format!("it sent more than the {limit} bytes that it announced")))
            }
            Err(WriteError::Storage(error)) => Err(error.into()),
        }
    }

    fn truncated(&self, about: About<'_>, metadata: &FileMetadata, staged: &StagedFile, reason: String) -> HubError {
        let (repo, file) = (self.repo.to_owned(), about.file.unwrap_or_default().to_owned());
        HubError::Truncated { repo, file, got: staged.written(), expected: metadata.size.unwrap_or(0), reason }
    }

    fn checked(&self, name: &str, metadata: &FileMetadata, staged: &StagedFile) -> Result<(), HubError> {
        let Some(expected) = metadata.sha256() else {
            return Ok(());
        };
        let actual = staged.sha256();
        if expected.eq_ignore_ascii_case(&actual) {
            return Ok(());
        }
        let (repo, file, expected) = (self.repo.to_owned(), name.to_owned(), expected.to_owned());
        Err(HubError::WrongChecksum { repo, file, actual, expected })
    }
}
