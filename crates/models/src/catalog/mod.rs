//! The catalog of models that can be named without their source.
//!
//! Each model has a small TOML file in the repository's `models/` folder, embedded into the binary. A test parses and
//! checks all of them, so reading them at run time cannot fail.

mod entry;
mod gpu;

use std::sync::OnceLock;

pub use entry::{CatalogEntry, DeviceKind, KvShape, MemoryNeed, PypiPart, RecommendedSampling, Source, SourceKind};
pub use gpu::Gpu;

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
    embedded!("gemma-3-4b-it"),
    embedded!("gemma-2-2b-it"),
    embedded!("qwen2.5-0.5b-instruct"),
    embedded!("qwen3-0.6b"),
    embedded!("llama-3.2-1b-instruct"),
    embedded!("mistral-7b-instruct-v0.3"),
    embedded!("phi-3.5-mini-instruct"),
    embedded!("phi-4-mini-instruct"),
    embedded!("granite-3.3-2b-instruct"),
    embedded!("olmo-2-1b-instruct"),
    embedded!("smollm3-3b"),
    embedded!("qwen3-30b-a3b"),
    embedded!("qwen1.5-moe-a2.7b-chat"),
    embedded!("granite-3.1-1b-a400m-instruct"),
    embedded!("gpt-oss-20b"),
    embedded!("mixtral-8x7b-instruct-v0.1"),
    embedded!("deepseek-v2-lite-chat"),
    embedded!("qwen3-vl-8b-instruct"),
    embedded!("smolvlm-256m-instruct"),
    embedded!("all-minilm-l6-v2"),
    embedded!("bge-small-en-v1.5"),
    embedded!("multilingual-e5-base"),
    embedded!("bge-reranker-v2-m3"),
    embedded!("modernbert-embed-base"),
    embedded!("qwen3-embedding-0.6b"),
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

/// Most names that [`similar`] returns.
const SUGGESTIONS: usize = 3;

/// Similarity from which a name is suggested, between 0 and 1.
const SIMILAR: f64 = 0.8;

/// Ids of the entries whose names are close to `name`, the closest first; at most three.
///
/// Punctuation and letter case do not count, and a common beginning counts more than the rest: `llama3.2` finds
/// `llama-3.2-1b-instruct`.
pub fn similar(name: &str) -> Vec<&'static str> {
    let plain = |name: &str| name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    let wanted = plain(name);
    let score = |entry: &CatalogEntry| {
        // An alias may be a hub id; its organisation says nothing about the model.
        let names = std::iter::once(&entry.id).chain(&entry.aliases);
        let names = names.map(|known| plain(known.rsplit('/').next().unwrap_or(known)));
        names.map(|known| strsim::jaro_winkler(&known, &wanted)).fold(0.0, f64::max)
    };
    let mut scored: Vec<_> = entries().iter().map(|entry| (score(entry), entry.id.as_str())).collect();
    scored.retain(|(score, _)| *score >= SIMILAR);
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    scored.into_iter().map(|(_, id)| id).take(SUGGESTIONS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_names_are_suggested_and_distant_ones_are_not() {
        for (name, expected) in [
            ("llama3.2", "llama-3.2-1b-instruct"),
            ("llama3.2:1b", "llama-3.2-1b-instruct"),
            ("qwen3", "qwen3-0.6b"),
            ("qwen2.5", "qwen2.5-0.5b-instruct"),
            ("Qwen2.5-0.5B", "qwen2.5-0.5b-instruct"),
            ("mistral", "mistral-7b-instruct-v0.3"),
            ("phi4", "phi-4-mini-instruct"),
            ("smollm", DEFAULT_MODEL),
            ("smolm2-135m-instruct", DEFAULT_MODEL),
        ] {
            assert_eq!(similar(name).first(), Some(&expected), "{name}");
        }
        for name in ["gpt-9", "whisper", "command-r", "", "/"] {
            assert_eq!(similar(name), [""; 0], "{name}");
        }
    }
}
