"""A strict reader of Prometheus' text format 0.0.4.

Prometheus itself takes much that other readers of the format refuse: the parser behind endpoint pickers and autoscalers
wants every family once, with its HELP and TYPE before its samples. This one takes only what all of them take.
"""

import math
import re

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
COMMENT = re.compile(rf"# (HELP|TYPE) ({NAME}) (.*)")
TYPES = ("counter", "gauge", "histogram", "summary")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}
# A ServiceMonitor writes these; a target that has them itself finds its own renamed to exported_*.
RESERVED = {"pod", "node", "namespace", "job", "instance", "container", "service", "endpoint"}


class FormatError(Exception):
    """What is wrong, and in which line."""


class Family:
    """Samples of one name, as a dict from (name, labels) to the value."""

    def __init__(self, name):
        self.name = name
        self.kind = None
        self.help = None
        self.samples = {}


def families(text):
    """The families of a page, by name."""
    if "\r" in text or not text.endswith("\n"):
        raise FormatError("lines end in LF, the last one too")
    found = {}
    current = None
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            current = read_line(line, found, current)
        except FormatError as error:
            raise FormatError(f"line {number}: {error}: {line}") from None
    for family in found.values():
        check(family)
    return found


def read_line(line, found, current):
    if not line:
        return current
    if line.startswith("#"):
        return read_comment(line, found, current)
    match = SAMPLE.fullmatch(line)
    if not match:
        raise FormatError("neither a comment nor a sample")
    name, labels, value = match.groups()
    if current is None or current.kind is None or current.help is None:
        raise FormatError("a sample without HELP and TYPE before it")
    if name not in {current.name + suffix for suffix in SUFFIXES.get(current.kind, ("",))}:
        raise FormatError(f"not a sample of the family {current.name}")
    key = (name, frozenset(read_labels(labels or "").items()))
    if key in current.samples:
        raise FormatError("a series twice")
    current.samples[key] = read_value(value)
    return current


def read_comment(line, found, current):
    match = COMMENT.fullmatch(line)
    if not match:
        raise FormatError("a comment that is neither HELP nor TYPE")
    keyword, name, rest = match.groups()
    if current is None or current.name != name:
        if name in found:
            raise FormatError("a family in two places")
        current = found[name] = Family(name)
    if current.samples:
        raise FormatError("a comment after the samples")
    field = {"HELP": "help", "TYPE": "kind"}[keyword]
    if getattr(current, field) is not None:
        raise FormatError(f"{keyword} twice")
    if keyword == "TYPE" and rest not in TYPES:
        raise FormatError("no type of the format")
    setattr(current, field, rest)
    return current


def read_labels(text):
    labels = {}
    position = 0
    while position < len(text):
        match = LABEL.match(text, position)
        if not match:
            raise FormatError("labels")
        name, value = match.groups()
        if name in labels:
            raise FormatError(f"label {name} twice")
        if name in RESERVED:
            raise FormatError(f"label {name} is the scraper's")
        labels[name] = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], value)
        position = match.end()
        if position < len(text):
            if text[position] != "," or position + 1 == len(text):
                raise FormatError("labels")
            position += 1
    return labels


def read_value(text):
    if not re.fullmatch(r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|Inf)|NaN", text):
        raise FormatError(f"value {text}")
    return float(text)


def check(family):
    if not family.samples:
        raise FormatError(f"{family.name}: no samples")
    if family.kind == "counter":
        if not family.name.endswith("_total"):
            raise FormatError(f"{family.name}: a counter that does not end in _total")
        if not all(0 <= value < math.inf for value in family.samples.values()):
            raise FormatError(f"{family.name}: a counter below zero")
    if family.kind == "histogram":
        check_histogram(family)


def check_histogram(family):
    series = {}
    for (name, labels), value in family.samples.items():
        labels = dict(labels)
        bound = labels.pop("le", None)
        if (bound is not None) != name.endswith("_bucket"):
            raise FormatError(f"{family.name}: `le` belongs to buckets, and to nothing else")
        key = name[len(family.name) :] if bound is None else float(bound)
        series.setdefault(frozenset(labels.items()), {})[key] = value
    for values in series.values():
        if not {"_sum", "_count", math.inf} <= values.keys():
            raise FormatError(f"{family.name}: no +Inf, sum or count")
        counts = [values[bound] for bound in sorted(key for key in values if isinstance(key, float))]
        if counts != sorted(counts) or counts[-1] != values["_count"]:
            raise FormatError(f"{family.name}: buckets do not add up")
