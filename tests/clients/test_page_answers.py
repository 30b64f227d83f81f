"""How the chat page shows an answer: Markdown, code, formulas, and nothing that an answer could run."""

import threading

import pytest

from chat_page import CONTRASTS, DONE, answered, ask, delta, last, new_chat, text, until

MARKDOWN = """# One
## Two

Some *stressed*, **strong**, ~~struck~~ and `inline` text, a \\* and 5 &lt; 6 &#8364; &rarr;.
A second line.

- first
- second
  1. third
  2. fourth

7. seventh

- [x] done
- [ ] open

> quoted **text**

| left | middle | right |
|:-----|:------:|------:|
| `a`  | b<br>c |   **d** |

---

[a link](https://example.com/a?b=1&c=2 "a title"), https://example.org, [by reference][r], mail: <a@example.com>

H<sub>2</sub>O, x<sup>2</sup>, <kbd>Enter</kbd>

![a picture](https://example.com/picture.png)

[r]: https://example.net/
"""


def pieces(content, size):
    return [delta(content=content[i : i + size]) for i in range(0, len(content), size)]


def markup(page):
    """The markup of the newest answer."""
    last(page)
    return page.evaluate("document.querySelector('.turn:last-child .text > .markdown').innerHTML")


def test_markdown_becomes_elements(new_page, stand_in):
    page = new_page(stand_in.url)
    answer = answered(page, stand_in, MARKDOWN)
    assert answer.get_by_role("heading", level=3, name="One").count() == 1
    assert answer.get_by_role("heading", level=4, name="Two").count() == 1
    for tag, content in [("em", "stressed"), ("p > strong", "strong"), ("del", "struck"), ("p > code", "inline"), ("sub", "2"), ("sup", "2"), ("kbd", "Enter")]:
        assert answer.locator(tag).all_inner_texts()[0] == content, tag
    assert "a * and 5 < 6 € →.\nA second line." in answer.locator("p").first.inner_text()
    assert answer.locator("ul:not(:has(.todo)) > li").first.inner_text() == "first"
    assert answer.locator("ul > li > ol > li").all_inner_texts() == ["third", "fourth"]
    assert answer.locator("ol[start='7'] > li").inner_text() == "seventh"
    assert [box.get_attribute("aria-label") for box in answer.get_by_role("img").all()] == ["Done:", "To do:"]
    assert answer.locator("blockquote strong").inner_text() == "text"
    assert answer.get_by_role("columnheader").all_inner_texts() == ["left", "middle", "right"]
    assert answer.get_by_role("cell").all_inner_texts() == ["a", "b\nc", "d"]
    aligned = "[...document.querySelectorAll('td')].map((cell) => getComputedStyle(cell).textAlign)"
    assert page.evaluate(aligned) == ["start", "center", "end"]
    assert answer.locator("hr").count() == 1
    links = {link.inner_text(): link.get_attribute("href") for link in answer.get_by_role("link").all()}
    assert links == {
        "a link": "https://example.com/a?b=1&c=2",
        "https://example.org": "https://example.org/",
        "by reference": "https://example.net/",
        "a@example.com": "mailto:a@example.com",
        "a picture": "https://example.com/picture.png",
    }
    for link in answer.get_by_role("link").all():
        assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noopener noreferrer nofollow")
    assert answer.locator("img").count() == 0


CODE = "Before\n\n```python title=x\ndef f(x):\n    return \"<b>\" + x  # no tag\n```\n\nAfter\n\n~~~\nplain\n~~~\n\n```rust\nfn main() {}\n"


@pytest.mark.parametrize("content", [MARKDOWN, CODE, MARKDOWN + CODE + "1. a\n\n2. b\n\n3. c\n\n$$\na_1\n$$\n"])
@pytest.mark.parametrize("size", [1, 7])
def test_an_answer_that_streams_ends_like_one_that_came_at_once(new_page, stand_in, content, size):
    page = new_page(stand_in.url)
    answered(page, stand_in, content)
    whole = markup(page)
    stand_in.answers = [[*pieces(content, size), DONE]]
    ask(page, "?")
    assert markup(page) == whole
    page.reload()
    assert markup(page) == whole


