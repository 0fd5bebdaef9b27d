"""The Typer program `xlcli`: its commands, of which a run imports and builds only the one it uses, and `run`."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from keyword import iskeyword
from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.main import get_command

from xlcli import __version__
from xlcli.cli.help import CONTEXT, Command, Program, description
from xlcli.cli.options import add_options
from xlcli.cli.signals import Stopped
from xlcli.cli.usage import explain

COMMANDS = ("train", "eval", "generate", "stream", "compress", "decompress", "import", "export", "models", "bench")
"""Commands in the order of the help; each is a module of this package with a Typer `app`."""
COMPLETION = "_XLCLI_COMPLETE"
"""Environment variable with which a shell asks for completions."""


def build(names: Iterable[str] = COMMANDS, *, with_options: bool = True, with_completion: bool = True) -> TyperGroup:
    """The program with these commands; without options it only lists them.

    The options that set up completion take 30 ms to parse, also where they are not given.
    """
    app = typer.Typer(
        cls=Program,
        invoke_without_command=True,
        rich_markup_mode=None,
        suggest_commands=False,
        add_completion=with_completion,
        context_settings={name: CONTEXT[name] for name in ("help_option_names", "max_content_width")},
        epilog='xlcli train corpus.txt\nxlcli generate "Once upon a"',
    )
    app.callback(help=description(program))(program)
    for name in names:
        commands = importlib.import_module(f"xlcli.cli.{name}{'_' * iskeyword(name)}").app
        for each in commands.registered_commands:
            each.cls, each.context_settings, each.help = Command, CONTEXT, description(each.callback)
        if with_options:
            add_options(commands)
        app.add_typer(commands)
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    return command


def program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("-V", "--version", help="Show the version and exit.")] = False,
) -> None:
    """Train Transformer-XL language models on your text; evaluate them, generate text, and score a pipe.

    xlcli help COMMAND explains a command. Its options can also come from the environment: --mem-len is XLCLI_MEM_LEN.
    """
    if version:
        typer.echo(f"xlcli {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Runs the program and returns its exit code. Its arguments are the `obj` of contexts.

    Raises:
        ConfigError: A usage error.
    """
    if arguments and arguments[0] in ("help", "version"):
        arguments = [*arguments[1:], f"--{arguments[0]}"]
    word = next((word for word in arguments if not word.startswith("-")), None)
    needed = () if arguments in (["--version"], ["-V"]) else (word,) if word in COMMANDS else COMMANDS
    if os.environ.get(COMPLETION):
        command = build()
        with suppress(KeyError, ValueError, SystemExit):  # without the words of a shell there is nothing to complete
            command.main(args=list(arguments), prog_name="xlcli")
        return 0
    runs = word in COMMANDS
    command = build(needed, with_options=runs, with_completion=not runs)
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
        raise explain(error, arguments) from None
