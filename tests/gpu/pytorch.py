"""PyTorch's own best at the shapes of `octavo bench roofline`: decode steps and prefills of a Qwen3 of random weights, by its
attention (scaled_dot_product_attention), CUDA graphs and torch.compile. Of the ways that are tried, the fastest counts.
"""

import argparse
import json
import statistics
import sys
import time

from servers import write_json

SKIPPED = 77
# Weights and caches may take this share of the memory.
SHARE = 0.92


class Shape:
    """The numbers of a config.json."""

    def __init__(self, path):
        with open(path) as file:
            config = json.load(file)
        self.hidden, self.inner = config["hidden_size"], config["intermediate_size"]
        self.layers, self.vocab = config["num_hidden_layers"], config["vocab_size"]
        self.q_heads, self.kv_heads, self.size = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        self.theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.eps = config["rms_norm_eps"]

    def kv_bytes(self, tokens):
        return self.layers * 2 * self.kv_heads * self.size * 2 * tokens


def weights(torch, shape, device, dtype):
    """Random, of the size that keeps activations near 1: zeros would be multiplied faster than anything real."""

    def matrix(rows, cols):
        return torch.randn(rows, cols, device=device, dtype=dtype) * cols**-0.5

    q, kv = shape.q_heads * shape.size, shape.kv_heads * shape.size
    layers = [
        {
            "in_norm": torch.ones(shape.hidden, device=device, dtype=dtype),
            "qkv": matrix(q + 2 * kv, shape.hidden),
            "q_norm": torch.ones(shape.size, device=device, dtype=dtype),
            "k_norm": torch.ones(shape.size, device=device, dtype=dtype),
            "o": matrix(shape.hidden, q),
            "post_norm": torch.ones(shape.hidden, device=device, dtype=dtype),
            "gate_up": matrix(2 * shape.inner, shape.hidden),
            "down": matrix(shape.hidden, shape.inner),
        }
        for _ in range(shape.layers)
    ]
    return {
        "embed": matrix(shape.vocab, shape.hidden),
        "layers": layers,
        "norm": torch.ones(shape.hidden, device=device, dtype=dtype),
        "head": matrix(shape.vocab, shape.hidden),
    }


def rope_tables(torch, shape, positions, dtype):
    frequencies = shape.theta ** (-torch.arange(0, shape.size, 2, device=positions.device).double() / shape.size)
    angles = torch.outer(positions.double(), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(torch, x, cosine, sine):
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class Model:
    """Qwen3, as plainly as PyTorch's own functions have it. Rows of a step are [B, N], N tokens of each sequence."""

    def __init__(self, torch, shape, device, dtype):
        self.torch, self.shape = torch, shape
        self.weights = weights(torch, shape, device, dtype)

    def layer(self, w, x, cosine, sine, cache, grouped):
        functional, shape = self.torch.nn.functional, self.shape
        batch, count, _ = x.shape
        qkv = functional.linear(functional.rms_norm(x, (shape.hidden,), w["in_norm"], shape.eps), w["qkv"])
        qkv = qkv.view(batch, count, shape.q_heads + 2 * shape.kv_heads, shape.size).transpose(1, 2)
        q, k, v = qkv.split([shape.q_heads, shape.kv_heads, shape.kv_heads], 1)
        q = rotate(self.torch, functional.rms_norm(q, (shape.size,), w["q_norm"], shape.eps), cosine, sine)
        k = rotate(self.torch, functional.rms_norm(k, (shape.size,), w["k_norm"], shape.eps), cosine, sine)
        attend = functional.scaled_dot_product_attention
        if cache is None:
            mixed = attend(q, k, v, is_causal=True, enable_gqa=True)
        else:
            keys, values = cache
            keys[:, :, -1:] = k
            values[:, :, -1:] = v
            if grouped:
                # The queries of a KV head as rows of one product: keys are read once for all of them.
                rows = q.reshape(batch, shape.kv_heads, -1, shape.size)
                mixed = attend(rows, keys, values).view(batch, shape.q_heads, 1, shape.size)
            else:
                mixed = attend(q, keys, values, enable_gqa=True)
        x = x + functional.linear(mixed.transpose(1, 2).reshape(batch, count, -1), w["o"])
        gate, up = functional.linear(
            functional.rms_norm(x, (shape.hidden,), w["post_norm"], shape.eps), w["gate_up"]
        ).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, w["down"])

    def step(self, ids, cosine, sine, caches, grouped, layer):
        """The next token of each sequence."""
        functional = self.torch.nn.functional
        x = functional.embedding(ids, self.weights["embed"])
        for w, cache in zip(self.weights["layers"], caches or [None] * self.shape.layers):
            x = layer(w, x, cosine, sine, cache, grouped)
        last = functional.rms_norm(x[:, -1], (self.shape.hidden,), self.weights["norm"], self.shape.eps)
        return functional.linear(last, self.weights["head"]).argmax(-1)


