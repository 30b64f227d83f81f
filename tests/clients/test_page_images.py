"""Images on the chat page: chosen by the button, pasted and dropped; shown, sent, kept and removed."""

import base64
import json
import pathlib
import struct
import zlib

import pytest

from chat_page import CONTRASTS, DONE, answered, ask, delta, last, new_chat, text, until
from conftest import ROOT, serving


def png(width=4, height=3, colour=(200, 40, 40)):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * width) * height
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


RED, BLUE = png(), png(5, 5, (30, 40, 200))


def file(name, data, kind="image/png"):
    return {"name": name, "mimeType": kind, "buffer": data}


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data):
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def said(words):
    return {"type": "text", "text": words}


@pytest.fixture
def eyes(stand_in):
    """A stand-in whose model takes images."""
    stand_in.images = 999
    return stand_in


def button(page):
    return page.get_by_role("button", name="Add images")


def choose(page, *files, at=button):
    with page.expect_file_chooser() as chooser:
        at(page).click()
    chooser.value.set_files(list(files))


def tray(page):
    """The names of the images of the message that is being written, once they are shown."""
    until(page, "[...document.querySelectorAll('#composer .images li')].every((item) => item.querySelector('img')?.naturalWidth)")
    return page.locator("#composer .images img").evaluate_all("nodes => nodes.map((node) => node.alt)")


def settled(page, count):
    until(page, "(count) => document.querySelectorAll('#composer .images li').length === count", count)
    return tray(page)


def complaint(page):
    page.locator("#composer [role=alert]").wait_for()
    return page.locator("#composer [role=alert]").inner_text()


def conversation(page):
    """The names of the images in the conversation, once they are shown."""
    until(page, "[...document.querySelectorAll('.user .images li')].every((item) => item.querySelector('img')?.naturalWidth)")
    return page.locator(".user .images img").evaluate_all("nodes => nodes.map((node) => node.alt)")


def content(server, index=-1, message=-1):
    return server.requests[index]["messages"][message]["content"]


# Lets an event carry files, as the browser does after a paste or a drop: [name, type, base64], and texts by their types.
TRANSFER = """
  const transfer = new DataTransfer();
  for (const [name, type, data] of files) transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name, { type }));
  for (const [type, text] of Object.entries(texts)) transfer.setData(type, text);
  const node = document.querySelector(selector);
"""


def carried(files, texts, selector):
    return {"files": [[name, "image/png", base64.b64encode(data).decode()] for name, data in files], "texts": texts, "selector": selector}


def paste(page, *files, at="#input", **texts):
    """Whether the page took it."""
    texts = {f"text/{kind}": words for kind, words in texts.items()}
    return page.evaluate("({ files, texts, selector }) => {" + TRANSFER + """
      return !node.dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true }));
    }""", carried(files, texts, at))


def drop(page, *files, at="main"):
    """The composers and editors that were marked, and whether the browser is kept from showing the file itself."""
    return page.evaluate("({ files, texts, selector }) => {" + TRANSFER + """
      const fire = (type) => !node.dispatchEvent(new DragEvent(type, { dataTransfer: transfer, bubbles: true, cancelable: true }));
      const over = fire("dragover"), marked = [...document.querySelectorAll(".dropping")].map((form) => form.id || form.classList[0]);
      return [over && fire("drop"), marked, document.querySelectorAll(".dropping").length];
    }""", carried(files, {}, at))


# ---------------------------------------------------------------------------------------------------- adding


def test_chosen_images_are_sent_in_order_before_the_text(new_page, eyes):
    page = new_page(eyes.url)
    # A name says nothing about a file.
    choose(page, file("red.png", RED), file("blue.jpg", BLUE, "image/jpeg"))
    assert settled(page, 2) == ["red.png", "blue.jpg"]
    assert page.locator("#status").inner_text() == "Added red.png, blue.jpg"
    assert page.evaluate("document.activeElement.id") == "input"
    choose(page, file("again.png", RED))
    assert settled(page, 3) == ["red.png", "blue.jpg", "again.png"]
    answered(page, eyes, "Colours.", "What is this?")
    assert content(eyes) == [part(RED), part(BLUE), part(RED), said("What is this?")]
    assert page.locator("#composer .images li").count() == 0
    assert conversation(page) == ["red.png", "blue.jpg", "again.png"]
    # The conversation goes on with its images.
    answered(page, eyes, "Yes.", "Sure?")
    assert content(eyes, message=0) == [part(RED), part(BLUE), part(RED), said("What is this?")]
    assert content(eyes) == "Sure?"


