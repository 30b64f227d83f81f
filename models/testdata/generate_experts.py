#!/usr/bin/env python3
"""Generates the tiny checkpoints of the families with mixtures of experts, with their golden numbers.

    python generate_experts.py [NAME...]

generate.py states the versions of the packages and the rules of random weights. README.md describes the files. Routers
are drawn so that no choice of experts is close: rounding must not change it.
"""

import copy
import json
import pathlib
import sys
import tempfile

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, GraniteMoeConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from generate import (
    COMMON, HERE, TOKENS, VOCAB, SPECIALS, add_sizes, add_vocabulary, draw, fresh, golden, new_model, permuted, rope, rounded,
    save_torch, train_tokenizer, unpermuted, write_json,
)
from generate_families import head

SMALL = COMMON | dict(intermediate_size=64)
MIXTRAL = MixtralConfig(
    **SMALL, num_local_experts=5, num_experts_per_tok=2, sliding_window=None, rope_parameters=rope(theta=1e6),
)
# The first layer has no experts.
QWEN2 = Qwen2MoeConfig(
    **(COMMON | dict(num_hidden_layers=3)), num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=64, norm_topk_prob=False, mlp_only_layers=[0], rope_parameters=rope(theta=1e6),
)
QWEN3 = Qwen3MoeConfig(
    **(COMMON | dict(num_hidden_layers=3)), head_dim=32, num_experts=6, num_experts_per_tok=3,
    moe_intermediate_size=32, norm_topk_prob=True, mlp_only_layers=[1], rope_parameters=rope(theta=1e6),
)
GRANITE = GraniteMoeConfig(
    **SMALL, num_local_experts=5, num_experts_per_tok=2, tie_word_embeddings=True, embedding_multiplier=12.0,
    attention_multiplier=0.1, residual_multiplier=0.22, logits_scaling=8.0, rope_parameters=rope(),
)
GPT_OSS = GptOssConfig(
    **SMALL, num_local_experts=5, num_experts_per_tok=2, head_dim=32, sliding_window=16,
    rope_parameters=rope("yarn", 1.5e5, factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                         original_max_position_embeddings=64),
)
# Queries are one product in DeepSeek-V2 here, and of low rank in V3. The size of a value is none of the others. The norms
# inside attention have an epsilon of their own. YaRN changes the frequencies and, by its second factor, the scores.
LATENT = COMMON | dict(
    num_key_value_heads=4, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20,
    moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=1,
    rms_norm_eps=1e-3,
)
DEEPSEEK2 = DeepseekV2Config(
    **LATENT, q_lora_rank=None, topk_method="group_limited_greedy", n_shared_experts=2, routed_scaling_factor=1.5,
    rope_parameters=rope(),
)
DEEPSEEK3 = DeepseekV3Config(
    **LATENT, q_lora_rank=24, n_shared_experts=1, routed_scaling_factor=2.5,
    rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
)
# Rows of whole groups of 32 in the experts; heads that begin within a block of scales.
DEEPSEEK3_FP8 = DeepseekV3Config(**(DEEPSEEK3.to_diff_dict() | dict(q_lora_rank=32, v_head_dim=32, moe_intermediate_size=32)))
CHECKPOINTS = {
    "mixtral": MIXTRAL,
    "qwen2-moe": QWEN2,
    "qwen3-moe": QWEN3,
    "granitemoe": GRANITE,
    "gpt-oss": GPT_OSS,
    "gpt-oss-mxfp4": GPT_OSS,
    "deepseek-v2": DEEPSEEK2,
    "deepseek-v3": DEEPSEEK3,
    "mixtral-fp8": MIXTRAL,
    "qwen3-moe-fp8": QWEN3,
    "deepseek-v3-fp8": DEEPSEEK3_FP8,
}
# Elements that share a scale: rows, and blocks. The last block of a matrix may be part of one.
ROWS, BLOCKS = [1, None], [32, 32]
FP8 = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=BLOCKS)
CHANNELS = dict(
    quant_method="compressed-tensors", format="float-quantized", quantization_status="compressed", ignore=["lm_head", "re:.*gate$"],
    config_groups=dict(group_0=dict(targets=["Linear"], weights=dict(num_bits=8, type="float", strategy="channel", symmetric=True))),
)
WHOLE = dict(qk_nope_head_dim=32, v_head_dim=32, moe_intermediate_size=32)
# All layers of a GGUF file have experts.
TWO = dict(mlp_only_layers=[], num_hidden_layers=2, layer_types=None)
GGUF = {
    "mixtral-gguf": ("llama", MIXTRAL),
    "qwen2-moe-gguf": ("qwen2moe", Qwen2MoeConfig(**(QWEN2.to_diff_dict() | TWO))),
    "qwen3-moe-gguf": ("qwen3moe", Qwen3MoeConfig(**(QWEN3.to_diff_dict() | TWO))),
    "granitemoe-gguf": ("granitemoe", GRANITE),
    "gpt-oss-gguf": ("gpt-oss", GPT_OSS),
    # Rows of whole blocks.
    "deepseek-v2-gguf": ("deepseek2", DeepseekV2Config(**(DEEPSEEK2.to_diff_dict() | WHOLE))),
    "deepseek-v3-gguf": ("deepseek2", DeepseekV3Config(**(DEEPSEEK3.to_diff_dict() | WHOLE | dict(q_lora_rank=32)))),
}
# Smallest difference between the logits of the last expert that is chosen and of the first that is not, and that of
# checkpoints whose activations the CPU backend rounds to bf16 with more effect.
GAP = 0.03
WIDE = {"qwen2-moe": 0.06, "qwen3-moe": 0.06, "qwen3-moe-gguf": 0.045, "deepseek-v2": 0.1, "deepseek-v3": 0.1,
        "deepseek-v2-gguf": 0.06, "mixtral-fp8": 0.06, "qwen3-moe-fp8": 0.06, "deepseek-v3-fp8": 0.1}


