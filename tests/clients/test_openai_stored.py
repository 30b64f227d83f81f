"""Routes that need a server of their own: stored responses, batches, rendered requests and the development routes."""

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
