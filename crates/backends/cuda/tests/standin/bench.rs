//! Tests of the kernel benches: their selection, and that every kernel runs. Times on an emulation have no meaning.

use std::collections::BTreeSet;
use std::time::Duration;

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, L40S, SMALL, V100};
use octavo_backend_cuda::{CeilingsBench, CudaConfig, Dtype, ExpertSizes, KernelBench, KernelTime, Unmeasured};
use octavo_ops::HeadShape;

use crate::common::open;
use crate::config;

fn sizes(filter: Option<&str>) -> KernelBench {
    KernelBench {
        hidden: 64,
        inner: 256,
        experts: Some(ExpertSizes { count: 8, chosen: 2, inner: 32 }),
        heads: HeadShape::new(4, 2, 64),
        layers: 2,
        vocab_size: 101,
        batch_sizes: vec![1, 2],
        contexts: vec![300],
        prefill: vec![70],
        filter: filter.map(str::to_owned),
        min_time: Duration::ZERO,
    }
}

/// Returns the times on a device without known limits.
fn times(device: usize, dtype: Dtype, filter: Option<&str>) -> Vec<KernelTime> {
    times_of(device, dtype, &sizes(filter))
}

fn times_of(device: usize, dtype: Dtype, bench: &KernelBench) -> Vec<KernelTime> {
    let backend = open(CudaConfig { device, dtype: Some(dtype), ..config() });
    assert_eq!(backend.stated_peaks(), None);
    let bencher = backend.kernel_bencher(bench).expect("every kernel is compiled");
    let measured = |(number, (kernel, what)): (usize, (&str, &str))| {
        let time = bencher.measure(number).expect("every kernel runs");
        assert_eq!((time.kernel.as_str(), time.what.as_str()), (kernel, what));
        time
    };
    bencher.cases().enumerate().map(measured).collect()
}

/// Returns the names of kernels without the suffixes of their instances.
fn families(times: &[KernelTime]) -> BTreeSet<&str> {
    times.iter().map(|time| time.kernel.split('_').next().unwrap_or_default()).collect()
}

#[test]
fn products_in_fp8_are_measured_where_it_is_multiplied() {
    for (device, own) in [(L40S, true), (H200, false), (V100, false)] {
        let dtype = if device == V100 { Dtype::F16 } else { Dtype::Bf16 };
        let times = ["f8_bf16", "f8_groups", "in FP8"].map(|filter| times(device, dtype, Some(filter))).concat();
        let has = |name: &str, what: &str| times.iter().any(|time| time.kernel == name && time.what.contains(what));
        let (rounded, by_library) = (device != V100, device == H200);
        assert_eq!([has("gemm_f8_bf16", ""), has("quantize_f8_bf16", "")], [own, rounded]);
        for (name, what) in [
            ("quantize_f8_groups_bf16", ""),
            ("scale_f8_bf16", ""),
            ("cublasLt", "with scales of rows"),
            ("cublasLt", "with scales of blocks"),
            ("cublasLt", "without scales"),
        ] {
            assert_eq!(has(name, what), by_library, "{name} {what}");
        }
        assert!(times.iter().all(|time| time.seconds.as_ref().is_ok_and(|seconds| *seconds > 0.0)), "{times:?}");
    }
}

#[test]
fn every_family_of_kernels_is_measured_on_every_chip() {
    for (device, dtype) in [(H200, Dtype::Bf16), (V100, Dtype::F16), (H200, Dtype::F32)] {
        let times = times(device, dtype, None);
        for time in &times {
            assert!(time.seconds.as_ref().is_ok_and(|seconds| *seconds > 0.0) && time.copies >= 2, "{time:?}");
            assert!(time.bytes > 0, "{time:?}");
        }
        let found = families(&times);
        let expected = [
            "copy",
            "dequantize",
            "embed",
            "expert",
            "gather",
            "gemm",
            "gemv",
            "glu",
            "lora",
            "mmvq",
            "norm",
            "paged",
            "qkv",
            "quantize",
            "sampling",
        ];
        assert!(expected.iter().all(|family| found.contains(family)), "{found:?}");
        let named = |name: &str| times.iter().any(|time| time.kernel.starts_with(name));
        // Kernels with tensor cores are used if there are any, and cuBLASLt beside our own.
        assert_eq!(named("paged_decode") && named("paged_prefill"), dtype != Dtype::F32);
        assert_eq!(named("paged_prefill_volta") && named("gemm_volta"), device == V100);
        assert_eq!([named("cublasLt"), named("gemv_fused")], [dtype != Dtype::F32; 2]);
        // 70 rows are 17.5 pairs of each expert.
        assert_eq!(
            [named("expert_mma_bf16_small"), named("expert_volta_f16_small")],
            [dtype == Dtype::Bf16, device == V100]
        );
    }
}

