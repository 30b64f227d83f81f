"""What the tests of images and platforms share: where things are, what must be installed, servers that run."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from places import OCTAVO  # noqa: E402

# Few KV blocks, because a debug build looks at each of them after every step, and one thread.
SMALL = {"OCTAVO_NUM_GPU_BLOCKS_OVERRIDE": "64", "OCTAVO_CPU_THREADS": "1"}

FIGURES = []


def tool(name):
    """The path of a program of this environment or of the system. Without it the test is skipped, or fails if
    OCTAVO_REQUIRE_IMAGES says that nothing may be missing."""
    path = shutil.which(name, path=str(pathlib.Path(sys.executable).parent)) or shutil.which(name)
    return path or missing(f"{name} is not installed")


def missing(message):
    if os.environ.get("OCTAVO_REQUIRE_IMAGES") == "1":
        pytest.fail(message)
    warnings.warn(message)
    pytest.skip(message)


def octavo(*arguments):
    return subprocess.run([OCTAVO, *arguments], capture_output=True, text=True, timeout=60)


def ask(url, body=None, headers=None):
    """Status and body; a server that refuses is an answer, one that is not there an exception."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_until(condition, process, seconds=60):
    """Polls until the condition holds; the end of the process is a failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode}:\n{process.communicate()[1]}"
        assert time.monotonic() < deadline, "it does not become ready"
        time.sleep(0.05)


def healthy(port):
    return octavo("health", "--port", str(port), "--timeout", "2").returncode == 0


@contextlib.contextmanager
def running(command, port, **options):
    """A process that serves on a port; SIGTERM must end it with 0."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        wait_until(lambda: healthy(port), process)
        yield process
        process.terminate()
        log = process.communicate(timeout=40)[1]
        assert process.returncode == 0, log
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Builds images, by target."""
    from images import Images

    images = Images(tmp_path_factory.mktemp("image"))
    yield images
    images.remove()


@pytest.fixture
def container():
    """Makes containers of an image."""
    from images import UID, Container

    if os.geteuid() != 0:
        missing("containers are run as root here")

    def make(image, name, command, uid=UID, gid=UID, writable=(), **variables):
        return Container(image, name, command, uid, gid, writable, variables)

    return make


@pytest.fixture
def figure():
    """Takes a line for the end of the test run's output."""
    return FIGURES.append


def pytest_terminal_summary(terminalreporter):
    if FIGURES:
        terminalreporter.section("figures")
        for line in FIGURES:
            terminalreporter.write_line(line)
