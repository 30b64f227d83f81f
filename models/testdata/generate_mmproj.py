#!/usr/bin/env python3
"""Converts the tiny Qwen3-VL to a GGUF file and its mmproj file, in the layout of llama.cpp's converter.

    python generate_mmproj.py

It needs the gguf, numpy and safetensors packages of generate.py, but no PyTorch. It reads qwen3-vl/ and the tokenizer of
llama/, and writes qwen3-vl-gguf/. The values are those of the safetensors file, so its golden numbers apply.
README.md describes the files.
"""

import json
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from safetensors import deserialize

HERE = pathlib.Path(__file__).resolve().parent
SOURCE, TARGET = HERE / "qwen3-vl", HERE / "qwen3-vl-gguf"
NAME = "Tiny Qwen3 VL"
CONTROLS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
VISION = "model.visual."


def main():
    config = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
    tensors = read(SOURCE / "model.safetensors")
    TARGET.mkdir(exist_ok=True)
    vision = {name.removeprefix(VISION): value for name, value in tensors.items() if name.startswith(VISION)}
    text = {name: value for name, value in tensors.items() if not name.startswith(VISION)}
    write_text(TARGET / "model.gguf", config, text)
    write_vision(TARGET / "mmproj-BF16.gguf", config, vision)


def read(path):
    """Returns the tensors of a file in bf16 as f32, which is exact."""
    tensors = {}
    for name, tensor in deserialize(path.read_bytes()):
        assert tensor["dtype"] == "BF16", (name, tensor["dtype"])
        bits = np.frombuffer(bytes(tensor["data"]), dtype=np.uint16).astype(np.uint32) << 16
        tensors[name] = bits.view(np.float32).reshape(tensor["shape"])
    return dict(sorted(tensors.items()))


def add(writer, name, value):
    """Adds a tensor: vectors, convolutions and positions in f32, as converters write them, and matrices in bf16."""
    plain = value.ndim != 2 or "position_embd" in name
    storage = Q.F32 if plain else Q.BF16
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(value), storage), raw_dtype=storage)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- decoder ---


def write_text(path, config, tensors):
    text = config["text_config"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3VL, text["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3VL])
    writer.add_name(NAME)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    rope = text["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_sections(rope["mrope_section"] + [0])
    writer.add_num_deepstack_layers(len(config["vision_config"]["deepstack_visual_indexes"]))
    add_vocabulary(writer, {config[key]: text for key, text in CONTROLS.items()}, text["eos_token_id"])
    for name, value in tensors.items():
        stem, kind = name.replace("model.language_model.", "model.").rsplit(".", 1)
        add(writer, f"{names.get_name(stem)}.{kind}", value)
    finish(writer)


def add_vocabulary(writer, controls, eos):
    """Adds the vocabulary of llama/, with the tokens that mark images in place of its last merges. `controls` are their
    texts by id."""
    model = json.loads((HERE / "llama" / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = model["model"]["vocab"]
    special = {token["id"] for token in model["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    for id, content in controls.items():
        tokens[id] = content
        special.add(id)
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["model"]["merges"]]
    known = set(tokens)
    merges = [pair for pair in pairs if {"".join(pair), *pair} <= known]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if id in special else normal for id in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(False)


# --- encoder ---


def write_vision(path, config, tensors):
    vision = config["vision_config"]
    side = round(vision["num_position_embeddings"] ** 0.5)
    deepstack = vision["deepstack_visual_indexes"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_name(NAME)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_size(side * vision["patch_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_projection_dim(vision["out_hidden_size"])
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_attention_layernorm_eps(config["text_config"]["rms_norm_eps"])
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_is_deepstack_layers([layer in deepstack for layer in range(vision["depth"])])
    for name, value in tensors.items():
        if name == "patch_embed.proj.weight":
            # A convolution over two frames becomes one for each of them.
            first, second = value[:, :, 0], value[:, :, 1]
            add(writer, "v.patch_embd.weight", first)
            add(writer, "v.patch_embd.weight.1", second)
            continue
        stem, kind = name.rsplit(".", 1)
        add(writer, f"{vision_name(stem, deepstack)}.{kind}", value)
    finish(writer)


def vision_name(stem, deepstack):
    fixed = {"patch_embed.proj": "v.patch_embd", "pos_embed": "v.position_embd", "merger.norm": "v.post_ln",
             "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"}
    if stem in fixed:
        return fixed[stem]
    group, index, part = stem.split(".", 2)
    if group == "deepstack_merger_list":
        short = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[part]
        return f"v.deepstack.{deepstack[int(index)]}.{short}"
    short = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
             "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}[part]
    return f"v.blk.{index}.{short}"


if __name__ == "__main__":
    main()
