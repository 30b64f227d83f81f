#!/usr/bin/env python3
"""Generates the tiny Idefics3 and its golden numbers.

    python generate_idefics3.py

It needs the packages of generate.py, and has the same rules as generate_vision.py. README.md describes the files and the
output.
"""

import json

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from generate import COMMON, HERE, VOCAB, fresh, readable, rounded, save_torch, write_json
from generate_vision import END, IMAGE, START, draw

# Every image is a square with this many patches on a side, and squares of patches become one token.
SIDE, SCALE = 6, 3
IMAGES = {"one": 1, "two": 2, "decode": 3}


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    write(HERE / "idefics3", seed=203)
    readable()


def write(folder, seed):
    """Writes an Idefics3, which SmolVLM is: Llama, and SigLIP without a rotary embedding."""
    fresh(folder)
    text = COMMON | dict(model_type="llama", num_hidden_layers=3, head_dim=16, rms_norm_eps=1e-5)
    vision = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, patch_size=4,
                  image_size=4 * SIDE)
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=SCALE, tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    model = Idefics3ForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    stored = {name: rounded(value, "bf16") for name, value in draw(model, seed).items()}
    save_torch(stored, folder / "model.safetensors")
    write_json(folder / "config.json", as_config(json.loads(config.to_json_string(use_diff=False))))
    missing, unexpected = model.load_state_dict({name: value.float() for name, value in stored.items()}, strict=False)
    assert not unexpected and not missing, (missing, unexpected)
    tensors = {}
    random = np.random.default_rng(1000 + seed)
    for name, images in IMAGES.items():
        case(tensors, name, model, images, random)
    case(tensors, "text", model, 0, random)
    save_file(tensors, folder / "golden.safetensors")


def case(tensors, name, model, images, random):
    """Adds a prompt with a number of images: ids, patches in blocks of merged patches, encoder outputs and logits."""
    ids = list(random.integers(3, 300, size=5))
    for _ in range(images):
        ids += [START] + [IMAGE] * (SIDE // SCALE) ** 2 + [END] + list(random.integers(3, 300, size=4))
    ids += list(random.integers(3, 300, size=24))
    ids = np.array(ids, dtype=np.int32)
    inputs = dict(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
    if images:
        pixels = random.integers(0, 256, size=(images, 3, 4 * SIDE, 4 * SIDE), dtype=np.uint8)
        inputs["pixel_values"] = torch.from_numpy((pixels.astype(np.float32) - 127.5) / 127.5)[None]
        features = model.model.get_image_features(inputs["pixel_values"])
        # Axes: image, channel, row and column of a block, of a patch in it, and of a pixel in that.
        cells = pixels.reshape(images, 3, SIDE // SCALE, SCALE, 4, SIDE // SCALE, SCALE, 4)
        patches = cells.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(images * SIDE**2, 3 * 4 * 4)
        tensors |= {f"{name}.patches": np.ascontiguousarray(patches)}
        tensors |= {f"{name}.grids": np.array([(SIDE, SIDE)] * images, dtype=np.int32)}
        tensors[f"{name}.merged"] = torch.cat(list(features.pooler_output)).numpy()
    logits = model(**inputs).logits[0].float().numpy()
    assert logits.shape == (len(ids), VOCAB)
    tensors |= {f"{name}.input_ids": ids, f"{name}.logits": logits}
    print(f"{name}: {len(ids)} tokens, standard deviation of the logits {logits.std():.2f}")


def as_config(written):
    """Returns a config.json with the keys that published ones have."""
    text_keys = [
        "attention_bias", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
        "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers",
        "num_key_value_heads", "rms_norm_eps", "rope_parameters", "vocab_size",
    ]
    vision_keys = [
        "hidden_act", "hidden_size", "image_size", "intermediate_size", "layer_norm_eps", "model_type",
        "num_attention_heads", "num_channels", "num_hidden_layers", "patch_size",
    ]
    text, vision = written["text_config"], written["vision_config"]
    config = {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "dtype": "bfloat16"}
    config |= {key: written[key] for key in ["image_token_id", "scale_factor", "tie_word_embeddings"]}
    config["text_config"] = {key: text[key] for key in text_keys if key in text}
    return config | {"vision_config": {key: vision[key] for key in vision_keys}}


if __name__ == "__main__":
    main()
