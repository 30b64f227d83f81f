//! Selection of the files of a repository that belong to a model. All functions are pure functions of the listing.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use serde::Deserialize;

use crate::pieces::{Piece, follows};

/// Index of a sharded checkpoint.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// Weights of a checkpoint in one file.
pub(super) const SINGLE: &str = "model.safetensors";
/// File that identifies a folder as a Hugging Face model.
pub(super) const CONFIG: &str = "config.json";
/// Optional files, which are fetched if they exist.
pub(super) const OPTIONAL: [&str; 14] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    MODULES,
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
];
/// List of the modules of sentence-transformers, which have folders of their own.
const MODULES: &str = "modules.json";

/// Returns whether a name from a listing can be joined to a folder without leaving it, on any platform.
pub(super) fn is_safe(name: &str) -> bool {
    let plain = |component: Component| matches!(component, Component::Normal(part) if part != "..");
    !name.is_empty()
        && name.len() <= 1024
        && !name.contains(['\\', ':', '\0'])
        && !name.chars().any(char::is_control)
        && !name.ends_with('/')
        && !name.contains("//")
        && !name.split('/').any(|part| part == ".")
        && Path::new(name).components().all(plain)
}

/// Weights of a directory.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Weights {
    /// The shards in [`INDEX`].
    Sharded,
    /// These files.
    Files(Vec<String>),
    /// There is no safetensors file.
    None,
}

/// Returns the weights among the files of a repository. If there is an index or a `model.safetensors`, other
/// safetensors files (a second copy in another layout, adapters) are ignored.
pub(super) fn weights(names: &[String]) -> Weights {
    let has = |name: &str| names.iter().any(|other| other == name);
    if has(INDEX) {
        return Weights::Sharded;
    }
    if has(SINGLE) {
        return Weights::Files(vec![SINGLE.to_owned()]);
    }
    let top = |name: &&String| name.ends_with(".safetensors") && !name.contains('/');
    let mut files: Vec<String> = names.iter().filter(top).cloned().collect();
    files.sort();
    if files.is_empty() { Weights::None } else { Weights::Files(files) }
}

/// Returns the files of the modules of sentence-transformers (`1_Pooling/config.json`) among those of a repository: their
/// configurations, and their weights too if those are wanted.
pub(super) fn module_files(names: &[String], with_weights: bool) -> impl Iterator<Item = &String> {
    let has_modules = names.iter().any(|name| name == MODULES);
    names.iter().filter(move |name| {
        let is_numbered = |folder: &str| folder.starts_with(|c: char| c.is_ascii_digit()) && folder.contains('_');
        has_modules
            && name.split_once('/').is_some_and(|(folder, file)| {
                is_numbered(folder) && (file == CONFIG || (with_weights && file == SINGLE))
            })
    })
}

/// Returns the shards of an index. Unsafe names are an error.
pub(super) fn shards(index: &[u8]) -> Result<BTreeSet<String>, String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let index: Index = serde_json::from_slice(index).map_err(|error| error.to_string())?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    if shards.is_empty() {
        return Err("it names no shard".to_owned());
    }
    match shards.iter().find(|name| !is_safe(name) || !name.ends_with(".safetensors")) {
        Some(name) => Err(format!("it names {name:?} as a shard")),
        None => Ok(shards),
    }
}

/// Returns the GGUF files that contain a language model, of several pieces the first.
pub(super) fn gguf_files(names: &[String]) -> Vec<String> {
    let side_file = |name: &str| is_mmproj(name) || name.to_ascii_lowercase().contains("imatrix");
    let mut files: Vec<String> =
        names.iter().filter(|name| is_gguf(name) && !side_file(name) && !follows(name)).cloned().collect();
    files.sort();
    files
}

/// Returns whether a file has the extension of GGUF files.
pub(crate) fn is_gguf(name: &str) -> bool {
    name.to_ascii_lowercase().ends_with(".gguf")
}

/// Returns whether a file has the name of an mmproj file: the encoder of the model beside it.
pub(crate) fn is_mmproj(name: &str) -> bool {
    is_gguf(name) && name.to_ascii_lowercase().contains("mmproj")
}

/// Returns the mmproj file for a GGUF file among the files of a repository: one in the same folder, in f16 if there is a
/// choice, because every mmproj file of a repository encodes images for all of its models.
pub(super) fn mmproj_beside<'a>(names: &'a [String], model: &str) -> Option<&'a String> {
    let folder = |name: &str| name.rsplit_once('/').map(|(folder, _)| folder.to_owned());
    let beside =
        names.iter().filter(|name| is_mmproj(name) && Piece::parse(name).is_none() && folder(name) == folder(model));
    let rank = |name: &str| {
        let name = name.to_ascii_lowercase();
        ["bf16", "f16", "f32"].iter().position(|kind| name.contains(kind)).map_or(3, |kind| [1, 0, 2][kind])
    };
    beside.min_by_key(|name| (rank(name), *name))
}

