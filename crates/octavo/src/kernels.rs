//! `octavo kernels`: compiles GPU kernels ahead of time, and locates packs for `octavo serve`.

use std::io::{IsTerminal, Write, stderr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Result, bail};
use octavo_backend_cuda::{KernelPack, PackError, PackOrder, build_pack, named_folders};

use crate::cli::{KernelsArgs, KernelsBuildArgs, KernelsCommand};
use crate::signals;
use crate::system::human_bytes;

/// Path of a pack relative to the parent of `bin`.
const PLACE: &str = "share/octavo/kernels";

pub(crate) fn run(args: &KernelsArgs) -> Result<()> {
    octavo_telemetry::init_logging(&octavo_telemetry::LogConfig::default())?;
    signals::end_first_process()?;
    match &args.command {
        KernelsCommand::Build(args) => build(args),
    }
}

/// The default folder of a pack, which only an installed binary has.
fn usual_folder() -> Option<PathBuf> {
    let binary = std::env::current_exe().ok()?;
    let folder = binary.parent().filter(|folder| folder.ends_with("bin"))?;
    Some(folder.parent()?.join(PLACE))
}

/// The pack that `octavo serve` uses: the named one or one in the default folder.
///
/// # Errors
/// The named folder has no pack, or the list of a pack is invalid.
pub(crate) fn pack(named: Option<&Path>) -> Result<Option<(PathBuf, KernelPack)>, PackError> {
    let Some(folder) = named.map(Path::to_owned).or_else(usual_folder) else { return Ok(None) };
    match KernelPack::read(&folder) {
        Ok(pack) => Ok(Some((folder, pack))),
        Err(PackError::Missing(_)) if named.is_none() => Ok(None),
        Err(error) => Err(error),
    }
}

fn build(args: &KernelsBuildArgs) -> Result<()> {
    let Some(folder) = args.output.clone().or_else(usual_folder) else {
        bail!("--output DIR is needed: this binary is not in a folder `bin`, beside which kernels would be looked for");
    };
    let mut targets = args.arch.clone();
    targets.sort();
    targets.dedup();
    let names = targets.iter().map(|target| target.arch()).collect::<Vec<_>>().join(", ");
    let order = PackOrder { targets, only: args.only.clone(), folder, libraries: named_folders() };
    let (begun, shown) = (Instant::now(), AtomicUsize::new(0));
    let made = build_pack(&order, &|done, of| show(done, of, &shown))?;
    if stderr().is_terminal() {
        // Clears the line. A failure means that the terminal is closed.
        let _ = write!(stderr(), "\r\x1b[K");
    }
    let compilers: Vec<_> =
        made.compilers.iter().map(|(release, path)| format!("NVRTC {release} ({})", path.display())).collect();
    println!(
        "{} kernels for {names}, {}, {} of them compiled by {} in {:.1} s: {}",
        made.kernels,
        human_bytes(made.bytes),
        made.compiled,
        compilers.join(" and "),
        begun.elapsed().as_secs_f64(),
        order.folder.display()
    );
    if usual_folder().is_none_or(|usual| usual != order.folder) {
        println!("to use them: --kernel-pack {0} (or OCTAVO_KERNEL_PACK={0})", order.folder.display());
    }
    Ok(())
}

/// Shows the progress: always on a terminal, at every tenth elsewhere.
fn show(done: usize, of: usize, shown: &AtomicUsize) {
    let terminal = stderr().is_terminal();
    let step = if terminal { done } else { done * 10 / of.max(1) };
    if shown.fetch_max(step, Ordering::Relaxed) < step {
        let (start, end) = if terminal { ("\r", "\x1b[K") } else { ("", "\n") };
        let _ = write!(stderr(), "{start}{done} of {of} kernels{end}").and_then(|()| stderr().flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_folder_must_have_a_pack_and_the_usual_one_need_not_be_there() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(pack(Some(folder.path())), Err(PackError::Missing(_))));
        // The test's own binary is in cargo's folder.
        assert_eq!(usual_folder(), None);
        assert!(pack(None).unwrap().is_none());
        std::fs::write(folder.path().join("pack.json"), r#"{"octavo": "0.1.0", "chips": {}}"#).unwrap();
        assert_eq!(pack(Some(folder.path())).unwrap().unwrap().0, folder.path());
    }
}
