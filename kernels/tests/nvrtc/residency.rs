//! Checks that kernels which share their work among a fixed number of CTAs have no more CTAs than a device holds at
//! once: a CTA that waits for another to end costs a second wave, up to twice the time of the kernel. The registers and
//! the shared memory are those of the budget, so the check needs neither a compiler nor a GPU.

use octavo_kernels::manifest::{
    self, AttentionTypes, CacheType, Chip, DecodeKernel, Dtype, FUSED_ROWS, HEAD_SIZES, Instance, LATENT_SIZES,
};
use octavo_kernels::params::{
    AttentionParams, FILL_CTAS, FUSED_CTAS, FillParams, FusedLinearParams, KV_BLOCK, LinearParams, PagedDecodeParams,
};
use octavo_kernels::parts::SKINNY_OUTPUTS;
use octavo_kernels::plan::{DecodePlan, DecodeTile, split_tokens};
use octavo_kernels::quant::QuantFormat;
use octavo_kernels::sources::{self, SOURCES};
use octavo_kernels::usage::{Usage, occupancy};
use octavo_ops::datasheet::DataSheet;

use crate::{Budget, budget};

/// Numbers of multiprocessors of the GPUs with a chip: whole ones, small ones, and slices.
const PROCESSORS: [(Chip, &[u32]); 3] =
    [(Chip::SM_70, &[80, 72]), (Chip::SM_89, &[142, 128, 58]), (Chip::SM_90, &[132, 114, 78, 60, 16])];

/// Returns the number of CTAs that a multiprocessor of the chip holds at once, according to the budget.
fn resident(budget: &Budget, chip: Chip, instance: &Instance) -> u32 {
    let usage: &Usage = &budget[&chip.arch()][&instance.name];
    occupancy(chip, usage, instance.threads, instance.dynamic_shared).expect("the chip's limits are known")
}

/// Numbers and lengths of sequences.
const LOADS: [(usize, u32); 5] = [(1, 300), (1, 131_072), (32, 4096), (7, 5000), (256, 1024)];

/// Returns the grid of decode attention for sequences of these lengths.
fn decode_grid([q_heads, kv_heads]: [u32; 2], tile: DecodeTile, lengths: &[u32], processors: u32) -> [u32; 3] {
    let params = PagedDecodeParams {
        attention: AttentionParams { q_heads, kv_heads, ..AttentionParams::default() },
        ..PagedDecodeParams::default()
    };
    let starts: Vec<u32> = (0..=lengths.len() as u32).collect();
    let splits = DecodePlan::write(&starts, lengths, split_tokens, &mut Vec::new()).splits;
    tile.grid(&params, processors, splits)
}

#[test]
fn decode_attention_runs_in_one_wave() {
    let budget = budget();
    let mut checked = 0;
    for (chip, devices) in PROCESSORS {
        let dtypes = [Dtype::F16, Dtype::Bf16].into_iter().filter(|dtype| chip.has(*dtype));
        for types in dtypes.flat_map(|dtype| CacheType::ALL.map(|cache| AttentionTypes { dtype, cache })) {
            for (head_size, group, kv_heads) in HEAD_SIZES
                .iter()
                .flat_map(|&d| [1, 2, 3, 4, 7, 8, 12].map(|g| [1, 2, 4, 8, 16].map(|kv| (d, g, kv))))
                .flatten()
            {
                let kernel = manifest::paged_decode(chip, types, head_size, group as usize);
                let DecodeKernel { instance, tile } = kernel.expect("there is such a kernel");
                let held = resident(&budget, chip, &instance);
                for (&processors, lengths) in devices.iter().flat_map(|p| LOADS.map(|l| (p, l))) {
                    let lengths = vec![lengths.1; lengths.0];
                    let [x, y, z] = decode_grid([kv_heads * group, kv_heads], tile, &lengths, processors);
                    let context = format!("{} on {} of {processors}: grid {x} x {y}", instance.name, chip.arch());
                    // One column is the minimum: on a slice of a GPU some models have more heads than it holds CTAs.
                    assert!(x * y * z <= processors * held || x == 1, "{context}, {held} resident");
                    checked += usize::from(x > 1);
                }
            }
        }
    }
    assert!(checked > 1000, "{checked}");
}

