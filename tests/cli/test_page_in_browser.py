"""The HTML page in a browser: direction, colors, keyboard, what a screen reader reads, small windows, long texts."""

import os
import random
import re
import shutil
import time

import pytest
from test_page import contrast, make

from xlcli.api.values import TextScore
from xlcli.events import TokenScore

REASON = "no browser tests: pip install playwright, and apt-get install chromium"
sync_api = pytest.importorskip("playwright.sync_api", reason=REASON)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is None:
    pytest.skip(REASON, allow_module_level=True)

LINES = (
    "The ship went down in the night.",
    "كان الليل مظلما. لم يتكلم أحد.",
    "ภาษาไทยไม่มีช่องว่าง ระหว่างคำ",
    "我们在黑暗的夜里航行。",
    "שורה עם English בתוכה.",
    "",
    "    indented = 3",
)
SECONDS = 3.0  # in which a text of 1 MB opens
PLACE = """([word, from, to]) => {
    const text = [...document.querySelectorAll("main i")].find(shown => shown.textContent == word).firstChild
    const range = document.createRange()
    range.setStart(text, from)
    range.setEnd(text, to)
    const box = range.getBoundingClientRect()
    return [box.left, box.right]
}"""
COLORS = """() => [...document.querySelectorAll("main i")].map(word => {
    const style = getComputedStyle(word)
    return [style.color, style.backgroundColor, getComputedStyle(document.body).backgroundColor]
})"""


@pytest.fixture(scope="module")
def browser():
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=options)
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a text. Its tab has the addresses that were `requested`, and the `messages` of the browser."""
    contexts = []

    def opened(text, *, width=900, theme="light", documents=()):
        path = tmp_path / "page.html"
        path.write_text(page_of(text, documents), "utf-8")
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme))
        tab = contexts[-1].new_page()
        tab.requested, tab.messages, tab.address = [], [], path.as_uri()
        tab.on("request", lambda request: tab.requested.append(request.url))
        tab.on("console", lambda message: tab.messages.append(message.text))
        tab.goto(tab.address)
        return tab

    yield opened
    for context in contexts:
        context.close()


def page_of(text, documents=()):
    """The page of a text whose tokens have up to four characters, with the blanks before them; bits are random."""
    draw = random.Random(0)
    tokens = [(token.encode(), draw.expovariate(0.3)) for token in re.findall(r" *\S{1,4}\n?|\s", text)]
    words = [(word.start(), word[0], draw.expovariate(0.2)) for word in re.finditer(rb"\S+", text.encode())]
    return make(tokens, "نص.txt", words=words, documents=documents)


def test_each_line_has_the_direction_of_its_text(show):
    tab = show("\n".join(LINES))
    first, letters, stop = (tab.evaluate(PLACE, place) for place in (["كان", 0, 3], ["أحد.", 0, 3], ["أحد.", 3, 4]))
    width = tab.evaluate("document.querySelector('main').getBoundingClientRect().right")
    assert first[1] == pytest.approx(width, abs=2)  # the line begins at the right
    assert stop[0] < letters[0] < first[0]  # and ends at the left, with its full stop
    assert tab.evaluate(PLACE, ["The", 0, 3])[0] < tab.evaluate(PLACE, ["night.", 0, 5])[0]
    assert tab.evaluate("document.querySelector('main').lang") == ""
    assert tab.evaluate("getComputedStyle(document.querySelector('h1')).direction") == "rtl"


def test_scripts_without_blanks_are_colored_by_token(show):
    tab = show("\n".join(LINES))
    words = tab.evaluate("[...document.querySelectorAll('main i')].map(word => [word.textContent, word.title])")
    thai = [text for text, _ in words if "\u0e00" <= text[0] <= "\u0e7f"]
    assert "".join(thai) == LINES[2].replace(" ", "")
    assert thai == ["ภาษา", "ไทยไ", "ม่มี", "ช่อง", "ว่าง", "ระหว่างค", "ำ"]  # none begins with a mark
    assert all(re.fullmatch(r"[\d.]+ bits", title) for _, title in words)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_can_be_read_on_their_colors_in_both_themes(show, theme):
    tab = show("\n".join(LINES * 40), theme=theme)
    found = {tuple(map(rgb, colors)) for colors in tab.evaluate(COLORS)}
    backgrounds = {back for _, back, _ in found}
    assert len(backgrounds) == 6  # five colors and none
    for ink, back, ground in found:
        assert contrast(ink, back or ground) >= 4.5
    assert (sum(min(ground for _, _, ground in found)) > 3 * 128) == (theme == "light")


def rgb(color):
    """Red, green and blue of a computed color; None if it is transparent."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", color)]
    return None if numbers[3:] == [0] else tuple(numbers[:3])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_window_of_400_pixels_has_no_horizontal_scrolling(show, theme):
    tab = show("\n".join([*LINES, "word " * 200, "x" * 3000]), width=400, theme=theme)
    for _ in range(8):  # the line in focus is longer
        assert tab.evaluate("document.documentElement.scrollWidth") <= 400
        tab.keyboard.press("Tab")


