"""Anthropic's SDK, unchanged."""

import json

import anthropic
import pytest

ASK = dict(model="tiny", max_tokens=12, messages=[{"role": "user", "content": "Well?"}])
# The SDK has no parameter for it.
GREEDY = {"extra_body": {"temperature": 0}}
TOOL = {
    "name": "forecast",
    "description": "The weather to come.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "alarm": {"type": "boolean"}},
        "required": ["city", "alarm"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(tiny_url):
    with anthropic.Anthropic(base_url=tiny_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_stream_says_what_one_message_says(client):
    whole = client.messages.create(**ASK, **GREEDY, system="Be brief.")
    assert whole.role == "assistant" and whole.model == "tiny" and whole.content[0].type == "text"
    assert whole.stop_reason in {"end_turn", "max_tokens"}
    with client.messages.stream(**ASK, **GREEDY, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_count_is_what_the_message_costs(client):
    counted = client.messages.count_tokens(model="tiny", messages=ASK["messages"], system="Be brief.")
    usage = client.messages.create(**ASK, system="Be brief.").usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "forecast"}], ids=["any", "tool"])
def test_calls_and_their_results(client, choice):
    asked = dict(**ASK | {"max_tokens": 80}, **GREEDY, tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    whole = client.messages.create(**asked)
    call = whole.content[-1]
    assert (call.type, call.name, set(call.input)) == ("tool_use", "forecast", {"city", "alarm"})
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        fragments = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    assert final.content[-1].input == call.input == json.loads("".join(fragments))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [*ASK["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**ASK | {"messages": history}).content is not None


@pytest.mark.parametrize(
    "change, error",
    [
        ({"model": "nope"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 500}]}, anthropic.BadRequestError),
    ],
)
def test_errors_are_the_classes_a_client_expects(client, change, error):
    with pytest.raises(error) as caught:
        client.messages.create(**ASK | change)
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["message"]
