"""Where things are, and ports that are free: what every suite here needs."""

import contextlib
import os
import pathlib
import random
import socket

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MONITORING = DEPLOY / "monitoring"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
OCTAVO = pathlib.Path(os.environ.get("OCTAVO_BIN", TARGET / "debug" / "octavo"))
# A Llama of random weights with a context of 256 tokens.
TINY = ROOT / "models" / "testdata" / "llama"


def free_port():
    """A port that nothing listens on, below those that the system gives to outgoing connections: one of these could take it."""
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
