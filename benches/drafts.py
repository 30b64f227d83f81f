#!/usr/bin/env python3
"""Speed of short chats with drafts from n-grams, as a ratio to that without.

Starts two servers of one model, one of them with `--speculative-config`, and sends both the same chats: one at a time and
all at once, greedy and random. The servers take turns, and each goes first in every second round. The answers of both are
compared. The drafts of the second server are read from its metrics.

    benches/drafts.py target/release/octavo model.gguf --rounds 9
"""

import argparse
import concurrent.futures
import json
import re
import statistics
import time

from serving import request, served

CHATS = [
    "Name three colours of the rainbow.",
    "What is the capital of Portugal, and on which river does it lie?",
    "Write a function in Python that returns the largest number of a list.",
    "Repeat this sentence twice: The quick brown fox jumps over the lazy dog.",
    "List the days of the week with a short note about each.",
    "Translate to French: Good morning, my friend. How are you today?",
]


def chat(port, content, temperature, tokens):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": temperature, "seed": 1}
    answer = json.loads(request(port, "POST", "/v1/chat/completions", body))
    return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]


def measure(port, temperature, clients, tokens):
    """Answers, and output tokens per second of all clients together."""
    begun = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda content: chat(port, content, temperature, tokens), CHATS))
    seconds = time.monotonic() - begun
    return [text for text, _ in answers], sum(count for _, count in answers) / seconds


def drafts(port):
    """Number of tokens that were drafted and accepted so far."""
    text = request(port, "GET", "/metrics").decode()
    counter = lambda name: re.search(rf"^vllm:spec_decode_num_{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE)
    found = [counter(name) for name in ("draft_tokens", "accepted_tokens")]
    return [float(number[1]) if number else 0.0 for number in found]


def start(arguments, more):
    flags = ["--max-model-len", "1024", "--kv-cache-memory-bytes", "256M", "--shutdown-timeout", "0", *more]
    return served(lambda port: chat(port, "Hello", 0, 1), arguments.binary, arguments.model, *flags)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--drafts", type=int, default=4, help="tokens that a step may draft for a sequence")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    settings = {"method": "ngram", "num_speculative_tokens": arguments.drafts, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    speculation = ["--speculative-config", json.dumps(settings)]
    with start(arguments, []) as (_, plain_port), start(arguments, speculation) as (_, drafting_port):
        ports = [plain_port, drafting_port]
        print("| temperature | at once | tokens/s without | with | ratio: median (least to most) | drafted | accepted |")
        print("|---|---|---:|---:|---|---:|---:|")
        for temperature in (0, 0.8):
            for clients in (1, len(CHATS)):
                rounds, before = [], drafts(ports[1])
                for number in range(arguments.rounds):
                    order = [0, 1] if number % 2 == 0 else [1, 0]
                    found = {which: measure(ports[which], temperature, clients, arguments.tokens) for which in order}
                    if found[0][0] != found[1][0]:
                        raise SystemExit(f"the answers differ: {found[0][0]} and {found[1][0]}")
                    rounds.append((found[0][1], found[1][1]))
                ratios = sorted(with_ / without for without, with_ in rounds)
                plain, drafted = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
                made, accepted = (after - first for after, first in zip(drafts(ports[1]), before, strict=True))
                spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"| {temperature} | {clients} | {plain:.1f} | {drafted:.1f} | {spread} | {made:.0f} | {accepted:.0f} |")


if __name__ == "__main__":
    main()
