//! Compiled kernels on disk, in the format of the kernel cache and of a [pack](crate::pack).
//!
//! An entry is the code of one instance for one chip: a file with the code, followed by its SHA-256. Its name describes
//! the instance, contains a hash of everything on which the code depends, and ends with the compiler's release. It is
//! written under another name and renamed, so that it exists completely or not at all. If two processes create the same
//! entry, the later one replaces it with the same content, and a reader of the earlier file is unaffected. A file that
//! cannot be read or was modified counts as missing.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::slice;
use std::time::Duration;

use octavo_kernels::manifest::{self, Instance, Target};
use octavo_kernels::nvrtc;
use octavo_kernels::sources::HEADERS;
use sha2::{Digest, Sha256};

use crate::libraries::Version;

/// Length of the checksum at the end of an entry, in bytes.
const CHECKSUM: usize = 32;

/// Suffixes of the names of entries: of machine code, and of PTX.
const ENDINGS: [&str; 2] = [".cubin", ".ptx"];

/// Prefix of the names of unfinished files.
const DRAFT: &str = ".draft-";

/// Age from which an unfinished file belongs to a process that has died; writing a file takes less than a second.
const GIVEN_UP: Duration = Duration::from_secs(3600);

/// Everything on which an entry's code depends, except the compiler's release.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Target, name of the instance and hash.
    stem: String,
    ending: &'static str,
}

impl Key {
    /// Returns the key of an instance for a target.
    pub(crate) fn new(instance: &Instance, target: Target) -> Self {
        let text = manifest::program(instance.source, slice::from_ref(instance));
        let options = nvrtc::options(target);
        let headers = HEADERS.iter().flat_map(|(name, text)| [*name, *text]);
        let parts = [text.as_str()].into_iter().chain(headers).chain(options.iter().map(String::as_str));
        let [code, ptx] = ENDINGS;
        Self {
            stem: format!("{}-{}-{}", target.arch(), instance.name, hash(parts)),
            ending: if matches!(target, Target::Code(_)) { code } else { ptx },
        }
    }

    /// Returns one hash of many keys.
    pub(crate) fn digest(keys: &[Self]) -> String {
        hash(keys.iter().map(|key| key.stem.as_str()))
    }

    /// Returns the name of its entry.
    pub(crate) fn file(&self, release: Version) -> String {
        format!("{}-{release}{}", self.stem, self.ending)
    }
}

/// Returns the hash of a list of texts: 128 bits in hexadecimal.
pub(crate) fn hash<'a>(parts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // The length is included, so that different lists have different input.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A folder of entries.
#[derive(Clone, Debug)]
pub(crate) struct KernelCache {
    folder: PathBuf,
}

impl KernelCache {
    /// Creates a cache in a folder, which need not exist yet.
    pub(crate) fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Returns the code of an entry, if it exists and is intact.
    pub(crate) fn get(&self, key: &Key, release: Version) -> Option<Vec<u8>> {
        self.read(&key.file(release))
    }

    /// Returns the code of an entry of any release that is `wanted`.
    pub(crate) fn get_any(&self, key: &Key, wanted: impl Fn(Version) -> bool) -> Option<Vec<u8>> {
        let names = self.names();
        let of_key = names.iter().filter(|name| {
            let rest = name.strip_prefix(&key.stem).and_then(|rest| rest.strip_prefix('-')?.strip_suffix(key.ending));
            rest.and_then(Version::parse).is_some_and(&wanted)
        });
        of_key.filter_map(|name| self.read(name)).next()
    }

    /// Stores the code of an entry and replaces a former one.
    pub(crate) fn put(&self, key: &Key, release: Version, code: &[u8]) -> io::Result<()> {
        let checksum = Sha256::digest(code);
        self.write(&key.file(release), &[code, &checksum[..]])
    }

    /// Writes a file of the folder, completely or not at all.
    pub(crate) fn write(&self, name: &str, parts: &[&[u8]]) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        // The random name is unique even if containers with equal process numbers share the folder. Other users may
        // read the file if the mask permits.
        let mut builder = tempfile::Builder::new();
        let mut draft = builder.prefix(DRAFT).permissions(Permissions::from_mode(0o666)).tempfile_in(&self.folder)?;
        for part in parts {
            draft.write_all(part)?;
        }
        // The content must be on the disk before the rename.
        draft.as_file().sync_all()?;
        draft.persist(self.folder.join(name)).map(drop).map_err(|error| error.error)
    }

    /// Removes entries except those with these names, and unfinished files.
    pub(crate) fn keep_only(&self, names: &[String]) -> io::Result<()> {
        for name in self.names() {
            let path = self.folder.join(&name);
            let entry = ENDINGS.iter().any(|ending| name.ends_with(ending)) && !names.contains(&name);
            if entry || name.starts_with(DRAFT) && is_given_up(&path) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Returns the names of the files in the folder.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    fn read(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.folder.join(name);
        let mut bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => return unusable(&path, &error.to_string()),
        };
        let code = bytes.len().saturating_sub(CHECKSUM);
        if code == 0 || Sha256::digest(&bytes[..code])[..] != bytes[code..] {
            return unusable(&path, "it is corrupt");
        }
        bytes.truncate(code);
        Some(bytes)
    }
}

/// Returns whether an unfinished file is so old that no process writes it any more.
fn is_given_up(path: &Path) -> bool {
    let changed = fs::metadata(path).and_then(|metadata| metadata.modified());
    changed.is_ok_and(|changed| changed.elapsed().is_ok_and(|age| age > GIVEN_UP))
}

/// Logs why an entry is not used.
fn unusable(path: &Path, reason: &str) -> Option<Vec<u8>> {
    tracing::warn!(path = %path.display(), reason, "a compiled kernel is not used");
    None
}

