"""The table of a run of tests/gpu/run.sh: each step against the chip's bound and against PyTorch."""

import json
import os
import sys


def read(folder, name):
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return None
    with open(path) as file:
        return json.load(file)


def key(step):
    return (step["kind"], step.get("sequences"), step.get("context"), step.get("tokens"))


def label(step):
    if step["kind"] == "decode":
        return f"decode {step['sequences']} x {step['context']}"
    return f"prefill {step['tokens']}"


def milliseconds(seconds):
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def ratio(numerator, denominator, form):
    return "-" if numerator is None or not denominator else form.format(numerator / denominator)


def rows(roofline, pytorch):
    """Of each step: its name, times of Octavo, of the bound and of PyTorch, and what they make of each other."""
    theirs = {key(step): step.get("seconds") for step in (pytorch or {}).get("steps", [])}
    for step in roofline["steps"]:
        seconds, bound, other = step.get("seconds"), step.get("bound_seconds"), theirs.get(key(step))
        yield (
            label(step),
            milliseconds(seconds),
            milliseconds(bound),
            ratio(bound, seconds, "{:.0%}"),
            milliseconds(other),
            ratio(other, seconds, "{:.2f}"),
        )


def serving_bound(roofline, serving):
    """Output tokens a second if all requests ran at once, first their prompts at the chip's FLOPs and then their answers at its
    bandwidth; `None` where the run does not tell."""
    limits, steps = roofline.get("limits"), roofline["steps"]
    decodes = [step for step in steps if step["kind"] == "decode" and step.get("kv_bytes")]
    prefills = [step for step in steps if step["kind"] == "prefill" and step.get("bound_seconds")]
    if not limits or not decodes or not prefills or not serving["completed"]:
        return None
    requests = serving["completed"]
    prompt, answer = serving["total_input_tokens"] / requests, serving["total_output_tokens"] / requests
    decode = decodes[0]
    kv_of_token = decode["kv_bytes"] / (decode["sequences"] * decode["context"])
    bytes_of_step = decode["weight_bytes"] + requests * kv_of_token * (prompt + answer / 2)
    near = min(prefills, key=lambda step: abs(step["tokens"] - prompt))
    seconds = requests * prompt / near["tokens"] * near["bound_seconds"]
    seconds += answer * bytes_of_step / limits["bandwidth_bytes_per_second"]
    return requests * answer / seconds


def table(header, lines):
    lines = [header, *lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    cells = ([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))] for line in lines)
    return "\n".join("  ".join(line) for line in cells)


def main(folder):
    roofline = read(folder, "roofline.json")
    if roofline:
        header = ("step", "octavo ms", "bound ms", "of bound", "PyTorch ms", "times PyTorch")
        print(table(header, rows(roofline, read(folder, "pytorch.json"))))
    if serving := read(folder, "serving.json"):
        bound = serving_bound(roofline, serving) if roofline else None
        share = f", {serving['output_throughput'] / bound:.0%} of the bound of {bound:.0f}" if bound else ""
        print(f"serving, saturated: {serving['output_throughput']:.0f} output tokens a second{share}")


if __name__ == "__main__":
    main(sys.argv[1])
