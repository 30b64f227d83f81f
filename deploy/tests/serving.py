"""The real server as a child process, on a tiny model."""

import contextlib
import json
import os
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request

from places import OCTAVO, TINY

# Spans leave soon, and nothing that is set outside counts.
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "100"}


def environment(extra):
    own = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {"OCTAVO_CPU_THREADS": "1", **own, **QUICK, **extra}


def command(subcommand, *arguments):
    # A debug build looks at every KV block after every step: a tiny model needs no million of them.
    return [OCTAVO, subcommand, *arguments, "--kv-cache-memory-bytes", str(2**24)]


def until(found, what, seconds=20):
    """What `found` returns, as soon as it is something."""
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.02)
    return result


def follow(stream, lines):
    threading.Thread(target=lambda: lines.extend(line.rstrip("\n") for line in stream), daemon=True).start()


class Server:
    """A server that runs, and what it has logged."""

    def __init__(self, *arguments, **variables):
        line = command("serve", TINY, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "0",
                       "--shutdown-lag", "0", *arguments)
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment(variables))
        self.log = []
        follow(self.process.stderr, self.log)
        found = until(self._listening, lambda: "the server does not start:\n" + "\n".join(self.log))
        self.url = found.group(1)

    def _listening(self):
        assert self.process.poll() is None, "\n".join(self.log)
        return next(filter(None, (re.search(r"listening on (http://[\d.]+:\d+)", line) for line in self.log)), None)

    def request(self, body, path="/v1/completions", **headers):
        body = json.dumps({"model": "tiny", **body}).encode()
        headers = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        return urllib.request.Request(self.url + path, body, headers)

    def ask(self, body, **headers):
        """The status and the text of an answer."""
        try:
            with urllib.request.urlopen(self.request(body, **headers)) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read().decode()

    def stop(self):
        self.process.terminate()
        assert self.process.wait(timeout=20) == 0, "\n".join(self.log)


@contextlib.contextmanager
def serving(*arguments, **variables):
    server = Server(*arguments, **variables)
    try:
        yield server
        if server.process.poll() is None:
            server.stop()
    finally:
        server.process.kill()
        server.process.wait()
