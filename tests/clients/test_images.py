"""Images through the SDKs: OpenAI's, LangChain, and Anthropic's, unchanged."""

import base64
import concurrent.futures
import json

import anthropic
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from conftest import ROOT, serving

MODEL = ROOT / "models" / "testdata" / "qwen3-vl"
CASES = json.loads((MODEL / "chat.json").read_text())


@pytest.fixture(scope="module")
def images_url():
    with serving(str(MODEL), "--served-model-name", "eyes") as url:
        yield url


@pytest.fixture(scope="module")
def client(images_url):
    with openai.OpenAI(base_url=f"{images_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def parts(case):
    return case["messages"][0]["content"]


@pytest.fixture(scope="module")
def text(client):
    """The answer to the first case, whose tokens are PyTorch's."""
    answer = client.chat.completions.create(
        model="eyes", messages=CASES[0]["messages"], max_tokens=8, temperature=0, extra_body={"return_token_ids": True})
    assert answer.choices[0].token_ids == CASES[0]["answer"]
    assert answer.usage.prompt_tokens == CASES[0]["prompt_tokens"]
    return answer.choices[0].message.content


def test_a_stream_of_the_openai_sdk(client, text):
    chunks = client.chat.completions.create(
        model="eyes", messages=CASES[0]["messages"], max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


def test_responses_of_the_openai_sdk(client, text):
    content = [
        {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"} if part["type"] == "image_url"
        else {"type": "input_text", "text": part["text"]}
        for part in parts(CASES[0])
    ]
    response = client.responses.create(
        model="eyes", input=[{"role": "user", "content": content}], max_output_tokens=8, temperature=0)
    assert response.output_text == text


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(images_url, text, responses):
    model = ChatOpenAI(base_url=f"{images_url}/v1", api_key="none", model="eyes", max_retries=0, temperature=0,
                       max_tokens=8, use_responses_api=responses)
    assert model.invoke([HumanMessage(parts(CASES[0]))]).text == text


def test_the_anthropic_sdk(images_url, text):
    def block(part):
        if part["type"] == "text":
            return part
        data = part["image_url"]["url"].split(",")[1]
        assert base64.b64decode(data)
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    messages = [{"role": "user", "content": [block(part) for part in parts(CASES[0])]}]
    with anthropic.Anthropic(base_url=images_url, api_key="none", max_retries=0) as client:
        greedy = dict(model="eyes", messages=messages, max_tokens=8, extra_body={"temperature": 0})
        whole = client.messages.create(**greedy)
        assert whole.content[0].text == text
        counted = client.messages.count_tokens(model="eyes", messages=messages)
    assert counted.input_tokens == CASES[0]["prompt_tokens"]


def test_errors_name_the_image(client):
    for url, status, words in [
        ("data:image/png;base64,AAAA", 400, "Failed to load image"),
        ("http://127.0.0.1:1/x.png", 422, "Failed to fetch media from URL"),
    ]:
        image = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(openai.APIStatusError) as raised:
            client.chat.completions.create(model="eyes", messages=[{"role": "user", "content": [image]}])
        assert (raised.value.status_code, raised.value.param) == (status, "image_url")
        assert words in raised.value.message


def test_many_clients_send_images_at_the_same_time(client, text):
    """50 clients, each with 10 requests, of which some have other images."""
    expected = {case["name"]: case["answer"] for case in CASES}

    def ask(number):
        case = CASES[number % len(CASES)]
        answer = client.chat.completions.create(
            model="eyes", messages=case["messages"], max_tokens=8, temperature=0, extra_body={"return_token_ids": True})
        return answer.choices[0].token_ids == expected[case["name"]]

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        assert all(pool.map(ask, range(500)))
