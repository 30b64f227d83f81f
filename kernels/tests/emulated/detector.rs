//! Tests of the detector of races, with right kernels and those that lack one thing.

use octavo_kernels::emulation::{Emulation, Order};
use octavo_kernels::manifest::{self, Chips, Instance};
use octavo_kernels::params::{GatherRowsParams, Params};
use octavo_kernels::sources::Source;

/// Kernels with [`GatherRowsParams`], which use `out` and `input` as arrays of words.
const SOURCE: Source = Source { path: "detector.cu", text: include_str!("detector.cu") };

/// Kernels, each with its number of CTAs and what the reports of its defects must contain, from the first on.
const KERNELS: &[(&str, u32, &[&str])] = &[
    ("exchange", 1, &["of shared in shared memory: a store", "a load"]),
    ("exchange_in_warps", 1, &["a load", "a store", "a load", "a store"]),
    ("halves", 1, &["a store", "a load"]),
    ("count", 1, &["an atomic operation", "nothing orders them", "a load"]),
    ("copy", 1, &["waited for", "a cp.async", "waited for", "a cp.async", "a store"]),
    (
        "add_all",
        3,
        &["from the address in byte 0 of the parameters", "nothing", "nothing", "nothing", "nothing", "read-only path"],
    ),
    ("hand_over", 2, &["a load", "a volatile load", "a load", "a load"]),
];

/// Defects of a kernel that begins early, each with a part of its report.
const EARLY_DEFECTS: [&str; 6] = [
    "a load by thread",
    "a load by the read-only path",
    "a store by thread",
    "a load by thread",
    "a thread ends that has not waited",
    "a load by thread",
];

const EARLY: Source = Source { path: "early.cu", text: include_str!("early.cu") };

fn instance(source: Source, name: &str, defect: usize) -> Instance {
    Instance {
        source,
        name: format!("{name}_{defect}"),
        call: format!("{name}<{defect}>"),
        params: GatherRowsParams::NAME,
        params_bytes: size_of::<GatherRowsParams>(),
        threads: 64,
        dynamic_shared: 4096,
        chips: Chips::All,
        resident: 0,
        stages: None,
        stage_keys: None,
        formats: Vec::new(),
    }
}

#[test]
fn defects_are_reported_and_right_kernels_are_not() {
    let of = |&(name, _, defects): &(&'static str, u32, &[&str])| {
        (0..=defects.len()).map(move |i| instance(SOURCE, name, i))
    };
    let instances: Vec<_> = KERNELS.iter().flat_map(of).collect();
    let emulation = Emulation::finding_races(&instances, manifest::program).unwrap_or_else(|e| panic!("{e}"));
    for order in [Order::Forward, Order::Reverse, Order::Random(1), Order::Random(2)] {
        for &(name, ctas, defects) in KERNELS {
            let run = |defect: usize| {
                let (mut out, mut input) = (vec![0u32; 4096], vec![0u32; 4096]);
                let params = GatherRowsParams {
                    out: out.as_mut_ptr() as u64,
                    input: input.as_mut_ptr() as u64,
                    ..Default::default()
                };
                // SAFETY: the kernels of detector.cu stay within these arrays.
                unsafe { emulation.launch(order, &instance(SOURCE, name, defect), [ctas, 1, 1], 4096, &params) }
            };
            assert!(run(0).is_ok(), "{order:?}: {}", run(0).unwrap_err());
            for (i, &expected) in defects.iter().enumerate() {
                // The flag of the second CTA is seen only in this order.
                if name == "hand_over" && order != Order::Forward {
                    continue;
                }
                let defect = format!("{name}, defect {}, {order:?}", i + 1);
                let report = run(i + 1).expect_err(&defect).to_string();
                println!("{defect}: {report}");
                assert!(report.contains("race at"), "{defect}: {report}");
                assert!(report.contains(expected) || order != Order::Forward, "{defect}: {report}");
                assert!(report.contains("detector.cu:"), "{defect}: the report names the line: {report}");
            }
        }
    }
}

#[test]
fn what_is_done_before_the_launch_before_has_ended_is_reported() {
    let instances: Vec<_> = (0..=EARLY_DEFECTS.len()).map(|defect| instance(EARLY, "begin_early", defect)).collect();
    let emulation = Emulation::finding_races(&instances, manifest::program).unwrap_or_else(|e| panic!("{e}"));
    for order in [Order::Forward, Order::Reverse, Order::Random(1)] {
        let run = |instance: &Instance| {
            let (mut out, input) = (vec![0u32; 4096], vec![1u32; 4096]);
            let params =
                GatherRowsParams { out: out.as_mut_ptr() as u64, input: input.as_ptr() as u64, ..Default::default() };
            // SAFETY: the kernels of early.cu stay within these arrays.
            unsafe { emulation.launch(order, instance, [1; 3], 4096, &params) }
        };
        assert!(run(&instances[0]).is_ok(), "{order:?}: {}", run(&instances[0]).unwrap_err());
        for (instance, expected) in instances[1..].iter().zip(EARLY_DEFECTS) {
            let report = run(instance).expect_err(&instance.name).to_string();
            assert!(report.contains(expected) && report.contains("has not waited"), "{}: {report}", instance.name);
        }
    }
}
