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
    let found = MODEL.get_or_init(|| {
        resolve(DEFAULT_MODEL, &ResolveOptions::from_env(), &LogProgress)
            .map(|model| model.path)
            .map_err(|error| error.to_string())
    });
    match found {
        Ok(path) => Some(path.clone()),
        Err(error) if model_is_required() => panic!("this test needs {DEFAULT_MODEL}: {error}"),
        Err(error) => {
            eprintln!("skipped: {DEFAULT_MODEL} cannot be had ({error})");
            None
        }
    }
}
