#!/usr/bin/env python3
"""Generates LoRA adapters for the tiny checkpoints, with the golden numbers of the merged models.

    python generate_adapters.py

It needs the packages of generate_quantised.py and peft==0.21.2, and has the same rules as generate.py. PEFT writes the
adapters and merges them in f32; the merged weights are rounded to the type of the checkpoint. README.md describes the files.
"""

import json

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoConfig

from generate import HERE, draw, fresh, golden, new_model
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
