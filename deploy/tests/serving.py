"""The real server as a child process."""

import contextlib
import json
import os
import re
import subprocess
import urllib.error
import urllib.request

from places import OCTAVO, TINY
from processes import OPENER, follow, get, until

# Of what is set outside, traces are nobody's. One thread computes. A debug build looks at every KV block after every step: a
# tiny model needs no million of them. Spans leave soon.
OWN = {"OCTAVO_CPU_THREADS": "1", "OCTAVO_KV_CACHE_MEMORY_BYTES": str(2**24), "OTEL_BSP_SCHEDULE_DELAY": "100"}

# For a server that is only looked at.
SMALL = ("--max-model-len", "256", "--num-gpu-blocks-override", "64")


def environment(variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**kept, **OWN, **variables}


def command(*flags, model=TINY, port=0):
    """What starts a server of a small model that ends as soon as it is asked to. Port 0: any that is free."""
    place = ["--host", "127.0.0.1", "--port", port]
    words = [OCTAVO, "serve", model, *place, "--served-model-name", "tiny", "--shutdown-lag", "0", *flags]
    return [str(word) for word in words]


class Server:
    """A server that runs, and what it has logged. It listens, and its model is loaded."""

    def __init__(self, command, **variables):
        words = [str(word) for word in command]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(variables),
        )
        self.log = []
        follow(self.process.stderr, self.log)
        found = until(lambda: "the server does not start:\n" + "\n".join(self.log), self._listening)
        self.port = int(found.group(2))
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"{found.group(1)}://{self.address}"

    def _listening(self):
        assert self.process.poll() is None, "\n".join(self.log)
        places = (re.search(r"listening on (https?)://[\d.]+:(\d+)", line) for line in list(self.log))
        return next(filter(None, places), None)

    def request(self, body, path="/v1/completions", **headers):
        body = json.dumps({"model": "tiny", **body}).encode()
        headers = {name.replace("_", "-"): text for name, text in headers.items()}
        return urllib.request.Request(self.url + path, body, {"Content-Type": "application/json", **headers})

    def ask(self, body, **headers):
        """The status and the text of an answer."""
        try:
            with OPENER.open(self.request(body, **headers), timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read().decode()

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

    def stop(self):
        """Asks it to end, which it must do well."""
        self.process.terminate()
        assert self.process.wait(timeout=30) == 0, "\n".join(self.log)


@contextlib.contextmanager
def started(command, **variables):
    """A server of any command inside the block; afterwards it is killed, if it has not ended."""
    server = None
    try:
        server = Server(command, **variables)
        yield server
    finally:
        if server:
            server.process.kill()
            server.process.wait()


@contextlib.contextmanager
def serving(*flags, model=TINY, **variables):
    """A server of a small model inside the block; it must end well."""
    with started(command(*flags, model=model), **variables) as server:
        yield server
        if server.process.poll() is None:
            server.stop()
