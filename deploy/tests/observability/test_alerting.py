"""From a server that is killed to the message that somebody gets: Prometheus, our rules, Alertmanager, a webhook."""

import contextlib
import http.server
import json
import queue
import re
import threading
import time

import pytest

from places import MONITORING, free_port
from processes import program, running, until
from prometheus import scraping
from serving import SMALL, serving


@contextlib.contextmanager
def webhook():
    """A port, and a queue of what arrives there: (path, alert)."""
    arrived = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in message["alerts"]:
                arrived.put((self.path, alert))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, arrived
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def alertmanager(folder, port_of_webhook):
    """Our example, with a receiver that is here and times of a second."""
    text = (MONITORING / "alertmanager.yaml").read_text()
    text = text.replace("http://alert-receiver.monitoring.svc:8080", f"http://127.0.0.1:{port_of_webhook}")
    text = re.sub(r"(group_wait|group_interval): \w+", r"\1: 1s", text)
    file = folder / "alertmanager.yml"
    file.write_text(text)
    port = free_port()
    command = [
        program("prometheus-alertmanager"),
        f"--config.file={file}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with running(command, folder / "alertmanager.log", f"http://127.0.0.1:{port}/-/ready"):
        yield f"127.0.0.1:{port}"


def hastened(folder):
    """Our rules, with a second for each `for`."""
    texts = {name: (MONITORING / name).read_text() for name in ("recording.yaml", "alerts.yaml")}
    for name, text in texts.items():
        (folder / name).write_text(re.sub(r"^( +for): \w+$", r"\1: 1s", text, flags=re.MULTILINE))
    return [folder / name for name in texts]


def expect(arrived, path, name, status, limit=30):
    """Waits for the message; others may come before it."""
    deadline = time.monotonic() + limit
    seen = []
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            where, alert = arrived.get(timeout=left)
            seen.append((where, alert["labels"]["alertname"], alert["status"]))
            if seen[-1] == (path, name, status):
                return alert
    pytest.fail(f"no {status} {name} on {path}, but {seen}")


def test_a_killed_server_is_reported_and_then_that_none_is_left(model, tmp_path):
    with contextlib.ExitStack() as stack:
        port, arrived = stack.enter_context(webhook())
        manager = stack.enter_context(alertmanager(tmp_path, port))
        stays = stack.enter_context(serving(*SMALL, model=model))
        goes = stack.enter_context(serving(*SMALL, model=model))
        targets = [(server.address, {"pod": name}) for name, server in (("stays", stays), ("goes", goes))]
        jobs = {"octavo": targets}
        prometheus = stack.enter_context(scraping(tmp_path, jobs, rules=hastened(tmp_path), alertmanager=manager))
        until("both are scraped", lambda: prometheus.value('sum(up{job="octavo"})') == 2)

        goes.process.kill()
        alert = expect(arrived, "/on-call", "OctavoDown", "firing")
        assert alert["labels"] == {
            "alertname": "OctavoDown",
            "instance": goes.address,
            "job": "octavo",
            "pod": "goes",
            "severity": "critical",
        }
        assert alert["annotations"]["runbook_url"] == "deploy/runbooks/OctavoDown.md"
        assert goes.address in alert["annotations"]["summary"]

        stays.process.kill()
        expect(arrived, "/on-call", "OctavoAllDown", "firing")
