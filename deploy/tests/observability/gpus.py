"""A target that looks like dcgm-exporter with its default counters on a machine of two GPUs, and like a server on one of them in
what no server on a processor tells."""

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

# Name, type, label, value, and what a counter gains in a second.
SERVER = [
    ("octavo_step_bandwidth_utilization", "gauge", "", 0.71, 0),
    ("octavo_step_flops_utilization", "gauge", "", 0.12, 0),
    ("octavo_device_memory_bytes", "gauge", 'kind="weights"', 16.4e9, 0),
    ("octavo_cuda_graph_steps_total", "counter", 'mode="replayed"', 100, 50),
    ("octavo_cuda_graph_steps_total", "counter", 'mode="launched"', 100, 5),
]


def server(begin):
    lines = []
    for name, kind, label, value, gain in SERVER:
        head = [f"# HELP {name} {name}.", f"# TYPE {name} {kind}"]
        lines += [] if head[0] in lines else head
        labels = ",".join(filter(None, ['engine="0",model_name="m"', label]))
        lines.append(f"{name}{{{labels}}} {value + gain * (time.monotonic() - begin)}")
    return lines


def page(begin):
    lines = server(begin)
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
