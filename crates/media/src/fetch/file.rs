//! `file:` URLs below one folder.

use std::path::{Path, PathBuf};

use tokio::fs::File;
use tokio::io::AsyncReadExt;
use url::Url;

use super::too_large;
use crate::error::{MediaError, SettingsError};

/// The folder that may be read.
#[derive(Debug)]
pub(super) struct Folder {
    /// As it was given.
    name: String,
    /// Without links.
    path: PathBuf,
}

impl Folder {
    pub(super) fn new(path: &Path) -> Result<Self, SettingsError> {
        let name = path.display().to_string();
        let bad = |reason: String| SettingsError::Folder { path: name.clone(), reason };
        let path = path.canonicalize().map_err(|error| bad(error.to_string()))?;
        if !path.is_dir() {
            return Err(bad("it is not a folder".to_owned()));
        }
        Ok(Self { name, path })
    }

    /// Opens a file of at most `max_bytes` bytes that lies below the folder once all links are resolved. Returns the file
    /// and its size.
    pub(super) async fn open(&self, source: &str, max_bytes: u64) -> Result<(File, u64), MediaError> {
        let path = Url::parse(source).ok().and_then(|url| url.to_file_path().ok());
        let path =
            path.ok_or_else(|| MediaError::Image("the file URL has no absolute path on this host".to_owned()))?;
        let outside = || MediaError::LocalPath { path: path.display().to_string(), folder: self.name.clone() };
        let unreadable = |_| MediaError::Image("the file cannot be read".to_owned());
        let resolved = tokio::fs::canonicalize(&path).await;
        // A path outside gets the same answer whether or not it exists.
        let resolved = match resolved {
            Ok(resolved) => resolved,
            Err(error) if path.starts_with(&self.path) => return Err(unreadable(error)),
            Err(_) => return Err(outside()),
        };
        if !resolved.starts_with(&self.path) {
            return Err(outside());
        }
        // Opening a named pipe would wait for a writer.
        let kind = tokio::fs::metadata(&resolved).await.map_err(unreadable)?;
        if !kind.is_file() {
            return Err(MediaError::Image("the path is not a regular file".to_owned()));
        }
        if kind.len() > max_bytes {
            return Err(too_large(max_bytes));
        }
        Ok((File::open(&resolved).await.map_err(unreadable)?, kind.len()))
    }
}

/// Reads at most `size` bytes.
pub(super) async fn read(file: File, size: u64) -> Result<Vec<u8>, MediaError> {
    let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or(0));
    let read = file.take(size).read_to_end(&mut bytes).await;
    read.map_err(|_| MediaError::Image("the file cannot be read".to_owned()))?;
    Ok(bytes)
}
