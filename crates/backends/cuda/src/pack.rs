//! Precompiled kernels: a read-only folder of [entries](crate::cache) with an index.
//!
//! A pack has priority over the cache and the compiler. A machine with a pack for its chip needs no NVRTC, and a
//! machine with NVRTC uses the pack's code too, whichever release compiled it, because machine code for a chip requires
//! only a driver of its CUDA major. A pack belongs to one build of octavo: the index contains a hash of all kernels for
//! each chip, and if the hash differs, the pack is not used and a warning is logged.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use octavo_kernels::manifest::{self, Chip, Instance, Target};
use octavo_kernels::nvrtc::Nvrtc;
use octavo_kernels::usage::{self, Usage};
use serde::{Deserialize, Serialize};

use crate::build::{compile, in_parallel};
use crate::cache::{KernelCache, Key};
use crate::libraries::{LibraryKind, OLDEST_CHIP, Places, Version, compiler_for_packs};

/// File name of the index.
const INDEX: &str = "pack.json";

/// File with the resources of each entry of machine code, by the entry's file name.
const USAGE: &str = "usage.json";

/// Index of a pack.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Index {
    /// Release of octavo that built it.
    octavo: String,
    /// Parts by the compiler's name of the target; empty while the pack is being built.
    chips: BTreeMap<String, Part>,
}

/// The part of a pack for one target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Part {
    /// Release of the NVRTC that compiled it.
    nvrtc: Version,
    /// Number of kernels.
    kernels: usize,
    /// Hash of all kernels for the chip, including those left out of the pack.
    digest: String,
}

/// A folder of precompiled kernels.
#[derive(Clone, Debug)]
pub struct KernelPack {
    folder: PathBuf,
    entries: KernelCache,
    index: Index,
}

/// Reason why there is no pack.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The folder has no index.
    #[error("{0} holds no kernel pack (no {INDEX}): `octavo kernels build --output {0}` makes one")]
    Missing(PathBuf),
    /// The index cannot be parsed.
    #[error("the kernel pack {0} cannot be read: {1}")]
    Broken(PathBuf, String),
    /// The pack cannot be written.
    #[error("the kernel pack {0} cannot be written: {1}")]
    Unwritable(PathBuf, std::io::Error),
    /// The folder contains something else.
    #[error("{0} is neither empty nor a kernel pack: name a folder of its own")]
    Occupied(PathBuf),
    /// There are no kernels for the chip.
    #[error("there are no kernels for {chip}: {oldest} is the oldest chip", chip = _0.arch(), oldest = OLDEST_CHIP.arch())]
    Chip(Chip),
    /// No kernel has a name with this prefix.
    #[error("no kernel for {0} has a name that begins with {1}")]
    Name(String, String),
    /// A kernel could not be compiled; contains a sentence.
    #[error("{0}")]
    Compiler(String),
}

/// Reason why a pack is not used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackUnfit {
    /// The pack has no kernels for the chip.
    #[error("it has kernels for {has}, not for {wanted}")]
    Chip {
        /// Requested chip.
        wanted: String,
        /// Chips in the pack.
        has: String,
    },
    /// The pack belongs to another build.
    #[error("octavo {made} made it from other kernels than those of this one: `octavo kernels build` makes it anew")]
    Stale {
        /// Release that built it.
        made: String,
    },
    /// The driver does not support its code.
    #[error("NVRTC {nvrtc} compiled it, and the driver supports CUDA {driver} only")]
    Driver {
        /// Release of the compiler.
        nvrtc: Version,
        /// CUDA version that the driver supports.
        driver: Version,
    },
}

/// Returns the hash of all kernels for a target.
fn digest(target: Target) -> String {
    let mut keys: Vec<_> = manifest::all(target.chip()).iter().map(|instance| Key::new(instance, target)).collect();
    keys.sort();
    Key::digest(&keys)
}