def test_an_image_needs_no_text(new_page, eyes):
    page = new_page(eyes.url)
    eyes.answers.append([delta(content="Red."), DONE])
    choose(page, file("red.png", RED))
    settled(page, 1)
    page.get_by_role("button", name="Send").click()
    assert text(page) == "Red." and content(eyes) == [part(RED)]
    assert page.title() == "red.png · Octavo"


def test_images_are_pasted(new_page, eyes):
    page = new_page(eyes.url)
    button(page).wait_for()
    assert paste(page, ("image.png", RED))
    settled(page, 1)
    # Also where no field has the focus, and as a browser copies an image.
    assert paste(page, ("other.png", BLUE), at="main", html="<img>")
    assert settled(page, 2) == ["image.png", "other.png"]
    # Office programs copy a text with its picture.
    assert not paste(page, ("table.png", RED), plain="1\t2", html="<table>")
    assert not paste(page, plain="words")
    page.get_by_role("button", name="Settings").click()
    assert not paste(page, ("key.png", RED), at="dialog input")
    page.keyboard.press("Escape")
    answered(page, eyes, "Yes.", "?")
    assert content(eyes) == [part(RED), part(BLUE), said("?")]


def test_images_are_dropped(new_page, eyes):
    page = new_page(eyes.url)
    button(page).wait_for()
    assert drop(page, ("a.png", RED), ("b.png", BLUE)) == [True, ["composer"], 0]
    assert settled(page, 2) == ["a.png", "b.png"]
    answered(page, eyes, "Yes.", "?")
    assert content(eyes) == [part(RED), part(BLUE), said("?")]
    # Text is none of the page's business.
    assert drop(page) == [False, [], 0]


def test_images_are_removed_from_the_keyboard(new_page, eyes):
    page = new_page(eyes.url)
    choose(page, *[file(f"{name}.png", RED) for name in "abc"])
    settled(page, 3)
    remove = page.get_by_role("button", name="Remove “b.png”")
    remove.focus()
    page.keyboard.press("Enter")
    assert tray(page) == ["a.png", "c.png"]
    assert page.locator("#status").inner_text() == "Removed b.png"
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove “c.png”"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove “a.png”"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "input"
    assert page.get_by_role("list", name="Images of the message").count() == 0
    answered(page, eyes, "Yes.", "?")
    assert content(eyes) == "?"


def test_files_that_the_server_cannot_decode_are_refused(new_page, eyes):
    page = new_page(eyes.url)
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    choose(page, file("drawing.png", svg), file("red.png", RED), file("cut.png", RED[:30]))
    assert complaint(page) == "“drawing.png” is not an image in the format PNG, JPEG, WebP or GIF.\n“cut.png” is damaged or too large for this browser."
    assert settled(page, 1) == ["red.png"], "the others are taken"
    choose(page, file("blue.png", BLUE))
    settled(page, 2)
    assert page.locator("#composer [role=alert]").is_hidden()


def test_no_more_images_are_taken_than_the_server_allows(new_page, stand_in):
    stand_in.images = 2
    page = new_page(stand_in.url)
    choose(page, *[file(f"{name}.png", RED) for name in "abc"])
    assert complaint(page) == "A prompt may have 2 images at most."
    assert settled(page, 2) == ["a.png", "b.png"]


def test_large_images_are_made_smaller_and_keep_their_format(new_page, eyes):
    page = new_page(eyes.url)
    jpeg = page.evaluate("""() => {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [1500, 3000];
      canvas.getContext("2d").fillRect(0, 0, 1500, 3000);
      return canvas.toDataURL("image/jpeg").split(",")[1];
    }""")
    choose(page, file("large.png", png(3000, 2000)), file("tall.jpg", base64.b64decode(jpeg), "image/jpeg"), file("fits.png", png(2048, 2048)))
    settled(page, 3)
    answered(page, eyes, "Yes.", "?")
    urls = [image["image_url"]["url"] for image in content(eyes)[:3]]
    assert [url.split(";")[0] for url in urls] == ["data:image/png", "data:image/jpeg", "data:image/png"]
    sizes = page.evaluate("""(urls) => Promise.all(urls.map(async (url) => {
      const image = new Image();
      image.src = url;
      await image.decode();
      return [image.naturalWidth, image.naturalHeight];
    }))""", urls)
    assert sizes == [[2508, 1672], [1448, 2896], [2048, 2048]]
    assert urls[2] == data_url(png(2048, 2048)), "what is small enough is sent as it is"


# ------------------------------------------------------------------------------------- models without images


def until_informed(page, name, value):
    """Waits until the page has the server's answer about its model, of which it shows this default."""
    until(page, "([name, value]) => document.querySelector(`[name=${name}]`).placeholder === String(value)", [name, value])


