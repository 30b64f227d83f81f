#!/usr/bin/env python3
"""Generates the tiny checkpoints with a vision encoder and their golden numbers.

    python generate_vision.py

It needs the packages of generate.py, and has the same rules: fixed seeds, weights drawn by numpy and rounded to their
storage type, PyTorch in f32 on one thread. README.md describes the files and the output.
"""

import json
import math

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from generate import COMMON, HERE, VOCAB, fresh, readable, rounded, save_torch, write_json

IMAGE, VIDEO, START, END = 300, 301, 302, 303
# Grids of patches (rows, columns): none is square, and the last is larger than the table of positions.
GRIDS = {"one": [(4, 6)], "two": [(4, 6), (8, 4)], "decode": [(10, 6)]}
MERGE = 2


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    qwen3_vl(HERE / "qwen3-vl", form=5, seed=201)
    qwen3_vl(HERE / "qwen3-vl-tied", form=4, seed=202)
    readable()


def qwen3_vl(folder, form, seed):
    """Writes a Qwen3-VL. Deepstack layers are not the first ones of the encoder, and are not those of the decoder."""
    fresh(folder)
    text = {key: value for key, value in COMMON.items()} | dict(
        num_hidden_layers=4, head_dim=32,
        rope_parameters=dict(rope_type="default", rope_theta=5e5, mrope_section=[6, 5, 5], mrope_interleaved=True),
    )
    vision = dict(
        depth=4, hidden_size=48, intermediate_size=80, num_heads=4, patch_size=4, out_hidden_size=64,
        num_position_embeddings=36, deepstack_visual_indexes=[0, 2],
    )
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=form == 4,
    )
    config._attn_implementation = "eager"
    model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    stored = {name: rounded(value, "bf16") for name, value in draw(model, seed).items()}
    save_torch(stored, folder / "model.safetensors")
    write_json(folder / "config.json", as_config(json.loads(config.to_json_string(use_diff=False)), form))
    missing, unexpected = model.load_state_dict({name: value.float() for name, value in stored.items()}, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing), (missing, unexpected)
    model.tie_weights()
    tensors = {}
    random = np.random.default_rng(1000 + seed)
    for name, grids in GRIDS.items():
        case(tensors, name, model, grids, random)
    case(tensors, "text", model, [], random)
    save_file(tensors, folder / "golden.safetensors")


def draw(model, seed):
    """Returns random weights that keep activations near 1, and give every part of the model a visible effect."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name.endswith("bias"):
            value = 0.3 * random.standard_normal(shape)
        elif len(shape) == 1:
            value = 1.0 + 0.2 * random.standard_normal(shape)
        elif "embed_tokens" in name or "pos_embed" in name:
            value = 0.5 * random.standard_normal(shape)
        else:
            value = 1.5 * random.standard_normal(shape) / math.sqrt(np.prod(shape[1:]))
        weights[name] = value.astype(np.float32)
    return weights


def case(tensors, name, model, grids, random):
    """Adds a prompt with an image of each grid: ids, patches, encoder outputs, positions and logits."""
    ids = list(random.integers(3, 300, size=5))
    for rows, cols in grids:
        ids += [START] + [IMAGE] * (rows * cols // MERGE**2) + [END] + list(random.integers(3, 300, size=4))
    ids += list(random.integers(3, 300, size=24))
    ids = np.array(ids, dtype=np.int32)
    inputs = dict(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    model.model.rope_deltas = None
    if grids:
        width = 3 * 2 * 4 * 4
        patches = random.integers(0, 256, size=(sum(rows * cols for rows, cols in grids), width), dtype=np.uint8)
        grid = torch.tensor([[1, rows, cols] for rows, cols in grids])
        inputs |= dict(pixel_values=torch.from_numpy((patches.astype(np.float32) - 127.5) / 127.5), image_grid_thw=grid)
        features = model.model.get_image_features(inputs["pixel_values"], grid)
        tensors |= {f"{name}.patches": patches, f"{name}.grids": np.array(grids, dtype=np.int32)}
        tensors[f"{name}.merged"] = torch.cat(list(features.pooler_output)).numpy()
        for part, rows in enumerate(features.deepstack_features):
            tensors[f"{name}.deepstack.{part}"] = torch.cat(list(rows)).numpy()
        positions, delta = model.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=grid)
        tensors[f"{name}.positions"] = positions[:, 0].numpy().astype(np.int32)
        tensors[f"{name}.delta"] = delta.numpy().astype(np.int32).reshape(1)
    logits = model(**inputs).logits[0].float().numpy()
    assert logits.shape == (len(ids), VOCAB)
    tensors |= {f"{name}.input_ids": ids, f"{name}.logits": logits}
    print(f"{name}: {len(ids)} tokens, standard deviation of the logits {logits.std():.2f}")


def as_config(written, form):
    """Returns a config.json in the form of transformers 5, or 4 as published with the models."""
    text, vision = dict(written["text_config"]), dict(written["vision_config"])
    keys = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings"]
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    config |= {key: written[key] for key in keys}
    text_keys = [
        "attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
        "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "rms_norm_eps", "rope_parameters", "vocab_size",
    ]
    vision_keys = [
        "deepstack_visual_indexes", "depth", "hidden_act", "hidden_size", "in_channels", "intermediate_size", "model_type",
        "num_heads", "num_position_embeddings", "out_hidden_size", "patch_size", "spatial_merge_size",
        "temporal_patch_size", "rope_parameters",
    ]
    text = {key: text[key] for key in text_keys if key in text}
    vision = {key: vision[key] for key in vision_keys if vision.get(key) is not None}
    if form == 5:
        return config | {"dtype": "bfloat16", "text_config": text | {"dtype": "bfloat16"}, "vision_config": vision}
    parameters = text.pop("rope_parameters")
    text |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters, "dtype": "bfloat16"}
    vision.pop("rope_parameters", None)
    return config | {"text_config": text, "vision_config": vision | {"model_type": "qwen3_vl"}}


if __name__ == "__main__":
    main()
