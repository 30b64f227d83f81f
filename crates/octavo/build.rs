//! The revision of the source, for the metric `octavo_build_info`.

use std::path::Path;
use std::process::Command;

/// Where there is no repository, as in the build of an image, this variable names the revision. Not `OCTAVO_*`: `cargo run` hands it
/// to the program too, which reads those as flags.
const VARIABLE: &str = "VCS_REVISION";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let named = std::env::var(VARIABLE).ok().filter(|name| !name.is_empty());
    let revision = named.or_else(checked_out).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env={VARIABLE}={revision}");
}

/// The commit that is checked out.
fn checked_out() -> Option<String> {
    // Written by every commit and every checkout. A file that is missing would be a reason to build each time.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = output.status.success().then(|| String::from_utf8(output.stdout).ok())??;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}
