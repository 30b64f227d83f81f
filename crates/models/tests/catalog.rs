//! Tests of every entry of the catalog.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use std::collections::BTreeSet;
use std::path::Path;

use octavo_models::FAMILIES;
use octavo_models::catalog::{self, CatalogEntry, DeviceKind, Gpu, SourceKind};

#[test]
fn every_file_of_the_folder_is_an_entry_named_after_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let names: BTreeSet<String> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .map(|path| path.file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    let ids: BTreeSet<String> = catalog::entries().iter().map(|entry| entry.id.clone()).collect();
    assert_eq!(ids, names);
    assert_eq!(catalog::entries()[0].id, catalog::DEFAULT_MODEL);
}

#[test]
fn no_name_means_two_models() {
    let mut seen = BTreeSet::new();
    for entry in catalog::entries() {
        for name in std::iter::once(&entry.id).chain(&entry.aliases) {
            assert!(seen.insert(name.to_ascii_lowercase()), "{name} is taken");
            assert_eq!(catalog::find(&name.to_uppercase()), Some(entry));
        }
    }
    assert_eq!(catalog::find("no such model"), None);
}

#[test]
fn entries_are_of_known_families_and_say_what_they_need() {
    for entry in catalog::entries() {
        assert!(FAMILIES.iter().any(|family| family.is_named(&entry.architecture)), "{}", entry.id);
        assert!(entry.licence_url.starts_with("https://"), "{}", entry.id);
        assert!(entry.sources.iter().any(|source| source.verified || matches!(source.kind, SourceKind::Hub { .. })));
        for need in &entry.memory {
            assert_eq!(*need, entry.memory_need(need.device, need.context), "{}", entry.id);
        }
    }
    let default = catalog::find(catalog::DEFAULT_MODEL).unwrap();
    let cpu = default.memory_need(DeviceKind::Cpu, 8192);
    assert_eq!((cpu.weights, cpu.kv), (96_576_768, 188_743_680));
}

#[test]
fn flags_follow_from_the_memory_of_a_gpu() {
    let flags = |name: &str| Gpu::ALL.map(|gpu| catalog::find(name).unwrap().gpu_flags(gpu));
    let own_context = [Some("--dtype half"), Some("--dtype half"), Some(""), Some("")];
    assert_eq!(flags(catalog::DEFAULT_MODEL), own_context.map(|flags| flags.map(str::to_owned)));
    // 9 of 10 parts of 16 GB, less 2 GiB and the weights, are 11724 tokens of 2 x 32 layers x 32 heads x 96 x 2 bytes.
    assert_eq!(flags("phi-3.5-mini-instruct")[0].as_deref(), Some("--dtype half --max-model-len 11264"));
    assert_eq!(flags("qwen3-30b-a3b"), [None, None, None, Some(String::new())]);
    assert_eq!(flags("mixtral-8x7b-instruct-v0.1"), [const { None }; 4]);
}

#[test]
fn what_is_wrong_with_an_entry_is_said() {
    let good = include_str!("../../../models/smollm2-135m-instruct.toml");
    assert!(CatalogEntry::parse(good).is_ok());
    let cases = [
        ("id = \"smollm2-135m-instruct\"", "id = \"../evil\"", "lower-case"),
        ("file = \"SmolLM2", "file = \"../SmolLM2", "not a file name"),
        ("context = 8_192\nweights", "context = 8_191\nweights", "computed"),
        ("context = 8_192\nweights", "context = 8_193\nweights", "computed"),
        ("v100-16 = \"--dtype half\"", "v100-16 = \"\"", "the flags for V100 16 GB"),
        ("l40s = \"\"\n", "", "the flags for L40S 48 GB"),
        ("h100 = \"\"", "h200 = \"\"", "h200"),
        ("kind = \"pypi\"", "kind = \"ftp\"", "ftp"),
        ("verified = true", "verified = true\nunknown = 1", "unknown"),
        ("sha256 = \"b179", "sha256 = \"B179", "SHA-256"),
        ("size = 98_362_432\nwheel_size", "size = 98_362_431\nwheel_size", "add up"),
        ("parameters = 134_515_008", "parameters = 0", "positive"),
        ("temperature = 0.2", "temperature = 2.5", "out of its range"),
        ("top_p = 0.9", "top_p = 0.0", "out of its range"),
        ("top_p = 0.9", "top_p = 0.9\ntop_k = 0", "out of its range"),
        ("top_p = 0.9", "typical_p = 0.9", "typical_p"),
        ("temperature = 0.2\ntop_p = 0.9\n", "", "recommends nothing"),
        ("source = \"https://", "source = \"", "not an https:// URL"),
    ];
    for (from, to, message) in cases {
        assert!(good.contains(from), "{from}");
        let error = CatalogEntry::parse(&good.replacen(from, to, 1)).unwrap_err();
        assert!(error.contains(message), "{to}: {error}");
    }
}
