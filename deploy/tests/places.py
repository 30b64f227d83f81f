"""Where things are, and ports that are free: what every suite here needs."""

import os
import pathlib
import socket

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MONITORING = DEPLOY / "monitoring"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
OCTAVO = pathlib.Path(os.environ.get("OCTAVO_BIN", TARGET / "debug" / "octavo"))
# A Llama of random weights with a context of 256 tokens.
TINY = ROOT / "models" / "testdata" / "llama"


def free_port():
    """A port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
