//! Committed files of what is known of each instance, with which compiled programs are compared.

use std::collections::BTreeMap;
use std::fmt::{Debug, Write as _};
use std::path::PathBuf;

use octavo_kernels::manifest::{self, Chip};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Environment variable: with 1, the files are rewritten with what is found.
const REWRITE: &str = "OCTAVO_WRITE_BUDGET";

/// Returns whether the files are to be rewritten.
pub(crate) fn is_rewritten() -> bool {
    std::env::var_os(REWRITE).is_some_and(|value| value == "1")
}

/// What is known of each instance, by chip and name.
pub(crate) type Table<T> = BTreeMap<String, BTreeMap<String, T>>;

/// A committed file.
pub(crate) struct Committed {
    pub(crate) name: &'static str,
    /// The comment at its beginning.
    pub(crate) head: &'static str,
}

impl Committed {
    fn path(&self) -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(self.name)
    }

    pub(crate) fn read<T: DeserializeOwned>(&self) -> Table<T> {
        let text = std::fs::read_to_string(self.path()).expect(self.name);
        toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// Formats a table as committed: one line per instance.
    fn written<T: Serialize>(&self, table: &Table<T>) -> String {
        let mut text = String::from(self.head);
        for (chip, instances) in table {
            let _ = writeln!(text, "\n[{chip}]");
            for (name, known) in instances {
                let line = toml::Value::try_from(known).expect("numbers");
                let _ = writeln!(text, "{name} = {line}");
            }
        }
        text
    }

    /// Rewrites the file.
    pub(crate) fn write<T: Serialize>(&self, table: &Table<T>) {
        std::fs::write(self.path(), self.written(table)).expect("the file is writable");
    }

    /// Compares what was found with the file, which is rewritten first if that is asked for and all chips were compiled. Instances of
    /// programs that were not compiled are known from the file alone.
    pub(crate) fn compare<T: Serialize + DeserializeOwned + PartialEq + Debug>(&self, found: &Table<T>) {
        if is_rewritten() && found.len() == Chip::CHECKED.len() {
            self.write(found);
        }
        let (file, none) = (self.read::<T>(), BTreeMap::new());
        let mut differences = String::new();
        for (chip, instances) in found {
            let known = file.get(chip).unwrap_or(&none);
            for (name, own) in instances.iter().filter(|(name, own)| known.get(*name) != Some(own)) {
                let _ = writeln!(differences, "{chip} {name}: {own:?}, in the file {:?}", known.get(name));
            }
        }
        for chip in Chip::CHECKED {
            let (arch, instances) = (chip.arch(), manifest::all(chip));
            let exists = |name: &str| instances.iter().any(|instance| instance.name == name);
            for name in file.get(&arch).unwrap_or(&none).keys().filter(|name| !exists(name)) {
                let _ = writeln!(differences, "{arch} {name}: in the file, but no instance");
            }
        }
        assert!(differences.is_empty(), "if this is meant, {REWRITE}=1 writes {} anew:\n{differences}", self.name);
    }
}
