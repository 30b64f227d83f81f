"""Chats on the chat page: edit, regenerate, keep, rename, export, delete; and the settings of requests."""

import json
import pathlib
import threading

import pytest

from chat_page import CONTRASTS, DONE, answered, ask, delta, endless, last, new_chat, text, until


def asked(stand_in, index=-1):
    return [(message["role"], message["content"]) for message in stand_in.requests[index]["messages"]]


def chats(page):
    return page.locator("#list .chat").evaluate_all("nodes => nodes.map((node) => node.firstChild.data)")


def open_menu(page, title, item):
    page.get_by_role("button", name=f"Options for “{title}”").click()
    page.get_by_role("menuitem", name=item).click()


def saved(page, act):
    with page.expect_download() as download:
        act()
    return download.value.suggested_filename, pathlib.Path(download.value.path()).read_text()


# ------------------------------------------------------------------------------------------------------ turns


def test_any_question_can_be_edited_and_both_versions_stay(new_page, stand_in):
    page = new_page(stand_in.url)
    for question, content in [("One?", "First."), ("Two?", "Second."), ("Three?", "Third.")]:
        answered(page, stand_in, content, question)
    stand_in.answers = [[delta(content="Other."), DONE]]
    page.get_by_role("button", name="Edit message").nth(1).click()
    editor = page.get_by_label("Edit message").and_(page.locator("textarea"))
    assert editor.input_value() == "Two?" and page.evaluate("document.activeElement.localName") == "textarea"
    editor.fill("Second?")
    page.get_by_role("button", name="Send").first.click()
    assert text(page) == "Other."
    assert asked(stand_in) == [("user", "One?"), ("assistant", "First."), ("user", "Second?")]
    assert page.locator(".user").all_inner_texts() == ["One?", "Second?"]
    assert page.locator(".versions:visible").inner_text() == "2/2"
    page.get_by_role("button", name="Earlier version").click()
    assert page.locator(".user").all_inner_texts() == ["One?", "Two?", "Three?"]
    assert page.locator(".versions:visible").inner_text() == "1/2"
    assert page.evaluate("document.activeElement.ariaLabel") == "Later version"
    page.reload()
    assert page.locator(".text").all_inner_texts() == ["First.", "Second.", "Third."]
    page.get_by_role("button", name="Later version").locator("visible=true").click()
    assert page.locator(".text").all_inner_texts() == ["First.", "Other."]


def test_an_edit_can_be_left(new_page, stand_in):
    page = new_page(stand_in.url)
    answered(page, stand_in, "First.", "One?")
    for leave in [lambda: page.keyboard.press("Escape"), lambda: page.get_by_role("button", name="Cancel").click()]:
        page.get_by_role("button", name="Edit message").click()
        page.keyboard.type("something else")
        leave()
        assert page.locator(".user").inner_text() == "One?" and page.locator(".editor").count() == 0
        assert page.evaluate("document.activeElement.ariaLabel") == "Edit message"
    assert len(stand_in.requests) == 1


def test_a_question_is_edited_from_the_keyboard(new_page, stand_in):
    page = new_page(stand_in.url)
    answered(page, stand_in, "First.", "One?")
    stand_in.answers = [[delta(content="Other."), DONE]]
    page.get_by_role("button", name="Edit message").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Control+End")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two?")
    page.keyboard.press("Enter")
    assert text(page) == "Other."
    assert asked(stand_in) == [("user", "One?\nTwo?")]


def test_any_answer_can_be_generated_again(new_page, stand_in):
    page = new_page(stand_in.url)
    answered(page, stand_in, "First.", "One?")
    answered(page, stand_in, "Second.", "Two?")
    stand_in.answers = [[delta(content="Better."), DONE]]
    page.get_by_role("button", name="Try again").first.click()
    assert text(page) == "Better."
    assert asked(stand_in) == [("user", "One?")]
    assert page.locator(".user").all_inner_texts() == ["One?"]
    page.get_by_role("button", name="Earlier version").click()
    assert page.locator(".text").all_inner_texts() == ["First.", "Second."]


