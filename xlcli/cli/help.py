"""Help, laid out from the tables of the commands."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from xlcli.cli.options import Command

ABOUT = "Train, evaluate, generate and stream with a Transformer-XL, from one text file."
EXAMPLES = ("xlcli train corpus.txt", 'xlcli generate "Once upon a"')


def program_help(commands: Sequence[Command], width: int) -> str:
    """The text of `xlcli --help`."""
    rows = [(command.name, command.about) for command in commands]
    options = [
        ("-h, --help", "show this help, or that of a command"),
        ("--version", "show the version"),
        ("--install-completion", "complete commands and options in this shell"),
        ("--show-completion", "show what that would install"),
    ]
    return "\n".join(
        [
            *_paragraph(ABOUT, width),
            "",
            "Usage: xlcli COMMAND [OPTIONS] ...",
            "",
            "Commands:",
            *_table(rows, width),
            "",
            "Options:",
            *_table(options, width),
            "",
            *_paragraph("Options of a command can also come from the environment: --mem-len is XLCLI_MEM_LEN.", width),
            *_examples(EXAMPLES),
        ]
    )


def command_help(command: Command, width: int) -> str:
    """The text of `xlcli COMMAND --help`."""
    lines = [*_paragraph(command.about, width), "", f"Usage: xlcli {command.name} {command.words} [OPTIONS]"]
    for heading, flags in command.groups.items():
        rows = [(f"{flag.names.replace('/', ', ')} {flag.value}".rstrip(), flag.about) for flag in flags]
        if heading == "Talk":
            rows.append(("-h, --help", "show this help"))
        lines += ["", f"{heading}:", *_table(rows, width)]
    return "\n".join([*lines, *_examples(command.examples)])


def _paragraph(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width)


def _examples(examples: Sequence[str]) -> list[str]:
    return ["", "Examples:", *(f"  {example}" for example in examples), ""]


def _table(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Two columns; a first one that is too wide stands on a line of its own."""
    left = min(max(len(name) for name, _ in rows), max(16, width // 3))
    lines = []
    for name, about in rows:
        first, *rest = textwrap.wrap(about, max(20, width - left - 4))
        if len(name) > left:
            lines += [f"  {name}", f"  {'':{left}}  {first}"]
        else:
            lines.append(f"  {name:{left}}  {first}")
        lines += [f"  {'':{left}}  {line}" for line in rest]
    return lines
