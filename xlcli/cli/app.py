"""The program `xlcli`: turns the tables of the commands into a typer application and runs it."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from xlcli import __version__
from xlcli.cli import eval as evaluation
from xlcli.cli import generate, models, stream, train
from xlcli.cli.help import command_help, program_help
from xlcli.cli.options import Command, Flag, collect, nearest
from xlcli.cli.signals import Stopped
from xlcli.cli.terminal import one_line
from xlcli.errors import ConfigError

COMMANDS = (train.COMMAND, evaluation.COMMAND, generate.COMMAND, stream.COMMAND, models.COMMAND)
"""In the order in which help lists them."""

# Typer exports only the leaf of its tree of usage errors: BadParameter > UsageError > ClickException.
_ClickException: type[BaseException] = typer.BadParameter.__mro__[2]


class _Answer(Exception):  # noqa: N818
    """Parsing is over, and this is to be done. Raised because typer swallows what happens inside a command."""

    def __init__(self, act: Callable[[], int]) -> None:
        super().__init__()
        self.act = act


def run(arguments: Sequence[str]) -> int:
    """Parses and runs; returns the exit code. Usage errors come out as `ConfigError`."""
    try:
        _application()(args=list(arguments), prog_name="xlcli", standalone_mode=False)
    except _Answer as answer:
        act = answer.act
    except _ClickException as error:
        raise _usage(error, arguments) from None
    else:
        return 0
    try:
        return act()
    except Stopped as stopped:
        return stopped.exit_code


def _application() -> typer.Typer:
    app = typer.Typer(
        name="xlcli", invoke_without_command=True, add_help_option=False, rich_markup_mode=None, suggest_commands=False
    )

    @app.callback()
    def program(
        context: typer.Context,
        help: Annotated[bool, typer.Option("--help", "-h")] = False,  # noqa: A002
        version: Annotated[bool, typer.Option("--version")] = False,
    ) -> None:
        if version:
            raise _Answer(lambda: _print(f"xlcli {__version__}\n"))
        if help or context.invoked_subcommand is None:
            raise _Answer(lambda: _print(program_help(COMMANDS, _columns())))

    for command in COMMANDS:
        app.command(command.name, add_help_option=False)(_callback(command))
    return app


def _callback(command: Command) -> Callable[..., None]:
    """A function whose signature typer can read: one parameter a flag, each an unread text."""

    def callback(words: list[str] | None = None, show_help: bool = False, **typed: Any) -> None:
        if show_help:
            raise _Answer(lambda: _print(command_help(command, _columns())))
        given = {flag.name: typed[_identifier(flag)] for flag in command.flags}
        raise _Answer(lambda: command.run(collect(command, tuple(words or ()), given, os.environ)))

    parameters = [
        _parameter("words", list[str] | None, typer.Argument(metavar=command.words), None),
        _parameter("show_help", bool, typer.Option("--help", "-h"), False),
        *(_flag_parameter(flag) for flag in command.flags),
    ]
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {}
    return callback


def _flag_parameter(flag: Flag) -> inspect.Parameter:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in flag.choices if choice.startswith(incomplete)]

    option = typer.Option(*flag.names.split("/"), help=flag.about, autocompletion=complete if flag.choices else None)
    name = _identifier(flag)
    if not flag.value:
        return _parameter(name, bool, option, False)
    return _parameter(name, list[str] | None if flag.many else str | None, option, None)


def _identifier(flag: Flag) -> str:
    return "flag_" + flag.name.replace("-", "_")  # `continue` alone could not name a parameter


def _parameter(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default)


def _usage(error: Any, arguments: Sequence[str]) -> ConfigError:
    """A usage error of typer in our words, with the nearest thing that exists."""
    context = getattr(error, "ctx", None)
    name = context.info_name if context else next((word for word in arguments if not word.startswith("-")), "")
    command = next((command for command in COMMANDS if command.name == name), None)
    see = f"See xlcli {command.name} --help." if command else "See xlcli --help."
    option = getattr(error, "option_name", None)
    kind = type(error).__name__
    if kind == "NoSuchOption" and option:
        return ConfigError(f"there is no option {one_line(option)}.", _remedy(option, command, arguments) or see)
    if kind == "BadOptionUsage" and option and command:
        flag = next((flag for flag in command.flags if option in flag.names.split("/")), None)
        remedy = (flag.remedy(flag.long) if flag else "") or see
        wants = "needs a value" if flag and flag.value else "takes no value"
        return ConfigError(f"{option} {wants}.", remedy)
    if not command and "No such command" in error.message:
        word = error.message.partition("'")[2].rpartition("'")[0]
        near = nearest(word, (command.name for command in COMMANDS))
        return ConfigError(
            f"there is no command '{one_line(word)}'.", f"Did you mean xlcli {near}?" if near else "See xlcli --help."
        )
    return ConfigError(one_line(error.format_message()), see)


def _remedy(option: str, command: Command | None, arguments: Sequence[str]) -> str:
    """The option that was meant: one with nearly this name, or one that belongs behind the command."""
    if command is None:
        after = next((c for c in COMMANDS if c.name in arguments and option in _all_names(c)), None)
        return f"Write it after the command: xlcli {after.name} {option}." if after else ""
    near = nearest(option.lstrip("-"), (flag.name for flag in command.flags))
    return f"Did you mean --{near}?" if near else ""


def _all_names(command: Command) -> list[str]:
    return [name for flag in command.flags for name in flag.names.split("/")]


def _columns() -> int:
    return max(40, min(100, shutil.get_terminal_size().columns))


def _print(text: str) -> int:
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0
