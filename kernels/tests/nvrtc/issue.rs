//! Counts the instructions of kernels that read weights or the cache once: they are as fast as the memory only if their
//! instructions are issued in less time than the bytes arrive.

use octavo_kernels::manifest::{self, Chip, Dtype, Instance};
use octavo_kernels::params::KV_BLOCK;
use octavo_kernels::quant::QuantFormat;
use octavo_kernels::sources;
use octavo_ops::datasheet::DataSheet;

use crate::residency::DecodeShape;
use crate::{code, programs};

/// GPUs, and their clocks in GHz under load.
const DEVICES: [(Chip, DataSheet, f64); 3] =
    [(Chip::SM_89, DataSheet::L40S, 2.52), (Chip::SM_90, DataSheet::H100, 1.98), (Chip::SM_90, DataSheet::H200, 1.98)];

/// Returns the number of instructions that a multiprocessor can issue in the time in which it reads 1 KiB at its share of the
/// bandwidth: 4 in each cycle.
fn slots(sheet: &DataSheet, ghz: f64) -> f64 {
    4.0 * 1024.0 * ghz * 1e9 * f64::from(sheet.processors) / sheet.bandwidth
}

/// Returns the number of rows of an instance.
fn rows_of(instance: &Instance) -> u32 {
    instance.name.rsplit_once("_m").expect("a number of rows").1.parse().expect("a number")
}

/// Returns the number of KiB of the weight that a warp multiplies in an iteration.
fn kib_of_iteration(instance: &Instance) -> f64 {
    if let [format] = instance.formats[..] {
        return format.bytes_of(32 * u64::from(manifest::SKINNY_QUANT_INPUTS)) as f64 / 1024.0;
    }
    // A thread of a GEMV multiplies two outputs by so many pieces of 16 bytes; one of a skinny product copies 64 bytes.
    match instance.source != sources::GEMM_SKINNY {
        true if rows_of(instance) <= 4 => 4.0,
        _ => 2.0,
    }
}

/// Returns the instances of the kernels for few rows of 16-bit types on a chip, with the instructions of a warp for 1 KiB of the weight.
fn counted(chip: Chip) -> Vec<(Instance, f64)> {
    let few = [sources::GEMV, sources::GEMV_FUSED, sources::GEMM_SKINNY, sources::GEMM_SKINNY_QUANT];
    let programs = programs().iter().filter(|program| program.chip == chip && few.contains(&program.source));
    let of_program = |program: &crate::Program| {
        let Some(text) = program.text() else { return Vec::new() };
        let loops = code::loading_loops(text);
        let narrow = program.instances.iter().filter(|instance| !instance.name.starts_with("gemv_f32"));
        let of_instance = |instance: &Instance| {
            let main_loop = &loops[&instance.name];
            assert!(!main_loop.is_empty(), "{}: a loop over the inputs", instance.name);
            (instance.clone(), main_loop.len() as f64 / kib_of_iteration(instance))
        };
        narrow.map(of_instance).collect::<Vec<_>>()
    };
    programs.flat_map(of_program).collect()
}

#[test]
pub(crate) fn machine_code_of_few_rows_leaves_time_to_the_memory() {
    for (chip, sheet, ghz) in DEVICES {
        let slots = slots(&sheet, ghz);
        for (instance, found) in counted(chip) {
            let (rows, share) = (rows_of(&instance), found / slots);
            let context = format!("{} on {}: {found} of {slots:.0} instructions", instance.name, sheet.name);
            println!("{context}, {:.0} %", 100.0 * share);
            if instance.source == sources::GEMM_SKINNY {
                assert!(share < 0.5, "{context}");
            } else if let [format] = instance.formats[..] {
                // A KiB of few bits has many weights, and numbers of lists are looked up by several instructions. For many rows, the
                // tensor cores take longer than the memory.
                let is_long = rows > 8 || format.is_listed() || [QuantFormat::Q2K, QuantFormat::Q3K].contains(&format);
                assert!(is_long || share < 0.9, "{context}");
            } else if rows <= manifest::gemv_cutoff(chip, Dtype::F16) {
                assert!(share < 0.75, "{context}");
            } else {
                assert!(share > 0.75, "{context}, and yet it is not used");
            }
        }
    }
}