def test_a_model_of_text_takes_no_images(new_page, stand_in):
    stand_in.images, stand_in.defaults = 0, {"top_p": 0.3}
    page = new_page(stand_in.url)
    until_informed(page, "top_p", 0.3)
    assert button(page).count() == 0
    assert drop(page, ("a.png", RED)) == [True, [], 0]
    assert complaint(page) == "The model takes no images."
    assert page.locator("#composer .images li").count() == 0
    answered(page, stand_in, "Yes.", "?")
    assert content(stand_in) == "?" and page.locator("#composer [role=alert]").is_hidden()
    assert paste(page, ("a.png", RED))
    assert complaint(page) == "The model takes no images."
    page.get_by_role("button", name="Edit message").click()
    assert button(page).count() == 0


def test_the_real_server_says_whether_its_model_takes_images(new_page, tiny_url):
    page = new_page(tiny_url)
    info = page.evaluate("async () => (await fetch('server_info?config_format=json')).json()")["vllm_config"]
    assert info["limit_mm_per_prompt"] == {"image": 0}
    until_informed(page, "top_p", info["sampling_defaults"]["top_p"])
    assert button(page).count() == 0
    with serving(ROOT / "models" / "testdata" / "qwen3-vl", "--served-model-name", "eyes", "--limit-mm-per-prompt", '{"image": 2}') as url:
        page = new_page(url)
        choose(page, file("a.png", png(64, 40)), file("b.png", png(40, 64)), file("c.png", RED))
        assert complaint(page) == "A prompt may have 2 images at most."
        settled(page, 2)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Max tokens").fill("4")
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="Done").click()
        ask(page, "What is this?")
        # A speed needs two tokens that are seen at different times, which random weights do not promise.
        assert "4 tokens" in last(page).locator(".foot").inner_text()
        assert last(page).locator(".problem").is_hidden()


# ---------------------------------------------------------------------------------------- editing and keeping


def test_another_attempt_has_the_images(new_page, eyes):
    page = new_page(eyes.url)
    choose(page, file("red.png", RED))
    settled(page, 1)
    eyes.answers = [(500, '{"error": {"message": "Busy."}}'), [delta(content="Red."), DONE], [delta(content="Rot."), DONE]]
    ask(page, "Colour?")
    last(page).locator(".problem").wait_for()
    for expected in ["Red.", "Rot."]:
        page.get_by_role("button", name="Try again").click()
        until(page, "(expected) => document.querySelector('.text')?.textContent === expected", expected)
    assert [content(eyes, index) for index in range(3)] == [[part(RED), said("Colour?")]] * 3
    assert conversation(page) == ["red.png"]


def editor_button(page):
    return page.locator(".editor").get_by_role("button", name="Add images")


def test_an_edited_message_keeps_its_images_until_they_are_removed(new_page, eyes):
    page = new_page(eyes.url)
    choose(page, file("red.png", RED), file("blue.png", BLUE))
    settled(page, 2)
    answered(page, eyes, "First.", "One?")
    eyes.answers = [[delta(content="Second."), DONE], [delta(content="Third."), DONE]]
    page.get_by_role("button", name="Edit message").click()
    page.get_by_label("Edit message").and_(page.locator("textarea")).fill("Two?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.text')?.textContent === 'Second.'")
    assert content(eyes) == [part(RED), part(BLUE), said("Two?")]
    # One goes, one is dropped in, one is chosen; and nothing of this stays if the edit is left.
    for leaves in [True, False]:
        page.get_by_role("button", name="Edit message").click()
        page.get_by_role("button", name="Remove “red.png”").click()
        assert drop(page, ("dropped.png", RED), at=".editor textarea") == [True, ["editor"], 0]
        until(page, "document.querySelectorAll('.editor .images li').length === 2")
        choose(page, file("chosen.png", BLUE), at=editor_button)
        until(page, "document.querySelectorAll('.editor .images img').length === 3")
        if leaves:
            page.keyboard.press("Escape")
            assert conversation(page) == ["red.png", "blue.png"]
    page.locator(".editor").get_by_role("button", name="Send").click()
    until(page, "document.querySelector('.text')?.textContent === 'Third.'")
    assert content(eyes) == [part(BLUE), part(RED), part(BLUE), said("Two?")]
    assert conversation(page) == ["blue.png", "dropped.png", "chosen.png"]
    page.get_by_role("button", name="Earlier version").click()
    assert conversation(page) == ["red.png", "blue.png"]


def kept(page):
    """The number of images in the database."""
    return page.evaluate("""() => new Promise((resolve) => {
      const request = indexedDB.open("octavo:images:/", 1);
      request.onsuccess = () => {
        const count = request.result.transaction("images").objectStore("images").count();
        count.onsuccess = () => (request.result.close(), resolve(count.result));
      };
    })""")


