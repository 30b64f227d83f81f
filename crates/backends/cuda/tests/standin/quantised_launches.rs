//! Launches of a step with quantised weights, as they are predicted.

use std::collections::BTreeMap;

use octavo_backend_cuda::{ChipModel, CudaConfig, Dtype, Predictor};
use octavo_ops::testing::{PagedBatches, TestRng, TinyModel};
use octavo_ops::{HeadShape, StorageType};

use crate::config;

/// Returns the number of launches of each kernel in a step with so many new tokens of each sequence, of a model with one layer, whose
/// values have 6 bits and whose other weights have 4. `before` is the number of tokens that each sequence has computed before.
fn launches(counts: &[usize], before: usize) -> BTreeMap<String, usize> {
    launches_on("H200", Dtype::Bf16, counts, before)
}

/// The same on this chip, with activations of this type.
fn launches_on(chip: &str, dtype: Dtype, counts: &[usize], before: usize) -> BTreeMap<String, usize> {
    let heads = HeadShape::new(4, 1, 64);
    // An H200 needs this many columns to apply activations in products.
    let sizes = TinyModel { hidden: 256, inner: 8704, heads, layers: vec![0], ..TinyModel::default() };
    let (mut program, _) = TinyModel { storage: StorageType::Q4K, ..sizes }.build().expect("it is well formed");
    let qkv = program.weights.iter_mut().find(|weight| weight.name == "0.qkv").expect("the layer has it");
    qkv.parts.last_mut().expect("three parts").storage = StorageType::Q6K;
    let config = CudaConfig { dtype: Some(dtype), ..config() };
    let predictor = Predictor::new(&program, &config, ChipModel::find(chip).expect("it is known")).expect("kernels");
    let mut batches = PagedBatches::new(Predictor::BLOCK_SIZE, 1, 64, &mut TestRng(1));
    let sequences: Vec<_> = counts.iter().map(|count| (batches.add(vec![1; count + before]), *count)).collect();
    if before > 0 {
        batches.step(&sequences.iter().map(|(sequence, _)| (*sequence, before)).collect::<Vec<_>>());
    }
    let step = predictor.step(&batches.step(&sequences)).expect("a step");
    let mut launches = BTreeMap::new();
    for kernel in step.kernels.into_iter().filter(|kernel| kernel.launches > 0) {
        *launches.entry(kernel.name).or_default() += kernel.launches;
    }
    launches
}

/// Returns the number of launches of kernels whose names begin so.
fn count(launches: &BTreeMap<String, usize>, start: &str) -> usize {
    launches.iter().filter(|(name, _)| name.starts_with(start)).map(|(_, count)| count).sum()
}

#[test]
fn one_row_of_quantised_weights_takes_few_launches() {
    let found = launches(&[1], 5);
    let expected = [
        ("norm_codes_rms_bf16", 3),
        ("mmvq_pair_q4_k_and_q6_k_bf16_m1", 1),
        ("paged_decode_fused_bf16_d64_g8", 1),
        ("mmvq_glu_q4_k_bf16_m1", 1),
        // The rows of the head are gathered after their norm.
        ("quantize_activations_bf16", 1),
    ];
    for (name, count) in expected {
        assert_eq!(found.get(name), Some(&count), "{name}: {found:?}");
    }
    assert_eq!(count(&found, "glu") + count(&found, "qkv_post"), 0, "{found:?}");
}

#[test]
fn codes_are_written_by_ops_of_few_rows() {
    let of = |counts: &[usize], before| {
        let found = launches(counts, before);
        ["norm_codes", "glu_codes", "quantize_activations", "mmvq_glu", "norm_rms"].map(|start| count(&found, start))
    };
    // Two rows have an activation of their own, and decode attention rounds its output.
    assert_eq!(of(&[1, 1], 5), [3, 1, 1, 0, 1]);
    // Prefill attention does not.
    assert_eq!(of(&[1, 2], 5), [3, 1, 2, 0, 1]);
    assert_eq!(of(&[20], 0), [0, 0, 0, 0, 4]);
}

#[test]
fn a_v100_dequantises_no_weight_for_the_rows_of_a_batch() {
    let of = |tokens| {
        let found = launches_on("V100", Dtype::F16, &[tokens], 0);
        ["mmvq", "gemm_skinny_volta", "dequantize"].map(|start| count(&found, start))
    };
    // The rows of the embedding are dequantised in any case. The products of q and k, and of v, are one for few rows.
    assert_eq!(of(8), [6, 0, 1]);
    assert_eq!([of(9), of(64)], [[0, 7, 1]; 2]);
    // 64 rows at a time.
    assert_eq!(of(65), [0, 14, 1]);
    assert_eq!(of(257), [0, 0, 8]);
}
