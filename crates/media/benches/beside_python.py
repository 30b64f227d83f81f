#!/usr/bin/env python3
"""Times the way of an image from a file to patches in octavo-media, Pillow, torchvision and transformers, on one core.

    python crates/media/benches/beside_python.py [--rounds 9]

Needs the packages of `crates/media/testdata/generate.py`. All programs have one thread on the same core, and take turns:
a round runs every stage of every file once in each of them. The tables have the median in milliseconds, with the least
and the most in brackets, and the ratio of the medians.

Photographs of 1, 4 and 16 megapixels at 4:3 become whole cells of Qwen3-VL's processor, as JPEG files of quality 90 and
as PNG files. The stages are:

    decode   from the file to pixels: Pillow, and torchvision's own decoder
    process  from pixels to normalised patches: transformers' Qwen2VLImageProcessor of Pillow and of torchvision
    whole    from the file to normalised patches: Pillow's decoder with each of these processors
"""

import argparse
import io
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile
import time

import numpy as np
import PIL
import torch
import torchvision
import transformers
from PIL import Image
from torchvision.io import ImageReadMode, decode_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

ROOT = pathlib.Path(__file__).resolve().parents[3]
SIZES = {1: (1156, 867), 4: (2312, 1734), 16: (4624, 3468)}
SETTINGS = dict(
    size={"shortest_edge": 65536, "longest_edge": 16777216},
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
)


def photo(width, height):
    """Gradients with some noise: about as compressible as a photograph."""
    y, x = np.mgrid[0:height, 0:width] / 90.0
    noise = np.random.default_rng(1)
    planes = [128 + 60 * np.sin(x + c) + 50 * np.cos(y * (1 + c / 5)) + noise.normal(0, 6, x.shape) for c in range(3)]
    return Image.fromarray(np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8))


def with_pillow(data):
    return Image.open(io.BytesIO(data)).convert("RGB")


def with_torchvision(data):
    return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)


def processed(processor, image):
    return processor(images=[image], return_tensors="pt")["pixel_values"]


def octavo(core):
    """Starts the timer, and returns a function that times one run of a stage."""
    build = ["cargo", "bench", "--workspace", "--bench", "timer", "--no-run", "--message-format", "json"]
    lines = subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    built = [message for message in map(json.loads, lines) if message.get("target", {}).get("name") == "timer"]
    program = [built[-1]["executable"], "--bench"]
    timer = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(timer.pid, {core})

    def run(stage, path):
        timer.stdin.write(f"{stage} {path}\n")
        timer.stdin.flush()
        return float(timer.stdout.readline())

    return run


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def contenders(path, run, pil, fast):
    """The stages of a file: name, ours, and the others by name."""
    data = path.read_bytes()
    image, tensor = with_pillow(data), with_torchvision(data)
    yield (
        "decode",
        lambda: run("decode", path),
        {
            "Pillow": lambda: timed(lambda: with_pillow(data)),
            "torchvision": lambda: timed(lambda: with_torchvision(data)),
        },
    )
    yield (
        "process",
        lambda: run("process", path),
        {
            "transformers (Pillow)": lambda: timed(lambda: processed(pil, image)),
            "transformers (torchvision)": lambda: timed(lambda: processed(fast, tensor)),
        },
    )
    yield (
        "whole",
        lambda: run("whole", path),
        {
            "transformers (Pillow)": lambda: timed(lambda: processed(pil, with_pillow(data))),
            "transformers (torchvision)": lambda: timed(lambda: processed(fast, with_pillow(data))),
            "torchvision, transformers": lambda: timed(lambda: processed(fast, with_torchvision(data))),
        },
    )
    yield "bytes", lambda: run("bytes", path), {}


def spread(times):
    return f"{statistics.median(times) * 1e3:.1f} ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megapixels", type=int, nargs="+", default=list(SIZES))
    args = parser.parse_args()
    core = max(os.sched_getaffinity(0))
    run = octavo(core)
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    pil, fast = Qwen2VLImageProcessorPil(**SETTINGS), Qwen2VLImageProcessor(**SETTINGS)
    print(f"Pillow {PIL.__version__}, torch {torch.__version__}, torchvision {torchvision.__version__}, "
          f"transformers {transformers.__version__}, Python {platform.python_version()}; {args.rounds} rounds\n")
    print("| file | MP | stage | program | ms | ratio |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for form, megapixels in itertools.product(("jpg", "png"), args.megapixels):
            path = pathlib.Path(folder) / f"{megapixels}.{form}"
            photo(*SIZES[megapixels]).save(path, quality=90)
            stages = list(contenders(path, run, pil, fast))
            times = {}
            # The first round touches memory and fills caches.
            for turn in range(args.rounds + 1):
                for stage, ours, others in stages:
                    for name, work in [("Octavo", ours), *others.items()][:: 1 if turn % 2 else -1]:
                        times.setdefault((stage, name), []).append(work())
            for (stage, name), seconds in sorted(times.items(), key=lambda item: item[0][0]):
                base = statistics.median(times[stage, "Octavo"][1:])
                ratio = "" if name == "Octavo" else f"{statistics.median(seconds[1:]) / base:.2f}"
                print(f"| {form} | {megapixels} | {stage} | {name} | {spread(seconds[1:])} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
