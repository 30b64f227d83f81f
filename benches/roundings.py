#!/usr/bin/env python3
"""Compares ways to round the inputs of products, by the log-probabilities that a model returns with them.

    python benches/roundings.py MODEL [TEXTS]

MODEL is a folder with a checkpoint for transformers, whose weights are those of the quantised model in 16 or 32 bits. TEXTS has the token
ids of some texts, like `models/testdata/smollm2.safetensors`, which is the default. Needs torch, transformers and safetensors.

For each rounding it prints how many steps of four inputs a product multiplies, relative to one part for all inputs, and how much the
log-probabilities of the eight likeliest tokens of a position differ from those without rounding.
"""

import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

GROUP, STEP, ROWS, TOP = 32, 4, 8, 8
SITES = {
    "first norm": ["q_proj", "k_proj", "v_proj"],
    "attention": ["o_proj"],
    "second norm": ["gate_proj", "up_proj"],
    "activation": ["down_proj"],
    "head": ["lm_head"],
}
LAYER = list(SITES)[:4]


def rounded(x, scale):
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (x / scale).round() * scale


def bits(count):
    """Returns a rounding to so many bits, 8 or 12, with a scale for each group."""
    most, steps = {8: (127, 1.0), 12: (127 * 16, 2.0)}[count]
    return lambda x: (rounded(x, x.abs().amax(-1, keepdim=True) / most), steps)


def bf16(x):
    return x.bfloat16().float(), None


def outliers(ratio):
    """Returns a rounding to 8 bits with an outlying step, whose largest magnitude is at least `ratio` times that of all others."""

    def rounding(x):
        steps = x.abs().unflatten(-1, (GROUP // STEP, STEP)).amax(-1)
        largest, second = steps.sort(-1, descending=True).values[..., :2].split(1, -1)
        base = torch.where(largest >= ratio * second, torch.maximum(second, largest / 16), largest)
        outlying = steps > base * 1.0001
        blocks = outlying[: len(outlying) // ROWS * ROWS].unflatten(0, (-1, ROWS)).any(1)
        return rounded(x, base / 127), 1 + blocks.float().mean().item()

    return rounding


def scales(share):
    """Returns a rounding to 12 bits for groups whose squared scale is above `share` of the row's mean, and to 8 for the others."""

    def rounding(x):
        squares = x.abs().amax(-1, keepdim=True) ** 2
        coarse = squares <= share * squares.mean(-2, keepdim=True)
        return torch.where(coarse, bits(8)(x)[0], bits(12)(x)[0]), 2 - coarse.float().mean().item()

    return rounding


class Model:
    def __init__(self, folder, texts):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.texts, self.roundings, self.steps = texts, {}, []
        for name, module in self.model.named_modules():
            for site, names in SITES.items():
                if name.split(".")[-1] in names:
                    module.register_forward_pre_hook(lambda _, inputs, site=site: self.round(site, *inputs))
        self.exact = self.run()

    def round(self, site, x):
        if rounding := self.roundings.get(site):
            groups, steps = rounding(x.flatten(0, -2).unflatten(-1, (-1, GROUP)))
            self.steps += [] if steps is None else [steps]
            return (groups.flatten(1).view_as(x),)

    def run(self):
        with torch.no_grad():
            return [self.model(text[None]).logits[0].log_softmax(-1) for text in self.texts]

    def compare(self, name, roundings):
        self.roundings, self.steps = roundings, []
        tokens = [exact.topk(TOP, -1).indices for exact in self.exact]
        pairs = zip(self.exact, self.run(), tokens)
        differences = torch.cat([(a.gather(-1, i) - b.gather(-1, i)).abs().flatten() for a, b, i in pairs])
        steps = sum(self.steps) / len(self.steps) if self.steps else float("nan")
        print(f"{name:44} {steps:5.2f} {differences.median():8.4f} {differences.quantile(0.99):8.3f}", flush=True)


def main():
    folder = sys.argv[1]
    default = Path(__file__).parent.parent / "models/testdata/smollm2.safetensors"
    with safe_open(sys.argv[2] if len(sys.argv) > 2 else default, "pt") as file:
        ids, starts = file.get_tensor("ids").long(), file.get_tensor("starts").long()
    model = Model(folder, [ids[a:b] for a, b in zip(starts, starts[1:])])
    print(f"{'rounding':44} steps   median      99 %")
    head = {"head": bits(12)}
    model.compare("12 bits", {site: bits(12) for site in SITES})
    model.compare("bf16", {site: bf16 for site in SITES})
    for ratio in (1.25, 1.5, 2, 3):
        model.compare(f"8 bits, outliers of {ratio}", {site: outliers(ratio) for site in LAYER} | head)
    model.compare("8 bits, outliers of 2, and for the head", {site: outliers(2) for site in SITES})
    for share in (0.25, 0.5, 1):
        model.compare(f"12 bits above {share} of the mean square", {site: scales(share) for site in LAYER} | head)
    model.compare("8 bits", {site: bits(8) for site in LAYER} | head)
    for site in SITES:
        model.compare(f"8 bits at: {site}", {site: bits(8)})
        model.compare(f"8 bits, outliers of 2 at: {site}", {site: outliers(2)})


main()
