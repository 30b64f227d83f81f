//! Why the hub did not give a model.

use std::path::PathBuf;

use crate::fetch::StorageError;

/// Why the hub did not give a model.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// 401 or 403.
    #[error("{}", access_denied(.repo, *.status, .page, *.has_token, .detail))]
    AccessDenied {
        /// `org/name`.
        repo: String,
        /// HTTP status.
        status: u16,
        /// Where access is requested.
        page: String,
        /// A token was sent.
        has_token: bool,
        /// What the hub said; may be empty.
        detail: String,
    },
    /// 404 for the repository.
    #[error("there is no model {repo} on {endpoint} (a private one needs HF_TOKEN): check the name")]
    NoSuchRepository {
        /// `org/name`.
        repo: String,
        /// The hub.
        endpoint: String,
    },
    /// 404 for the revision.
    #[error("{repo} has no branch, tag or commit {revision}")]
    NoSuchRevision {
        /// `org/name`.
        repo: String,
        /// What was asked for.
        revision: String,
    },
    /// 404 for the file.
    #[error("{repo} has no file {file} at {revision}")]
    NoSuchFile {
        /// `org/name`.
        repo: String,
        /// Path inside the repository.
        file: String,
        /// Where it was looked for.
        revision: String,
    },
    /// 429 or 5xx, after all attempts.
    #[error("{url} answered with HTTP {status}{}: try again later", in_brackets(.detail))]
    Busy {
        /// What was asked for.
        url: String,
        /// HTTP status.
        status: u16,
        /// What it said; may be empty.
        detail: String,
        /// Seconds that it asked us to wait.
        retry_after: Option<u64>,
    },
    /// No connection, a timeout or TLS trouble, after all attempts.
    #[error(
        "{url} could not be reached ({reason}): check the network, the proxy and HF_ENDPOINT; with HF_HUB_OFFLINE=1 only \
         what is in the cache is used"
    )]
    Unreachable {
        /// What was asked for.
        url: String,
        /// Whether there was no sign of life: no connection, or no answer in time.
        silent: bool,
        /// What failed.
        reason: String,
    },
    /// The connection ended before the file did, after all attempts.
    #[error(
        "{file} of {repo} ended after {got} of {expected} bytes ({reason}); what is there is kept, pull again to go on"
    )]
    Truncated {
        /// `org/name`.
        repo: String,
        /// Path inside the repository.
        file: String,
        /// Bytes that are there.
        got: u64,
        /// Bytes that it should have.
        expected: u64,
        /// What failed.
        reason: String,
    },
    /// An answer that cannot be used.
    #[error("{url} gave an answer that is not the hub's: {reason}")]
    BadReply {
        /// What was asked for.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// A whole file whose content is not what the hub says.
    #[error(
        "{file} of {repo} has the SHA-256 {actual}, the hub says {expected}: it was damaged on the way and dropped"
    )]
    WrongChecksum {
        /// `org/name`.
        repo: String,
        /// Path inside the repository.
        file: String,
        /// What was computed.
        actual: String,
        /// What the hub says.
        expected: String,
    },
    /// A file name that would leave its folder.
    #[error("{repo} lists a file with the unsafe name {name:?}: nothing of it is used")]
    UnsafeName {
        /// `org/name`.
        repo: String,
        /// The name.
        name: String,
    },
    /// Not a model, or in a format that is not read.
    #[error("{repo} at {revision} cannot be served: {reason}")]
    NotAModel {
        /// `org/name`.
        repo: String,
        /// Where it was looked for.
        revision: String,
        /// What is missing.
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
        /// `org/name`.
        repo: String,
        /// Why none was taken.
        reason: String,
        /// GGUF files of the repository.
        available: Vec<String>,
    },
    /// Offline, and not in the cache.
    #[error("{what} is not in the cache {folder}{}, and offline mode is on: pull it once without", in_brackets(.detail))]
    NotCached {
        /// The model.
        what: String,
        /// The hub cache.
        folder: PathBuf,
        /// What is missing of it; may be empty.
        detail: String,
    },
    /// The certificates of `SSL_CERT_FILE` cannot be used.
    #[error("the certificates in {path} cannot be used: {reason}")]
    Certificates {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The cache could not be used.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl HubError {
    /// The same request may succeed later.
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
