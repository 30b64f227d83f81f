#!/usr/bin/env python3
"""Compares Octavo with llama-server on a mixture of experts, in one run on the processor.

    python experts.py model VOCABULARY.gguf OUT.gguf   # writes a random model with the vocabulary of another file
    python experts.py run OCTAVO LLAMA_SERVER OUT.gguf [ROUNDS]

`model` needs numpy and the gguf package. The model has the shape of a Qwen3-MoE in small: 12 layers of hidden size 1024,
32 experts of 512 in Q4_0, of which a token uses 4; 414 MB with the vocabulary of SmolLM2. `run` starts both servers and
sends the same requests to each in turn: 1, 8 and 32 at once, greedy, and a prompt of 700 words. It prints tokens a second
as median, least and most over the rounds, and the ratio of the two in each round.
"""

import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 1024, 12, 16, 4, 64
EXPERTS, CHOSEN, INNER = 32, 4, 512
WORDS = "time people way water day man thing woman life child world school state family student group country".split()
# Requests at once, words of a prompt, new tokens.
LEVELS = {"1 request": (1, 32, 96), "8 requests": (8, 32, 64), "32 requests": (32, 32, 48), "prefill": (1, 700, 1)}
SLOTS, CONTEXT = 32, 1024


def write_model(vocabulary, path):
    import gguf
    import numpy as np
    from gguf import GGMLQuantizationType as Q

    source, random_numbers = gguf.GGUFReader(vocabulary), np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen3moe")

    def values(key, decode):
        field = source.fields[key]
        return [decode(field.parts[index]) for index in field.data]

    text = lambda part: bytes(part).decode()
    tokens = values("tokenizer.ggml.tokens", text)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(values("tokenizer.ggml.token_type", lambda part: int(part[0])))
    writer.add_token_merges(values("tokenizer.ggml.merges", text))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)

    def matrix(name, shape, storage=Q.Q4_0, gain=1.0):
        drawn = random_numbers.standard_normal(shape) * gain / np.sqrt(shape[-1])
        writer.add_tensor(name, gguf.quants.quantize(drawn.astype(np.float32), storage), raw_dtype=storage)

    def norm(name, cols):
        writer.add_tensor(name, np.ones(cols, np.float32))

    matrix("token_embd.weight", (len(tokens), HIDDEN), Q.Q8_0, 16.0)
    norm("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        name = f"blk.{layer}.".__add__
        norm(name("attn_norm.weight"), HIDDEN)
        norm(name("ffn_norm.weight"), HIDDEN)
        norm(name("attn_q_norm.weight"), HEAD_SIZE)
        norm(name("attn_k_norm.weight"), HEAD_SIZE)
        matrix(name("attn_q.weight"), (HEADS * HEAD_SIZE, HIDDEN))
        matrix(name("attn_k.weight"), (KV_HEADS * HEAD_SIZE, HIDDEN))
        matrix(name("attn_v.weight"), (KV_HEADS * HEAD_SIZE, HIDDEN))
        matrix(name("attn_output.weight"), (HIDDEN, HEADS * HEAD_SIZE))
        matrix(name("ffn_gate_inp.weight"), (EXPERTS, HIDDEN), Q.F32, 3.0)
        matrix(name("ffn_gate_exps.weight"), (EXPERTS, INNER, HIDDEN))
        matrix(name("ffn_up_exps.weight"), (EXPERTS, INNER, HIDDEN))
        matrix(name("ffn_down_exps.weight"), (EXPERTS, HIDDEN, INNER))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Server:
    def __init__(self, command, flags):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [*command, "--host", "127.0.0.1", "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                if self.request("GET", "/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.2)
        else:
            raise RuntimeError(f"{command[0]} does not start")
        self.model = self.request("GET", "/v1/models")[1]["data"][0]["id"]

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text.startswith(b"{") else None

    def speed(self, prompts, new_tokens):
        """Returns the prompt tokens and the new tokens a second of requests that are sent at once."""
        usages = []

        def one(prompt):
            body = {"model": self.model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
            usages.append(self.request("POST", "/v1/completions", body)[1]["usage"])

        threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        assert [usage["completion_tokens"] for usage in usages] == [new_tokens] * len(prompts), usages
        return sum(usage["prompt_tokens"] for usage in usages) / seconds, new_tokens * len(prompts) / seconds


def run(octavo, llama, model, rounds):
    servers = {
        "octavo": Server([octavo, "serve", model], ["--device", "cpu", "--max-model-len", str(CONTEXT),
                                                    "--max-num-seqs", str(SLOTS)]),
        "llama-server": Server([llama, "-m", model], ["-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "--cont-batching",
                                                      "-t", "2", "-tb", "2", "-fa", "off"]),
    }
    numbers, speeds = random.Random(3), {}
    try:
        for server in servers.values():
            server.speed(["a day"], 8)
        for index in range(rounds):
            for level, (count, words, new_tokens) in LEVELS.items():
                for name in list(servers)[:: 1 if index % 2 == 0 else -1]:
                    prompts = [" ".join(numbers.choices(WORDS, k=words)) for _ in range(count)]
                    prompt_speed, speed = servers[name].speed(prompts, new_tokens)
                    speeds.setdefault((level, name), []).append(prompt_speed if level == "prefill" else speed)
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait()
    for level in LEVELS:
        ours, theirs = [speeds[level, name] for name in servers]
        print(level, *(f"{name} {spread(speeds[level, name], 0)}" for name in servers),
              f"ratio {spread([a / b for a, b in zip(ours, theirs)], 2)}", sep=" | ")


def spread(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main():
    match sys.argv[1:]:
        case ["model", vocabulary, path]:
            write_model(vocabulary, path)
        case ["run", octavo, llama, model, *rounds]:
            run(octavo, llama, model, int(rounds[0]) if rounds else 5)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
