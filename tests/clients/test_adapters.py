"""Libraries that stand on the OpenAI SDK: LangChain, and `llm` in the terminal."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from test_openai_forms import Forecast

# LangChain keeps its asynchronous client, and that keeps to the loop it began in.
LOOP = asyncio.new_event_loop()
ASK = [SystemMessage("Be brief."), HumanMessage("Well?")]


@pytest.fixture(scope="module")
def to_tiny(tiny_url):
    return dict(base_url=f"{tiny_url}/v1", api_key="none", model="tiny", max_retries=0)


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_langchain(to_tiny, responses):
    model = ChatOpenAI(**to_tiny, temperature=0, max_tokens=12, use_responses_api=responses)
    whole = model.invoke(ASK)
    chunks = list(model.stream(ASK))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.usage_metadata["output_tokens"] <= 12

    async def stream():
        return "".join([chunk.text async for chunk in model.astream(ASK)])

    assert LOOP.run_until_complete(stream()) == whole.text
    assert {answer.text for answer in model.batch([ASK] * 8)} == {whole.text}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_schemas(to_tiny, method):
    model = ChatOpenAI(**to_tiny, seed=1, max_tokens=100).with_structured_output(Forecast, method=method)
    assert isinstance(model.invoke(ASK), Forecast)


def test_langchain_tools(to_tiny):
    model = ChatOpenAI(**to_tiny, seed=1, max_tokens=100)
    called = model.bind_tools([Forecast], tool_choice="required", parallel_tool_calls=False).invoke(ASK)
    call = called.tool_calls[0]
    assert Forecast(**call["args"])
    answer = model.bind_tools([Forecast], tool_choice="none").invoke([*ASK, called, ToolMessage("sunny", tool_call_id=call["id"])])
    assert answer.tool_calls == []


def test_langchain_completions_and_embeddings(to_tiny):
    model = OpenAI(**to_tiny, temperature=0, max_tokens=8)
    assert "".join(model.stream("The sea")) == model.invoke("The sea")
    embed = OpenAIEmbeddings(**to_tiny, check_embedding_ctx_length=False)
    assert embed.embed_documents(["sea", "land"])[0] == pytest.approx(embed.embed_query("sea"), abs=1e-6)


def test_llm(tiny_url, tmp_path):
    model = {"model_id": "served", "model_name": "tiny", "api_base": f"{tiny_url}/v1", "supports_schema": True}
    # What is JSON is YAML.
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))

    def llm(*arguments):
        command = [sys.executable, "-m", "llm", "prompt", "-m", "served", "--no-log", "-o", "seed", "1", *arguments, "Well?"]
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout

    short = ["-o", "max_tokens", "12"]
    assert llm(*short) == llm("--no-stream", *short) != ""
    assert Forecast.model_validate_json(llm("--schema", json.dumps(Forecast.model_json_schema()), "-o", "max_tokens", "100"))
