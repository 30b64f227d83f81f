//! Digests of the programs that have been compiled and checked. A program is compiled again when its text, a header that it includes,
//! the compiler or these tests have changed, and with `OCTAVO_ALL_KERNELS=1`, as in the long checks.

use std::collections::BTreeSet;
use std::path::Path;

use octavo_backend_cuda::testing::hash;
use octavo_kernels::manifest::{self, Chip, Instance};
use octavo_kernels::sources::{self, HEADERS, Source};

use crate::committed::{self, Table};
use crate::{Program, RELEASES, Release, figures, issue};

/// The sources of the tests of these programs.
const TESTS: [&str; 4] =
    [include_str!("main.rs"), include_str!("code.rs"), include_str!("figures.rs"), include_str!("issue.rs")];

/// Returns the name of a source in the file.
fn name(source: Source) -> &'static str {
    Path::new(source.path).file_stem().and_then(|stem| stem.to_str()).expect("a file's name")
}

/// Adds the names and texts of the headers that a text includes, directly or not.
fn add_headers(text: &str, found: &mut BTreeSet<(&'static str, &'static str)>) {
    let includes = |name: &str| text.lines().any(|line| line == format!("#include \"{name}\""));
    for (name, content) in HEADERS.iter().filter(|(name, _)| includes(name)) {
        if found.insert((name, content)) {
            add_headers(content, found);
        }
    }
}

/// Returns the digest of everything on which the checks of a program depend.
fn digest(release: &Release, chip: Chip, source: Source, instances: &[Instance]) -> String {
    let (arch, release) = (chip.arch(), format!("{:?}", release.version));
    let program = manifest::program(source, instances);
    let mut headers = BTreeSet::new();
    add_headers(source.text, &mut headers);
    let mut parts = vec![arch.as_str(), &release, &program];
    parts.extend(headers.iter().flat_map(|(name, text)| [*name, *text]));
    parts.extend(TESTS);
    let options = octavo_kernels::nvrtc::options(manifest::Target::Code(chip));
    parts.extend(options.iter().map(String::as_str));
    hash(parts)
}

/// Returns whether a program is to be compiled, of which the digests of the last checks are known.
pub(crate) fn is_wanted(
    release: &Release,
    known: &Table<String>,
    chip: Chip,
    source: Source,
    instances: &[Instance],
) -> bool {
    if std::env::var_os("OCTAVO_ALL_KERNELS").is_some_and(|value| value == "1") {
        return true;
    }
    let known = known.get(&chip.arch()).and_then(|of_chip| of_chip.get(name(source)));
    known != Some(&digest(release, chip, source, instances))
}

#[test]
fn digests_are_written_with_the_figures() {
    if !committed::is_rewritten() {
        return;
    }
    for release in RELEASES.iter().filter(|release| !release.programs().is_empty()) {
        release.budget.compare(&release.found());
    }
    crate::every_instance_can_be_launched();
    crate::machine_code_is_what_was_meant();
    figures::the_figures_of_machine_code_are_those_of_the_file();
    issue::machine_code_of_few_rows_leaves_time_to_the_memory();
    issue::machine_code_of_decode_attention_leaves_time_to_the_memory();
    issue::machine_code_of_prefill_attention_leaves_time_to_the_tensor_cores();
    for release in &RELEASES {
        let (used, mut found) = (release.found(), Table::new());
        for program @ Program { chip, source, instances, .. } in release.programs() {
            assert!(program.text().is_some(), "the machine code of {} was not checked", chip.arch());
            // A program that fails a check is compiled again until it passes.
            let of_chip = &used[&chip.arch()];
            if !instances.iter().any(|instance| release.spills(&of_chip[&instance.name])) {
                let digests = found.entry(chip.arch()).or_default();
                digests.insert(name(*source).to_owned(), digest(release, *chip, *source, instances));
            }
        }
        if !found.is_empty() {
            release.checked.update(&found, |chip, own| {
                manifest::sources(&manifest::all(chip)).into_iter().any(|source| name(source) == own)
            });
        }
    }
}

#[test]
fn a_digest_has_the_headers_that_a_source_includes() {
    let of = |source: Source| {
        let mut headers = BTreeSet::new();
        add_headers(source.text, &mut headers);
        headers.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
    };
    assert_eq!(of(sources::FILL), ["gpu.h", "params.h"]);
    // `gemv.h` includes the others.
    assert_eq!(of(sources::GEMV), ["gemv.h", "gpu.h", "linear.h", "params.h"]);
}

#[test]
fn a_digest_tells_texts_chips_and_releases_apart() {
    let instances = manifest::all(Chip::SM_90);
    let [first, second, ..] = manifest::sources(&instances)[..] else { panic!("more than one source") };
    let of = |chip, source| digest(&RELEASES[0], chip, source, &instances);
    let known = of(Chip::SM_90, first);
    assert_eq!(known, of(Chip::SM_90, first));
    assert_ne!(known, of(Chip::SM_89, first));
    assert_ne!(known, of(Chip::SM_90, second));
    assert_ne!(known, of(Chip::SM_90, Source { text: "", ..first }));
    assert_ne!(known, digest(&RELEASES[0], Chip::SM_90, first, &instances[1..]));
    assert_ne!(known, digest(&RELEASES[1], Chip::SM_90, first, &instances));
}
