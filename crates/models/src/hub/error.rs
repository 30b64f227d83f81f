//! Errors of the Hugging Face hub.

use std::path::PathBuf;

use crate::fetch::StorageError;

/// Reason why the hub did not provide a model.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The hub answered 401 or 403.
    #[error("{}", access_denied(.repo, *.status, .page, *.has_token, .detail))]
    AccessDenied {
        /// Repository, `org/name`.
        repo: String,
        /// HTTP status.
        status: u16,
        /// Page on which access is requested.
        page: String,
        /// Whether a token was sent.
        has_token: bool,
        /// Message of the hub; may be empty.
        detail: String,
    },
    /// The hub answered 404 for the repository.
    #[error("there is no model {repo} on {endpoint} (a private one needs HF_TOKEN): check the name")]
    NoSuchRepository {
        /// Repository, `org/name`.
        repo: String,
        /// URL of the hub.
        endpoint: String,
    },
    /// The hub answered 404 for the revision.
    #[error("{repo} has no branch, tag or commit {revision}")]
    NoSuchRevision {
        /// Repository, `org/name`.
        repo: String,
        /// Requested revision.
        revision: String,
    },
    /// The hub answered 404 for the file.
    #[error("{repo} has no file {file} at {revision}")]
    NoSuchFile {
        /// Repository, `org/name`.
        repo: String,
        /// Path inside the repository.
        file: String,
        /// Revision of the request.
        revision: String,
    },
    /// The hub answered 429 or 5xx in all attempts.
    #[error("{url} answered with HTTP {status}{}: try again later", in_brackets(.detail))]
    Busy {
        /// Requested URL.
        url: String,
        /// HTTP status.
        status: u16,
        /// Message of the hub; may be empty.
        detail: String,
        /// Value of `Retry-After` in seconds.
        retry_after: Option<u64>,
    },
    /// All attempts failed to connect, timed out or had a TLS error.
    #[error(
        "{url} could not be reached ({reason}): check the network, the proxy and HF_ENDPOINT; with HF_HUB_OFFLINE=1 only \
         what is in the cache is used"
    )]
    Unreachable {
        /// Requested URL.
        url: String,
        /// Whether there was no sign of life: no connection, or no answer in time.
        silent: bool,
        /// What failed.
        reason: String,
    },
    /// The connection ended before the file did, in all attempts.
    #[error(
        "{file} of {repo} ended after {got} of {expected} bytes ({reason}); what is there is kept, pull again to go on"
    )]
    Truncated {
        /// Repository, `org/name`.
        repo: String,
        /// Path inside the repository.
        file: String,
        /// Number of bytes downloaded.
        got: u64,
        /// Expected size in bytes.
        expected: u64,
        /// Description of the failure.
        reason: String,
    },
    /// The response cannot be used.
    #[error("{url} gave an answer that is not the hub's: {reason}")]
    BadReply {
        /// Requested URL.
        url: String,
        /// Description of the defect.
        reason: String,
    },
    /// The checksum of a complete file is wrong.
    #[error(
        "{file} of {repo} has the SHA-256 {actual}, the hub says {expected}: it was damaged on the way and dropped"
    )]
    WrongChecksum {
        /// Repository, `org/name`.
        repo: String,
        /// Path inside the repository.
        file: String,
        /// Checksum computed.
        actual: String,
        /// Checksum according to the hub.
        expected: String,
    },
    /// A file name would leave its folder.
    #[error("{repo} lists a file with the unsafe name {name:?}: nothing of it is used")]
    UnsafeName {
        /// Repository, `org/name`.
        repo: String,
        /// Name of the file.
        name: String,
    },
    /// The repository contains no model, or none in a supported format.
    #[error("{repo} at {revision} cannot be served: {reason}")]
    NotAModel {
        /// Repository, `org/name`.
        repo: String,
        /// Revision of the request.
        revision: String,
        /// Missing part.
        reason: String,
    },
    /// A model of an architecture that has no program.
    #[error("{repo} cannot be served yet: {reason}")]
    NotServed {
        /// `org/name`.
        repo: String,
        /// Which architecture it is, and which there are.
        reason: String,
    },
    /// Which of several GGUF files?
    #[error("{reason}; name one of: {}", choices(.repo, .available))]
    Choose {
        /// Repository, `org/name`.
        repo: String,
        /// Reason why no file was chosen.
        reason: String,
        /// GGUF files in the repository.
        available: Vec<String>,
    },
    /// Offline mode is on and the model is not in the cache.
    #[error("{what} is not in the cache {folder}{}, and offline mode is on: pull it once without", in_brackets(.detail))]
    NotCached {
        /// Name of the model.
        what: String,
        /// Folder of the hub cache.
        folder: PathBuf,
        /// Missing part; may be empty.
        detail: String,
    },
    /// The certificates of `SSL_CERT_FILE` cannot be used.
    #[error("the certificates in {path} cannot be used: {reason}")]
    Certificates {
        /// Path of the file.
        path: PathBuf,
        /// Description of the defect.
        reason: String,
    },
    /// The cache could not be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl HubError {
    /// Returns whether the same request may succeed later.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, HubError::Busy { .. } | HubError::Unreachable { .. } | HubError::Truncated { .. })
    }
}

fn access_denied(repo: &str, status: u16, page: &str, has_token: bool, detail: &str) -> String {
    let what = format!("{repo} is gated or private, or does not exist (HTTP {status}{})", after_comma(detail));
    if has_token {
        format!("{what}: request access at {page} with the account of HF_TOKEN, or set HF_TOKEN to a token that has it")
    } else {
        format!("{what}: request access at {page}, then set HF_TOKEN to a token of that account")
    }
}

fn after_comma(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(", {detail}") }
}

fn in_brackets(detail: &str) -> String {
    if detail.is_empty() { String::new() } else { format!(" ({detail})") }
}

fn choices(repo: &str, available: &[String]) -> String {
    const SHOWN: usize = 20;
    let mut text: Vec<String> = available.iter().take(SHOWN).map(|file| format!("{repo}:{file}")).collect();
    if available.len() > SHOWN {
        text.push(format!("and {} more", available.len() - SHOWN));
    }
    text.join(", ")
}
