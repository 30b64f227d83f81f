#!/usr/bin/env python3
"""Writes templates.json: conversations rendered by transformers' apply_chat_template with the templates in this folder.

Run with:   pip install transformers==5.23.0 jinja2==3.1.6 gguf==0.19.0
            python generate_templates.py SmolLM2-135M-Instruct.Q4_1.gguf
A case is {template, input, special, output | raised | failed}: raised is the text of raise_exception, failed means that
rendering must fail. The time is fixed at 2024-02-29 12:34:56.
"""

import datetime
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
}

CASES = {
    "smollm2": ["one", "prompt", "system", "unicode", "empty", "roles", "null", "continue"],
    "chatml": ["one", "prompt", "system", "unicode", "empty", "roles", "null", "tools", "continue"],
    "llama3": ["one", "prompt", "system", "unicode", "empty", "null", "tools", "tool_turns", "two_calls", "date", "continue"],
    "mistral": ["one", "system", "unicode", "empty", "roles", "null", "tools", "tool_turns", "two_calls", "bad_id", "out_of_turn", "continue"],
    "qwen3": ["one", "prompt", "system", "unicode", "empty", "roles", "null", "tools", "tool_turns", "two_calls", "thinking", "no_thinking", "continue"],
    "parts": ["one", "system", "unicode", "empty", "documents", "parts"],
    "printing": ["data"],
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


def main():
    reader = GGUFReader(sys.argv[1])
    smollm2 = reader.fields["tokenizer.chat_template"].contents()
    (HERE / "templates" / "smollm2.jinja").write_text(smollm2)
    lines = []
    for template, conversations in CASES.items():
        source = (HERE / "templates" / f"{template}.jinja").read_text()
        for name in conversations:
            case = {"template": template, "name": name, "input": CONVERSATIONS[name], **render(source, CONVERSATIONS[name])}
            lines.append(json.dumps(case, ensure_ascii=False))
    (HERE / "templates.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(len(lines), "cases", (HERE / "templates.json").stat().st_size, "bytes")


main()
