#!/usr/bin/env python3
"""Serving speed of one build of Octavo relative to another, on a processor.

Starts a server of each build with the same model. The servers take turns with the same load, and each goes first in every
second round. Each row is the ratio of the times of the second build to the first, as a speed: 2 is twice as fast. It is the
median over the rounds, with the least and the most of them.

    benches/builds.py before/octavo target/release/octavo model.gguf --rounds 5
"""

import argparse
import concurrent.futures
import json
import statistics
import time

from serving import request, served

WORDS = "river stone garden window letter market winter engine silver cloud forest paper candle bridge harbour copper".split()


def text(seed, words):
    """Returns text that differs from its beginning on for each seed."""
    return f"{seed}: " + " ".join(WORDS[(seed * 7 + index * (seed % 13 + 1)) % len(WORDS)] for index in range(words))


def complete(port, prompt, tokens, n=1):
    body = {"prompt": prompt, "max_tokens": tokens, "n": n, "temperature": 0.8, "seed": 1, "ignore_eos": True}
    answer = json.loads(request(port, "POST", "/v1/completions", body))
    assert answer["usage"]["completion_tokens"] == n * tokens, answer["usage"]


def together(port, prompts, tokens):
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: complete(port, prompt, tokens), prompts))


# Name, and what a server does. The first number makes all texts of a round new, so that no prefix was seen before.
ROWS = [
    ("1 request, 64 tokens", lambda port, new: complete(port, text(new, 12), 64)),
    ("8 requests, 32 tokens each", lambda port, new: together(port, [text(new + i, 12) for i in range(8)], 32)),
    ("32 requests, 16 tokens each", lambda port, new: together(port, [text(new + i, 12) for i in range(32)], 16)),
    ("prompt of 600 words", lambda port, new: complete(port, text(new, 600), 1)),
    ("n = 8 of 150 words, 16 tokens", lambda port, new: complete(port, text(new, 150), 16, n=8)),
    ("burst of 16 equal prompts of 150 words", lambda port, new: together(port, [text(new, 150)] * 16, 8)),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="binary of the first build")
    parser.add_argument("after", help="binary of the second build")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ready = lambda port: request(port, "GET", "/health")
    with served(ready, args.before, args.model) as (_, before), served(ready, args.after, args.model) as (_, after):
        for port in (before, after):
            complete(port, "Warm up.", 4)
        new = 1
        for name, work in ROWS:
            ratios, times = [], []
            for number in range(args.rounds):
                seconds = {}
                for port in (before, after) if number % 2 == 0 else (after, before):
                    begun = time.monotonic()
                    work(port, new)
                    seconds[port] = time.monotonic() - begun
                new += 40
                ratios.append(seconds[before] / seconds[after])
                times.append(seconds[after])
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"{name}: {statistics.median(ratios):.2f} ({spread}), {statistics.median(times):.2f} s", flush=True)


if __name__ == "__main__":
    main()
