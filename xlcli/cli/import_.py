"""`xlcli import`: makes a model folder from a model of another program."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from xlcli.cli import options, report
from xlcli.cli.options import option

app = typer.Typer()


@app.command(
    "import",
    epilog="xlcli import downloads/SmolLM2-135M\nxlcli import downloads/gpt2 -o models/gpt2 --weights int8",
)
def import_(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE")],
    out: Annotated[
        str | None,
        option("Model", "-o, --out FOLDER", "Folder of the model. Default: models/NAME.", allow_from_autoenv=False),
    ] = None,
    model_format: options.Format = None,
    encoding: options.Weights = None,
    **_: Any,
) -> None:
    """Import a model of another program, a folder or file that you have downloaded.

    Nothing in it is executed. docs/import.md lists the formats, and what is exact.
    """
    from xlcli.cli.prologue import open_screen
    from xlcli.cli.terminal import table
    from xlcli.interchange import import_model
    from xlcli.store.discover import LOCAL, summarize
    from xlcli.store.layout import read_config

    screen, path = open_screen(context), Path(source)
    name = Path(os.path.realpath(path))
    found = path.stem if path.suffix == ".gguf" else name.name if name.is_dir() else name.parent.name
    target = Path(out) if out else Path(LOCAL) / found
    screen.wait("importing")
    try:
        about = import_model(path, target, name=model_format, encoding=encoding)
    finally:
        screen.clear()
    for notice in about["notices"]:
        screen.say(notice, "warning")
    made, config = summarize(target), read_config(target)
    if screen.json:
        screen.object({**report.fields(made), "imported": about, "config": config.model_dump(mode="json")})
        return
    model, train = config.model, config.train
    size, is_ids = model.vocab_size or 0, about["tokenizer"] == "ids"
    heads = f"{model.attention.n_heads} heads of {model.head_dim}"
    weights = f"{report.amount(made.parameters or 0)} parameters, {report.size(made.bytes)} in {made.encoding}"
    rows = [
        ("model", f"{target}, from {source} ({about['format']})"),
        ("weights", weights),
        ("network", f"{report.counted(model.n_layers, 'layer')} of width {model.dim:,}, {heads}"),
        ("kind", f"{made.attention} attention, position encoding {made.position}"),
        ("memory", model.describe_memory(train.mem_len, train.segment_len)),
        ("text", f"{'token ids, without a tokenizer' if is_ids else about['tokenizer']}, vocabulary of {size:,}"),
    ]
    if (bits := about["check_bits"]) is not None:
        rows.append(("check", f"{bits:.2f} bits per token of a short text ({math.log2(size):.2f} by chance)"))
    screen.print(table(rows, screen.columns, left=(0, 1)))
    word = shlex.quote(str(target))
    screen.print(f"\nNext:\n  xlcli eval FILE -m {word}\n  xlcli generate -m {word}\n")