#[cfg(test)]
mod tests {
    use octavo_kernels::manifest::{Chip, sampling_adjust, sampling_draw};

    use super::*;

    const RELEASE: Version = Version { major: 12, minor: 9 };
    const OTHER: Version = Version { major: 13, minor: 0 };

    fn key(name: &str) -> Key {
        Key { stem: name.to_owned(), ending: ENDINGS[0] }
    }

    #[test]
    fn what_was_put_is_got() {
        let root = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(root.path().join("not/yet"));
        let (k, other) = (key("k"), key("k-other"));
        assert_eq!(cache.get(&k, RELEASE), None);
        cache.put(&k, RELEASE, b"code").unwrap();
        assert_eq!(cache.get(&k, RELEASE).as_deref(), Some(&b"code"[..]));
        assert_eq!([cache.get(&other, RELEASE), cache.get(&k, OTHER)], [None, None]);
        assert_eq!(cache.get_any(&k, |release| release == RELEASE).as_deref(), Some(&b"code"[..]));
        assert_eq!([cache.get_any(&k, |release| release == OTHER), cache.get_any(&other, |_| true)], [None, None]);
        cache.put(&other, RELEASE, b"another").unwrap();
        assert_eq!(cache.get_any(&k, |_| true).as_deref(), Some(&b"code"[..]), "the start of a name is not the name");
        let names = cache.names();
        assert_eq!(names.len(), 2, "no draft is left: {names:?}");
        let mode = fs::metadata(root.path().join("not/yet/k-12.9.cubin")).unwrap().permissions().mode();
        assert_eq!(mode & 0o400, 0o400);
        assert_ne!(mode & 0o044, 0, "others may read it, under the usual mask");
    }

    #[test]
    fn a_corrupt_entry_is_missing_and_replaced() {
        let root = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(root.path());
        let path = root.path().join("k-12.9.cubin");
        let whole = || {
            cache.put(&key("k"), RELEASE, b"code").unwrap();
            fs::read(&path).unwrap()
        };
        let mut altered = whole();
        altered[0] ^= 1;
        let spoiled = [altered, whole()[1..].to_vec(), whole()[..35].to_vec(), b"code".to_vec(), Vec::new()];
        for bytes in spoiled {
            fs::write(&path, &bytes).unwrap();
            assert_eq!([cache.get(&key("k"), RELEASE), cache.get_any(&key("k"), |_| true)], [None, None], "{bytes:?}");
            whole();
            assert_eq!(cache.get(&key("k"), RELEASE).as_deref(), Some(&b"code"[..]));
        }
    }

    #[test]
    fn many_may_put_the_same_at_once() {
        let root = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(root.path());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for number in 0..20 {
                        let (key, code) = (key(&number.to_string()), format!("code {number}"));
                        cache.put(&key, RELEASE, code.as_bytes()).unwrap();
                        assert_eq!(cache.get(&key, RELEASE).as_deref(), Some(code.as_bytes()));
                    }
                });
            }
        });
        assert_eq!(cache.names().len(), 20);
    }

    #[test]
    fn what_is_not_to_be_kept_is_removed_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let cache = KernelCache::new(root.path());
        for name in ["a", "b"] {
            cache.put(&key(name), RELEASE, b"code").unwrap();
        }
        for name in [".draft-1", ".draft-2", "notes.txt"] {
            fs::write(root.path().join(name), "").unwrap();
        }
        let died = fs::File::options().write(true).open(root.path().join(".draft-1")).unwrap();
        died.set_modified(std::time::SystemTime::now() - 2 * GIVEN_UP).unwrap();
        cache.keep_only(&[key("b").file(RELEASE)]).unwrap();
        let mut names = cache.names();
        names.sort();
        assert_eq!(names, [".draft-2", "b-12.9.cubin", "notes.txt"], "somebody may be writing the second");
    }

    #[test]
    fn a_folder_that_cannot_be_is_an_error_of_writing_alone() {
        let cache = KernelCache::new("/proc/no/such/folder");
        assert!(cache.put(&key("k"), RELEASE, b"code").is_err());
        assert_eq!(cache.get(&key("k"), RELEASE), None);
    }

    #[test]
    fn a_key_tells_instance_and_chip_and_the_text() {
        let volta = Target::Code(Chip::SM_70);
        let draw = Key::new(&sampling_draw(), volta);
        assert!(draw.stem.starts_with("sm_70-sampling_draw-"), "{draw:?}");
        assert_eq!(draw, Key::new(&sampling_draw(), volta));
        let ptx = Key::new(&sampling_draw(), Target::Ptx(Chip::SM_70)).file(RELEASE);
        assert!(ptx.starts_with("compute_70-sampling_draw-") && ptx.ends_with("-12.9.ptx"), "{ptx}");
        let longer = Instance { call: sampling_draw().call + " ", ..sampling_draw() };
        for other in [
            Key::new(&sampling_draw(), Target::Code(Chip::SM_89)),
            Key::new(&sampling_adjust(), volta),
            Key::new(&longer, volta),
        ] {
            assert_ne!(draw, other);
        }
        assert_ne!(Key::digest(std::slice::from_ref(&draw)), Key::digest(&[draw.clone(), draw]));
    }

    #[test]
    fn hashes_tell_every_part() {
        assert_eq!(hash(["a", "b"]), hash(["a", "b"]));
        for other in [vec!["ab"], vec!["a", "", "b"], vec!["b", "a"], vec!["ab", ""], vec!["a"]] {
            assert_ne!(hash(["a", "b"]), hash(other));
        }
        assert_eq!(hash(["a"]).len(), 32);
    }
}
