#!/usr/bin/env python3
"""Times the way of an image from a JPEG file to patches, in octavo-media and in Python, on one core, in one run.

    python crates/media/benches/beside_pillow.py [--rounds 5]

Needs the packages of `testdata/generate.py`. Python decodes with Pillow, and resizes, normalises and cuts with torchvision
and torch as the fast image processors of transformers do. A line of the table has the medians in milliseconds.
"""

import argparse
import io
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tv

ROOT = pathlib.Path(__file__).resolve().parents[3]
SIDES = (1000, 2000, 4000)
PATCH, MERGE, FRAMES = 16, 2, 2


def photo(side):
    """Gradients with some noise: about as compressible as a photograph."""
    y, x = np.mgrid[0:side, 0:side] / 90.0
    planes = [128 + 60 * np.sin(x + c) + 50 * np.cos(y * (1 + c / 5)) for c in range(3)]
    noise = np.random.default_rng(1).normal(0, 6, (side, side, 3))
    return Image.fromarray(np.clip(np.stack(planes, -1) + noise, 0, 255).astype(np.uint8))


def target(side):
    return round(side / (PATCH * MERGE)) * PATCH * MERGE


def decode(data):
    return Image.open(io.BytesIO(data)).convert("RGB")


def to_tensor(image):
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()


def resize(tensor, side):
    return tv.resize(tensor, [side, side], interpolation=tv.InterpolationMode.BICUBIC, antialias=True)


def patches(tensor):
    values = (tensor.to(torch.float32) - 127.5) / 127.5
    channels, height, width = values.shape
    rows, columns = height // PATCH // MERGE, width // PATCH // MERGE
    grid = values.unsqueeze(0).expand(FRAMES, -1, -1, -1)
    grid = grid.reshape(1, FRAMES, channels, rows, MERGE, PATCH, columns, MERGE, PATCH)
    return grid.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns * MERGE * MERGE, -1)


def timed(rounds, work):
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def python_times(data, side, rounds):
    size = target(side)
    image = decode(data)
    tensor = to_tensor(image)
    resized = resize(tensor, size)
    return {
        "jpeg": timed(rounds, lambda: decode(data)),
        "resize": timed(rounds, lambda: resize(tensor, size)),
        "patches": timed(rounds, lambda: patches(resized)),
        "jpeg_to_patches": timed(rounds, lambda: patches(resize(to_tensor(decode(data)), size))),
    }


def rust_time(name, side):
    path = ROOT / "target/criterion/images" / name / str(side) / "new/estimates.json"
    return json.loads(path.read_text())["median"]["point_estimate"] / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for side in SIDES:
            photo(side).save(pathlib.Path(folder) / f"{side}.jpg", quality=90)
            files[side] = (pathlib.Path(folder) / f"{side}.jpg").read_bytes()
        before = {side: python_times(files[side], side, rounds) for side in SIDES}
        command = ["cargo", "bench", "--workspace", "--bench", "images"]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "MEDIA_BENCH_FOLDER": folder})
        after = {side: python_times(files[side], side, rounds) for side in SIDES}
    print(f"{'':24}{'side':>6}{'python':>10}{'octavo':>10}{'ratio':>8}")
    for side in SIDES:
        python = {name: (before[side][name] + after[side][name]) / 2 for name in before[side]}
        rust = {name: rust_time(name, side) for name in python if name != "patches"}
        rust["patches"] = rust_time("process", side) - rust["resize"] + rust_time("normalize", side)
        for name, ours in rust.items():
            print(f"{name:24}{side:6}{python[name]:10.2f}{ours:10.2f}{python[name] / ours:8.2f}")


if __name__ == "__main__":
    main()
