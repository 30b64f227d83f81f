//! Checks that kernels which share their work among a fixed number of CTAs have no more CTAs than a device holds at
//! once: a CTA that waits for another to end costs a second wave, up to twice the time of the kernel. The registers and
//! the shared memory are those of the budget, so the check needs neither a compiler nor a GPU.

use octavo_kernels::manifest::{self, AttentionTypes, CacheType, Chip, Dtype, HEAD_SIZES, Instance, LATENT_SIZES};
use octavo_kernels::params::{AttentionParams, FILL_CTAS, FillParams, LATENT_ROWS, PagedDecodeParams};
use octavo_kernels::parts::SKINNY_OUTPUTS;
use octavo_kernels::plan::{DecodePlan, decode_columns, split_tokens};
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

/// Query heads that a CTA of decode attention processes, and CTAs that a multiprocessor holds.
#[derive(Clone, Copy)]
struct Tile {
    heads: u32,
    resident: u32,
}

/// Returns the grid of decode attention for sequences of these lengths.
fn decode_grid([q_heads, kv_heads]: [u32; 2], tile: Tile, lengths: &[u32], processors: u32) -> [u32; 3] {
    let params = PagedDecodeParams {
        attention: AttentionParams { q_heads, kv_heads, ..AttentionParams::default() },
        ..PagedDecodeParams::default()
    };
    let starts: Vec<u32> = (0..=lengths.len() as u32).collect();
    let splits = DecodePlan::write(&starts, lengths, split_tokens, &mut Vec::new()).splits;
    params.grid(tile.heads, decode_columns(params.rows(tile.heads), tile.resident, processors, splits))
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
                let instance =
                    manifest::paged_decode(types, head_size, group as usize).expect("there is such a kernel");
                let held = resident(&budget, chip, &instance);
                let heads = manifest::decode_head_tile(group as usize);
                let tile = Tile { heads, resident: manifest::decode_ctas(heads) };
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
            let Some(instance) = manifest::latent_decode(chip, dtype, sizes) else { continue };
            let held = resident(&budget, chip, &instance);
            let tile = Tile { heads: LATENT_ROWS, resident: manifest::latent_ctas(chip) };
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

/// By Little's law, bytes in flight are bandwidth times latency.
#[test]
fn weights_of_few_rows_are_asked_for_in_time() {
    const LATENCY: f64 = 700e-9;
    let budget = budget();
    for (chip, sheet) in
        [(Chip::SM_89, DataSheet::L40S), (Chip::SM_90, DataSheet::H100), (Chip::SM_90, DataSheet::H200)]
    {
        let needed = sheet.bandwidth * LATENCY / f64::from(sheet.processors);
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

/// Kernels whose CTAs stride over the first dimension of the grid are checked above.
#[test]
fn no_other_kernel_shares_work_among_a_fixed_number_of_blocks() {
    let strides = |text: &str| text.contains("gridDim.x");
    let found: Vec<_> = SOURCES.iter().copied().filter(|source| strides(source.text)).collect();
    assert_eq!(found, [sources::ATTENTION_DECODE, sources::ATTENTION_LATENT, sources::FILL]);
}
