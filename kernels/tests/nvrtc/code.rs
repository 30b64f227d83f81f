//! Machine code of compiled kernels.

use std::collections::BTreeMap;

/// A line of a disassembled kernel.
enum Line {
    Label(String),
    /// An instruction by its mnemonic, and the label that it jumps to.
    Instruction(String, Option<String>),
}

/// Returns the lines of each kernel of a disassembled cubin, in order.
fn lines(text: &str) -> BTreeMap<String, Vec<Line>> {
    let mut kernels: BTreeMap<String, Vec<Line>> = BTreeMap::new();
    let mut current = None;
    for line in text.lines() {
        if let Some((_, name)) = line.split_once(".section\t.text.") {
            current = Some(name.split(',').next().expect("a name").to_owned());
        }
        let Some(name) = &current else { continue };
        if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with('.')) {
            kernels.entry(name.clone()).or_default().push(Line::Label(label.to_owned()));
        }
        // The format is `/*0010*/ @!P0 LDG.E.128 R4, [R2.64] ;`.
        let Some((_, code)) = line.split_once("*/").filter(|(address, _)| address.trim_start().starts_with("/*"))
        else {
            continue;
        };
        if let Some(mnemonic) = code.split_whitespace().find(|word| !word.starts_with(['@', '{'])) {
            let target =
                code.split_once("`(").and_then(|(_, rest)| rest.split_once(')')).map(|(label, _)| label.into());
            let mnemonic = mnemonic.trim_end_matches(';').to_owned();
            kernels.entry(name.clone()).or_default().push(Line::Instruction(mnemonic, target));
        }
    }
    kernels
}

/// Returns the mnemonics of lines.
fn mnemonics(lines: &[Line]) -> Vec<String> {
    let mnemonic = |line: &Line| match line {
        Line::Label(_) => None,
        Line::Instruction(mnemonic, _) => Some(mnemonic.clone()),
    };
    lines.iter().filter_map(mnemonic).collect()
}

/// Returns the instructions of each kernel of a disassembled cubin, in order.
pub(crate) fn instructions(text: &str) -> BTreeMap<String, Vec<String>> {
    lines(text).into_iter().map(|(name, lines)| (name, mnemonics(&lines))).collect()
}

/// Returns the instructions of each loop of each kernel of a disassembled cubin: what lies between a label and a jump back to it.
pub(crate) fn loops(text: &str) -> BTreeMap<String, Vec<Vec<String>>> {
    let of_kernel = |lines: &[Line]| {
        let start = |target: &str| lines.iter().position(|line| matches!(line, Line::Label(label) if label == target));
        let body = |(at, line): (usize, &Line)| match line {
            Line::Instruction(mnemonic, Some(target)) if mnemonic.starts_with("BRA") => {
                start(target).filter(|start| *start < at).map(|start| mnemonics(&lines[start..=at]))
            }
            _ => None,
        };
        lines.iter().enumerate().filter_map(body).collect()
    };
    lines(text).into_iter().map(|(name, lines)| (name, of_kernel(&lines))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_is_read() {
        let text = "\t.section\t.text.first,\"ax\",@progbits\n        /*0000*/                   LDG.E.128 R4, [R2.64] ;\n\
                    .L_x_1:\n        /*0010*/              @!P0 HMMA.884.F32.F32.STEP0 R8, R2, R4, R8 ;\n\
                    \x20       /*0020*/              @P0 BRA `(.L_x_1) ;\n        /*0030*/                   EXIT ;\n\
                    \t.section\t.nv.info\n";
        let found = instructions(text);
        assert_eq!(found["first"], ["LDG.E.128", "HMMA.884.F32.F32.STEP0", "BRA", "EXIT"]);
        assert_eq!(loops(text)["first"], [["HMMA.884.F32.F32.STEP0", "BRA"]]);
    }
}