def test_an_answer_can_be_edited(new_page, stand_in):
    page = new_page(stand_in.url)
    answered(page, stand_in, "It is **red**.", "Which colour?")
    page.get_by_role("button", name="Edit answer").click()
    editor = page.get_by_label("Edit answer").and_(page.locator("textarea"))
    assert editor.input_value() == "It is **red**."
    editor.fill("It is *blue*.")
    page.keyboard.press("Control+Enter")
    assert page.locator(".text em").inner_text() == "blue" and "Edited." in page.locator(".foot").inner_text()
    page.reload()
    assert text(page) == "It is blue."
    answered(page, stand_in, "Yes.", "Sure?")
    assert asked(stand_in)[1] == ("assistant", "It is *blue*.")


def test_nothing_is_edited_while_an_answer_is_written(new_page, stand_in):
    go = threading.Event()
    page = new_page(stand_in.url)
    answered(page, stand_in, "First.", "One?")
    page.get_by_role("button", name="Edit message").click()
    stand_in.answers = [[delta(content="Sec"), go, delta(content="ond."), DONE]]
    ask(page, "Two?")
    until(page, "document.querySelectorAll('.text')[1]?.textContent === 'Sec'")
    again = page.get_by_role("button", name="Try again")
    assert again.count() == 1 and again.is_disabled()
    page.get_by_role("button", name="Send").locator("visible=true").click()
    until(page, "document.querySelector('#status').textContent === 'Wait until the answer is complete, or stop it.'")
    assert len(stand_in.requests) == 2
    go.set()
    assert text(page) == "Second."


def test_trying_again_stands_where_statistics_would(new_page, stand_in):
    stand_in.answers = [(500, "")]
    page = new_page(stand_in.url)
    ask(page, "?")
    last(page)
    again, problem = page.get_by_role("button", name="Try again").bounding_box(), page.locator(".answer .problem").bounding_box()
    assert abs(again["x"] - problem["x"]) < 1


# ------------------------------------------------------------------------------------------------------ chats


def test_several_chats_are_kept(new_page, stand_in):
    page = new_page(stand_in.url)
    answered(page, stand_in, "Paris.", "Capital of France?\nIn one word.")
    new_chat(page)
    assert page.locator(".turn").count() == 0
    answered(page, stand_in, "Rome.", "Capital of Italy?")
    assert chats(page) == ["Capital of Italy?", "Capital of France?"]
    page.get_by_role("button", name="Capital of France?", exact=True).click()
    assert page.locator(".text").all_inner_texts() == ["Paris."] and page.title() == "Capital of France? · Octavo"
    assert page.locator("#list [aria-current=true]").inner_text() == "Capital of France?"
    page.reload()
    assert page.locator(".text").all_inner_texts() == ["Paris."] and len(chats(page)) == 2
    answered(page, stand_in, "Yes.", "Really?")
    assert asked(stand_in)[0] == ("user", "Capital of France?\nIn one word.")
    assert chats(page)[0] == "Capital of France?", "the latest is the first"
    # Another tab has the same chats and starts with a new one.
    tab = page.context.new_page()
    tab.goto(stand_in.url)
    until(tab, "document.querySelectorAll('#list li').length === 2")
    assert tab.locator(".turn").count() == 0
    answered(tab, stand_in, "Bern.", "Capital of Switzerland?")
    until(page, "document.querySelectorAll('#list li').length === 3")


def test_an_answer_goes_on_while_another_chat_is_open(new_page, stand_in):
    go = threading.Event()
    stand_in.answers = [[delta(content="Slow"), go, delta(content="ly."), DONE], [delta(content="Quick."), DONE]]
    page = new_page(stand_in.url)
    ask(page, "Slow?")
    until(page, "document.querySelector('.text')?.textContent === 'Slow'")
    new_chat(page)
    ask(page, "Quick?")
    assert text(page) == "Quick."
    assert page.locator("#list li", has_text="Slow?").locator(".dot").count() == 1
    page.get_by_role("button", name="Slow?").first.click()
    assert page.locator(".answer").get_attribute("aria-busy") == "true" and page.locator("#stop").is_visible()
    page.get_by_role("button", name="Quick?").first.click()
    go.set()
    until(page, "document.querySelectorAll('#list .dot').length === 0")
    assert text(page) == "Quick."
    page.get_by_role("button", name="Slow?").first.click()
    assert text(page) == "Slowly."


