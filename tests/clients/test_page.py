"""The chat page in a real browser: its requests, its states and its looks.

The page always comes from the real server, with its headers. What it talks to is the real server too, or a stand-in that
answers exactly as a test says, byte for byte.
"""

import json
import re
import threading
import urllib.error
import urllib.request

import pytest

from chat_page import CONTRASTS, DONE, ask, delta, endless, event, last, text, until


def test_an_answer_streams_from_the_real_server(new_page, tiny_url):
    page = new_page(tiny_url)
    until(page, "document.getElementById('served').textContent === 'tiny'")
    ask(page, "Say something.")
    foot = last(page).locator(".foot").inner_text()
    match = re.search(r"(\d+) tokens? · ([\d.]+) tokens/s · first after ([\d.]+) s", foot)
    assert match and int(match[1]) > 1 and float(match[2]) > 0, foot
    assert page.locator(".user").inner_text() == "Say something."


def test_an_answer_is_stopped_on_the_real_server_too(new_page, base_url):
    page = new_page(base_url)
    running = lambda: float(re.search(r"num_requests_running\{.*\} (\S+)", urllib.request.urlopen(f"{base_url}/metrics").read().decode())[1])
    for _ in range(5):
        # On a slow machine, an answer may end before the page has shown its first words.
        ask(page, "Count from one to a thousand.")
        until(page, "[...document.querySelectorAll('.answer')].at(-1)?.querySelector('.text')?.textContent.trim().length > 0",
              milliseconds=120_000)
        if running() == 1:
            break
    assert running() == 1
    page.keyboard.press("Escape")
    assert "Stopped." in last(page).locator(".foot").inner_text()
    assert text(page)
    for _ in range(200):
        if running() == 0:
            return
        page.wait_for_timeout(50)
    pytest.fail("the server went on")


