//! Parsing of model references.

use std::path::{Path, PathBuf};

use crate::catalog::{self, CatalogEntry};
use crate::hub::{GgufChoice, is_gguf};

use super::ResolveError;

/// A parsed model reference.
#[derive(Debug, PartialEq)]
pub(super) enum Reference {
    /// An existing path.
    Path(PathBuf),
    /// A model of the catalog.
    Catalog(&'static CatalogEntry),
    /// A repository of the hub or a GGUF file in one.
    Hub {
        /// Repository, `org/name`.
        repo: String,
        /// Choice of a GGUF file; `None` means the whole model.
        gguf: Option<GgufChoice>,
    },
}

impl Reference {
    /// Parses a reference. An existing path has priority, then the catalog, then the hub.
    pub(super) fn parse(text: &str) -> Result<Reference, ResolveError> {
        if text.trim().is_empty() || text.contains('\0') {
            return Err(ResolveError::BadReference { reference: text.to_owned() });
        }
        if Path::new(text).exists() {
            return Ok(Reference::Path(PathBuf::from(text)));
        }
        if let Some(entry) = catalog::find(text) {
            return Ok(Reference::Catalog(entry));
        }
        if let Some((repo, gguf)) = hub_reference(text) {
            return Ok(Reference::Hub { repo, gguf });
        }
        let looks_like_a_path = text.contains(['/', '\\']) || text.starts_with(['.', '~']) || is_gguf(text);
        if looks_like_a_path {
            return Err(ResolveError::NoSuchPath { path: PathBuf::from(text) });
        }
        Err(ResolveError::UnknownName { name: text.to_owned(), similar: catalog::similar(text) })
    }
}

/// `org/name`, `org/name:file.gguf`, `org/name:Q4_K_M`, `org/name/file.gguf`, `org/name/folder/file.gguf`.
fn hub_reference(text: &str) -> Option<(String, Option<GgufChoice>)> {
    let (path, after_colon) = match text.split_once(':') {
        Some((path, choice)) => (path, Some(choice)),
        None => (text, None),
    };
    let mut segments = path.splitn(3, '/');
    let (org, name, rest) = (segments.next()?, segments.next()?, segments.next());
    if !is_repo_part(org) || !is_repo_part(name) {
        return None;
    }
    let gguf = match (rest, after_colon) {
        // `models/x.gguf` is a path that does not exist.
        (None, None) if is_gguf(name) => return None,
        (None, None) => None,
        (None, Some(file)) if is_gguf(file) => Some(GgufChoice::File(file.to_owned())),
        (None, Some(quant)) if is_quant(quant) => Some(GgufChoice::Quant(quant.to_owned())),
        (Some(file), None) if is_gguf(file) => Some(GgufChoice::File(file.to_owned())),
        _ => return None,
    };
    Some((format!("{org}/{name}"), gguf))
}

/// Returns whether `part` follows the hub's rules for names.
fn is_repo_part(part: &str) -> bool {
    (1..=96).contains(&part.len())
        && part.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && !part.starts_with(['-', '.'])
        && !part.ends_with(['-', '.'])
        && !part.contains("--")
        && !part.contains("..")
}

fn is_quant(text: &str) -> bool {
    (1..=32).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hub(repo: &str, gguf: Option<GgufChoice>) -> Reference {
        Reference::Hub { repo: repo.to_owned(), gguf }
    }

    #[test]
    fn hub_references_are_read_as_llama_cpp_and_hugging_face_users_write_them() {
        let file = |name: &str| Some(GgufChoice::File(name.to_owned()));
        assert_eq!(Reference::parse("org/name").unwrap(), hub("org/name", None));
        assert_eq!(Reference::parse("org/name:m.Q4_1.gguf").unwrap(), hub("org/name", file("m.Q4_1.gguf")));
        assert_eq!(Reference::parse("org/name/m.gguf").unwrap(), hub("org/name", file("m.gguf")));
        assert_eq!(Reference::parse("org/name/sub/m.gguf").unwrap(), hub("org/name", file("sub/m.gguf")));
        let quant = Some(GgufChoice::Quant("Q4_K_M".to_owned()));
        assert_eq!(Reference::parse("org/n.v-1_x:Q4_K_M").unwrap(), hub("org/n.v-1_x", quant));
    }

    #[test]
    fn catalog_names_and_aliases_win_over_the_hub() {
        let Reference::Catalog(entry) = Reference::parse("qwen/QWEN3-0.6b").unwrap() else {
            panic!("the alias is not found");
        };
        assert_eq!(entry.id, "qwen3-0.6b");
    }

    #[test]
    fn a_path_that_exists_wins() {
        assert_eq!(Reference::parse("/").unwrap(), Reference::Path("/".into()));
    }

    #[test]
    fn what_looks_like_a_path_is_reported_as_one() {
        for text in ["./m.gguf", "/no/such/model.gguf", "m.gguf", "models/m.gguf", "a/b/c", "../x", "C:\\m.gguf", "~/m"]
        {
            assert!(matches!(Reference::parse(text), Err(ResolveError::NoSuchPath { .. })), "{text}");
        }
        assert!(matches!(Reference::parse("gpt-9"), Err(ResolveError::UnknownName { .. })));
        assert!(matches!(Reference::parse(" "), Err(ResolveError::BadReference { .. })));
    }

    proptest! {
        #[test]
        fn any_text_is_an_answer(text in "\\PC{0,40}") {
            if let Ok(Reference::Hub { repo, .. }) = Reference::parse(&text) {
                prop_assert!(!repo.contains("..") && repo.split('/').count() == 2);
            }
        }
    }
}
