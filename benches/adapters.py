#!/usr/bin/env python3
"""Speed of requests with LoRA adapters, as a ratio to that of the base model.

Writes random adapters for all projections of a Llama, starts one `octavo serve --enable-lora`, and lets a number of clients
generate at once: all with the base model, all with one adapter, and each with one of several. The three take turns. Needs
numpy and safetensors.

    benches/adapters.py target/release/octavo model.gguf --layers 30 --hidden 576 --inner 1536 --kv 192
"""

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import tempfile
import time

import numpy as np
from safetensors.numpy import save_file
from serving import request, served


def write_adapter(folder, arguments, seed):
    """Writes an adapter of random numbers that bf16 holds, as training in bf16 leaves them."""
    random = np.random.default_rng(seed)
    hidden, inner, kv = arguments.hidden, arguments.inner, arguments.kv
    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
             "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
             "mlp.down_proj": (inner, hidden)}
    draw = lambda rows, cols: (random.standard_normal((rows, cols), np.float32) / 100).view(np.uint32)
    rounded = lambda bits: (bits & np.uint32(0xFFFF0000)).view(np.float32)
    tensors = {}
    for layer in range(arguments.layers):
        for name, (inputs, outputs) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = rounded(draw(arguments.rank, inputs))
            tensors[f"{module}.lora_B.weight"] = rounded(draw(outputs, arguments.rank))
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": arguments.rank, "lora_alpha": 2 * arguments.rank}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def generate(port, model, tokens, number):
    """Generates tokens after a prompt that no other request begins like."""
    prompt = [1000 + number] + [200 + i for i in range(15)]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    request(port, "POST", "/v1/completions", body)


def speed(port, models, arguments, first):
    """Output tokens per second of all clients together."""
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(arguments.clients) as pool:
        numbers = range(arguments.clients)
        list(pool.map(lambda n: generate(port, models[n % len(models)], arguments.tokens, first + n), numbers))
    return arguments.clients * arguments.tokens / (time.monotonic() - begun)


def start(arguments, folder, names):
    flags = ["--served-model-name", "base", "--max-model-len", "1024", "--shutdown-timeout", "0", "--enable-lora"]
    flags += ["--max-loras", str(len(names)), "--max-lora-rank", str(arguments.rank)]
    flags += ["--lora-modules", *[f"{name}={folder / name}" for name in names]]
    return served(lambda port: generate(port, "base", 1, 0), arguments.binary, arguments.model, *flags)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    for size in ("layers", "hidden", "inner", "kv"):
        parser.add_argument(f"--{size}", type=int, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder, names = pathlib.Path(folder), [f"a{number}" for number in range(arguments.adapters)]
        for seed, name in enumerate(names):
            write_adapter(folder / name, arguments, seed)
        cases = {"base": ["base"], "one adapter": names[:1], f"{len(names)} adapters": names}
        with start(arguments, folder, names) as (_, port):
            speeds = {name: [] for name in cases}
            for number in range(arguments.rounds):
                for place, (name, models) in enumerate(cases.items()):
                    speeds[name].append(speed(port, models, arguments, (number * len(cases) + place) * arguments.clients))
    print("| requests | tokens/s, median | ratio to the base: median (least to most) |\n|---|---:|---|")
    for name, row in speeds.items():
        ratios = sorted(own / base for own, base in zip(row, speeds["base"], strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {name} | {statistics.median(row):.0f} | {spread} |")


if __name__ == "__main__":
    main()