def expert_count(config):
    return getattr(config, "num_local_experts", None) or config.num_experts


def routers(model):
    """Returns the routers by name: the modules with a row of weights for each expert."""
    experts = expert_count(model.config)
    return {
        name: module for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None and module.weight.shape == (experts, model.config.hidden_size)
    }


def drawn(config, seed, gap, as_read=lambda _, value: value):
    """Returns a model and random weights with wide routers, of the first seed whose choices are all clear. `as_read` returns
    the values of a parameter that are read from a file."""
    for attempt in range(5000):
        model = new_model(config)
        weights = draw(model, seed + 1000 * attempt)
        for name in routers(model):
            weights[f"{name}.weight"] *= 2
        for name in weights:
            # Gates and ups beyond the limit of the activation.
            if config.model_type == "gpt_oss" and name.endswith("gate_up_proj"):
                weights[name] *= 2
        random = np.random.default_rng(seed + 1000 * attempt + 1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                weights[name] = 0.2 * random.standard_normal(buffer.shape).astype(np.float32)
        if closest(model, {name: as_read(name, value) for name, value in weights.items()}, seed) > gap:
            return model, weights
    raise RuntimeError("no seed gives clear choices")


def closest(model, weights, seed):
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)
    model.tie_weights()
    gaps = []

    def watch(module, inputs, _):
        x = inputs[0].reshape(-1, module.weight.shape[1])
        logits = torch.nn.functional.linear(x, module.weight, getattr(module, "bias", None))
        gaps.extend(choice_gaps(model.config, logits, getattr(module, "e_score_correction_bias", None)))

    hooks = [module.register_forward_hook(watch) for module in routers(model).values()]
    ids = np.random.default_rng(1000 + seed).integers(len(SPECIALS), VOCAB, size=TOKENS)
    model(torch.from_numpy(ids)[None])
    for hook in hooks:
        hook.remove()
    return min(gaps)


