"""Keys with names and limits, as the SDKs see them."""

import hashlib
import re
import urllib.request

import anthropic
import openai
import pytest

from conftest import ROOT, serving

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server whose clients may send six requests at once, and then one every ten seconds."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    names = ["openai", "anthropic"]
    entry = "- name: {}\n  sha256: {}\n  requests-per-minute: 6\n"
    path.write_text("".join(entry.format(name, hashlib.sha256(f"sk-{name}".encode()).hexdigest()) for name in names))
    model = ROOT / "models" / "testdata" / "llama"
    with serving(model, "--served-model-name", "tiny", "--api-keys-file", path) as url:
        yield url


def series(url, name):
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        found = re.findall(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[0])


def test_the_sdk_comes_back_when_the_limit_allows_it(url):
    request = dict(model="tiny", messages=MESSAGES, max_tokens=1)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="sk-openai", max_retries=0)
    with pytest.raises(openai.RateLimitError) as refused:
        for _ in range(100):
            client.chat.completions.create(**request)
    error = refused.value
    assert (error.status_code, error.code, error.type) == (429, "rate_limit_exceeded", "requests")
    assert "The API key 'openai' is over its limit of 6 requests per minute." in error.message
    assert 1 <= int(error.response.headers["retry-after"]) <= 10
    assert error.response.headers["x-ratelimit-limit-requests"] == "6"
    assert error.response.headers["x-ratelimit-remaining-requests"] == "0"

    rejections = 'octavo_key_rejections_total{key_name="openai",limit="requests_per_minute"}'
    before = series(url, rejections)
    patient = client.with_options(max_retries=2)
    answer = patient.chat.completions.with_raw_response.create(**request)
    assert answer.parse().usage.completion_tokens == 1
    # One refusal: the retry was neither too early nor one of many.
    assert (answer.retries_taken, series(url, rejections) - before) == (1, 1)


def test_anthropics_sdk_knows_the_error(url):
    client = anthropic.Anthropic(base_url=url, api_key="sk-anthropic", max_retries=0)
    with pytest.raises(anthropic.RateLimitError) as refused:
        for _ in range(100):
            client.messages.create(model="tiny", messages=MESSAGES, max_tokens=1)
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 10


def test_a_wrong_key_is_no_key(url):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-other", max_retries=0).models.list()
    assert series(url, 'octavo_key_requests_total{key_name="openai"}') > 0
