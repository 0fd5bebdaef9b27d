"""Help pages: options under the headings of their panels, then examples."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from xlcli.cli.options import COMMANDS, SECTIONS, choices, parameters
from xlcli.cli.usage import explain

PANELS = ("Run", "Text", "Model", "Sampling", "Memory", "Training", "Results", "Machine", "Settings", "Output")
"""Headings of options in the order of the help."""
CONTEXT: dict[str, Any] = {
    "auto_envvar_prefix": "XLCLI",
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}
"""Context settings of every command. The option `--mem-len` is also the environment variable `XLCLI_MEM_LEN`."""


class _Page:
    """What all help pages share: the context of usage errors, and examples at the end, one per line of the `epilog`."""

    epilog: str | None
    params: list[Any]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses; errors have the context, which Typer omits where a value is missing or superfluous."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except typer.TyperException as error:
            raise explain(error, getattr(error, "ctx", None) or ctx) from None

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
                f"xlcli {ctx.info_name} --print-config and docs/settings.md list all settings. Set those without an "
                "option with --set, in a --config file, or by a variable such as XLCLI_DTYPE."
            )


class Group(_Page, TyperGroup):
    """Commands, whose help lists them before the options."""

    def abouts(self) -> dict[str, str]:
        """What each command does."""
        return {name: command.help or "" for name, command in self.commands.items()}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes commands, then options."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about.partition("\n\n")[0]) for name, about in self.abouts().items()])
        _write_panels(self.get_params(ctx), self.callback, formatter, default="Options")


class _Callback:
    """The function of a command, with the options of its settings and the shared ones in its signature."""

    def __init__(self, name: str, function: Callable[..., Any], more: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        signature = inspect.signature(function, eval_str=True)
        self.__signature__ = signature.replace(parameters=parameters(name, signature.parameters, more))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]


class App(typer.Typer):
    """Commands with such help pages. Arguments are those of `typer.Typer`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"rich_markup_mode": None, "suggest_commands": False, "add_completion": False} | settings)

    def command(  # type: ignore[override]
        self, name: str, *examples: str, about: str | None = None, more: Mapping[str, Any] = {}
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: makes a function a command with these examples.

        `about` is its help, if not in `COMMANDS`, and `more` are types of options that the function does not name.
        """
        text, epilog = about or COMMANDS[name], "\n".join(examples)
        register = super().command(name, cls=Command, context_settings=CONTEXT, help=text, epilog=epilog)
        return lambda function: register(_Callback(name, function, more))


def _write_panels(params: list[Any], function: Any, formatter: Any, *, default: str) -> None:
    """Options by the heading of their panel; `default` is the heading of those without one."""
    kinds = {} if function is None else inspect.signature(function, eval_str=True).parameters
    panels: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*PANELS, default)}
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
