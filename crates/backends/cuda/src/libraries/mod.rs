//! The libraries other than the driver: their search, and the few functions that are needed.
//!
//! They are opened by the path of the chosen file. `cudarc` would ask the loader for names, newest first, and would
//! therefore load CUDA 13 for a V100 if both are installed.

pub(crate) mod cublaslt;
mod pairing;
mod search;

use std::path::PathBuf;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use octavo_kernels::manifest::Chip;
use octavo_kernels::nvrtc::{Nvrtc, loaders_words};

pub(crate) use pairing::ranked;
use pairing::{ANY_DRIVER, ranked_for_packs};
pub use pairing::{Candidate, LibraryKind, OLDEST_CHIP, Unfit, Version, fits};
pub use search::named_folders;
pub(crate) use search::{LIBRARIES, Places};

/// Returns the compiler for a chip among the libraries found, and its path.
///
/// # Errors
/// Returns a sentence that names the missing library and how to install it.
pub(crate) fn compiler(found: &[Candidate], driver: Version, chip: Chip) -> Result<(Nvrtc, PathBuf), String> {
    let purpose = format!("{} under a driver of CUDA {driver}", chip.arch());
    opened(found, &ranked(found, LibraryKind::Nvrtc, driver, chip), driver, chip, &purpose)
}

/// Returns the compiler for a pack's kernels for a chip, and its path.
///
/// # Errors
/// Returns the errors of [`compiler`].
pub(crate) fn compiler_for_packs(found: &[Candidate], chip: Chip) -> Result<(Nvrtc, PathBuf), String> {
    opened(found, &ranked_for_packs(found, LibraryKind::Nvrtc, chip), ANY_DRIVER, chip, &chip.arch())
}

/// Returns the first of the ranked compilers that can be opened and supports the chip.
fn opened(
    found: &[Candidate],
    ranked: &[&Candidate],
    driver: Version,
    chip: Chip,
    purpose: &str,
) -> Result<(Nvrtc, PathBuf), String> {
    // Bare names, which only the loader can resolve, are not informative.
    let files = found.iter().filter(|candidate| candidate.path.is_absolute());
    let unfit = files.filter_map(|candidate| {
        let reason = fits(candidate.major(), driver, chip).err()?;
        Some(format!(" ({}: {reason})", candidate.path.display()))
    });
    let mut refused = unfit.collect::<String>();
    for candidate in ranked {
        match Nvrtc::open(&candidate.path) {
            Ok(nvrtc) if nvrtc.supports(chip) => return Ok((nvrtc, candidate.path.clone())),
            Ok(_) => refused = format!(" ({} makes no code for it)", candidate.path.display()),
            Err(reason) if candidate.path.is_absolute() => refused = format!(" ({reason})"),
            Err(_) => {}
        }
    }
    let package = LibraryKind::Nvrtc.package(12);
    Err(format!(
        "no NVRTC is found that compiles for {purpose}{refused}: `pip install {package}`, or name its folder in {LIBRARIES}"
    ))
}

/// Opens a library permanently and reads a table of its functions.
fn open<T>(candidate: &Candidate, table: impl FnOnce(&Library) -> Result<T, libloading::Error>) -> Result<T, String> {
    // SAFETY: NVIDIA's own initialisers run, as in every program that uses the library.
    let library = unsafe { Library::open(Some(&candidate.path), RTLD_NOW | RTLD_LOCAL) };
    let library = library.map_err(|error| loaders_words(&error))?;
    let table = table(&library).map_err(|error| format!("{}: {}", candidate.path.display(), loaders_words(&error)))?;
    // The library is never unloaded, because its functions are called until the process ends.
    std::mem::forget(library);
    Ok(table)
}

/// Declares a table of a library's functions. All return a status, 0 for success.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($name:ident: fn($($argument:ty),*);)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case, reason = "the library's own names")]
        #[derive(Clone, Copy)]
        pub(crate) struct $table { $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> i32,)* }

        impl $table {
            pub(super) fn read(library: &libloading::os::unix::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the library's header.
                unsafe { Ok(Self { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* }) }
            }
        }
    };
}
pub(crate) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_a_library_does_not_open_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnvrtc.so.12");
        std::fs::write(&path, vec![b'x'; 4096]).unwrap();
        let found = Candidate { kind: LibraryKind::Nvrtc, path: path.clone(), version: vec![12], configured: true };
        let (driver, chip) = (Version { major: 12, minor: 4 }, Chip::SM_90);
        let said = compiler(std::slice::from_ref(&found), driver, chip).err().unwrap();
        let expected = format!(
            "no NVRTC is found that compiles for sm_90a under a driver of CUDA 12.4 (NVRTC cannot be opened: {}",
            path.display()
        );
        assert!(said.starts_with(&expected) && said.contains("invalid ELF header"), "{said}");
    }
}
