//! Machine code of compiled kernels.

use std::collections::BTreeMap;

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

    #[test]
    fn machine_code_is_read() {
        let text = "\t.section\t.text.first,\"ax\",@progbits\n        /*0000*/                   LDG.E.128 R4, [R2.64] ;\n        \
                    /*0010*/              @!P0 HMMA.884.F32.F32.STEP0 R8, R2, R4, R8 ;\n\t.section\t.nv.info\n";
        let found = instructions(text);
        assert_eq!(found["first"], ["LDG.E.128", "HMMA.884.F32.F32.STEP0"]);
    }
}
