#!/usr/bin/env python3
"""Generates the tiny Gemma 3 with images, as a folder and as a GGUF file with its mmproj file, and its golden numbers.

    python generate_gemma3.py

It needs the packages of generate.py, and has the same rules as generate_vision.py. README.md describes the files and the
output.
"""

import json

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from transformers import (
    Gemma3Config, Gemma3ForConditionalGeneration, Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast,
)

from generate import COMMON, HERE, VOCAB, fresh, readable, rounded, save_torch, write_json
from generate_mmproj import add, add_vocabulary, finish, read
from generate_vision import ANSWER, MARGIN, byte_tokenizer, draw, picture, with_urls

FOLDER, TARGET = HERE / "gemma3-images", HERE / "gemma3-images-gguf"
NAME = "Tiny Gemma 3"
IMAGE, START, END = 300, 301, 302
SPECIAL = ["<image_soft_token>", "<start_of_image>", "<end_of_image>", "<start_of_turn>", "<end_of_turn>", "<bos>"]
# Every image is a square with this many patches on a side, and squares of patches become one token.
SIDE, SCALE, PATCH = 8, 2, 4
TOKENS = (SIDE // SCALE) ** 2
IMAGES = {"one": 1, "two": 2, "decode": 1}
# The configuration as published files have it: it omits the defaults of its class.
CONFIG = dict(
    architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", eos_token_id=[304], torch_dtype="bfloat16",
    boi_token_index=START, eoi_token_index=END, image_token_index=IMAGE, mm_tokens_per_image=TOKENS,
    text_config=dict(model_type="gemma3_text", vocab_size=VOCAB, hidden_size=64, intermediate_size=96,
                     num_hidden_layers=3, head_dim=32, num_attention_heads=4, num_key_value_heads=2,
                     query_pre_attn_scalar=32, sliding_window=20, sliding_window_pattern=3,
                     max_position_embeddings=COMMON["max_position_embeddings"],
                     rope_scaling=dict(rope_type="linear", factor=8.0)),
    vision_config=dict(model_type="siglip_vision_model", hidden_size=48, intermediate_size=80, num_hidden_layers=3,
                       num_attention_heads=4, image_size=SIDE * PATCH, patch_size=PATCH, vision_use_head=False),
)


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    write(FOLDER, seed=292)
    chat(FOLDER)
    convert(FOLDER, TARGET)
    readable()


def loaded_config():
    config = Gemma3Config.from_dict(CONFIG)
    config._attn_implementation = "eager"
    return config


def write(folder, seed):
    """Writes the model under the names that published files have."""
    fresh(folder)
    model = Gemma3ForConditionalGeneration._from_config(loaded_config(), dtype=torch.float32).eval()
    stored = {name: rounded(value, "bf16") for name, value in weights(model, seed).items()}
    save_torch({published(name): value for name, value in stored.items()}, folder / "model.safetensors")
    write_json(folder / "config.json", CONFIG)
    missing, unexpected = model.load_state_dict({name: value.float() for name, value in stored.items()}, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing), (missing, unexpected)
    model.tie_weights()
    tensors = {}
    random = np.random.default_rng(1000 + seed)
    for name, images in IMAGES.items():
        case(tensors, name, model, images, random)
    case(tensors, "text", model, 0, random)
    save_file(tensors, folder / "golden.safetensors")


def weights(model, seed):
    """Draws weights. Those of Gemma's norms are added to 1."""
    drawn = draw(model, seed)
    for name, value in drawn.items():
        if name.endswith("norm.weight") and "vision_model" not in name and "vision_tower" not in name:
            drawn[name] = value - 1
    return drawn


def published(name):
    """Returns the name of a tensor in files of the hub."""
    name = name.removeprefix("model.")
    if name.startswith("language_model."):
        return name.replace("language_model.", "language_model.model.", 1)
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return name


def case(tensors, name, model, images, random):
    """Adds a prompt with a number of images: ids, patches in blocks of merged patches, encoder outputs and logits."""
    ids = list(random.integers(3, 300, size=5))
    for _ in range(images):
        ids += [START] + [IMAGE] * TOKENS + [END] + list(random.integers(3, 300, size=4))
    ids += list(random.integers(3, 300, size=24))
    ids = np.array(ids, dtype=np.int32)
    inputs = dict(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
    inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    if images:
        pixels = random.integers(0, 256, size=(images, 3, PATCH * SIDE, PATCH * SIDE), dtype=np.uint8)
        inputs["pixel_values"] = torch.from_numpy((pixels.astype(np.float32) - 127.5) / 127.5)
        features = model.model.get_image_features(inputs["pixel_values"])
        # Axes: image, channel, row and column of a block, of a patch in it, and of a pixel in that.
        cells = pixels.reshape(images, 3, SIDE // SCALE, SCALE, PATCH, SIDE // SCALE, SCALE, PATCH)
        patches = cells.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(images * SIDE**2, 3 * PATCH * PATCH)
        tensors |= {f"{name}.patches": np.ascontiguousarray(patches)}
        tensors |= {f"{name}.grids": np.array([(SIDE, SIDE)] * images, dtype=np.int32)}
        tensors[f"{name}.merged"] = torch.cat(list(features.pooler_output)).numpy()
    logits = model(**inputs).logits[0].float().numpy()
    assert logits.shape == (len(ids), VOCAB)
    tensors |= {f"{name}.input_ids": ids, f"{name}.logits": logits}
    print(f"{name}: {len(ids)} tokens, standard deviation of the logits {logits.std():.2f}")


PROCESSOR = dict(
    size=dict(height=SIDE * PATCH, width=SIDE * PATCH), image_mean=[0.5] * 3, image_std=[0.5] * 3,
    rescale_factor=1 / 255, resample=2, do_resize=True, do_rescale=True, do_normalize=True, do_convert_rgb=True,
    do_pan_and_scan=False,
)
# Published files have null for what is off, and the length of an image.
WRITTEN = PROCESSOR | dict(
    do_pan_and_scan=None, do_convert_rgb=None, pan_and_scan_max_num_crops=None, pan_and_scan_min_crop_size=None,
    pan_and_scan_min_ratio_to_activate=None, image_seq_length=TOKENS, processor_class="Gemma3Processor",
    image_processor_type="Gemma3ImageProcessor",
)
TEMPLATE = """<bos>{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}\
{{ '<start_of_turn>' + role + '\\n' }}{% if message.content is string %}{{ message.content | trim }}{% else %}\
{% for part in message.content %}{% if part.type == 'image' %}{{ '<start_of_image>' }}{% elif part.type == 'text' %}\
{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}{{ '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


def chat(folder):
    """Writes what a server needs for conversations with images, and chat.json: requests with PyTorch's answers."""
    # The line feeds before an image become one token with the one that ends the line of the role.
    tokenizer = byte_tokenizer(SPECIAL, last_pair="ĊĊ")
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": "<end_of_turn>"})
    write_json(folder / "generation_config.json", {"eos_token_id": [304]})
    write_json(folder / "preprocessor_config.json", WRITTEN)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(tokenizer)), bos_token="<bos>", eos_token="<end_of_turn>",
        extra_special_tokens=dict(image_token=SPECIAL[0], boi_token=SPECIAL[1], eoi_token=SPECIAL[2]),
    )
    model = Gemma3ForConditionalGeneration.from_pretrained(folder, config=loaded_config(), dtype=torch.float32).eval()
    image = {"type": "image"}
    text = lambda words: {"type": "text", "text": words}
    user = lambda *parts: dict(role="user", content=list(parts))
    # The sizes of the images and the conversation.
    cases = {
        "one": ([(70, 30)], [user(text("What is this?"), image, text("Say it."))]),
        "first": ([(9, 12)], [user(image, text("a"))]),
        "two": ([(44, 31), (20, 75)], [user(image, text("and"), image), dict(role="assistant", content="ab"),
                                      user(text("Which?"))]),
        "adjacent": ([(32, 32), (64, 64)], [user(image, image)]),
    }
    write_json(folder / "chat.json", [answered(model, tokenizer, name, *case) for name, case in cases.items()])


def answered(model, tokenizer, name, sizes, messages):
    """Returns a request and its answer. Pixels are drawn until all tokens of the answer are clear."""
    processor = Gemma3Processor(Gemma3ImageProcessor(**PROCESSOR), tokenizer, TEMPLATE, image_seq_length=TOKENS)
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    for seed in range(1000):
        random = np.random.default_rng(9000 + seed)
        pictures = [picture(random, size) for size in sizes]
        inputs = processor(text=[prompt], images=[pictures], return_tensors="pt", add_special_tokens=False)
        answer = greedy(model, inputs)
        if answer is not None:
            break
    ids = inputs["input_ids"][0].tolist()
    assert ids.count(IMAGE) == len(sizes) * TOKENS
    print(f"{name}: {len(ids)} tokens, pixels of draw {seed}")
    return dict(name=name, messages=with_urls(messages, pictures), prompt_tokens=len(ids), answer=answer)


def greedy(model, inputs):
    """Returns the most likely answer, or None if one of its tokens is not clear or ends it."""
    ids, types, answer = inputs["input_ids"], inputs["token_type_ids"], []
    for _ in range(ANSWER):
        logits = model(input_ids=ids, token_type_ids=types, pixel_values=inputs["pixel_values"]).logits[0, -1].float()
        best = torch.topk(logits, 2)
        token = int(best.indices[0])
        if best.values[0] - best.values[1] < MARGIN or token >= IMAGE:
            return None
        answer.append(token)
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
        types = torch.cat([types, torch.zeros(1, 1, dtype=types.dtype)], dim=1)
    return answer


# --- GGUF ---

BLOCKS = {"layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
FIXED = {"vision_tower.vision_model.embeddings.patch_embedding": "v.patch_embd",
         "vision_tower.vision_model.embeddings.position_embedding": "v.position_embd",
         "vision_tower.vision_model.post_layernorm": "v.post_ln",
         "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm"}
LAYERS = "vision_tower.vision_model.encoder.layers."


def convert(folder, target):
    """Writes the same values as GGUF files, in the layout of llama.cpp's converter: it adds 1 to Gemma's norms."""
    fresh(target)
    tensors = read(folder / "model.safetensors")
    text = {name: value for name, value in tensors.items() if name.startswith("language_model.")}
    write_text(target / "model.gguf", text)
    vision = {name: value for name, value in tensors.items() if name not in text}
    write_vision(target / "mmproj-BF16.gguf", vision)


def write_text(path, tensors):
    text = CONFIG["text_config"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, text["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GEMMA3])
    writer.add_name(NAME)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(text["rope_scaling"]["factor"])
    writer.add_sliding_window(text["sliding_window"])
    writer.add_uint32("gemma3.attention.sliding_window_pattern", text["sliding_window_pattern"])
    add_vocabulary(writer, {IMAGE: SPECIAL[0], START: SPECIAL[1], END: SPECIAL[2]}, eos=304)
    for name, value in tensors.items():
        stem, kind = name.removeprefix("language_model.").rsplit(".", 1)
        value = value + 1 if name.endswith("norm.weight") else value
        add(writer, f"{names.get_name(stem)}.{kind}", value)
    finish(writer)


def write_vision(path, tensors):
    vision = CONFIG["vision_config"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_name(NAME)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(gguf.VisionProjectorType.GEMMA3)
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(vision["num_hidden_layers"])
    writer.add_vision_head_count(vision["num_attention_heads"])
    writer.add_vision_projection_dim(CONFIG["text_config"]["hidden_size"])
    writer.add_vision_projector_scale_factor(SCALE)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    for name, value in tensors.items():
        if name == "multi_modal_projector.mm_input_projection_weight":
            add(writer, "mm.input_projection.weight", value)
            continue
        stem, kind = name.rsplit(".", 1)
        add(writer, f"{vision_name(stem)}.{kind}", value + 1 if "soft_emb_norm" in name else value)
    finish(writer)


def vision_name(stem):
    if stem in FIXED:
        return FIXED[stem]
    index, part = stem.removeprefix(LAYERS).split(".", 1)
    return f"v.blk.{index}.{BLOCKS[part]}"


if __name__ == "__main__":
    main()
