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
from tokenizers import Tokenizer
from transformers import (
    Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessor, Idefics3Processor,
    PreTrainedTokenizerFast,
)

from generate import COMMON, HERE, VOCAB, fresh, readable, rounded, save_torch, write_json
from generate_vision import ANSWER, END, IMAGE, MARGIN, START, byte_tokenizer, draw, picture, with_urls

# Every image is a square with this many patches on a side, and squares of patches become one token.
SIDE, SCALE = 6, 3
IMAGES = {"one": 1, "two": 2, "decode": 3}
# The side of a tile in pixels. Some published encoders, too, have tiles that end within a patch.
TILE = 4 * SIDE + 2


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    write(HERE / "idefics3", seed=203)
    chat(HERE / "idefics3")
    readable()


def write(folder, seed):
    """Writes an Idefics3, which SmolVLM is: Llama, and SigLIP without a rotary embedding."""
    fresh(folder)
    text = COMMON | dict(model_type="llama", num_hidden_layers=3, head_dim=16, rms_norm_eps=1e-5)
    vision = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, patch_size=4,
                  image_size=TILE)
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


PROCESSOR = dict(
    size=dict(longest_edge=60), max_image_size=dict(longest_edge=TILE), do_image_splitting=True, do_pad=True,
    image_mean=[0.5] * 3, image_std=[0.5] * 3, rescale_factor=1 / 255, resample=1,
    do_resize=True, do_rescale=True, do_normalize=True, do_convert_rgb=True,
)
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|im_start|>"]
SPECIAL += [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
TEMPLATE = """<|im_start|>{% for message in messages %}{{ message.role | capitalize }}: \
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""


def chat(folder):
    """Writes what a server needs for conversations with images, and chat.json: requests with PyTorch's answers."""
    # The line feeds after the last row of tiles become one token.
    tokenizer = byte_tokenizer(SPECIAL, last_pair="ĊĊ")
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end_of_utterance>"})
    write_json(folder / "generation_config.json", {"eos_token_id": [303]})
    write_json(folder / "preprocessor_config.json", PROCESSOR | {"image_processor_type": "Idefics3ImageProcessor"})
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer)))
    model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    image = {"type": "image"}
    text = lambda words: {"type": "text", "text": words}
    user = lambda *parts: dict(role="user", content=list(parts))
    # The sizes of the images, the settings that differ, and the conversation.
    cases = {
        "tiled": ([(70, 30)], {}, [user(text("What is this?"), image, text("Say it."))]),
        "small": ([(9, 12)], {}, [user(image, text("a"))]),
        "two": ([(44, 31), (20, 75)], {}, [user(image, text("and"), image), dict(role="assistant", content="ab"),
                                          user(text("Which?"))]),
        "whole": ([(70, 30)], dict(do_image_splitting=False), [user(text("What is this?"), image)]),
        "single": ([(70, 30)], dict(size=dict(longest_edge=24)), [user(text("What is this?"), image)]),
        "taller": ([(20, 75)], dict(size=dict(longest_edge=78), max_image_size=dict(longest_edge=27)), [user(image)]),
    }
    write_json(folder / "chat.json", [answered(model.eval(), tokenizer, name, *case) for name, case in cases.items()])


def answered(model, tokenizer, name, sizes, settings, messages):
    """Returns a request and its answer. Pixels are drawn until all tokens of the answer are clear."""
    images = Idefics3ImageProcessor(**PROCESSOR | settings)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=(SIDE // SCALE) ** 2, chat_template=TEMPLATE)
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    for seed in range(1000):
        random = np.random.default_rng(8000 + seed)
        pictures = [picture(random, size) for size in sizes]
        inputs = processor(text=[prompt], images=[pictures], return_tensors="pt", add_special_tokens=False)
        answer = greedy(model, inputs)
        if answer is not None:
            break
    ids = inputs["input_ids"][0].tolist()
    views = inputs["pixel_values"].shape[1]
    assert ids.count(IMAGE) == views * (SIDE // SCALE) ** 2
    print(f"{name}: {len(ids)} tokens, {views} views, pixels of draw {seed}")
    request = with_urls(messages, pictures)
    return dict(name=name, settings=settings, messages=request, prompt_tokens=len(ids), answer=answer)


def greedy(model, inputs):
    """Returns the most likely answer, or None if one of its tokens is not clear or ends it."""
    ids, answer = inputs["input_ids"], []
    for _ in range(ANSWER):
        logits = model(input_ids=ids, pixel_values=inputs["pixel_values"],
                       pixel_attention_mask=inputs["pixel_attention_mask"]).logits[0, -1].float()
        best = torch.topk(logits, 2)
        token = int(best.indices[0])
        if best.values[0] - best.values[1] < MARGIN or token >= IMAGE:
            return None
        answer.append(token)
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    return answer


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
