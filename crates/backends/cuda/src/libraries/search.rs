//! Search for libraries.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::pairing::{Candidate, LibraryKind};

/// Variable with the folders in which the driver and CUDA's libraries are searched before the usual ones, separated by
/// colons.
pub(crate) const LIBRARIES: &str = "OCTAVO_CUDA_LIBS";

/// Returns the folders in `OCTAVO_CUDA_LIBS`.
pub fn named_folders() -> Vec<PathBuf> {
    std::env::var_os(LIBRARIES).map(|folders| std::env::split_paths(&folders).collect()).unwrap_or_default()
}

/// Places of the search, which tests can replace.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    /// Folders named by the user, searched first.
    pub(crate) configured: Vec<PathBuf>,
    /// Folders of the system. The last component may end with `*`.
    pub(crate) system: Vec<PathBuf>,
    /// Folders of Python packages, with the same pattern.
    pub(crate) python: Vec<PathBuf>,
    /// Whether the system's loader is asked too.
    pub(crate) loader: bool,
}

/// Folders of a toolkit's libraries, relative to its own folder.
const TOOLKIT: [&str; 3] = ["lib64", "targets/*/lib", "lib"];

/// System folders of libraries.
const SYSTEM: [&str; 6] = [
    "usr/local/cuda*/lib64",
    "usr/local/cuda*/targets/*/lib",
    if cfg!(target_arch = "aarch64") { "usr/lib/aarch64-linux-gnu" } else { "usr/lib/x86_64-linux-gnu" },
    "usr/lib64",
    "opt/cuda/lib64",
    "opt/nvidia/hpc_sdk/Linux*/*/cuda/lib64",
];

/// Folders of a Python's packages, relative to its own folder; Debian uses other names.
const PACKAGES: [&str; 4] = [
    "lib/python3*/site-packages",
    "lib64/python3*/site-packages",
    "lib/python3*/dist-packages",
    "local/lib/python3*/dist-packages",
];

impl Places {
    /// Returns the usual places of this machine, after the folders named by the user.
    pub(crate) fn usual(configured: &[PathBuf]) -> Self {
        let places = Self::from_environment(&|name| std::env::var_os(name), Path::new("/"));
        Self { configured: configured.to_vec(), loader: true, ..places }
    }

    /// Returns the places named by variables and those of a system below `root`.
    fn from_environment(variable: &dyn Fn(&str) -> Option<OsString>, root: &Path) -> Self {
        let folders = |name: &str| -> Vec<PathBuf> {
            let folders = variable(name).unwrap_or_default();
            std::env::split_paths(&folders).filter(|folder| folder.is_absolute()).collect()
        };
        let conda = folders("CONDA_PREFIX");
        // Toolkits have the layout of NVIDIA's packages; its wheels and Conda's use the same.
        let toolkit = |home: &PathBuf| TOOLKIT.map(|folder| home.join(folder));
        let named = [folders("CUDA_HOME"), folders("CUDA_PATH"), conda.clone()].concat();
        let below = |folders: &[&str]| -> Vec<PathBuf> { folders.iter().map(|folder| root.join(folder)).collect() };
        let mut system = folders("LD_LIBRARY_PATH");
        system.extend(named.iter().flat_map(toolkit));
        system.extend(below(&SYSTEM));

        // The packages of the Python that is found first by its name are next to it, whatever created the environment.
        let interpreters = folders("PATH").into_iter().filter(|folder| folder.join("python3").exists());
        let homes = interpreters.filter_map(|folder| Some(folder.parent()?.to_owned()));
        let homes = [folders("VIRTUAL_ENV"), conda, homes.collect()].concat();
        let local = folders("HOME").into_iter().map(|home| home.join(".local"));
        let homes = homes.into_iter().chain(local).chain(below(&["usr/local", "usr"]));
        let mut python: Vec<PathBuf> = Vec::new();
        for folder in homes.flat_map(|home| PACKAGES.map(|folder| home.join(folder))) {
            if !python.contains(&folder) {
                python.push(folder);
            }
        }
        Self { system, python, ..Self::default() }
    }

