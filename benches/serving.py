"""Servers that the benches in Python start, and requests to them."""

import contextlib
import http.client
import json
import socket
import subprocess
import time


def request(port, method, path, body=None, headers=()):
    """Returns the text of an answer. An answer other than 200 is an error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json", **dict(headers)}
    connection.request(method, path, body and json.dumps(body), headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {text[:200]!r}")
    return text


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def served(ready, binary, model, *flags):
    """Starts a server on the processor. Gives its process and its port, once `ready(port)` ends without an error."""
    port = free_port()
    line = [binary, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", *flags]
    server = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while True:
            try:
                ready(port)
                break
            except (OSError, RuntimeError):
                if server.poll() is not None:
                    raise SystemExit("the server has ended") from None
                if time.monotonic() > end:
                    raise SystemExit("the server does not answer") from None
                time.sleep(0.2)
        yield server, port
    finally:
        server.terminate()
        server.wait()