#[test]
fn quantised_weights_of_a_batch_are_measured_where_kernels_read_them_once() {
    for (device, dtype, of_20, of_40) in [
        (H200, Dtype::Bf16, "gemm_skinny_quant_q4_k_bf16_m32", "gemm_skinny_quant_q4_k_bf16_m64"),
        // Two tiles share 40 rows.
        (V100, Dtype::F16, "gemm_skinny_volta_q4_k_m32", "gemm_skinny_volta_q4_k_m32"),
    ] {
        let bench = KernelBench { hidden: 256, batch_sizes: vec![20, 40, 80], ..sizes(Some("gemm_skinny")) };
        let times = times_of(device, dtype, &bench);
        let found: Vec<_> = times.iter().filter(|time| time.kernel.contains("q4_k")).collect();
        assert_eq!(found.iter().map(|time| time.kernel.as_str()).collect::<Vec<_>>(), [of_20, of_40]);
        assert!(found.iter().all(|time| time.seconds.as_ref().is_ok_and(|seconds| *seconds > 0.0)), "{found:?}");
        // Q4_K has 144 bytes for 256 weights.
        let bytes = [20, 40].map(|rows| 512 * 144 + rows * (256 + 512) * 2);
        assert_eq!(found.iter().map(|time| time.bytes).collect::<Vec<_>>(), bytes);
    }
}

#[test]
fn bytes_and_flops_are_those_of_the_sizes() {
    let all = times(H200, Dtype::Bf16, None);
    let of = |kernel: &str, what: &str| {
        let time = all.iter().find(|time| time.kernel.starts_with(kernel) && time.what == what);
        time.map(|time| (time.bytes, time.flops)).unwrap_or_else(|| panic!("no {kernel} on {what}"))
    };
    // Weight, input and output count once; a multiply-add is two FLOPs.
    assert_eq!(of("gemv_bf16_m2", "qkv 512x64, 2 rows"), (2 * (512 * 64 + 2 * 64 + 2 * 512), 2 * 2 * 512 * 64));
    assert_eq!(of("cublasLt", "head 101x64, 1 row"), (2 * (101 * 64 + 64) + 4 * 101, 2 * 101 * 64));
    // Beside the weight, the input and the output there is the norm's weight in f32, and an activation has half of the outputs.
    let bytes = 2 * (512 * 64 + 2 * 64 + 2 * 512) + 4 * 64;
    assert_eq!(of("gemv_fused_bf16_m2", "norm, qkv 512x64, 2 rows"), (bytes, 2 * 2 * 512 * 64));
    let bytes = 2 * (512 * 64 + 2 * 64 + 2 * 256);
    assert_eq!(of("gemv_fused_bf16_m2", "gate_up, silu 512x64, 2 rows"), (bytes, 2 * 2 * 512 * 64));
    assert_eq!(of("gemv_fused_bf16_m2", "norm, gate_up, silu 512x64, 2 rows").0, bytes + 4 * 64);
    // Two rows choose four of the eight experts.
    let bytes = 2 * (4 * 64 * 64 + 2 * 64 + 4 * 64);
    assert_eq!(of("expert_gemv_bf16", "8 experts 64x64, 2 rows of 2"), (bytes, 2 * 4 * 64 * 64));
    // The matrices of two adapters of rank 16 with three parts; two rows have one each.
    let what = "qkv 512x64, 2 adapters, 2 rows";
    assert_eq!(of("lora_shrink_bf16", what), (2 * (2 * 16 * 3 * 64 + 2 * 64), 2 * 2 * 16 * 3 * 64));
    assert_eq!(of("lora_expand_bf16", what), (2 * (2 * 16 * 512 + 2 * 2 * 512), 2 * 2 * 16 * 512));
    // Two rows of two adapters choose four different experts, with A of 2 x 16 rows and B of 64 columns each.
    let what = "8 experts 64x64, 2 adapters, 2 rows of 2";
    assert_eq!(of("lora_shrink_bf16", what), (2 * (4 * 2 * 16 * 64 + 2 * 64), 2 * 4 * 2 * 16 * 64));
    assert_eq!(of("lora_expand_bf16", what), (2 * (4 * 16 * 64 + 2 * 4 * 64), 2 * 4 * 16 * 64));
    assert_eq!(of("lora_pairs", "8 experts, 2 adapters, 2 rows of 2"), (4 * (2 * 4 + 8 * 2), 0));
    // The bytes are keys and values of two heads of 64, and queries and outputs of four.
    assert_eq!(of("paged_decode", "2 sequences of 300 tokens"), (2 * 2 * (300 * 2 * 128 + 2 * 256), 4 * 2 * 300 * 256));
    let narrow = times(H200, Dtype::Bf16, Some("paged_decode_bf16_d64_g8_e4m3"));
    assert_eq!((narrow.len(), narrow[1].bytes), (2, 2 * (300 * 2 * 128 + 2 * 2 * 256)));
    assert_eq!(of("paged_prefill", "a prompt of 70 tokens"), (2 * 70 * (2 * 128 + 2 * 256), 4 * 256 * 70 * 71 / 2));
    assert_eq!(of("sampling", "greedy, 101 tokens, 1 row").0, 101 * 4);
    // An index of four bytes counts once for all rows.
    assert_eq!(of("gather_columns", "64 columns, 2 rows"), (2 * 2 * 2 * 64 + 4 * 64, 0));
    // Q8_0 has 34 bytes for 32 weights.
    let values = times(H200, Dtype::Bf16, Some("dequantize_q8_0"));
    assert_eq!((values.len(), values[0].bytes), (1, 512 * 64 / 32 * 34 + 512 * 64 * 2));
}

