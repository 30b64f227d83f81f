//! Committed files of what is known of each instance, with which compiled programs are compared.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Write as _};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

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

    /// Writes what was found into the file, and keeps what else is known of names that exist on a chip.
    pub(crate) fn update<T>(&self, found: &Table<T>, exists: impl Fn(Chip, &str) -> bool)
    where
        T: Serialize + DeserializeOwned + Clone,
    {
        let mut table = self.read::<T>();
        for chip in Chip::CHECKED {
            let of_chip = table.entry(chip.arch()).or_default();
            of_chip.retain(|name, _| exists(chip, name));
            of_chip.extend(found.get(&chip.arch()).cloned().unwrap_or_default());
        }
        // A release need not know every chip.
        table.retain(|_, known| !known.is_empty());
        std::fs::write(self.path(), self.written(&table)).expect("the file is writable");
    }

    /// Compares what was found with the file, into which it is written first if that is asked for. Instances of programs that were not
    /// compiled are known from the file alone.
    pub(crate) fn compare<T>(&self, found: &Table<T>)
    where
        T: Serialize + DeserializeOwned + Clone + PartialEq + Debug,
    {
        // Several tests compare.
        static IN_USE: Mutex<()> = Mutex::new(());
        let in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        if is_rewritten() {
            let names = |chip: Chip| manifest::all(chip).into_iter().map(|instance| instance.name).collect();
            let existing: BTreeMap<_, BTreeSet<_>> = Chip::CHECKED.map(|chip| (chip.arch(), names(chip))).into();
            self.update(found, |chip, name| existing[&chip.arch()].contains(name));
        }
        let (file, none) = (self.read::<T>(), BTreeMap::new());
        drop(in_use);
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
