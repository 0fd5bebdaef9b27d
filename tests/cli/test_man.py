"""Manual pages: every command and option, and no complaint of the formatter."""

import re
import shutil
import subprocess

import pytest
from programs import COMMANDS, EVERY, options

import xlcli
from xlcli.cli.man import pages, write_pages

PAGES = pages()
EVERY_PAGE = {name.replace(" ", "-"): command for name, command in EVERY.items()}


def formatted(name, width=80):
    """A page as plain text of `width` columns; the formatter must not warn."""
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-Tascii", "-ww", "-P-cbou", f"-rLL={width}n"]
    done = subprocess.run(command, input=PAGES[name].encode(), capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
    return done.stdout.decode()


def test_every_command_has_a_page():
    assert set(PAGES) == {"xlcli.1", *(f"xlcli-{name}.1" for name in EVERY_PAGE)}


@pytest.mark.parametrize(("name", "command"), EVERY_PAGE.items(), ids=EVERY_PAGE)
def test_a_page_names_every_option_with_its_help(name, command):
    text = PAGES[f"xlcli-{name}.1"].replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")
    for option in options(command):
        names = ", ".join(sorted(option.opts, key=len))
        assert re.search(rf"^\.TP\n{re.escape(names)}( |$)", text, re.MULTILINE), names
    assert text.index(".SH NAME") < text.index(".SH OPTIONS") < text.index(".SH EXAMPLES")
    assert command.epilog.splitlines()[0].replace("~", "\\(ti").replace("'", "\\(aq") in text


@pytest.mark.parametrize("name", PAGES)
def test_formatted_pages_are_clean(name):
    text = formatted(name)
    assert text.startswith(name.upper().replace(".1", "(1)"))
    assert f"xlcli {xlcli.__version__}" in text
    assert "\\" not in text
    command = EVERY_PAGE.get(name.removeprefix("xlcli-").removesuffix(".1"))
    said = " ".join(formatted(name, 10_000).split())
    for option in options(command) if command else ():
        assert " ".join(option.help.split()) in said
    if command is None:
        assert all(f"xlcli-{each}(1)" in said for each in COMMANDS)
        assert "141 The reader" in said


def test_pages_of_a_release_are_the_same_on_every_machine(tmp_path):
    first, second = (write_pages(tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert all(path.read_bytes().isascii() for path in first)
