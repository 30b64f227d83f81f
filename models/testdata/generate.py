#!/usr/bin/env python3
"""Generates the tiny checkpoints and the golden numbers for the parity tests of octavo-models.

    python generate.py tiny                     # the tiny checkpoints; offline
    python generate.py real NAME --gguf FILE    # NAME.safetensors, from the GGUF file of a real model

The result is deterministic: seeds are fixed, and numpy generates random weights that are rounded to their storage type
before PyTorch uses them. PyTorch computes in f32 on one thread. The files were generated with these versions; others may
change the last digits:

    python -m pip install torch==2.15.0 transformers==5.23.0 gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0 tokenizers==0.23.3 torchvision==0.29.2 pillow==13.0.0

README.md describes the files and the output.
"""

import argparse
import json
import math
import pathlib
import shutil

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

HERE = pathlib.Path(__file__).resolve().parent
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 320
TOKENS = 56
CORPUS = [
    "The octavo is a sheet folded three times into eight leaves, sixteen pages.",
    "A block of the cache holds sixteen tokens; a table lists the blocks of a sequence.",
    "Die Blätter eines Buches, les feuilles d'un livre, las hojas de un libro.",
    "fn main() { println!(\"{}\", 1 + 2); }  // 3\n",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


def rope(kind="default", theta=10000.0, **parameters):
    return dict(rope_type=kind, rope_theta=theta, **parameters)


# name → (config, storage type, form of config.json, shards)
CHECKPOINTS = {
    "llama": (LlamaConfig(**(COMMON | dict(intermediate_size=80)), rope_parameters=rope()), "bf16", 5, 1),
    "llama3-rope": (
        LlamaConfig(**COMMON, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE),
        "bf16",
        4,
        1,
    ),
    "llama-linear": (
        LlamaConfig(**COMMON, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
                    rope_parameters=rope("linear", factor=4.0)),
        "f16",
        4,
        1,
    ),
    "llama-yarn": (
        LlamaConfig(**COMMON, tie_word_embeddings=True,
                    rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64,
                                         beta_fast=8.0, beta_slow=1.0)),
        "bf16",
        5,
        1,
    ),
    "mistral": (
        MistralConfig(**(COMMON | dict(num_hidden_layers=3, intermediate_size=64)), tie_word_embeddings=True, sliding_window=16,
                      rope_parameters=rope(theta=1e6)),
        "bf16",
        5,
        1,
    ),
    "qwen2": (
        Qwen2Config(**COMMON, tie_word_embeddings=True, rope_parameters=rope(theta=1e6)), "bf16", 4, 1,
    ),
    # The model has two KV groups: a layer with full attention, and one with a window.
    "qwen2-window": (
        Qwen2Config(**COMMON, tie_word_embeddings=True, use_sliding_window=True, sliding_window=16,
                    max_window_layers=1, rope_parameters=rope(theta=1e6)),
        "bf16",
        5,
        1,
    ),
    "qwen3": (
        Qwen3Config(**(COMMON | dict(num_attention_heads=3, num_key_value_heads=1)), head_dim=32,
                    tie_word_embeddings=True, rope_parameters=rope(theta=1e6)),
        "bf16",
        5,
        1,
    ),
    "qwen3-sharded": (
        Qwen3Config(**(COMMON | dict(hidden_size=32, intermediate_size=48, num_attention_heads=2)), head_dim=16,
                    rope_parameters=rope(theta=1e6)),
        "f32",
        5,
        2,
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tiny")
    real_parser = commands.add_parser("real")
    real_parser.add_argument("name", choices=REAL)
    real_parser.add_argument("--gguf", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if arguments.command == "real":
        real(arguments.name, arguments.gguf)
        return
    tokenizer = train_tokenizer()
    for seed, (name, (config, storage, form, shards)) in enumerate(CHECKPOINTS.items(), start=1):
        hugging_face(HERE / name, config, storage, form, shards, tokenizer, seed)
    gguf_llama(HERE / "llama-gguf", tokenizer, seed=101)
    gguf_qwen2(HERE / "qwen2-gguf", tokenizer, seed=102)
    gguf_blocks(HERE / "blocks.safetensors", seed=103)
    readable()


# --- weights and goldens ---


def draw(model, seed):
    """Returns random weights that keep activations near 1 and give logits a spread of a few units."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name.endswith("norm.weight") or "layernorm" in name.lower() and not name.endswith("bias"):
            value = 1.0 + 0.2 * random.standard_normal(shape)
        elif name.endswith("bias"):
            value = 0.3 * random.standard_normal(shape)
        elif "embed_tokens" in name:
            value = 0.5 * random.standard_normal(shape)
        else:
            value = 1.5 * random.standard_normal(shape) / math.sqrt(shape[-1])
        weights[name] = value.astype(np.float32)
    return weights


def rounded(values, storage):
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[storage]
    return torch.from_numpy(values).to(kind)


def new_model(config):
    config._attn_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def golden(path, model, weights, seed):
    """Writes the logits of every position of one random prompt, computed with the given f32 weights."""
    state = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing), (missing, unexpected)
    model.tie_weights()
    ids = np.random.default_rng(1000 + seed).integers(len(SPECIALS), VOCAB, size=TOKENS)
    logits = model(torch.from_numpy(ids)[None]).logits[0].float().numpy()
    save_file({"input_ids": ids.astype(np.int32), "logits": logits}, path)
    print(f"{path.parent.name}: logits of {TOKENS} tokens, standard deviation {logits.std():.2f}")


def hugging_face(folder, config, storage, form, shards, tokenizer, seed):
    fresh(folder)
    model = new_model(config)
    stored = {name: rounded(value, storage) for name, value in draw(model, seed).items()}
    if shards == 1:
        save_torch(stored, folder / "model.safetensors")
    else:
        save_sharded(stored, folder, shards)
    written = json.loads(config.to_json_string(use_diff=False))
    write_json(folder / "config.json", as_config(written, storage, form, type(model).__name__))
    golden(folder / "golden.safetensors", model, {n: t.float().numpy() for n, t in stored.items()}, seed)
    if folder.name in ("llama", "qwen3"):
        save_tokenizer(folder, tokenizer, jinja=folder.name == "qwen3")


def as_config(written, storage, form, class_name):
    """Returns a config.json with the keys of a decoder, in the form of transformers 5 or 4."""
    dtype = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[storage]
    keys = [
        "attention_bias", "attention_multiplier", "attn_logit_softcapping", "bos_token_id", "embedding_multiplier",
        "eos_token_id", "final_logit_softcapping", "head_dim", "hidden_act", "hidden_activation", "hidden_size",
        "intermediate_size", "layer_types", "logits_scaling", "max_position_embeddings", "max_window_layers", "mlp_bias",
        "model_type", "no_rope_layers", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "original_max_position_embeddings", "pad_token_id", "query_pre_attn_scalar", "residual_multiplier",
        "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
    ]
    config = {"architectures": [class_name]} | {key: written[key] for key in keys if key in written}
    if form == 5:
        return config | {"dtype": dtype}
    parameters = dict(config.pop("rope_parameters"))
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    config.pop("layer_types", None)
    return config | {"torch_dtype": dtype}


def save_torch(tensors, path):
    from safetensors.torch import save_file as save

    save(tensors, path, metadata={"format": "pt"})


def save_sharded(tensors, folder, shards):
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        save_torch({name: tensors[name] for name in part}, folder / file)
        weight_map |= {name: file for name in part}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(folder / "model.safetensors.index.json",
               {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})


# --- tokenizer ---


def train_tokenizer():
    """Returns a byte-level BPE with VOCAB entries; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=VOCAB, show_progress=False, initial_alphabet=alphabet,
                            special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIALS]),
    )
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def save_tokenizer(folder, tokenizer, jinja):
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "add_bos_token": False,
    }
    # If both forms exist, the file has priority, so this one must never be rendered.
    config["chat_template"] = "shadowed by chat_template.jinja" if jinja else [
        {"name": "tool_use", "template": "not the default"},
        {"name": "default", "template": TEMPLATE},
    ]
    if jinja:
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json",
               {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [2, 0]})


