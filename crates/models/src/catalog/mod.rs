//! The catalog of models that can be named without their source.
//!
//! Each model has a small TOML file in the repository's `models/` folder, embedded into the binary. A test parses and
//! checks all of them, so reading them at run time cannot fail.

mod entry;

use std::sync::OnceLock;

pub use entry::{CatalogEntry, DeviceKind, KvShape, MemoryNeed, PypiPart, Source, SourceKind};

/// Model that `octavo serve` serves by default.
pub const DEFAULT_MODEL: &str = "smollm2-135m-instruct";

/// Embeds a file of `models/`.
macro_rules! embedded {
    ($name:literal) => {
        ($name, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/", $name, ".toml")))
    };
}

/// File names in `models/` and their content.
const FILES: &[(&str, &str)] = &[
    embedded!("smollm2-135m-instruct"),
    embedded!("gemma-3-270m"),
    embedded!("qwen2.5-0.5b-instruct"),
    embedded!("qwen3-0.6b"),
    embedded!("llama-3.2-1b-instruct"),
    embedded!("mistral-7b-instruct-v0.3"),
    embedded!("qwen3-vl-8b-instruct"),
];

/// Returns all entries, the default model first.
pub fn entries() -> &'static [CatalogEntry] {
    static ENTRIES: OnceLock<Vec<CatalogEntry>> = OnceLock::new();
    ENTRIES.get_or_init(|| {
        FILES
            .iter()
            .map(|(name, text)| CatalogEntry::parse(text).unwrap_or_else(|error| panic!("models/{name}.toml: {error}")))
            .collect()
    })
}

/// Returns the entry with this name or alias, ignoring case.
pub fn find(name: &str) -> Option<&'static CatalogEntry> {
    entries().iter().find(|entry| entry.is_called(name))
}
