#!/usr/bin/env python3
"""Generates LoRA adapters for the tiny checkpoints, with the golden numbers of the merged models.

    python generate_adapters.py

It needs the packages of generate_quantised.py and peft==0.21.2, and has the same rules as generate.py. PEFT writes the
adapters and merges them in f32; the merged weights are rounded to the type of the checkpoint. The logits of the base with
an adapter that is not merged are PEFT's own. README.md describes the files.
"""

import json

import gguf
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig

from generate import COMMON, HERE, LLAMA3_ROPE, SPECIALS, TOKENS, VOCAB, draw, fresh, golden, new_model, unpermuted
from generate_quantised import METHODS

ROOT = HERE / "adapters"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# By name: the base, the type of its weights, the settings, and the weights that are stored as PEFT merges them.
ADAPTERS = {
    "patterns": (
        "qwen3-sharded", torch.float32,
        dict(r=8, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"], use_rslora=True,
             rank_pattern={r"layers\.1\..*q_proj": 4}, alpha_pattern={"down_proj": 20}),
        ["model.layers.1.self_attn.q_proj.weight", "lm_head.weight"],
    ),
    "embedding": (
        "qwen2", torch.bfloat16, dict(r=4, lora_alpha=8, target_modules=["embed_tokens", "o_proj"]),
        ["model.embed_tokens.weight"],
    ),
    "qlora": (
        "quantised/nf4", torch.bfloat16, dict(r=16, lora_alpha=64, target_modules=LINEAR),
        ["model.layers.0.mlp.down_proj.weight"],
    ),
    # The file has the rows of q and k in another order. Nothing is merged.
    "permuted": (
        "llama-gguf", torch.float32, dict(r=3, lora_alpha=6, target_modules=["q_proj", "k_proj", "gate_proj"]), None,
    ),
}


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    fresh(ROOT)
    for seed, (name, (base, kind, settings, kept)) in enumerate(ADAPTERS.items(), start=601):
        write(ROOT / name, HERE / base, kind, settings, kept, seed)
    for path in ROOT.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def write(folder, base, kind, settings, kept, seed):
    fresh(folder)
    if base.name.endswith("-gguf"):
        config = LlamaConfig(**COMMON, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE)
        plain = gguf_weights(base / "model.gguf", config)
    else:
        config = AutoConfig.from_pretrained(base)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        plain = weights(base, new_model(config))
    model = new_model(config)
    load(model, plain)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    random = np.random.default_rng(seed)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            parameter.copy_(torch.from_numpy(0.1 * random.standard_normal(tuple(parameter.shape))))
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    settings_path = folder / "adapter_config.json"
    written = json.loads(settings_path.read_text()) | {"base_model_name_or_path": base.name}
    written["target_modules"].sort()
    settings_path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")

    ids = torch.from_numpy(np.random.default_rng(1000 + seed).integers(len(SPECIALS), VOCAB, size=TOKENS))
    unmerged = adapted(ids[None]).logits[0].float().numpy()
    save_file({"input_ids": ids.numpy().astype(np.int32), "logits": unmerged}, folder / "unmerged.safetensors")
    if kept is None:
        return
    logits = lambda model: model(torch.arange(20, 60)[None]).logits
    before = logits(adapted)
    # A tied head keeps the table without the adapter.
    head = plain.get("lm_head.weight", plain["model.embed_tokens.weight"])
    merged = adapted.merge_and_unload()
    if config.tie_word_embeddings:
        config.tie_word_embeddings = False
    names = set(plain) | {"lm_head.weight"}
    after = {name: tensor for name, tensor in merged.state_dict().items() if name in names}
    if "lm_head" not in settings["target_modules"]:
        after["lm_head.weight"] = head
    after = {name: tensor.to(kind).float() for name, tensor in after.items()}
    whole = new_model(config)
    load(whole, after)
    difference = (logits(whole) - before).abs().max() / before.abs().max()
    print(f"{folder.name}: merged and rounded, the logits differ by {difference:.1e}")
    assert difference < 0.02
    values = {name: tensor.numpy() for name, tensor in after.items()}
    save_file({name: values[name] for name in kept}, folder / "expected.safetensors")
    golden(folder / "golden.safetensors", new_model(config), values, seed)


def load(model, tensors):
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()


def gguf_weights(path, config):
    """Returns the weights of a Llama's GGUF file in f32, under the names and in the order of transformers."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stems = {names.get_name(name.rsplit(".", 1)[0]): name for name in new_model(config).state_dict()}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        name = stems.get(tensor.name.rsplit(".", 1)[0])
        if name is None:
            continue
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        count = next((n for part, n in heads.items() if part in name), None)
        found[name] = torch.from_numpy(unpermuted(value, count) if count else value)
    return found


def weights(base, model):
    """Returns the weights of a checkpoint in f32; those of a quantised one as its package reads them."""
    stored = {name: tensor for path in sorted(base.glob("model*.safetensors")) for name, tensor in load_file(path).items()}
    if base.parent.name != "quantised":
        return {name: tensor.float() for name, tensor in stored.items()}
    quantise, seed = METHODS[base.name][0], 501 + list(METHODS).index(base.name)
    drawn = draw(model, seed).items()
    plain = lambda name, value: quantise(torch.from_numpy(value))[1] if name.endswith("_proj.weight") else stored[name]
    return {name: plain(name, value).float() for name, value in drawn}


if __name__ == "__main__":
    main()
