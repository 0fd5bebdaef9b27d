"""Tables fit the width that they are given, whatever is in them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlcli.cli.tables import cells, definitions, fitted, shorten, wrapped

HEADING = ("name", "size", "corpus")
ROWS = [
    HEADING,
    ("a-model-with-a-very-long-name", "1.0 MiB", "books/one.txt and 50 more files"),
    ("b", "9", "世界" * 9),
]


@given(st.text(alphabet="ab世\u0301 /", max_size=30), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_a_shortened_text_keeps_its_ends(text, width):
    shown = shorten(text, width)
    assert cells(shown) <= width
    if cells(text) <= width:
        assert shown == text
    else:
        head, tail = shown.split("…")
        assert text.startswith(head)
        assert text.endswith(tail)


@pytest.mark.parametrize("width", range(24, 80))
def test_a_table_fits_and_says_as_much_as_it_can(width):
    text = fitted(ROWS, width, flexible={"name": 6, "corpus": 6}, right=("size",))
    lines = text.splitlines()
    assert max(map(cells, lines)) <= width
    wide = max(map(cells, fitted(ROWS, None, flexible={}).splitlines()))
    assert max(map(cells, lines)) >= min(width, wide) - 2, "free width is used"
    assert lines[0].split() == list(ROWS[0])


def test_columns_are_left_out_in_order():
    row = [("name", "a", "b"), ("x" * 10, "1" * 10, "2" * 10)]
    for width, heading in ((34, ["name", "a", "b"]), (33, ["name", "b"]), (21, ["name"]), (5, ["name"])):
        assert fitted(row, width, flexible={"name": 10}, optional=("a", "b")).split("\n")[0].split() == heading


def test_a_pipe_gets_every_cell_as_it_is():
    text = fitted(ROWS, None, flexible={"name": 6, "corpus": 6}, optional=("size",))
    assert all(cell in text for row in ROWS for cell in row)


def test_long_texts_are_wrapped_under_their_beginning():
    rows = [("one", "word " * 20), ("longer", "short")]
    lines = definitions(rows, 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert len(lines) == 5
    assert all(line.startswith(" " * 8 + "word") for line in lines[1:4])
    assert definitions(rows, None).splitlines()[0] == "one     " + "word " * 20


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
    assert all(cells(line) <= width or len(line.split()) == 1 for line in shown.split("\n"))


def test_control_characters_do_not_reach_a_terminal_and_count_as_shown():
    assert fitted([("name", "x"), ("a\x1b[2J\nb", "1")], 30, flexible={}).splitlines()[1] == r"a\x1b[2J b  1"
