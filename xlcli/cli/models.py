"""`xlcli models`: lists, shows and copies presets and models; removes, renames, sends and fetches models."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from xlcli.cli import complete, options
from xlcli.cli.help import CONTEXT, Command
from xlcli.cli.usage import nearest
from xlcli.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.config import WeightEncoding

app = typer.Typer()


@app.command(
    cls=Command,
    context_settings=CONTEXT,
    epilog="xlcli models copy small my.toml\nxlcli models copy books models/books8 --weights int8",
)
def models(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[presets | show NAME | copy NAME TARGET | rm NAME... | mv OLD NEW"
            " | push NAME URL | pull URL [NAME]]",
            autocompletion=complete.model_words,
        ),
    ] = None,
    encoding: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        typer.Option(
            "--weights",
            allow_from_autoenv=False,
            help="Encoding of the weights of a copied model. Default: as in the model.",
            rich_help_panel="Model",
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("-y", "--yes", allow_from_autoenv=False, help="Remove without asking.", rich_help_panel="Model"),
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            allow_from_autoenv=False,
            help="Plot the training curve of the model shown (needs the extra xlcli[plot]).",
            rich_help_panel="Output",
        ),
    ] = None,
    with_text: Annotated[
        bool,
        typer.Option(
            "--with-text",
            allow_from_autoenv=False,
            help="Push the held-out text, too, which is a part of the training text.",
            rich_help_panel="Model",
        ),
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_progress: options.NoProgress = False,
    color: options.Color = None,
    force: options.Force = False,
    debug: options.Debug = False,
) -> int:
    """List models or presets; show, copy, remove or rename one.

    copy writes a preset to a TOML file to edit, or a model to a folder. rm and mv take models of your own; rm removes
    nothing that xlcli did not write. push and pull reach folders and the URLs of fsspec, such as s3:// and hf://;
    push --force replaces an unfinished push.
    """
    from xlcli.cli import model_folders, model_lists, model_transfer
    from xlcli.cli.prologue import open_screen

    screen = open_screen(context)
    words = words or ["list"]
    if encoding and (words[0] != "copy" or _is_preset_file(words[-1])):
        raise ConfigError("--weights applies to copies of models only.", "Type xlcli models copy MODEL FOLDER.")
    if yes and words[0] != "rm":
        raise ConfigError("--yes applies to xlcli models rm only.", "Leave it out.")
    if plot is not None and words[0] != "show":
        raise ConfigError("--plot needs one model.", f"Type xlcli models show NAME --plot {shlex.quote(plot)}.")
    if with_text and words[0] != "push":
        raise ConfigError("--with-text applies to xlcli models push only.", "Leave it out.")
    match words:
        case ["list"]:
            model_lists.list_models(screen)
        case ["presets"]:
            model_lists.list_all_presets(screen)
        case ["show", name]:
            if plot is not None:
                _plot(name, plot, screen, force=force)
            model_lists.show(name, screen)
        case ["copy", name, target] if _is_preset_file(target):
            _copy_preset(name, target, screen)
        case ["copy", name, target]:
            _copy_model(name, target, encoding, screen)
        case ["rm", name, *names]:
            model_folders.remove([name, *names], screen, yes=yes)
        case ["mv", old, new]:
            model_folders.rename(old, new, screen)
        case ["push", name, url]:
            model_transfer.push(name, url, screen, with_text=with_text, force=force)
        case ["pull", url, *name] if len(name) < 2:
            model_transfer.pull(url, name[0] if name else None, screen)
        case [action, *_] if action in _USAGE:
            raise ConfigError(f"'xlcli models {action}' takes {_USAGE[action][0]}.", f"Type {_USAGE[action][1]}.")
        case [action, *_]:
            near = nearest(action, _USAGE)
            remedy = f"Did you mean xlcli models {near}?" if near else f"Type xlcli models show {action}."
            raise ConfigError(f"there is no 'xlcli models {action}'.", remedy)
    return 0


_USAGE = {
    "list": ("no words", "xlcli models"),
    "presets": ("no words", "xlcli models presets"),
    "show": ("1 word", "xlcli models show NAME"),
    "copy": ("2 words", "xlcli models copy PRESET FILE.toml, or MODEL FOLDER"),
    "rm": ("names", "xlcli models rm NAME"),
    "push": ("2 words", "xlcli models push NAME URL"),
    "pull": ("1 or 2 words", "xlcli models pull URL NAME"),
    "mv": ("2 words", "xlcli models mv OLD NEW"),
}
"""Action to the number of its words, and what to type."""


def _is_preset_file(target: str) -> bool:
    return target == "-" or target.endswith(".toml")


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
    from xlcli.cli import report
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
        screen.object(report.fields(made))
    command = f"xlcli eval -m {shlex.quote(target)}"
    screen.say(f"{target} written, {report.size(made.bytes)} in {made.encoding}; score it: {command}")
