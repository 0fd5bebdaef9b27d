"""`xlcli export`: writes a model in the format of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from xlcli.cli.options import option
from xlcli.errors import ConfigError

app = typer.Typer()


@app.command(
    epilog="xlcli export models/SmolLM2-135M -o out/SmolLM2\nxlcli export models/mine -o mine.gguf --format gguf",
)
def export(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="MODEL")],
    out: Annotated[
        str | None,
        option("Model", "-o, --out PATH", "New folder, or GGUF file, to write.", allow_from_autoenv=False),
    ] = None,
    model_format: Annotated[
        Literal["llama", "transfo-xl", "gguf"] | None,
        option("Model", "--format", "Format to write. Default: by the model.", allow_from_autoenv=False),
    ] = None,
    **_: Any,
) -> None:
    """Write a model for transformers or llama.cpp, with the same predictions.

    Refuses a model that the format cannot hold. Importing it again gives the same model.
    """
    from xlcli.cli.prologue import open_screen
    from xlcli.interchange import FORMATS, export_model
    from xlcli.store.discover import find
    from xlcli.text.tokenizers import load_tokenizer

    if out is None:
        raise ConfigError("export needs a path to write.", "Add -o FOLDER, or -o FILE with --format gguf.")
    screen, folder = open_screen(context), find(name)
    screen.wait("exporting")
    try:
        written = export_model(folder, Path(out), name=model_format)
        notices = FORMATS[written].export_notices(load_tokenizer(folder))
    finally:
        screen.clear()
    if screen.json:
        screen.object({"model": folder.name, "out": out, "format": written})
    screen.say(f"{out} written in the format {written}")
    for notice in notices:
        screen.say(notice)
