"""The Typer program `xlcli`: registration of its commands, and `run`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.main import get_command

from xlcli import __version__
from xlcli.cli import cache, completion, generate, models, stream, train
from xlcli.cli import eval as evaluation
from xlcli.cli.help import CONTEXT, Program
from xlcli.cli.signals import Stopped
from xlcli.cli.usage import explain

app = typer.Typer(
    cls=Program,
    invoke_without_command=True,
    rich_markup_mode=None,
    suggest_commands=False,
    context_settings={name: CONTEXT[name] for name in ("help_option_names", "max_content_width")},
    epilog='xlcli train corpus.txt\nxlcli generate "Once upon a"',
)
for command in (train, evaluation, generate, stream, models, cache, completion):
    app.add_typer(command.app)


@app.callback()
def program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Train Transformer-XL language models on your text; evaluate them, generate text, and score a pipe.

    Options of a command can also come from the environment: --mem-len is XLCLI_MEM_LEN.
    """
    if version:
        typer.echo(f"xlcli {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Runs the program and returns its exit code.

    Raises:
        ConfigError: A usage error.
    """
    command = get_command(app)
    assert isinstance(command, TyperGroup)
    if completion.VARIABLE in os.environ:
        command.main(args=list(arguments), prog_name="xlcli")
    try:
        # Not `command.main`, which turns a broken pipe into exit code 1.
        with command.make_context("xlcli", list(arguments)) as context:
            return command.invoke(context) or 0
    except typer.Exit as end:
        return end.exit_code
    except Stopped as stopped:
        return stopped.exit_code
    except typer.TyperException as error:
        raise explain(error, arguments) from None
