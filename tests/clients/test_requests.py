"""Requests as tools without a client library send them: curl, and the load of `vllm bench serve`."""

import json
import subprocess

import pytest
import requests


def events(lines):
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def test_curl(tiny_url):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Well?"}], "max_tokens": 8, "stream": True}
    command = ["curl", "-sSN", "--fail-with-body", f"{tiny_url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert events(printed.splitlines())[0]["object"] == "chat.completion.chunk"


COMPLETION = {"prompt": "ab" * 20, "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": None}
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab" * 20}]}], "max_completion_tokens": 16}


@pytest.mark.parametrize("path, body", [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_the_load_of_vllm_bench(tiny_url, path, body):
    body = {**body, "model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    headers = {"Authorization": "Bearer ", "x-request-id": "bench-7"}
    with requests.post(tiny_url + path, json=body, headers=headers, stream=True, timeout=60) as response:
        chunks = events(response.iter_lines(decode_unicode=True))
    *said, usage = chunks
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 16
    # One event a token, and for a chat one more that names the role.
    assert len(said) == 16 + ("messages" in body)
    assert {chunk["id"] for chunk in chunks} == {("cmpl-" if path == "/v1/completions" else "chatcmpl-") + "bench-7"}


def test_the_models_sampling_defaults_are_shown_and_applied(base_url):
    info = requests.get(f"{base_url}/server_info", params={"config_format": "json"}, timeout=60).json()
    defaults = info["vllm_config"]["sampling_defaults"]
    # The recommendation of the model's card, from its entry in the catalog.
    assert defaults == {"temperature": 0.2, "top_p": 0.9}
    question = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 24}

    def answers(**parameters):
        bodies = [{**question, "seed": seed, **parameters} for seed in range(4)]
        replies = [requests.post(f"{base_url}/v1/chat/completions", json=body, timeout=60).json() for body in bodies]
        return [reply["choices"][0]["message"]["content"] for reply in replies]

    left_out = answers()
    assert left_out == answers(**defaults), "what a request leaves out is the model's default"
    assert left_out != answers(temperature=1, top_p=1), "what a request asks for wins"
