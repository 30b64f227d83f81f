"""LiteLLM, by its adapter for OpenAI's servers and by the one for vLLM's."""

import os

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
