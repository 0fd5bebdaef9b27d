"""Manual pages from the help: `python hatch_build.py FOLDER` writes them, and hatchling puts them into every wheel.

They are installed into `share/man/man1` of the environment, where `man xlcli-eval` finds them while it is active.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent
PLACE = "share/man/man1"


class Roff:
    """Takes what a command writes into a formatter of its help, and keeps it as the source of a manual page."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write_usage(self, program: str, arguments: str) -> None:
        self.lines += [".SH SYNOPSIS", f".B {escaped(program)}", escaped(arguments), ".SH DESCRIPTION"]

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.lines.append(f".SH {escaped(name.upper())}")
        yield

    @contextmanager
    def indentation(self) -> Iterator[None]:
        yield

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        for term, about in rows:
            self.lines += [".TP", f".B {escaped(term)}", escaped(about)]

    def write_paragraph(self) -> None:
        if not self.lines[-1].startswith(".SH"):
            self.lines.append(".PP")

    def write_text(self, text: str) -> None:
        self.lines.append("\n.PP\n".join(escaped(" ".join(part.split())) for part in text.split("\n\n")))

    def write(self, line: str) -> None:
        """Takes an example, a line of its own."""
        self.lines += [".PP", ".nf", escaped(line.strip()), ".fi"]


def escaped(text: str) -> str:
    """A line of text for roff: `-` stays what can be typed, and no line is taken for a request."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{plain}" if plain.startswith(".") else plain


def pages() -> dict[str, str]:
    """The manual page of the program, of each command and of each of its actions, by name: `xlcli-models-show`."""
    from xlcli.cli.app import build

    found: dict[str, str] = {}
    program = build()
    add_pages(program, context_of(program, "xlcli", None), found)
    return found


def context_of(command: Any, name: str, parent: Any) -> Any:
    """The context of a command that is called by this name, without arguments."""
    return command.context_class(command, info_name=name, parent=parent, **command.context_settings)


def add_pages(command: Any, context: Any, found: dict[str, str]) -> None:
    """Adds the page of a command, and those of its actions, to `found`."""
    from xlcli import __version__

    name = context.command_path.replace(" ", "-")
    actions = command.list_commands(context) if hasattr(command, "list_commands") else []
    roff = Roff()
    command.format_help(context, roff)
    summary = command.help.partition("\n\n")[0].rstrip(".")
    parent = context.parent.command_path.replace(" ", "-") if context.parent else None
    related = [f"{name}-{action}" for action in actions]
    if parent is not None:
        related.insert(0, parent)
    lines = [
        f'.TH {escaped(name.upper())} 1 "" "xlcli {__version__}"',
        ".SH NAME",
        f"{escaped(name)} \\- {escaped(summary)}",
        *roff.lines,
        ".SH SEE ALSO",
        ",\n".join(f".BR {escaped(other)} (1)" for other in related),
    ]
    found[name] = "\n".join(lines) + "\n"
    for action in actions:
        made = command.get_command(context, action)
        add_pages(made, context_of(made, action, context), found)


def write(folder: Path) -> list[Path]:
    """Writes all pages into a folder, and returns their files."""
    files = []
    for name, text in pages().items():
        file = folder / f"{name}.1"
        file.write_text(text, encoding="utf-8")
        files.append(file)
    return files


class ManualPages(BuildHookInterface):
    """Hook of hatchling that adds the pages to the data of a wheel, also of an editable one."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the pages of this checkout into a temporary folder and has them packed from there."""
        sys.path.insert(0, str(SOURCE))
        self.folder = tempfile.TemporaryDirectory(prefix="xlcli-manual-")
        for file in write(Path(self.folder.name)):
            build_data["shared_data"][str(file)] = f"{PLACE}/{file.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the temporary folder."""
        self.folder.cleanup()


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    write(place)
