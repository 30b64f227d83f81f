#!/usr/bin/env python3
"""Time of a small chat while other clients send hostile images, and time to the first token of a chat with an image.

    benches/beside_images.py attack target/release/octavo
    benches/beside_images.py first-token target/release/octavo

`attack` serves the tiny Qwen3-VL of the tests. One client sends chats of text one after the other, and others send one
kind of hostile image at a time: URLs of hosts that announce 256 MiB and are silent, URLs of hosts that stop after 40 MiB,
PNG files of some kilobytes with 169 megapixels, JPEG files of 16 megapixels, and animated GIF files of 5,000 frames. It
prints a row for each.

`first-token` serves a model of the sizes of Qwen3-VL-2B with dummy weights and the tokenizer of the tiny one, and times
requests of one token.

Needs Pillow and numpy.
"""

import argparse
import base64
import collections
import contextlib
import http.client
import io
import json
import multiprocessing
import os
import pathlib
import shutil
import socket
import statistics
import tempfile
import threading
import time

import numpy as np
from PIL import Image
from serving import served

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = ROOT / "models/testdata/qwen3-vl"
SHAPE = ROOT / "models/shapes/qwen3-vl-2b"
TEXT = {"type": "text", "text": "Name a colour."}
MIB = 1 << 20


def post(port, parts, tokens):
    """Returns the status of a chat."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": tokens, "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def file(picture, form, **options):
    out = io.BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def data_url(data):
    return f"data:;base64,{base64.b64encode(data).decode()}"


def noise(side, seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8))


def slow_host(listener, sent):
    """Announces 256 MiB to every client, sends `sent` bytes, and waits for the client to leave."""

    def serve(stream):
        with contextlib.suppress(OSError), stream:
            stream.recv(65536)
            stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (256 * MIB))
            stream.sendall(bytes(sent))
            stream.recv(1)

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def attack(port, clients, url, statuses):
    """Sends images from a number of clients, over and over. `url` makes the URL of an image from its number."""

    def client(number):
        for turn in range(1 << 30):
            try:
                statuses.put(post(port, [TEXT, image(url(f"{number}-{turn}"))], 1))
            except (OSError, http.client.HTTPException) as error:
                statuses.put(type(error).__name__)

    for number in range(clients):
        threading.Thread(target=client, args=(number,), daemon=True).start()
    threading.Event().wait()


def attacks(hosts):
    """The clients of each attack, and what makes their URLs."""

    def host(name):
        return lambda number: f"http://127.0.0.1:{hosts[name]}/{number}"

    def data(picture, form, **options):
        content = file(picture, form, **options)
        # What follows the image makes it another file, which is in no cache.
        return lambda number: data_url(content + number.encode())

    bomb, ramp = Image.new("L", (13000, 13000), 9), np.linspace(0, 255, 4624, dtype=np.uint8)
    large = Image.fromarray(np.broadcast_to(ramp[None, :, None], (3468, 4624, 3)).copy())
    frames = [Image.new("L", (500, 500), value % 256) for value in range(5000)]
    return {
        "none": (0, None),
        "64 clients, hosts that are silent": (64, host("silent")),
        "32 clients, hosts that stop after 40 MiB": (32, host("stopped")),
        "8 clients, PNG files of 169 MP": (8, data(bomb, "PNG")),
        "8 clients, JPEG files of 16 MP": (8, data(large, "JPEG")),
        "8 clients, GIF files of 5,000 frames": (8, data(frames[0], "GIF", save_all=True, append_images=frames[1:])),
    }


def ready(port):
    """An error until the server has loaded its model."""
    if post(port, [TEXT], 1) != 200:
        raise RuntimeError("the server is loading")


def resident(server):
    fields = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{server.pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) // 1024


def measure_attacks(arguments):
    context = multiprocessing.get_context("fork")
    hosts = {}
    for name, sent in {"silent": 1000, "stopped": 40 * MIB}.items():
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        hosts[name] = listener.getsockname()[1]
        context.Process(target=slow_host, args=(listener, sent), daemon=True).start()
    print("| attack | chats | p50, ms | p99, ms | longest, ms | answers to the attack | peak memory, MiB |")
    print("|---|---|---|---|---|---|---|")
    for name, (clients, url) in attacks(hosts).items():
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        flags = ["--allowed-media-networks", "127.0.0.0/8", "--shutdown-timeout", "0"]
        with served(ready, arguments.binary, TINY, *flags) as (server, port):
            statuses = context.SimpleQueue()
            attacker = context.Process(target=attack, args=(port, clients, url, statuses), daemon=True)
            attacker.start()
            time.sleep(3)
            times, end = [], time.monotonic() + arguments.seconds
            while time.monotonic() < end:
                begun = time.monotonic()
                status = post(port, [TEXT], 8)
                times.append((time.monotonic() - begun) * 1e3)
                if status != 200:
                    raise SystemExit(f"a chat got {status}")
            attacker.terminate()
            got = collections.Counter()
            while not statuses.empty():
                got[statuses.get()] += 1
            peak = resident(server)
        p99 = statistics.quantiles(times, n=100, method="inclusive")[98]
        told = ", ".join(f"{count} x {status}" for status, count in sorted(got.items(), key=str)) or "-"
        figures = [f"{value:.1f}" for value in (statistics.median(times), p99, max(times))]
        print("|", " | ".join([name, str(len(times)), *figures, told, str(peak)]), "|", flush=True)


def large_model(folder):
    """The shape of Qwen3-VL-2B with the tokenizer of the tiny model."""
    for file in TINY.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config, tiny = [json.loads((path / "config.json").read_text()) for path in (SHAPE, TINY)]
    config.update({key: value for key, value in tiny.items() if key.endswith("_token_id")})
    (folder / "config.json").write_text(json.dumps(config))
    processor = json.loads((TINY / "preprocessor_config.json").read_text())
    processor.update(patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216})
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def measure_first_token(arguments):
    with tempfile.TemporaryDirectory() as folder:
        large_model(pathlib.Path(folder))
        flags = ["--load-format", "dummy", "--max-model-len", "4096", "--shutdown-timeout", "0"]
        with served(ready, arguments.binary, folder, *flags) as (_, port):
            print("| image | request | median, ms | least | most |\n|---|---|---|---|---|")
            for side in arguments.sides:
                times = collections.defaultdict(list)

                def timed(name, parts):
                    begun = time.monotonic()
                    status = post(port, parts, 1)
                    times[name].append((time.monotonic() - begun) * 1e3)
                    if status != 200:
                        raise SystemExit(f"{name}: {status}")

                for turn in range(arguments.rounds + 1):
                    url = image(data_url(file(noise(side, turn), "PNG")))
                    timed("a new image", [url, TEXT])
                    timed("the same image after another text", [{"type": "text", "text": f"{turn}."}, url, TEXT])
                    timed("the same request", [url, TEXT])
                for name, values in times.items():
                    # The first turn touches memory.
                    values = values[1:]
                    figures = [f"{value:.0f}" for value in (statistics.median(values), min(values), max(values))]
                    print("|", " | ".join([f"{side}x{side}", name, *figures]), "|", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["attack", "first-token"])
    parser.add_argument("binary")
    parser.add_argument("--seconds", type=float, default=20, help="time of each attack")
    parser.add_argument("--only", nargs="+", help="words of the attacks to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", type=int, nargs="+", default=[256, 512])
    arguments = parser.parse_args()
    arguments.binary = os.path.abspath(arguments.binary)
    (measure_attacks if arguments.what == "attack" else measure_first_token)(arguments)


if __name__ == "__main__":
    main()
