//! Tests of the kernel benches: their selection, and that every kernel runs. Times on an emulation have no meaning.

use std::collections::BTreeSet;
use std::time::Duration;

use octavo_backend_cuda::testing::devices::{H200, SMALL, V100};
use octavo_backend_cuda::{CudaConfig, Dtype, KernelBench, KernelTimes};
use octavo_ops::HeadShape;

use crate::common::open;
use crate::config;

fn sizes(filter: Option<&str>) -> KernelBench {
    KernelBench {
        hidden: 64,
        inner: 256,
        heads: HeadShape { q: 4, kv: 2, dim: 64 },
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
fn times(device: usize, dtype: Dtype, filter: Option<&str>) -> KernelTimes {
    let backend = open(CudaConfig { device, dtype: Some(dtype), ..config() });
    let mut begun = Vec::new();
    let told = &mut |kernel: &str, what: &str| begun.push((kernel.to_owned(), what.to_owned()));
    let times = backend.bench_kernels(&sizes(filter), told).expect("every kernel runs");
    let measured = times.times.iter().map(|time| (time.kernel.clone(), time.what.clone()));
    assert_eq!(measured.collect::<Vec<_>>(), begun, "each is told before it is measured");
    assert_eq!(times.peaks, None);
    times
}

/// Returns the names of kernels without the suffixes of their instances.
fn families(times: &KernelTimes) -> BTreeSet<&str> {
    times.times.iter().map(|time| time.kernel.split('_').next().unwrap_or_default()).collect()
}

#[test]
fn every_family_of_kernels_is_measured_on_every_chip() {
    for (device, dtype) in [(H200, Dtype::Bf16), (V100, Dtype::F16), (H200, Dtype::F32)] {
        let times = times(device, dtype, None);
        for time in &times.times {
            assert!(time.seconds.is_some_and(|seconds| seconds > 0.0) && time.copies >= 2, "{time:?}");
            assert!(time.bytes > 0, "{time:?}");
        }
        let found = families(&times);
        let expected = [
            "copy",
            "dequantize",
            "embed",
            "gather",
            "gemm",
            "gemv",
            "glu",
            "mmvq",
            "norm",
            "paged",
            "qkv",
            "quantize",
            "sampling",
        ];
        assert!(expected.iter().all(|family| found.contains(family)), "{found:?}");
        let named = |name: &str| times.times.iter().any(|time| time.kernel.starts_with(name));
        // Kernels with tensor cores are used if there are any, and cuBLASLt beside our own.
        assert_eq!(named("paged_decode") && named("paged_prefill"), dtype != Dtype::F32);
        assert_eq!(named("paged_prefill_volta") && named("gemm_volta"), device == V100);
        assert_eq!(named("cublasLt"), dtype != Dtype::F32);
    }
}

#[test]
fn bytes_and_flops_are_those_of_the_sizes() {
    let all = times(H200, Dtype::Bf16, None);
    let of = |kernel: &str, what: &str| {
        let time = all.times.iter().find(|time| time.kernel.starts_with(kernel) && time.what == what);
        time.map(|time| (time.bytes, time.flops)).unwrap_or_else(|| panic!("no {kernel} on {what}"))
    };
    // Weight, input and output count once; a multiply-add is two FLOPs.
    assert_eq!(of("gemv_bf16_m2", "qkv 512x64, 2 rows"), (2 * (512 * 64 + 2 * 64 + 2 * 512), 2 * 2 * 512 * 64));
    assert_eq!(of("cublasLt", "head 101x64, 1 row"), (2 * (101 * 64 + 64) + 4 * 101, 2 * 101 * 64));
    // The bytes are keys and values of two heads of 64, and queries and outputs of four.
    assert_eq!(of("paged_decode", "2 sequences of 300 tokens"), (2 * 2 * (300 * 2 * 128 + 2 * 256), 4 * 2 * 300 * 256));
    assert_eq!(of("paged_prefill", "a prompt of 70 tokens"), (2 * 70 * (2 * 128 + 2 * 256), 4 * 256 * 70 * 71 / 2));
    assert_eq!(of("sampling_draw", "greedy, 101 tokens, 1 row").0, 101 * 4);
    // Q8_0 has 34 bytes for 32 weights.
    let values = times(H200, Dtype::Bf16, Some("dequantize_q8_0"));
    assert_eq!((values.times.len(), values.times[0].bytes), (1, 512 * 64 / 32 * 34 + 512 * 64 * 2));
}

#[test]
fn what_is_not_asked_for_is_neither_compiled_nor_measured() {
    let times = times(H200, Dtype::Bf16, Some("paged_decode"));
    assert_eq!(times.times.len(), 2);
    assert!(times.times.iter().all(|time| time.kernel.starts_with("paged_decode_bf16_d64")));
}

#[test]
fn operands_that_do_not_fit_are_said() {
    let times = times(SMALL, Dtype::Bf16, Some("gather"));
    assert!(times.times.len() == 3 && times.times.iter().all(|time| time.seconds.is_none()), "{times:?}");
}
