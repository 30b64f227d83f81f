"""The OpenAI SDK with schemas, functions, responses and embeddings. A model of random weights has to obey them all."""

import asyncio
import json
import re
from typing import Literal

import openai
import pydantic
import pytest


class Forecast(pydantic.BaseModel):
    """What a schema can force in a few tokens."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]
    alarm: bool


MESSAGES = [{"role": "user", "content": "Well?"}]
ASK = dict(model="tiny", messages=MESSAGES, max_tokens=100, seed=5)
TOOL = openai.pydantic_function_tool(Forecast, name="forecast")
RESPONSE_TOOL = {"type": "function", "name": "forecast", "strict": True, "parameters": TOOL["function"]["parameters"]}


@pytest.fixture(scope="module")
def client(tiny_url):
    with openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_parsed_answer(client):
    answer = client.chat.completions.parse(**ASK, response_format=Forecast)
    assert isinstance(answer.choices[0].message.parsed, Forecast)
    assert answer.choices[0].finish_reason == "stop"


def test_a_parsed_stream_is_the_parsed_answer(client):
    whole = client.chat.completions.parse(**ASK, response_format=Forecast)
    with client.chat.completions.stream(**ASK, response_format=Forecast) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == whole.choices[0].message.parsed
    assert kinds.count("content.delta") > 1 and kinds.count("content.done") == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "forecast"}}], ids=["required", "named"])
def test_parsed_calls(client, choice):
    asked = dict(**ASK, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    whole = client.chat.completions.parse(**asked).choices[0].message
    assert isinstance(whole.tool_calls[0].function.parsed_arguments, Forecast)
    with client.chat.completions.stream(**asked) as stream:
        fragments = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0].message
    assert [call.function for call in final.tool_calls] == [call.function for call in whole.tool_calls]
    assert len(fragments) > 1 and "".join(fragments) == whole.tool_calls[0].function.arguments


def test_a_conversation_with_calls_goes_on(client):
    asked = dict(**ASK | {"max_tokens": 40}, tools=[TOOL])
    called = client.chat.completions.create(**asked | {"max_tokens": 100}, tool_choice="required").choices[0].message
    said = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in called.tool_calls]
    answer = client.chat.completions.create(**asked | {"messages": [*MESSAGES, called, *said]}, tool_choice="none")
    assert answer.choices[0].finish_reason in {"stop", "length"} and answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    "kind, value, wanted",
    [
        ("regex", "[ab]{3}", "[ab]{3}"),
        ("choice", ["north", "south"], "north|south"),
        ("grammar", 'root ::= "x" [0-9] "y"', "x[0-9]y"),
        ("json", {"type": "boolean"}, "true|false"),
    ],
)
def test_schemas_of_vllm(client, kind, value, wanted):
    answer = client.chat.completions.create(**ASK, extra_body={"structured_outputs": {kind: value}})
    assert re.fullmatch(wanted, answer.choices[0].message.content)


def test_a_bad_schema_is_the_sender_s_error(client):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASK, response_format=bad)
    assert client.chat.completions.create(**ASK).choices


FORMAT = {"type": "json_schema", "name": "forecast", "strict": True, "schema": TOOL["function"]["parameters"]}


def test_responses(client):
    asked = dict(model="tiny", input="Well?", instructions="Be brief.", temperature=0)
    whole = client.responses.create(**asked, max_output_tokens=100, text={"format": FORMAT})
    assert whole.status == "completed" and whole.output[0].type == "message"
    with client.responses.stream(**asked, max_output_tokens=100, text={"format": FORMAT}) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    cut = client.responses.create(**asked, max_output_tokens=5)
    assert cut.usage.output_tokens == 5 and cut.incomplete_details.reason == "max_output_tokens"
    *_, last = client.responses.create(**asked, max_output_tokens=5, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == cut.output_text


def test_responses_with_schemas_and_calls(client):
    asked = dict(model="tiny", input="Well?", max_output_tokens=100)
    assert isinstance(client.responses.parse(**asked, text_format=Forecast).output_parsed, Forecast)
    called = client.responses.create(**asked, tools=[RESPONSE_TOOL], tool_choice="required").output
    assert called[0].type == "function_call" and Forecast.model_validate_json(called[0].arguments)
    result = {"type": "function_call_output", "call_id": called[0].call_id, "output": "sunny"}
    history = [{"role": "user", "content": "Well?"}, *called, result]
    assert client.responses.create(model="tiny", input=history, max_output_tokens=8).output_text is not None
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.create(**asked, previous_response_id="resp_1")
    assert refused.value.status_code in {400, 404}


def test_embeddings(client):
    packed = client.embeddings.create(model="tiny", input=["sea", "land"])
    plain = client.embeddings.create(model="tiny", input=["sea", "land"], encoding_format="float")
    assert [item.index for item in packed.data] == [0, 1] and packed.usage.prompt_tokens > 1
    for a, b in zip(packed.data, plain.data, strict=True):
        assert a.embedding == pytest.approx(b.embedding, abs=1e-6)
        assert sum(x * x for x in a.embedding) == pytest.approx(1, abs=1e-4)


def test_one_model_and_the_headers(client):
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    raw = client.with_options(default_headers={"x-request-id": "mine"}).chat.completions.with_raw_response.create(**ASK)
    assert raw.status_code == 200 and raw.headers["content-type"].startswith("application/json")
    assert raw.parse().id == "chatcmpl-mine"


def test_echo_and_scores_of_a_prompt(client):
    # One token: two could be parts of one character, and then each is less than the text that they make.
    whole = {"ignore_eos": True, "skip_special_tokens": False}
    ask = {"model": "tiny", "prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 1}
    answer = client.completions.create(**ask, extra_body=whole)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("ab") and "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs[0] is None and all(score <= 0 for score in logprobs.token_logprobs[1:])


def test_many_asynchronous_streams(tiny_url):
    async def one(client, seed):
        stream = await client.chat.completions.create(**ASK | {"seed": seed, "max_tokens": 20}, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0) as client:
            first, again = [await asyncio.gather(*(one(client, seed) for seed in range(24))) for _ in range(2)]
            parsed = await client.chat.completions.parse(**ASK, response_format=Forecast)
            return first, again, parsed.choices[0].message.content

    first, again, parsed = asyncio.run(all_of_them())
    assert first == again and len(set(first)) > 1, "the same seed, the same text"
    assert json.loads(parsed)