@pytest.mark.parametrize("size", [1, 13])
def test_what_is_shown_meanwhile_is_what_would_be_shown_at_the_end(new_page, stand_in, size):
    """Complete blocks are not parsed again, so they must equal the result of parsing the whole text."""
    content = "Para\n#no heading\n\n1. a\n\n2. b\n   - c\n\n   d\n\n3. e\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\ntext\n\n```py\nx\n\n\ny\n```\nmore\n***\n> q\n\n> r\n\nTitle\n=====\n\nend"
    page = new_page(stand_in.url)
    compare = """async ([content, size]) => {
      const { Markdown } = await import(new URL("assets/markdown.js", document.baseURI));
      const make = () => new Markdown(document.createElement("div"));
      const growing = make();
      for (let end = 0; end <= content.length; end += size) {
        const part = content.slice(0, end), whole = make();
        growing.show(part, false);
        whole.show(part, false);
        if (growing.node.innerHTML !== whole.node.innerHTML) return [part, growing.node.innerHTML, whole.node.innerHTML];
      }
      return null;
    }"""
    assert page.evaluate(compare, [content, size]) is None


def test_a_long_answer_is_not_drawn_again_and_again(new_page, stand_in):
    """The parsed text grows with the length of the answer, not with its square."""
    page = new_page(stand_in.url)
    measure = """async (count) => {
      const { Markdown } = await import(new URL("assets/markdown.js", document.baseURI));
      const view = new Markdown(document.createElement("div"));
      let parsed = 0, text = "";
      const block = "Some *text* with `code` in it.\\n\\n- one\\n- two\\n\\n```js\\nlet x = 1;\\n```\\n\\n";
      for (let i = 0; i < count; i += 1) {
        text += block;
        view.show(text, false);
        parsed += text.length - view.done.length;
      }
      return parsed / text.length;
    }"""
    assert page.evaluate(measure, 200) < 3
    assert page.evaluate(measure, 400) < 3


def test_blocks_keep_their_place_while_the_answer_grows(new_page, stand_in):
    go = threading.Event()
    stand_in.answers = [[delta(content="```py\nx = 1\ny = 2"), go, delta(content="\nz = 3\n```\nend"), DONE]]
    page = new_page(stand_in.url)
    ask(page, "?")
    until(page, "document.querySelector('.code code')?.textContent === 'x = 1\\ny = 2'")
    page.evaluate("window.held = [document.querySelector('.code pre'), document.querySelector('.copy')]")
    page.locator(".copy").focus()
    go.set()
    last(page)
    assert page.evaluate("held[0] === document.querySelector('.code pre') && held[1] === document.activeElement")
    assert page.locator(".code code").inner_text() == "x = 1\ny = 2\nz = 3"


