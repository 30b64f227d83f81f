//! Digests of the programs that have been compiled and checked. A program is compiled again when its text, a header, the compiler or
//! these tests have changed, and with `OCTAVO_ALL_KERNELS=1`, as in the long checks.

use std::collections::BTreeMap;
use std::path::Path;

use octavo_kernels::manifest::{self, Chip, Instance};
use octavo_kernels::sources::{HEADERS, Source};
use sha2::{Digest, Sha256};

use crate::committed::{self, Committed, Table};
use crate::{Program, RELEASE, programs};

const CHECKED: Committed = Committed {
    name: "checked.toml",
    head: "# Digests of the programs whose figures are those of budget.toml and code.toml. `tests/nvrtc` compiles the others, and all of\n\
           # them with OCTAVO_ALL_KERNELS=1. OCTAVO_WRITE_BUDGET=1 writes this file anew, as with budget.toml.\n",
};

/// The sources of these tests.
const TESTS: [&str; 5] = [
    include_str!("main.rs"),
    include_str!("code.rs"),
    include_str!("figures.rs"),
    include_str!("issue.rs"),
    include_str!("packed.rs"),
];

/// Returns the name of a source in the file.
fn name(source: Source) -> &'static str {
    Path::new(source.path).file_stem().and_then(|stem| stem.to_str()).expect("a file's name")
}

/// Returns the digest of everything on which the checks of a program depend.
fn digest(chip: Chip, source: Source, instances: &[Instance]) -> String {
    let (arch, release, program) = (chip.arch(), format!("{RELEASE:?}"), manifest::program(source, instances));
    let mut parts = vec![arch.as_str(), &release, &program];
    parts.extend(HEADERS.iter().flat_map(|(name, text)| [*name, *text]));
    parts.extend(TESTS);
    let mut hash = Sha256::new();
    for part in parts {
        // The length is included, so that different lists have different input.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns whether a program is to be compiled.
pub(crate) fn is_wanted(chip: Chip, source: Source, instances: &[Instance]) -> bool {
    let all = std::env::var_os("OCTAVO_ALL_KERNELS").is_some_and(|value| value == "1");
    let known = || CHECKED.read::<String>().get(&chip.arch())?.get(name(source)).cloned();
    all || committed::is_rewritten() || known() != Some(digest(chip, source, instances))
}

#[test]
fn digests_are_written_with_the_figures() {
    if !committed::is_rewritten() || programs().is_empty() {
        return;
    }
    let mut found = Table::new();
    for Program { chip, source, instances, .. } in programs() {
        let of_chip: &mut BTreeMap<_, _> = found.entry(chip.arch()).or_default();
        of_chip.insert(name(*source).to_owned(), digest(*chip, *source, instances));
    }
    CHECKED.write(&found);
}

#[test]
fn a_digest_tells_texts_and_chips_apart() {
    let instances = manifest::all(Chip::SM_90);
    let [first, second, ..] = manifest::sources(&instances)[..] else { panic!("more than one source") };
    let of = |chip, source| digest(chip, source, &instances);
    let known = of(Chip::SM_90, first);
    assert_eq!(known, of(Chip::SM_90, first));
    assert_ne!(known, of(Chip::SM_89, first));
    assert_ne!(known, of(Chip::SM_90, second));
    assert_ne!(known, of(Chip::SM_90, Source { text: "", ..first }));
    assert_ne!(known, digest(Chip::SM_90, first, &instances[1..]));
}
