"""Turns results of tests/gpu/run.sh, folders or archives, into a page for benches/results/gpu: report.py RESULT... > PAGE.md

Results of several slots of one run make one page. What a run was cut off from is missing from the page, and the table of parts says so.
"""

import json
import os
import re
import sys
import tarfile

# Kernels of a decode step: the start of what they work on, the names of kernels by preference, and how often they run, in a layer and
# once in a step. Of the products the fastest is meant, which the backend's cutoffs should choose.
PRODUCT = ("gemv_", "gemm_", "cublasLt")
OPS = [
    ("qkv product", "qkv ", PRODUCT, 1, 0),
    ("output product", "output ", PRODUCT, 1, 0),
    ("gate and up product", "gate_up ", PRODUCT, 1, 0),
    ("down product", "down ", PRODUCT, 1, 0),
    ("attention", "", ("paged_decode", "paged_prefill", "paged_attention"), 1, 0),
    ("qkv post-processing", "", ("qkv_post",), 1, 0),
    ("gated activation", "", ("glu_",), 1, 0),
    ("norms", "", ("norm_",), 2, 1),
    ("head", "head ", PRODUCT, 0, 1),
    ("sampling", "greedy", ("sampling_draw",), 0, 1),
    ("embedding", "", ("embed_",), 0, 1),
]


class Results:
    """Files of one run, from folders and archives. A later result replaces an earlier one's file of the same name."""

    def __init__(self, paths):
        self.files, self.parts, self.head = {}, [], {}
        for path in paths:
            files = self.of_archive(path) if os.path.isfile(path) else self.of_folder(path)
            self.files |= files
            summary = json.loads(files["summary.json"]) if "summary.json" in files else {}
            self.head |= {key: value for key, value in summary.items() if key != "parts"}
            self.parts += summary.get("parts", [])

    @staticmethod
    def of_archive(path):
        with tarfile.open(path) as archive:
            members = [member for member in archive.getmembers() if member.isfile()]
            return {os.path.basename(member.name): archive.extractfile(member).read() for member in members}

    @staticmethod
    def of_folder(path):
        found = {}
        for name in os.listdir(path):
            full = os.path.join(path, name)
            if os.path.isfile(full):
                with open(full, "rb") as file:
                    found[name] = file.read()
        return found

    def json(self, name):
        """A file's content; `None` if it is missing."""
        return json.loads(self.files[name]) if name in self.files else None

    def text(self, name):
        return self.files.get(name, b"").decode(errors="replace")


def key(step):
    return (step["kind"], step.get("sequences"), step.get("context"), step.get("tokens"))


def label(step):
    if step["kind"] == "decode":
        return f"decode {step['sequences']} x {step['context']}"
    return f"prefill {step['tokens']}"


def milliseconds(seconds):
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def percent(fraction):
    return "-" if fraction is None else f"{fraction:.0%}"


def ratio(numerator, denominator):
    return "-" if numerator is None or not denominator else f"{numerator / denominator:.2f}"


