//! Tests of weights that stay quantised.

use octavo_backend_cuda::testing::Control;
use octavo_backend_cuda::testing::devices::{H200, L40S, V100};
use octavo_backend_cuda::{CudaConfig, Dtype};
use octavo_ops::StorageType;
use octavo_ops::StorageType::{
    F8E4M3, F16, Fp4, Int4, Int8, Iq4Nl, Iq4Xs, Mxfp4, Nf4, Nvfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K,
    Q8_0,
};

use crate::common::quantised::{
    Shared, experts_agree, format_agrees, fp8_inputs_agree, mixture_agrees, mixture_is_refused, ordered_columns_agree,
    rounded_rows_keep_their_bits,
};
use crate::config;

#[test]
fn every_format_means_what_candle_reads() {
    for (storage, device, dtype) in [
        (Q4_0, H200, Dtype::F32),
        (Q4_1, H200, Dtype::Bf16),
        (Q5_0, V100, Dtype::F16),
        (Q5_1, H200, Dtype::F32),
        (Q8_0, H200, Dtype::F32),
        (Q2K, H200, Dtype::F32),
        (Q3K, H200, Dtype::Bf16),
        (Q4K, V100, Dtype::F16),
        (Q5K, H200, Dtype::F32),
        (Q6K, H200, Dtype::F32),
        (Mxfp4, H200, Dtype::Bf16),
        (Mxfp4, V100, Dtype::F16),
        (Nvfp4, H200, Dtype::Bf16),
        (Nvfp4, V100, Dtype::F16),
        (Iq4Nl, H200, Dtype::Bf16),
        (Iq4Xs, V100, Dtype::F16),
        (Int4, H200, Dtype::F32),
        (Int8, V100, Dtype::F16),
        (F8E4M3, H200, Dtype::Bf16),
        (Nf4, V100, Dtype::F16),
        (Fp4, H200, Dtype::F32),
    ] {
        format_agrees(&CudaConfig { device, dtype: Some(dtype), ..config() }, storage);
    }
}

#[test]
fn columns_may_be_in_another_order() {
    for (storage, device, dtype) in [(Q4_0, H200, Dtype::Bf16), (Int4, V100, Dtype::F16)] {
        ordered_columns_agree(&CudaConfig { device, dtype: Some(dtype), ..config() }, storage);
    }
}

#[test]
fn inputs_are_rounded_to_fp8_where_it_is_multiplied() {
    for (device, dtype, batch_invariant, shared, rounds) in [
        (L40S, Dtype::Bf16, false, Shared::Groups, true),
        (L40S, Dtype::F16, false, Shared::Blocks, true),
        (L40S, Dtype::Bf16, true, Shared::Rows, false),
        (H200, Dtype::Bf16, false, Shared::Groups, false),
        (H200, Dtype::Bf16, false, Shared::Rows, true),
        (H200, Dtype::F16, false, Shared::Rows, true),
        (H200, Dtype::Bf16, false, Shared::Blocks, true),
        (H200, Dtype::Bf16, true, Shared::Blocks, false),
        (V100, Dtype::F16, false, Shared::Rows, false),
    ] {
        let config = CudaConfig { device, dtype: Some(dtype), batch_invariant, ..config() };
        assert_eq!(fp8_inputs_agree(&config, shared, 70), rounds, "{device} {dtype:?} {shared:?}");
    }
}

#[test]
fn scales_that_the_library_does_not_know_are_applied_afterwards_or_the_product_is_in_16_bits() {
    let control = Control::new();
    control.reset();
    let config = |dtype| CudaConfig { dtype: Some(dtype), ..config() };
    assert!(fp8_inputs_agree(&config(Dtype::Bf16), Shared::Rows, 70));
    assert!(control.calls("CUBLASLT_MATMUL_DESC_A_SCALE_MODE") > 0);
    // CUBLAS_STATUS_INVALID_VALUE
    control.refuse("CUBLASLT_MATMUL_DESC_A_SCALE_MODE", 7);
    // Chunks have 128 rows, because the weights have 256 columns.
    assert!(fp8_inputs_agree(&config(Dtype::Bf16), Shared::Rows, 150));
    assert!(fp8_inputs_agree(&config(Dtype::F16), Shared::Rows, 70));
    assert!(!fp8_inputs_agree(&config(Dtype::Bf16), Shared::Blocks, 70));
    control.reset();
}

#[test]
fn parts_of_a_weight_may_be_of_different_types() {
    // The combinations are those of Q4_K_M, Q5_K_M and Q3_K_M files, and one that does not occur in practice.
    for storages in [&[Q4K, Q4K, Q6K][..], &[Q5K, Q6K], &[Q3K, Q5K, Q4K], &[Q5_0, Q8_0, F16, Q2K]] {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            mixture_agrees(&CudaConfig { dtype: Some(dtype), ..config() }, storages, false);
        }
    }
}

#[test]
fn rounded_rows_have_the_same_bits_in_every_step() {
    for (device, most) in [(H200, 4), (L40S, 8)] {
        rounded_rows_keep_their_bits(&CudaConfig { device, dtype: Some(Dtype::Bf16), ..config() }, most);
    }
}

#[test]
fn experts_in_every_kind_of_format_mean_what_candle_reads() {
    for (storage, device, dtype) in [
        (F8E4M3, H200, Dtype::Bf16),
        (F8E4M3, L40S, Dtype::F16),
        (F8E4M3, V100, Dtype::F16),
        (F8E4M3, V100, Dtype::F32),
        (Mxfp4, V100, Dtype::F16),
        (Q4_0, V100, Dtype::F16),
        (Nvfp4, H200, Dtype::Bf16),
    ] {
        experts_agree(&CudaConfig { device, dtype: Some(dtype), ..config() }, storage);
    }
}

#[test]
fn experts_may_be_integers_of_different_widths() {
    let config = CudaConfig { dtype: Some(Dtype::Bf16), ..config() };
    mixture_agrees(&config, &[Q4_0, Int8, Int4], true);
    mixture_agrees(&config, &[Q4_0, Q8_0, Int8], true);
    mixture_agrees(&config, &[F16, StorageType::BF16, StorageType::F32], true);
    assert!(mixture_is_refused(&config, &[Q4_0, F8E4M3, Int4]));
}
