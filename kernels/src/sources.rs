//! Embedded texts of the kernels.

/// A file of templates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Path within the package, for compilers' messages.
    pub path: &'static str,
    /// Content of the file.
    pub text: &'static str,
}

/// Embeds sources as one constant each, and the list of all.
macro_rules! sources {
    ($($(#[$doc:meta])* $name:ident = $path:literal,)*) => {
        $($(#[$doc])* pub const $name: Source = Source { path: $path, text: include_str!(concat!("../", $path)) };)*

        /// All sources.
        pub const SOURCES: &[Source] = &[$($name),*];
    };
}

sources! {
    /// Embedding, norm, activation, gather, copy of KV blocks.
    ROWS = "cuda/rows.cu",
    /// Patches of images, learned positions, the media cache.
    IMAGES = "cuda/images.cu",
    /// Mixtures of experts.
    EXPERTS = "cuda/experts.cu",
    /// Products of many rows with the weights of experts, on the tensor cores of sm_75 (f16) and later.
    EXPERT_MMA = "cuda/expert_mma.cu",
    /// Operations after the qkv projection.
    QKV_POST = "cuda/qkv_post.cu",
    /// Operations of latent attention before attention itself.
    LATENT_POST = "cuda/latent_post.cu",
    /// Attention of any element type and head size.
    ATTENTION_PLAIN = "cuda/attention_plain.cu",
    /// Decode attention on the tensor cores of sm_80 and later.
    ATTENTION_DECODE = "cuda/attention_decode.cu",
    /// Decode attention of f16 on chips before sm_80.
    ATTENTION_DECODE_VOLTA = "cuda/attention_decode_volta.cu",
    /// Prefill attention on the tensor cores of sm_75 (f16) and later.
    ATTENTION_PREFILL = "cuda/attention_prefill.cu",
    /// Prefill attention of f16 on the tensor cores of Volta.
    ATTENTION_PREFILL_VOLTA = "cuda/attention_prefill_volta.cu",
    /// Latent attention on the tensor cores of sm_80 and later.
    ATTENTION_LATENT = "cuda/attention_latent.cu",
    /// Dense product of 16-bit types on the tensor cores of sm_75 (f16) and later.
    GEMM_MMA = "cuda/gemm_mma.cu",
    /// Dense product of few rows of 16-bit types on the tensor cores of sm_80 and later.
    GEMM_SKINNY = "cuda/gemm_skinny.cu",
    /// Product of few rows of 16-bit activations with a quantised weight, on the tensor cores of sm_80 and later.
    GEMM_SKINNY_QUANT = "cuda/gemm_skinny_quant.cu",
    /// Product of few rows of f16 with a quantised weight, on the tensor cores of Volta.
    GEMM_SKINNY_VOLTA = "cuda/gemm_skinny_volta.cu",
    /// Dense product of f16 on the tensor cores of Volta, of a matrix or of experts.
    GEMM_VOLTA = "cuda/gemm_volta.cu",
    /// Dense product in f32.
    GEMM_F32 = "cuda/gemm_f32.cu",
    /// Products of few rows: the weight is read once, at the bandwidth of memory.
    GEMV = "cuda/gemv.cu",
    /// The same together with the norm before and the activation after a product.
    GEMV_FUSED = "cuda/gemv_fused.cu",
    /// Products with quantised weights, and their dequantisation.
    QUANTIZED = "cuda/quantized.cu",
    /// Products of 16-bit activations with quantised weights, on the tensor cores of sm_80 and later.
    GEMM_QUANT = "cuda/gemm_quant.cu",
    /// Low-rank adapters.
    LORA = "cuda/lora.cu",
    /// Products of activations with weights, both in e4m3, on the tensor cores of sm_89 and sm_120.
    GEMM_F8 = "cuda/gemm_f8.cu",
    /// Dummy weights.
    FILL = "cuda/fill.cu",
    /// Sampling.
    SAMPLING = "cuda/sampling.cu",
    /// Log-probabilities of sampled tokens.
    LOGPROBS = "cuda/logprobs.cu",
}

/// Headers that the sources include, by name.
pub const HEADERS: &[(&str, &str)] = &[
    ("gpu.h", include_str!("../include/gpu.h")),
    ("params.h", include_str!("../include/params.h")),
    ("activation.h", include_str!("../include/activation.h")),
    ("code_pairs.h", include_str!("../include/code_pairs.h")),
    ("attention.h", include_str!("../include/attention.h")),
    ("experts.h", include_str!("../include/experts.h")),
    ("heads.h", include_str!("../include/heads.h")),
    ("gemv.h", include_str!("../include/gemv.h")),
    ("linear.h", include_str!("../include/linear.h")),
    ("norm.h", include_str!("../include/norm.h")),
    ("rope.h", include_str!("../include/rope.h")),
    ("rounded.h", include_str!("../include/rounded.h")),
    ("skinny.h", include_str!("../include/skinny.h")),
    ("splits.h", include_str!("../include/splits.h")),
    ("sampling.h", include_str!("../include/sampling.h")),
    ("quant.h", include_str!("../include/quant.h")),
    ("tiles.h", include_str!("../include/tiles.h")),
];
