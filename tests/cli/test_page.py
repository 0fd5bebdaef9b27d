"""The HTML page of a scored text: its text, colors and scores are those given, and it holds nothing that acts."""

import base64
import hashlib
import json
import re
import signal
import subprocess
import tempfile
from collections import deque
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from programs import TEXT, command, environment

from xlcli.cli import page as module
from xlcli.cli.page import Page
from xlcli.cli.terminal import Visible
from xlcli.events import ContextBin, TokenScore, WordScore

HOSTILE = (
    b"<script>alert(1)</script></pre></b></main></html><img src=x onerror=alert(1)> &lt;&#0;\" ' $title ${x} $$\n"
    b"</style><!-- text --><![CDATA[ ]]> \x1b[2J\x1b]0;owned\x07\x00\x7f\xc2\x9b31m \xff\xfe\xed\xa0\x80\r\n"
    b"\xe2\x80\xaeright to left\xe2\x80\xac \xe2\x81\xa6\xe2\x80\xa8\xe2\x80\xa9\xc2\x85\n"
    b"\x0c\x0b\ttab \xf0\x9f\x98\x80 \xe2\x82"
)


class Word(NamedTuple):
    byte: int
    text: str
    bits: float
    name: str


class Parsed(HTMLParser):
    """What a browser finds in a page: tags with their attributes, text by element, rows with their words."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.stack, self.texts, self.rows, self.n_bytes = [], [], {}, [], 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.stack.append(tag)
        if tag == "b":
            self.rows.append(attributes | {"text": "", "words": []})
        if tag == "i" and "pre" in self.stack:
            bits = float(re.fullmatch(r"([\d.]+|inf|nan) bits", attributes["title"])[1])
            self.rows[-1]["words"].append(Word(self.n_bytes, "", bits, attributes["class"]))

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data):
        tag = self.stack[-1] if self.stack else None
        self.texts[tag] = self.texts.get(tag, "") + data
        if "b" in self.stack:
            self.rows[-1]["text"] += data
            self.n_bytes += len(data.encode())
            if tag == "i":
                word = self.rows[-1]["words"].pop()
                self.rows[-1]["words"].append(word._replace(text=word.text + data))

    @property
    def text(self):
        return "".join(row["text"] for row in self.rows)

    @property
    def words(self):
        return [word for row in self.rows for word in row["words"]]


def make(tokens, title="text", *, words=None, byte=0, facts=(), documents=(), **options):
    """The page of tokens given as (text, bits), and words as (byte, text, bits): else what is between blanks.

    `documents` are names by the byte of their first tokens.
    """
    tokens = list(tokens)
    if words is None:
        data = b"".join(text for text, _ in tokens)
        words = [(byte + found.start(), found[0], 3.0) for found in re.finditer(rb"\S+", data)]
    words = deque(words)
    with tempfile.TemporaryDirectory() as folder:
        page = Page(Path(folder) / "page.html")
        for text, bits in tokens:
            if byte in documents:
                page.begin(documents[byte])
            page.add(TokenScore(1, byte, text, bits))
            byte += len(text)
            while words and words[0][0] + len(words[0][1]) < byte:
                add_word(page, *words.popleft())
        for word in words:
            add_word(page, *word)
        page.save(title, "m", "memory", facts, **options)
        return page.path.read_text("utf-8")


def add_word(page, byte, text, bits):
    word = text.decode("utf-8", "replace")
    page.add_word(
        WordScore(
            document=1, line=1, number=1, byte=byte, word=word, bits=bits, naive_bits=bits, token_entropy=0.0, tokens=1
        )
    )


def each_a_word(tokens, byte=0):
    """Words for `make` with the bits of tokens that have one each."""
    words = []
    for text, bits in tokens:
        if text.strip():
            words.append((byte + len(text) - len(text.lstrip()), text.strip(), bits))
        byte += len(text)
    return words


def by_bytes(data, bits=1.0):
    return [(data[at : at + 1], bits) for at in range(len(data))]


THAI_TO_KHMER = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\ua9e0-\ua9ff\uaa60-\uaa7f]")

texts = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from([b"<b>", b"&amp;", b"\n", b"\r\n", b"\xe2\x80\xae", b"\xf0\x9f\x98\x80", b"\xff", b"a b"])
    ).map(b"".join),
)


@given(texts, st.lists(st.integers(1, 9), max_size=30), st.floats(0, 300))
@settings(max_examples=150, deadline=None)
def test_the_text_of_the_page_is_the_text_given(data, sizes, bits):
    tokens, at = [], 0
    while at < len(data):
        size = sizes[len(tokens)] if len(tokens) < len(sizes) else 3
        piece = data[at : at + size].split(b"\n")[0]
        size = min(len(piece) + 1, size) if b"\n" in data[at : at + size] else len(piece)
        tokens.append((data[at : at + size], bits))
        at += size
    parsed = Parsed(make(tokens))
    assert parsed.text == Visible().feed(data, final=True)
    assume(not THAI_TO_KHMER.search(data.decode(errors="ignore")))  # these are colored by token, not by word
    for word, given_word in zip(parsed.words, re.findall(rb"\S+", data), strict=True):
        assert word.text.startswith(Visible().feed(given_word, final=True))


def test_hostile_text_is_shown_and_not_obeyed():
    html = make(by_bytes(HOSTILE), title="</title><script>alert(2)\x1b", facts=[("model", "<img src=x>")])
    parsed = Parsed(html)
    assert parsed.text == Visible().feed(HOSTILE, final=True)
    names = {tag for tag, _ in parsed.tags}
    assert names.isdisjoint({"script", "img", "iframe", "object", "embed", "link", "base", "form", "input"})
    assert parsed.texts["h1"] == "</title><script>alert(2)\\x1b"
    assert parsed.texts["title"].startswith(parsed.texts["h1"])
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufffd]", html)
    assert not any(name.startswith("on") or name == "style" for _, attributes in parsed.tags for name in attributes)


def test_the_page_refers_to_nothing_outside():
    html = make(by_bytes(b"http://example.com/ url(x) @import\n" * 30))
    parsed = Parsed(html)
    targets = [value for _, attributes in parsed.tags for name, value in attributes.items() if name in ("href", "src")]
    assert targets
    assert all(re.fullmatch(r"#(L\d+|summary)", target) for target in targets)
    names = {attributes.get("id") for _, attributes in parsed.tags}
    assert all(target[1:] in names for target in targets)
    assert not re.search(r"url\(|@import|https?:", parsed.texts["style"])
    (policy,) = (a["content"] for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(parsed.texts["style"].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_words_have_the_color_of_their_bits_in_steps_of_four():
    words = [(b" w%02d" % n, float(n)) for n in range(30)]
    html = make([*words, (b"\n", 50.0)], words=each_a_word(words))
    steps = {word.text: word.name for word in Parsed(html).words}
    assert steps == {f"w{n:02}": f"w{min(5, n // 4)}" for n in range(30)}
    legend = re.search('<div id="legend">(.*)</div>', html)[1]
    assert re.findall(r"<i class=w(\d) [^>]*>(\d+)</i>", legend) == [(str(n), str(4 * n)) for n in range(6)]
    assert re.findall(r"^\.w(\d) { background: var\(--c(\d)\); }$", html, re.MULTILINE) == [(n, n) for n in "12345"]


def test_bits_that_are_no_number_have_the_last_color():
    words = [(0, b"odd", float("nan")), (4, b"word", float("inf"))]
    assert [word.name for word in Parsed(make([(b"odd ", 1.0), (b"word", 1.0)], words=words)).words] == ["w5", "w5"]


def test_words_have_their_bits_and_rows_those_of_tokens():
    tokens = [
        (b" so", 1.0),
        (b"me", 2.5),
        (b":", 4.0),
        (b" ", 1.0),
        (b"wor", 2.0),
        (b"d\n", 0.5),
        (b"  ", 3.0),
        (b"\n", 1.0),
    ]
    parsed = Parsed(make(tokens, byte=7, words=[(8, b"some:", 7.25), (14, b"word", 3.75)]))
    assert [word[:3] for word in parsed.words] == [(1, "some:", 7.25), (7, "word", 3.75)]
    assert [row["data-b"] for row in parsed.rows] == [f"{11 / 12:.2f}", f"{4 / 3:.2f}"]


def test_a_word_in_progress_has_no_bits():
    parsed = Parsed(make(by_bytes(b"rest of a half wo"), byte=5, words=[(3, b"a rest", 1.0), (10, b"of", 2.0)]))
    assert [word[:3] for word in parsed.words] == [(5, "of", 2.0)]


def test_words_and_lines_have_their_own_direction():
    page = make(by_bytes("a line\nשורה\nWindows 11 هو نظام تشغيل\nשלום in a line\n".encode()))
    parsed = Parsed(page)
    assert len(parsed.rows) == 4
    assert re.findall(r"<b id=L(\d) dir=rtl ", page) == ["2", "3"]  # by most letters, not the first
    assert re.findall(r"<td dir=(rtl|ltr)", page).count("rtl") == 1  # of the lines that are long enough for the table
    assert [word.text for word in parsed.words][:3] == ["a", "line", "שורה"]


def luminance(color):
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    """Formula of WCAG 2.1."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_at_least_four_and_a_half(theme):
    style = Path(module.__file__).with_suffix(".css").read_text()
    found = re.findall(r"--(\w+): #([0-9a-f]{6})", style)
    colors = dict(found[: len(found) // 2] if theme == "light" else found[len(found) // 2 :])
    rgb = {name: tuple(bytes.fromhex(value)) for name, value in colors.items()}
    assert min(contrast(rgb["ink"], rgb[f"c{color}"]) for color in range(1, 6)) >= 4.5
    assert min(contrast(rgb[name], rgb["ground"]) for name in ("ink", "dim", "link")) >= 4.5


def test_curve_lines_and_context_are_shown():
    calm, wild = [(b"an ordinary line of text\n", 10.0)], [(b"something quite unexpected\n", 200.0)]
    html = make(calm * 40 + wild + calm * 9, by_context=[ContextBin(1, 2, 10, 4.0), ContextBin(2, 9, 90, 2.0, 0.1)])
    parsed = Parsed(html)
    table = html[html.index('<table class="lines">') :]
    assert re.search(r'<a href="#L41">41</a><td [^>]*><i class=(w\d+) title="3.00 bits">something</i> <i', table[:200])
    hits = re.findall(r'<a href="#L(\d+)" tabindex="-1"><rect [^>]*><title>([\d.]+) bits per byte', html)
    assert max(hits, key=lambda hit: float(hit[1]))[0] == "41"
    assert "<td>2 to 8<td>90<td>2.0000<td>0.1000<td>" in html
    assert re.findall(r'<rect width="(\d+)"', html) == ["100", "50"]
    assert parsed.texts["dd"].startswith(f"{(490 + 200) / (49 * 25 + 27):.4f}")


def test_short_lines_are_listed_only_without_long_ones():
    assert "Lines by bits per byte" in make([(b"a\n", 9.0)])
    html = make([(b"a\n", 99.0), (b"a line of twenty bytes\n", 1.0)])
    assert html[html.index('<table class="lines">') :].count("<tr><td>") == 1
    assert "at least 20 bytes" in html


def test_a_line_without_end_is_shown_in_rows():
    parsed = Parsed(make([(b" a", 1.0), (b"bc", 1.0)] * 5000))
    assert [len(row["text"]) for row in parsed.rows] == [8192, 8192, 20_000 - 2 * 8192]
    assert [row.get("id") for row in parsed.rows] == ["L1", None, None]
    assert len(parsed.words) == 5000


def test_a_word_on_two_rows_is_colored_on_the_first():
    parsed = Parsed(make([(b" a", 1.0), (b"bcd", 1.0)] * 2000))
    assert [len(row["text"]) for row in parsed.rows] == [8192, 1808]
    assert [word.text for word in parsed.words] == ["abcd"] * 1638 + ["a"] + ["abcd"] * 361


def test_the_preview_of_a_line_ends_between_words():
    html = make([(b" word", 1.0)] * 500)
    (text,) = re.findall("<tr><td>0.*<td [^>]*>(.*)</tr>|$", html)[:1]
    assert re.sub("<[^>]*>", "", text) == " word" * 48 + " ..."


def test_the_page_of_an_endless_text_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "TEXT_BYTES", 5000)
    sizes = [len(html := make([(b"line of thirty bytes in total\n", float(n))] * n)) for n in (200, 2000, 20_000)]
    assert sizes[2] < 1.3 * sizes[1]
    assert "The text after its first" in html
    assert 5000 <= len(Parsed(html).text) < 5100
    assert all(int(line) <= 5100 / 30 for line in re.findall('href="#L([0-9]+)"', html))
    assert 256 <= html.count("<rect") <= 512


def test_words_after_a_number_of_them_are_plain_and_the_page_says_so(monkeypatch):
    html = make([(b"line of five words here\n", 1.0)] * 200)
    assert len(Parsed(html).words) == 1000
    assert "no colors" not in html
    monkeypatch.setattr(module, "COLORED_WORDS", 100)
    parsed = Parsed(html := make([(b"line of five words here\n", 1.0)] * 200))
    assert len(parsed.words) == 100
    assert [row.get("aria-label") for row in parsed.rows[18:22]] == [
        "line 19, 0.04 bits per byte", "line 20, 0.04 bits per byte", None, None,
    ]  # fmt: skip
    assert ["tabindex" in row for row in parsed.rows[18:22]] == [True, True, False, False]
    assert len(parsed.text) == 200 * 24
    assert html.index("id=L20 ") < html.index("no colors") < html.index("id=L21 ")


CHAPTERS = [
    (b"an ordinary line of text\n", 10.0), (b"something quite unexpected", 200.0),  # its last line has no end
    (b"the first line of the next one\n", 30.0), (b"its second line, a surprise\n", 300.0),
]  # fmt: skip
NAMES = {0: "one.txt", 51: "<b>&.txt\u202e", 82: "three.txt"}


def test_documents_have_headings_and_a_list_with_links():
    parsed = Parsed(html := make(CHAPTERS, documents=NAMES))
    headings = [attributes for tag, attributes in parsed.tags if tag == "strong"]
    assert [heading["id"] for heading in headings] == ["D1", "D2", "D3"]
    assert all((heading["role"], heading["dir"]) == ("heading", "auto") for heading in headings)
    assert parsed.texts["strong"] == "one.txt<b>&.txt\\u202ethree.txt"
    links = re.findall(r'<li lang=""><a href="#(D\d)"><bdi>(.*?)</bdi>', html)
    assert links == [("D1", "one.txt"), ("D2", "&lt;b&gt;&amp;.txt\\u202e"), ("D3", "three.txt")]
    for name, start, stop in (("one.txt", 0, 2), ("three.txt", 3, None)):
        document = CHAPTERS[start:stop]
        score = sum(bits for _, bits in document) / sum(len(text) for text, _ in document)
        assert f"<bdi>{name}</bdi></a> {score:.4f}" in html
    assert html.index("<nav") < html.index("id=D1") < html.index("id=L1 ") < html.index("id=D2") < html.index("id=L3 ")
    assert parsed.text == b"".join(text for text, _ in CHAPTERS).decode()
    assert [row["aria-label"].split(",")[0] for row in parsed.rows] == ["line 1", "line 2", "line 1", "line 1"]


def test_lines_and_curve_name_the_document_and_its_line():
    html = make([*CHAPTERS, (b"and one more line of it", 1.0)], documents={0: "one.txt", 51: "two.txt"})
    table = html[html.index('<table class="lines">') :]
    places = re.findall(r'<td><a href="#L(\d+)">([^<]*)</a>', table)
    assert places == [
        ("4", "two.txt, line 2"), ("2", "one.txt, line 2"), ("3", "two.txt, line 1"),
        ("1", "one.txt, line 1"), ("5", "two.txt, line 3"),
    ]  # fmt: skip
    about = re.findall(r"<title>[\d.]+ bits per byte, (.*?), byte", html)
    assert about == [place for _, place in sorted(places)]
    names = {attributes.get("id") for _, attributes in Parsed(html).tags}
    assert set(re.findall(r'href="#(\w+)"', html)) <= names


def test_a_single_document_and_one_without_tokens_have_no_heading():
    for documents in ({}, {0: "one.txt"}):
        html = make(CHAPTERS, documents=documents)
        assert "one.txt" not in html
        assert "<nav" not in html
    with tempfile.TemporaryDirectory() as folder:
        page = Page(Path(folder) / "page.html")
        page.begin("one.txt")
        page.add(TokenScore(1, 0, b"a line\n", 1.0))
        page.begin("none.txt")
        page.save("two files", "m", "memory")
        assert re.search("one.txt|none.txt|<nav", page.path.read_text()) is None


def test_the_list_of_documents_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LIST", 10)
    monkeypatch.setattr(module, "OPEN_LIST", 20)
    monkeypatch.setattr(module, "TEXT_BYTES", 150)
    lines = [(b"a line of 20 letters\n", 9.0)] * 25
    html = make(lines, documents={21 * i: f"{i}.txt" for i in range(25)})
    assert html.count("<li") == 11
    assert "<li>and 15 more" in html
    assert len(re.findall('href="#D', html)) == len(re.findall("id=D", html)) == 8  # of those that are shown
    assert "<details><summary><h2>25 documents" in html
    assert "<details open><summary><h2>2 documents" in make(lines, documents={0: "a", 21: "b"})


def test_an_empty_text_and_no_finite_score():
    assert Parsed(make([])).rows == []
    html = make([(b"a line that is damaged\n", float("nan")), (b"another line of text\n", 3.0)])
    assert not re.search(r'(?i)(d|width|x)="[^"]*nan', html)
    assert len(Parsed(html).rows) == 2


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(TEXT * 20 + b"\xc3\xa9 <script>\n")
    return path


def test_eval_writes_a_page(run, model, text):
    done = run("eval", text, "--html", "page.html", "--json")
    assert (done.code, "page.html" in done.err) == (0, True), done.err
    parsed, score = Parsed(Path("page.html").read_text()), json.loads(done.out)
    assert parsed.text.encode() == text.read_bytes()
    bits = sum(float(row["data-b"]) * len(row["text"].encode()) for row in parsed.rows)
    assert bits == pytest.approx(score["nats"] / 0.6931, rel=0.01)
    assert sum(word.bits for word in parsed.words) == pytest.approx(bits, rel=0.25)
    assert parsed.texts["dd"].startswith(f"{score['bits_per_byte']:.4f}")
    assert "Loss by context" in parsed.texts["h2"]
    assert parsed.texts["h1"] == "in.txt"  # without its folder
    assert "page.html" not in run("eval", text, "--html", "page.html", "--per-token", "tokens.jsonl", "-q").err
    assert len(Path("tokens.jsonl").read_text().splitlines()) == score["tokens"]


def test_the_page_of_a_folder_and_of_a_table_has_their_documents(run, model):
    Path("texts").mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        Path("texts", name).write_bytes(TEXT * 2 + b"no line end")
    Path("rows.csv").write_text("item,text\n1,The fox\n2,\n3,The dog\n")
    for arguments, names in (
        (["texts"], ["texts/a.txt", "texts/b.txt", "texts/c.txt"]),
        (["texts", "--each-line"], ["texts/a.txt", "texts/b.txt", "texts/c.txt"]),
        (["rows.csv", "--text-field", "text", "--reset-on-document"], ["1", "3"]),
    ):
        done = run("eval", *arguments, "--html", "page.html")
        assert done.code == 0, done.err
        html = Path("page.html").read_text()
        found = re.findall(r"<strong id=D\d+ [^>]*>([^<]*)</strong>", html)
        assert found == names


@pytest.mark.parametrize("emit", ["lines", "tokens", "stats", "none"])
def test_stream_writes_the_page_of_eval(run, model, text, emit):
    without = run("stream", text, "--emit", emit)
    done = run("stream", text, "--emit", emit, "--html", "page.html")
    assert done.code == 0
    assert re.sub(rb"[\d.]+k? lines/s.*", b"", done.out) == re.sub(rb"[\d.]+k? lines/s.*", b"", without.out)
    assert "page.html" in done.err
    run("eval", text, "--html", "other.html")
    pages = [Parsed(Path(name).read_text()) for name in ("page.html", "other.html")]
    assert pages[0].text == pages[1].text == text.read_text()
    assert [word[:2] for word in pages[0].words] == [word[:2] for word in pages[1].words] != []


@pytest.mark.parametrize("name", ["eval", "stream"])
def test_words_have_the_bits_of_the_table_of_words(run, model, tmp_path, name):
    path = tmp_path / "in.txt"
    path.write_text(
        "A word, and\ttwo  words.\n\n \nof “quotes” 漢字 かな\u3000 x\n" + "a line without end " * 400, "utf-8"
    )
    assert run("eval", path, "--words", "words.jsonl").code == 0
    assert run(name, path, "--html", "page.html").code == 0
    listed = [json.loads(line) for line in Path("words.jsonl").read_text("utf-8").splitlines()]
    parsed = Parsed(Path("page.html").read_text("utf-8"))
    assert parsed.text == path.read_text("utf-8")
    assert [word[:2] for word in parsed.words] == [(word["byte"], word["word"]) for word in listed]
    assert [word.bits for word in parsed.words] == pytest.approx([word["bits"] for word in listed], abs=0.0051)
    assert any(abs(word["bits"] - word["naive_bits"]) > 0.1 for word in listed)


def memory(name):
    """The memory that the page names."""
    return re.search("<dt>context<dd>([^<]*)", Path(name).read_text())[1]


def test_pages_name_the_memory_of_the_model_and_of_the_session(run, untrained, text):
    untrained("linear", attention={"kind": "linear", "n_heads": 2}, position={"kind": "none"})
    for name in ("eval", "stream"):
        assert run(name, text, "-m", "linear", "--html", "page.html").code == 0
        assert memory("page.html") == "memory of all tokens read"
    untrained("full")
    assert run("stream", text, "-m", "full", "--mem-len", "0", "--html", "page.html", "--state-out", "s").code == 0
    assert memory("page.html").startswith("no memory: independent segments of 16 tokens")
    assert run("stream", text, "-m", "full", "--state-in", "s", "--html", "page.html").code == 0
    assert memory("page.html").startswith("no memory: independent segments of 16 tokens")


def test_pages_name_what_the_model_learns_and_a_state(run, model, text):
    learning = ("--adapt", "--context-cache", "10k")
    for name in ("eval", "stream"):
        assert run(name, text, *learning, "--html", "page.html").code == 0
        assert memory("page.html").endswith(", weights adapted while reading, cache of 10,000 tokens")
    assert run("stream", text, *learning, "--state-out", "s", "--emit", "none").code == 0
    assert run("stream", text, "--state-in", "s", "--html", "page.html").code == 0
    learned, state = memory("page.html").split(", continues a state after ")
    assert learned.endswith(", weights adapted while reading, cache of 10,000 tokens")
    assert state.endswith(" tokens")


def test_a_page_needs_a_file_and_one_memory(run, model, text):
    for name in ("eval", "stream"):
        done = run(name, text, "--html", "-")
        assert (done.code, "--html" in done.err) == (2, True)
    done = run("eval", text, "--html", "page.html", "--sweep-mem-len", "0,8")
    assert (done.code, "--html" in done.err) == (2, True)
    assert not Path("page.html").exists()


def test_a_dry_run_writes_no_page(run, model, text):
    assert run("stream", text, "--html", "page.html", "--dry-run").code == 0
    assert not Path("page.html").exists()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM])
def test_a_stopped_stream_leaves_a_complete_page(number, model, tmp_path):
    page = tmp_path / "page.html"
    with subprocess.Popen(
        command("stream", "-m", model, "--html", page), env=environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        child.stdin.write(TEXT + b"half a")
        child.stdin.flush()
        assert child.stdout.readline().endswith(TEXT)
        assert list(tmp_path.iterdir()) == []
        child.send_signal(number)
        assert child.wait(20) == 128 + number
        child.communicate()
    html = page.read_text()
    assert Parsed(html).text.encode() == TEXT
    assert html.rstrip().endswith("</html>")
    assert list(tmp_path.iterdir()) == [page]


def test_a_page_outlives_the_reader_of_the_scores(model, text):
    line = " ".join(f"'{part}'" for part in command("stream", text, "-m", model, "--html", "page.html"))
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -c 1; exit ${{PIPESTATUS[0]}}"], env=environment(), capture_output=True
    )
    assert done.returncode in (0, 141)
    assert Path("page.html").read_text().rstrip().endswith("</html>")
