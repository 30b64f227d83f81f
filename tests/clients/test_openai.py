"""The OpenAI SDK, unchanged, against the real server."""

import concurrent.futures

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="session")
def client(base_url):
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def test_models(client):
    models = client.models.list().data
    assert [m.id for m in models] == ["default"]
    assert models[0].owned_by == "vllm"


def test_chat(client):
    answer = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=40)
    choice = answer.choices[0]
    assert "Paris" in choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_equals_the_whole(client):
    request = dict(model="default", messages=QUESTION, temperature=0, max_completion_tokens=40)
    whole = client.chat.completions.create(**request)
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_system_prompt_and_content_parts(client):
    messages = [
        {"role": "system", "content": "You answer with one word."},
        {"role": "user", "content": [{"type": "text", "text": "Name a colour."}, {"type": "text", "text": "Please."}]},
    ]
    answer = client.chat.completions.create(model="default", messages=messages, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="default", messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert bytes(token.bytes).decode(errors="replace") == token.token
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)


def test_completions_with_stop_and_several_choices(client):
    answer = client.completions.create(model="default", prompt="1, 2, 3, 4, 5, 6,", temperature=0, max_tokens=30, stop=["9"])
    assert answer.choices[0].finish_reason == "stop" and "9" not in answer.choices[0].text
    answer = client.completions.create(model="default", prompt=["One", "Two"], n=2, temperature=1, seed=1, max_tokens=4)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens <= 16


def test_completion_logprobs(client):
    answer = client.completions.create(model="default", prompt="The sea is", temperature=0, max_tokens=4, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.token_logprobs) == len(logprobs.text_offset) == 4
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)


def test_vllm_extensions(client):
    answer = client.chat.completions.create(
        model="default",
        messages=QUESTION,
        max_tokens=6,
        seed=3,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 6, "ignore_eos": True},
    )
    assert answer.usage.completion_tokens == 6 and answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "change, error",
    [
        ({"model": "nope"}, openai.NotFoundError),
        ({"temperature": 5}, openai.BadRequestError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.BadRequestError),
    ],
)
def test_errors_are_the_classes_a_client_expects(client, change, error):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "default", "messages": QUESTION, "max_tokens": 4, **change})
    assert caught.value.body["message"]


def test_many_threads_get_the_same_greedy_answer(client):
    def ask(_):
        answer = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=12)
        return answer.choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(ask, range(32)))) == 1


def test_leaving_a_stream_early(client, base_url):
    with client.completions.create(model="default", prompt="x", max_tokens=900, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    assert client.completions.create(model="default", prompt="x", max_tokens=1).choices
