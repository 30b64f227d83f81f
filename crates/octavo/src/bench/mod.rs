//! `octavo bench`: measurements in vLLM's terms, and against a device's limits.

mod bar;
mod dataset;
mod kernels;
mod limits;
mod offline;
mod predict;
mod roofline;
mod serve;

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use octavo_bench::plot::Chart;
use serde_json::Value;

use crate::cli::{BenchArgs, BenchCommand};
use crate::signals;

pub(crate) fn run(args: BenchArgs) -> Result<()> {
    signals::end_first_process()?;
    match args.command {
        BenchCommand::Serve(args) => serve::run(&args),
        BenchCommand::Latency(args) => offline::latency(&args),
        BenchCommand::Throughput(args) => offline::throughput(&args),
        BenchCommand::Limits(args) => limits::run(&args),
        BenchCommand::Kernels(args) => kernels::run(&args),
        BenchCommand::Roofline(args) => roofline::run(*args),
    }
}

fn write_json(path: &Path, figures: &Value) -> Result<()> {
    write(path, &serde_json::to_vec_pretty(figures)?)
}

fn write_plot(path: &Path, chart: &Chart) -> Result<()> {
    write(path, chart.to_string().as_bytes())
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    replace(path, content)?;
    println!("saved to {}", path.display());
    Ok(())
}

/// Writes a file, or replaces it as a whole: a run that is cut short leaves what it wrote last. A link keeps pointing to its file, and
/// what is no regular file (`/dev/stdout`) is written to and never replaced.
fn replace(path: &Path, content: &[u8]) -> Result<()> {
    if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        return std::fs::write(path, content).with_context(|| format!("cannot write {}", path.display()));
    }
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let written =
        tempfile::Builder::new().permissions(Permissions::from_mode(0o666)).tempfile_in(folder).and_then(|mut file| {
            file.write_all(content)?;
            file.persist(&target).map(drop).map_err(|error| error.error)
        });
    written.with_context(|| format!("cannot write {}", path.display()))
}

/// Figures that grow by one measurement after the other, in a file if one is wanted: the file holds all that were measured so far.
struct Growing<'a> {
    path: Option<&'a Path>,
}

impl Growing<'_> {
    /// Writes the figures so far.
    fn write(&self, figures: impl FnOnce() -> Value) -> Result<()> {
        let Some(path) = self.path else { return Ok(()) };
        replace(path, &serde_json::to_vec_pretty(&figures())?)
    }

    /// Says where the figures are.
    fn finish(&self) {
        if let Some(path) = self.path {
            println!("saved to {}", path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileTypeExt, symlink};

    use super::*;

    #[test]
    fn links_and_devices_stay_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        std::fs::write(&file, "before").unwrap();
        symlink(&file, &link).unwrap();
        replace(&link, b"after").unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "after");
        replace(Path::new("/dev/null"), b"nothing").unwrap();
        assert!(std::fs::metadata("/dev/null").unwrap().file_type().is_char_device());
        assert!(replace(&folder.path().join("none/file"), b"").is_err());
    }
}