#[test]
fn what_is_not_asked_for_is_neither_compiled_nor_measured() {
    let times = times(H200, Dtype::Bf16, Some("paged_decode"));
    assert_eq!(times.len(), 4, "over a cache in bf16 and in e4m3");
    assert!(times.iter().all(|time| time.kernel.starts_with("paged_decode_bf16_d64")));
}

#[test]
fn operands_that_do_not_fit_are_said() {
    let times = times(SMALL, Dtype::Bf16, Some("gather"));
    assert!(times.len() == 6 && times.iter().all(|time| time.seconds == Err(Unmeasured::Memory)), "{times:?}");
}

#[test]
fn a_refusal_of_cublaslt_is_one_row() {
    let backend = open(CudaConfig { device: H200, dtype: Some(Dtype::Bf16), ..config() });
    let control = Control::new();
    control.reset();
    // The first product has no algorithm, and the launch of a later one fails with CUBLAS_STATUS_NOT_SUPPORTED.
    control.fail("cublasLtMatmulAlgoGetHeuristic", 0, 15, false);
    let bencher = backend.kernel_bencher(&sizes(Some("cublasLt"))).unwrap();
    control.reset();
    control.fail("cublasLtMatmul", 2, 15, false);
    let times: Vec<_> = (0..bencher.cases().len()).map(|number| bencher.measure(number).unwrap()).collect();
    control.reset();
    let refused: Vec<_> = times.iter().filter(|time| matches!(time.seconds, Err(Unmeasured::Refused(_)))).collect();
    // One row and two rows have the same plan, and so have qkv and gate_up at these sizes, but not their products in FP8.
    let planned = |time: &&KernelTime| {
        time.what.contains("512x64") && !time.what.contains("70 rows") && !time.what.contains("FP8")
    };
    assert_eq!(refused.len(), times.iter().filter(planned).count() + 1, "{times:?}");
    assert!(times.iter().filter(|time| time.seconds.is_ok()).count() == times.len() - refused.len(), "{times:?}");
    assert!(refused.len() < times.len() / 2, "{times:?}");
    // After a fault of the device nothing more can be measured.
    control.fail("cuLaunchKernelEx", 0, 700, true);
    control.fail("cuStreamSynchronize", 0, 700, true);
    control.fail("cublasLtMatmul", 0, 700, true);
    assert!(bencher.measure(1).is_err());
    control.reset();
}

#[test]
fn ceilings_are_measured_in_each_type_of_the_chip() {
    let bench = CeilingsBench { copy_bytes: 1 << 20, product_size: 32, min_time: Duration::ZERO };
    for (device, dtypes) in [(H200, &["bfloat16", "float16"][..]), (V100, &["float16"])] {
        let backend = open(CudaConfig { device, dtype: None, ..config() });
        let ceilings = backend.measure_ceilings(&bench).unwrap();
        assert!(ceilings.bandwidth > 0.0);
        assert_eq!(ceilings.products.iter().map(|product| product.dtype).collect::<Vec<_>>(), dtypes);
        assert!(ceilings.products.iter().all(|product| product.flops.as_ref().is_ok_and(|flops| *flops > 0.0)));
    }
    let backend = open(CudaConfig { device: SMALL, dtype: None, ..config() });
    let error = backend.measure_ceilings(&CeilingsBench { copy_bytes: 1 << 30, ..bench }).unwrap_err().to_string();
    assert!(error.contains("memory"), "{error}");
}