def until_kept(page, count):
    for _ in range(1000):
        if kept(page) == count:
            return
        page.wait_for_timeout(20)
    pytest.fail(f"never {count} images in the database")


def test_images_are_kept_when_the_page_is_loaded_again(new_page, eyes):
    page = new_page(eyes.url)
    # More than the browser's storage of texts would hold.
    large = png(1200, 1200) + bytes(6_000_000)
    choose(page, file("red.png", RED), file("large.png", large))
    settled(page, 2)
    answered(page, eyes, "Red.", "Colour?")
    until_kept(page, 2)
    assert page.locator("#full").is_hidden()
    page.reload()
    assert conversation(page) == ["red.png", "large.png"]
    answered(page, eyes, "Yes.", "Sure?")
    assert content(eyes, message=0) == [part(RED), part(large), said("Colour?")]


def test_a_browser_that_stores_no_images_says_so(new_page, eyes):
    page = new_page(eyes.url)
    page.evaluate("() => { IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError'); }; }")
    choose(page, file("red.png", RED))
    settled(page, 1)
    answered(page, eyes, "Red.", "Colour?")
    full = page.locator("#full")
    full.wait_for()
    assert full.inner_text() == "The browser does not store the images of this chat. They are lost when the page is closed or reloaded."
    # Until then they are there.
    answered(page, eyes, "Yes.", "Sure?")
    assert content(eyes, message=0) == [part(RED), said("Colour?")] and full.is_visible()
    page.reload()
    page.get_by_text("“red.png” is not in this browser.").wait_for()
    ask(page, "And now?")
    assert last(page).locator(".problem").inner_text() == "The image “red.png” is not in this browser. Edit its message to remove it or to add it again."
    assert len(eyes.requests) == 2, "a conversation without its images is another one"
    page.get_by_role("button", name="Edit message").first.click()
    page.get_by_role("button", name="Remove “red.png”").click()
    eyes.answers = [[delta(content="None."), DONE]]
    page.locator(".editor").get_by_role("button", name="Send").click()
    until(page, "document.querySelector('.text')?.textContent === 'None.'")
    assert content(eyes) == "Colour?"


def test_a_deleted_chat_takes_its_images_with_it_and_brings_them_back(new_page, eyes):
    page = new_page(eyes.url)
    for name, colour in [("red", RED), ("blue", BLUE)]:
        new_chat(page)
        choose(page, file(f"{name}.png", colour))
        settled(page, 1)
        answered(page, eyes, "Yes.", f"{name}?")
    until_kept(page, 2)
    page.get_by_role("button", name="Options for “red?”").click()
    page.get_by_role("menuitem", name="Delete").click()
    until_kept(page, 1)
    page.get_by_role("button", name="Undo").click()
    assert conversation(page) == ["red.png"]
    until_kept(page, 2)
    page.reload()
    assert conversation(page) == ["red.png"]
    page.get_by_role("button", name="Delete all").click()
    until_kept(page, 0)


def test_a_chat_is_exported_with_its_images(new_page, eyes):
    page = new_page(eyes.url)
    choose(page, file("red.png", RED))
    settled(page, 1)
    answered(page, eyes, "Red.", "Colour?")

    def saved(act):
        with page.expect_download() as download:
            act()
        return pathlib.Path(download.value.path()).read_text()

    def export(item):
        page.get_by_role("button", name="Options for “Colour?”").click()
        page.get_by_role("menuitem", name=item).click()

    [image] = json.loads(saved(lambda: export("Export as JSON")))["turns"][0]["images"]
    assert (image["name"], image["url"]) == ("red.png", data_url(RED))
    [chat] = json.loads(saved(page.get_by_role("button", name="Export all").click))
    assert chat["turns"][0]["images"][0]["url"] == data_url(RED)
    assert "## You\n\nImage: red.png\n\nColour?\n" in saved(lambda: export("Export as Markdown"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_images_fit_a_narrow_screen_and_messages_about_them_can_be_read(new_page, eyes, scheme):
    page = new_page(eyes.url, color_scheme=scheme, viewport={"width": 360, "height": 640})
    choose(page, *[file(f"{index}.png", png(2000, 300)) for index in range(3)], file("notes.png", b"notes"))
    settled(page, 3)
    shown = page.evaluate(CONTRASTS)
    assert any(key.startswith("p.problem") for key in shown) and min(shown.values()) >= 4.5, shown
    answered(page, eyes, "Yes.", "?")
    conversation(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("[...document.images].every((image) => image.getBoundingClientRect().right <= 360)")
