//! Selection of the library for a driver and chip, as pure functions of the libraries found.

use std::cmp::Reverse;
use std::fmt;
use std::path::PathBuf;

use octavo_kernels::manifest::Chip;
use octavo_kernels::nvrtc::Nvrtc;
use serde::{Deserialize, Serialize};

/// Oldest chip with kernels.
pub const OLDEST_CHIP: Chip = Chip::SM_70;

/// Returns 70, 89 or 90: the number used by compilers and libraries.
const fn number(chip: Chip) -> u32 {
    chip.major * 10 + chip.minor
}

/// A release of CUDA. In files it is written as text, `12.9`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Version {
    /// Major number: 12 in 12.9.
    pub major: u32,
    /// Minor number: 9 in 12.9.
    pub minor: u32,
}

impl Version {
    /// Parses a release such as `12.9`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (major, minor) = text.split_once('.')?;
        Some(Self { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }

    /// Converts a number such as `12090`, the form used by the driver.
    pub(crate) fn of_number(number: i32) -> Self {
        let number = number.unsigned_abs();
        Self { major: number / 1000, minor: number % 1000 / 10 }
    }

    /// Returns the release of a compiler.
    pub(crate) fn read(nvrtc: &Nvrtc) -> Self {
        let (major, minor) = nvrtc.version();
        Self { major, minor }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl TryFrom<String> for Version {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text).ok_or_else(|| format!("{text} is no release of CUDA"))
    }
}

impl From<Version> for String {
    fn from(version: Version) -> Self {
        version.to_string()
    }
}

/// A library that CUDA programs load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LibraryKind {
    /// The compiler of kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Communication between several GPUs. It is found and reported, but not used yet. Its version numbers are
    /// independent of CUDA's.
    Nccl,
}

impl LibraryKind {
    /// Returns the start of the file's name.
    pub const fn stem(self) -> &'static str {
        match self {
            Self::Nvrtc => "libnvrtc",
            Self::CublasLt => "libcublasLt",
            Self::Nccl => "libnccl",
        }
    }

    /// Returns the numbers at the end of its file's name by which the loader is asked, best first.
    pub(crate) const fn sonames(self) -> &'static [u32] {
        match self {
            Self::Nvrtc | Self::CublasLt => &[13, 12],
            Self::Nccl => &[2],
        }
    }

    /// Returns the Python package of the library for a CUDA major.
    pub fn package(self, major: u32) -> String {
        let name = match self {
            Self::Nvrtc => "nvidia-cuda-nvrtc",
            Self::CublasLt => "nvidia-cublas",
            // Its packages have different names under CUDA 13 too.
            Self::Nccl => return format!("nvidia-nccl-cu{major}"),
        };
        // From CUDA 13 on, the packages have no suffix.
        if major >= 13 { format!("{name}=={major}.*") } else { format!("{name}-cu{major}") }
    }
}

impl fmt::Display for LibraryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
            Self::Nccl => "NCCL",
        })
    }
}

/// A library that was found, described by its file's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The kind of library.
    pub kind: LibraryKind,
    /// Path of the file. A bare name is resolved by the system's loader.
    pub path: PathBuf,
    /// Major of its soname (CUDA's, except for [`LibraryKind::Nccl`]), followed by the other numbers if the file's full name
    /// contains them.
    pub version: Vec<u32>,
    /// Whether it is in a folder named by the user, which has priority.
    pub configured: bool,
}

impl Candidate {
    /// Returns the CUDA major.
    pub fn major(&self) -> u32 {
        self.version.first().copied().unwrap_or(0)
    }
}

/// Reason why a library does not fit this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// The library requires a newer driver.
    Driver(Version),
    /// Its CUDA no longer supports the chip.
    Chip(Chip),
    /// Its CUDA is older than the supported ones.
    TooOld,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Driver(driver) => write!(f, "the driver supports CUDA {driver} only"),
            Self::Chip(chip) => write!(f, "it no longer knows {}", chip.arch()),
            Self::TooOld => write!(f, "CUDA {OLDEST_MAJOR} or later is needed"),
        }
    }
}

/// Oldest supported CUDA major.
const OLDEST_MAJOR: u32 = 12;

/// Returns the oldest chip for which a CUDA major generates code.
const fn oldest_target(major: u32) -> u32 {
    match major {
        ..=12 => 50,
        _ => 75,
    }
}

/// Checks that a library of this CUDA major runs with the driver and has code for the chip. Within a major every minor
/// works with every driver (CUDA's minor-version compatibility), because kernels are machine code and not PTX.
pub fn fits(major: u32, driver: Version, chip: Chip) -> Result<(), Unfit> {
    if major > driver.major {
        Err(Unfit::Driver(driver))
    } else if major < OLDEST_MAJOR {
        Err(Unfit::TooOld)
    } else if number(chip) < oldest_target(major) {
        Err(Unfit::Chip(chip))
    } else {
        Ok(())
    }
}

/// Returns the candidates that fit, best first: those of the configured folder, then the newest.
pub(crate) fn ranked(found: &[Candidate], kind: LibraryKind, driver: Version, chip: Chip) -> Vec<&Candidate> {
    let fitting = |c: &&Candidate| c.kind == kind && fits(c.major(), driver, chip).is_ok();
    let mut ranked: Vec<_> = found.iter().filter(fitting).collect();
    // The sort is stable, so the first found of equal ones comes first.
    ranked.sort_by_key(|c| Reverse((c.configured, &c.version)));
    ranked
}

