//! Environment variables whose names begin with `OCTAVO_`.

use clap::{Arg, Command};

use crate::cli::layers::{PREFIX, WITH_VARIABLES, nearest, variable};

/// Variables that do not set a flag.
const OTHERS: [&str; 3] = ["OCTAVO_CACHE", "OCTAVO_CUDA_EARLY_LAUNCHES", "OCTAVO_CUDA_LIBS"];

/// Prefixes of variables that tests, benches and scripts of this repository read.
const DEVELOPMENT: [&str; 28] = [
    "OCTAVO_ADVISORIES",
    "OCTAVO_ALL_KERNELS",
    "OCTAVO_API_CASES",
    "OCTAVO_BENCH_",
    "OCTAVO_BIN",
    "OCTAVO_BROWSER",
    "OCTAVO_COUNTED",
    "OCTAVO_CUDA_TOOLS",
    "OCTAVO_DEPLOYMENT",
    "OCTAVO_EMULATION_",
    "OCTAVO_FUZZ_",
    "OCTAVO_GPU",
    "OCTAVO_IMAGE",
    "OCTAVO_JSON_SCHEMA_SUITE",
    "OCTAVO_LOAD_MODEL",
    "OCTAVO_MINILM",
    "OCTAVO_NODE_MODULES",
    "OCTAVO_PACKAGES",
    "OCTAVO_PARITY_ALL",
    "OCTAVO_PEER",
    "OCTAVO_RELEASE",
    "OCTAVO_REQUIRE_",
    "OCTAVO_SOURCES",
    "OCTAVO_STANDIN_",
    "OCTAVO_TEST",
    "OCTAVO_URL",
    "OCTAVO_WHOLE_IMAGES",
    "OCTAVO_WRITE_BUDGET",
];

/// A warning for each of the `variables` that has Octavo's prefix but is unknown.
pub(crate) fn unknown(variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let flags = flags(&super::command());
    let mut warnings: Vec<_> = variables
        .filter(|(name, value)| name.starts_with(PREFIX) && !is_of_a_service(name, value))
        .filter(|(name, _)| !is_known(&flags, name))
        .map(|(name, _)| warning(&flags, &name))
        .collect();
    warnings.sort();
    warnings
}

/// The variables of all flags.
fn flags(command: &Command) -> Vec<String> {
    let commands = WITH_VARIABLES.iter().filter_map(|name| command.find_subcommand(name));
    let served = commands.flat_map(Command::get_arguments).filter(|arg| !arg.is_hide_set());
    served.filter_map(Arg::get_long).map(variable).collect()
}

fn is_known(flags: &[String], name: &str) -> bool {
    OTHERS.contains(&name)
        || flags.iter().any(|flag| flag == name)
        || DEVELOPMENT.iter().any(|start| name.starts_with(start))
}

/// Whether the variable is one that Kubernetes sets for a service whose name begins with octavo.
fn is_of_a_service(name: &str, value: &str) -> bool {
    let of_port = name.contains("_PORT_") && ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| name.contains(protocol));
    of_port || name.ends_with("_SERVICE_HOST") || name.contains("_SERVICE_PORT") || value.contains("://")
}

fn warning(flags: &[String], name: &str) -> String {
    let known = flags.iter().map(String::as_str).chain(OTHERS);
    match nearest(known, name) {
        Some(known) => format!("the variable {name} has no effect: it is unknown; did you mean {known}?"),
        None => format!("the variable {name} has no effect: it is unknown"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use super::*;

    fn warnings(variables: &[(&str, &str)]) -> Vec<String> {
        unknown(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn unknown_variables_are_named_with_the_nearest_one() {
        let set =
            [("OCTAVO_MAX_MODEL_LENGTH", "1"), ("OCTAVO_QUITE_ANOTHER_THING", ""), ("PATH", "/"), ("OCTAVO_PORT", "1")];
        let found = warnings(&set);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].contains("OCTAVO_MAX_MODEL_LENGTH") && found[0].ends_with("did you mean OCTAVO_MAX_MODEL_LEN?")
        );
        assert_eq!(found[1], "the variable OCTAVO_QUITE_ANOTHER_THING has no effect: it is unknown");
    }

    #[test]
    fn variables_that_are_read_or_set_by_kubernetes_are_silent() {
        let set = [
            ("OCTAVO_CACHE", "/c"),
            ("OCTAVO_INPUT_FILE", "f"),
            ("OCTAVO_REQUIRE_MODEL", "1"),
            ("OCTAVO_PORT", "tcp://10.0.0.7:8000"),
            ("OCTAVO_SERVICE_HOST", "10.0.0.7"),
            ("OCTAVO_API_SERVICE_PORT_HTTP", "80"),
            ("OCTAVO_API_PORT_80_TCP_ADDR", "10.0.0.7"),
        ];
        assert_eq!(warnings(&set), [""; 0]);
    }

    /// Source files below `folder`.
    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        const SKIPPED: [&str; 4] = ["target", "node_modules", "results", "goldens"];
        for entry in std::fs::read_dir(folder).unwrap().map_while(Result::ok) {
            let (path, name) = (entry.path(), entry.file_name());
            if path.is_dir() && !SKIPPED.iter().any(|skipped| name == *skipped) {
                sources(&path, found);
            } else if path.extension().is_none_or(|kind| {
                ["rs", "py", "sh", "cpp", "h", "yaml", "toml", "sbatch"].iter().any(|known| kind == *known)
            }) && path.is_file()
            {
                found.push(path);
            }
        }
    }

    /// The names in `text` that begin with the prefix.
    fn names(text: &str) -> impl Iterator<Item = &str> {
        text.match_indices(PREFIX).map(|(at, _)| {
            let end = text[at..]
                .find(|letter: char| !(letter.is_ascii_uppercase() || letter == '_'))
                .unwrap_or(text.len() - at);
            text[at..at + end].trim_end_matches('_')
        })
    }

    #[test]
    fn the_lists_are_those_of_the_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut files = vec![];
        for folder in ["crates", "kernels", "tests", "benches", "deploy", ".ci"] {
            sources(&root.join(folder), &mut files);
        }
        // These tests set variables that nothing reads.
        files.retain(|path| {
            !["cli/tests.rs", "cli/variables.rs", "k8s/mutants.py"].iter().any(|own| path.ends_with(own))
        });
        let mut used = BTreeSet::new();
        for file in &files {
            let Ok(text) = std::fs::read_to_string(file) else { continue };
            used.extend(names(&text).map(str::to_owned));
        }
        let flags = flags(&crate::cli::command());
        let unknown: Vec<_> = used
            .iter()
            .filter(|name| !is_known(&flags, name) && name.as_str() != "OCTAVO" && !is_of_a_service(name, ""))
            .collect();
        assert!(unknown.is_empty(), "add them to the lists: {unknown:?}");
        for listed in OTHERS.iter().chain(&DEVELOPMENT) {
            let start = listed.trim_end_matches('_');
            assert!(used.iter().any(|name| name.starts_with(start)), "nothing reads {listed} any more");
        }
    }
}
