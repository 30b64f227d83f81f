"""The page that shows the API, in a real browser."""

import json
import re
import urllib.request


def test_the_docs_show_every_route_and_field(new_page, tiny_url):
    with urllib.request.urlopen(f"{tiny_url}/openapi.json") as response:
        api = json.load(response)
    page = new_page(f"{tiny_url}/docs")
    page.wait_for_selector(".operation")
    shown = [(m.lower(), p) for m, p in page.evaluate(
        "[...document.querySelectorAll('.operation summary')].filter((s) => s.querySelector('.path')).map((s) => [s.children[0].textContent, s.children[1].textContent])")]
    assert sorted(shown) == sorted((m, p) for p, item in api["paths"].items() for m in item)
    chat = page.locator("#createChatCompletion")
    chat.locator("> summary").click()
    fields = chat.locator("> div > .fields").first
    names = fields.locator("> li > .name").all_inner_texts()
    assert names[0] == "messages" and {"temperature", "tools", "stop", "stream_options", "seed"} <= set(names)
    temperature = fields.locator("> li", has=page.locator("> .name", has_text=re.compile("^temperature$")))
    assert "number" in temperature.inner_text() and "≥ 0, ≤ 2, default 1" in temperature.inner_text()
    messages = fields.locator("> li").first
    messages.locator("summary").click()
    messages.locator(".fields .name", has_text="tool_call_id").wait_for()
    assert f"curl '{tiny_url}/v1/chat/completions' -X POST" in chat.locator("pre").inner_text()
    page.get_by_label("Find a route or a field").fill("top_k")
    assert page.locator(".operation:visible").count() >= 2
    assert page.locator("#listModels").is_hidden()
    page.goto(f"{tiny_url}/redoc#listModels")
    page.wait_for_selector("#listModels[open]")