/// Stands for the driver of another machine.
pub(crate) const ANY_DRIVER: Version = Version { major: u32::MAX, minor: 0 };

/// Returns the candidates whose code for the chip can be used on other machines, best first: those of the configured
/// folder, then the oldest CUDA major, whose code every supported driver accepts, and its newest minor.
pub(crate) fn ranked_for_packs(found: &[Candidate], kind: LibraryKind, chip: Chip) -> Vec<&Candidate> {
    let mut ranked = ranked(found, kind, ANY_DRIVER, chip);
    ranked.sort_by_key(|c| (!c.configured, c.major()));
    ranked
}

#[cfg(test)]
mod tests {
    use super::*;

    const V100: Chip = Chip::SM_70;
    const L40S: Chip = Chip::SM_89;
    const H200: Chip = Chip::SM_90;
    const R525: Version = Version { major: 12, minor: 0 };
    const R575: Version = Version { major: 12, minor: 9 };
    const R580: Version = Version { major: 13, minor: 0 };

    fn library(path: &str, version: &[u32]) -> Candidate {
        Candidate { kind: LibraryKind::Nvrtc, path: path.into(), version: version.to_vec(), configured: false }
    }

    fn best(found: &[Candidate], driver: Version, chip: Chip) -> Option<&str> {
        ranked(found, LibraryKind::Nvrtc, driver, chip).first().map(|c| c.path.to_str().unwrap())
    }

    #[test]
    fn every_pairing() {
        let both = [library("a/libnvrtc.so.12", &[12]), library("b/libnvrtc.so.13", &[13])];
        let [twelve, thirteen] = ["a/libnvrtc.so.12", "b/libnvrtc.so.13"].map(Some);
        for (driver, chip, expected) in [
            (R525, V100, twelve),
            (R575, V100, twelve),
            (R580, V100, twelve),
            (R525, L40S, twelve),
            (R575, L40S, twelve),
            (R580, L40S, thirteen),
            (R525, H200, twelve),
            (R575, H200, twelve),
            (R580, H200, thirteen),
        ] {
            assert_eq!(best(&both, driver, chip), expected, "driver {driver}, {}", chip.arch());
            assert_eq!(best(&both[..1], driver, chip), twelve, "driver {driver}, {}", chip.arch());
            let only_13 = expected.filter(|_| expected == thirteen);
            assert_eq!(best(&both[1..], driver, chip), only_13, "driver {driver}, {}", chip.arch());
            assert_eq!(best(&[library("libnvrtc.so.11", &[11])], driver, chip), None);
            assert_eq!(best(&[], driver, chip), None);
        }
    }

    #[test]
    fn why_a_library_is_left() {
        assert_eq!(fits(13, R575, H200), Err(Unfit::Driver(R575)));
        assert_eq!(fits(13, R580, V100), Err(Unfit::Chip(V100)));
        assert_eq!(fits(11, R580, H200), Err(Unfit::TooOld));
        assert_eq!(fits(13, R580, Chip { major: 7, minor: 5 }), Ok(()));
        assert_eq!(Unfit::Driver(R575).to_string(), "the driver supports CUDA 12.9 only");
    }

    #[test]
    fn the_newest_of_a_major_wins_and_the_configured_folder_over_all() {
        let mut found = vec![
            library("old", &[12, 4, 127]),
            library("wheel", &[12]),
            library("new", &[12, 9, 86]),
            library("same", &[12, 9, 86]),
        ];
        assert_eq!(best(&found, R580, L40S), Some("new"));
        found.push(library("thirteen", &[13, 0]));
        assert_eq!(best(&found, R580, L40S), Some("thirteen"));
        found[0].configured = true;
        assert_eq!(best(&found, R580, L40S), Some("old"));
        found[4].configured = true;
        assert_eq!(best(&found, R580, L40S), Some("thirteen"), "the newest of those configured");
        assert_eq!(best(&found, R580, V100), Some("old"));
    }

    #[test]
    fn packs_are_compiled_by_the_oldest_cuda_and_its_newest_release() {
        let mut found = vec![
            library("12.4", &[12, 4, 127]),
            library("12.9", &[12, 9, 86]),
            library("13", &[13, 0]),
            library("11", &[11]),
        ];
        let order = |found: &[Candidate], chip| -> Vec<String> {
            ranked_for_packs(found, LibraryKind::Nvrtc, chip).iter().map(|c| c.path.display().to_string()).collect()
        };
        assert_eq!(order(&found, L40S), ["12.9", "12.4", "13"]);
        assert_eq!(order(&found, V100), ["12.9", "12.4"]);
        found[2].configured = true;
        assert_eq!(order(&found, H200), ["13", "12.9", "12.4"]);
    }

    #[test]
    fn releases_are_read_as_they_are_written() {
        for version in [R525, R575, R580] {
            assert_eq!(Version::parse(&version.to_string()), Some(version));
            let text = serde_json::to_string(&version).unwrap();
            assert_eq!(serde_json::from_str::<Version>(&text).unwrap(), version);
        }
        for wrong in ["", "12", "12.", "12.9.1", "a.b", "-1.0"] {
            assert_eq!(Version::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn packages_are_named_by_their_major() {
        assert_eq!(LibraryKind::Nvrtc.package(12), "nvidia-cuda-nvrtc-cu12");
        assert_eq!(LibraryKind::CublasLt.package(13), "nvidia-cublas==13.*");
    }
}
