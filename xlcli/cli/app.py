"""The Typer program `xlcli`: its commands, of which a run imports and builds only the one it uses, and `run`."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from xlcli import __version__
from xlcli.cli.help import CONTEXT, TYPER, Group
from xlcli.cli.options import COMMANDS
from xlcli.cli.signals import Stopped
from xlcli.cli.usage import explain

MODULES: Mapping[str, str] = {"import": "exchange", "export": "exchange"}  # modules of commands without their own
COMPLETION = "_XLCLI_COMPLETE"  # environment variable with which a shell asks for completions


class Program(Group):
    """The program, which builds a command when it is used."""

    def summaries(self) -> dict[str, str]:
        return dict(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return load(cmd_name)


@cache
def load(name: str) -> Any:
    """The command of this name, with all its options."""
    made = get_command(importlib.import_module(f"xlcli.cli.{MODULES.get(name, name)}").app)
    return getattr(made, "commands", {}).get(name, made)


def build(*, with_completion: bool = True) -> TyperGroup:
    """The program; the options that set up completion take 30 ms to parse, also where they are not given."""
    app = typer.Typer(
        **TYPER,
        cls=Program,
        invoke_without_command=True,
        add_completion=with_completion,
        context_settings={name: CONTEXT[name] for name in ("help_option_names", "max_content_width")},
        epilog='xlcli train corpus.txt\nxlcli generate "Once upon a"',
        help="Train Transformer-XL language models on your text; evaluate them, generate text, and score a pipe.\n\n"
        "xlcli help COMMAND explains a command. Its options can also come from the environment: --mem-len is "
        "XLCLI_MEM_LEN.",
    )
    app.callback()(program)
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    return command


def program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("-V", "--version", help="Show the version and exit.")] = False,
) -> None:
    """Shows the version, or the help of the program if no command is given."""
    if version:
        typer.echo(f"xlcli {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Runs the program, which hands contexts the arguments; returns the exit code. `ConfigError` for usage."""
    if arguments and arguments[0] in ("help", "version"):
        arguments = [*arguments[1:], f"--{arguments[0]}"]
    if os.environ.get(COMPLETION):
        with suppress(KeyError, ValueError, SystemExit):  # without the words of a shell there is nothing to complete
            build().main(args=list(arguments), prog_name="xlcli")
        return 0
    command = build(with_completion=not any(word in COMMANDS for word in arguments))
    try:
        # Not `command.main`, which turns a broken pipe into exit code 1.
        with command.make_context("xlcli", list(arguments), obj=tuple(arguments)) as context:
            if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # set by `xlcli.__main__`
                signal.signal(signal.SIGINT, signal.default_int_handler)
            return command.invoke(context) or 0
    except typer.Exit as end:
        return 2 if end.exit_code else 0  # Typer has no completion for this shell
    except Stopped as stopped:
        return stopped.exit_code
    except typer.TyperException as error:
        raise explain(error, getattr(error, "ctx", None)) from None
