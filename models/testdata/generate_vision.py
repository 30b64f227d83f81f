#!/usr/bin/env python3
"""Generates the tiny checkpoints with a vision encoder and their golden numbers.

    python generate_vision.py

It needs the packages of generate.py, and has the same rules: fixed seeds, weights drawn by numpy and rounded to their
storage type, PyTorch in f32 on one thread. README.md describes the files and the output.
"""

import base64
import io
import json
import math

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

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
    chat(HERE / "qwen3-vl")
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
        elif any(part in name for part in ("embed_tokens", "pos_embed", "position_embedding")):
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


# The settings of the tiny image processor: images have 1024 to 4096 pixels, which are 16 to 64 tokens.
PROCESSOR = dict(
    size=dict(shortest_edge=1024, longest_edge=4096), patch_size=4, temporal_patch_size=2, merge_size=2,
    image_mean=[0.5] * 3, image_std=[0.5] * 3, rescale_factor=1 / 255, resample=3,
    do_resize=True, do_rescale=True, do_normalize=True, do_convert_rgb=True,
)
SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}\
{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Tokens of an answer, each of which PyTorch prefers to all others by this much.
ANSWER, MARGIN = 8, 0.3


def chat(folder):
    """Writes what a server needs for conversations with images, and chat.json: requests with PyTorch's answers."""
    tokenizer = byte_tokenizer()
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    write_json(folder / "generation_config.json", {"eos_token_id": [305]})
    write_json(folder / "preprocessor_config.json", PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer))
    model = loaded(folder)
    image = {"type": "image"}
    text = lambda words: {"type": "text", "text": words}
    cases = {
        "one": [dict(role="user", content=[text("What is this?"), image, text("Say it.")])],
        "two": [dict(role="user", content=[image, text("and"), image, text("?")]), dict(role="assistant", content="ab"),
                dict(role="user", content="Which?")],
        "same": [dict(role="user", content=[image, text("a")]), dict(role="user", content=[image])],
    }
    write_json(folder / "chat.json", [answered(model, tokenizer, name, messages) for name, messages in cases.items()])


def byte_tokenizer(special=SPECIAL, last_pair="ch"):
    """Returns a byte-level tokenizer: all bytes, 44 pairs of letters, and the tokens of images and messages."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    pairs = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic".split()
    pairs += ["ne", "ea", "ra", "ce", "li", last_pair]
    vocab = {letters[byte]: byte for byte in range(256)} | {pair: 256 + at for at, pair in enumerate(pairs)}
    assert len(vocab) == 300
    extra = [f"<|extra_{at}|>" for at in range(VOCAB - 300 - len(special))]
    added = [
        dict(id=300 + at, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        for at, content in enumerate(special + extra)
    ]
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    return dict(
        version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=None, pre_tokenizer=level,
        post_processor=None, decoder=level,
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                   fuse_unk=False, byte_fallback=False, ignore_merges=False, vocab=vocab, merges=[list(p) for p in pairs]),
    )


def loaded(folder):
    """Returns the checkpoint in f32."""
    config = Qwen3VLConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    return Qwen3VLForConditionalGeneration.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def answered(model, tokenizer, name, messages):
    """Returns a request and its answer. Pixels are drawn until all tokens of the answer are clear."""
    processor = Qwen2VLImageProcessor(**PROCESSOR)
    assert type(processor).__name__ == "Qwen2VLImageProcessor"
    count = sum(part["type"] == "image" for message in messages if isinstance(message["content"], list)
                for part in message["content"])
    for seed in range(1000):
        random = np.random.default_rng(7000 + seed)
        images = [picture(random, size) for size in [(44, 30), (30, 70)][:count]]
        images = [images[0]] * count if name == "same" else images
        inputs = processor(images=images, return_tensors="pt")
        grids = inputs["image_grid_thw"]
        ids = prompt(tokenizer, messages, [int(grid.prod()) // MERGE**2 for grid in grids])
        answer = greedy(model, ids, inputs)
        if answer is not None:
            break
    print(f"{name}: {len(ids)} tokens, pixels of draw {seed}")
    return dict(name=name, messages=with_urls(messages, images), prompt_tokens=len(ids), images=count, answer=answer)


def with_urls(messages, images):
    """Returns messages with the data URLs of images in the place of their parts."""
    urls = iter(images)
    return [
        message if isinstance(message["content"], str) else message | {"content": [
            {"type": "image_url", "image_url": {"url": data_url(next(urls))}} if part["type"] == "image" else part
            for part in message["content"]]}
        for message in messages
    ]


def picture(random, size):
    """Returns an image of noise on a gradient."""
    width, height = size
    gradient = np.linspace(0, 160, width)[None, :, None] * random.random(3)
    return Image.fromarray((gradient + random.integers(0, 90, (height, width, 3))).astype(np.uint8))


def data_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def prompt(tokenizer, messages, counts):
    """Returns the tokens of a conversation, as TEMPLATE renders it, with so many for each image."""
    counts = iter(counts)
    text = ""
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text += f"<|im_start|>{message['role']}\n"
        for part in parts:
            pads = "<|image_pad|>" * next(counts) if part["type"] == "image" else ""
            text += f"<|vision_start|>{pads}<|vision_end|>" if pads else part["text"]
        text += "<|im_end|>\n"
    return tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids


def greedy(model, ids, inputs):
    """Returns the most likely answer, or None if one of its tokens is not clear or ends it."""
    ids, answer = list(ids), []
    for _ in range(ANSWER):
        tokens = torch.tensor([ids])
        model.model.rope_deltas = None
        logits = model(
            input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).int(), pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
        ).logits[0, -1].float()
        best = torch.topk(logits, 2)
        token = int(best.indices[0])
        if best.values[0] - best.values[1] < MARGIN or token >= 300:
            return None
        answer.append(token)
        ids.append(token)
    return answer


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
