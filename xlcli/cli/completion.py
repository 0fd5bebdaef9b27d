"""`xlcli completion`: prints the script that teaches a shell to complete commands, options, models and presets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from xlcli.cli import options
from xlcli.cli.app import COMPLETION
from xlcli.cli.help import CONTEXT, Command
from xlcli.errors import ConfigError

_SHELLS = ("bash", "zsh", "fish")
app = typer.Typer()


@app.command(
    cls=Command,
    context_settings=CONTEXT,
    epilog='eval "$(xlcli completion bash)"\nxlcli completion fish > ~/.config/fish/completions/xlcli.fish',
)
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"] | None, typer.Argument(metavar="[bash|zsh|fish]")] = None,
    debug: options.Debug = False,
) -> int:
    """Print the completion script of a shell, by default of yours.

    bash: add the first example to ~/.bashrc. zsh: add eval "$(xlcli completion zsh)" to ~/.zshrc, after compinit.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        raise ConfigError(f"there is no completion for the shell '{name}'.", "Try xlcli completion bash.")
    typer.echo(get_completion_script(prog_name="xlcli", complete_var=COMPLETION, shell=name))
    return 0
