import itertools
import json

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from xlcli.cli.terminal import Visible, clipped, one_line, table, visible, visible_json, wrapped

HOSTILE = (
    "\x1b]52;c;aGk=\x07",
    "\x1b]0;title\x07",
    "\x1b[?1049h",
    "\x1b[2J\x1b[H",
    "\x9b31m",
    "\x9d0;title\x9c",
    "\rover",
    "\x08\x08\x7f",
    "\x0e\x0f\x05",
    "\u202eevil\u202c",
    "\x1bc",
)


def cut(data, places):
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]


def test_plain_text_is_left_alone():
    text = "Grüße, 世界 👋\n\tend ﷽ é"
    assert visible(text) == text


def test_escapes_are_shown():
    assert visible("a\x1b[31mb\rc\x9bd\x7f\u202e") == r"a\x1b[31mb\rc\x9bd\x7f\u202e"
    assert one_line("a\nb\tc") == r"a\nb\tc"
    assert visible("caf\udce9") == r"caf\xe9"


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("\x1b\x9b[]?;\r\x08")), max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_control_character_is_left(text):
    shown = visible(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    assert visible(shown) == shown


@given(st.binary(max_size=40), st.lists(st.integers(0, 100), max_size=5))
@settings(max_examples=200, deadline=None)
def test_portions_do_not_matter(data, places):
    whole = Visible().feed(data, final=True)
    parts = Visible()
    pieces = [parts.feed(piece) for piece in cut(data, places)]
    assert "".join(pieces) + parts.feed(b"", final=True) == whole
    assert "\ufffd" not in whole or "\ufffd".encode() in data


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_the_state_of_a_screen_stays_as_it_was(text, step):
    screen = pyte.Screen(80, 5)
    stream = pyte.ByteStream(screen)
    before = (set(screen.mode), screen.title, screen.icon_name, screen.cursor.attrs, screen.charset, screen.margins)
    out = Visible()
    data = ("one" + text + "two").encode()
    for i in range(0, len(data), step):
        stream.feed(out.feed(data[i : i + step]).encode())
    assert before == (
        set(screen.mode),
        screen.title,
        screen.icon_name,
        screen.cursor.attrs,
        screen.charset,
        screen.margins,
    )
    assert screen.display[0].startswith("one\\")
    assert "two" in screen.display[0]


def test_json_for_a_terminal_has_the_same_value():
    text = json.dumps("".join(HOSTILE), ensure_ascii=False)
    shown = visible_json(text)
    assert json.loads(shown) == "".join(HOSTILE)
    assert visible(shown) == shown


def test_a_quotation_is_short():
    assert len(one_line("9" * 5000)) < 300


ROWS = [
    ("name", "size", "corpus"),
    ("a-model-with-a-very-long-name", "1.0 MiB", "books/one.txt and 50 more files"),
    ("b", "9", "世界" * 9),
]


@pytest.mark.parametrize("width", range(30, 90, 3))
def test_a_table_fits_and_keeps_every_character(width):
    lines = table(ROWS, width, left=(0, 2)).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert lines[0].split() == list(ROWS[0])
    shown, given = ("".join(sorted("".join(parts))).strip() for parts in (lines, map("".join, ROWS)))
    assert shown == given


@pytest.mark.parametrize("width", [30, 50])
def test_a_clipped_table_has_a_line_for_each_row(width):
    lines = table(ROWS, width, left=(0, 2), clip=True).splitlines()
    assert len(lines) == len(ROWS)
    assert max(map(cell_len, lines)) <= width
    assert "1.0 MiB" in lines[1]
    assert lines[1].endswith("…")


def test_a_short_name_is_not_clipped():
    rows = [("name", "size", "corpus"), (ROWS[1][0], "1" * 45, "books/one.txt and 50 more files" * 3)]
    assert table(rows, 90, left=(0, 2), clip=True).splitlines()[1].startswith(f"{ROWS[1][0]}  ")


def test_a_table_without_a_width_has_a_line_for_each_row():
    lines = table(ROWS, left=(0, 2)).splitlines()
    assert [line.split("  ")[0] for line in lines] == [row[0] for row in ROWS]
    assert all(cell in line for row, line in zip(ROWS, lines, strict=True) for cell in row)


def test_cells_of_a_table_are_neither_obeyed_nor_markup():
    assert table([("name", "x"), ("[red]a\x1b[2J\nb", "1")], 40).splitlines()[1] == r"[red]a\x1b[2J b  1"


def test_a_line_is_clipped_by_cells():
    assert clipped("世界", 4) == "世界"
    assert clipped("世界ab", 5) == "世界…"


def test_lines_are_broken_between_words_under_their_value():
    text = "model    a folder of some length (preset small)\n  xlcli eval -m a-model-with-a-long-name\nshort\n"
    assert wrapped(text, 25).split("\n") == [
        "model    a folder of some", "         length (preset", "         small)",
        "  xlcli eval -m a-model-with-a-long-name", "short", "",
    ]  # fmt: skip
    error = wrapped("xlcli: there is no file a.txt.\n       Check the path of it.\n", 24)
    assert error == "xlcli: there is no file\n       a.txt.\n       Check the path of\n       it.\n"
    assert wrapped(text, None) == text


@given(st.text(alphabet="ab  -\n", max_size=200), st.integers(30, 80))
def test_breaking_lines_keeps_the_words(text, width):
    shown = wrapped(text, width)
    assert shown.split() == text.split()
    assert all(len(line) <= width or len(line.split()) == 1 for line in shown.split("\n"))