def median_seconds(torch, run, device):
    """The median of several runs, after some that do not count."""
    cuda = device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(3):
        run()
    wait()
    times, begun = [], time.perf_counter()
    while len(times) < 5 or (len(times) < 50 and time.perf_counter() - begun < 2):
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def recorded(torch, run):
    """The same as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Bench:
    def __init__(self, torch, model, device, dtype, compiles):
        self.torch, self.model, self.device, self.dtype = torch, model, device, dtype
        self.layers = {"eager": model.layer}
        if compiles:
            # A program for each shape, as was meant: beyond a few, what is called compiled would run uncompiled.
            limits = torch._dynamo.config
            for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit", "accumulated_cache_size_limit"):
                if hasattr(limits, name):
                    setattr(limits, name, 1024)
            self.layers["compiled"] = torch.compile(model.layer, dynamic=False)

    def fastest(self, ways):
        """Seconds of the fastest of some ways, and its name; `None` where none works."""
        times = {}
        for name, run in ways:
            try:
                times[name] = median_seconds(self.torch, run(), self.device)
            except Exception as error:  # Whatever the compiler or a kernel has against a shape, another way may do.
                print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        name = min(times, key=times.get, default=None)
        return (times[name], name) if name else (None, None)

    def inputs(self, batch, count, start):
        torch = self.torch
        ids = torch.randint(0, self.model.shape.vocab, (batch, count), device=self.device)
        positions = torch.arange(start, start + count, device=self.device)
        return (ids, *rope_tables(torch, self.model.shape, positions, self.dtype))

    def decode(self, batch, context):
        shape, torch = self.model.shape, self.torch
        of_one = (batch, shape.kv_heads, context, shape.size)
        caches = [
            tuple(torch.randn(of_one, device=self.device, dtype=self.dtype) for _ in range(2)) for _ in range(shape.layers)
        ]
        inputs = self.inputs(batch, 1, context - 1)

        def way(layer, grouped):
            def run():
                return self.model.step(*inputs, caches, grouped, layer)

            return recorded(torch, run) if self.device == "cuda" else run

        ways = [
            (f"{name}, {'grouped' if grouped else 'plain'} attention", lambda layer=layer, grouped=grouped: way(layer, grouped))
            for name, layer in self.layers.items()
            for grouped in (False, True)
        ]
        return self.fastest(ways)

    def prefill(self, tokens):
        inputs = self.inputs(1, tokens, 0)
        ways = [
            (name, lambda layer=layer: lambda: self.model.step(*inputs, None, False, layer))
            for name, layer in self.layers.items()
        ]
        return self.fastest(ways)


def numbers(text):
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batch-sizes", type=numbers, default="1,8,32,128,256")
    parser.add_argument("--contexts", type=numbers, default="1024,4096")
    parser.add_argument("--prefill", type=numbers, default="512,2048,8192")
    parser.add_argument("--seconds", type=float, default=540, help="begin nothing after that many")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    try:
        import torch
    except ImportError:
        print("skipped: PyTorch is not installed")
        return SKIPPED
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        print(f"skipped: PyTorch {torch.__version__} finds no GPU")
        return SKIPPED
    # Volta has no bfloat16.
    dtype = torch.bfloat16
    if device == "cuda" and torch.cuda.get_device_capability()[0] < 8:
        dtype = torch.float16
    shape = Shape(arguments.config)
    with torch.inference_mode():
        bench = Bench(torch, Model(torch, shape, device, dtype), device, dtype, not arguments.no_compile)
        rows = []

        def measured(kind, sizes, tokens, run):
            label = ", ".join(f"{name} {size}" for name, size in sizes.items())
            row = {"kind": kind, **sizes}
            if time.perf_counter() - begun > arguments.seconds:
                row["note"] = "no time was left"
            elif device == "cuda" and shape.kv_bytes(tokens) > torch.cuda.mem_get_info()[0] * SHARE:
                row["note"] = "does not fit the memory"
            else:
                row["seconds"], row["way"] = run()
                if device == "cuda":
                    torch.cuda.empty_cache()
            rows.append(row)
            # What has been measured is kept if time runs out.
            write_json(arguments.json, {"torch": torch.__version__, "dtype": str(dtype), "steps": rows})
            time_taken = f"{row['seconds'] * 1e3:.3f} ms, {row['way']}" if row.get("seconds") else row.get("note", "failed")
            print(f"{kind}, {label}: {time_taken}", flush=True)

        for context in arguments.contexts:
            for batch in arguments.batch_sizes:
                sizes = {"sequences": batch, "context": context}
                measured("decode", sizes, batch * context, lambda b=batch, c=context: bench.decode(b, c))
        for tokens in arguments.prefill:
            measured("prefill", {"tokens": tokens}, tokens, lambda n=tokens: bench.prefill(n))
    return 0


if __name__ == "__main__":
    sys.exit(main())
