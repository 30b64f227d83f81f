"""Registers and spills of kernels by two compilers, from the usage.json of two kernel packs."""

import json
import sys


def read(path):
    """Usage by chip and kernel: entries are files called CHIP-KERNEL-HASH-RELEASE.cubin."""
    with open(path) as file:
        entries = json.load(file)
    usage = {}
    for name, numbers in entries.items():
        chip, kernel, _ = name.split("-", 2)
        usage[chip, kernel] = (numbers["registers"], numbers.get("stack", 0), numbers.get("spills", 0))
    return usage


def differences(before, after):
    """Kernels of both, and a line for each that uses other resources."""
    common = sorted(before.keys() & after.keys())
    lines = []
    for key in common:
        if before[key] != after[key]:
            (registers, stack, spills), (others, other_stack, other_spills) = before[key], after[key]
            line = f"{key[0]} {key[1]}: registers {registers} -> {others}"
            if (stack, spills) != (other_stack, other_spills):
                line += f", stack {stack} -> {other_stack} bytes, spills {spills} -> {other_spills} bytes"
            lines.append(line)
    return common, lines


def main(before, after):
    common, lines = differences(read(before), read(after))
    print(f"{len(lines)} of {len(common)} kernels use other resources")
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
