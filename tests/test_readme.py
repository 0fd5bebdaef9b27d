"""Commands and Python of the README and of the pages that `make readme` fills run, with smaller budgets."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1]
NAMES = re.findall(r"\S+\.md", (SOURCE / "Makefile").read_text())
PAGES = "\n".join((SOURCE / name).read_text() for name in NAMES)
"""The pages in their order; their commands run in one folder."""
SMALLER = {
    "--max-time 2m": "--max-steps 20 --preset tiny",
    "--limit 64KiB": "--limit 2KiB",
    "-n 80": "-n 8",
    "--seconds 1": "--seconds 0.01",
}
SILENT = ("--emit none", "models copy")
"""Commands that print nothing on standard output."""

_spec = importlib.util.spec_from_file_location("capture", SOURCE / "demo" / "capture.py")
capture = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(capture)


def install(folder: Path) -> dict[str, str]:
    """Puts the program and a short text into a folder; returns the environment for commands there."""
    program = folder / "bin" / "xlcli"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xlcli "$@"\n')
    program.chmod(0o755)
    (folder / "shakespeare.txt").write_bytes((SOURCE / "demo" / "shakespeare.txt").read_bytes()[:20_000])
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@pytest.mark.exhaustive
def test_commands_and_python_run_as_written(tmp_path):
    environment = install(tmp_path)
    commands = capture.commands(PAGES)
    assert all(any(large in command for command in commands) for large in SMALLER)
    assert len(commands) >= 14
    for command in commands:
        shorter = command
        for large, small in SMALLER.items():
            shorter = shorter.replace(large, small)
        done = subprocess.run(shorter, shell=True, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0, f"{command}\n{done.stderr.decode()}"
        assert done.stdout.strip() or done.stderr.strip(), command
        assert b"warning" not in done.stderr, command
    (code,) = capture.blocks(PAGES, "python")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr.decode()
    score, *text = done.stdout.splitlines()
    assert re.fullmatch(rb"[0-9]\.[0-9]+", score)
    assert any(text)


def test_every_block_is_run_or_is_known_not_to_be():
    languages = re.findall(r"^```(\w*)\n.*?^```$", PAGES, re.MULTILINE | re.DOTALL)
    assert set(languages) == {"console", "python", "shell"}
    assert languages.count("python") == 1
    targets = re.findall(r"^([a-z]+):", (SOURCE / "Makefile").read_text(), re.MULTILINE)
    lines = [line.partition("#")[0].split() for block in capture.blocks(PAGES, "shell") for line in block.splitlines()]
    others = (
        ["python3", "-m", "pip"],
        ["uv", "pip", "install"],
        [".", ".venv/bin/activate"],
    )
    others += (["cd", "demo"], ["hf", "download"], ["xlcli", "import"])
    for words in filter(None, lines):
        is_known = any(words[: len(start)] == start for start in others)
        assert is_known or (words[0] == "make" and words[1] in targets), words


def test_outputs_shown_have_the_form_of_today():
    shown = {command: output for block in capture.blocks(PAGES, "console") for command, output in outputs(block)}
    for command, output in shown.items():
        if not any(words in command for words in SILENT):
            assert output.strip(), f"{command} shows no output: make readme"
    training = next(output for command, output in shown.items() if command.startswith("xlcli train"))
    labels = re.findall(r"^\w+", training, re.MULTILINE)
    assert labels[:3] == ["model", "valid", "training"]


def outputs(block: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\$ (.*)$", block, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def test_capture_replaces_outputs_and_nothing_else():
    page = "a\n```console\n$ x 1\nold\n\n$ y\n```\nb\n```text\n$ z\n```\n"
    found = capture.captured(page, lambda command: f"out of {command}\n\n")
    assert found == "a\n```console\n$ x 1\nout of x 1\n\n$ y\nout of y\n```\nb\n```text\n$ z\n```\n"
    assert capture.captured(found, lambda command: f"out of {command}\n") == found


def test_pages_are_captured_in_one_folder(tmp_path, monkeypatch):
    first, second = tmp_path / "first.md", tmp_path / "second.md"
    first.write_text("```console\n$ wc -l < shakespeare.txt > lines\n```\n")
    second.write_text("```console\n$ cat lines\nold\n```\n")
    monkeypatch.setattr(sys, "argv", ["capture.py", str(first), str(second)])
    assert capture.main() == 0
    assert re.search(r"cat lines\n[0-9]+\n```", second.read_text())
