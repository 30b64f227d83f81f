//! Where libraries are looked for.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::pairing::{Candidate, Kind};

/// Variable with folders in which the driver and CUDA's libraries are looked for before the usual ones, separated by colons.
pub(crate) const LIBRARIES: &str = "OCTAVO_CUDA_LIBS";

/// The folders that the user names in `OCTAVO_CUDA_LIBS`.
pub fn named_folders() -> Vec<PathBuf> {
    std::env::var_os(LIBRARIES).map(|folders| std::env::split_paths(&folders).collect()).unwrap_or_default()
}

/// What the search depends on, so that tests have their own machine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    /// Named by the user; before all others.
    pub(crate) configured: Vec<PathBuf>,
    /// Folders of the system; the last component may end with `*`.
    pub(crate) system: Vec<PathBuf>,
    /// Folders that Python packages lie in, as `system`.
    pub(crate) python: Vec<PathBuf>,
    /// Whether the system's loader is asked too.
    pub(crate) loader: bool,
}

impl Places {
    /// The usual places of this machine, after the folders named by the user.
    pub(crate) fn usual(configured: &[PathBuf]) -> Self {
        let variable = |name| std::env::var_os(name).map(PathBuf::from);
        let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).map(|home| home.join("lib64"));
        let loaders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let loaders: Vec<_> = std::env::split_paths(&loaders).filter(|folder| folder.is_absolute()).collect();
        let own =
            if cfg!(target_arch = "aarch64") { "/usr/lib/aarch64-linux-gnu" } else { "/usr/lib/x86_64-linux-gnu" };
        let system = ["/usr/local/cuda*/lib64", own, "/usr/lib64", "/opt/cuda/lib64"];
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable);
        let mut python: Vec<_> = environments.map(|home| home.join("lib/python3*/site-packages")).collect();
        python.extend(variable("HOME").map(|home| home.join(".local/lib/python3*/site-packages")));
        for folder in ["/usr/local/lib/python3*/site-packages", "/usr/local/lib/python3*/dist-packages"] {
            python.push(folder.into());
        }
        python.push("/usr/lib/python3/dist-packages".into());
        let system = loaders.into_iter().chain(toolkits).chain(system.into_iter().map(PathBuf::from)).collect();
        Self { configured: configured.to_vec(), system, python, loader: true }
    }

    /// Every library of a kind, in the order of the places; a file that is found twice once.
    pub(crate) fn find(&self, kind: Kind) -> Vec<Candidate> {
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

/// The folders that a path stands for; each component may end with `*`, and the last component may be one alone.
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

/// The entries of a folder that are asked for, in order of their names; none where it cannot be read.
fn entries(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(read) = std::fs::read_dir(folder) else { return Vec::new() };
    let name = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(&wanted);
    let mut found: Vec<_> = read.flatten().map(|entry| entry.path()).filter(name).collect();
    found.sort();
    found
}

/// `libnvrtc.so.12` and its like, each with the file that it leads to.
fn libraries_in(folder: &Path, kind: Kind) -> Vec<(PathBuf, PathBuf)> {
    let is_soname = |name: &str| {
        let number = name.strip_prefix(kind.stem()).and_then(|rest| rest.strip_prefix(".so."));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    let files = entries(folder, is_soname).into_iter();
    files.filter_map(|path| std::fs::canonicalize(&path).ok().map(|file| (path, file))).collect()
}

/// `[12, 9, 86]` of a `libnvrtc.so.12` that leads to `libnvrtc.so.12.9.86`; `[12]` if the file itself is called so.
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

    #[test]
    fn libraries_are_found_in_every_usual_place() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        touch(&at("usr/local/cuda-12.4/lib64/libnvrtc.so.12.4.127"));
        std::os::unix::fs::symlink("libnvrtc.so.12.4.127", at("usr/local/cuda-12.4/lib64/libnvrtc.so.12")).unwrap();
        // The usual link to the newest toolkit: the same file again.
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
        let found = places.find(Kind::Nvrtc);
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
        let lt: Vec<_> = places.find(Kind::CublasLt).into_iter().map(|c| c.path).collect();
        assert_eq!(lt[0], at("mine/libcublasLt.so.12"));
        assert_eq!(lt.len(), 3, "and two names for the loader");
        let nccl: Vec<_> = places.find(Kind::Nccl).into_iter().map(|c| c.path).collect();
        assert_eq!(nccl, [at(&format!("{wheels}/nccl/lib/libnccl.so.2")), "libnccl.so.2".into()]);
    }
}
