#!/usr/bin/env python3
"""Writes prometheusrule.yaml: recording.yaml and alerts.yaml as the object that the Prometheus Operator reads.

    render.py                         write it
    render.py --check                 fail if it is not what this program writes
    render.py --runbooks URL          print it, with the runbooks found under URL instead of in the repository

The rules are carried over line by line, so that an expression is the same text in both places.
"""

import argparse
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE / "prometheusrule.yaml"
# `release: prometheus` is what a kube-prometheus-stack of that name selects rules by, unless told to take all.
HEAD = """\
# Written by render.py from recording.yaml and alerts.yaml: change those.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: octavo
  namespace: monitoring
  labels:
    app.kubernetes.io/name: octavo
    app.kubernetes.io/component: monitoring
    release: prometheus
spec:
  groups:
"""


def groups(path):
    """What stands below the `groups:` of a file of rules, indented to stand below `spec:`."""
    _, found, below = path.read_text("utf-8").partition("\ngroups:\n")
    if not found:
        sys.exit(f"{path.name}: no line `groups:`")
    return "".join(f"  {line}" if line.strip() else line for line in below.splitlines(keepends=True))


def render(runbooks=None):
    """The object's text."""
    text = HEAD + groups(HERE / "recording.yaml") + "\n" + groups(HERE / "alerts.yaml")
    if runbooks:
        text = re.sub(r"(runbook_url: )deploy/runbooks/", rf"\g<1>{runbooks.rstrip('/')}/", text)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it is out of date")
    parser.add_argument("--runbooks", metavar="URL", help="print it with this in front of the runbooks' names")
    arguments = parser.parse_args()
    if arguments.runbooks:
        print(render(arguments.runbooks), end="")
    elif not arguments.check:
        TARGET.write_text(render(), "utf-8")
    elif not TARGET.is_file() or TARGET.read_text("utf-8") != render():
        sys.exit("prometheusrule.yaml is out of date, run render.py")


if __name__ == "__main__":
    main()
