#!/usr/bin/env python3
"""Writes the Grafana dashboards beside this file.

    generate.py                     write every dashboard
    generate.py --check             fail if a file is not what this program writes
    generate.py --api-body UID      print the body for POST /api/dashboards/db

The panels are in application.py, gpu.py and slo.py; grafana.py says how one is written down.
"""

import argparse
import json
import pathlib
import sys

import application
import gpu
import slo

HERE = pathlib.Path(__file__).resolve().parent


def compact(board):
    """A dashboard as JSON with a line for each panel and each other field."""
    def line(value):
        return json.dumps(value, ensure_ascii=False)

    panels = ",\n".join(f"  {line(panel)}" for panel in board["panels"])
    fields = [f" {line(key)}: {line(value)}" for key, value in board.items() if key != "panels"]
    return "{\n" + ",\n".join([*fields, f' "panels": [\n{panels}\n ]']) + "\n}\n"


def texts():
    """The file of each dashboard, by name."""
    boards = [application.board(), gpu.board(), slo.board()]
    return {f"{board['uid']}.json": compact(board) for board in boards}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a file is out of date")
    parser.add_argument("--api-body", metavar="UID", help="print {dashboard, overwrite} of one")
    arguments = parser.parse_args()
    files = texts()
    if arguments.api_body:
        text = files.get(f"{arguments.api_body}.json")
        if text is None:
            sys.exit(f"no dashboard {arguments.api_body}: there are {', '.join(name[:-5] for name in files)}")
        print(json.dumps({"dashboard": json.loads(text), "overwrite": True}, ensure_ascii=False))
        return
    if arguments.check:
        stale = [n for n, text in files.items() if not (HERE / n).is_file() or (HERE / n).read_text("utf-8") != text]
        if stale:
            sys.exit(f"out of date, run generate.py: {', '.join(stale)}")
        return
    for name, text in files.items():
        (HERE / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
