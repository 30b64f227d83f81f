#!/usr/bin/env python3
"""Speed of requests with LoRA adapters, as a ratio to that of the base model.

Writes random adapters for all projections of a Llama, starts one `octavo serve --enable-lora`, and lets a number of clients
generate at once: all with the base model, all with one adapter, and each with one of several. The three take turns. Needs
numpy and safetensors.

    benches/adapters.py target/release/octavo model.gguf --layers 30 --hidden 576 --inner 1536 --kv 192

With `--changes N`, adapters are loaded, used and unloaded N times instead, one of them broken in every tenth round, while clients
talk to the base model. An answer that fails or differs fails the run. The memory of the process is printed on the way.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import statistics
import tempfile
import threading
import time

import numpy as np
from safetensors.numpy import load_file, save_file
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


def completion(port, model, tokens):
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return json.loads(request(port, "POST", "/v1/completions", body))["choices"][0]["text"]


def talk(port, expected, ends):
    """Asks the base model until the end. Returns the number of answers, all of which are the expected one."""
    count = 0
    while not ends.is_set():
        answer = completion(port, "base", 8)
        if answer != expected:
            raise RuntimeError(f"the base model says {answer!r}, not {expected!r}")
        count += 1
    return count


def change(port, folder, names, number):
    """Loads an adapter under a new name, uses it and unloads it. In every tenth round, a broken one is refused before."""
    def post(route, **body):
        request(port, "POST", f"/v1/{route}", body)

    name = f"round-{number}"
    if number % 10 == 0:
        try:
            post("load_lora_adapter", lora_name=name, lora_path=str(folder / "broken"))
        except RuntimeError as refused:
            if "not finite" not in str(refused):
                raise
        else:
            raise RuntimeError("an adapter with NaN is loaded")
    post("load_lora_adapter", lora_name=name, lora_path=str(folder / names[number % len(names)]))
    answer = completion(port, name, 4)
    post("unload_lora_adapter", lora_name=name)
    return answer


def resident(server):
    """Memory of a process in MiB."""
    lines = pathlib.Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def changes(arguments, folder, names):
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    shutil.copytree(folder / names[0], folder / "broken")
    broken = load_file(folder / "broken/adapter_model.safetensors")
    next(iter(broken.values()))[0, 0] = np.nan
    save_file(broken, folder / "broken/adapter_model.safetensors")
    with start(arguments, folder, names[:1]) as (server, port), concurrent.futures.ThreadPoolExecutor() as pool:
        expected, ends, answers = completion(port, "base", 8), threading.Event(), {}
        talks = [pool.submit(talk, port, expected, ends) for _ in range(arguments.clients)]
        try:
            print("| loads and unloads | resident MiB |\n|---:|---:|")
            for number in range(arguments.changes):
                answer = change(port, folder, names, number)
                if answers.setdefault(number % len(names), answer) != answer:
                    raise RuntimeError(f"an adapter says {answer!r}, and said {answers[number % len(names)]!r}")
                if (number + 1) % max(1, arguments.changes // 10) == 0:
                    print(f"| {number + 1} | {resident(server):.0f} |", flush=True)
        finally:
            ends.set()
        count = sum(done.result() for done in talks)
        listed = [model["id"] for model in json.loads(request(port, "GET", "/v1/models"))["data"]]
        assert listed == ["base", names[0]], listed
    print(f"{count} requests of the base model were answered meanwhile, all alike.")


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
    parser.add_argument("--changes", type=int, default=0)
    for size in ("layers", "hidden", "inner", "kv"):
        parser.add_argument(f"--{size}", type=int, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder, names = pathlib.Path(folder), [f"a{number}" for number in range(arguments.adapters)]
        for seed, name in enumerate(names):
            write_adapter(folder / name, arguments, seed)
        if arguments.changes:
            return changes(arguments, folder, names)
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