# --- GGUF ---


def gguf_llama(folder, tokenizer, seed):
    """Writes a Llama with permuted q and k, Llama 3 frequency factors and a tied head, in mixed storage types."""
    config = LlamaConfig(**COMMON, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE)
    types = dict(token_embd=Q.Q8_0, attn_q=Q.Q4_1, attn_k=Q.Q8_0, attn_v=Q.F16, attn_output=Q.Q5_1, ffn_gate=Q.Q4_0,
                 ffn_up=Q.BF16, ffn_down=Q.Q5_0)
    gguf_file(folder, "llama", config, types, tokenizer, seed, permute=True)


def gguf_qwen2(folder, tokenizer, seed):
    """Writes a Qwen2 with q, k and v biases and an untied head."""
    config = Qwen2Config(**COMMON, tie_word_embeddings=False, rope_parameters=rope(theta=1e6))
    types = dict(token_embd=Q.F16, output=Q.Q8_0, attn_q=Q.Q8_0, attn_k=Q.Q4_0, attn_v=Q.F32, attn_output=Q.Q4_1,
                 ffn_gate=Q.Q8_0, ffn_up=Q.Q8_0, ffn_down=Q.F16)
    gguf_file(folder, "qwen2", config, types, tokenizer, seed, permute=False)


def gguf_file(folder, arch, config, types, tokenizer, seed, permute, head=None):
    """Writes the GGUF file of a random model. `head` adds the keys of its family."""
    fresh(folder)
    model = new_model(config)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch),
                                     config.num_hidden_layers)
    writer = gguf.GGUFWriter(folder / "model.gguf", arch)
    writer.add_name(f"tiny {arch}")
    parameters = add_sizes(writer, config)
    if head is not None:
        head(writer, config, arch)
    add_vocabulary(writer, tokenizer)

    dequantised = {}
    for name, value in draw(model, seed).items():
        stem, kind = names.get_name(name.removesuffix(".weight").removesuffix(".bias")), name.rsplit(".", 1)[1]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        count = next((n for part, n in heads.items() if part in name), None)
        move = permute and count is not None
        stored = permuted(value, count) if move else value
        storage = types.get(stem.rsplit(".", 1)[-1], Q.F32) if kind == "weight" else Q.F32
        if plus_one(arch, name):
            # The converter adds the 1 of the factor `1 + w`.
            stored = stored + np.float32(1.0)
        data = gguf.quants.quantize(np.ascontiguousarray(stored), storage)
        writer.add_tensor(f"{stem}.{kind}", data, raw_dtype=storage)
        read_back = gguf.quants.dequantize(data, storage).astype(np.float32).reshape(value.shape)
        if plus_one(arch, name):
            read_back -= 1.0
        dequantised[name] = unpermuted(read_back, count) if move else read_back
    if parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    if parameters["rope_type"] == "longrope":
        for length in ["long", "short"]:
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(parameters[f"{length}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    golden(folder / "golden.safetensors", model, dequantised, seed)


def add_sizes(writer, config):
    """Adds the keys that every family has. Returns the parameters of the rotary embedding."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_freq_base(parameters["rope_theta"])
    writer.add_rope_dimension_count(int(dim * parameters.get("partial_rotary_factor", 1.0)))
    return parameters


def plus_one(arch, name):
    return arch.startswith("gemma") and (name.endswith("norm.weight") or "layernorm" in name)


def permuted(weight, heads):
    """Permutes the rows of each head from (half, pair) to (pair, half), for rotation of neighbours instead of halves."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight, heads):
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def llama3_factors(config):
    """Returns the divisors of the frequencies, pair by pair."""
    p = config.rope_parameters
    dim = config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / p["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    rotations = p["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = np.clip((rotations - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"]), 0, 1)
    return (1.0 / ((1 - kept) / p["factor"] + kept)).astype(np.float32)


def add_vocabulary(writer, tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIALS else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def gguf_blocks(path, seed):
    """Writes random blocks of every storage type, and the numbers that the gguf package reads from them."""
    random = np.random.default_rng(seed)
    # Byte offsets of the f16 scales in a block, where random bytes could be infinite.
    scales = {
        Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0], Q.Q2_K: [80, 82], Q.Q3_K: [108],
        Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208], Q.IQ4_NL: [0], Q.IQ4_XS: [0], Q.MXFP4: [],
        Q.IQ1_S: [0], Q.IQ1_M: [], Q.IQ2_XXS: [0], Q.IQ2_XS: [0], Q.IQ2_S: [0], Q.IQ3_XXS: [0], Q.IQ3_S: [0],
    }
    out = {}
    for kind in [Q.F32, Q.F16, Q.BF16, *scales]:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        if elements == 1:
            values = random.standard_normal(64).astype(np.float32)
            data = gguf.quants.quantize(values, kind).view(np.uint8).reshape(-1)
        else:
            data = random.integers(0, 256, size=(4, size), dtype=np.uint8)
            for at in scales[kind]:
                scale = random.uniform(-0.1, 0.1, size=(4, 1)).astype(np.float16)
                data[:, at:at + 2] = scale.view(np.uint8).reshape(4, 2)
            if kind == Q.MXFP4:
                data[:, 0] = [0, 1, 120, 130]
            if kind == Q.IQ1_M:
                # A quarter of the scale is in the upper half of every other byte. This one is less than 1.
                data[:, 55] = data[:, 55] & 15 | 0x20
            data = data.reshape(-1)
        typed = data.view({Q.F32: np.float32, Q.F16: np.float16}.get(kind, np.uint8))
        out[f"{kind.name}.bytes"] = data
        out[f"{kind.name}.values"] = gguf.quants.dequantize(typed, kind).astype(np.float32).reshape(-1)
    save_file(out, path)
    print(f"{path.name}: {len(out) // 2} storage types")


# --- the default model ---

CONTINUATION = 24
TOP = 8
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Give me three tips for sleeping well.",
    "Explain gravity to a child in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What is 17 + 25?",
    "Qui a écrit Les Misérables ?",
    "Was ist die Hauptstadt von Österreich?",
    "¿Cuál es el río más largo de España?",
    "日本の首都はどこですか？",
    "Столица России?",
    "Write a Python function that reverses a string.",
]
TEXTS = [
    "Once upon a time, in a small village by the river,",
    "The three primary colors are",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "SELECT name, age FROM users WHERE",
    "In 1969, Neil Armstrong became the first person to",
    "Water boils at 100 degrees Celsius because",
    "La photosynthèse est le processus par lequel",
    "Der Rhein ist ein Fluss, der",
    "#include <stdio.h>\n\nint main(void) {\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "{\"name\": \"Ada\", \"born\": 1815, \"field\":",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Dear Sir or Madam,\n\nI am writing to",
    "😀 is an emoji that means",
]


# Real models: chats and texts, or one long text; weights as in the file, or rounded to bf16.
REAL = {
    "smollm2": dict(chats=CHATS, texts=TEXTS),
    "smollm2-bf16": dict(chats=CHATS, texts=TEXTS, bf16=True),
    "smollm2-long": dict(long=["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "models/README.md"]),
    "gemma3-270m": dict(texts=TEXTS, special=True),
}
# Tokens of a long text, and the distance of the positions that are compared.
LONG, APART = 8000, 61


def real(name, path):
    """Writes the most likely tokens at the positions of texts: greedy continuations of varied prompts, or a long text."""
    from transformers import AutoTokenizer, GgufConfig

    settings = REAL[name]
    load = dict(gguf_file=path.name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **load)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, **load, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32,
        attn_implementation="sdpa" if "long" in settings else "eager",
    ).eval()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    if settings.get("bf16"):
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    encode = lambda text: tokenizer(text, add_special_tokens=settings.get("special", False))["input_ids"]
    texts, lengths = [], []
    if "long" in settings:
        tokens = encode("".join((HERE.parents[1] / file).read_text(encoding="utf-8") for file in settings["long"]))
        assert len(tokens) >= LONG, len(tokens)
        texts.append(tokens[:LONG])
    for prompt in prompts_of(tokenizer, settings):
        tokens = list(encode(prompt))
        lengths.append(len(tokens))
        # Every token counts, including the end-of-sequence token, because this tests numbers and not chat.
        for _ in range(CONTINUATION):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        texts.append(tokens)
        print(repr(tokenizer.decode(tokens[lengths[-1]:])))
    tensors = {
        "ids": np.array(sum(texts, []), dtype=np.int32),
        "starts": np.cumsum([0] + [len(tokens) for tokens in texts]).astype(np.int32),
    }
    if lengths:
        tensors["prompt_lengths"] = np.array(lengths, dtype=np.int32)
    top_ids, top_logprobs, positions = [], [], []
    for start, tokens in zip(tensors["starts"], texts):
        compared = range(len(tokens)) if lengths else range(len(tokens) - 1, 0, -APART)[::-1]
        logits = model(torch.tensor([tokens])).logits[0, list(compared)]
        values, indices = torch.log_softmax(logits.double(), dim=-1).topk(TOP, dim=-1)
        positions += [int(start) + at for at in compared]
        top_ids.append(indices.numpy().astype(np.int32))
        top_logprobs.append(values.float().numpy())
    tensors["top_ids"], tensors["top_logprobs"] = np.concatenate(top_ids), np.concatenate(top_logprobs)
    if not lengths:
        tensors["positions"] = np.array(positions, dtype=np.int32)
    prompts = json.dumps(prompts_of(tokenizer, settings), ensure_ascii=False)
    save_file(tensors, HERE / f"{name}.safetensors", metadata={"prompts": prompts})
    readable()
    print(f"{len(texts)} texts, {len(tensors['ids'])} positions, {len(positions)} compared")


def prompts_of(tokenizer, settings):
    chat = lambda text: tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
    return [chat(text) for text in settings.get("chats", [])] + settings.get("texts", [])


# --- files ---


def fresh(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def readable():
    """Makes the files readable for everyone; safetensors writes them readable for their owner only."""
    for path in HERE.rglob("*.safetensors"):
        path.chmod(0o644)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
