#!/usr/bin/env python3
"""Generates LoRA adapters of experts and routers for the tiny checkpoints, with the golden numbers of the merged models.

    python generate_expert_adapters.py [NAME...]

It needs the packages of generate_adapters.py and has the same rules. An adapter of the modules of each expert has the names
of older versions of transformers; PEFT converts it when it is loaded. Adapters are drawn until no choice of experts is
close, for which prompts are shorter than others. README.md describes the files.
"""

import copy
import json
import sys

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from generate import HERE, SPECIALS, VOCAB, fresh, new_model, rounded
from generate_adapters import ROOT
from generate_experts import WIDE, as_published, choice_gaps

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# By name: the base, the settings, and the weights that are stored as PEFT merges them.
ADAPTERS = {
    "expert-modules": (
        "mixtral", dict(r=3, lora_alpha=6, target_modules=["q_proj", "w1", "w2", "w3"]),
        [f"model.layers.1.block_sparse_moe.experts.{name}.weight" for name in ["0.w1", "3.w2", "4.w3"]],
    ),
    "expert-parameters": (
        "qwen3-moe",
        dict(r=4, lora_alpha=8, target_modules=["o_proj"], target_parameters=BOTH + ["mlp.gate.weight"],
             rank_pattern={"experts.down_proj": 2}, alpha_pattern={"experts.down_proj": 5, "gate.weight": 2}),
        ["model.layers.0.mlp.gate.weight"]
        + [f"model.layers.2.mlp.experts.{name}_proj.weight" for name in ["0.gate", "3.up", "5.down"]],
    ),
    "expert-columns": (
        "gpt-oss", dict(r=2, lora_alpha=4, target_modules=["v_proj"], target_parameters=BOTH),
        ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"],
    ),
    "expert-rows": (
        "granitemoe",
        dict(r=2, lora_alpha=3, target_modules=["o_proj"], target_parameters=["experts.gate_up_proj"]),
        ["model.layers.1.block_sparse_moe.input_linear.weight"],
    ),
    "expert-blocks": (
        "gpt-oss-mxfp4", dict(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=BOTH),
        ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"],
    ),
}
GAP = 0.04
TOKENS = 24


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    chosen = sys.argv[1:]
    for seed, (name, (base, settings, kept)) in enumerate(ADAPTERS.items(), start=651):
        if chosen and name not in chosen:
            continue
        write(ROOT / name, HERE / base, settings, kept, seed)
        for path in (ROOT / name).rglob("*"):
            path.chmod(0o644)
        (ROOT / name).chmod(0o755)


def write(folder, base, settings, kept, seed):
    fresh(folder)
    config = LoraConfig(task_type="CAUSAL_LM", **settings)
    has_modules = "w1" in settings["target_modules"]
    adapted = None if has_modules else get_peft_model(loaded(base), config).eval()
    for attempt in range(4000):
        random = np.random.default_rng(seed + 1000 * attempt)
        if has_modules:
            save_modules(folder, loaded(base), config, random)
            adapted = PeftModel.from_pretrained(loaded(base), folder).eval()
        else:
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.from_numpy(0.1 * random.standard_normal(tuple(parameter.shape))))
        ids = torch.from_numpy(np.random.default_rng(1000 + seed).integers(len(SPECIALS), VOCAB, size=TOKENS))
        logits, gap = run(adapted, ids)
        if gap > WIDE.get(base.name, GAP):
            merged, merged_logits, merged_gap = merge(copy.deepcopy(adapted), base, ids)
            if merged_gap > WIDE.get(base.name, GAP):
                break
    else:
        raise RuntimeError("no seed gives clear choices")
    if not has_modules:
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
    settings_path = folder / "adapter_config.json"
    written = json.loads(settings_path.read_text()) | {"base_model_name_or_path": base.name}
    for key in ["target_modules", "target_parameters"]:
        written[key] = sorted(written[key]) if written.get(key) else written.get(key)
    settings_path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    for name, values in [("unmerged", logits), ("golden", merged_logits)]:
        save_file({"input_ids": ids.numpy().astype(np.int32), "logits": values.numpy()}, folder / f"{name}.safetensors")
    published, _ = as_published(unquantised(base), merged)
    save_file({name: np.ascontiguousarray(published[name].numpy()) for name in kept}, folder / "expected.safetensors")


def unquantised(base):
    """Returns a model with random weights, which are plain whatever those of the base are."""
    config = AutoConfig.from_pretrained(base)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return new_model(config)


def loaded(base):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()


def save_modules(folder, model, config, random):
    """Writes an adapter of a Mixtral with a matrix A and B for each module of each expert."""
    hidden, inner = model.config.hidden_size, model.config.intermediate_size
    heads = model.config.num_attention_heads * model.config.hidden_size // model.config.num_attention_heads
    sizes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    tensors = {}
    for layer in range(model.config.num_hidden_layers):
        stem = f"base_model.model.model.layers.{layer}"
        modules = {f"{stem}.self_attn.q_proj": (heads, hidden)}
        for expert in range(model.config.num_local_experts):
            modules |= {f"{stem}.block_sparse_moe.experts.{expert}.{name}": size for name, size in sizes.items()}
        for module, (outputs, inputs) in modules.items():
            for kind, shape in [("A", (config.r, inputs)), ("B", (outputs, config.r))]:
                value = 0.1 * random.standard_normal(shape)
                tensors[f"{module}.lora_{kind}.weight"] = value.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config.save_pretrained(folder)


def run(model, ids):
    """Returns the logits, and the smallest difference between experts that are chosen and those that are not."""
    gaps = []

    def watch(module, inputs, _):
        logits = torch.nn.functional.linear(inputs[0].reshape(-1, module.weight.shape[1]), module.weight)
        gaps.extend(choice_gaps(model.config, logits + getattr(module, "bias", torch.zeros(())), None))

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(watch) for router in routers]
    logits = model(ids[None]).logits[0].float()
    for hook in hooks:
        hook.remove()
    assert len(gaps) == len(routers) > 0
    return logits, min(gaps)


def merge(adapted, base, ids):
    """Returns the merged weights, rounded to those of the checkpoint, their logits and the smallest difference of choices."""
    unmerged = adapted(ids[None]).logits
    model = adapted.merge_and_unload()
    difference = (model(ids[None]).logits - unmerged).abs().max()
    weights = {name: rounded(value.numpy(), "bf16").float() for name, value in model.state_dict().items()}
    whole = unquantised(base)
    whole.load_state_dict(weights, strict=False)
    whole.tie_weights()
    logits, gap = run(whole, ids)
    rounding = (logits - unmerged[0]).abs().max()
    print(f"{base.name}: merged, the logits differ by {difference:.1e}; rounded, by {rounding:.1e}")
    return {name: value.numpy() for name, value in weights.items()}, logits, gap


if __name__ == "__main__":
    main()