def table(header, lines):
    """A table of Markdown: names to the left, numbers to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in [header, rule, *lines])


def section(title, text):
    return f"## {title}\n\n{text}\n" if text else ""


def parts(results):
    return table(["part", "result", "s"], [(part["part"], part["result"], part["seconds"]) for part in results.parts])


def kinds(results):
    """Kinds of tests that failed, by the lines that end each kind."""
    lines = []
    for name in ("smoke", "correctness", "volta", "sanitizer"):
        found = re.findall(r"^--- (.*): (passed|failed|passed in an earlier slot)(?:, \d+ s)?$", results.text(f"{name}.log"), re.M)
        failed = [kind for kind, verdict in found if verdict == "failed"]
        rounded = len(re.findall(r"^rounding of expf: ", results.text(f"{name}.log"), re.M))
        if found:
            line = f"- {name}: {len(found) - len(failed)} kinds passed, {len(failed)} failed"
            line += f" ({', '.join(failed)})" if failed else ""
            line += f"; {rounded} tokens decided by a rounding of expf" if rounded else ""
            lines.append(line)
    return "\n".join(lines)


def ceilings(results):
    limits = results.json("limits.json")
    if not limits:
        return ""
    stated = limits["stated"] or {}
    rows = [("copy, GB/s", limits["bandwidth_bytes_per_second"] / 1e9, stated.get("bandwidth_bytes_per_second", 0) / 1e9)]
    for product in limits["products"]:
        name = f"{product['dtype']} product of {limits['product_size']}, TFLOP/s"
        if "error" in product:
            rows.append((f"{name}: {product['error']}", None, 0))
        else:
            rows.append((name, product["flops_per_second"] / 1e12, stated.get("flops_per_second", 0) / 1e12))
    lines = [
        (name, f"{rate:.1f}" if rate else "-", f"{limit:.1f}" if limit else "-", percent(rate / limit if rate and limit else None))
        for name, rate, limit in rows
    ]
    return table(["ceiling", "measured", "data sheet", "share"], lines)


def find(kernels, on, names, size):
    """The kernel that a step runs: the first of the preferred names on that size, and the fastest of products."""
    fitting = [kernel for kernel in kernels if kernel["on"].startswith(on) and size(kernel["on"]) and "seconds" in kernel]
    named = [kernel for name in names for kernel in fitting if kernel["kernel"].startswith(name)]
    if names is PRODUCT:
        return min(named, key=lambda kernel: kernel["seconds"], default=None)
    return next(iter(named), None)


def size_of(step, name):
    """Tells whether a kernel's sizes are those of a step."""
    if step["kind"] == "decode":
        rows, context = step["sequences"], step["context"]
        if name == "attention":
            return lambda on: re.search(rf"(^|\s){rows} sequences? of {context} tokens?$", on)
    else:
        rows = step["tokens"]
        if name == "attention":
            return lambda on: on == f"a prompt of {rows} tokens"
        if name in ("head", "sampling"):
            rows = 1
    return lambda on: re.search(rf", {rows} rows?$", on)


def losses(step, kernels, layers):
    """Seconds that a step takes beyond its bound, by op, largest first; what no kernel explains is called the rest. The bound is that
    of the data sheet, or of the ceilings for a device without one."""
    found, explained = [], 0.0
    for name, on, names, a_layer, once in OPS:
        kernel = find(kernels, on, names, size_of(step, name))
        if kernel is None:
            continue
        times = a_layer * layers + once
        explained += times * kernel["seconds"]
        bound = kernel.get("bound_seconds")
        if bound is None and kernel.get("fraction_of_ceiling") is not None:
            bound = kernel["fraction_of_ceiling"] * kernel["seconds"]
        if bound is not None:
            found.append((times * (kernel["seconds"] - bound), f"{name} ({kernel['kernel']})"))
    if not found:
        return []
    found.append((step["seconds"] - explained, "the rest: gaps between launches, what is not measured"))
    return sorted(found, reverse=True)


def times(measured):
    return {key(step): step.get("seconds") for step in (measured or {}).get("steps", [])}


def steps(results):
    roofline, pytorch, kernels = (results.json(f"{name}.json") for name in ("roofline", "pytorch", "kernels"))
    if not roofline:
        return ""
    theirs, expected = times(pytorch), times(results.json("predicted.json"))
    rows, notes = [], []
    for step in roofline["steps"]:
        seconds, other = step.get("seconds"), theirs.get(key(step))
        rows.append(
            (
                label(step),
                milliseconds(seconds),
                milliseconds(step.get("bound_seconds")),
                percent(step.get("fraction_of_bound")),
                percent(step.get("fraction_of_ceiling")),
                milliseconds(expected.get(key(step))),
                milliseconds(other),
                ratio(other, seconds),
            )
        )
        if seconds and kernels:
            largest = losses(step, kernels["kernels"], kernels["layers"])[:3]
            if largest:
                lost = "; ".join(f"{lost * 1e3:.3f} ms {name}" for lost, name in largest)
                notes.append(f"- {label(step)}: {lost}")
    header = ["step", "octavo ms", "bound ms", "of bound", "of ceiling", "predicted ms", "PyTorch ms", "times PyTorch"]
    text = table(header, rows)
    if not roofline.get("complete", True):
        text += "\n\nThe run was cut off: steps are missing."
    if notes:
        text += "\n\nThe three largest losses of each step, against its bound:\n\n" + "\n".join(notes)
    return text