def test_a_chat_is_renamed(new_page, stand_in):
    page = new_page(stand_in.url)
    answered(page, stand_in, "Yes.", "Old?")
    open_menu(page, "Old?", "Rename")
    assert page.evaluate("document.activeElement.ariaLabel") == "Name of the chat"
    page.keyboard.type("New <b>name</b>")
    page.keyboard.press("Enter")
    assert chats(page) == ["New <b>name</b>"]
    open_menu(page, "New <b>name</b>", "Rename")
    page.keyboard.type("Forget this")
    page.keyboard.press("Escape")
    page.reload()
    assert chats(page) == ["New <b>name</b>"]


def test_a_chat_is_exported(new_page, stand_in):
    page = new_page(stand_in.url)
    answered(page, stand_in, "**Paris**.", "Capital/of: France?")
    answered(page, stand_in, "Yes.", "Sure?")
    name, body = saved(page, lambda: open_menu(page, "Capital/of: France?", "Export as Markdown"))
    assert name == "Capital of France.md"
    assert body == "# Capital/of: France?\n\n## You\n\nCapital/of: France?\n\n## Answer\n\n**Paris**.\n\n## You\n\nSure?\n\n## Answer\n\nYes.\n"
    name, body = saved(page, lambda: open_menu(page, "Capital/of: France?", "Export as JSON"))
    chat = json.loads(body)
    assert name == "Capital of France.json"
    assert [(turn["user"], turn["content"]) for turn in chat["turns"]] == [("Capital/of: France?", "**Paris**."), ("Sure?", "Yes.")]
    new_chat(page)
    answered(page, stand_in, "One.", "Another?")
    name, body = saved(page, page.get_by_role("button", name="Export all").click)
    assert name == "octavo-chats.json" and [chat["title"] for chat in json.loads(body)] == ["Another?", "Capital/of: France?"]


def test_a_deleted_chat_comes_back_until_it_is_forgotten(new_page, stand_in):
    page = new_page(stand_in.url)
    for title in ["One?", "Two?"]:
        new_chat(page)
        answered(page, stand_in, f"Answer to {title}", title)
    open_menu(page, "Two?", "Delete")
    assert chats(page) == ["One?"] and page.locator(".turn").count() == 0
    assert page.locator("#toast-text").inner_text() == "Deleted “Two?”."
    # The focus is on the button that undoes it.
    page.keyboard.press("Enter")
    assert chats(page) == ["Two?", "One?"] and text(page) == "Answer to Two?"
    page.get_by_role("button", name="Delete all").click()
    assert chats(page) == [] and page.locator("#toast-text").inner_text() == "Deleted 2 chats."
    page.get_by_role("button", name="Undo").click()
    assert chats(page) == ["Two?", "One?"]
    open_menu(page, "One?", "Delete")
    page.get_by_role("button", name="Dismiss").click()
    assert page.locator("#toast").is_hidden()
    page.reload()
    assert chats(page) == ["Two?"]
    assert "One?" not in page.evaluate("JSON.stringify(localStorage)")


def test_deleting_a_chat_stops_its_answer(new_page, stand_in):
    first = threading.Event()
    stand_in.answers = [endless("x", first)]
    page = new_page(stand_in.url)
    ask(page, "Long?")
    until(page, "document.querySelector('.text')?.textContent === 'x'")
    open_menu(page, "Long?", "Delete")
    page.get_by_role("button", name="Undo").wait_for()
    first.set()
    assert stand_in.gone.wait(20), "the server was left talking"
    page.wait_for_timeout(100)
    assert chats(page) == [] and page.locator(".turn").count() == 0
    page.reload()
    assert chats(page) == []