    /// Returns every library of a kind, in the order of the places. A file that is found twice is returned once.
    pub(crate) fn find(&self, kind: LibraryKind) -> Vec<Candidate> {
        let mut found: Vec<Candidate> = Vec::new();
        let mut files: Vec<PathBuf> = Vec::new();
        let wheels = |folder: &PathBuf| folder.join("nvidia/*/lib");
        let configured = self.configured.iter().map(|folder| (folder.clone(), true));
        let others = self.system.iter().cloned().chain(self.python.iter().map(wheels)).map(|folder| (folder, false));
        for (pattern, configured) in configured.chain(others) {
            for folder in expand(&pattern) {
                for (path, file) in libraries_in(&folder, kind) {
                    if !files.contains(&file) {
                        found.push(Candidate { kind, version: version_of(&path, &file), path, configured });
                        files.push(file);
                    }
                }
            }
        }
        let by_name = kind.sonames().iter().filter(|_| self.loader).map(|&major| {
            let path = format!("{}.so.{major}", kind.stem()).into();
            Candidate { kind, path, version: vec![major], configured: false }
        });
        found.extend(by_name);
        found
    }
}

/// Expands a pattern to folders. Each component may end with `*`, and the last one may be `*` alone.
fn expand(pattern: &Path) -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::new()];
    for component in pattern.components() {
        let name = component.as_os_str();
        let Some(start) = name.to_str().and_then(|name| name.strip_suffix('*')) else {
            folders.iter_mut().for_each(|folder| folder.push(name));
            continue;
        };
        folders = folders.iter().flat_map(|folder| entries(folder, |entry| entry.starts_with(start))).collect();
    }
    folders
}

/// Returns the wanted entries of a folder, sorted by name; none if it cannot be read.
fn entries(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(read) = std::fs::read_dir(folder) else { return Vec::new() };
    let name = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(&wanted);
    let mut found: Vec<_> = read.flatten().map(|entry| entry.path()).filter(name).collect();
    found.sort();
    found
}

