//! From a URL to the bytes of a file.
//!
//! `http:` and `https:` URLs are fetched with limits on size and time. Every hop of a redirect is checked like the first
//! URL: its scheme, its domain, and the addresses that its host resolves to. A connection is made to an address that was
//! checked, so a name that resolves differently the next time gains nothing. `data:` URLs are decoded, and `file:` URLs
//! are read below one folder.

mod address;
mod client;
mod file;
mod inline;
mod memory;
mod resolve;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use url::Url;

use crate::error::{MediaError, SettingsError};
use crate::workers::off_thread;
use client::{Attempt, Client, Failure};
use file::Folder;
use memory::{FileLease, FileMemory};

pub use address::{Network, NetworkError};
pub use resolve::{Resolver, SystemResolver};

/// Where images may come from, and how much time and memory they may take. The defaults are vLLM's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchSettings {
    /// Time of the first attempt (`VLLM_IMAGE_FETCH_TIMEOUT`). Each further attempt has four times as much.
    pub timeout: Duration,
    /// While a fetch waits for memory, a host that sends less than 256 KiB in this time loses its own.
    pub patience: Duration,
    /// Number of attempts (`VLLM_MEDIA_FETCH_MAX_RETRIES`), at least 1. Only timeouts, failed connections and responses
    /// with a status of 500 or more are tried again.
    pub attempts: u32,
    /// Pause before the second attempt. Each further pause is four times as long.
    pub pause: Duration,
    /// Whether redirects are followed (`VLLM_MEDIA_URL_ALLOW_REDIRECTS`).
    pub redirects: bool,
    /// Largest file in bytes (`VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB`).
    pub max_bytes: u64,
    /// Host names that images may come from (`--allowed-media-domains`). Empty means all.
    pub domains: Vec<String>,
    /// Networks whose addresses hosts may have although they are not public: private, loopback, link-local and so on.
    pub private_networks: Vec<Network>,
    /// The folder that `file:` URLs may name (`--allowed-local-media-path`).
    pub folder: Option<PathBuf>,
    /// A PEM file of certificate authorities that replaces the usual ones.
    pub authorities: Option<PathBuf>,
}

impl Default for FetchSettings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(5),
            patience: Duration::from_secs(1),
            attempts: 3,
            pause: Duration::from_secs(1),
            redirects: true,
            max_bytes: 256 << 20,
            domains: vec![],
            private_networks: vec![],
            folder: None,
            authorities: None,
        }
    }
}

/// Factor between the times of successive attempts, and between the pauses before them.
const BACKOFF: u32 = 4;

/// The bytes of a file, and the memory that they occupy.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) bytes: Bytes,
    _lease: FileLease,
}

/// Fetches files.
#[derive(Debug)]
pub(crate) struct Fetcher {
    settings: FetchSettings,
    folder: Option<Folder>,
    client: Client,
    memory: FileMemory,
}

impl Fetcher {
    /// `file_bytes` bounds the memory of the files that are being fetched or waiting to be decoded. One more file of the
    /// largest size may come on top.
    ///
    /// # Errors
    /// The folder or the certificate authorities cannot be used.
    pub(crate) fn new(
        settings: FetchSettings,
        file_bytes: u64,
        resolver: Arc<dyn Resolver>,
    ) -> Result<Self, SettingsError> {
        let folder = settings.folder.as_deref().map(Folder::new).transpose()?;
        let client = Client::new(&settings, resolver)?;
        let memory = FileMemory::new(file_bytes, settings.patience);
        Ok(Self { settings, folder, client, memory })
    }

    /// The bytes behind a URL.
    pub(crate) async fn fetch(&self, source: &Arc<str>) -> Result<File, MediaError> {
        let scheme = source.split_once(':').map(|(scheme, _)| scheme.to_ascii_lowercase());
        match scheme.as_deref() {
            Some("data") => {
                let lease = self.memory.reserve(inline::size(source)).await;
                let (source, max_bytes) = (Arc::clone(source), self.settings.max_bytes);
                let bytes = off_thread(move || inline::decode(&source, max_bytes)).await??;
                Ok(File { bytes: bytes.into(), _lease: lease })
            }
            Some("http" | "https") => {
                let url = Url::parse(source).map_err(|_| client::invalid())?;
                self.fetch_http(&url).await
            }
            Some("file") => {
                let folder = self.folder.as_ref().ok_or(MediaError::LocalFiles)?;
                let (file, size) = folder.open(source, self.settings.max_bytes).await?;
                let lease = self.memory.reserve(size).await;
                Ok(File { bytes: file::read(file, size).await?.into(), _lease: lease })
            }
            _ => Err(MediaError::Scheme),
        }
    }

    async fn fetch_http(&self, url: &Url) -> Result<File, MediaError> {
        let (mut limit, mut pause) = (self.settings.timeout, self.settings.pause);
        let mut attempt = 1;
        loop {
            let reason = match self.client.get(url, Attempt::new(&self.settings, &self.memory, limit)).await {
                Ok((bytes, lease)) => return Ok(File { bytes, _lease: lease }),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(reason)) => reason,
                Err(Failure::Late) => format!("no complete response within {} seconds", limit.as_secs_f64()),
            };
            tracing::debug!(host = url.host_str(), attempt, reason, "fetching an image failed");
            if attempt >= self.settings.attempts {
                return Err(MediaError::Fetch(reason));
            }
            attempt += 1;
            tokio::time::sleep(pause).await;
            (limit, pause) = (limit.saturating_mul(BACKOFF), pause.saturating_mul(BACKOFF));
        }
    }
}

/// Whether a source holds the file itself.
pub(crate) fn is_inline(source: &str) -> bool {
    source.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"))
}

/// The size limit as an error.
fn too_large(max_bytes: u64) -> MediaError {
    MediaError::Fetch(format!("the file exceeds the maximum of {max_bytes} bytes"))
}
