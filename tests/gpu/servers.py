"""What the parts share that ask a server: starting one, and asking."""

import contextlib
import json
import os
import re
import subprocess
import threading
import urllib.error
import urllib.request


@contextlib.contextmanager
def serving(octavo, *arguments):
    """The URL of a server that runs inside the block, on a free port."""
    command = [octavo, "serve", *arguments, "--host", "127.0.0.1", "--port", "0", "--served-model-name", "default"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    log = []
    try:
        for line in server.stderr:
            log.append(line)
            if re.search(r"device: |ready after ", line):
                print(line.rstrip(), flush=True)
            if match := re.search(r"listening on (http://\S+)", line):
                break
        else:
            raise SystemExit("the server did not start:\n" + "".join(log))
        # Somebody must read on, or it would wait.
        threading.Thread(target=lambda: [None for _ in server.stderr], daemon=True).start()
        yield match.group(1)
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()


def ask(url, path, body):
    """The answer to a POST."""
    # Not through a proxy: it is this machine's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=300) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{path}: {error.code} {error.read().decode()}") from None


def write_json(path, value):
    """Whole or not at all."""
    partial = path + ".partial"
    with open(partial, "w") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
    os.replace(partial, path)
