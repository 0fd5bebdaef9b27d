"""Help pages: options under the headings of their panels, then examples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from xlcli.cli.usage import choices

CONTEXT: dict[str, Any] = {
    "auto_envvar_prefix": "XLCLI",
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}
"""Context settings of every command. The option `--mem-len` is also the environment variable `XLCLI_MEM_LEN`."""


class Command(TyperCommand):
    """A command whose help shows panels as headings; its `epilog` holds examples, one per line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses; errors have the context."""
        with _context_of_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, which needs a working folder."""
        os.getcwd()  # noqa: PTH109
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Metavars of the arguments, then `[OPTIONS]`."""
        arguments = (str(param.metavar) for param in self.params if param.param_type_name == "argument")
        return [*arguments, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes one section per panel."""
        _write_panels(self.get_params(ctx), self.callback, formatter, default="Output")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples."""
        _write_examples(self.epilog, formatter)


class Program(TyperGroup):
    """The program, whose help lists commands before options."""

    heading = "Options"
    """Heading of the options without a panel."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses; errors have the context."""
        with _context_of_errors(ctx):
            return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`COMMAND [OPTIONS]`."""
        return ["COMMAND", "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes commands, then options."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(command)) for name, command in self.commands.items()])
        _write_panels(self.get_params(ctx), self.callback, formatter, default=self.heading)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples."""
        _write_examples(self.epilog, formatter)


@dataclass(frozen=True)
class OptionHelp:
    """Names of an option, the shortest first, the value it takes ("" for a flag), and its help."""

    names: tuple[str, ...]
    value: str
    help: str


def summary(command: Any) -> str:
    """First paragraph of the help of a command."""
    return str(command.help or "").partition("\n\n")[0]


def panels(params: list[Any], function: Any, default: str) -> dict[str, list[OptionHelp]]:
    """The options among `params`, by the heading of their panel; `default` is the heading of those without one."""
    found: dict[str, list[OptionHelp]] = {}
    for param in params:
        if param.param_type_name == "argument" or param.hidden:
            continue
        value = "" if param.is_flag else param.metavar or "|".join(choices(function, param.name)) or "VALUE"
        option = OptionHelp(tuple(sorted(param.opts, key=len)), value, param.help or "")
        found.setdefault(param.rich_help_panel or default, []).append(option)
    return found


@contextlib.contextmanager
def _context_of_errors(context: Any) -> Iterator[None]:
    """Adds the context to usage errors; Typer omits it where a value is missing or superfluous."""
    try:
        yield
    except typer.TyperException as raised:
        error: Any = raised
        error.ctx = getattr(error, "ctx", None) or context
        raise


def _write_panels(params: list[Any], function: Any, formatter: Any, *, default: str) -> None:
    for heading, options in panels(params, function, default).items():
        with formatter.section(heading):
            formatter.write_dl([(f"{', '.join(each.names)} {each.value}".rstrip(), each.help) for each in options])


def _write_examples(epilog: str | None, formatter: Any) -> None:
    with formatter.section("Examples"):
        formatter.write("".join(f"  {line}\n" for line in (epilog or "").splitlines()))
