#!/usr/bin/env python3
"""Renders tests/readme/terminal.svg, the picture in the README, from a real session.

    cargo build --release
    pip install rich==15.0.0                   # and curl and jq, from the system
    python tests/readme/terminal.py                    # --octavo PATH, --port PORT, --output FILE

The script starts `octavo serve` in a pseudo-terminal, waits until the server is ready, sends one request with curl and
stops the server. It then draws the commands and their output as an SVG, with the colours of the terminal. The home
folder is shown as `~`, and progress bars are left out.
"""

import argparse
import fcntl
import json
import os
import pathlib
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
COLUMNS = 132
READY_SECONDS = 300
# What the README says; the answer is the same on every machine because sampling is greedy.
REQUEST = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 64,
}


class Session:
    """A program in a pseudo-terminal of COLUMNS columns, and what it has written."""

    def __init__(self, *command):
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower)
        os.close(follower)
        self.leader, self.written = leader, b""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        while True:
            try:
                chunk = os.read(self.leader, 65536)
            except OSError:  # The program has ended.
                return
            if not chunk:
                return
            self.written += chunk

    def lines(self):
        """The lines as they stand at the end: a progress bar that was redrawn or erased is not among them."""
        text = self.written.decode(errors="replace").replace("\r\n", "\n")
        text = text.replace(str(pathlib.Path.home()), "~")
        shown = []
        for line in text.split("\n"):
            # A carriage return or an erased line begins the line anew. A line of the log that follows a bar starts
            # with a colour and a date.
            line = re.split(r"\r|\x1b\[2K", line)[-1]
            line = re.sub(r"^loading weights .*?(?=\x1b\[2m\d{4}-)", "", line)
            shown.append(line.rstrip())
        return [line for line in shown if line]

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=60)


def wait_until_ready(session, base):
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if session.process.poll() is not None:
            sys.exit("octavo ended before it was ready:\n" + "\n".join(session.lines()))
        try:
            urllib.request.urlopen(f"{base}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    sys.exit(f"octavo was not ready after {READY_SECONDS} s")


def wrapped(line):
    """A line of the terminal as the lines that fit its width, with its colours."""
    return Text.from_ansi(line).wrap(Console(width=COLUMNS), COLUMNS)


def draw(server_lines, curl, answer, output):
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), color_system="truecolor", force_terminal=True)

    def prompt(command):
        console.print(Text("$ ", style="bold green") + Text(command, style="bold"))

    prompt("octavo serve")
    for line in server_lines:
        for part in wrapped(line):
            console.print(part)
    console.print()
    prompt(curl)
    console.print(answer, markup=False, highlight=False)
    # Without the web font that rich's own template loads, so that the picture needs nothing from elsewhere.
    svg = console.export_svg(title="octavo", theme=MONOKAI, unique_id="octavo")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code,", "")
    output.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--octavo", type=pathlib.Path, default=ROOT / "target/release/octavo")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "tests/readme/terminal.svg")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", arguments.port)) == 0:
            sys.exit(f"port {arguments.port} is in use: choose another one with --port")

    base = f"http://127.0.0.1:{arguments.port}"
    command = (
        f"curl -s {base}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(REQUEST)}' |\n"
        "    jq '{model, answer: .choices[0].message.content, usage}'"
    )
    session = Session(arguments.octavo, "serve", "--port", str(arguments.port))
    try:
        wait_until_ready(session, base)
        time.sleep(0.5)  # The last lines of the log follow the readiness.
        server_lines = session.lines()
        answer = subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout.rstrip()
    finally:
        session.stop()
    draw(server_lines, command, answer, arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
