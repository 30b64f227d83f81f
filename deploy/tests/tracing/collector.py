"""Rotel as the collector that the server sends traces to."""

import pathlib
import re
import socket
import subprocess

import rotel

from places import free_port
from processes import follow, until

AGENT = pathlib.Path(rotel.__file__).parent / "rotel-agent"


class Collector:
    """Rotel, which prints what it receives."""

    def __init__(self, folder):
        grpc, http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.addresses = {"grpc": f"http://{grpc}", "http/protobuf": f"http://{http}"}
        line = [AGENT, "start", "--otlp-grpc-endpoint", grpc, "--otlp-http-endpoint", http, "--exporter", "blackhole",
                "--debug-log", "traces", "--debug-log-verbosity", "detailed", "--pid-file", folder / "rotel.pid"]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        follow(self.process.stdout, self.lines)
        until(lambda: "\n".join(self.lines), lambda: any("Starting" in line for line in self.lines))
        for address in (grpc, http):
            until(f"Rotel listens on {address}", lambda: self._answers(address))

    @staticmethod
    def _answers(address):
        host, port = address.split(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def spans(self):
        """Every span so far, as a dict of its fields and its attributes."""
        spans, resource, current = [], {}, None
        for line in list(self.lines):
            text = line.strip()
            if text.startswith("ResourceSpans #"):
                resource = current = {}
            elif text.startswith("Span #"):
                current = {"resource": resource}
                spans.append(current)
            elif match := re.fullmatch(r"-> ([\w.]+): (\w+)\((.*)\)", text):
                name, kind, value = match.groups()
                current[name] = {"Int": int, "Double": float}.get(kind, str)(value)
            elif current is not None and (match := re.fullmatch(r"([A-Z][\w ]+?)\s*: ?(.*)", text)):
                current[match.group(1)] = match.group(2)
        return spans

    def span(self, request_id):
        """The span of one request."""
        wanted = lambda: [span for span in self.spans() if span.get("gen_ai.request.id") == request_id]
        found = until(lambda: f"no span of {request_id}:\n" + "\n".join(self.lines[-60:]), wanted)
        assert len(found) == 1, found
        return found[0]

    def stop(self):
        self.process.kill()
        self.process.wait()
