"""`xlcli models`: lists, shows and copies presets and models."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from xlcli.cli import options
from xlcli.cli.command import App, Call
from xlcli.cli.help import CONTEXT, Group
from xlcli.cli.objects import fields
from xlcli.cli.options import plot_option
from xlcli.cli.outputs import PICTURE
from xlcli.cli.plot import draw_training
from xlcli.cli.quantities import compact_number, format_age, format_bytes, number_or_blank
from xlcli.cli.render import Screen
from xlcli.cli.run_report import describe_scored_text
from xlcli.cli.settings import to_toml
from xlcli.cli.terminal import table
from xlcli.cli.usage import nearest
from xlcli.config import WeightEncoding
from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import linked, write_atomic
from xlcli.presets import find_preset, list_presets, read_preset
from xlcli.store.discover import CARD, ModelSummary, bundled_models, find, local_models, summarize
from xlcli.store.layout import HELD_OUT, METRICS, read_config, read_metrics, read_record

_HEADING = ("name", "position", "attention", "params", "bits/byte", "age", "corpus")


class _Models(Group):
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


app = App(
    name="models",
    cls=_Models,
    context_settings=CONTEXT,
    help=options.COMMANDS["models"],
    epilog="xlcli models\nxlcli models copy small my.toml",
)


@app.command("list", "xlcli models list", "xlcli models list --json", about="List your models and the bundled ones.")
def list_models(call: Call) -> None:
    """Lists models."""
    screen, local, bundled = call.screen, local_models(), bundled_models()
    if screen.json:
        screen.object({"local": local, "bundled": bundled, "presets": list_presets()})
        return
    if not local:
        screen.print("No models in ./models yet; make one: xlcli train FILE\n\n")
    for title, models in (("Models in ./models", local), ("Bundled models", bundled)):
        if models:
            rows = table([_HEADING, *map(_row, models)], screen.columns, left=(0, 1, 2, 6), clip=True)
            screen.print(f"{title}:\n{rows}\n")
    if any(model.scored for model in (*local, *bundled)):
        screen.print("bits/byte of the validation text, memory as in training\n")
    if any(map(_is_partial, (*local, *bundled))):
        screen.print("* of its beginning: xlcli models show NAME\n")
    screen.print("Presets for training: xlcli models presets\n")


@app.command("presets", "xlcli models presets", "xlcli models presets --json", about="List presets.")
def presets(call: Call) -> None:
    """Lists presets."""
    screen, every = call.screen, list_presets()
    if screen.json:
        screen.object({"presets": every})
        return
    # Only presets of published architectures set `train.max_steps`.
    published = [preset for preset in every if "max_steps" in read_preset(preset.name).get("train", {})]
    variants = [preset for preset in every if preset.name.startswith("small-")]
    others = [preset for preset in every if preset not in published and preset not in variants]
    lists = (
        ("Presets, for xlcli train --preset NAME", others),
        ("Variants of small, to be compared with it", variants),
        ("Published architectures", published),
    )
    tables = [
        f"{title}:\n" + table([(preset.name, preset.about) for preset in group], screen.columns, left=(0, 1))
        for title, group in lists
    ]
    screen.print("\n".join(tables))


@app.command(
    "show",
    "xlcli models show books",
    "xlcli models show corpus --plot curve.png",
    about="Show a model or preset.",
)
def show(
    call: Call,
    name: Annotated[str, typer.Argument(metavar="NAME")],
    plot: Annotated[
        str | None, plot_option("Output", "Plot the training curve of the model", allow_from_autoenv=False)
    ] = None,
) -> None:
    """Shows a model or preset."""
    screen = call.screen
    if plot is not None:
        call.check_files([], {"plot": (plot, PICTURE)})
        folder = find(name)
        if not draw_training(plot, read_metrics(folder), folder.name):
            raise CheckpointError(f"{folder} has no {METRICS} with a training curve.", "Choose a model trained here.")
        screen.say(f"plot written to {plot}")
    try:
        folder = find(name)
    except CheckpointError as error:
        presets = {preset.name: preset for preset in list_presets()}
        preset = presets.get(name)
        if preset is None:
            near = nearest(name, presets)
            remedy = near and f"Did you mean the preset {near}?"
            raise CheckpointError(error.message, remedy or error.remedy) from None
        if screen.json:
            screen.object({**fields(preset), "config": read_preset(name)})
        else:
            screen.print(preset.path.read_text("utf-8"))
        return
    summary, record = summarize(folder), read_record(folder)
    config = read_config(folder)
    if screen.json:
        screen.object({**fields(summary), "record": record, "config": config.model_dump(mode="json")})
        return
    position, attention, params, _score, age, corpus = _row(summary)[1:]
    rows = [
        ("model", str(folder)),
        ("kind", f"{attention} attention, position encoding {position}"),
        ("weights", f"{params} parameters, {format_bytes(summary.bytes)} in {summary.encoding or '?'}"),
        ("age", age),
        ("corpus", corpus),
    ]
    if summary.bits_per_byte is not None and summary.scored:
        rows.append(
            ("score", f"{summary.bits_per_byte:.4f} bits per byte of the {describe_scored_text(summary.scored)}")
        )
    screen.print(table([row for row in rows if row[1] != "-"], screen.columns, left=(0, 1)) + "\n")
    card = folder / CARD
    if card.is_file() and card.stat().st_size < 2**20:
        screen.markdown(card.read_text("utf-8", "replace"))
    elif record:
        screen.print(to_toml({"record": record}).lstrip("\n"))
    screen.print("\n" + to_toml({"model": config.model.model_dump(mode="json")}).lstrip("\n"))


@app.command(
    "copy",
    "xlcli models copy small my.toml",
    "xlcli models copy books models/books8 --weights int8",
    about="Copy a preset to a file, or a model.\n\n"
    "Copies a preset to a TOML file for editing (-: standard output), or a model to a folder.",
)
def copy(
    call: Call,
    name: Annotated[str, typer.Argument(metavar="PRESET|MODEL")],
    target: Annotated[str, typer.Argument(metavar="FILE.toml|FOLDER")],
    encoding: options.Weights = None,
) -> None:
    """Copies a preset or a model."""
    screen = call.screen
    if not (target == "-" or target.endswith(".toml")):
        _copy_model(name, target, encoding, screen)
        return
    if encoding:
        raise ConfigError("--weights applies to copies of models only.", "Type xlcli models copy MODEL FOLDER.")
    text = find_preset(name).path.read_bytes()
    if target == "-":
        screen.write(text)
        return
    if Path(target).exists():
        raise ConfigError(f"{target} exists.", "Choose another name, or remove it first.")
    write_atomic(linked(Path(target)), text)
    screen.say(f"{target} written; train with it: xlcli train FILE --config {shlex.quote(target)}")


def _copy_model(name: str, target: str, encoding: WeightEncoding | None, screen: Screen) -> None:
    try:
        folder = find(name)
    except CheckpointError as error:
        is_preset = any(preset.name == name for preset in list_presets())
        remedy = f"Copy the preset into a file: xlcli models copy {name} FILE.toml." if is_preset else error.remedy
        raise CheckpointError(error.message, remedy) from None
    with screen.waiting("copying"):
        from xlcli.store.folder import copy_model

        copy_model(folder, Path(target), encoding)
    made = summarize(Path(target))
    if screen.json:
        screen.object(made)
    command = f"xlcli eval -m {shlex.quote(target)}"
    screen.say(f"{target} written, {format_bytes(made.bytes)} in {made.encoding}; score it: {command}")
    if texts := [text for text in HELD_OUT.values() if Path(target, text).is_file()]:
        screen.say(f"it contains text from the corpus: remove {' and '.join(texts)} before you publish it")


def _is_partial(model: ModelSummary) -> bool:
    return model.scored is not None and model.scored.bytes < model.scored.of_bytes


def _row(model: ModelSummary) -> tuple[str, ...]:
    """Texts for `_HEADING`."""
    score = number_or_blank(model.bits_per_byte, ".3f") + "*" * _is_partial(model)
    return (
        model.name,
        model.position or "?",
        model.attention or "?",
        compact_number(model.parameters) if model.parameters is not None else "?",
        score or {True: "-"}.get(model.finished, "unfinished"),
        "-" if model.bundled else format_age(time.time() - model.modified),
        model.problem or model.corpus or "-",
    )
