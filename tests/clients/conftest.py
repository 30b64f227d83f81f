"""Running servers and a browser, for every test of the session."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import threading
import warnings

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
OCTAVO = pathlib.Path(os.environ.get("OCTAVO_BIN", TARGET / "debug" / "octavo"))
BROWSERS = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]


@contextlib.contextmanager
def serving(*arguments):
    """The URL of a server that runs inside the block, on a port of its own."""
    # A debug build looks at every KV block after every step: a tiny model needs no million of them.
    command = [OCTAVO, "serve", "--host", "127.0.0.1", "--port", "0", "--kv-cache-memory-bytes", str(2**28), *arguments]
    # Several servers run side by side here: the threads of each would wait for a processor that another one has.
    environment = {"OCTAVO_CPU_THREADS": "1", **os.environ}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)
    log = []
    for line in server.stderr:
        log.append(line)
        if match := re.search(r"listening on (http://\S+)", line):
            break
    else:
        pytest.fail("the server did not start:\n" + "".join(log))
    threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True).start()
    try:
        yield match.group(1)
    finally:
        server.terminate()
        status = server.wait(timeout=40)
    assert status == 0


@pytest.fixture(scope="session")
def base_url():
    """The default model."""
    with serving("--served-model-name", "default", "--max-model-len", "1024") as url:
        yield url


@pytest.fixture(scope="session")
def tiny_url():
    """A model of a few thousand random weights: quick, and what it says means nothing."""
    # Left to itself it would fill an answer in JSON with blanks and with keys of its own.
    terse = '{"disable_any_whitespace": true, "disable_additional_properties": true}'
    model = ROOT / "models" / "testdata" / "llama"
    flags = ["--structured-outputs-config", terse, "--enable-tokenizer-info-endpoint"]
    with serving(model, "--served-model-name", "tiny", *flags) as url:
        yield url


@pytest.fixture(scope="session")
def browser():
    """A headless browser. Without one the tests that need it are skipped, loudly, or fail if one is required."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("OCTAVO_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        message = "NO BROWSER: the pages were not tested. Install one of " + ", ".join(BROWSERS) + "."
        if os.environ.get("OCTAVO_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        warnings.warn(message)
        pytest.skip(message)
    with playwright.sync_playwright() as driver:
        # Chromium refuses its sandbox to root; it shows nothing here but our own pages.
        yield driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
