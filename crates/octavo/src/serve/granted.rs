//! Whether a GPU was given to this process, which then must not serve from the processor unnoticed.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Variables by which container runtimes and Slurm give GPUs to a process.
const GRANTS: [&str; 4] = ["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS"];

/// Values of these variables that give no GPU.
const NOTHING: [&str; 5] = ["", "void", "none", "-1", "NoDevFiles"];

/// Files that container runtimes create, relative to the root.
const CONTAINER_FILES: [&str; 2] = [".dockerenv", "run/.containerenv"];

/// Variables that container runtimes set.
const CONTAINER_VARIABLES: [&str; 4] =
    ["KUBERNETES_SERVICE_HOST", "container", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"];

/// The parts of the system that say what a process was given.
pub(crate) struct Surroundings<'a> {
    /// Root of the file system.
    pub(crate) root: PathBuf,
    /// Environment variables.
    pub(crate) variable: &'a dyn Fn(&str) -> Option<OsString>,
}

impl Surroundings<'_> {
    /// The surroundings of this process.
    pub(crate) fn here() -> Self {
        Self { root: PathBuf::from("/"), variable: &|name| std::env::var_os(name) }
    }

    /// The sign that this process was given a GPU: `NVIDIA_VISIBLE_DEVICES=all` or `/dev/nvidia0`.
    ///
    /// `CUDA_VISIBLE_DEVICES` that names no GPU takes it back. Device files are a sign in a container only: on other machines
    /// they show that there is a driver.
    pub(crate) fn gpu(&self) -> Option<String> {
        let value = |name| (self.variable)(name).map(|value| value.to_string_lossy().trim().to_owned());
        if value("CUDA_VISIBLE_DEVICES").is_some_and(|devices| NOTHING.contains(&devices.as_str())) {
            return None;
        }
        let granted = |name| value(name).filter(|devices| !NOTHING.contains(&devices.as_str()));
        let variable = GRANTS.into_iter().find_map(|name| Some(format!("{name}={}", granted(name)?)));
        variable.or_else(|| self.in_container().then(|| device_file(&self.root.join("dev"))).flatten())
    }

    fn in_container(&self) -> bool {
        CONTAINER_FILES.iter().any(|file| self.root.join(file).exists())
            || CONTAINER_VARIABLES.iter().any(|name| (self.variable)(name).is_some())
    }
}

/// The first device file of an NVIDIA GPU in `folder`.
fn device_file(folder: &Path) -> Option<String> {
    let names = std::fs::read_dir(folder).ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let is_gpu = |name: &String| {
        name.strip_prefix("nvidia")
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    names.filter(is_gpu).min().map(|name| format!("/dev/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sign in a file system with these files and with these variables.
    fn sign(files: &[&str], variables: &[(&str, &str)]) -> Option<String> {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        Surroundings { root: root.path().to_owned(), variable: &variable }.gpu()
    }

    #[test]
    fn a_variable_that_names_a_gpu_is_a_sign() {
        assert_eq!(sign(&[], &[]), None);
        for value in ["all", "0", "GPU-8d7e1b4c", "MIG-1"] {
            assert_eq!(
                sign(&[], &[("NVIDIA_VISIBLE_DEVICES", value)]),
                Some(format!("NVIDIA_VISIBLE_DEVICES={value}"))
            );
        }
        for value in ["", " ", "void", "none"] {
            assert_eq!(sign(&[], &[("NVIDIA_VISIBLE_DEVICES", value)]), None, "{value:?}");
        }
        assert_eq!(sign(&[], &[("SLURM_JOB_GPUS", "2,3")]).as_deref(), Some("SLURM_JOB_GPUS=2,3"));
    }

    #[test]
    fn device_files_are_a_sign_in_a_container() {
        let gpu = ["dev/nvidia1", "dev/nvidia0", "dev/nvidiactl"];
        assert_eq!(sign(&gpu, &[]), None, "a machine with a driver");
        assert_eq!(sign(&[&gpu[..], &[".dockerenv"]].concat(), &[]).as_deref(), Some("/dev/nvidia0"));
        // A runtime that gives devices through CDI sets `void`, so that no other hook adds them again.
        let pod = [("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("NVIDIA_VISIBLE_DEVICES", "void")];
        assert_eq!(sign(&gpu, &pod).as_deref(), Some("/dev/nvidia0"));
        assert_eq!(sign(&["dev/nvidiactl", "dev/nvidia-uvm"], &pod), None, "these belong to no GPU");
    }

    #[test]
    fn a_gpu_that_is_hidden_on_purpose_is_not_given() {
        for hidden in ["", "-1", "NoDevFiles"] {
            let variables = [("CUDA_VISIBLE_DEVICES", hidden), ("NVIDIA_VISIBLE_DEVICES", "all")];
            assert_eq!(sign(&["dev/nvidia0", ".dockerenv"], &variables), None, "{hidden:?}");
        }
    }
}
