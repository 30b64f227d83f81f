//! Extracts what the model of time needs to know of machine code, and compares it with `code.toml`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use octavo_kernels::figures::Code;
use octavo_kernels::manifest::Chip;
use octavo_kernels::sources;

use crate::{REWRITE, code, programs, tools};

/// Figures of each instance, by chip and name.
type Figures = BTreeMap<String, BTreeMap<String, Code>>;

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("code.toml")
}

/// Returns the figures of all compiled programs; empty without a compiler or a disassembler.
fn found() -> Figures {
    let mut found = Figures::new();
    for chip in Chip::CHECKED {
        let mut programs = programs().iter().filter(|program| program.chip == chip).peekable();
        if programs.peek().is_none() {
            continue;
        }
        let Some(nvdisasm) = tools::nvdisasm(chip) else { continue };
        let of_chip = found.entry(chip.arch()).or_default();
        for program in programs {
            let name = format!("{}-figures-{}", chip.arch(), program.source.path.replace('/', "-"));
            let text = tools::disassemble(&nvdisasm, &name, &program.compiled.code);
            let (all, main_loops) = (code::instructions(&text), code::main_loops(&text));
            // A tile of decode attention is copied in one of several ways.
            let ways = if program.source == sources::ATTENTION_DECODE { code::ways(&text) } else { BTreeMap::new() };
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
    }
    found
}

/// Formats the figures as committed: one line per instance.
fn written(figures: &Figures) -> String {
    let mut text = String::from(
        "# Figures of the machine code of each instance, as NVRTC 12.9 compiles it, from which `octavo bench roofline --predict` computes\n\
         # times. `tests/nvrtc` compares every instance with this file. OCTAVO_WRITE_BUDGET=1 writes it anew, as with budget.toml.\n\
         # instructions: of the whole kernel. main_loop: instructions of its longest innermost loop. loaded: bytes that a thread loads from\n\
         # global memory in an iteration of that loop.\n",
    );
    for (chip, instances) in figures {
        let _ = writeln!(text, "\n[{chip}]");
        for (name, figures) in instances {
            let line = toml::Value::try_from(figures).expect("numbers");
            let _ = writeln!(text, "{name} = {line}");
        }
    }
    text
}

#[test]
fn the_figures_of_machine_code_are_those_of_the_file() {
    let found = found();
    if found.is_empty() {
        return;
    }
    let complete = found.len() == Chip::CHECKED.len();
    if complete && std::env::var_os(REWRITE).is_some_and(|v| v == "1") {
        std::fs::write(file(), written(&found)).expect("the file is writable");
    }
    let text = std::fs::read_to_string(file()).expect("the figures");
    let known: Figures = toml::from_str(&text).expect("the figures are well formed");
    let mut differences = String::new();
    for (chip, instances) in &found {
        let known = known.get(chip).cloned().unwrap_or_default();
        for (name, figures) in instances.iter().filter(|(name, figures)| known.get(*name) != Some(figures)) {
            let _ = writeln!(differences, "{chip} {name}: {figures:?}, in the file {:?}", known.get(name));
        }
        for name in known.keys().filter(|name| !instances.contains_key(*name)) {
            let _ = writeln!(differences, "{chip} {name}: in the file, but no instance");
        }
    }
    assert!(differences.is_empty(), "if this is meant, {REWRITE}=1 writes code.toml anew:\n{differences}");
}
