"""A conversation with a model through the socket: questions with history, streamed, alone and several at once."""

import argparse
import json
import sys
import threading
import time
import urllib.request

from servers import serving, write_json

# Questions of one conversation, and a word that a right answer has; none where any answer will do.
QUESTIONS = [
    ("What is the capital of France?", "Paris"),
    ("Which river flows through that city?", None),
    ("Write one sentence about the sea.", None),
]


def stream(url, messages, tokens):
    """An answer, the seconds until its first token, and its tokens a second after that."""
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    # Not through a proxy: it is this machine's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    begun, first, text, usage = time.perf_counter(), None, "", {}
    with opener.open(request, timeout=120) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                if piece and first is None:
                    first = time.perf_counter()
                text += piece
    last = time.perf_counter()
    count = usage.get("completion_tokens", 0)
    rate = (count - 1) / (last - first) if first and count > 1 else None
    return {"text": text, "first_token_seconds": first - begun if first else None, "tokens": count, "tokens_per_second": rate}


def converse(url, tokens):
    messages, answers = [], []
    for question, expected in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = stream(url, messages, tokens)
        messages.append({"role": "assistant", "content": answer["text"]})
        answers.append({"question": question, "expected": expected, **answer})
    return answers


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--octavo", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", required=True)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer at most")
    parser.add_argument("--at-once", type=int, default=8, help="conversations that run at the same time afterwards")
    parser.add_argument("--any-answer", action="store_true", help="for a model of random weights")
    parser.add_argument("model", nargs="*", help="a model and its flags; the default model if there is none")
    arguments, flags = parser.parse_known_args()
    with serving(arguments.octavo, *arguments.model, *flags, "--device", arguments.device) as url:
        alone = converse(url, arguments.tokens)
        results = [None] * arguments.at_once
        threads = [
            threading.Thread(target=lambda i=i: results.__setitem__(i, converse(url, arguments.tokens)))
            for i in range(arguments.at_once)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    texts = [answer["text"] for answer in alone]
    same = sum(found is not None and [answer["text"] for answer in found] == texts for found in results)
    answered = sum(found is not None for found in results)
    write_json(arguments.json, {"alone": alone, "at_once": arguments.at_once, "answered": answered, "same_texts": same})
    wrong = 0
    for answer in alone:
        first, rate = answer["first_token_seconds"], answer["tokens_per_second"]
        timing = f"{first * 1e3:.1f} ms to the first token" if first else "no token"
        timing += f", {rate:.0f} tokens/s" if rate else ""
        print(f"> {answer['question']}\n{answer['text']}\n({timing})")
        wrong += bool(answer["expected"] and answer["expected"] not in answer["text"])
    print(f"{answered} of {arguments.at_once} conversations at once were answered, {same} with the same words as alone")
    if answered < arguments.at_once or (wrong and not arguments.any_answer):
        print("an answer is missing or wrong")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
