//! Plausibility of predictions, and the committed shares of the bound that no change may lower.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use super::*;

/// Shares of the bound in percent, by kernel; `step` is the whole step.
type Shares = BTreeMap<String, f64>;

/// Shares by chip and case.
type Table = BTreeMap<String, BTreeMap<String, Shares>>;

/// Fall that fails the test, as a part of the share.
const FALL: f64 = 0.02;

/// Environment variable: with 1, the file is written anew, as the budget of the kernels is.
const REWRITE: &str = "OCTAVO_WRITE_BUDGET";

fn sizes() -> RooflineConfig {
    RooflineConfig {
        batch_sizes: vec![1, 32, 128],
        contexts: vec![1024],
        prefill: vec![2048, 8192],
        max_num_batched_tokens: 8192,
        block_size: Predictor::BLOCK_SIZE,
        min_time: Duration::ZERO,
    }
}

fn cuda() -> CudaConfig {
    CudaConfig {
        max_num_batched_tokens: 8192,
        max_num_seqs: 128,
        max_rows: 256,
        max_model_len: 8192,
        graphs: true,
        ..kernels::config(crate::cli::Dtype::Auto).unwrap()
    }
}

fn qwen3_8b() -> Program {
    build_programs(&open_config(QWEN3_8B).unwrap()).unwrap().decoder
}

/// The predictions of each chip: of 16-bit weights, and of decode with those of Q4_K_M.
fn predicted(chip: ChipModel) -> Vec<(String, StepPrediction)> {
    let (mut program, mut config) = (qwen3_8b(), sizes());
    let of = |program: &Program, config: &RooflineConfig| {
        predictions(&Predictor::new(program, &cuda(), chip).unwrap(), program, config).unwrap()
    };
    let mut found: Vec<_> =
        of(&program, &config).into_iter().map(|(step, time)| (format!("{}, 16 bits", step.name()), time)).collect();
    store_as_q4_k_m(&mut program);
    (config.batch_sizes, config.prefill) = (vec![1, 8, 32, 64], vec![]);
    found.extend(of(&program, &config).into_iter().map(|(step, time)| (format!("{}, q4_k_m", step.name()), time)));
    found
}

fn shares(prediction: &StepPrediction) -> Shares {
    let percent = |bound: f64, seconds: f64| (1000.0 * bound / seconds).round() / 10.0;
    // The bound of a kernel that reads neither weights nor keys is next to nothing; the whole step has its time.
    let bound = prediction.kernels.iter().filter(|kernel| kernel.bound > 0.02 * kernel.seconds);
    let named = bound.map(|kernel| {
        let name = [kernel.name.as_str(), kernel.what.as_str()].join(" ");
        (name.trim_end().to_owned(), percent(kernel.bound, kernel.seconds))
    });
    named.chain([("step".to_owned(), percent(prediction.bound, prediction.seconds))]).collect()
}

fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../benches/predicted.toml")
}

fn written(table: &Table) -> String {
    let mut text = String::from(
        "# Predicted shares of the bound in percent, of Qwen3-8B's steps and of their kernels (`octavo bench roofline --predict`). A test fails\n\
         # if one falls by more than 2 %. After an intended change, run OCTAVO_WRITE_BUDGET=1 cargo test -p octavo predicted and review\n\
         # the difference.\n",
    );
    for (chip, cases) in table {
        for (case, shares) in cases {
            let _ = writeln!(text, "\n[{chip}.\"{case}\"]");
            for (kernel, share) in shares {
                let _ = writeln!(text, "\"{kernel}\" = {share:?}");
            }
        }
    }
    text
}

#[test]
fn no_predicted_share_falls() {
    let of_chip = |chip: ChipModel| {
        let cases = predicted(chip).iter().map(|(case, time)| (case.clone(), shares(time))).collect();
        (chip.name.to_owned(), cases)
    };
    let found: Table = ChipModel::ALL.into_iter().map(of_chip).collect();
    if std::env::var_os(REWRITE).is_some_and(|v| v == "1") {
        std::fs::write(file(), written(&found)).unwrap();
    }
    let known: Table = toml::from_str(&std::fs::read_to_string(file()).unwrap()).unwrap();
    let mut falls = String::new();
    for (chip, cases) in &found {
        for (case, shares) in cases {
            for (kernel, share) in shares {
                let before = known.get(chip).and_then(|cases| cases.get(case)?.get(kernel));
                if before.is_none_or(|before| *share < before * (1.0 - FALL)) {
                    let _ = writeln!(falls, "{chip}, {case}, {kernel}: {share} %, in the file {before:?}");
                }
            }
        }
    }
    assert!(falls.is_empty(), "if this is meant, {REWRITE}=1 writes the file anew:\n{falls}");
}

