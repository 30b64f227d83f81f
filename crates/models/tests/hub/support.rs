//! Shared code of the tests.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use octavo_models::progress::Silent;
use octavo_models::{Progress, ProgressTask, ResolveError, ResolveOptions, ResolvedModel, resolve};
use tempfile::TempDir;

use crate::server::Hub;

pub(crate) const COMMIT: &str = "1111111111111111111111111111111111111111";
pub(crate) const NEWER: &str = "2222222222222222222222222222222222222222";
pub(crate) const REPO: &str = "org/name";

/// A separate cache, and the options to use it.
pub(crate) struct Machine {
    pub(crate) options: ResolveOptions,
    _folder: TempDir,
}

impl Machine {
    /// Creates a machine that reaches `hub` and retries without pauses.
    pub(crate) fn with(hub: &Hub) -> Machine {
        let mut machine = Machine::alone();
        machine.options.hub.endpoint = hub.endpoint();
        machine
    }

    /// Creates a machine without a network.
    pub(crate) fn alone() -> Machine {
        let folder = tempfile::tempdir().unwrap();
        let mut options = ResolveOptions::from_variables(|_| None);
        options.cache_dir = folder.path().join("octavo");
        options.hub.cache_dir = folder.path().join("hub");
        // No server listens there.
        options.hub.endpoint = "http://127.0.0.1:1".to_owned();
        options.hub.retry.first_delay = Duration::ZERO;
        options.hub.retry.attempts = 3;
        options.pip = Some(vec!["/nowhere/pip".into()]);
        Machine { options, _folder: folder }
    }

    pub(crate) fn resolve(&self, reference: &str) -> Result<ResolvedModel, ResolveError> {
        resolve(reference, &self.options, &Silent)
    }

    /// Returns the message of the expected error.
    pub(crate) fn error(&self, reference: &str) -> String {
        match self.resolve(reference) {
            Ok(model) => panic!("{reference} gave {}", model.path.display()),
            Err(error) => error.to_string(),
        }
    }

    pub(crate) fn repo_folder(&self) -> PathBuf {
        self.options.hub.cache_dir.join("models--org--name")
    }
}

/// Returns a config and weights in one file of `size` bytes.
pub(crate) fn small_model(size: usize) -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("config.json", br#"{"model_type": "llama"}"#.to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
        ("model.safetensors", content(size)),
        ("pytorch_model.bin", b"never fetched".to_vec()),
    ]
}

pub(crate) fn publish(hub: &Hub, commit: &str, files: &[(&'static str, Vec<u8>)]) {
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (*name, content.as_slice())).collect();
    hub.publish(REPO, commit, &files);
}

/// Returns bytes that vary with their position.
pub(crate) fn content(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect()
}

/// Returns the names of all files below a folder, relative to it.
pub(crate) fn files_below(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for path in std::fs::read_dir(&next).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
            } else {
                names.push(path.strip_prefix(folder).unwrap().to_string_lossy().into_owned());
            }
        }
    }
    names.sort();
    names
}

/// Returns the unfinished files and marks below a folder.
pub(crate) fn leftovers(folder: &Path) -> Vec<String> {
    files_below(folder).into_iter().filter(|name| name.ends_with(".incomplete") || name.contains("wheels")).collect()
}

/// Records the messages and the progress of each task.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) messages: Mutex<Vec<String>>,
    pub(crate) tasks: Mutex<Vec<String>>,
}

impl Progress for Recorder {
    fn begin(&self, label: &str, _total: Option<u64>) -> Box<dyn ProgressTask> {
        self.tasks.lock().unwrap().push(label.to_owned());
        Box::new(Silent)
    }

    fn message(&self, text: &str) {
        self.messages.lock().unwrap().push(text.to_owned());
    }
}
