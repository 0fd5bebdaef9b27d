"""`xlcli models`: lists, shows and copies presets and models; removes, renames, sends and fetches models."""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from xlcli.cli import options
from xlcli.cli.group import Group
from xlcli.cli.help import CONTEXT, Command
from xlcli.cli.usage import nearest
from xlcli.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.config import WeightEncoding


class _Models(Group):
    """The command, which takes a word that resembles no action for the name of a model."""

    def remedy(self, word: str) -> str:
        """The action that shows a model."""
        return f"Type xlcli models show {word}."


app = typer.Typer(name="models", cls=_Models, invoke_without_command=True, context_settings=CONTEXT)


@app.callback(epilog="xlcli models\nxlcli models copy small my.toml")
def models(
    context: typer.Context,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_progress: options.NoProgress = False,
    color: options.Color = None,
    debug: options.Debug = False,
) -> None:
    """List models or presets; show, copy, remove or rename one.

    push and pull reach folders and the URLs of fsspec, such as s3:// and hf://.
    """
    if context.invoked_subcommand is None:
        from xlcli.cli.model_lists import list_models
        from xlcli.cli.prologue import open_screen

        list_models(open_screen(context))


def _action(name: str, *examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function of a screen as an action, which takes the options of `xlcli models` besides its own."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def action(context: typer.Context, **values: Any) -> None:
            from xlcli.cli.prologue import open_screen

            function(open_screen(context), **{param.name: values[param.name] for param in own})

        context, *shared = inspect.signature(models, eval_str=True).parameters.values()
        # `Screen` is imported for type checkers only.
        _, *own = inspect.signature(function, eval_str=True, locals={"Screen": object}).parameters.values()
        parameters = [context, *own, *shared]
        action.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        action.__annotations__ = {param.name: param.annotation for param in parameters}
        return app.command(name, cls=Command, context_settings=CONTEXT, epilog="\n".join(examples))(action)

    return register


@_action("list", "xlcli models list", "xlcli models list --json")
def list_models(screen: Screen) -> None:
    """List your models and the bundled ones."""
    from xlcli.cli import model_lists

    model_lists.list_models(screen)


@_action("presets", "xlcli models presets", "xlcli models presets --json")
def presets(screen: Screen) -> None:
    """List presets."""
    from xlcli.cli import model_lists

    model_lists.list_all_presets(screen)


@_action("show", "xlcli models show books", "xlcli models show corpus --plot curve.png")
def show(
    screen: Screen,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            allow_from_autoenv=False,
            help="Plot the training curve of the model (needs the extra xlcli[plot]).",
            rich_help_panel="Output",
        ),
    ] = None,
    force: options.Force = False,
) -> None:
    """Show a model or preset."""
    from xlcli.cli import model_lists

    if plot is not None:
        _plot(name, plot, screen, force=force)
    model_lists.show(name, screen)


@_action("copy", "xlcli models copy small my.toml", "xlcli models copy books models/books8 --weights int8")
def copy(
    screen: Screen,
    name: Annotated[str, typer.Argument(metavar="PRESET|MODEL")],
    target: Annotated[str, typer.Argument(metavar="FILE.toml|FOLDER")],
    encoding: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        typer.Option(
            "--weights",
            allow_from_autoenv=False,
            help="Encoding of the weights of a copied model. Default: as in the model.",
            rich_help_panel="Model",
        ),
    ] = None,
) -> None:
    """Copy a preset to a file, or a model.

    A preset is copied to a TOML file to edit, or to standard output (-); a model to a folder.
    """
    if not (target == "-" or target.endswith(".toml")):
        _copy_model(name, target, encoding, screen)
    elif encoding:
        raise ConfigError("--weights applies to copies of models only.", "Type xlcli models copy MODEL FOLDER.")
    else:
        _copy_preset(name, target, screen)


@_action("rm", "xlcli models rm draft", "xlcli models rm draft models/old --yes")
def remove(
    screen: Screen,
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    yes: Annotated[
        bool,
        typer.Option("-y", "--yes", allow_from_autoenv=False, help="Remove without asking.", rich_help_panel="Model"),
    ] = False,
) -> None:
    """Remove models of your own.

    Nothing is removed that xlcli did not write.
    """
    from xlcli.cli import model_folders

    model_folders.remove(names, screen, yes=yes)