@pytest.mark.parametrize("filler", ["octavo:chat:/:old", "something else"])
def test_full_storage_is_told_of_and_nothing_else_breaks(new_page, stand_in, filler):
    page = new_page(stand_in.url)
    # Either the page's own bound is reached, or the browser's.
    page.evaluate("""(key) => {
      const own = key.startsWith("octavo");
      const turn = { id: "1", parent: "", user: "u", content: "", reasoning: "", calls: [], note: "", problem: "", stats: "" };
      const chat = { id: "old", title: "Old", created: 1, updated: 1, head: "1", turns: [turn] };
      if (own) {
        turn.content = "x".repeat(3_999_700);
        localStorage.setItem(key, JSON.stringify(chat));
      } else {
        let length = 1 << 23;
        for (let text = ""; length >= 1; ) {
          try {
            localStorage.setItem(key, text + "x".repeat(length));
            text += "x".repeat(length);
          } catch {
            length >>= 1;
          }
        }
      }
    }""", filler)
    answered(page, stand_in, "Still here.", "Does it work?")
    assert text(page) == "Still here."
    assert "storage for this page is full" in page.get_by_role("alert").locator("visible=true").inner_text()
    answered(page, stand_in, "Again.", "And again?")
    assert len(asked(stand_in)) == 3
    assert "Again." in saved(page, lambda: open_menu(page, "Does it work?", "Export as Markdown"))[1]
    if filler.startswith("octavo"):
        open_menu(page, "Old", "Delete")
        page.get_by_role("button", name="Dismiss").click()
    else:
        page.evaluate("(key) => localStorage.removeItem(key)", filler)
    answered(page, stand_in, "Kept.", "Now?")
    assert page.get_by_role("alert").locator("visible=true").count() == 0
    page.reload()
    assert page.locator(".text").all_inner_texts() == ["Still here.", "Again.", "Kept."]


def test_damaged_storage_does_not_stop_the_page(new_page, stand_in):
    page = new_page(stand_in.url)
    page.evaluate("""() => {
      for (const [id, value] of [["1", "{"], ["2", "null"], ["3", "[]"], ["4", '{"id":"4","turns":[{}]}'], ["5", "5"]]) localStorage.setItem(`octavo:chat:/:${id}`, value);
      localStorage.setItem("octavo:settings:/", "no json");
      sessionStorage.setItem("octavo:tab:/", "{{");
    }""")
    page.reload()
    assert chats(page) == []
    answered(page, stand_in, "Fine.")
    assert text(page) == "Fine."


def test_the_list_of_chats_works_from_the_keyboard(new_page, stand_in):
    page = new_page(stand_in.url)
    answered(page, stand_in, "Yes.", "Old?")
    page.get_by_role("button", name="Options for “Old?”").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "Rename"
    for key, item in [("ArrowDown", "Export as Markdown"), ("End", "Delete"), ("ArrowDown", "Rename"), ("ArrowUp", "Delete"), ("Home", "Rename")]:
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.textContent") == item
    page.keyboard.press("Escape")
    assert page.get_by_role("menu").is_hidden()
    assert page.evaluate("document.activeElement.ariaLabel") == "Options for “Old?”"
    page.locator("#chats").focus()
    page.keyboard.press("Enter")
    assert page.locator("#side").is_hidden() and page.locator("#chats").get_attribute("aria-expanded") == "false"
    page.reload()
    assert page.locator("#side").is_hidden(), "the choice is kept"


def test_on_a_narrow_screen_the_list_covers_the_chat(new_page, stand_in):
    page = new_page(stand_in.url, viewport={"width": 360, "height": 640})
    answered(page, stand_in, "Yes.", "Old?")
    assert page.locator("#side").is_hidden()
    page.get_by_role("button", name="Chats", exact=True).click()
    assert page.evaluate("document.activeElement.textContent") == "Old?"
    assert page.evaluate("document.querySelector('#page').inert")
    page.keyboard.press("Escape")
    assert page.locator("#side").is_hidden() and page.evaluate("document.activeElement.id") == "chats"
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Old?", exact=True).click()
    assert page.locator("#side").is_hidden() and not page.evaluate("document.querySelector('#page').inert")
    page.get_by_role("button", name="Chats", exact=True).click()
    open_menu(page, "Old?", "Delete")
    assert page.locator("#side").is_hidden() and page.evaluate("document.activeElement.id") == "undo"
    page.keyboard.press("Enter")
    assert text(page) == "Yes."
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("(box => box.left >= 0 && box.right <= 360)(document.querySelector('dialog').getBoundingClientRect())")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_menus_dialogs_and_editors_can_be_read(new_page, stand_in, scheme):
    page = new_page(stand_in.url, color_scheme=scheme)
    for title in ["One?", "Two?"]:
        new_chat(page)
        answered(page, stand_in, "Yes.", title)
    open_menu(page, "One?", "Delete")
    page.get_by_role("button", name="Edit message").click()
    page.get_by_role("button", name="Options for “Two?”").click()
    shown = page.evaluate(CONTRASTS)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Settings").click()
    shown |= page.evaluate(CONTRASTS)
    assert {"button.danger#delete", "span.#toast-text", "button.primary#", "legend.#"} <= set(shown)
    assert min(shown.values()) >= 4.5, shown