impl KernelPack {
    /// Reads the index of the pack in a folder.
    ///
    /// # Errors
    /// Returns an error if there is no index or it cannot be parsed.
    pub fn read(folder: &Path) -> Result<Self, PackError> {
        let path = folder.join(INDEX);
        let broken = |reason: String| PackError::Broken(folder.to_owned(), reason);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(PackError::Missing(folder.to_owned()));
            }
            Err(error) => return Err(broken(error.to_string())),
        };
        let index = serde_json::from_slice(&text).map_err(|error| broken(error.to_string()))?;
        Ok(Self { folder: folder.to_owned(), entries: KernelCache::new(folder), index })
    }

    /// Checks that its kernels for a target are those of this octavo and, if a driver is given, that the driver
    /// supports them.
    ///
    /// # Errors
    /// Returns the reason why they are not used.
    pub fn check(&self, target: Target, driver: Option<Version>) -> Result<(), PackUnfit> {
        let wanted = target.arch();
        let Some(part) = self.index.chips.get(&wanted) else {
            return Err(PackUnfit::Chip { wanted, has: self.chips() });
        };
        if part.digest != digest(target) {
            return Err(PackUnfit::Stale { made: self.index.octavo.clone() });
        }
        // A driver supports machine code of any release of its major, but PTX only of releases that it knows.
        let newest = |driver: Version| match target {
            Target::Code(_) => Version { minor: u32::MAX, ..driver },
            Target::Ptx(_) => driver,
        };
        match driver {
            Some(driver) if part.nvrtc > newest(driver) => Err(PackUnfit::Driver { nvrtc: part.nvrtc, driver }),
            _ => Ok(()),
        }
    }

    /// Returns the target of the pack whose kernels run best on a chip: its own machine code, else that of the newest earlier chip
    /// of its major, else PTX of the newest earlier chip, which the driver compiles. If a driver is given, it must support them.
    ///
    /// # Errors
    /// Returns the reason why none is used.
    pub fn target(&self, chip: Chip, driver: Option<Version>) -> Result<Target, PackUnfit> {
        let targets = self.index.chips.keys().filter_map(|arch| Target::parse(arch));
        let mut running: Vec<_> = targets.filter(|target| target.runs_on(chip)).collect();
        running.sort_by_key(|target| Reverse((matches!(target, Target::Code(_)), target.chip())));
        let mut unfit = PackUnfit::Chip { wanted: chip.arch(), has: self.chips() };
        for (rank, target) in running.into_iter().enumerate() {
            match self.check(target, driver) {
                Ok(()) => return Ok(target),
                Err(reason) if rank == 0 => unfit = reason,
                Err(_) => {}
            }
        }
        Err(unfit)
    }

    /// Checks every chip of the pack.
    ///
    /// # Errors
    /// Returns the first reason why one of its chips cannot be used.
    pub fn check_all(&self) -> Result<(), PackUnfit> {
        self.index.chips.keys().filter_map(|arch| Target::parse(arch)).try_for_each(|target| self.check(target, None))
    }

    /// Returns the code of an entry, if the pack contains it. Call [`check`](Self::check) first.
    pub(crate) fn code(&self, key: &Key, target: Target) -> Option<Vec<u8>> {
        self.entries.get(key, self.index.chips.get(&target.arch())?.nvrtc)
    }

    /// Returns the chips as text: `sm_70, sm_89`.
    fn chips(&self) -> String {
        match self.index.chips.is_empty() {
            true => "no chip (it was not finished)".to_owned(),
            false => self.index.chips.keys().map(String::as_str).collect::<Vec<_>>().join(", "),
        }
    }
}

/// Formats as `/usr/share/octavo/kernels (sm_70, sm_89; NVRTC 12.9)`.
impl fmt::Display for KernelPack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}", self.folder.display(), self.chips())?;
        let mut releases: Vec<_> = self.index.chips.values().map(|part| part.nvrtc).collect();
        releases.sort();
        releases.dedup();
        for release in releases {
            write!(f, "; NVRTC {release}")?;
        }
        f.write_str(")")
    }
}

/// Content of a pack to build.
#[derive(Clone, Debug, PartialEq)]
pub struct PackOrder {
    /// Targets to compile for: chips, with the form of the code.
    pub targets: Vec<Target>,
    /// Prefixes of the names of the instances to include; empty includes all.
    pub only: Vec<String>,
    /// Folder of the pack: one that does not exist yet, is empty, or has a pack already, which is replaced.
    pub folder: PathBuf,
    /// Folders in which NVRTC is searched before the usual places.
    pub libraries: Vec<PathBuf>,
}

/// Result of building a pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackMade {
    /// Number of kernels in the pack.
    pub kernels: usize,
    /// Number of kernels that were compiled; the others existed already.
    pub compiled: usize,
    /// Size of their code in bytes.
    pub bytes: u64,
    /// Releases and paths of the compilers, each once.
    pub compilers: Vec<(Version, PathBuf)>,
}

/// An entry to build.
struct Job {
    instance: Instance,
    target: Target,
    key: Key,
    /// Index of its compiler.
    compiler: usize,
}

/// A compiler of a pack.
struct Compiler {
    nvrtc: Nvrtc,
    path: PathBuf,
}

impl Compiler {
    fn release(&self) -> Version {
        Version::read(&self.nvrtc)
    }
}

