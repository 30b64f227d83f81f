#!/usr/bin/env python3
"""Time of a small chat while another client loads the server.

Starts `octavo serve` once for each configuration, sends small chats one after the other from one client, and one of
three loads from another. Clients are told apart by API keys. Prints a row for each configuration and load.

    benches/beside_chat.py target/release/octavo model.gguf --seconds 40
"""

import argparse
import contextlib
import http.client
import itertools
import statistics
import threading
import time

from serving import request, served

POLICIES, LIMITS = ("fcfs", "fair"), (0, 50, 100, 200)


def post(port, key, path, body):
    request(port, "POST", path, body, {"Authorization": f"Bearer {key}"})


def chat(port):
    message = {"role": "user", "content": "Name a colour."}
    post(port, "light", "/v1/chat/completions", {"messages": [message], "max_tokens": 8, "temperature": 0})


def prefill(number, tokens=4000, **fields):
    """A prompt that no earlier one begins like."""
    prompt = [number % 1000 + 100] + [200 + i % 7000 for i in range(tokens - 1)]
    return {"prompt": prompt, "max_tokens": 1, **fields}


LOADS = {
    "none": None,
    "4,000-token prefill": prefill,
    "prompt_logprobs": lambda number: prefill(number, prompt_logprobs=1),
    "n=256": lambda number: {"prompt": f"Story {number}:", "n": 256, "max_tokens": 64, "ignore_eos": True},
}


class Load:
    """A client that repeats a request until it is stopped."""

    def __init__(self, port, make):
        self.done, self.sent = threading.Event(), 0
        self.thread = threading.Thread(target=self.run, args=(port, make), daemon=True)
        self.thread.start()

    def run(self, port, make):
        while not self.done.is_set():
            try:
                post(port, "heavy", "/v1/completions", make(self.sent))
            except (OSError, RuntimeError, http.client.HTTPException):
                return
            self.sent += 1


def start(arguments, policy, limit):
    flags = ["--max-model-len", "4096", "--api-key", "light", "heavy", "--shutdown-timeout", "0"]
    flags += ["--scheduling-policy", policy, "--max-step-ms", str(limit)]
    return served(chat, arguments.binary, arguments.model, *flags)


def measure(port, make, seconds):
    load = Load(port, make) if make else None
    if load:
        time.sleep(2)
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 2:
        begun = time.monotonic()
        chat(port)
        times.append(time.monotonic() - begun)
    if load:
        load.done.set()
    return times


def beside(arguments):
    """Prints the time of small chats beside each load, for each configuration."""
    print("| configuration | load | chats | p50, s | p99, s |\n|---|---|---|---|---|")
    for policy, limit in itertools.product(arguments.policies, arguments.limits):
        for load in arguments.loads:
            with start(arguments, policy, limit) as (_, port):
                times = measure(port, LOADS[load], arguments.seconds)
            p99 = statistics.quantiles(times, n=100, method="inclusive")[98]
            row = [f"{policy}, {named(limit)}", load, len(times), f"{statistics.median(times):.2f}", f"{p99:.2f}"]
            print("|", " | ".join(map(str, row)), "|", flush=True)


def cost(arguments):
    """Prints the time of two loads alone under each limit, as ratios to steps without a limit."""
    works = {
        "prompt of 400 tokens": lambda number: prefill(number, 400),
        "n=32, 16 tokens": lambda number: {"prompt": f"Story {number}:", "n": 32, "max_tokens": 16, "ignore_eos": True},
    }
    with contextlib.ExitStack() as stack:
        started = {limit: stack.enter_context(start(arguments, "fcfs", limit)) for limit in {0, *arguments.limits}}
        print("| load | limit | median, s | ratio to no limit: median (least to most) |\n|---|---|---|---|")
        for name, make in works.items():
            times = {limit: [] for limit in sorted(started)}
            for number in range(arguments.rounds):
                for limit, row in times.items():
                    begun = time.monotonic()
                    post(started[limit][1], "heavy", "/v1/completions", make(number))
                    row.append(time.monotonic() - begun)
            for limit, row in times.items():
                ratios = sorted(ours / free for ours, free in zip(row, times[0], strict=True))
                spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"| {name} | {named(limit)} | {statistics.median(row):.2f} | {spread} |", flush=True)


def named(limit):
    return f"{limit} ms" if limit else "no limit"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--cost", action="store_true", help="measure the loads alone instead of the chat beside them")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of --cost")
    parser.add_argument("--seconds", type=float, default=40, help="time of each measurement beside a load")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--limits", nargs="+", type=int, default=LIMITS, help="values of --max-step-ms")
    arguments = parser.parse_args()
    (cost if arguments.cost else beside)(arguments)


if __name__ == "__main__":
    main()
