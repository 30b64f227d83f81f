"""Measures the agreement of llama.cpp with PyTorch on SmolLM2-135M-Instruct Q4_1. The reference and the figures are
those of `crates/models/tests/parity/smollm2.rs`, which prints them for Octavo.

Usage: PEERS_DIR=... python3 benches/peers/agreement/run.py

PEERS_DIR contains `llamacpp`, the sources and a static build of llama.cpp, and `models`."""

import json
import os
import struct
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
REFERENCE = HERE.parents[2] / "models/testdata/smollm2.safetensors"
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"


def reference() -> bytes:
    """Returns the reference in the order in which the program reads it."""
    data = REFERENCE.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])

    def tensor(name: str) -> bytes:
        begin, end = header[name]["data_offsets"]
        return data[8 + length + begin : 8 + length + end]

    positions, top = header["top_ids"]["shape"]
    (starts,) = header["starts"]["shape"]
    names = ["ids", "starts", "top_ids", "top_logprobs"]
    return struct.pack("<3i", positions, starts - 1, top) + b"".join(map(tensor, names))


def compile_program(llama: Path, program: Path) -> None:
    """Links the program with all libraries of llama.cpp."""
    build = llama / "build"
    libraries = [build / path for path in ("src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a", "ggml/src/libggml-base.a")]
    includes = [f"-I{llama / 'llama.cpp' / path}" for path in ("include", "ggml/include")]
    command = ["g++", "-O2", "-std=c++17", HERE / "llama.cc", *includes, "-o", program, *libraries]
    subprocess.run([*command, "-fopenmp", "-lpthread", "-ldl"], check=True)


def main() -> None:
    peers = Path(os.environ["PEERS_DIR"])
    with tempfile.TemporaryDirectory() as folder:
        program, data = Path(folder) / "llama", Path(folder) / "data"
        data.write_bytes(reference())
        compile_program(peers / "llamacpp", program)
        for flash in ("off", "on"):
            command = [program, peers / MODEL, flash, data]
            print(f"llama.cpp -fa {flash}: {subprocess.check_output(command, text=True)}", end="")


if __name__ == "__main__":
    main()