def fetch(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as response:
        return response.headers, response.read().decode()


def assets(tiny_url):
    """The files that the chat page loads, and those that they import."""
    found, open_ = [], re.findall(r'(?:href|src)="(assets/[^"]+)"', fetch(tiny_url)[1])
    while open_:
        path = open_.pop()
        if path not in found:
            found.append(path)
            imports = re.findall(r'from "\./([^"]+)"', fetch(f"{tiny_url}/{path}")[1]) if path.endswith(".js") else []
            open_ += [f"assets/{name}" for name in imports]
    return found


def test_pages_are_cached_and_confined(tiny_url):
    files = [f"/{path}" for path in assets(tiny_url)]
    assert {"/assets/main.js", "/assets/style.css", "/assets/vendor/marked.esm.js", "/assets/vendor/licences.txt"} <= set(files)
    for path in ["/", "/docs", "/redoc", "/openapi.json", *files]:
        headers, body = fetch(tiny_url + path)
        etag, policy = headers["etag"], headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
        # The highlighter's grammars hold addresses; the browser's tests see that nothing asks for them.
        if "vendor" not in path:
            assert not re.search(r"(src|href)=[\"']?(https?:)?//|@import|\burl\(", body), "something from elsewhere"
        with pytest.raises(urllib.error.HTTPError) as unchanged:
            fetch(tiny_url + path, **{"if-none-match": etag})
        assert unchanged.value.code == 304
    assert len(fetch(tiny_url)[1]) < 25_000
    assert sum(len(fetch(tiny_url + path)[1]) for path in files) < 300_000


PIECES = ["Grüße, 世", "界 🌍.\n\n```py\nprint('<b>')\n\n\nx\n``", "`\nEnd."]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_events_may_be_cut_anywhere(new_page, stand_in, line_end):
    stream = ": a comment\n\nevent: message\nid: 7\nretry: 5\n"
    for piece in PIECES:
        stream += event(json.dumps({"choices": [{"delta": {"content": piece}}]}, ensure_ascii=False))
    # One event in two lines of data, without the blank after the colon.
    stream += 'data:{"choices":\ndata:[{"delta":{"content":"!"}}]}\n\n' + DONE
    raw = stream.replace("\n", line_end).encode()
    stand_in.answers = [[raw[i : i + 1] for i in range(len(raw))], [raw]]
    page = new_page(stand_in.url)
    for _ in range(2):
        ask(page, "?")
        answer = last(page)
        assert answer.locator(".text p").all_inner_texts() == ["Grüße, 世界 🌍.", "End.!"]
        assert answer.locator(".text pre").all_inner_texts() == ["print('<b>')\n\n\nx"]
        assert answer.locator(".problem").is_hidden()


def test_markup_of_a_model_is_text(new_page, stand_in):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>[x](javascript:alert(3))"
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": evil, "arguments": evil}}
    stand_in.answers = [[delta(reasoning=evil), delta(content=f"{evil}\n```{evil}\n{evil}\n```"), delta(tool_calls=[call]), DONE]]
    stand_in.models = [evil, "b"]
    page = new_page(stand_in.url)
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    ask(page, evil)
    assert last(page).locator(".text").inner_text().count(evil) == 4
    assert page.locator(".user").inner_text() == evil
    assert page.locator("#log :is(img, script, a)").count() == 0
    page.reload()
    assert page.locator(".text").inner_text().count(evil) == 4


def test_reasoning_and_tool_calls_are_shown(new_page, stand_in):
    def call(index, name, arguments):
        return {"index": index, "function": {"name": name, "arguments": arguments}}

    thought, said = threading.Event(), threading.Event()
    stand_in.answers = [[
        delta(reasoning="Let me "), delta(reasoning="think."), thought, delta(content="Well: "), said,
        delta(tool_calls=[call(0, "weather", "")]), delta(tool_calls=[call(0, None, '{"city":')]),
        delta(tool_calls=[call(0, None, '"Paris"}'), call(1, "time", "{}")]), delta(finish="tool_calls"), DONE,
    ]]
    page = new_page(stand_in.url)
    ask(page, "?")
    reasoning = page.locator(".answer details")
    until(page, "document.querySelector('details div')?.textContent === 'Let me think.'")
    assert reasoning.get_attribute("open") is not None, "open while there is nothing else"
    thought.set()
    until(page, "document.querySelector('.text')?.textContent === 'Well:'")
    assert reasoning.get_attribute("open") is None
    said.set()
    assert last(page).locator("pre").all_inner_texts() == ['weather({"city":"Paris"})', "time({})"]
    reasoning.locator("summary").click()
    assert reasoning.locator("div").inner_text() == "Let me think."


def test_everything_works_from_the_keyboard(new_page, stand_in):
    go = threading.Event()
    stand_in.answers = [[delta(content="One", usage=1), delta(content=" two", usage=2), go, delta(content="never"), DONE]]
    page = new_page(stand_in.url)
    # The first key lands in the message without a click.
    until(page, "document.activeElement.id === 'input'")
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.text')?.textContent === 'One two'")
    assert stand_in.requests[0]["messages"] == [{"role": "user", "content": "first line\nsecond line"}]
    assert page.locator(".answer").get_attribute("aria-busy") == "true"
    assert page.locator("#send").is_hidden() and page.locator("#stop").is_visible()
    # What is typed meanwhile waits.
    page.keyboard.type("later")
    page.keyboard.press("Enter")
    assert page.locator(".turn").count() == 1
    page.keyboard.press("Escape")
    until(page, "document.querySelector('.foot')?.textContent.includes('Stopped.')")
    assert text(page) == "One two"
    foot = page.locator(".foot").inner_text()
    assert "Stopped." in foot and "2 tokens" in foot
    go.set()
    assert page.locator("#input").input_value() == "later"
    page.keyboard.press("Control+k")
    assert page.locator(".turn").count() == 0 and page.locator("#welcome").is_visible()
    # Tab reaches everything, in the order in which it stands.
    page.locator("#new").focus()
    order = []
    for _ in range(4):
        order.append(page.evaluate("document.activeElement.id || document.activeElement.localName"))
        page.keyboard.press("Tab")
    assert order[:3] == ["new", "open", "main"]
    page.locator("#open").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.name") == "key"
    page.keyboard.press("Escape")
    until(page, "document.activeElement.id === 'input'")
    assert page.locator("dialog").is_hidden()


def test_stopping_closes_the_connection(new_page, stand_in):
    first = threading.Event()
    stand_in.answers = [endless("x", first)]
    page = new_page(stand_in.url)
    ask(page, "?")
    until(page, "document.querySelector('.text')?.textContent === 'x'")
    page.get_by_role("button", name="Stop").click()
    until(page, "document.querySelector('.foot')?.textContent.includes('Stopped.')")
    assert "Stopped." in last(page).inner_text()
    first.set()
    assert stand_in.gone.wait(20), "the server was left talking"


def test_a_conversation_survives_a_reload(new_page, stand_in):
    hang = threading.Event()
    stand_in.answers = [[delta(content="Blue."), DONE], [delta(content="Gre"), hang], [delta(content="Red."), DONE]]
    page = new_page(stand_in.url)
    ask(page, "A colour?")
    last(page)
    ask(page, "Another?")
    until(page, "document.querySelectorAll('.text')[1]?.textContent === 'Gre'")
    page.reload()
    hang.set()
    assert page.locator(".user").all_inner_texts() == ["A colour?", "Another?"]
    assert page.locator(".text").all_inner_texts() == ["Blue.", "Gre"]
    assert "Interrupted." in page.locator(".foot").last.inner_text()
    ask(page, "A third?")
    assert text(page) == "Red."
    said = [(m["role"], m["content"]) for m in stand_in.requests[-1]["messages"]]
    assert said == [
        ("user", "A colour?"), ("assistant", "Blue."), ("user", "Another?"), ("assistant", "Gre"), ("user", "A third?"),
    ]
    page.get_by_role("button", name="New chat").click()
    page.reload()
    assert page.locator(".turn").count() == 0


def test_settings_reach_the_request_and_nothing_is_sent_without_them(new_page, stand_in):
    stand_in.models = ["first", "second"]
    stand_in.answers = [[DONE], [DONE]]
    page = new_page(stand_in.url)
    page.wait_for_selector("#picker:not([hidden])")
    ask(page, "?")
    last(page)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    message = {"role": "user", "content": "?"}
    assert stand_in.requests[0] == {"model": "first", "messages": [message], "stream": True, "stream_options": usage}
    assert stand_in.keys == [None, None]
    page.get_by_label("Model").select_option("second")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("API key").fill(" secret ")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Max tokens").fill("7")
    page.get_by_role("button", name="Done").click()
    page.reload()
    page.get_by_role("button", name="New chat").click()
    ask(page, "?")
    last(page)
    sent = stand_in.requests[1]
    assert (sent["model"], sent["temperature"], sent["max_completion_tokens"]) == ("second", 0.5, 7)
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, message]
    assert stand_in.keys[-1] == "Bearer secret"
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)") and page.context.cookies() == []


