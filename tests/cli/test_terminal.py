import itertools
import json

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlcli.cli.terminal import Visible, one_line, visible, visible_json

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