#[test]
fn predictions_are_plausible() {
    for chip in ChipModel::ALL {
        for (case, prediction) in predicted(chip) {
            let StepPrediction { seconds, bound, kernels, launches } = &prediction;
            let share = bound / seconds;
            // V100 dequantises the weights of a batch before their product, which reads them again.
            let is_dequantised = chip.name == "V100"
                && ["decode 32 x 1024, q4_k_m", "decode 64 x 1024, q4_k_m"].contains(&case.as_str());
            let (least, most) = if is_dequantised { (0.15, 1.5) } else { (0.2, 1.2) };
            assert!((least..0.95).contains(&share), "{case} on {}: {share}", chip.name);
            assert_eq!(*launches, kernels.iter().map(|kernel| kernel.launches).sum::<usize>(), "{case}");
            // The bound of a step overlaps what its kernels do one after the other.
            let of_kernels: f64 = kernels.iter().map(|kernel| kernel.bound).sum();
            assert!(of_kernels > 0.98 * bound && of_kernels < most * bound, "{case}: {of_kernels} and {bound}");
            let lost: f64 = Cause::ALL.map(|cause| prediction.lost(cause)).iter().sum();
            assert!((of_kernels + lost - seconds).abs() < 1e-9, "{case}: {lost}");
            for kernel in kernels {
                let lost: f64 = kernel.losses.iter().map(|loss| loss.1).sum();
                assert!((kernel.bound + lost - kernel.seconds).abs() < 1e-9, "{case}: {kernel:?}");
            }
        }
    }
}

#[test]
fn a_faster_memory_makes_decode_faster_and_a_larger_batch_slower() {
    let [h200, h100] = ["H200", "H100"].map(|name| predicted(ChipModel::find(name).unwrap()));
    for ((case, fast), (_, slow)) in h200.iter().zip(&h100).filter(|((case, _), _)| case.starts_with("decode")) {
        assert!(fast.seconds < slow.seconds, "{case}");
    }
    let seconds: Vec<_> = h200.iter().map(|(_, time)| time.seconds).collect();
    assert!(seconds[0] < seconds[1] && seconds[1] < seconds[2], "{seconds:?}");
    assert!(h200[5].1.seconds < h200[0].1.seconds, "4 bits are fewer than 16");
}

#[test]
fn q4_k_m_has_its_size() {
    let mut program = qwen3_8b();
    store_as_q4_k_m(&mut program);
    let bytes: u64 = program.weights.iter().map(octavo_ops::Weight::bytes).sum();
    // The file of Qwen3-8B in Q4_K_M has 5.03 GB.
    assert!((4.9e9..5.15e9).contains(&(bytes as f64)), "{bytes}");
}

#[test]
fn a_report_says_that_it_is_a_prediction() {
    assert!(caveat(&[]).contains("not measurements; no measurement has corrected them yet"));
    assert!(caveat(&["one", "two"]).ends_with("corrected by one, two."));
    let chip = ChipModel::find("h200").unwrap();
    let program = qwen3_8b();
    let config = RooflineConfig { batch_sizes: vec![1], prefill: vec![4096], ..sizes() };
    let steps = predictions(&Predictor::new(&program, &cuda(), chip).unwrap(), &program, &config).unwrap();
    let report = PredictionReport { model: "m".into(), chip, steps };
    let text = report.to_string();
    assert!(text.starts_with("m on H200, predicted\nThese times are predictions"), "{text}");
    let has = |words: [&str; 3]| text.lines().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(
        has(["decode 1 x 1024", "3.185", " %"]) && has(["gemv_fused_bf16_m1 24576x4096", "memory", "4."]),
        "{text}"
    );
    assert!(text.ends_with("Products of cuBLASLt take an assumed share of the limits.\n"), "{text}");
    let json = report.to_json();
    assert_eq!((&json["predicted"], &json["steps"][1]["tokens"]), (&true.into(), &4096.into()));
    let kernels = json["steps"][0]["kernels"].as_array().unwrap();
    assert!(kernels.iter().any(|kernel| kernel["losses_seconds"]["gap"].as_f64() > Some(0.0)), "{kernels:?}");
}
