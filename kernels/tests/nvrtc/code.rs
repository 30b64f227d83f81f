//! Machine code of compiled kernels.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::ops::RangeInclusive;

/// A line of a disassembled kernel.
enum Line {
    Label(String),
    /// An instruction by its mnemonic, the label that it names, and whether it depends on a condition.
    Instruction(String, Option<String>, bool),
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
            // A condition stands before the mnemonic or between it and the label.
            let operands = code.split_once(mnemonic).map_or("", |(_, rest)| rest.trim_start());
            let is_conditional = code.trim_start().starts_with('@') || !operands.starts_with(['`', ';']);
            let mnemonic = mnemonic.trim_end_matches(';').to_owned();
            kernels.entry(name.clone()).or_default().push(Line::Instruction(mnemonic, target, is_conditional));
        }
    }
    kernels
}

/// Returns the mnemonics of lines.
fn mnemonics(lines: &[Line]) -> Vec<String> {
    let mnemonic = |line: &Line| match line {
        Line::Label(_) => None,
        Line::Instruction(mnemonic, ..) => Some(mnemonic.clone()),
    };
    lines.iter().filter_map(mnemonic).collect()
}

/// Returns the instructions of each kernel of a disassembled cubin, in order.
pub(crate) fn instructions(text: &str) -> BTreeMap<String, Vec<String>> {
    lines(text).into_iter().map(|(name, lines)| (name, mnemonics(&lines))).collect()
}

/// Returns the loops of a kernel: what lies between a label and the last jump back to it.
fn ranges(lines: &[Line]) -> Vec<RangeInclusive<usize>> {
    let mut labels = BTreeMap::new();
    let mut ends = BTreeMap::new();
    for (at, line) in lines.iter().enumerate() {
        match line {
            Line::Label(label) => {
                labels.insert(label, at);
            }
            Line::Instruction(mnemonic, Some(target), _) if mnemonic.starts_with("BRA") => {
                // A label that is not known yet is further down.
                if let Some(&start) = labels.get(target) {
                    ends.insert(start, at);
                }
            }
            Line::Instruction(..) => {}
        }
    }
    ends.into_iter().map(|(start, end)| start..=end).collect()
}

/// Returns the instructions of the longest loop of each kernel that has no other one in it.
pub(crate) fn main_loops(text: &str) -> BTreeMap<String, Vec<String>> {
    innermost(text, |body| (0, body.len()))
}

/// Returns the instructions of the loop of each kernel that loads most bytes, of those that have no other one in it. Jumps back from
/// code that seldom runs make longer ones.
pub(crate) fn loading_loops(text: &str) -> BTreeMap<String, Vec<String>> {
    innermost(text, |body| (body.iter().map(|mnemonic| loaded_bytes(mnemonic)).sum(), body.len()))
}

/// Returns the instructions of the loop of each kernel that is first by a key, of those that have no other one in it.
fn innermost(text: &str, key: impl Fn(&[String]) -> (u32, usize)) -> BTreeMap<String, Vec<String>> {
    let of_kernel = |lines: &[Line]| {
        let all = ranges(lines);
        let contains = |outer: &RangeInclusive<usize>| {
            all.iter().any(|inner| inner != outer && outer.contains(inner.start()) && outer.contains(inner.end()))
        };
        let innermost = all.iter().filter(|range| !contains(range));
        innermost.map(|range| mnemonics(&lines[range.clone()])).max_by_key(|body| key(body)).unwrap_or_default()
    };
    lines(text).into_iter().map(|(name, lines)| (name, of_kernel(&lines))).collect()
}

/// Returns the number of bytes that a load from global memory gives a thread; 0 for other instructions.
pub(crate) fn loaded_bytes(mnemonic: &str) -> u32 {
    let mut parts = mnemonic.split('.');
    if !matches!(parts.next(), Some("LDG" | "LDGSTS")) {
        return 0;
    }
    let width = |part: &str| match part {
        "128" => Some(16),
        "64" => Some(8),
        "U16" | "S16" => Some(2),
        "U8" | "S8" => Some(1),
        _ => None,
    };
    parts.find_map(width).unwrap_or(4)
}

/// Returns the number of instructions on the shortest way around the loop of each kernel that copies and then multiplies:
/// through one copy and all products. A warp seldom goes the others.
pub(crate) fn ways(text: &str) -> BTreeMap<String, usize> {
    lines(text).into_iter().filter_map(|(name, lines)| Some((name, way(&lines)?))).collect()
}

fn way(lines: &[Line]) -> Option<usize> {
    let is =
        |at: usize, start: &str| matches!(&lines[at], Line::Instruction(mnemonic, ..) if mnemonic.starts_with(start));
    let both =
        |body: &RangeInclusive<usize>| ["LDGSTS", "HMMA"].iter().all(|start| body.clone().any(|at| is(at, start)));
    let body = ranges(lines).into_iter().filter(both).min_by_key(|body| body.end() - body.start())?;
    let products: Vec<usize> = body.clone().filter(|&at| is(at, "HMMA")).collect();
    let graph = Graph::new(lines);
    let through = |copy| Some(graph.distance(*body.start(), copy)? + graph.distance(copy, products[0])?);
    let first = (*body.start()..products[0]).filter(|&at| is(at, "LDGSTS")).filter_map(through).min()?;
    let rest: Option<usize> = products.windows(2).map(|pair| graph.distance(pair[0], pair[1])).sum();
    Some(first + rest? + graph.distance(*products.last()?, *body.end())?)
}

