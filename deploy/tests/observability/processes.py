"""Programs that run beside a test, and the model server among them."""

import contextlib
import http.client
import os
import pathlib
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

from places import OCTAVO, free_port

# None of what is asked here is on the other side of a proxy.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# For a server that is only looked at.
SMALL = ("--max-model-len", "256", "--num-gpu-blocks-override", "64")


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
    """Waits for `condition` to be true and returns what it returned."""
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(pause)
    return value


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


def serve_command(model, port, *flags):
    """The command of a server of a small model that computes with one thread and ends as soon as it is asked to."""
    return [
        OCTAVO,
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--served-model-name",
        "tiny",
        "--cpu-threads",
        "1",
        "--disable-log-stats",
        "--shutdown-lag",
        "0",
        *flags,
    ]


class Server:
    """A model server's address."""

    def __init__(self, port, process):
        self.port = port
        self.process = process
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"

    def metric(self, name, **labels):
        """The sum of a metric's series that carry the labels."""
        status, text = get(f"{self.url}/metrics")
        assert status == 200, text
        lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(pair in line for pair in wanted))

    def idle(self):
        """Waits until nothing runs or waits."""
        until("idle", lambda: self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") == 0)


@contextlib.contextmanager
def serving(model, log, *flags):
    """A model server inside the block."""
    port = free_port()
    with running(serve_command(model, port, *flags), log, f"http://127.0.0.1:{port}/health") as process:
        yield Server(port, process)
