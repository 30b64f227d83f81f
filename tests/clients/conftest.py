"""A running server with the default model for every test of the session."""

import os
import pathlib
import re
import subprocess
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OCTAVO = pathlib.Path(os.environ.get("OCTAVO_BIN", ROOT / "target" / "debug" / "octavo"))


@pytest.fixture(scope="session")
def base_url():
    command = [OCTAVO, "serve", "--served-model-name", "default", "--host", "127.0.0.1", "--port", "0", "--max-model-len", "1024"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    log = []
    for line in server.stderr:
        log.append(line)
        if match := re.search(r"listening on (http://\S+)", line):
            break
    else:
        pytest.fail("the server did not start:\n" + "".join(log))
    threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True).start()
    yield match.group(1)
    server.terminate()
    assert server.wait(timeout=40) == 0