def test_code_has_its_language_its_colours_and_a_button(new_page, stand_in):
    page = new_page(stand_in.url, permissions=["clipboard-read", "clipboard-write"])
    answer = answered(page, stand_in, CODE)
    assert answer.locator(".language").all_inner_texts() == ["python", "text", "rust"]
    assert answer.locator("pre code").all_inner_texts() == ['def f(x):\n    return "<b>" + x  # no tag', "plain", "fn main() {}"]
    assert answer.locator(".hljs-keyword").all_inner_texts() == ["def", "return", "fn"]
    assert answer.locator(".hljs-string").inner_text() == '"<b>"'
    answer.get_by_role("button", name="Copy", exact=True).first.click()
    until(page, "document.querySelector('.copy').innerText === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == 'def f(x):\n    return "<b>" + x  # no tag'
    assert page.locator("#status").inner_text() == "Copied"
    until(page, "document.querySelector('.copy').innerText === 'Copy'")
    answer.get_by_role("button", name="Copy answer").click()
    until(page, "document.querySelector('#status').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == CODE


def test_copying_works_without_tls_too(new_page, stand_in):
    page = new_page(stand_in.url, permissions=["clipboard-read", "clipboard-write"])
    answer = answered(page, stand_in, "```\nwithout\n```")
    # Browsers offer no clipboard to pages without TLS, except on localhost.
    page.evaluate("window.clipboard = navigator.clipboard; Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    answer.get_by_role("button", name="Copy", exact=True).click()
    until(page, "document.querySelector('.copy').innerText === 'Copied'")
    assert page.evaluate("clipboard.readText()") == "without"
    assert page.evaluate("document.activeElement.className") == "copy"


@pytest.mark.parametrize("content, shown", [("Text\n\n```", "Text"), ("Text\n```py", "Text"), ("Text\n\n```py\n", "Text"), ("```\n```", ""), ("Text\n~~~", "Text")])
def test_a_fence_without_code_shows_no_box(new_page, stand_in, content, shown):
    page = new_page(stand_in.url)
    answered(page, stand_in, content)
    assert text(page) == shown
    assert page.locator(".answer :is(pre, figure)").count() == 0


def test_formulas_are_shown_as_they_are_written(new_page, stand_in):
    inline = ["$a_1 * b_1$", r"\(x_1 * y_1 * [z](w)\)", r"$$p_i * q_i$$", r"\[r_{1} * s_{2}\]", r"$\alpha_\beta$"]
    shown = ["\\[\n\\sum_{i=1}^n i_1 * i_2 < \\frac{a}{b}\n\\]", "$$\nu_1 * u_2\n\\\\ *v*\n$$"]
    page = new_page(stand_in.url)
    answer = answered(page, stand_in, "*See* " + " and ".join(inline) + ".\n\n" + "\n\n".join(shown) + "\n\nend")
    assert answer.locator("span.math").evaluate_all("nodes => nodes.map((node) => node.textContent)") == inline
    assert answer.locator("div.math").evaluate_all("nodes => nodes.map((node) => node.textContent)") == shown
    assert answer.locator(".text em").all_inner_texts() == ["See"]
    new_chat(page)
    prices = answered(page, stand_in, "It costs $5 and *not* $10, or $3.50-$4.")
    assert prices.locator(".math").count() == 0 and prices.locator(".text em").inner_text() == "not"


ATTACKS = [
    "<script>attack()</script>",
    "<img src=x onerror=attack()>",
    "<svg onload=attack()><animate onbegin=attack() attributeName=x dur=1s></svg>",
    "<iframe src=javascript:parent.attack()></iframe><iframe srcdoc='<script>parent.attack()</script>'></iframe>",
    "<style>@import 'https://example.com/x.css'; body { background: url(https://example.com/x.png) }</style>",
    "<form action=https://example.com><input name=a><button formaction=javascript:attack()>go</button></form>",
    "<link rel=stylesheet href=https://example.com/x.css><meta http-equiv=refresh content='0;url=https://example.com'>",
    "<base href=https://example.com><object data=https://example.com/x></object><embed src=https://example.com/x>",
    "<details open ontoggle=attack()><video src=x onerror=attack()></video></details>",
    "<b onclick=attack()>bold</b> <a href='javascript:attack()'>link</a> <a href=https://example.com style=position:fixed;inset:0>over</a>",
    "[x](javascript:attack()) [x](JaVaScRiPt:attack()) [x](java\tscript:attack()) [x](&#106;avascript:attack()) [x](\x01javascript:attack())",
    "[x](data:text/html,<script>attack()</script>) [x](vbscript:attack()) [x](blob:x) [x](file:///etc/passwd) [x](//example.com) [x](/metrics) [x](#top)",
    "<javascript:attack()> <data:text/html;base64,PHNjcmlwdD4=>",
    "![x](https://example.com/pixel.png) ![x](javascript:attack()) ![x](data:image/svg+xml,<svg/onload=attack()>)",
    "[x]: javascript:attack()\n\n[x] ![x]",
    "[a](https://example.com/\"onmouseover=\"attack()) [b](https://example.com 'x\" onclick=\"attack()')",
    # Markup that a sanitiser and a browser may parse differently.
    "<math><mtext><table><mglyph><style><!--</style><img title=\"--&gt;&lt;img src=1 onerror=attack()&gt;\">",
    "<noscript><p title=\"</noscript><img src=x onerror=attack()>\">",
    "<svg></p><style><a id=\"</style><img src=1 onerror=attack()>\">",
    "<form><math><mtext></form><form><mglyph><style></math><img src onerror=attack()>",
    "<template><script>attack()</script></template><textarea></textarea><img src=x onerror=attack()>",
    "```\"><img src=x onerror=attack()>\n</code></pre><script>attack()</script>\n```",
    "```html\n<script>attack()</script><img src=x onerror=attack()>\n```",
    "| <img src=x onerror=attack()> |\n|---|\n| [x](javascript:attack()) |",
    "$<img src=x onerror=attack()>$ \\(<script>attack()</script>\\)\n\n$$\n<img src=x onerror=attack()>\n$$",
    "<sub><img src=x onerror=attack()></sub> <sub onclick=attack()>x</sub> <u></b></u>",
    "&lt;img src=x onerror=attack()&gt; &#60;script&#62;attack()&#60;/script&#62;",
]


def test_nothing_that_a_model_says_can_run_load_or_lead_astray(new_page, stand_in):
    page = new_page(stand_in.url)
    page.evaluate("() => { window.attack = () => { window.attacked = true; }; }")
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    for attack in ATTACKS:
        for parts in (1, len(attack)):
            stand_in.answers = [[delta(reasoning=attack), *pieces(attack, -(-len(attack) // parts)), DONE]]
            ask(page, attack)
            last(page)
    page.wait_for_timeout(300)
    check = """() => {
      const allowed = new Set("A B BLOCKQUOTE BR BUTTON CODE DEL DETAILS DIV EM FIGCAPTION FIGURE H2 H3 HR KBD LI OL P PRE S SECTION SPAN STRONG SUB SUMMARY SUP TABLE TBODY TD TH THEAD TR U UL path svg".split(" "));
      const nodes = [...document.querySelectorAll("#log *")];
      const attributes = new Set(nodes.flatMap((node) => [...node.attributes].map((attribute) => attribute.name)));
      return {
        elements: [...new Set(nodes.map((node) => node.nodeName))].filter((name) => !allowed.has(name)),
        attributes: [...attributes].filter((name) => name.startsWith("on") || ["src", "srcdoc", "action", "formaction", "style"].includes(name)),
        links: [...document.querySelectorAll("#log a")].map((link) => link.protocol).filter((protocol) => !["http:", "https:", "mailto:"].includes(protocol)),
        local: [...document.querySelectorAll("#log a")].filter((link) => link.host === location.host).length,
        attacked: window.attacked === true,
      };
    }"""
    assert page.evaluate(check) == {"elements": [], "attributes": [], "links": [], "local": 0, "attacked": False}
    assert page.evaluate("location.href") == stand_in.url + "/"
    # Nothing is lost either: markup that becomes no element is shown as text.
    assert "<svg onload=attack()>" in page.locator(".answer .text").all_inner_texts()[4]
    for link in page.locator("#log a").all():
        assert link.get_attribute("title") == link.get_attribute("href")


@pytest.mark.parametrize("piece", ["> ", "[", "*a_ ", "- ", "`", "|a", "<", "![[]()", "$a ", "\\(", "~~a ", "&#", "[a](", "<a "])
def test_text_without_sense_does_not_hang_the_page(new_page, stand_in, piece):
    page = new_page(stand_in.url)
    content = piece * 4000
    answered(page, stand_in, content)
    assert answered(page, stand_in, "still here").locator(".text").inner_text() == "still here"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_answers_can_be_read(new_page, stand_in, scheme):
    samples = {
        "python": '@a\nclass A(B):\n    """doc"""\n    def f(self, x=1.5):\n        return f"{x}" if True else print(None)  # c',
        "html": '<!doctype html><p class="x">&amp;</p><style>a:hover, #b, .c { color: red; }</style>',
        "bash": 'for f in *.txt; do echo "$f" | grep -v \'x\'; done',
        "diff": "--- a\n+++ b\n@@ -1 +1 @@\n-old\n+new",
        "rust": "#[derive(Debug)]\nstruct S<'a> { x: &'a str }\nmacro_rules! m { () => {} }",
        "json": '{"a": [1, true, null, "b"]}',
        "markdown": "# h\n*e* **s** [l](u) `c`\n> q\n- b",
    }
    content = MARKDOWN + "<mark>m</mark>\n\n" + "\n".join(f"```{name}\n{code}\n```" for name, code in samples.items())
    page = new_page(stand_in.url, color_scheme=scheme)
    answered(page, stand_in, content)
    contrasts = page.evaluate(CONTRASTS)
    assert sum("hljs-" in name for name in contrasts) > 12 and min(contrasts.values()) >= 4.5, contrasts


def test_reasoning_is_markdown_and_collapsed_afterwards(new_page, stand_in):
    stand_in.answers = [[delta(reasoning="First **this**,\n\n- then that"), delta(content="So."), DONE]]
    page = new_page(stand_in.url)
    ask(page, "?")
    reasoning = last(page).locator("details")
    assert reasoning.get_attribute("open") is None and not reasoning.locator("strong").is_visible()
    reasoning.locator("summary").focus()
    page.keyboard.press("Enter")
    assert reasoning.locator("strong").inner_text() == "this" and reasoning.locator("li").inner_text() == "then that"


def test_a_screen_reader_is_told_of_each_block_once(new_page, stand_in):
    content = "First block.\n\nSecond block.\n\n```py\nx = 1\ny = 2\n```\n\nLast block."
    page = new_page(stand_in.url)
    page.evaluate("""() => {
      window.spoken = [];
      const watch = (records) => records.forEach((record) => record.addedNodes.forEach((node) => spoken.push(node.textContent)));
      new MutationObserver(watch).observe(document.querySelector("[role=log][aria-live=polite]"), { childList: true });
    }""")
    stand_in.answers = [[*pieces(content, 3), DONE]]
    ask(page, "?")
    last(page)
    assert page.evaluate("spoken") == ["First block.", "Second block.", "Code, py, 2 lines.", "Last block."]
    assert page.locator("[role=log] p").count() <= 3
    assert page.locator("#status").inner_text() == "Answered"
    assert page.evaluate("[...document.querySelectorAll('[aria-live]')].filter((node) => node.closest('#log')).length") == 0