# --------------------------------------------------------------------------------------------------- settings

FIELDS = {
    "Temperature": ("temperature", 0.5), "Top-p": ("top_p", 0.9), "Top-k": ("top_k", 40), "Min-p": ("min_p", 0.05),
    "Repetition penalty": ("repetition_penalty", 1.1), "Presence penalty": ("presence_penalty", -0.5),
    "Frequency penalty": ("frequency_penalty", 0.25), "Max tokens": ("max_completion_tokens", 7), "Seed": ("seed", 42),
}


def placeholders(page):
    page.get_by_role("button", name="Settings").click()
    shown = {label: page.get_by_label(label, exact=True).get_attribute("placeholder") for label in FIELDS}
    page.keyboard.press("Escape")
    return shown


def test_every_setting_is_sent_if_it_is_set_and_only_then(new_page, stand_in):
    page = new_page(stand_in.url)
    answered(page, stand_in, "x")
    sampling = {name for name, _ in FIELDS.values()}
    assert not sampling & set(stand_in.requests[-1])
    for label, (name, value) in FIELDS.items():
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Reset sampling").click()
        page.get_by_label(label, exact=True).fill(str(value))
        page.get_by_role("button", name="Done").click()
        answered(page, stand_in, "x")
        assert {key: stand_in.requests[-1].get(key) for key in sampling & set(stand_in.requests[-1])} == {name: value}
    # The settings are those of every chat, and stay; leaving the dialog changes none.
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("1.5")
    page.keyboard.press("Escape")
    page.reload()
    new_chat(page)
    answered(page, stand_in, "x")
    assert {key: stand_in.requests[-1][key] for key in sampling & set(stand_in.requests[-1])} == {"seed": 42}
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("3")
    page.get_by_role("button", name="Done").click()
    assert page.locator("dialog").is_visible(), "a value out of range is not taken"


def test_the_real_server_takes_every_setting(new_page, tiny_url):
    page = new_page(tiny_url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    for label, (_, value) in FIELDS.items():
        page.get_by_label(label, exact=True).fill(str(value))
    page.get_by_role("button", name="Done").click()
    ask(page, "Say something.")
    answer = last(page)
    assert answer.locator(".problem").is_hidden() and "tokens" in answer.locator(".foot").inner_text()


def test_placeholders_are_the_defaults_of_the_model(new_page, stand_in):
    page = new_page(stand_in.url)
    until(page, "document.getElementById('served').textContent === 'tiny'")
    own = {"Presence penalty": "0", "Frequency penalty": "0", "Seed": "random"}
    untold = dict.fromkeys(["Temperature", "Top-p", "Top-k", "Min-p", "Repetition penalty"], "the model's")
    assert placeholders(page) == untold | own | {"Max tokens": "no limit"}
    neutral = {"Temperature": "1", "Top-p": "1", "Top-k": "off", "Min-p": "off", "Repetition penalty": "1", "Max tokens": "no limit"}
    told = {"temperature": 0.2, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.2, "max_new_tokens": 512}
    shown = {"Temperature": "0.2", "Top-p": "0.9", "Top-k": "50", "Min-p": "0.05", "Repetition penalty": "1.2", "Max tokens": "512"}
    for defaults, expected in [({}, neutral), (told, shown), ({"temperature": 0, "top_k": -1}, neutral | {"Temperature": "0"})]:
        stand_in.defaults = defaults
        page.reload()
        until(page, "text => document.querySelector('[name=temperature]').placeholder === text", expected["Temperature"])
        assert placeholders(page) == expected | own
    answered(page, stand_in, "x")
    assert set(stand_in.requests[-1]) == {"model", "messages", "stream", "stream_options"}


def test_the_defaults_are_asked_for_with_the_key(new_page, stand_in):
    stand_in.key, stand_in.defaults = "right", {"temperature": 0.2}
    page = new_page(stand_in.url)
    until(page, "document.getElementById('settings').open")
    assert stand_in.info_keys == []
    page.keyboard.type("right")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('[name=temperature]').placeholder === '0.2'")
    assert stand_in.info_keys == ["Bearer right"]
