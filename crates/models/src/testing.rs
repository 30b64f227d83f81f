//! The default model for tests of any crate.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::catalog::DEFAULT_MODEL;
use crate::progress::LogProgress;
use crate::resolve::{ResolveOptions, resolve};

/// Returns whether a test without the default model fails instead of being skipped: under `CI`, or with
/// `OCTAVO_REQUIRE_MODEL=1`.
pub fn model_is_required() -> bool {
    let is_set = |name: &str| std::env::var(name).is_ok_and(|value| !matches!(value.as_str(), "" | "0" | "false"));
    is_set("CI") || is_set("OCTAVO_REQUIRE_MODEL")
}

/// Returns the path of the default model's GGUF file, fetched on first use. If it is not available, prints a line and
/// returns `None`, at which a test returns:
///
/// ```no_run
/// let Some(path) = octavo_models::testing::default_model() else { return };
/// ```
///
/// # Panics
/// Panics if the model is not available and [`model_is_required`] is true.
pub fn default_model() -> Option<PathBuf> {
    static MODEL: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let found = MODEL.get_or_init(|| fetched(DEFAULT_MODEL));
    available(DEFAULT_MODEL, found, model_is_required())
}

/// Does the same as [`default_model`] for another model of the catalog, which is larger. It is fetched only if it is
/// `wanted`, and then the test needs it.
///
/// # Panics
/// Panics if the model is wanted and not available.
pub fn catalog_model(name: &str, wanted: bool) -> Option<PathBuf> {
    match wanted {
        true => available(name, &fetched(name), true),
        false => available(name, &Err("the test of it was not asked for".into()), false),
    }
}

fn fetched(name: &str) -> Result<PathBuf, String> {
    let found = resolve(name, &ResolveOptions::from_env(), &LogProgress);
    found.map(|model| model.path).map_err(|error| error.to_string())
}

fn available(name: &str, found: &Result<PathBuf, String>, required: bool) -> Option<PathBuf> {
    match found {
        Ok(path) => Some(path.clone()),
        Err(error) if required => panic!("this test needs {name}: {error}"),
        Err(error) => {
            eprintln!("skipped: {name} cannot be had ({error})");
            None
        }
    }
}