/// Builds a pack on all processors. No driver and no GPU is needed. `progress` is called with the number of finished
/// kernels and of all kernels.
///
/// # Errors
/// Returns an error for an unknown chip or name, without a compiler, or if the folder cannot be written. Finished
/// kernels are kept and not compiled again by the next attempt.
pub fn build_pack(order: &PackOrder, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<PackMade, PackError> {
    let (jobs, compilers) = plan(order)?;
    let entries = begin(&order.folder)?;
    let unwritable = |error| PackError::Unwritable(order.folder.clone(), error);
    let known = read_usages(&order.folder);
    let there = AtomicUsize::new(0);
    let made = in_parallel(jobs.len(), |number| -> Result<_, PackError> {
        let made = jobs[number].entry(&compilers, &entries, &known);
        progress(there.fetch_add(1, Ordering::Relaxed) + 1, jobs.len());
        made.map_err(|error| match error {
            EntryError::Compiler(reason) => PackError::Compiler(reason),
            EntryError::Unwritable(error) => unwritable(error),
        })
    })?;
    let names: Vec<_> = jobs.iter().map(|job| job.key.file(compilers[job.compiler].release())).collect();
    entries.keep_only(&names).map_err(unwritable)?;
    let usages = names.into_iter().zip(&made).filter_map(|(name, entry)| Some((name, entry.usage.clone()?))).collect();
    write_json(&entries, USAGE, &Usages(usages)).map_err(unwritable)?;
    write_index(&entries, parts(&jobs, &compilers)).map_err(unwritable)?;
    Ok(PackMade {
        kernels: made.len(),
        compiled: made.iter().filter(|entry| entry.compiled).count(),
        bytes: made.iter().map(|entry| entry.bytes as u64).sum(),
        compilers: compilers.into_iter().map(|compiler| (compiler.release(), compiler.path)).collect(),
    })
}

/// An entry in the pack.
struct Entry {
    bytes: usize,
    /// Whether it was compiled by this build.
    compiled: bool,
    /// Resources; `None` for PTX, because the driver determines them.
    usage: Option<Usage>,
}

/// Reason why an entry was not built.
enum EntryError {
    Compiler(String),
    Unwritable(std::io::Error),
}

/// Resources of entries, by their file names.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
struct Usages(BTreeMap<String, Usage>);

/// Reads the resources of the entries of an earlier pack; empty if they are unknown, so that the entries are compiled
/// again.
fn read_usages(folder: &Path) -> Usages {
    let text = std::fs::read(folder.join(USAGE)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

impl Job {
    /// Returns the entry from the folder, or compiles it.
    fn entry(&self, compilers: &[Compiler], entries: &KernelCache, known: &Usages) -> Result<Entry, EntryError> {
        let compiler = &compilers[self.compiler];
        let usage = known.0.get(&self.key.file(compiler.release())).cloned();
        let is_known = usage.is_some() || matches!(self.target, Target::Ptx(_));
        if let Some(code) = entries.get(&self.key, compiler.release()).filter(|_| is_known) {
            return Ok(Entry { bytes: code.len(), compiled: false, usage });
        }
        let made = compile(&compiler.nvrtc, &self.instance, self.target).map_err(EntryError::Compiler)?;
        entries.put(&self.key, compiler.release(), &made.code).map_err(EntryError::Unwritable)?;
        let usage = usage::from_log(&made.log).remove(&self.instance.name);
        Ok(Entry { bytes: made.code.len(), compiled: true, usage })
    }
}

/// Returns the entries to build and their compilers.
fn plan(order: &PackOrder) -> Result<(Vec<Job>, Vec<Compiler>), PackError> {
    let found = Places::usual(&order.libraries).find(LibraryKind::Nvrtc);
    let (mut jobs, mut compilers) = (Vec::new(), Vec::<Compiler>::new());
    for &target in &order.targets {
        let chip = target.chip();
        let instances = wanted(target, &order.only)?;
        let (nvrtc, path) = compiler_for_packs(&found, chip).map_err(PackError::Compiler)?;
        let known = compilers.iter().position(|known| known.path == path);
        let compiler = known.unwrap_or(compilers.len());
        if known.is_none() {
            compilers.push(Compiler { nvrtc, path });
        }
        jobs.extend(instances.into_iter().map(|instance| {
            let key = Key::new(&instance, target);
            Job { instance, target, key, compiler }
        }));
    }
    Ok((jobs, compilers))
}

/// Returns the parts of the index for the entries.
fn parts(jobs: &[Job], compilers: &[Compiler]) -> BTreeMap<String, Part> {
    let mut parts = BTreeMap::new();
    for job in jobs {
        let nvrtc = compilers[job.compiler].release();
        let digest = || digest(job.target);
        let part = parts.entry(job.target.arch()).or_insert_with(|| Part { nvrtc, kernels: 0, digest: digest() });
        part.kernels += 1;
    }
    parts
}

/// Returns the instances for a target whose names begin with one of `only`.
fn wanted(target: Target, only: &[String]) -> Result<Vec<Instance>, PackError> {
    let chip = target.chip();
    if (chip.major, chip.minor) < (OLDEST_CHIP.major, OLDEST_CHIP.minor) {
        return Err(PackError::Chip(chip));
    }
    let mut instances = manifest::all(chip);
    let begins = |instance: &Instance, start: &String| instance.name.starts_with(start);
    if let Some(start) = only.iter().find(|start| !instances.iter().any(|instance| begins(instance, start))) {
        return Err(PackError::Name(target.arch(), start.clone()));
    }
    if !only.is_empty() {
        instances.retain(|instance| only.iter().any(|start| begins(instance, start)));
    }
    Ok(instances)
}

/// Prepares the folder of a pack and marks it as one, so that an interrupted build can be resumed.
fn begin(folder: &Path) -> Result<KernelCache, PackError> {
    let entries = KernelCache::new(folder);
    match KernelPack::read(folder) {
        Err(PackError::Missing(_)) if entries.names().is_empty() => {}
        Err(PackError::Missing(folder)) => return Err(PackError::Occupied(folder)),
        // An index that cannot be parsed is replaced too.
        Ok(_) | Err(_) => {}
    }
    write_index(&entries, BTreeMap::new()).map_err(|error| PackError::Unwritable(folder.to_owned(), error))?;
    Ok(entries)
}

fn write_index(entries: &KernelCache, chips: BTreeMap<String, Part>) -> std::io::Result<()> {
    write_json(entries, INDEX, &Index { octavo: env!("CARGO_PKG_VERSION").to_owned(), chips })
}

fn write_json(entries: &KernelCache, name: &str, value: &impl Serialize) -> std::io::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    entries.write(name, &[&text])
}

#[cfg(test)]
mod tests {
    use super::*;

    const R12: Version = Version { major: 12, minor: 9 };
    const R13: Version = Version { major: 13, minor: 0 };

    const VOLTA: Target = Target::Code(Chip::SM_70);
    const ADA: Target = Target::Code(Chip::SM_89);
    const HOPPER: Target = Target::Code(Chip::SM_90);

    /// Returns a pack whose index has this content.
    fn pack(folder: &Path, octavo: &str, chips: &[(Target, Version, String)]) -> KernelPack {
        let part = |(target, nvrtc, digest): &(Target, Version, String)| {
            (target.arch(), Part { nvrtc: *nvrtc, kernels: 1, digest: digest.clone() })
        };
        let index = Index { octavo: octavo.to_owned(), chips: chips.iter().map(part).collect() };
        std::fs::write(folder.join(INDEX), serde_json::to_vec(&index).unwrap()).unwrap();
        KernelPack::read(folder).unwrap()
    }

    #[test]
    fn a_pack_is_for_its_chips_its_kernels_and_drivers_that_take_it() {
        let root = tempfile::tempdir().unwrap();
        let chips = [
            (VOLTA, R12, digest(VOLTA)),
            (ADA, R13, digest(ADA)),
            (HOPPER, R12, digest(VOLTA)),
            (Target::Ptx(Chip::SM_70), R12, digest(Target::Ptx(Chip::SM_70))),
        ];
        let pack = pack(root.path(), "0.0.9", &chips);
        assert_eq!(
            pack.to_string(),
            format!("{} (compute_70, sm_70, sm_89, sm_90a; NVRTC 12.9; NVRTC 13.0)", root.path().display())
        );
        for driver in [None, Some(Version { major: 12, minor: 0 }), Some(R13)] {
            assert_eq!(pack.check(VOLTA, driver), Ok(()), "a minor release is no matter");
        }
        assert_eq!(pack.check(ADA, Some(R13)), Ok(()));
        let said = |target, driver| pack.check(target, driver).unwrap_err().to_string();
        // The check succeeds for PTX.
        assert_eq!(pack.check(Target::Ptx(Chip::SM_70), Some(R12)), Ok(()));
        assert_eq!(
            said(Target::Ptx(Chip::SM_70), Some(Version { major: 12, minor: 0 })),
            "NVRTC 12.9 compiled it, and the driver supports CUDA 12.0 only"
        );
        assert_eq!(said(ADA, Some(R12)), "NVRTC 13.0 compiled it, and the driver supports CUDA 12.9 only");
        assert_eq!(
            said(HOPPER, None),
            "octavo 0.0.9 made it from other kernels than those of this one: `octavo kernels build` makes it anew"
        );
        let sm_86 = Target::Code(Chip::SM_86);
        assert_eq!(said(sm_86, None), "it has kernels for compute_70, sm_70, sm_89, sm_90a, not for sm_86");
        assert!(matches!(pack.check_all(), Err(PackUnfit::Stale { .. })));
    }

    #[test]
    fn a_chip_without_code_of_its_own_takes_that_of_its_major_or_ptx() {
        let root = tempfile::tempdir().unwrap();
        let targets =
            ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_100", "compute_100"].map(|arch| Target::parse(arch).unwrap());
        let pack = pack(root.path(), "0.1.0", &targets.map(|target| (target, R12, digest(target))));
        let on = |major, minor, driver| pack.target(Chip { major, minor }, driver).map(Target::arch);
        for ((major, minor), expected) in [
            ((7, 5), "sm_75"),
            ((8, 0), "sm_80"),
            ((8, 6), "sm_86"),
            ((8, 9), "sm_86"),
            ((9, 0), "sm_90a"),
            ((10, 3), "sm_100"),
            ((12, 0), "compute_100"),
        ] {
            assert_eq!(on(major, minor, Some(R13)).as_deref(), Ok(expected), "{major}.{minor}");
        }
        assert!(matches!(on(7, 0, None), Err(PackUnfit::Chip { .. })), "older than all");
        // A driver of CUDA 12.0 knows the code of its major, but not PTX of 12.9.
        let old = Some(Version { major: 12, minor: 0 });
        assert_eq!(on(8, 9, old).as_deref(), Ok("sm_86"));
        assert!(matches!(on(12, 0, old), Err(PackUnfit::Driver { .. })));
    }

    #[test]
    fn the_digest_is_of_every_kernel_for_the_chip() {
        let digests = [VOLTA, ADA, HOPPER].map(digest);
        assert_eq!(digests, [VOLTA, ADA, HOPPER].map(digest));
        assert_ne!(digests[1], digests[2]);
        assert_ne!(digests[0], digest(Target::Ptx(Chip::SM_70)));
    }

    #[test]
    fn a_folder_without_a_pack_or_with_a_broken_one_is_said() {
        let root = tempfile::tempdir().unwrap();
        let said = || KernelPack::read(root.path()).unwrap_err().to_string();
        let path = root.path().display();
        assert_eq!(
            said(),
            format!("{path} holds no kernel pack (no pack.json): `octavo kernels build --output {path}` makes one")
        );
        std::fs::write(root.path().join(INDEX), "{").unwrap();
        assert!(said().starts_with(&format!("the kernel pack {path} cannot be read: EOF")), "{}", said());
        std::fs::write(root.path().join(INDEX), r#"{"octavo": "0.1.0", "chips": {}}"#).unwrap();
        let unfinished = KernelPack::read(root.path()).unwrap().check(VOLTA, None).unwrap_err().to_string();
        assert_eq!(unfinished, "it has kernels for no chip (it was not finished), not for sm_70");
    }

    #[test]
    fn a_pack_is_put_where_nothing_else_is() {
        let root = tempfile::tempdir().unwrap();
        begin(&root.path().join("new")).unwrap();
        begin(&root.path().join("new")).unwrap();
        std::fs::write(root.path().join("new").join(INDEX), "{").unwrap();
        begin(&root.path().join("new")).unwrap();
        let error = begin(root.path()).unwrap_err();
        assert!(matches!(error, PackError::Occupied(_)), "{error}");
        assert!(matches!(begin(Path::new("/proc/no/such")).unwrap_err(), PackError::Unwritable(..)));
    }

    #[test]
    fn instances_are_chosen_by_the_start_of_their_names() {
        let all = manifest::all(Chip::SM_70);
        assert_eq!(wanted(VOLTA, &[]).unwrap(), all);
        let some = wanted(VOLTA, &["sampling".into(), "copy_blocks".into()]).unwrap();
        assert!(some.len() > 1 && some.len() < all.len());
        assert!(some.iter().all(|i| i.name.starts_with("sampling") || i.name == "copy_blocks"));
        let error = wanted(VOLTA, &["sampling".into(), "nothing".into()]).unwrap_err().to_string();
        assert_eq!(error, "no kernel for sm_70 has a name that begins with nothing");
        let error = wanted(Target::Code(Chip { major: 6, minor: 1 }), &[]).unwrap_err().to_string();
        assert_eq!(error, "there are no kernels for sm_61: sm_70 is the oldest chip");
    }
}
