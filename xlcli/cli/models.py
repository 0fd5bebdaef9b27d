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
from xlcli.config import Tree, WeightEncoding
from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import linked, write_atomic
from xlcli.presets import find_preset, list_presets, read_preset
from xlcli.store.discover import CARD, ModelSummary, bundled_models, find, local_models, summarize
from xlcli.store.layout import HELD_OUT, METRICS, read_config, read_metrics, read_record
from xlcli.store.origin import INIT, TRAIN_FILES, origin_of

_HEADING = ("name", "position", "attention", "params", "bits/byte", "age", "corpus")


class _Models(Group):
    """The command, whose action is `list` if none is named. Options of an action may stand before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args:
            if word in self.commands:
                args.remove(word)
                return super().parse_args(ctx, [word, *args])
        asks_for_help = "-h" in args or "--help" in args
        has_wrong_action = bool(args) and not args[0].startswith("-")
        if not (ctx.resilient_parsing or asks_for_help or has_wrong_action):
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
    screen = call.screen
    local, bundled = local_models(), bundled_models()
    if screen.json:
        screen.object({"local": local, "bundled": bundled, "presets": list_presets()})
        return
    if not local:
        screen.print("No models in ./models yet; make one: xlcli train FILE\n\n")
    for title, group in (("Models in ./models", local), ("Bundled models", bundled)):
        if group:
            rows = table([_HEADING, *map(_row, group)], screen.columns, left=(0, 1, 2, 6), clip=True)
            screen.print(f"{title}:\n{rows}\n")
    models = [*local, *bundled]
    if any(model.scored for model in models):
        screen.print("bits/byte of the validation text, memory as in training\n")
    if any(model.scored is not None and model.scored.is_partial for model in models):
        screen.print("in parentheses: of its beginning; xlcli eval -m NAME scores all of it\n")
    screen.print("Presets for training: xlcli models presets\n")


@app.command("presets", "xlcli models presets", "xlcli models presets --json", about="List presets.")
def presets(call: Call) -> None:
    screen = call.screen
    if screen.json:
        screen.object({"presets": list_presets()})
        return
    others, variants, published = [], [], []
    for preset in list_presets():
        row = (preset.name, preset.about)
        if "max_steps" in read_preset(preset.name).get("train", {}):  # of published architectures only
            published.append(row)
        elif preset.name.startswith("small-"):
            variants.append(row)
        else:
            others.append(row)
    screen.print("Presets, for xlcli train --preset NAME:\n" + table(others, screen.columns, left=(0, 1)))
    screen.print("\nVariants of small, to be compared with it:\n" + table(variants, screen.columns, left=(0, 1)))
    screen.print("\nPublished architectures:\n" + table(published, screen.columns, left=(0, 1)))


@app.command(
    "show", "xlcli models show books", "xlcli models show corpus --plot curve.png", about="Show a model or preset."
)
def show(
    call: Call,
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=options.complete_both)],
    plot: Annotated[
        str | None, plot_option("Output", "Plot the training curve of the model", allow_from_autoenv=False)
    ] = None,
) -> None:
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
        show_preset(name, screen, error)
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
    ]
    origins = _origins(record)
    if origins:
        rows += [("corpus", f"{corpus} (of the last run)"), ("from", origins)]
    else:
        rows.append(("corpus", corpus))
    if summary.bits_per_byte is not None and summary.scored:
        text = describe_scored_text(summary.scored)
        rows.append(("score", f"{summary.bits_per_byte:.4f} bits per byte of the {text}"))
    screen.print(table([row for row in rows if row[1] != "-"], screen.columns, left=(0, 1)) + "\n")

    # How it was made: by its card, else by its record.
    card = folder / CARD
    if card.is_file() and card.stat().st_size < 2**20:
        screen.report(card.read_text("utf-8", "replace"))
    elif record:
        record.pop(TRAIN_FILES, None)  # digests, which say nothing to people
        record.pop(INIT, None)
        screen.report(to_toml({"record": record}).lstrip("\n"))
    screen.print("\n" + to_toml({"model": config.model.model_dump(mode="json")}).lstrip("\n"))


def _origins(record: Tree) -> str:
    """The models that a run started from, the latest first: `tuned; before that: books, small`. Empty without any."""
    names = []
    origin = origin_of(record)
    while origin:
        names.append(origin["model"])
        origin = origin_of(origin)
    if len(names) < 2:
        return "".join(names)
    return f"{names[0]}; before that: {', '.join(names[1:])}"


def show_preset(name: str, screen: Screen, error: CheckpointError) -> None:
    """Prints a preset; if there is none, raises the error, that there is no such model, with a better remedy."""
    presets = {preset.name: preset for preset in list_presets()}
    if name not in presets:
        near = nearest(name, presets)
        remedy = f"Did you mean the preset {near}?" if near else error.remedy
        raise CheckpointError(error.message, remedy) from None
    if screen.json:
        screen.object({**fields(presets[name]), "config": read_preset(name)})
    else:
        screen.print(presets[name].path.read_text("utf-8"))


@app.command(
    "copy",
    "xlcli models copy small my.toml",
    "xlcli models copy books models/books8 --weights int8",
    about="Copy a preset to a file, or a model.\n\n"
    "Copies a preset to a TOML file for editing (-: standard output), or a model to a folder.",
)
def copy(
    call: Call,
    name: Annotated[str, typer.Argument(metavar="PRESET|MODEL", autocompletion=options.complete_both)],
    target: Annotated[str, typer.Argument(metavar="FILE.toml|FOLDER")],
    encoding: options.Weights = None,
) -> None:
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
        remedy = error.remedy
        if any(preset.name == name for preset in list_presets()):
            remedy = f"Copy the preset into a file: xlcli models copy {name} FILE.toml."
        raise CheckpointError(error.message, remedy) from None
    with screen.waiting("copying"):
        from xlcli.store.folder import copy_model

        copy_model(folder, Path(target), encoding)
    made = summarize(Path(target))
    if screen.json:
        screen.object(made)
    texts = [text for text in HELD_OUT.values() if Path(target, text).is_file()]
    command = "xlcli eval" if HELD_OUT["valid"] in texts else "xlcli eval FILE"
    written = f"{target} written, {format_bytes(made.bytes)} in {made.encoding}"
    screen.say(f"{written}; score it: {command} -m {shlex.quote(target)}")
    if texts:
        screen.say(f"it contains text from the corpus: remove {' and '.join(texts)} before you publish it")


def _row(model: ModelSummary) -> tuple[str, ...]:
    """Texts for `_HEADING`."""
    score = number_or_blank(model.bits_per_byte, ".3f")
    if model.scored is not None and model.scored.is_partial:
        score = f"({score})"
    if not score:
        score = "-" if model.finished else "unfinished"
    parameters = "?" if model.parameters is None else compact_number(model.parameters)
    age = "-" if model.bundled else format_age(time.time() - model.modified)
    kind = (model.position or "?", model.attention or "?", parameters)
    return (model.name, *kind, score, age, model.problem or model.corpus or "-")
