"""A saturated server: requests of N tokens in and N out, all at once, through the socket, by `octavo bench serve`."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from servers import serving


def load(octavo, url, folder, name, requests, words, tokens):
    """What `octavo bench serve` measures."""
    command = [octavo, "bench", "serve", "--base-url", url, "--num-prompts", str(requests)]
    command += ["--random-input-len", str(words), "--random-output-len", str(tokens)]
    command += ["--save-result", "--result-dir", folder, "--result-filename", name]
    subprocess.run(command, check=True)
    with open(os.path.join(folder, name)) as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--octavo", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--result-dir", required=True)
    arguments, flags = parser.parse_known_args()
    model = [arguments.model, "--load-format", arguments.load_format, "--device", arguments.device, *flags]
    with serving(arguments.octavo, *model) as url:
        # A first run warms the server up and tells how many tokens of this tokenizer a word is.
        with tempfile.TemporaryDirectory() as folder:
            first = load(arguments.octavo, url, folder, "warmup.json", 4, 16, 16)
        words = max(1, round(arguments.tokens * 4 * 16 / first["total_input_tokens"]))
        result = load(
            arguments.octavo, url, arguments.result_dir, "serving.json", arguments.requests, words, arguments.tokens
        )
    print(f"{result['output_throughput']:.0f} output tokens a second")
    if result["completed"] != arguments.requests:
        print(f"only {result['completed']} of {arguments.requests} requests were answered")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
