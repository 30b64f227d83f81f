//! What is known of the machine code of each instance without a compiler: the committed files `budget.toml` and `code.toml`, which
//! `tests/nvrtc` compares with what NVRTC compiles.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::manifest::Chip;
use crate::usage::Usage;

/// Figures of the machine code of an instance on one chip.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Code {
    /// Number of instructions of the kernel.
    pub instructions: u32,
    /// Number of instructions of its longest loop that has no other one in it; 0 without a loop.
    pub main_loop: u32,
    /// Number of bytes that a thread loads from global memory in an iteration of that loop.
    pub loaded: u32,
}

/// Figures by chip and name.
type Table<T> = BTreeMap<String, BTreeMap<String, T>>;

/// Reads a committed file. A file that is not well formed counts as empty; the tests read every line.
fn read<T: serde::de::DeserializeOwned>(text: &str) -> Table<T> {
    toml::from_str(text).unwrap_or_default()
}

/// Returns the resources and the code of an instance on a chip; `None` if the files do not have it.
pub fn of(chip: Chip, name: &str) -> Option<(Usage, Code)> {
    static FILES: OnceLock<(Table<Usage>, Table<Code>)> = OnceLock::new();
    let (budget, code) =
        FILES.get_or_init(|| (read(include_str!("../budget.toml")), read(include_str!("../code.toml"))));
    let arch = chip.arch();
    Some((budget.get(&arch)?.get(name)?.clone(), *code.get(&arch)?.get(name)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest;

    #[test]
    fn every_instance_has_figures() {
        for chip in Chip::CHECKED {
            for instance in manifest::all(chip) {
                let (usage, code) = of(chip, &instance.name).unwrap_or_else(|| panic!("{}", instance.name));
                assert!(usage.registers > 0 && code.instructions > code.main_loop, "{}: {code:?}", instance.name);
            }
        }
        assert_eq!(of(Chip { major: 99, minor: 0 }, "copy_blocks"), None);
    }
}
