//! Checks the layer rules of ARCHITECTURE.md against cargo's metadata.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// Allowed dependencies among the workspace's crates. A crate that is not listed fails the test.
const LAYERS: &[(&str, &[&str])] = &[
    ("octavo-ops", &[]),
    ("octavo-telemetry", &[]),
    ("octavo-http-client", &[]),
    ("octavo-sockets", &[]),
    ("octavo-media", &["octavo-http-client"]),
    ("octavo-backend-candle", &["octavo-ops"]),
    ("octavo-backend-cpu", &["octavo-ops"]),
    ("octavo-backend-cuda", &["octavo-ops", "octavo-kernels"]),
    ("octavo-kernels", &[]),
    ("octavo-models", &["octavo-ops"]),
    ("octavo-engine", &["octavo-telemetry"]),
    ("octavo-text", &["octavo-engine"]),
    ("octavo-kv-events", &["octavo-engine", "octavo-sockets"]),
    ("octavo-runner", &["octavo-engine", "octavo-models", "octavo-ops", "octavo-telemetry"]),
    ("octavo-server", &["octavo-text", "octavo-media", "octavo-engine", "octavo-sockets", "octavo-telemetry"]),
    ("octavo-bench", &["octavo-engine", "octavo-http-client", "octavo-ops"]),
];

/// Packages that may depend on everything: the composition, its tests and its benches.
const UNRESTRICTED: &[&str] = &["octavo", "octavo-tests", "octavo-benches"];

/// Crates that compute tensors or access a device. Only backends may link them, and the kernels crate, which opens
/// their compiler.
const DEVICE_CRATES: &[&str] = &["candle-core", "candle-nn", "candle-transformers", "cudarc", "gemm", "libloading"];

#[derive(Debug)]
struct Package {
    /// Normal and build dependencies.
    links: BTreeSet<String>,
    /// Development dependencies.
    tests_with: BTreeSet<String>,
}

/// Cargo's description of the workspace.
fn metadata() -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON")
}

fn packages() -> BTreeMap<String, Package> {
    let name = |v: &Value| v["name"].as_str().expect("a name").to_owned();
    let package = |p: &Value| {
        let (dev, links): (Vec<_>, Vec<_>) =
            p["dependencies"].as_array().expect("dependencies").iter().partition(|d| d["kind"].as_str() == Some("dev"));
        Package { links: links.into_iter().map(name).collect(), tests_with: dev.into_iter().map(name).collect() }
    };
    metadata()["packages"].as_array().expect("packages").iter().map(|p| (name(p), package(p))).collect()
}

fn ours(dependencies: &BTreeSet<String>) -> impl Iterator<Item = &str> {
    dependencies.iter().map(String::as_str).filter(|d| d.starts_with("octavo"))
}

#[test]
fn every_name_in_the_tables_is_a_crate() {
    let packages = packages();
    let layers = LAYERS.iter().flat_map(|(name, allowed)| std::iter::once(name).chain(*allowed));
    for name in layers.chain(UNRESTRICTED) {
        assert!(packages.contains_key(*name), "{name} is in a table, but is no crate of the workspace");
    }
    for (name, allowed) in LAYERS {
        let Package { links, tests_with } = &packages[*name];
        let unused = allowed.iter().find(|allowed| !links.contains(**allowed) && !tests_with.contains(**allowed));
        assert_eq!(unused, None, "{name} does not depend on it");
    }
    let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock")).expect("the lock file");
    for name in DEVICE_CRATES {
        assert!(lock.contains(&format!("name = \"{name}\"\n")), "{name} is a device crate, but nothing depends on it");
    }
}

#[test]
fn no_crate_depends_on_one_above_it() {
    let allowed: BTreeMap<_, _> = LAYERS.iter().copied().collect();
    let mut violations = Vec::new();
    for (name, package) in packages() {
        if UNRESTRICTED.contains(&name.as_str()) {
            continue;
        }
        let Some(allowed) = allowed.get(name.as_str()) else {
            violations.push(format!("{name} has no place in the layers"));
            continue;
        };
        violations.extend(ours(&package.links).filter(|d| !allowed.contains(d)).map(|d| format!("{name} -> {d}")));
    }
    assert!(violations.is_empty(), "dependencies against the layers: {violations:#?}");
}

#[test]
fn tests_may_look_sideways_but_not_at_the_whole() {
    for (name, package) in packages() {
        if !UNRESTRICTED.contains(&name.as_str()) {
            let whole = ours(&package.tests_with).find(|d| UNRESTRICTED.contains(d));
            assert_eq!(whole, None, "{name}'s tests depend on the composition");
        }
    }
}

#[test]
fn only_backends_touch_a_device() {
    for (name, package) in packages() {
        if name.starts_with("octavo-backend-") || name == "octavo-kernels" {
            continue;
        }
        let device = DEVICE_CRATES.iter().find(|d| package.links.contains(**d));
        assert_eq!(device, None, "{name} links a device crate");
    }
}

#[test]
fn the_binary_links_candle_only_on_request() {
    let metadata = metadata();
    let named = |list: &Value, name: &str, kind: Option<&str>| {
        let found = list.as_array().expect("a list").iter().find(|v| v["name"] == name && v["kind"].as_str() == kind);
        found.unwrap_or_else(|| panic!("{name} is missing")).clone()
    };
    let binary = named(&metadata["packages"], "octavo", None);
    assert_eq!(named(&binary["dependencies"], "octavo-backend-candle", None)["optional"], true);
    assert_eq!(binary["features"]["candle"], serde_json::json!(["dep:octavo-backend-candle"]));
    assert_eq!(binary["features"]["default"], serde_json::json!(["otlp"]));
}

/// `cargo run` passes variables set by a build script on to the program, and the program reads `OCTAVO_*` as flags.
#[test]
fn build_scripts_set_no_variable_that_is_read_as_a_flag() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let crates = ["crates", "crates/backends"].map(|folder| std::fs::read_dir(format!("{root}/{folder}")));
    let scripts = crates.into_iter().flatten().flatten().flatten().map(|entry| entry.path().join("build.rs"));
    let scripts: Vec<_> = scripts.filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    assert!(!scripts.is_empty(), "there is one in crates/octavo");
    for script in scripts {
        assert!(!script.contains("\"OCTAVO_") && !script.contains("=OCTAVO_"), "{script}");
    }
}
