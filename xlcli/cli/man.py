"""Manual pages made from the help of the commands: `xlcli.1`, `xlcli-train.1` and so on.

A wheel installs them in `share/man/man1` (`hatch_build.py`); `make man` writes them to `build/man`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from xlcli import __version__, errors
from xlcli.cli.app import build
from xlcli.cli.help import panels, summary


def pages() -> dict[str, str]:
    """File name of each manual page to its text for man."""
    commands = dict(_commands("xlcli", build(), None))
    made = {}
    for name, context in commands.items():
        command = context.command
        lines = _head(name, command, context)
        if isinstance(command, TyperGroup):
            lines.append(".SH COMMANDS")
            for inner, each in command.commands.items():
                lines += _entry(_bold(inner), summary(each))
        lines += _options(command, context)
        if context.parent is None:
            lines.append(".SH EXIT STATUS")
            for code, meaning in _exit_codes().items():
                lines += _entry(_plain(code), meaning)
        group = name.rpartition("-")[0]
        near = [other for other in commands if other == group or other.rpartition("-")[0] in (name, group)]
        lines += _tail(command, [other for other in near if other != name])
        made[f"{name}.1"] = "\n".join(lines) + "\n"
    return made


def write_pages(folder: Path) -> list[Path]:
    """Writes all pages into a folder, which is made if necessary; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
        paths.append(folder / name)
    return paths


def _commands(name: str, command: Any, parent: Any) -> Iterator[tuple[str, Any]]:
    """Name and context of a command, such as `xlcli-models-show`, and of those within it."""
    context = command.make_context(name.rpartition("-")[2], [], parent=parent, resilient_parsing=True)
    yield name, context
    for inner, each in getattr(command, "commands", {}).items():
        yield from _commands(f"{name}-{inner}", each, context)


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
