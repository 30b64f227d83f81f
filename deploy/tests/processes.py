"""Programs that run beside a test."""

import contextlib
import http.client
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

# None of what is asked here is on the other side of a proxy.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def program(name):
    """The path of an installed program."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    assert path, f"{name} is not installed: run deploy/tests/observability/install.sh"
    return path


def get(url, timeout=5):
    """Status and text of a GET; 0 if there is no answer."""
    try:
        with OPENER.open(url, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)


def until(what, condition, limit=30.0, pause=0.05):
    """Waits for `condition` to be true and returns what it returned. `what` is a text, or what tells one."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        late = time.monotonic() >= deadline
        assert not late, f"not within {limit} s: {what() if callable(what) else what}"
        time.sleep(pause)
    return value


def follow(stream, lines):
    """Collects the lines of a stream as they come."""
    threading.Thread(target=lambda: lines.extend(line.rstrip("\n") for line in stream), daemon=True).start()


def start(command, log, **environment):
    """Starts a program whose output goes to the file `log`."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )


def stop(process, limit=10.0):
    """Asks a program to end, then makes it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running(command, log, ready, **environment):
    """A program that runs inside the block; `ready` is the URL that answers 200 once it does."""
    process = start(command, log, **environment)
    try:

        def answers():
            assert process.poll() is None, f"{command[0]} ended:\n{pathlib.Path(log).read_text()}"
            return get(ready)[0] == 200

        until(f"{ready} answers", answers)
        yield process
    finally:
        stop(process)
