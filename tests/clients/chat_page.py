"""Helpers for tests of the chat page: a server with scripted answers, and queries of the page."""

import http.server
import itertools
import json
import threading
import urllib.request

import pytest

EXPECT_MS = 60_000


def event(value, end="\n\n"):
    return f"data: {value if isinstance(value, str) else json.dumps(value)}{end}"


def delta(usage=None, finish=None, **fields):
    chunk = {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}
    return event(chunk | ({"usage": {"completion_tokens": usage}} if usage else {}))


DONE = event("[DONE]")


def endless(content, proceed):
    """An answer that says so much and, after the event, never ends: no buffer between server and page holds the rest."""
    return itertools.chain([delta(content=content), proceed], itertools.repeat(": more\n\n" * 1000))


class StandIn:
    """An origin with the real server's pages and the answers of a test, under any path."""

    def __init__(self, server):
        self.server = server
        self.requests = []
        self.keys = []
        self.models = ["tiny"]
        self.key = None
        # The sampling defaults that the server reports, if any, and the keys of the requests for them.
        self.defaults = None
        self.info_keys = []
        # The most images that the server says a prompt may have, if it does.
        self.images = None
        # A question whose key is wrong is refused once this is set.
        self.refuses = threading.Event()
        self.refuses.set()
        # Each an iterable of what is sent, one flush each: text, bytes, or an event to wait for; or (status, body).
        self.answers = []
        self.gone = threading.Event()
        stand_in = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                stand_in.get(self)

            do_HEAD = do_GET

            def do_POST(self):
                stand_in.post(self)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def allowed(self, handler):
        self.keys.append(handler.headers["authorization"])
        return self.key is None or self.keys[-1] == f"Bearer {self.key}"

    def send(self, handler, status, body, kind="application/json", headers=()):
        handler.send_response(status)
        for name, value in [("content-type", kind), ("content-length", len(body)), *headers]:
            handler.send_header(name, str(value))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)

    def get(self, handler):
        path = handler.path.removeprefix("/under/a/proxy") or "/"
        if path == "/v1/models":
            if not self.allowed(handler):
                return self.send(handler, 401, b'{"error":"Unauthorized"}')
            cards = [{"id": name, "object": "model"} for name in self.models]
            return self.send(handler, 200, json.dumps({"object": "list", "data": cards}).encode())
        if path == "/server_info?config_format=json":
            self.info_keys.append(handler.headers["authorization"])
            config = {} if self.defaults is None else {"sampling_defaults": self.defaults}
            if self.images is not None:
                config["limit_mm_per_prompt"] = {"image": self.images}
            return self.send(handler, 200, json.dumps({"vllm_config": config}).encode())
        with urllib.request.urlopen(self.server + path) as real:
            policy = [("content-security-policy", real.headers["content-security-policy"])]
            return self.send(handler, 200, real.read(), real.headers["content-type"], policy)

    def post(self, handler):
        body = handler.rfile.read(int(handler.headers["content-length"]))
        if not self.allowed(handler):
            self.refuses.wait(30)
            return self.send(handler, 401, b'{"error":"Unauthorized"}')
        assert handler.path.removeprefix("/under/a/proxy") == "/v1/chat/completions"
        self.requests.append(json.loads(body))
        answer = self.answers.pop(0)
        if isinstance(answer, tuple):
            return self.send(handler, answer[0], answer[1].encode())
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream; charset=utf-8")
        handler.end_headers()
        try:
            for part in answer:
                if isinstance(part, threading.Event):
                    part.wait(30)
                else:
                    handler.wfile.write(part if isinstance(part, bytes) else part.encode())
                    handler.wfile.flush()
        except OSError:
            self.gone.set()


def until(page, expression, arg=None, milliseconds=EXPECT_MS):
    """Waits for an expression to be true. Playwright's own way is an `eval` in the page, which the page's policy forbids."""
    for _ in range(milliseconds // 20):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"never true: {expression}")


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def last(page):
    """The newest answer, complete."""
    page.wait_for_selector(".turn:last-child .answer[aria-busy=false]")
    return page.locator(".turn").last.locator(".answer")


def text(page):
    return last(page).locator(".text").inner_text()


def new_chat(page):
    page.get_by_role("button", name="New chat").click()


def answered(page, stand_in, content, question="?"):
    """Asks, and returns the whole answer of the stand-in."""
    stand_in.answers.append([delta(content=content), DONE])
    ask(page, question)
    return last(page)


# The contrast of every visible text with what is behind it (WCAG asks for 4.5).
CONTRASTS = """() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if ((colour[3] ?? 1) === 1) return colour;
    }
  };
  const found = {};
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".unseen, script, style, option")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    found[`${node.localName}.${node.className}#${node.id}`] = (a + .05) / (b + .05);
  }
  return found;
}"""
