//! Digests of the programs that have been compiled and checked. A program is compiled again when its text, a header, the compiler or
//! these tests have changed, and with `OCTAVO_ALL_KERNELS=1`, as in the long checks.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use octavo_backend_cuda::testing::hash;
use octavo_kernels::manifest::{self, Chip, Instance};
use octavo_kernels::sources::{HEADERS, Source};

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
    let options = octavo_kernels::nvrtc::options(manifest::Target::Code(chip));
    parts.extend(options.iter().map(String::as_str));
    hash(parts)
}

/// Returns whether a program is to be compiled.
pub(crate) fn is_wanted(chip: Chip, source: Source, instances: &[Instance]) -> bool {
    static KNOWN: OnceLock<Table<String>> = OnceLock::new();
    if committed::is_rewritten() || std::env::var_os("OCTAVO_ALL_KERNELS").is_some_and(|value| value == "1") {
        return true;
    }
    let known = KNOWN.get_or_init(|| CHECKED.read()).get(&chip.arch()).and_then(|of_chip| of_chip.get(name(source)));
    known != Some(&digest(chip, source, instances))
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