def test_a_key_is_asked_for_and_then_the_question_is_put_again(new_page, stand_in):
    page = new_page(stand_in.url)
    until(page, "document.getElementById('served').textContent === 'tiny'")
    stand_in.key = "right"
    stand_in.answers = [[delta(content="Open."), DONE]]
    ask(page, "Sesame?")
    for wanted, key in [("The server asks for an API key.", "wrong"), ("The server does not take this API key.", "right")]:
        until(page, "text => document.querySelector('#ask')?.textContent === text", arg=wanted)
        assert page.evaluate("document.activeElement.name") == "key"
        page.keyboard.type(key)
        page.keyboard.press("Enter")
    assert text(page) == "Open."
    assert last(page).locator(".problem").is_hidden()


def test_a_key_given_before_the_refusal_arrives_is_used(new_page, stand_in):
    page = new_page(stand_in.url)
    until(page, "document.getElementById('served').textContent === 'tiny'")
    stand_in.key = "right"
    stand_in.answers = [[delta(content="Open."), DONE]]
    stand_in.refuses.clear()
    ask(page, "Sesame?")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("API key").fill("right")
    page.get_by_role("button", name="Done").click()
    until(page, "!document.getElementById('settings').open")
    stand_in.refuses.set()
    assert text(page) == "Open."
    assert page.evaluate("!document.getElementById('settings').open")