@_action("mv", "xlcli models mv corpus shakespeare", "xlcli models mv corpus elsewhere/corpus")
def rename(
    screen: Screen,
    old: Annotated[str, typer.Argument(metavar="OLD")],
    new: Annotated[str, typer.Argument(metavar="NEW")],
) -> None:
    """Rename a model of your own."""
    from xlcli.cli import model_folders

    model_folders.rename(old, new, screen)


@_action("push", "xlcli models push corpus backup/corpus", "xlcli models push corpus s3://BUCKET/corpus --with-text")
def push(
    screen: Screen,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    url: Annotated[str, typer.Argument(metavar="URL")],
    with_text: Annotated[
        bool,
        typer.Option(
            "--with-text",
            allow_from_autoenv=False,
            help="Push the held-out text, too, which is a part of the training text.",
            rich_help_panel="Model",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an unfinished push.", rich_help_panel="Output")
    ] = False,
) -> None:
    """Send a model to a folder or URL.

    URLs are those of fsspec, such as s3:// and hf://.
    """
    from xlcli.cli import model_transfer

    model_transfer.push(name, url, screen, with_text=with_text, force=force)


@_action("pull", "xlcli models pull backup/corpus", "xlcli models pull hf://OWNER/corpus mine")
def pull(
    screen: Screen,
    url: Annotated[str, typer.Argument(metavar="URL")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None,
) -> None:
    """Fetch a model from a folder or URL.

    URLs are those of fsspec, such as s3:// and hf://.
    """
    from xlcli.cli import model_transfer

    model_transfer.pull(url, name, screen)


def _plot(name: str, plot: str, screen: Screen, *, force: bool) -> None:
    """Draws the training curve of a model."""
    from xlcli.cli.outputs import check_outputs
    from xlcli.cli.plot import check_plot, draw_training
    from xlcli.store.discover import find
    from xlcli.store.records import METRICS, read_metrics

    check_plot(plot)
    folder = find(name)
    check_outputs({"--plot": plot}, [], force=force)
    if not draw_training(plot, read_metrics(folder), folder.name):
        raise CheckpointError(f"{folder} has no {METRICS} with a training curve.", "Choose a model trained here.")
    screen.say(f"plot written to {plot}")


def _copy_preset(name: str, target: str, screen: Screen) -> None:
    from xlcli.files import write_atomic
    from xlcli.presets import list_presets

    preset = next((preset for preset in list_presets() if preset.name == name), None)
    if preset is None:
        names = [preset.name for preset in list_presets()]
        near = nearest(name, names)
        raise ConfigError(
            f"there is no preset '{name}'.", f"Did you mean {near}?" if near else f"Choose one of: {', '.join(names)}."
        )
    text = preset.path.read_bytes()
    if target == "-":
        screen.write(text)
        return
    if Path(target).exists():
        raise ConfigError(f"{target} exists.", "Choose another name, or remove it first.")
    write_atomic(Path(target), text)
    screen.say(f"{target} written; train with it: xlcli train FILE --config {target}")


def _copy_model(name: str, target: str, encoding: WeightEncoding | None, screen: Screen) -> None:
    from xlcli.cli import json_objects, quantities
    from xlcli.presets import list_presets
    from xlcli.store.discover import find, summarize

    try:
        folder = find(name)
    except CheckpointError as error:
        is_preset = any(preset.name == name for preset in list_presets())
        remedy = f"Copy the preset into a file: xlcli models copy {name} FILE.toml." if is_preset else error.remedy
        raise CheckpointError(error.message, remedy) from None
    with screen:
        screen.wait("copying")
        from xlcli.store.copy import copy_model

        copy_model(folder, Path(target), encoding)
    made = summarize(Path(target))
    if screen.json:
        screen.object(json_objects.fields(made))
    command = f"xlcli eval -m {shlex.quote(target)}"
    screen.say(f"{target} written, {quantities.size(made.bytes)} in {made.encoding}; score it: {command}")
