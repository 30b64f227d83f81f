//! Compiled kernels on disk.
//!
//! An entry is a folder with the code and its checksum, named by the hash of what was compiled and the compiler's release. It is made
//! beside its place and renamed to it, so that it is there whole or not at all; of two processes that make the same, one wins.
//! What cannot be read, or was altered, counts as missing; what cannot be written is only slow next time.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

const CODE: &str = "code.cubin";
const CHECKSUM: &str = "code.sha256";

/// The folder of compiled kernels.
#[derive(Clone, Debug)]
pub(crate) struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// A cache in a folder that need not be there yet.
    pub(crate) fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The name of an entry: a hash of what its code depends on.
    pub(crate) fn key<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
        let mut hash = Sha256::new();
        for part in parts {
            // With the length, so that no two lists read alike.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hex(&hash.finalize())
    }

    /// The code of an entry, if it is there and whole.
    pub(crate) fn get(&self, key: &str, version: &str) -> Option<Vec<u8>> {
        self.read(&entry(key, version))
    }

    /// The code of an entry of any release.
    pub(crate) fn get_any(&self, key: &str) -> Option<Vec<u8>> {
        let names = fs::read_dir(&self.folder).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let releases = names.filter(|name| {
            let release = name.strip_prefix(key).and_then(|rest| rest.strip_prefix('-'));
            release.is_some_and(|release| release.bytes().all(|b| b.is_ascii_digit() || b == b'.'))
        });
        releases.filter_map(|name| self.read(&name)).next()
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        let folder = self.folder.join(name);
        let code = fs::read(folder.join(CODE)).ok()?;
        let whole = fs::read_to_string(folder.join(CHECKSUM)).is_ok_and(|sum| sum == hex(&Sha256::digest(&code)));
        if !whole {
            tracing::warn!(path = %folder.display(), "an entry of the kernel cache is corrupt: it is compiled again");
        }
        whole.then_some(code)
    }

    /// Keeps the code of an entry, in place of a corrupt one.
    pub(crate) fn put(&self, key: &str, version: &str, code: &[u8]) {
        if let Err(error) = self.try_put(&entry(key, version), code) {
            tracing::warn!(path = %self.folder.display(), %error, "the kernel cache cannot be written");
        }
    }

    fn try_put(&self, name: &str, code: &[u8]) -> io::Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let place = self.folder.join(name);
        let unique = format!("{name}-draft.{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let draft = self.folder.join(&unique);
        fs::create_dir_all(&draft)?;
        let written = write(&draft.join(CODE), code)
            .and_then(|()| write(&draft.join(CHECKSUM), hex(&Sha256::digest(code)).as_bytes()))
            .and_then(|()| self.place(name, &draft, &place, &unique));
        if written.is_err() {
            let _ = fs::remove_dir_all(&draft);
        }
        written
    }

    /// Renames a finished draft to its place.
    fn place(&self, name: &str, draft: &Path, place: &Path, unique: &str) -> io::Result<()> {
        if fs::rename(draft, place).is_ok() {
            return Ok(());
        }
        if self.read(name).is_some() {
            // Another process was faster.
            return fs::remove_dir_all(draft);
        }
        // A folder that is not empty is not replaced by a rename.
        let corrupt = self.folder.join(format!("{unique}.corrupt"));
        fs::rename(place, &corrupt)?;
        let placed = fs::rename(draft, place);
        fs::remove_dir_all(corrupt)?;
        placed
    }
}

/// The name of an entry.
fn entry(key: &str, version: &str) -> String {
    format!("{key}-{version}")
}

/// Writes a file, and waits until it is on the disk: a rename must not be there before what it names.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = fs::File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_is_got() {
        let root = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(root.path().join("not/yet"));
        assert_eq!(cache.get("k", "12.9"), None);
        cache.put("k", "12.9", b"code");
        assert_eq!(cache.get("k", "12.9").as_deref(), Some(&b"code"[..]));
        assert_eq!([cache.get("other", "12.9"), cache.get("k", "12.8")], [None, None]);
        assert_eq!(cache.get_any("k").as_deref(), Some(&b"code"[..]));
        assert_eq!([cache.get_any("other"), cache.get_any("")], [None, None]);
        let entries = fs::read_dir(root.path().join("not/yet")).unwrap().count();
        assert_eq!(entries, 1, "no draft is left");
    }

    #[test]
    fn a_corrupt_entry_is_missing_and_replaced() {
        let root = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(root.path());
        type Spoil = fn(&Path);
        let spoils: [Spoil; 4] = [
            |entry| fs::write(entry.join(CODE), b"codf").unwrap(),
            |entry| fs::write(entry.join(CODE), b"").unwrap(),
            |entry| fs::remove_file(entry.join(CHECKSUM)).unwrap(),
            |entry| fs::remove_file(entry.join(CODE)).unwrap(),
        ];
        for spoil in spoils {
            cache.put("k", "1", b"code");
            spoil(&root.path().join("k-1"));
            assert_eq!([cache.get("k", "1"), cache.get_any("k")], [None, None]);
            cache.put("k", "1", b"code");
            assert_eq!(cache.get("k", "1").as_deref(), Some(&b"code"[..]));
        }
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "nothing corrupt is left");
    }

    #[test]
    fn many_may_put_the_same_at_once() {
        let root = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(root.path());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for key in 0..20 {
                        let (key, code) = (key.to_string(), format!("code {key}"));
                        cache.put(&key, "1", code.as_bytes());
                        assert_eq!(cache.get(&key, "1").as_deref(), Some(code.as_bytes()));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 20);
    }

    #[test]
    fn a_folder_that_cannot_be_is_no_error() {
        let cache = KernelCache::new("/proc/no/such/folder");
        cache.put("k", "1", b"code");
        assert_eq!(cache.get("k", "1"), None);
    }

    #[test]
    fn keys_tell_every_part() {
        assert_eq!(KernelCache::key(["a", "b"]), KernelCache::key(["a", "b"]));
        let others = [vec!["ab"], vec!["a", "", "b"], vec!["b", "a"], vec!["ab", ""], vec!["a"]];
        for other in others {
            assert_ne!(KernelCache::key(["a", "b"]), KernelCache::key(other));
        }
        assert_eq!(KernelCache::key(["a"]).len(), 64);
    }
}
