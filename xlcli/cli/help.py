"""Help pages: options under the headings of their panels, then examples."""

from __future__ import annotations

import ast
import inspect
import os
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from xlcli.cli.options import SECTIONS, choices

PANELS = (
    "Run",
    "Text",
    "Model",
    "Sampling",
    "Memory",
    "Training",
    "Results",
    "Machine",
    "Settings",
    "Output",
    "Options",
)
"""Headings of options in the order of the help."""
CONTEXT: dict[str, Any] = {
    "auto_envvar_prefix": "XLCLI",
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}
"""Context settings of every command. The option `--mem-len` is also the environment variable `XLCLI_MEM_LEN`."""


def description(function: Any) -> str:
    """Docstring of a command; from its source if Python runs without docstrings (`-OO`)."""
    if (text := inspect.getdoc(function)) is None:
        definition: Any = ast.parse(inspect.getsource(function)).body[0]
        text = ast.get_docstring(definition)
    return text or ""


class _Page:
    """What all help pages share: the context of usage errors, and examples at the end, one per line of the `epilog`."""

    epilog: str | None
    params: list[Any]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses; errors have the context, which Typer omits where a value is missing or superfluous."""
        try:
            parsed: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except typer.TyperException as raised:
            error: Any = raised
            error.ctx = getattr(error, "ctx", None) or ctx
            raise
        return parsed

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`, false unless given: Typer would load pydantic's plugins to convert no value."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        option.default = False
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Metavars of the arguments, or `COMMAND`, then `[OPTIONS]`."""
        words = [str(param.metavar) for param in self.params if param.param_type_name == "argument"]
        return [*(["COMMAND"] if isinstance(self, TyperGroup) else words), "[OPTIONS]"]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples."""
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in (self.epilog or "").splitlines()))


class Command(_Page, TyperCommand):
    """A command whose help shows panels as headings."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, which needs a working folder."""
        os.getcwd()  # noqa: PTH109
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes one section per panel, and where all settings are listed."""
        _write_panels(self.get_params(ctx), self.callback, formatter, default="Output")
        if ctx.info_name in SECTIONS:
            formatter.write_paragraph()
            formatter.write_text(
                f"All settings are listed by xlcli {ctx.info_name} --print-config and in docs/settings.md. Those "
                "without an option are set with --set, in a file of --config, or by a variable such as XLCLI_DTYPE."
            )


class Program(_Page, TyperGroup):
    """The program, whose help lists commands before options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes commands, then options."""
        with formatter.section("Commands"):
            rows = [(name, (each.help or "").partition("\n\n")[0]) for name, each in self.commands.items()]
            formatter.write_dl(rows)
        _write_panels(self.get_params(ctx), self.callback, formatter, default="Options")


def _write_panels(params: list[Any], function: Any, formatter: Any, *, default: str) -> None:
    """Options by the heading of their panel; `default` is the heading of those without one."""
    kinds = {} if function is None else inspect.signature(function, eval_str=True).parameters
    panels: dict[str, list[tuple[str, str]]] = {heading: [] for heading in PANELS}
    for param in params:
        if param.param_type_name == "option" and not param.hidden:
            kind = get_args(kinds[param.name].annotation)[0] if param.name in kinds else None
            value = "" if param.is_flag else param.metavar or "|".join(choices(kind)) or "VALUE"
            row = (f"{', '.join(sorted(param.opts, key=len))} {value}".rstrip(), param.help or "")
            panels[param.rich_help_panel or default].append(row)
    for heading, rows in panels.items():
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)
