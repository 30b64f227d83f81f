"""Takes a picture of the chat page: starts a server with the default model, asks a question and writes a PNG.

    python tests/clients/screenshot.py PATH [--question TEXT] [--scheme light|dark] [--width N] [--height N]
"""

import argparse
import pathlib

from playwright.sync_api import sync_playwright

from chat_page import ask, last
from conftest import browser_path, serving

MODEL_MS = 300_000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=pathlib.Path, help="the file to write")
    parser.add_argument("--question", default="Write a Python function that checks whether a word is a palindrome.")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=800)
    options = parser.parse_args()
    with serving() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        viewport = {"width": options.width, "height": options.height}
        page = browser.new_page(viewport=viewport, color_scheme=options.scheme, reduced_motion="reduce")
        page.set_default_timeout(MODEL_MS)
        page.goto(url)
        # The same picture each time.
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="Done").click()
        ask(page, options.question)
        last(page)
        page.screenshot(path=options.path)


if __name__ == "__main__":
    main()
