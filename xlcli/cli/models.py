"""`xlcli models`: lists, shows and copies presets and models."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from xlcli.cli import options
from xlcli.cli.help import CONTEXT, Command
from xlcli.cli.usage import nearest
from xlcli.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.config import WeightEncoding
    from xlcli.presets import Preset
    from xlcli.store.discover import ModelSummary

_HEADING = ("name", "parameters", "on disk", "weights", "bits/byte", "age", "corpus")
app = typer.Typer()


@app.command(
    cls=Command,
    context_settings=CONTEXT,
    epilog="xlcli models copy small my.toml\nxlcli models copy books models/books8 --weights int8",
)
def models(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[show NAME | copy PRESET FILE.toml | copy MODEL FOLDER]")
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
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_progress: options.NoProgress = False,
    color: options.Color = None,
    debug: options.Debug = False,
) -> int:
    """List presets and models; show one; copy a preset to edit, or a model."""
    from xlcli.cli.prologue import open_screen

    screen = open_screen(context)
    words = words or ["list"]
    if encoding and (words[0] != "copy" or _is_preset_file(words[-1])):
        raise ConfigError("--weights applies to copies of models only.", "Type xlcli models copy MODEL FOLDER.")
    match words:
        case ["list"]:
            _list(screen)
        case ["show", name]:
            _show(name, screen)
        case ["copy", name, target] if _is_preset_file(target):
            _copy_preset(name, target, screen)
        case ["copy", name, target]:
            _copy_model(name, target, encoding, screen)
        case ["show", *_]:
            raise ConfigError("'xlcli models show' takes 1 word.", "Type xlcli models show NAME.")
        case ["copy", *_]:
            raise ConfigError(
                "'xlcli models copy' takes 2 words.", "Type xlcli models copy PRESET FILE.toml, or MODEL FOLDER."
            )
        case [action, *_]:
            near = nearest(action, ("show", "copy"))
            remedy = f"Did you mean xlcli models {near}?" if near else f"Type xlcli models show {action}."
            raise ConfigError(f"there is no 'xlcli models {action}'.", remedy)
    return 0


def _is_preset_file(target: str) -> bool:
    return target == "-" or target.endswith(".toml")


def _list(screen: Screen) -> None:
    from xlcli.cli import report
    from xlcli.presets import list_presets
    from xlcli.store.discover import bundled_models, local_models

    presets, bundled, local = list_presets(), bundled_models(), local_models()
    if screen.json:
        screen.object(
            {
                "presets": [{"name": preset.name, "about": preset.about, "path": preset.path} for preset in presets],
                "bundled": [report.fields(model) for model in bundled],
                "local": [report.fields(model) for model in local],
            }
        )
        return
    for title, models in (("Models in ./models", local), ("Bundled models", bundled)):
        if models:
            screen.print(f"{title}:\n" + report.table([_HEADING, *map(_row, models)]) + "\n")
    if not local:
        screen.print("No models in ./models yet; make one: xlcli train FILE\n\n")
    tables = [
        f"{title}:\n" + report.table([("name", "about"), *((preset.name, preset.about) for preset in group)], left=2)
        for title, group in _groups(presets)
    ]
    screen.print("\n".join(tables))


def _groups(presets: Sequence[Preset]) -> list[tuple[str, list[Preset]]]:
    """Presets by heading. Only presets of published architectures set `train.max_steps`."""
    from xlcli.presets import read_preset

    published = [preset for preset in presets if "max_steps" in read_preset(preset.name).get("train", {})]
    variants = [preset for preset in presets if preset.name.startswith("small-")]
    return [
        ("Presets, for xlcli train --preset NAME", [p for p in presets if p not in published and p not in variants]),
        ("Variants of small, to be compared with it", variants),
        ("Published architectures", published),
    ]


def _row(model: ModelSummary) -> tuple[str, ...]:
    from xlcli.cli import report

    return (
        model.name,
        report.amount(model.parameters) if model.parameters is not None else "?",
        report.size(model.bytes),
        model.encoding or "?",
        f"{model.bits_per_byte:.3f}" if model.bits_per_byte is not None else "-",
        report.age(time.time() - model.modified),
        model.problem or model.corpus or "-",
    )


def _show(name: str, screen: Screen) -> None:
    from xlcli.cli import report
    from xlcli.cli.settings import to_toml
    from xlcli.presets import list_presets, read_preset
    from xlcli.store.discover import find, summarize
    from xlcli.store.layout import read_config
    from xlcli.store.records import read_record

    preset = next((preset for preset in list_presets() if preset.name == name), None)
    try:
        folder = find(name)
    except CheckpointError as error:
        if preset is None:
            names = [preset.name for preset in list_presets()]
            near = nearest(name, names)
            raise CheckpointError(error.message, f"Did you mean the preset {near}?" if near else error.remedy) from None
        _show_preset(preset, read_preset(name), screen)
        return
    summary, record = summarize(folder), read_record(folder)
    config = read_config(folder)
    if screen.json:
        config_tree = config.model_dump(mode="json")
        screen.object({**report.fields(summary), "record": record, "config": config_tree})
        return
    screen.print(f"{folder}\n" + report.table([_HEADING, _row(summary)]))
    card = folder / "README.md"
    if card.is_file() and card.stat().st_size < 2**20:
        screen.print("\n" + card.read_text("utf-8", "replace"))
    elif record:
        screen.print("\n" + to_toml({"record": record}))
    screen.print("\n" + to_toml({"model": config.model.model_dump(mode="json")}).lstrip("\n"))


def _show_preset(preset: Preset, tree: dict[str, Any], screen: Screen) -> None:
    if screen.json:
        screen.object({"name": preset.name, "about": preset.about, "path": preset.path, "config": tree})
    else:
        screen.print(preset.path.read_text("utf-8"))


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
