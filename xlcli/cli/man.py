"""Manual pages made from the help of the commands: `xlcli.1`, `xlcli-train.1` and so on.

A wheel installs them in `share/man/man1` (`hatch_build.py`); `make man` writes them to `build/man`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from xlcli import __version__, errors
from xlcli.cli.app import app
from xlcli.cli.help import panels, summary


def pages() -> dict[str, str]:
    """File name of each manual page to its text for man."""
    program = get_command(app)
    assert isinstance(program, TyperGroup)
    context = program.make_context("xlcli", [], resilient_parsing=True)
    commands = {f"xlcli-{name}": command for name, command in program.commands.items()}
    overview = [*_head("xlcli", program, context), ".SH COMMANDS"]
    for name, command in program.commands.items():
        overview += _entry(_bold(name), summary(command))
    overview += [*_options(program, context), ".SH EXIT STATUS"]
    for code, meaning in _exit_codes().items():
        overview += _entry(_plain(code), meaning)
    made = {"xlcli.1": [*overview, *_tail(program, [*commands])]}
    for name, command in commands.items():
        inner = command.make_context(name.removeprefix("xlcli-"), [], parent=context, resilient_parsing=True)
        others = ["xlcli", *(other for other in commands if other != name)]
        made[f"{name}.1"] = [*_head(name, command, inner), *_options(command, inner), *_tail(command, others)]
    return {name: "\n".join(lines) + "\n" for name, lines in made.items()}


def write_pages(folder: Path) -> list[Path]:
    """Writes all pages into a folder, which is made if necessary; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
        paths.append(folder / name)
    return paths


def _head(name: str, command: Any, context: Any) -> list[str]:
    """Title, name, synopsis and description."""
    pieces = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH "{name.upper()}" 1 "" "xlcli {__version__}" "xlcli"',
        ".nh",
        ".SH NAME",
        f"{_plain(name)} \\- {_plain(summary(command))}",
        ".SH SYNOPSIS",
        f"{_bold(name.replace('-', ' '))} {_plain(pieces)}",
        ".SH DESCRIPTION",
    ]
    for paragraph in (command.help or "").split("\n\n"):
        lines += [".PP", _plain(" ".join(paragraph.split()))]
    return lines


def _options(command: Any, context: Any) -> list[str]:
    lines = [".SH OPTIONS"]
    for heading, options in panels(command.get_params(context), command.callback, "Output").items():
        lines.append(f".SS {_plain(heading)}")
        for option in options:
            value = f" \\fI{_plain(option.value)}\\fR" if option.value else ""
            lines += _entry(", ".join(map(_bold, option.names)) + value, option.help)
    return lines


def _tail(command: Any, others: list[str]) -> list[str]:
    """Examples and other pages."""
    examples = [_plain(line) for line in (command.epilog or "").splitlines()]
    also = [f".BR {_plain(name)} (1)" for name in others]
    return [".SH EXAMPLES", ".EX", *examples, ".EE", ".SH SEE ALSO", *(f"{each} ," for each in also[:-1]), also[-1]]


def _exit_codes() -> dict[str, str]:
    """Each exit code and its meaning, in order."""
    meanings = defaultdict(list)
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.XLError) and kind is not errors.XLError:
            meanings[str(kind.exit_code)].append((kind.__doc__ or "").strip().partition("\n")[0])
    return {
        "0": "Success.",
        "1": "A bug in xlcli.",
        **{code: " ".join(meanings[code]) for code in sorted(meanings)},
        "130, 143": "Stopped by an interrupt or SIGTERM, after saving.",
        "141": "The reader of the output closed the pipe.",
    }


def _entry(term: str, text: str) -> list[str]:
    return [".TP", term, _plain(" ".join(text.split()))]


def _bold(text: str) -> str:
    return f"\\fB{_plain(text)}\\fR"


def _plain(text: str) -> str:
    """Text without a meaning for troff; hyphens can be copied, and a line does not start with a control character."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    text = text.replace("~", "\\(ti").replace("^", "\\(ha")
    text = "".join(letter if letter.isascii() else f"\\[u{ord(letter):04X}]" for letter in text)
    return f"\\&{text}" if text.startswith(".") else text


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