@pytest.mark.parametrize(
    "answer, problem",
    [
        ((400, '{"error":{"message":"temperature must be in [0, 2].","type":"BadRequestError","param":null,"code":400}}'),
         "The server answered 400: temperature must be in [0, 2]."),
        ((503, '{"error":{"message":"The model is still being loaded."}}'), "The server answered 503: The model is still being loaded."),
        ((404, '{"detail":"Not Found"}'), "The server answered 404: Not Found"),
        ((502, "<html><h1>Bad gateway</h1></html>"), "The server answered 502: Bad gateway"),
        ((500, ""), "The server answered 500."),
        ([delta(content="Half"), event({"error": {"message": "The server is shutting down.", "code": 503}}), DONE], "The server is shutting down."),
        ([delta(content="Half")], "The connection ended before the answer did."),
        ([event("no json")], "The server sent an event that is not JSON."),
        ([event({"error": "overloaded"})], "overloaded"),
    ],
)
def test_errors_are_sentences_and_can_be_tried_again(new_page, stand_in, answer, problem):
    stand_in.answers = [answer, [delta(content="Fine."), DONE]]
    page = new_page(stand_in.url)
    ask(page, "?")
    assert last(page).locator(".problem").inner_text() == problem
    assert page.locator("#status").inner_text() == problem
    page.get_by_role("button", name="Try again").click()
    until(page, "document.querySelector('.text')?.textContent === 'Fine.'")
    assert last(page).locator(".problem").is_hidden()
    assert [m["content"] for m in stand_in.requests[1]["messages"]] == ["?"]


def test_a_server_that_is_gone_is_told_of(new_page, stand_in):
    page = new_page(stand_in.url)
    stand_in.close()
    ask(page, "?")
    assert last(page).locator(".problem").inner_text() == "The server cannot be reached."


def test_a_cut_answer_says_so(new_page, stand_in):
    stand_in.answers = [[delta(content="So", finish="length"), DONE]]
    page = new_page(stand_in.url)
    ask(page, "?")
    assert "Cut off at the limit of tokens." in last(page).inner_text()


@pytest.mark.parametrize("path", ["/under/a/proxy", "/under/a/proxy/"])
def test_the_page_works_under_any_path(new_page, stand_in, path):
    stand_in.answers = [[delta(content="Here."), DONE]]
    page = new_page(stand_in.url + path)
    until(page, "document.getElementById('served').textContent === 'tiny'")
    ask(page, "?")
    assert text(page) == "Here."


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_it_can_be_read_in_every_light_and_width(new_page, stand_in, scheme, width, tmp_path):
    long = "word " * 60 + "\n```\n" + "x" * 300 + "\n```\n" + "y" * 300
    stand_in.answers = [[delta(reasoning=long), delta(content=long, usage=9), DONE]]
    stand_in.models = ["a-name-" * 20]
    page = new_page(stand_in.url, color_scheme=scheme, viewport={"width": width, "height": 700})
    ask(page, long)
    last(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 5 and min(contrasts.values()) >= 4.5, contrasts
    page.screenshot(path=tmp_path / "page.png")
    unnamed = "[...document.querySelectorAll('button, input, textarea, select')].filter((e) => !e.labels?.length && !e.ariaLabel && !e.innerText.trim() && e.checkVisibility()).length"
    assert page.evaluate(unnamed) == 0