/// Returns the instances of decode attention on a chip, with the instructions of a warp for 1 KiB of keys and values.
fn counted_decode(chip: Chip) -> Vec<(Instance, f64)> {
    let is_decode = |program: &&crate::Program| program.chip == chip && program.source == sources::ATTENTION_DECODE;
    let of_program = |program: &crate::Program| {
        let Some(text) = program.text() else { return Vec::new() };
        let ways = code::ways(text);
        let of_instance = |instance: &Instance| {
            let shape = DecodeShape::of(instance);
            let kib = (2 * KV_BLOCK * shape.row_bytes) as f64 / 1024.0;
            (instance.clone(), ways[&instance.name] as f64 / kib)
        };
        program.instances.iter().map(of_instance).collect::<Vec<_>>()
    };
    programs().iter().filter(is_decode).flat_map(of_program).collect()
}

#[test]
pub(crate) fn machine_code_of_decode_attention_leaves_time_to_the_memory() {
    for (chip, sheet, ghz) in DEVICES {
        let slots = slots(&sheet, ghz);
        for (instance, found) in counted_decode(chip) {
            let share = found / slots;
            let context = format!("{} on {}: {found:.0} of {slots:.0} instructions", instance.name, sheet.name);
            println!("{context}, {:.0} %", 100.0 * share);
            // A tile of small rows in e4m3 has as many instructions as one of four times the bytes.
            let is_small = DecodeShape::of(&instance).row_bytes < 128;
            assert!(share < if is_small { 0.75 } else { 0.5 }, "{context}");
        }
    }
}

/// FLOPs of the tensor cores of a multiprocessor in a cycle, and the share of them that instructions of a warp reach: 62.9 % on
/// Hopper (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture").
const TENSOR: [(Chip, f64, f64); 2] = [(Chip::SM_89, 1024.0, 1.0), (Chip::SM_90, 4096.0, 0.629)];

/// Queries and keys to which instructions of prefill attention are related: a fragment, and a tile.
const FRAGMENT: [usize; 2] = [16, 64];

/// Returns the instances of prefill attention on a chip, with the size of a head and the instructions of a warp for [`FRAGMENT`].
fn counted_prefill(chip: Chip) -> Vec<(Instance, usize, f64)> {
    let is_prefill = |program: &&crate::Program| program.chip == chip && program.source == sources::ATTENTION_PREFILL;
    let of_program = |program: &crate::Program| {
        let Some(text) = program.text() else { return Vec::new() };
        let ways = code::ways(text);
        let of_instance = |instance: &Instance| {
            let arguments = instance.call.split([',', '>']).filter_map(|argument| argument.trim().parse().ok());
            let [size, _, fragments, keys] = arguments.collect::<Vec<usize>>()[..] else { panic!("{}", instance.call) };
            let found = ways[&instance.name] as f64 / fragments as f64 * FRAGMENT[1] as f64 / keys as f64;
            (instance.clone(), size, found)
        };
        program.instances.iter().map(of_instance).collect::<Vec<_>>()
    };
    programs().iter().filter(is_prefill).flat_map(of_program).collect()
}

#[test]
pub(crate) fn machine_code_of_prefill_attention_leaves_time_to_the_tensor_cores() {
    for (chip, flops, share) in TENSOR {
        for (instance, size, found) in counted_prefill(chip) {
            let products = 4 * FRAGMENT[0] * FRAGMENT[1] * size;
            let slots = 4.0 * products as f64 / (flops * share);
            let context = format!("{} on {}: {found:.0} of {slots:.0} instructions", instance.name, chip.arch());
            println!("{context}, {:.0} %", 100.0 * found / slots);
            // The softmax takes as many instructions for small heads as for large ones, and codes are widened.
            let most = match size {
                _ if instance.name.ends_with("_e4m3") => 1.2,
                ..128 => 0.8,
                _ => 0.55,
            };
            assert!(found / slots < most, "{context}");
        }
    }
}
