"""Running servers."""

import contextlib
import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

import tools

OCTAVO = pathlib.Path(os.environ.get("OCTAVO_BIN", tools.TARGET / "debug" / "octavo"))
TINY = tools.ROOT / "models" / "testdata" / "llama"


@contextlib.contextmanager
def serving(*arguments: object, **variables: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """URL and process of a server, which is up but perhaps not ready."""
    # The KV cache that a machine's memory allows would only take time to look at, in a debug build.
    environment = {**os.environ, "OCTAVO_KV_CACHE_MEMORY_BYTES": str(2**26), **variables}
    command = [OCTAVO, *map(str, arguments)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    assert server.stderr is not None
    log = []
    for line in server.stderr:
        log.append(line)
        if found := re.search(r"listening on http://\S+:(\d+)", line):
            break
    else:
        pytest.fail("the server did not start:\n" + "".join(log))
    try:
        yield f"http://127.0.0.1:{found.group(1)}", server
    finally:
        server.kill()
        server.wait()
