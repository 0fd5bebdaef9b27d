"""Help pages: options under the headings of their panels, then examples."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer
from typer.core import TyperGroup

from xlcli.cli.options import SECTIONS
from xlcli.cli.terminal import one_line
from xlcli.cli.usage import choices_of, explain
from xlcli.errors import ConfigError

CONTEXT: dict[str, Any] = {  # of every command; `--mem-len` is also the environment variable `XLCLI_MEM_LEN`
    "auto_envvar_prefix": "XLCLI",
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}
TYPER: dict[str, Any] = {"rich_markup_mode": None, "suggest_commands": False}  # settings of every `typer.Typer`
PANELS = ("Run", "Text", "Model", "Sampling", "Memory", "Training", "Results", "Machine", "Settings", "Output")
"""Headings of options in the order of the help."""


class HelpPage:
    """What all commands share: parsing with our usage errors, and help with an example in each line of the `epilog`."""

    epilog: str | None
    params: list[Any]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses; errors have the context, which Typer omits where a value is missing or superfluous."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except typer.TyperException as error:
            raise explain(error, getattr(error, "ctx", None) or ctx) from None

    def make_parser(self, ctx: Any) -> Any:
        """The parser, which refuses a second value of an option that takes one: Typer would silently take the last."""
        parser = super().make_parser(ctx)  # type: ignore[misc]
        if ctx.resilient_parsing:  # a shell completes the line, whatever it says
            return parser
        for option in {*parser._short_opt.values(), *parser._long_opt.values()}:
            if option.action == "store":
                option.process = partial(_store_once, option)
        return parser

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`, false unless given: Typer would load pydantic's plugins to convert no value."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        option.default = False
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Metavars of the arguments, or `COMMAND`, then `[OPTIONS]`."""
        if isinstance(self, TyperGroup):
            return ["COMMAND", "[OPTIONS]"]
        words = [str(param.metavar) for param in self.params if param.param_type_name == "argument"]
        return [*words, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes one section per panel, and where all settings are listed."""
        _write_panels(self.get_params(ctx), formatter, default="Output")  # type: ignore[attr-defined]
        if ctx.info_name in SECTIONS:
            formatter.write_paragraph()
            formatter.write_text(
                f"xlcli {ctx.info_name} --print-config and docs/settings.md list all settings. Set those without an "
                "option with --set, in a --config file, or by a variable such as XLCLI_DTYPE."
            )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples"):
            for line in (self.epilog or "").splitlines():
                formatter.write(f"  {line}\n")


def _store_once(option: Any, value: Any, state: Any) -> None:
    """Stores the value of an option in the state of the parser; `ConfigError` if it has another one already."""
    given = state.opts.setdefault(option.dest, value)
    if given != value:
        name = max(option.obj.opts, key=len)
        problem = f"{name} is given twice, as '{one_line(given)}' and as '{one_line(value)}'."
        raise ConfigError(problem, "Give it once.")
    state.order.append(option.obj)


class Group(HelpPage, TyperGroup):
    """Commands, whose help lists them before the options."""

    def summaries(self) -> dict[str, str]:
        return {name: command.help or "" for name, command in self.commands.items()}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, about.partition("\n\n")[0]) for name, about in self.summaries().items()])
        _write_panels(self.get_params(ctx), formatter, default="Options")


def _write_panels(params: list[Any], formatter: Any, *, default: str) -> None:
    """Options by the heading of their panel; `default` is the heading of those without one."""
    panels: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*PANELS, default)}
    for param in params:
        if param.param_type_name == "option" and not param.hidden:
            names = ", ".join(sorted(param.opts, key=len))
            if not param.is_flag:
                names += " " + (param.metavar or "|".join(choices_of(param)) or "VALUE")
            panels[param.rich_help_panel or default].append((names, param.help or ""))
    for heading, rows in panels.items():
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)
