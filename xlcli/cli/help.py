"""Help pages: options under the headings of their panels, then examples."""

from __future__ import annotations

from typing import Any

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

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`COMMAND [OPTIONS]`."""
        return ["COMMAND", "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes commands, then options."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])
        _write_panels(self.get_params(ctx), self.callback, formatter, default="Options")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples."""
        _write_examples(self.epilog, formatter)


def _write_panels(params: list[Any], function: Any, formatter: Any, *, default: str) -> None:
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        if param.param_type_name == "argument" or param.hidden:
            continue
        names = ", ".join(sorted(param.opts, key=len))
        value = "" if param.is_flag else param.metavar or "|".join(choices(function, param.name)) or "VALUE"
        row = (f"{names} {value}".rstrip(), param.help or "")
        panels.setdefault(param.rich_help_panel or default, []).append(row)
    for heading, rows in panels.items():
        with formatter.section(heading):
            formatter.write_dl(rows)


def _write_examples(epilog: str | None, formatter: Any) -> None:
    with formatter.section("Examples"):
        formatter.write("".join(f"  {line}\n" for line in (epilog or "").splitlines()))
