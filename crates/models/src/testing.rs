//! The default model for tests of any crate.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::catalog::DEFAULT_MODEL;
use crate::progress::LogProgress;
use crate::resolve::{ResolveOptions, resolve};

/// Returns the path of the default model's GGUF file, fetched on first use. Tests that call it are marked with
/// `#[ignore]`, because they need the network once.
///
/// # Panics
/// Panics if the model is not available.
pub fn default_model() -> PathBuf {
    static MODEL: OnceLock<PathBuf> = OnceLock::new();
    MODEL.get_or_init(|| catalog_model(DEFAULT_MODEL)).clone()
}

/// Does the same as [`default_model`] for another model of the catalog.
///
/// # Panics
/// Panics if the model is not available.
pub fn catalog_model(name: &str) -> PathBuf {
    match resolve(name, &ResolveOptions::from_env(), &LogProgress) {
        Ok(model) => model.path,
        Err(error) => panic!("this needs {name}: {error}"),
    }
}
