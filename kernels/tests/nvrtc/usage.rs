//! Resource usage of a kernel, from the compiler's log and from its machine code.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Usage of one instance on one chip, as in the budget.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Usage {
    /// Number of registers of a thread.
    pub(crate) registers: u32,
    /// Static shared memory of a CTA in bytes, without the dynamic memory of a launch.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) shared: u32,
    /// Stack of a thread in bytes: arrays whose index is not known at compile time. The budget has none.
    #[serde(skip)]
    pub(crate) stack: u32,
    /// Spilled registers of a thread in bytes. The budget has none.
    #[serde(skip)]
    pub(crate) spills: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// Parses the usage of each kernel from the compiler's log (`--ptxas-options=-v`).
pub(crate) fn from_log(log: &str) -> BTreeMap<String, Usage> {
    let mut kernels = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().expect("a name").to_owned();
            kernels.insert(name.clone(), Usage::default());
            current = Some(name);
        }
        let Some(usage) = current.as_ref().and_then(|name| kernels.get_mut(name)) else { continue };
        if line.contains("bytes stack frame") {
            usage.stack = number_before(line, " bytes stack frame").unwrap_or(0);
            usage.spills = number_before(line, " bytes spill stores").unwrap_or(0);
        } else if let Some((_, used)) = line.split_once(" : Used ") {
            usage.registers = number_before(used, " registers").expect("registers");
            usage.shared = number_before(used, " bytes smem").unwrap_or(0);
            current = None;
        }
    }
    kernels
}

fn number_before(line: &str, word: &str) -> Option<u32> {
    let before = &line[..line.find(word)?];
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Returns the instructions of each kernel of a disassembled cubin, in order.
pub(crate) fn instructions(text: &str) -> BTreeMap<String, Vec<String>> {
    let mut kernels: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut current = None;
    for line in text.lines() {
        if let Some((_, name)) = line.split_once(".section\t.text.") {
            current = Some(name.split(',').next().expect("a name").to_owned());
        }
        let Some(name) = &current else { continue };
        // The format is `/*0010*/ @!P0 LDG.E.128 R4, [R2.64] ;`.
        let Some((_, code)) = line.split_once("*/").filter(|(address, _)| address.trim_start().starts_with("/*"))
        else {
            continue;
        };
        if let Some(mnemonic) = code.split_whitespace().find(|word| !word.starts_with(['@', '{'])) {
            kernels.entry(name.clone()).or_default().push(mnemonic.trim_end_matches(';').to_owned());
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_89'
ptxas info    : Function properties for first
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16896 bytes smem, 416 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_89'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, 416 bytes cmem[0]
";

    #[test]
    fn a_log_is_read() {
        let usage = from_log(LOG);
        assert_eq!(usage["first"], Usage { registers: 40, shared: 16896, stack: 16, spills: 8 });
        assert_eq!(usage["second"], Usage { registers: 12, ..Usage::default() });
        assert_eq!(usage.len(), 2);
    }

    #[test]
    fn machine_code_is_read() {
        let text = "\t.section\t.text.first,\"ax\",@progbits\n        /*0000*/                   LDG.E.128 R4, [R2.64] ;\n        \
                    /*0010*/              @!P0 HMMA.884.F32.F32.STEP0 R8, R2, R4, R8 ;\n\t.section\t.nv.info\n";
        let found = instructions(text);
        assert_eq!(found["first"], ["LDG.E.128", "HMMA.884.F32.F32.STEP0"]);
    }
}