def test_a_long_word_wraps_in_a_notebook(show):
    tab = show("a", width=400)
    tab.goto("about:blank")  # without the rules of the page on styles
    tab.set_content(TextScore((TokenScore(1, 0, b"x" * 3000, 9.0),))._repr_html_())
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400


def test_the_keyboard_reaches_the_bits_of_each_line(show):
    tab = show("\n".join(LINES))
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "curve and lines"
    for number, line in enumerate(LINES, 1):
        if not line:
            continue
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.textContent").rstrip("\n") == line
        read = spoken(tab)
        bits = tab.evaluate("[...document.activeElement.querySelectorAll('i')].map(word => word.title)")
        assert [text.strip() for text in read if text.endswith(" bits")] == bits
        assert any(re.fullmatch(rf"line {number}, [\d.]+ bits per byte", name) for name in read)
    tab.keyboard.press("Tab")  # beyond the text
    assert not [text for text in spoken(tab) if re.fullmatch(r" ?[\d.]+ bits", text)]


def test_the_keyboard_reaches_each_document_and_small_windows_show_its_name(show):
    names = {
        0: "نص.txt",
        len(LINES[0]) + 1: "a/long/name/" + "x" * 300,
        len("\n".join(LINES[:-1]).encode()) + 1: "last",
    }
    tab = show("\n".join(LINES), documents=names, width=400)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    assert tab.evaluate("getComputedStyle(document.querySelector('nav bdi')).direction") == "rtl"
    tab.keyboard.press("Tab")  # the list itself, which can be closed
    for number, name in enumerate(names.values(), 1):
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.textContent") == name
        tab.keyboard.press("Enter")
        heading = tab.evaluate("document.querySelector(':target').textContent")
        assert (heading, tab.evaluate("document.querySelector(':target').id")) == (name, f"D{number}")
        tab.evaluate("document.querySelector(`nav a[href='${location.hash}']`).focus()")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "curve and lines"


def spoken(tab):
    """Names of the groups and texts that a screen reader gets."""
    names = []
    for node in tab.context.new_cdp_session(tab).send("Accessibility.getFullAXTree")["nodes"]:
        if not node["ignored"] and node["role"]["value"] in ("group", "StaticText"):
            names.append(node["name"]["value"])
    return names


def test_copied_text_is_the_text(show):
    tab = show("\n".join(LINES) + "\n")
    tab.evaluate("getSelection().selectAllChildren(document.querySelector('main'))")
    assert tab.evaluate("getSelection().toString()").strip("\n") == "\n".join(LINES)


@pytest.mark.parametrize("has_documents", [False, True])
def test_a_text_of_a_megabyte_opens_at_once_and_asks_for_nothing(show, has_documents):
    lines = [" ".join(LINES[:1] * (1 + number % 3)) for number in range(16_000)]
    text = "\n".join(lines)[: 10**6]
    starts = [0, *(line.end() for line in re.finditer("\n", text))] if has_documents else []
    tab = show(text, documents={start: f"rows.tsv, item {start}" for start in starts})
    durations = []
    for _ in range(3):  # a busy machine may be late once
        began = time.monotonic()
        tab.reload()
        tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        durations.append(time.monotonic() - began)
    assert min(durations) <= SECONDS
    assert set(tab.requested) == {tab.address}
    assert tab.messages == []