def kernels(results, name):
    measured = results.json(name)
    if not measured:
        return ""
    rows = []
    for kernel in measured["kernels"]:
        if "error" in kernel:
            rows.append((kernel["kernel"], kernel["on"], kernel["error"], "", ""))
            continue
        seconds = f"{kernel['seconds'] * 1e6:.1f}"
        fractions = percent(kernel.get("fraction_of_bound")), percent(kernel.get("fraction_of_ceiling"))
        rows.append((kernel["kernel"], kernel["on"], seconds, *fractions))
    text = table(["kernel", "on", "µs", "of bound", "of ceiling"], rows)
    return text if measured.get("complete", True) else text + "\n\nThe run was cut off: kernels are missing."


def compilers(results):
    log = results.text("compilers.log")
    line = re.search(r"^\d+ of \d+ kernels use other resources$", log, re.M)
    if not line:
        return ""
    versions = [results.json(f"pack-{place}.json") for place in ("suite", "machine")]
    names = [sorted({part["nvrtc"] for part in pack["chips"].values()}) for pack in versions if pack]
    changes = re.findall(r"^sm_\S+ \S+: registers .*$", log, re.M)
    head = f"NVRTC {' and '.join(', '.join(name) for name in names)}: {line[0]}."
    return "\n".join([head, *([""] + [f"- {change}" for change in changes] if changes else [])])


def conversation(results):
    lines = []
    if answers := results.json("conversation.json"):
        for answer in answers["alone"]:
            first, rate = answer["first_token_seconds"], answer["tokens_per_second"]
            timing = f"first token after {milliseconds(first)} ms, {rate:.0f} tokens/s" if first and rate else "no token"
            lines.append(f"- “{answer['question']}”: “{' '.join(answer['text'].split())}” ({timing})")
        lines.append(f"- {answers['answered']} of {answers['at_once']} conversations at once were answered, {answers['same_texts']} in the same words")
    if agreement := results.json("agreement.json"):
        lines.append(
            f"- log-probabilities differ from the processor's by {agreement['median']:.4f} in the median, {agreement['largest']:.4f} at most"
        )
        for answer in agreement["answers"]:
            lines.append(f"- “{answer['prompt'].strip()}”: the first {answer['same']} of {answer['tokens']} tokens are the processor's")
    return "\n".join(lines)


def serving_bound(roofline, serving):
    """Output tokens a second if all requests ran at once, first their prompts at the chip's FLOPs and then their answers at its
    bandwidth; `None` where the limits are not known."""
    limits, measured = roofline.get("limits"), roofline["steps"]
    decodes = [step for step in measured if step["kind"] == "decode" and step.get("kv_bytes")]
    prefills = [step for step in measured if step["kind"] == "prefill" and step.get("bound_seconds")]
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


def serving(results):
    measured, roofline = results.json("serving.json"), results.json("roofline.json")
    if not measured:
        return ""
    bound = serving_bound(roofline, measured) if roofline else None
    share = f", {measured['output_throughput'] / bound:.0%} of the bound of {bound:.0f}" if bound else ""
    return f"Saturated: {measured['output_throughput']:.0f} output tokens a second{share}."


def page(paths):
    results = Results(paths)
    head = results.head
    title = f"# {head.get('gpu', 'unknown GPU')}, {head.get('date', 'unknown date')}, commit {head.get('commit', 'unknown')}\n"
    sections = [
        section("Parts", parts(results)),
        section("Tests", kinds(results)),
        section("Ceilings", ceilings(results)),
        section("Steps", steps(results)),
        section("Serving", serving(results)),
        section("Conversation", conversation(results)),
        section("Compilers", compilers(results)),
        section("Kernels", kernels(results, "kernels.json")),
        section("Experts", kernels(results, "experts.json")),
    ]
    return "\n".join([title, *filter(None, sections)])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print(page(sys.argv[1:]))
