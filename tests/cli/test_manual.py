"""Manual pages: all commands and options, as roff that `man` shows."""

import os
import re
import runpy
import shutil
import subprocess

import pytest
from programs import EVERY, SOURCE, long, options

import xlcli

pytest.importorskip("hatchling")
PAGES = runpy.run_path(str(SOURCE / "hatch_build.py"))["pages"]()


def test_each_command_and_action_has_a_page():
    assert PAGES.keys() == {"xlcli", *(f"xlcli-{name.replace(' ', '-')}" for name in EVERY)}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_name_and_all_options_of_its_command_and_only_known_requests(name):
    shown = PAGES[name].replace("\\-", "-")
    assert shown.startswith(f'.TH {name.upper()} 1 "" "xlcli {xlcli.__version__}"\n.SH NAME\n{name} - ')
    command = EVERY.get(name.removeprefix("xlcli-").replace("models-", "models "))
    for option in options(command) if command else ():
        assert re.search(rf"^\.B .*{re.escape(long(option))}\b", shown, re.MULTILINE), option.opts
    requests = {line.split()[0] for line in shown.splitlines() if line.startswith((".", "'"))}
    assert requests <= {".TH", ".SH", ".B", ".BR", ".TP", ".PP", ".nf", ".fi"}


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
def test_man_finds_and_shows_a_page(tmp_path):
    folder = tmp_path / "man1"
    folder.mkdir()
    for name, text in PAGES.items():
        (folder / f"{name}.1").write_text(text)
    variables = {**os.environ, "MANPATH": str(tmp_path), "MANWIDTH": "80", "LC_ALL": "C"}
    done = subprocess.run(["man", "xlcli-eval"], env=variables, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(".\b", "", done.stdout)  # bold letters are typed twice
    assert "xlcli-eval - Score a text" in shown
    assert "-m, --model NAME|FOLDER" in shown
