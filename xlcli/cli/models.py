"""`xlcli models`: lists, shows and copies presets and models."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from xlcli.cli import options
from xlcli.cli.help import CONTEXT, Command, Program
from xlcli.cli.options import option
from xlcli.cli.usage import nearest
from xlcli.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.config import WeightEncoding


class _Models(Program):
    """The command, whose action is `list` if none is named. Options of an action may stand before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Moves the action to the front and parses."""
        action = next((word for word in args if word in self.commands), None)
        if action is not None:
            args.remove(action)
            args.insert(0, action)
        elif not (ctx.resilient_parsing or {"-h", "--help"} & {*args}) and all(a.startswith("-") for a in args[:1]):
            args.insert(0, "list")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="models",
    cls=_Models,
    context_settings=CONTEXT,
    help="List models (default) or presets; show or copy one.\n\nA model is a folder: rm, mv and rsync do the rest.",
    epilog="xlcli models\nxlcli models copy small my.toml",
)


@app.command("list", cls=Command, context_settings=CONTEXT, epilog="xlcli models list\nxlcli models list --json")
def list_models(
    context: typer.Context,
    json: options.Json = False,
    quiet: options.Quiet = False,
    color: options.Color = None,
    debug: options.Debug = False,
) -> None:
    """List your models and the bundled ones."""
    from xlcli.cli import model_lists
    from xlcli.cli.prologue import open_screen

    model_lists.list_models(open_screen(context))


@app.command(cls=Command, context_settings=CONTEXT, epilog="xlcli models presets\nxlcli models presets --json")
def presets(
    context: typer.Context,
    json: options.Json = False,
    quiet: options.Quiet = False,
    color: options.Color = None,
    debug: options.Debug = False,
) -> None:
    """List presets."""
    from xlcli.cli import model_lists
    from xlcli.cli.prologue import open_screen

    model_lists.list_all_presets(open_screen(context))


@app.command(
    cls=Command,
    context_settings=CONTEXT,
    epilog="xlcli models show books\nxlcli models show corpus --plot curve.png",
)
def show(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    plot: Annotated[
        str | None,
        option(
            "Output",
            "--plot FILE.png",
            "Plot the training curve of the model (needs the extra xlcli[plot]).",
            allow_from_autoenv=False,
        ),
    ] = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    color: options.Color = None,
    debug: options.Debug = False,
) -> None:
    """Show a model or preset."""
    from xlcli.cli import model_lists
    from xlcli.cli.prologue import open_screen

    screen = open_screen(context)
    if plot is not None:
        _plot(name, plot, screen, force=force)
    model_lists.show(name, screen)


@app.command(
    cls=Command,
    context_settings=CONTEXT,
    epilog="xlcli models copy small my.toml\nxlcli models copy books models/books8 --weights int8",
)
def copy(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="PRESET|MODEL")],
    target: Annotated[str, typer.Argument(metavar="FILE.toml|FOLDER")],
    encoding: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        option(
            "Model",
            "--weights",
            "Encoding of the weights of a copied model. Default: as in the model.",
            allow_from_autoenv=False,
        ),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    color: options.Color = None,
    debug: options.Debug = False,
) -> None:
    """Copy a preset to a file, or a model.

    A preset is copied to a TOML file to edit, or to standard output (-); a model to a folder.
    """
    from xlcli.cli.prologue import open_screen

    screen = open_screen(context)
    if not (target == "-" or target.endswith(".toml")):
        _copy_model(name, target, encoding, screen)
    elif encoding:
        raise ConfigError("--weights applies to copies of models only.", "Type xlcli models copy MODEL FOLDER.")
    else:
        _copy_preset(name, target, screen)


def _plot(name: str, plot: str, screen: Screen, *, force: bool) -> None:
    """Draws the training curve of a model."""
    from xlcli.cli.outputs import check_outputs
    from xlcli.cli.plot import check_plot, draw_training
    from xlcli.store.discover import find
    from xlcli.store.layout import METRICS, read_metrics

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
    screen.say(f"{target} written; train with it: xlcli train FILE --config {shlex.quote(target)}")


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
        from xlcli.store.folder import copy_model

        copy_model(folder, Path(target), encoding)
    made = summarize(Path(target))
    if screen.json:
        screen.object(json_objects.fields(made))
    command = f"xlcli eval -m {shlex.quote(target)}"
    screen.say(f"{target} written, {quantities.size(made.bytes)} in {made.encoding}; score it: {command}")