#[test]
fn latent_attention_runs_in_one_wave() {
    let budget = budget();
    let mut checked = 0;
    for (chip, devices) in PROCESSORS {
        for (dtype, sizes) in [Dtype::F16, Dtype::Bf16].into_iter().flat_map(|d| LATENT_SIZES.map(|sizes| (d, sizes))) {
            let Some(DecodeKernel { instance, tile }) = manifest::latent_decode(chip, dtype, sizes) else { continue };
            let held = resident(&budget, chip, &instance);
            assert!(held >= tile.resident, "{} on {}: {held} resident", instance.name, chip.arch());
            for (&processors, lengths) in devices.iter().flat_map(|p| LOADS.map(|l| (p, l))) {
                for q_heads in [16, 20, 128] {
                    let [x, y, z] = decode_grid([q_heads, 1], tile, &vec![lengths.1; lengths.0], processors);
                    assert!(x * y * z <= processors * held || x == 1, "{}: grid {x} x {y}", instance.name);
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 100, "{checked}");
}

/// GPUs whose memory is kept busy.
const DEVICES: [(Chip, DataSheet); 3] =
    [(Chip::SM_89, DataSheet::L40S), (Chip::SM_90, DataSheet::H100), (Chip::SM_90, DataSheet::H200)];

/// Returns the number of bytes that each multiprocessor has in flight when the memory is busy: by Little's law, bandwidth times
/// latency.
fn needed_in_flight(sheet: &DataSheet) -> f64 {
    const LATENCY: f64 = 700e-9;
    sheet.bandwidth * LATENCY / f64::from(sheet.processors)
}

/// Sizes of an instance of decode attention on tensor cores, which are arguments of its template.
pub(crate) struct DecodeShape {
    /// Number of bytes of a key or of a value.
    pub(crate) row_bytes: usize,
    warps: usize,
    stages: usize,
}

impl DecodeShape {
    pub(crate) fn of(instance: &Instance) -> Self {
        let numbers: Vec<usize> = instance.call.split([',', '>']).filter_map(|part| part.trim().parse().ok()).collect();
        let [size, _, warps, stages] = numbers[..] else { panic!("{}: {}", instance.name, instance.call) };
        let bytes = if instance.name.ends_with("_e4m3") { 1 } else { 2 };
        Self { row_bytes: size * bytes, warps, stages }
    }
}

#[test]
fn keys_and_values_of_decode_are_asked_for_in_time() {
    let budget = budget();
    for (chip, sheet) in DEVICES {
        let needed = needed_in_flight(&sheet);
        let dtypes = [Dtype::F16, Dtype::Bf16];
        for types in dtypes.into_iter().flat_map(|dtype| CacheType::ALL.map(|cache| AttentionTypes { dtype, cache })) {
            for (head_size, group) in HEAD_SIZES.iter().flat_map(|&size| [8, 16].map(|group| (size, group))) {
                let kernel = manifest::paged_decode(chip, types, head_size, group).expect("there is such a kernel");
                let DecodeKernel { instance, tile } = kernel;
                let DecodeShape { row_bytes, warps, stages } = DecodeShape::of(&instance);
                // One stage is multiplied.
                let in_flight = tile.resident as usize * warps * (stages - 1) * 2 * KV_BLOCK * row_bytes;
                let context = format!("{} on {}: {in_flight} of {needed:.0} bytes", instance.name, sheet.name);
                println!("{context}");
                assert!(resident(&budget, chip, &instance) >= tile.resident, "{context}");
                // The time in which a CTA goes from one split to the next is without loads of its own.
                assert!(in_flight as f64 >= 1.6 * needed, "{context}");
            }
        }
    }
}

#[test]
fn weights_of_few_rows_are_asked_for_in_time() {
    let budget = budget();
    for (chip, sheet) in DEVICES {
        let needed = needed_in_flight(&sheet);
        for (dtype, rows) in [Dtype::F16, Dtype::Bf16].into_iter().flat_map(|d| manifest::SKINNY_TILES.map(|r| (d, r)))
        {
            let instance = manifest::gemm_skinny(dtype, dtype, rows);
            let held = resident(&budget, chip, &instance);
            // One stage is multiplied, and one is about to be copied. A stage has 64 bytes of each output.
            let in_flight = (manifest::SKINNY_STAGES as u32 - 2) * SKINNY_OUTPUTS * 64;
            let context = format!("{} on {}: {in_flight} of {needed:.0} bytes", instance.name, sheet.name);
            // There may be no more than one CTA for each multiprocessor.
            assert!(held >= 1 && f64::from(in_flight) >= needed, "{context}");
            // On a data centre's chip, one starts while another ends.
            assert!(chip != Chip::SM_90 || held >= 2, "{context}, {held} resident");
        }
    }
}

#[test]
fn quantised_weights_of_few_rows_are_asked_for_in_time() {
    let budget = budget();
    // The tensor cores take longer for 64 rows than the memory.
    for (rows, (chip, sheet)) in [8, 32].into_iter().flat_map(|rows| DEVICES.map(|device| (rows, device))) {
        let needed = needed_in_flight(&sheet);
        for (dtype, format) in
            [Dtype::F16, Dtype::Bf16].into_iter().flat_map(|dtype| QuantFormat::ALL.map(|format| (dtype, format)))
        {
            let instance = manifest::gemm_skinny_quant(chip, format, dtype, rows).instance;
            let held = resident(&budget, chip, &instance);
            let stage = format.bytes_of(u64::from(instance.threads * manifest::SKINNY_QUANT_INPUTS));
            // One stage is multiplied.
            let in_flight = (instance.stages.expect("stages") - 1) * stage as u32 * held;
            let context = format!("{} on {}: {in_flight} of {needed:.0} bytes", instance.name, sheet.name);
            println!("{context}, {held} resident");
            // Two of the largest stages fit. The instructions of fewer than four bits take longer than their memory.
            let is_short = format.block_bytes() * 8 < format.block_elements() * 4;
            assert!(is_short || f64::from(in_flight) >= 0.85 * needed, "{context}");
        }
    }
}

#[test]
fn made_up_weights_are_written_in_one_wave() {
    let budget = budget();
    for (chip, _) in PROCESSORS {
        for dtype in Dtype::ALL.into_iter().filter(|dtype| chip.has(*dtype)) {
            let instance = manifest::fill(dtype);
            assert!(resident(&budget, chip, &instance) >= FILL_CTAS, "{}", instance.name);
            let params = FillParams { count: u64::from(u32::MAX), ..FillParams::default() };
            assert_eq!(params.grid(instance.threads, 132), [132 * FILL_CTAS, 1, 1]);
        }
    }
}

#[test]
fn fused_products_run_in_one_wave() {
    let budget = budget();
    for (chip, devices) in PROCESSORS {
        for dtype in [Dtype::F16, Dtype::Bf16].into_iter().filter(|dtype| chip.has(*dtype)) {
            for (out, rows) in [dtype, Dtype::F32].into_iter().flat_map(|out| FUSED_ROWS.map(|rows| (out, rows))) {
                let instance = manifest::gemv_fused(dtype, out, rows);
                let held = resident(&budget, chip, &instance);
                assert!(held >= FUSED_CTAS, "{} on {}: {held} resident", instance.name, chip.arch());
                for (&processors, n) in devices.iter().flat_map(|p| [1, 6144, 24_576, 151_936].map(|n| (p, n))) {
                    let linear = LinearParams { n, ..LinearParams::default() };
                    let params = FusedLinearParams { linear, ..FusedLinearParams::default() };
                    let [ctas, ..] = params.grid(instance.threads, processors);
                    assert!(ctas > 0 && ctas <= processors * FUSED_CTAS, "{n} outputs: {ctas} CTAs");
                }
            }
        }
    }
}

/// Kernels whose CTAs stride over the first dimension of the grid are checked above.
#[test]
fn no_other_kernel_shares_work_among_a_fixed_number_of_blocks() {
    let strides = |text: &str| text.contains("gridDim.x");
    let found: Vec<_> = SOURCES.iter().copied().filter(|source| strides(source.text)).collect();
    let shared = [
        sources::ATTENTION_DECODE,
        sources::ATTENTION_DECODE_VOLTA,
        sources::ATTENTION_LATENT,
        sources::GEMV_FUSED,
        sources::FILL,
        // Their CTAs have a segment of a row each, of which there may be any number.
        sources::SAMPLING,
        sources::LOGPROBS,
    ];
    assert_eq!(found, shared);
}
