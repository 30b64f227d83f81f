//! Extracts what the model of time needs to know of machine code, and compares it with `code.toml`.

use std::collections::BTreeMap;

use octavo_kernels::figures::Code;
use octavo_kernels::sources;

use crate::committed::{Committed, Table};
use crate::{code, programs};

const FIGURES: Committed = Committed {
    name: "code.toml",
    head: "# Figures of the machine code of each instance, as NVRTC 12.9 compiles it, from which `octavo bench roofline --predict` computes\n\
           # times. `tests/nvrtc` compares every instance with this file. OCTAVO_WRITE_BUDGET=1 writes it anew, as with budget.toml.\n\
           # instructions: of the whole kernel. main_loop: instructions of its longest innermost loop. loaded: bytes that a thread loads from\n\
           # global memory in an iteration of that loop.\n",
};

/// Returns the figures of all compiled programs; empty without a compiler or a disassembler.
fn found() -> Table<Code> {
    let mut found = Table::new();
    for program in programs() {
        let Some(text) = program.text() else { continue };
        let of_chip: &mut BTreeMap<_, _> = found.entry(program.chip.arch()).or_default();
        let is_fused = program.source == sources::GEMV_FUSED;
        let main_loops = if is_fused { code::loading_loops(text) } else { code::main_loops(text) };
        let all = code::instructions(text);
        // A tile of attention is copied in one of several ways, and few tiles need masks.
        let has_ways = [sources::ATTENTION_DECODE, sources::ATTENTION_PREFILL].contains(&program.source);
        let ways = if has_ways { code::ways(text) } else { BTreeMap::new() };
        for instance in &program.instances {
            let main = &main_loops[&instance.name];
            let figures = Code {
                instructions: all[&instance.name].len() as u32,
                main_loop: ways.get(&instance.name).map_or(main.len(), |way| *way) as u32,
                loaded: main.iter().map(|mnemonic| code::loaded_bytes(mnemonic)).sum(),
            };
            of_chip.insert(instance.name.clone(), figures);
        }
    }
    found
}

#[test]
pub(crate) fn the_figures_of_machine_code_are_those_of_the_file() {
    let found = found();
    if !found.is_empty() {
        FIGURES.compare(&found);
    }
}
