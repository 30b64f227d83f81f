#!/usr/bin/env python3
"""Generates the tiny checkpoints of the families beyond Llama, Mistral and Qwen, with their golden numbers.

    python generate_families.py [NAME...]

generate.py states the versions of the packages and the rules of random weights. README.md describes the files.
"""

import sys

import gguf
import torch
from gguf import GGMLQuantizationType as Q
from transformers import Gemma2Config, Gemma3TextConfig, GraniteConfig
from transformers import Olmo2Config, Phi3Config, SmolLM3Config

from generate import COMMON, HERE, gguf_file, hugging_face, rope, train_tokenizer

GEMMA2 = Gemma2Config(
    **COMMON, head_dim=32, sliding_window=16, query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
    final_logit_softcapping=20.0, rope_parameters=rope(),
)
# The last of three layers has full attention.
GEMMA3 = Gemma3TextConfig(
    **(COMMON | dict(num_hidden_layers=3, num_key_value_heads=1)), head_dim=32, sliding_window=16,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"], query_pre_attn_scalar=24,
    rope_parameters={"full_attention": rope("linear", 1e6, factor=4.0), "sliding_attention": rope()},
)
# A GGUF file has no key for the factor of the scores, which follows from the head size.
GEMMA2_GGUF = Gemma2Config(**(GEMMA2.to_diff_dict() | dict(query_pre_attn_scalar=32)))
GEMMA3_GGUF = Gemma3TextConfig(**(GEMMA3.to_diff_dict() | dict(query_pre_attn_scalar=32)))
LONG = [1.0 + 0.25 * i for i in range(12)]
SHORT = [1.0 + 0.05 * i for i in range(12)]
PHI3 = Phi3Config(
    **(COMMON | dict(hidden_size=96, num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=128)),
    sliding_window=20, original_max_position_embeddings=32,
    rope_parameters=rope("longrope", partial_rotary_factor=0.75, short_factor=SHORT, long_factor=LONG),
)
PHI4 = Phi3Config(**COMMON, tie_word_embeddings=True, rope_parameters=rope(theta=2.5e5, partial_rotary_factor=1.0))
GRANITE = GraniteConfig(
    **COMMON, tie_word_embeddings=True, embedding_multiplier=12.0, attention_multiplier=0.1, residual_multiplier=0.22,
    logits_scaling=8.0, rope_parameters=rope(),
)
OLMO2 = Olmo2Config(**COMMON, rope_parameters=rope(theta=5e5))
# The second and the fourth of four layers have no rotary embedding.
SMOLLM3 = SmolLM3Config(**(COMMON | dict(num_hidden_layers=4)), no_rope_layers=[1, 0, 1, 0], rope_parameters=rope(theta=1e5))
# A GGUF file has no key for these layers: every fourth one.
SMOLLM3_GGUF = SmolLM3Config(**(COMMON | dict(num_hidden_layers=4)), rope_parameters=rope(theta=1e5))

CHECKPOINTS = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "phi4": PHI4,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "smollm3": SMOLLM3,
}
TYPES = dict(token_embd=Q.Q8_0, output=Q.Q8_0, attn_q=Q.Q8_0, attn_k=Q.Q8_0, attn_v=Q.F16, attn_qkv=Q.Q8_0,
             attn_output=Q.Q8_0, ffn_gate=Q.Q8_0, ffn_up=Q.BF16, ffn_down=Q.Q8_0)


def head(writer, config, arch):
    """Adds the keys of a family, as the converter of llama.cpp does."""
    if arch.startswith("gemma"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
        writer.add_float32("gemma3.rope.freq_base_swa", 1e4)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
    if arch == "phi3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_orig_ctx_len(32)
        # √(1 + ln(128 / 32) / ln 32)
        writer.add_rope_scaling_attn_factors(1.1832159566199232)
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


GGUF = {
    "gemma2-gguf": ("gemma2", GEMMA2_GGUF),
    "gemma3-gguf": ("gemma3", GEMMA3_GGUF),
    "phi3-gguf": ("phi3", PHI3),
    "granite-gguf": ("granite", GRANITE),
    "olmo2-gguf": ("olmo2", OLMO2),
    "smollm3-gguf": ("smollm3", SMOLLM3_GGUF),
}


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    tokenizer = train_tokenizer()
    chosen = sys.argv[1:]
    for seed, (name, config) in enumerate(CHECKPOINTS.items(), start=201):
        if not chosen or name in chosen:
            hugging_face(HERE / name, config, "bf16", 5, 1, tokenizer, seed)
    for seed, (name, (arch, config)) in enumerate(GGUF.items(), start=251):
        if not chosen or name in chosen:
            gguf_file(HERE / name, arch, config, TYPES, tokenizer, seed, permute=arch in ("granite", "smollm3"), head=head)


if __name__ == "__main__":
    main()
