"""`xlcli import` and `xlcli export`: models of other programs."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from xlcli.cli import options
from xlcli.cli.command import App, Call
from xlcli.cli.objects import fields
from xlcli.cli.options import option
from xlcli.cli.quantities import approximate_count, compact_number, format_bytes
from xlcli.cli.score_report import describe_context
from xlcli.cli.terminal import table
from xlcli.errors import ConfigError
from xlcli.store.discover import LOCAL, find, summarize
from xlcli.store.layout import read_config

app = App()


@app.command(
    "import", "xlcli import downloads/SmolLM2-135M", "xlcli import downloads/gpt2 -o models/gpt2 --weights int8"
)
def import_(
    call: Call,
    source: Annotated[str, typer.Argument(metavar="SOURCE")],
    out: Annotated[
        str | None,
        option("Model", "-o, --out FOLDER", "Write to this folder. Default: models/NAME.", allow_from_autoenv=False),
    ] = None,
    model_format: options.Format = None,
    encoding: options.Weights = None,
) -> None:
    from xlcli.interchange import import_model

    screen, path = call.screen, Path(source)
    place = Path(os.path.realpath(path))
    name = place.name if place.is_dir() else place.parent.name
    if path.suffix == ".gguf":
        name = path.stem
    target = Path(out or Path(LOCAL) / name)
    with screen.waiting("importing"):
        about = import_model(path, target, name=model_format, encoding=encoding, show=screen.progress)
    for notice in about["notices"]:
        screen.say(notice, "warning")

    word, meant = shlex.quote(str(target)), find(str(target))
    if not target.samefile(meant):  # a name alone is looked for in models/ first
        screen.say(f"-m {word} is the model in {meant}; the new one is -m ./{word}", "warning")
        word = f"./{word}"
    made, config = summarize(target), read_config(target)
    if screen.json:
        screen.object({**fields(made), "imported": about, "config": config.model_dump(mode="json")})
        return
    model, train = config.model, config.train
    size = model.vocab_size or 0
    tokenizer = about["tokenizer"]
    if tokenizer == "ids":
        tokenizer = "token ids, without a tokenizer"
    heads = f"{model.attention.n_heads} heads of {model.head_dim}"
    weights = f"{compact_number(made.parameters or 0)} parameters, {format_bytes(made.bytes)} in {made.encoding}"
    rows = [
        ("model", f"{target}, from {source} ({about['format']})"),
        ("weights", weights),
        ("network", f"{approximate_count(model.n_layers, 'layer')} of width {model.dim:,}, {heads}"),
        ("kind", f"{made.attention} attention, position encoding {made.position}"),
        ("context", describe_context(model, train.mem_len, train.segment_len)),
        ("text", f"{tokenizer}, vocabulary of {size:,}"),
    ]
    bits = about["check_bits"]
    if bits is not None:
        rows.append(("check", f"{bits:.2f} bits per token of a short text ({math.log2(size):.2f} by chance)"))
    screen.print(table(rows, screen.columns, left=(0, 1)))
    screen.print(f"\nNext:\n  xlcli eval FILE -m {word}\n  xlcli generate -m {word}\n")


@app.command(
    "export", "xlcli export models/SmolLM2-135M -o out/SmolLM2", "xlcli export models/mine -o mine.gguf --format gguf"
)
def export(
    call: Call,
    name: Annotated[str, typer.Argument(metavar="MODEL", autocompletion=options.complete_models)],
    out: Annotated[
        str | None,
        option("Model", "-o, --out PATH", "Write to this new folder or GGUF file.", allow_from_autoenv=False),
    ] = None,
    model_format: Annotated[
        Literal["llama", "gguf"] | None,
        option("Model", "--format", "Write this format. Default: by the name of PATH.", allow_from_autoenv=False),
    ] = None,
) -> None:
    from xlcli.interchange import export_model

    if out is None:
        raise ConfigError("export needs a path to write.", "Add -o FOLDER, or -o FILE with --format gguf.")
    screen, folder = call.screen, find(name)
    with screen.waiting("exporting"):
        written, notices = export_model(folder, Path(out), name=model_format)
    if screen.json:
        screen.object({"model": folder.name, "out": out, "format": written})
    screen.say(f"{out} written in the format {written}")
    for notice in notices:
        screen.say(notice)