def choice_gaps(config, logits, correction):
    """Returns the smallest differences between what is chosen and what is not: experts, and groups of them."""
    # A difference of logits is at least four times that of their sigmoids.
    values = logits if correction is None else 4 * (logits.sigmoid() + correction)
    gaps = []
    if getattr(config, "n_group", None):
        grouped = values.view(len(values), config.n_group, -1)
        groups = grouped.topk(1 if correction is None else 2).values.sum(-1)
        gaps.append(gap_after(groups, config.topk_group))
        kept = torch.zeros_like(groups).scatter(1, groups.topk(config.topk_group).indices, 1.0)
        values = grouped.masked_fill(kept[:, :, None] == 0, float("-inf")).view_as(values)
    return gaps + [gap_after(values, config.num_experts_per_tok)]


def gap_after(values, count):
    values = values.sort(dim=-1, descending=True).values
    return (values[:, count - 1] - values[:, count]).min().item()


def as_published(model, weights):
    """Returns the tensors with the names of published files, and their config.json."""
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)
    model.tie_weights()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = pathlib.Path(folder)
        return load_file(files / "model.safetensors"), json.loads((files / "config.json").read_text())


def hugging_face(folder, config, seed):
    if folder.name.endswith("fp8"):
        in_fp8(folder, config, seed)
        return
    fresh(folder)
    model, weights = drawn(config, seed, WIDE.get(folder.name, GAP))
    blocks = {}
    if folder.name.endswith("mxfp4"):
        for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
            # The file has outputs by inputs.
            codes, scales, values = mxfp4(weights[name].swapaxes(1, 2))
            weights[name] = np.ascontiguousarray(values.swapaxes(1, 2))
            blocks |= {f"{name}_blocks": torch.from_numpy(codes), f"{name}_scales": torch.from_numpy(scales)}
    weights = {name: rounded(value, "bf16").float().numpy() for name, value in weights.items()}
    stored, written = as_published(model, weights)
    stored = {name: value.to(torch.bfloat16) for name, value in stored.items()}
    for name in blocks:
        stored.pop(name.removesuffix("_blocks").removesuffix("_scales"), None)
    if blocks:
        written["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    for key in ["transformers_version", "_name_or_path", "torch_dtype"]:
        written.pop(key, None)
    save_torch({name: value.contiguous() for name, value in (stored | blocks).items()}, folder / "model.safetensors")
    write_json(folder / "config.json", written | {"dtype": "bfloat16"})
    golden(folder / "golden.safetensors", model, weights, seed)


def in_fp8(folder, config, seed):
    """Writes a model whose projections are in FP8, with scales of rows for Mixtral and of blocks for others."""
    fresh(folder)
    block = ROWS if folder.name == "mixtral-fp8" else BLOCKS
    round_one = lambda name, value: in_rows(name, value, block)
    model, weights = drawn(config, seed, WIDE[folder.name], round_one)
    stored, written = as_published(model, weights)
    golden(folder / "golden.safetensors", model, {name: round_one(name, value) for name, value in weights.items()}, seed)
    tensors = {}
    for name, value in stored.items():
        if is_product(name):
            tensors[name], scales, _ = fp8(value, block)
            tensors[f"{name}_scale" if block == ROWS else f"{name}_scale_inv"] = scales
        else:
            tensors[name] = value.to(torch.bfloat16)
    for key in ["transformers_version", "_name_or_path", "torch_dtype"]:
        written.pop(key, None)
    save_torch({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    settings = CHANNELS if block == ROWS else FP8
    write_json(folder / "config.json", written | {"dtype": "bfloat16", "quantization_config": settings})


def is_product(name):
    """Returns whether a tensor is the matrix of a product, and none of the router, the embedding or the head."""
    return "proj" in name or name.endswith(("w1.weight", "w2.weight", "w3.weight"))


def in_rows(name, value, block):
    """Returns a parameter of the model with its values in FP8, or in bf16."""
    if not is_product(name):
        return rounded(value, "bf16").float().numpy()
    matrices = torch.from_numpy(value).reshape(-1, *value.shape[-2:])
    halves = 2 if name.endswith("gate_up_proj") else 1
    parts = [[fp8(part, block)[2] for part in matrix.chunk(halves)] for matrix in matrices]
    return torch.stack([torch.cat(matrix) for matrix in parts]).reshape(value.shape).numpy()


def fp8(weight, block):
    """Rounds a matrix to E4M3. Returns the codes, the scales, and the values."""
    rows, columns = weight.shape
    height, width = block[0], block[1] or columns
    shape = (-(-rows // height), -(-columns // width))
    padded = torch.zeros(shape[0] * height, shape[1] * width)
    padded[:rows, :columns] = weight
    scales = padded.view(shape[0], height, shape[1], width).abs().amax((1, 3)) / 448
    if block == ROWS:
        scales = scales.to(torch.bfloat16)
    spread = scales.float().repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * spread


def mxfp4(values):
    """Rounds rows to MXFP4. Returns the codes of pairs of elements, the exponents, and the values."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    levels = np.concatenate([levels, -levels])
    groups = values.reshape(*values.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1, keepdims=True))) - 2
    scaled = groups / np.exp2(exponents)
    codes = np.abs(scaled[..., None] - levels).argmin(-1).astype(np.uint8)
    rounded_values = (levels[codes] * np.exp2(exponents)).reshape(values.shape).astype(np.float32)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return pairs, (exponents[..., 0] + 127).astype(np.uint8), rounded_values


# --- GGUF ---

TYPES = dict(token_embd=Q.Q8_0, output=Q.Q8_0, attn_q=Q.Q8_0, attn_k=Q.Q8_0, attn_v=Q.F16, attn_output=Q.Q8_0,
             ffn_gate=Q.Q8_0, ffn_up=Q.Q8_0, ffn_down=Q.Q8_0, ffn_gate_exps=Q.Q8_0, ffn_up_exps=Q.Q4_0,
             ffn_down_exps=Q.Q5_0, ffn_gate_shexp=Q.Q8_0, ffn_up_shexp=Q.Q8_0, ffn_down_shexp=Q.Q8_0,
             attn_q_a=Q.Q8_0, attn_q_b=Q.Q8_0, attn_kv_a_mqa=Q.Q8_0, attn_k_b=Q.Q8_0, attn_v_b=Q.Q5_0)


def gguf_file(folder, arch, config, seed):
    fresh(folder)
    gap = WIDE.get(folder.name, GAP)
    for attempt in range(100):
        model, weights = drawn(config, seed + 100 * attempt, gap)
        tensors, read_back = quantised(arch, config, weights)
        # Quantisation may make a choice close.
        if closest(model, read_back, seed) > gap:
            break
    else:
        raise RuntimeError("no seed gives clear choices")
    writer = gguf.GGUFWriter(folder / "model.gguf", arch)
    keys(writer, arch, config)
    add_vocabulary(writer, train_tokenizer())
    for name, (data, storage) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=storage)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    golden(folder / "golden.safetensors", model, read_back, seed)


def quantised(arch, config, weights):
    """Returns the tensors of a file by name, and the weights as they are read from it."""
    types = TYPES | ({f"ffn_{part}_exps": Q.MXFP4 for part in ["gate", "up", "down"]} if arch == "gpt-oss" else {})
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch),
                                     config.num_hidden_layers)
    tensors, read_back = {}, {}
    for name, value in weights.items():
        back = np.empty_like(value)
        for stem, kind, view in parts(arch, names, config, name):
            part = view(value)
            storage = types.get(stem.rsplit(".", 1)[-1], Q.F32) if kind == "weight" else Q.F32
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            count = heads.get(stem.rsplit(".", 1)[-1]) if arch in ("llama", "granitemoe") else None
            stored = permuted(part, count) if count else part
            data = gguf.quants.quantize(np.ascontiguousarray(stored), storage)
            tensors[f"{stem}.{kind}"] = (data, storage)
            numbers = gguf.quants.dequantize(data, storage).astype(np.float32).reshape(stored.shape)
            view(back)[...] = unpermuted(numbers, count) if count else numbers
        read_back[name] = back
    return tensors, read_back


def parts(arch, names, config, name):
    """Returns the tensors of a parameter: stem, kind, and the view of the parameter that each of them is."""
    whole = lambda value: value
    layer = next((f"blk.{part}" for part in name.split(".") if part.isdigit()), None)
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    first, last = lambda value: value[:, :inner], lambda value: value[:, inner:]
    if arch == "gpt-oss":
        turned = lambda step: lambda value: value[..., step::2] if value.ndim == 2 else value[..., step::2].swapaxes(1, 2)
        exps = {
            "gate_up_proj": [("gate", turned(0)), ("up", turned(1))],
            "down_proj": [("down", lambda value: value if value.ndim == 2 else value.swapaxes(1, 2))],
        }
        stem = name.rsplit(".", 1)[-1].removesuffix("_bias")
        if stem in exps:
            kind = "bias" if name.endswith("_bias") else "weight"
            return [(f"{layer}.ffn_{part}_exps", kind, view) for part, view in exps[stem]]
        for old, new in {"self_attn.sinks": "attn_sinks.weight", "mlp.router.weight": "ffn_gate_inp.weight",
                         "mlp.router.bias": "ffn_gate_inp.bias",
                         "post_attention_layernorm.weight": "post_attention_norm.weight"}.items():
            if name.endswith(old):
                return [(f"{layer}.{new.rsplit('.', 1)[0]}", new.rsplit(".", 1)[1], whole)]
    if arch == "deepseek2":
        heads, content = config.num_attention_heads, config.qk_nope_head_dim
        of_head = lambda value: value.reshape(heads, -1, config.kv_lora_rank)
        if name.endswith("kv_b_proj.weight"):
            return [(f"{layer}.attn_k_b", "weight", lambda value: of_head(value)[:, :content].swapaxes(1, 2)),
                    (f"{layer}.attn_v_b", "weight", lambda value: of_head(value)[:, content:])]
        if name.endswith("e_score_correction_bias"):
            return [(f"{layer}.exp_probs_b", "bias", whole)]
    for old, new in {"experts.gate_up_proj": [("ffn_gate_exps", first), ("ffn_up_exps", last)],
                     "input_linear.weight": [("ffn_gate_exps", first), ("ffn_up_exps", last)],
                     "experts.down_proj": [("ffn_down_exps", whole)],
                     "output_linear.weight": [("ffn_down_exps", whole)],
                     "block_sparse_moe.router.weight": [("ffn_gate_inp", whole)],
                     "mlp.gate.weight": [("ffn_gate_inp", whole)],
                     "block_sparse_moe.gate.weight": [("ffn_gate_inp", whole)],
                     "shared_expert_gate.weight": [("ffn_gate_inp_shexp", whole)],
                     "shared_expert.gate_proj.weight": [("ffn_gate_shexp", whole)],
                     "shared_expert.up_proj.weight": [("ffn_up_shexp", whole)],
                     "shared_expert.down_proj.weight": [("ffn_down_shexp", whole)]}.items():
        if name.endswith(old):
            return [(f"{layer}.{stem}", "weight", view) for stem, view in new]
    stem, kind = names.get_name(name.rsplit(".", 1)[0]), name.rsplit(".", 1)[1]
    assert stem is not None, name
    return [(stem, kind, whole)]


def keys(writer, arch, config):
    """Adds the metadata, as the converter of llama.cpp does."""
    writer.add_name(f"tiny {arch}")
    if arch == "deepseek2":
        latent_keys(writer, config)
    else:
        add_sizes(writer, config)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    writer.add_expert_count(expert_count(config))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if arch in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch == "granitemoe":
        head(writer, config, "granite")
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


def latent_keys(writer, config):
    """Adds the metadata of DeepSeek-V2 and V3."""
    sizes = copy.copy(config)
    sizes.num_key_value_heads = 1
    add_sizes(writer, sizes)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    sigmoid = config.model_type == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    parameters = config.rope_parameters
    if parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * parameters["mscale_all_dim"])


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    chosen = sys.argv[1:]
    for seed, (name, config) in enumerate(CHECKPOINTS.items(), start=301):
        if not chosen or name in chosen:
            hugging_face(HERE / name, config, seed)
    for seed, (name, (arch, config)) in enumerate(GGUF.items(), start=351):
        if not chosen or name in chosen:
            gguf_file(HERE / name, arch, config, seed)


if __name__ == "__main__":
    main()