/// Returns the files whose name contains the quantisation `quant` as a word, ignoring case: `Q4_K` does not match
/// `x-Q4_K_M.gguf`.
pub(super) fn of_quant<'a>(files: &'a [String], quant: &str) -> Vec<&'a String> {
    let quant = quant.to_ascii_lowercase();
    let has_word = |name: &str| {
        let name = name.to_ascii_lowercase();
        let bytes = name.as_bytes();
        let in_word = |at: Option<usize>| {
            at.and_then(|at| bytes.get(at)).is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_')
        };
        name.match_indices(&quant).any(|(at, _)| !in_word(at.checked_sub(1)) && !in_word(Some(at + quant.len())))
    };
    files.iter().filter(|name| has_word(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn unsafe_names_are_refused() {
        for name in ["config.json", "sub/model.gguf", "a b.json", "…/x", ".gitattributes"] {
            assert!(is_safe(name), "{name:?}");
        }
        let bad = [
            "",
            "..",
            "../x",
            "a/../b",
            "/etc/passwd",
            "a//b",
            "a/",
            "./a",
            "a/./b",
            "a\\..\\b",
            "C:x",
            "a\0b",
            "a\nb",
        ];
        for name in bad {
            assert!(!is_safe(name), "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn a_safe_name_stays_in_its_folder(name in "[a./\\\\:\\PC]{0,12}") {
            if is_safe(&name) {
                let joined = Path::new("/base").join(&name);
                prop_assert!(joined.starts_with("/base") && joined != Path::new("/base"));
                prop_assert!(joined.components().all(|part| part != Component::ParentDir));
            }
        }
    }

    #[test]
    fn weights_come_from_the_index_or_one_file_or_what_is_there() {
        let mistral = names(&[INDEX, "model-00001-of-00002.safetensors", "consolidated.safetensors"]);
        assert_eq!(weights(&mistral), Weights::Sharded);
        assert_eq!(weights(&names(&[SINGLE, "adapter.safetensors"])), Weights::Files(names(&[SINGLE])));
        assert_eq!(
            weights(&names(&["weights.safetensors", "onnx/x.safetensors", "a.bin"])),
            Weights::Files(names(&["weights.safetensors"]))
        );
        assert_eq!(weights(&names(&["pytorch_model.bin"])), Weights::None);
    }

    #[test]
    fn an_index_names_only_safe_shards() {
        let good = br#"{"metadata": {}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"}}"#;
        assert_eq!(shards(good).unwrap().len(), 2);
        assert!(shards(br#"{"weight_map": {"a": "../m.safetensors"}}"#).is_err());
        assert!(shards(br#"{"weight_map": {"a": "model.bin"}}"#).is_err());
        assert!(shards(br#"{"weight_map": {}}"#).is_err());
        assert!(shards(b"<html>").is_err());
    }

    #[test]
    fn a_quantisation_is_a_whole_word_of_the_name() {
        let files = gguf_files(&names(&[
            "README.md",
            "m-Q4_K_M.gguf",
            "m-Q4_K_S.gguf",
            "m-Q4_K.gguf",
            "m.q8_0.gguf",
            "mmproj-Q8_0.gguf",
            "imatrix.gguf",
        ]));
        assert_eq!(files.len(), 4);
        let pick = |quant| of_quant(&files, quant).into_iter().map(String::as_str).collect::<Vec<_>>();
        assert_eq!(pick("Q4_K_M"), ["m-Q4_K_M.gguf"]);
        assert_eq!(pick("q4_k"), ["m-Q4_K.gguf"]);
        assert_eq!(pick("Q8_0"), ["m.q8_0.gguf"]);
        assert_eq!(pick("Q4"), [""; 0]);
    }

    #[test]
    fn the_first_piece_stands_for_all() {
        let files = ["q8/m-00001-of-00002.gguf", "q8/m-00002-of-00002.gguf", "m-Q4_0.gguf"];
        assert_eq!(gguf_files(&names(&files)), names(&["m-Q4_0.gguf", files[0]]));
    }

    #[test]
    fn the_encoder_of_a_model_is_in_its_folder() {
        let files =
            names(&["m.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "q8/m.gguf", "q8/mmproj-Q8_0.gguf", "x/m.gguf"]);
        let found = ["m.gguf", "q8/m.gguf", "x/m.gguf"].map(|model| mmproj_beside(&files, model).map(String::as_str));
        assert_eq!(found, [Some("mmproj-F16.gguf"), Some("q8/mmproj-Q8_0.gguf"), None]);
        assert_eq!(mmproj_beside(&files[..2], "m.gguf").map(String::as_str), Some("mmproj-BF16.gguf"));
    }

    #[test]
    fn modules_have_numbered_folders() {
        let all = names(&[
            "1_Pooling/config.json",
            "2_Dense/config.json",
            "2_Dense/model.safetensors",
            "2_Dense/x.bin",
            "onnx/config.json",
            "config.json",
            "1_a/b/config.json",
        ]);
        assert_eq!(module_files(&all, true).count(), 0, "without a list of modules");
        let all = [all, names(&[MODULES])].concat();
        let found = |with_weights| module_files(&all, with_weights).map(String::as_str).collect::<Vec<_>>();
        assert_eq!(found(true), ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]);
        assert_eq!(found(false), ["1_Pooling/config.json", "2_Dense/config.json"]);
    }
}
