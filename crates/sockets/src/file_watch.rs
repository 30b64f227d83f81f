//! Files that are read again when they change.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// Minimum interval of the checks.
const LEAST_INTERVAL: Duration = Duration::from_millis(10);

/// The version of a file, which changes when the file is written or replaced, also behind a symbolic link, as Kubernetes
/// replaces the files of a Secret. `None` if there is no file.
type Stamp = Option<(i64, i64, u64, u64)>;

/// Files and the versions that were seen last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileWatch {
    files: Vec<PathBuf>,
    seen: Vec<Stamp>,
}

impl FileWatch {
    /// Begins to watch files, before they are read, so that no change is missed.
    pub fn new(files: Vec<PathBuf>) -> Self {
        Self { seen: stamps(&files), files }
    }

    /// Waits until a file has changed since the last call, checking at an interval.
    pub async fn changed(&mut self, every: Duration) {
        loop {
            sleep(every.max(LEAST_INTERVAL)).await;
            let files = self.files.clone();
            let Ok(now) = spawn_blocking(move || stamps(&files)).await else { continue };
            if now != self.seen {
                self.seen = now;
                return;
            }
        }
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files.iter().map(|file| stamp(file)).collect()
}

fn stamp(file: &Path) -> Stamp {
    let file = fs::metadata(file).ok()?;
    Some((file.mtime(), file.mtime_nsec(), file.size(), file.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[tokio::test]
    async fn written_replaced_and_relinked_files_are_seen() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("one"), "1").unwrap();
        fs::write(at("two"), "2").unwrap();
        symlink("one", at("link")).unwrap();
        let mut watch = FileWatch::new(vec![at("link")]);
        let every = Duration::from_millis(10);
        symlink("two", at("next")).unwrap();
        fs::rename(at("next"), at("link")).unwrap();
        watch.changed(every).await;
        fs::write(at("two"), "longer").unwrap();
        watch.changed(every).await;
        fs::remove_file(at("two")).unwrap();
        watch.changed(every).await;
        let unchanged = tokio::time::timeout(Duration::from_millis(100), watch.changed(every)).await;
        assert!(unchanged.is_err(), "a file that is not there has not changed");
    }
}