/// Returns files such as `libnvrtc.so.12`, each with the target of its link.
fn libraries_in(folder: &Path, kind: LibraryKind) -> Vec<(PathBuf, PathBuf)> {
    let is_soname = |name: &str| {
        let number = name.strip_prefix(kind.stem()).and_then(|rest| rest.strip_prefix(".so."));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    let files = entries(folder, is_soname).into_iter();
    files.filter_map(|path| std::fs::canonicalize(&path).ok().map(|file| (path, file))).collect()
}

/// Returns `[12, 9, 86]` for a `libnvrtc.so.12` that links to `libnvrtc.so.12.9.86`, or `[12]` if it is no link.
fn version_of(path: &Path, file: &Path) -> Vec<u32> {
    let numbers = |path: &Path| -> Vec<u32> {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let (_, numbers) = name.split_once(".so.").unwrap_or_default();
        numbers.split('.').map_while(|number| number.parse().ok()).collect()
    };
    let (soname, full) = (numbers(path), numbers(file));
    if full.starts_with(&soname) { full } else { soname }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }

    /// Returns the libraries found on a machine with these files and variables; `~` stands for its root in both.
    fn found_with(files: &[&str], variables: &[(&str, &str)]) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let base = root.path().to_str().unwrap().to_owned();
        for file in files {
            touch(&root.path().join(file));
        }
        let variable = |name: &str| {
            let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
            Some(OsString::from(value.replace('~', &base)))
        };
        let found = Places::from_environment(&variable, root.path()).find(LibraryKind::Nvrtc);
        let relative = |c: Candidate| c.path.strip_prefix(root.path()).unwrap().display().to_string();
        found.into_iter().map(relative).collect()
    }

    #[test]
    fn every_layout_of_a_real_machine_is_known() {
        let layouts: [(&str, &[(&str, &str)]); 13] = [
            // These are packages of Debian, Ubuntu and RHEL, with the usual link, and with only the folder of a target.
            ("usr/local/cuda-12.9/lib64/libnvrtc.so.12", &[]),
            ("usr/local/cuda-12.9/targets/x86_64-linux/lib/libnvrtc.so.12", &[]),
            ("usr/lib64/libnvrtc.so.12", &[]),
            // These are wheels of CUDA 12 and 13, of a system's Python and of one that is only in PATH.
            ("usr/local/lib/python3.12/dist-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", &[]),
            ("usr/local/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13", &[]),
            ("venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13", &[("VIRTUAL_ENV", "~/venv")]),
            (
                "opt/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
                &[("PATH", "/bin:~/opt/venv/bin")],
            ),
            ("me/.local/lib/python3.9/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", &[("HOME", "~/me")]),
            // These are Conda's packages of CUDA, and a toolkit in another place.
            ("conda/lib/libnvrtc.so.12", &[("CONDA_PREFIX", "~/conda")]),
            ("conda/targets/x86_64-linux/lib/libnvrtc.so.12", &[("CONDA_PREFIX", "~/conda")]),
            ("sw/cuda/lib64/libnvrtc.so.12", &[("CUDA_HOME", "~/sw/cuda")]),
            ("sw/cuda/lib/libnvrtc.so.13", &[("CUDA_PATH", "~/sw/cuda")]),
            ("sw/lib/libnvrtc.so.12", &[("LD_LIBRARY_PATH", "relative:~/sw/lib")]),
        ];
        for (file, variables) in layouts {
            assert_eq!(found_with(&["opt/venv/bin/python3", file], variables), [file], "{variables:?}");
        }
        assert_eq!(
            found_with(
                &["opt/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13"],
                &[("PATH", "~/opt/venv/bin")]
            ),
            [""; 0],
            "no Python is there"
        );
    }

    #[test]
    fn libraries_are_found_in_every_usual_place() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        touch(&at("usr/local/cuda-12.4/lib64/libnvrtc.so.12.4.127"));
        std::os::unix::fs::symlink("libnvrtc.so.12.4.127", at("usr/local/cuda-12.4/lib64/libnvrtc.so.12")).unwrap();
        // The usual link to the newest toolkit leads to the same file.
        std::os::unix::fs::symlink("cuda-12.4", at("usr/local/cuda")).unwrap();
        touch(&at("venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"));
        touch(&at("venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9"));
        touch(&at("venv/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13"));
        touch(&at("mine/libnvrtc.so.12"));
        touch(&at("mine/libcublasLt.so.12"));
        touch(&at("venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"));
        let places = Places {
            configured: vec![at("mine"), at("missing")],
            system: vec![at("usr/local/cuda*/lib64")],
            python: vec![at("venv/lib/python3*/site-packages")],
            loader: true,
        };
        let found = places.find(LibraryKind::Nvrtc);
        let told: Vec<_> = found
            .iter()
            .map(|c| {
                (c.path.strip_prefix(root.path()).unwrap_or(&c.path).to_str().unwrap(), &c.version[..], c.configured)
            })
            .collect();
        let wheels = "venv/lib/python3.11/site-packages/nvidia";
        let expected: [(&str, &[u32], bool); 6] = [
            ("mine/libnvrtc.so.12", &[12], true),
            ("usr/local/cuda/lib64/libnvrtc.so.12", &[12, 4, 127], false),
            (&format!("{wheels}/cu13/lib/libnvrtc.so.13"), &[13], false),
            (&format!("{wheels}/cuda_nvrtc/lib/libnvrtc.so.12"), &[12], false),
            ("libnvrtc.so.13", &[13], false),
            ("libnvrtc.so.12", &[12], false),
        ];
        assert_eq!(told, expected);
        let lt: Vec<_> = places.find(LibraryKind::CublasLt).into_iter().map(|c| c.path).collect();
        assert_eq!(lt[0], at("mine/libcublasLt.so.12"));
        assert_eq!(lt.len(), 3, "and two names for the loader");
        let nccl: Vec<_> = places.find(LibraryKind::Nccl).into_iter().map(|c| c.path).collect();
        assert_eq!(nccl, [at(&format!("{wheels}/nccl/lib/libnccl.so.2")), "libnccl.so.2".into()]);
    }
}
