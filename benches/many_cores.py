#!/usr/bin/env python3
"""Computes the time of a step of the CPU backend on many cores, by arithmetic alone.

Each stage takes the time of its operations or of its bytes, whichever is longer, on the cores that have a piece of it, and a
barrier. The table of results/2026-11-26-many-cores.md is this program's output.

    benches/many_cores.py
"""

from math import ceil

# Bytes a second that one core and all cores of a socket read, and integer operations a second of a core (12-bit activations).
CORE_BANDWIDTH, BANDWIDTH, OPERATIONS = 13e9, 300e9, 0.35e12
# Operations a second of a core in attention, and seconds for each element of a row in norms and the like.
ATTENTION, ELEMENT = 0.1e12, 0.5e-9
# Seconds for a cache line to reach another core, and how many transfers of a barrier follow each other, by number of cores.
TRANSFER = 75e-9
TRANSFERS = {8: 8, 16: 10, 32: 12, 64: 16, 128: 18}
STAGES = 9  # of a layer
LEAST_HEADS = 4  # query heads of a part of a KV head

# Layers, hidden size, inner size, query heads, KV heads, size of a head, vocabulary.
MODELS = {
    "SmolLM2-135M": (30, 576, 1536, 9, 3, 64, 49152),
    "Llama 3.2 1B": (16, 2048, 8192, 32, 8, 64, 128256),
    "Llama 3.1 8B": (32, 4096, 14336, 32, 8, 128, 128256),
}
# Rows of a step, its sequences and the tokens of each.
STEPS = {
    "1 request": (1, 1, 512),
    "8 requests": (8, 8, 512),
    "32 requests": (32, 32, 512),
    "prompt of 512": (512, 1, 512),
}


def busy(pieces, cores):
    """The cores that are busy on average while pieces of one size are taken."""
    return pieces / ceil(pieces / cores)


def product(outputs, inputs, rows, cores):
    """Seconds of a product with Q4_1 weights. A piece is two or four panels of 16 outputs and at most 256 rows."""
    panels = 2 if rows <= 4 else 4
    active = busy(ceil(outputs / 16 / panels) * ceil(rows / 256), cores)
    operations = 2 * outputs * inputs * rows / (active * OPERATIONS)
    return max(operations, outputs * inputs * 0.625 / min(active * CORE_BANDWIDTH, BANDWIDTH))


def attention(model, step, cores):
    """Seconds of attention; keys and values are in bf16."""
    _, _, _, heads, kv, dim, _ = model
    rows, sequences, tokens = step
    if rows > sequences:
        return 4 * rows * tokens / 2 * heads * dim / (busy(ceil(rows / 16) * kv, cores) * ATTENTION)
    parts = min(cores // (sequences * kv), heads // kv // LEAST_HEADS)
    active = busy(sequences * kv * max(1, parts), cores)
    read = 4 * sequences * tokens * kv * dim / min(active * CORE_BANDWIDTH, BANDWIDTH)
    return max(read, 4 * rows * tokens * heads * dim / (active * ATTENTION))


def seconds(model, step, cores):
    """Seconds of a step, and those of its barriers."""
    layers, hidden, inner, heads, kv, dim, vocabulary = model
    rows, sequences, _ = step
    qkv = (heads + 2 * kv) * dim
    shapes = [(qkv, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]
    elements = 2 * hidden + qkv + 2 * inner / max(1, min(cores, inner // 512))
    layer = sum(product(*shape, rows, cores) for shape in shapes)
    layer += attention(model, step, cores) + ceil(rows / cores) * elements * ELEMENT
    barriers = (STAGES * layers + 3) * TRANSFERS[cores] * TRANSFER
    return layers * layer + product(vocabulary, hidden, sequences, cores) + barriers, barriers


def main():
    print("| model | step |", " | ".join(f"{cores} cores" for cores in TRANSFERS), "|")
    print("|---|---|" + "---|" * len(TRANSFERS))
    for name, model in MODELS.items():
        for load, step in STEPS.items():
            alone = 8 * seconds(model, step, 8)[0]
            cells = []
            for cores in TRANSFERS:
                total, barriers = seconds(model, step, cores)
                cells.append(f"{total * 1e3:.1f} ms, {barriers / total:.0%}, {alone / total:.0f}")
            print(f"| {name} | {load} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
