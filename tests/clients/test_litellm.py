"""LiteLLM, by its adapter for OpenAI's servers and by the one for vLLM's."""

import os
import pathlib

import pytest

# Otherwise it asks for a list of prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
litellm = pytest.importorskip("litellm")

MESSAGES = [{"role": "user", "content": "Well?"}]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(tiny_url, provider):
    ask = dict(model=f"{provider}/tiny", api_base=f"{tiny_url}/v1", api_key="none", messages=MESSAGES, temperature=0, max_tokens=12)
    whole = litellm.completion(**ask)
    assert whole.usage.completion_tokens <= 12
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**ask | {"messages": [{"role": "user", "content": "word " * 500}]})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**ask | {"model": f"{provider}/nope"})


def test_the_entry_of_the_examples_is_one_of_a_router(tiny_url, monkeypatch):
    """deploy/examples/litellm.yaml, with the address and the name of the server that is here."""
    yaml = pytest.importorskip("yaml")
    path = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "examples" / "litellm.yaml"
    (entry,) = yaml.safe_load(path.read_text())["model_list"]
    monkeypatch.setenv("OCTAVO_API_KEY", "none")
    entry["litellm_params"] |= {"api_base": f"{tiny_url}/v1", "model": "hosted_vllm/tiny"}
    router = litellm.Router(model_list=[entry])
    answer = router.completion(model=entry["model_name"], messages=MESSAGES, max_tokens=4)
    assert 1 <= answer.usage.completion_tokens <= 4
