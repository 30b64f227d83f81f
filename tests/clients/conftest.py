"""Running servers and a browser, for every test of the session."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import threading
import urllib.parse
import warnings

import pytest

from chat_page import EXPECT_MS, StandIn

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


def browser_path():
    """The browser to test with, or `None` if there is none."""
    return os.environ.get("OCTAVO_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="session")
def browser():
    """A headless browser. Without one the tests that need it are skipped, loudly, or fail if one is required."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = browser_path()
    if path is None:
        message = "NO BROWSER: the pages were not tested. Install one of " + ", ".join(BROWSERS) + "."
        if os.environ.get("OCTAVO_REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        warnings.warn(message)
        pytest.skip(message)
    with playwright.sync_playwright() as driver:
        # Chromium refuses its sandbox to root; it shows nothing here but our own pages.
        yield driver.chromium.launch(executable_path=path, args=["--no-sandbox"])


def elsewhere(address, page):
    """Whether an address is on another host than a page."""
    address, page = urllib.parse.urlsplit(address), urllib.parse.urlsplit(page)
    return address.scheme not in ("blob", "data") and address.netloc != page.netloc


@pytest.fixture
def stand_in(tiny_url):
    server = StandIn(tiny_url)
    yield server
    server.close()


@pytest.fixture
def new_page(browser):
    """Opens pages that must log no error, break no policy and ask no other host."""
    contexts, complaints = [], []

    def open_page(url, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(EXPECT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: elsewhere(request.url, url) and complaints.append(f"asked for {request.url}"))
        # The browser itself reports every failed request; those are what some tests are about.
        page.on("console", lambda m: m.type == "error" and "Failed to load" not in m.text and complaints.append(m.text))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