/// The ways from line to line.
struct Graph<'a> {
    lines: &'a [Line],
    labels: HashMap<&'a str, usize>,
}

impl<'a> Graph<'a> {
    fn new(lines: &'a [Line]) -> Self {
        let label = |(at, line): (usize, &'a Line)| match line {
            Line::Label(label) => Some((label.as_str(), at)),
            Line::Instruction(..) => None,
        };
        Self { lines, labels: lines.iter().enumerate().filter_map(label).collect() }
    }

    /// Returns the lines that may follow a line.
    fn next(&self, at: usize) -> Vec<usize> {
        let (jump, goes_on) = match &self.lines[at] {
            Line::Instruction(mnemonic, Some(label), is_conditional) if mnemonic.starts_with("BRA") => {
                (self.labels.get(label.as_str()).copied(), *is_conditional)
            }
            Line::Instruction(mnemonic, _, is_conditional) if mnemonic == "EXIT" || mnemonic.starts_with("RET") => {
                (None, *is_conditional)
            }
            _ => (None, true),
        };
        let following = Some(at + 1).filter(|next| goes_on && *next < self.lines.len());
        jump.into_iter().chain(following).collect()
    }

    /// Returns the least number of instructions after line `from` up to line `to`.
    fn distance(&self, from: usize, to: usize) -> Option<usize> {
        let (mut known, mut heap) = (HashMap::from([(from, 0)]), BinaryHeap::from([(Reverse(0), from)]));
        while let Some((Reverse(steps), at)) = heap.pop() {
            if at == to && at != from {
                return Some(steps);
            }
            for next in self.next(at) {
                let steps = steps + usize::from(matches!(self.lines[next], Line::Instruction(..)));
                if known.get(&next).is_none_or(|least| steps < *least) {
                    known.insert(next, steps);
                    heap.push((Reverse(steps), next));
                }
            }
        }
        None
    }
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
        assert_eq!(main_loops(text)["first"], ["HMMA.884.F32.F32.STEP0", "BRA"]);
    }

    #[test]
    fn the_main_loop_has_no_other_one_in_it() {
        let text = "\t.section\t.text.nested,\"ax\",@progbits\n.L_x_1:\n        /*0010*/  LDS R1, [R2] ;\n.L_x_2:\n\
                    \x20       /*0020*/  LDG.E.64 R4, [R2] ;\n        /*0030*/  FADD R1, R1, R2 ;\n\
                    \x20       /*0040*/  @P0 BRA `(.L_x_2) ;\n        /*0050*/  @P0 BRA `(.L_x_2) ;\n\
                    \x20       /*0060*/  @P1 BRA `(.L_x_1) ;\n        /*0070*/  EXIT ;\n";
        assert_eq!(main_loops(text)["nested"], ["LDG.E.64", "FADD", "BRA", "BRA"]);
    }

    #[test]
    fn the_loading_loop_loads_most_bytes() {
        let text = "\t.section\t.text.both,\"ax\",@progbits\n.L_x_1:\n        /*0010*/  LDG.E.128 R4, [R2] ;\n\
                    \x20       /*0020*/  @P0 BRA `(.L_x_1) ;\n.L_x_2:\n        /*0030*/  LDG.E R4, [R2] ;\n\
                    \x20       /*0040*/  FADD R1, R1, R2 ;\n        /*0050*/  @P0 BRA `(.L_x_2) ;\n        /*0060*/  EXIT ;\n";
        assert_eq!(main_loops(text)["both"], ["LDG.E", "FADD", "BRA"]);
        assert_eq!(loading_loops(text)["both"], ["LDG.E.128", "BRA"]);
    }

    #[test]
    fn loads_have_the_width_of_their_name() {
        let names = ["LDG.E.128.CONSTANT", "LDGSTS.E.BYPASS.LTC128B.128", "LDG.E.U16", "LDG.E", "LDG.E.64", "LDS.128"];
        assert_eq!(names.map(loaded_bytes), [16, 16, 2, 4, 8, 0]);
    }

    #[test]
    fn the_way_around_a_loop_leaves_out_what_is_seldom() {
        let line = |code: &str| format!("        /*0010*/                   {code} ;\n");
        let lines = |codes: &[&str]| -> String {
            let each = |code: &&str| if code.starts_with('.') { format!("{code}:\n") } else { line(code) };
            codes.iter().map(each).collect()
        };
        let text = [
            "\t.section\t.text.first,\"ax\",@progbits\n".to_owned(),
            lines(&["MOV R1, R2", ".L_0", "BRA P1, `(.L_1)", "IADD3 R1, R2, R3", "LDGSTS.E [R1], [R2]"]),
            lines(&["BRA `(.L_2)", ".L_1", "LDGSTS.E [R1], [R2]", ".L_2", "HMMA.16816.F32 R1, R2, R3"]),
            lines(&["@P2 BRA `(.L_3)", "FMUL R1, R2, R3", "FMUL R1, R2, R3", ".L_3", "@!P0 BRA `(.L_0)", "EXIT"]),
        ];
        // The jump to the shorter copy, that copy, the product, the jump past the products by hand, and the jump back.
        assert_eq!(ways(&text.concat())["first"], 5);
    }
}
