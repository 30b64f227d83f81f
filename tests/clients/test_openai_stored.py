"""Routes that need a server of their own: stored responses, batches, rendered requests and the development routes."""

import time

import openai
import pytest

from conftest import ROOT, serving


@pytest.fixture(scope="module")
def url():
    model = str(ROOT / "models" / "testdata" / "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with serving(model, "--served-model-name", "tiny") as url:
            yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as client:
        yield client


def test_responses_are_retrieved_and_continued(client, url):
    first = client.responses.create(model="tiny", input="One?", max_output_tokens=5)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    asked = dict(model="tiny", input="Two?", max_output_tokens=5, previous_response_id=first.id)
    assert client.responses.create(**asked).usage.input_tokens > first.usage.input_tokens
    with openai.OpenAI(base_url=f"{url}/v1", api_key="b", max_retries=0) as other:
        for attempt in (lambda: other.responses.retrieve(first.id), lambda: other.responses.create(**asked)):
            with pytest.raises(openai.NotFoundError, match="not found"):
                attempt()


def ended(client, response):
    """A background response after it has ended."""
    deadline = time.monotonic() + 120
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline, response
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    return response


def test_background_responses_are_polled_and_continued(client):
    asked = dict(model="tiny", input="One?", max_output_tokens=5, temperature=0)
    queued = client.responses.create(**asked, background=True)
    assert queued.background and queued.status in ("queued", "in_progress")
    done = ended(client, queued)
    assert (done.id, done.output_text) == (queued.id, client.responses.create(**asked).output_text)
    following = client.responses.create(**{**asked, "input": "Two?"}, background=True, previous_response_id=done.id)
    assert ended(client, following).usage.input_tokens > done.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(done.id)


def test_a_background_stream_is_left_and_followed(client):
    asked = dict(model="tiny", input="One?", max_output_tokens=5, background=True)
    with client.responses.create(**asked, stream=True) as stream:
        created = next(iter(stream))
    assert (created.type, created.sequence_number) == ("response.created", 0)
    for after in (0, 2):
        with client.responses.retrieve(created.response.id, stream=True, starting_after=after) as stream:
            events = list(stream)
        assert [event.sequence_number for event in events] == list(range(after + 1, after + 1 + len(events)))
        assert events[-1].type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert client.responses.retrieve(created.response.id).output_text == events[-1].response.output_text
    assert events[-1].response.output_text.endswith(text)


def test_responses_are_cancelled_and_deleted(client, url):
    asked = dict(model="tiny", input="One?", max_output_tokens=5, background=True)
    # A frozen engine cannot finish before the cancellation.
    client.post(f"{url}/pause?mode=keep", cast_to=object)
    try:
        queued = client.responses.create(**asked)
        cancelled = client.responses.cancel(queued.id)
        assert (cancelled.id, cancelled.status) == (queued.id, "cancelled")
        deleted = client.responses.create(**asked)
        client.responses.delete(deleted.id)
    finally:
        client.post(f"{url}/resume", cast_to=object)
    assert client.responses.retrieve(queued.id).status == "cancelled"
    for attempt in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not found"):
            attempt(deleted.id)
    client.responses.create(model="tiny", input="One?", max_output_tokens=1)


def test_batches_and_rendered_requests(client):
    message = {"role": "user", "content": "Well?"}
    asked = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    batch = client.post("/chat/completions/batch", cast_to=object, body={**asked, "messages": [[message], [message]]})
    single = client.chat.completions.create(**asked, messages=[message])
    assert [choice["message"]["content"] for choice in batch["choices"]] == [single.choices[0].message.content] * 2
    rendered = client.post("/chat/completions/render", cast_to=object, body={**asked, "messages": [message]})
    assert len(rendered["token_ids"]) == single.usage.prompt_tokens
    continued = client.completions.create(**asked, prompt=rendered["token_ids"])
    assert continued.choices[0].text == single.choices[0].message.content


def test_a_paused_engine_refuses_until_it_is_resumed(client, url):
    message = {"role": "user", "content": "Well?"}
    client.post(f"{url}/pause", cast_to=object)
    with pytest.raises(openai.InternalServerError, match="The engine is paused") as refused:
        client.chat.completions.create(model="tiny", messages=[message], max_tokens=1)
    assert refused.value.status_code == 503
    client.post(f"{url}/resume", cast_to=object)
    client.chat.completions.create(model="tiny", messages=[message], max_tokens=1)
