"""A target that looks like dcgm-exporter with its default counters on a machine of two GPUs."""

import contextlib
import http.server
import threading
import time

# Name, type, value of GPU 0, what GPU 1 has more, and what a counter gains in a second.
COUNTERS = [
    ("DCGM_FI_DEV_SM_CLOCK", "gauge", 2520, 15, 0),
    ("DCGM_FI_DEV_MEM_CLOCK", "gauge", 9001, 0, 0),
    ("DCGM_FI_DEV_MEMORY_TEMP", "gauge", 58, 3, 0),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", 61, 4, 0),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", 287.5, 12, 0),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", 9_000_000, 0, 287_500),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", 0, 0, 0),
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", 83, 9, 0),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", 54, 1, 0),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", 0, 0, 0),
    ("DCGM_FI_DEV_FB_FREE", "gauge", 4400, 100, 0),
    ("DCGM_FI_DEV_FB_USED", "gauge", 41000, -100, 0),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter", 0, 0, 0),
    ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "counter", 0, 0, 0),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", 0, 0, 0),
]


def page(begin):
    lines = []
    for name, kind, value, more, gain in COUNTERS:
        lines += [f"# HELP {name} {name}.", f"# TYPE {name} {kind}"]
        for gpu in range(2):
            labels = f'gpu="{gpu}",UUID="GPU-{gpu}",device="nvidia{gpu}",modelName="NVIDIA L40S",Hostname="node-a"'
            now = value + gpu * more + gain * (time.monotonic() - begin)
            lines.append(f"{name}{{{labels}}} {now}")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def exporter():
    """Its port, inside the block."""
    begin = time.monotonic()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            text = page(begin).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
