"""`xlcli decompress`: restores a text that `xlcli compress` compressed."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from xlcli.cli import prologue
from xlcli.cli.compress import SUFFIX, check_target, ending, write
from xlcli.cli.options import option
from xlcli.cli.outputs import check_standard_output
from xlcli.cli.pipe import open_source, portions
from xlcli.coding import FileReader
from xlcli.config import OnlineConfig
from xlcli.errors import ConfigError, DataError
from xlcli.store.discover import find_maker
from xlcli.store.layout import read_config

app = typer.Typer()


@app.command(epilog="xlcli decompress chapter.txt.xl\nxlcli decompress app.log.xl -o - | tail")
def decompress(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE.xl|-")],
    model: Annotated[
        list[str] | None, option("Model", "-m, --model NAME|FOLDER", "Model. Default: the one that the file names.")
    ] = None,
    out: Annotated[
        str | None, option("Output", "-o, --out FILE", "Text; - is standard output. Default: the name without .xl.")
    ] = None,
    **_: Any,
) -> int:
    """Restore a compressed text, byte for byte; refuse a file that this machine would restore wrongly."""
    config, screen = prologue.begin(context)
    texts = [] if file == "-" else [file]
    prologue.check_texts(texts, "xlcli decompress -m {} FILE.xl")
    if out is None and file != "-" and not file.endswith(SUFFIX):
        raise ConfigError(f"{file} has no suffix {SUFFIX} to leave out.", "Add -o FILE.")
    target = out or ("-" if file == "-" else file.removesuffix(SUFFIX))
    context.params["out"] = check_target(target, screen) if screen.json else target
    source = open_source(file)
    check_standard_output(file)
    with screen.stop() as stop:
        screen.expect_pipes([file])
        reader = FileReader(portions(source, stop, None), "standard input" if file == "-" else file)
        with ending(stop):
            header = reader.header()
        context.params["model"] = model or [str(find_maker(header.model, reader.name))]
        given, n_cpus = config.runtime, os.cpu_count() or 1
        if given.threads is None and header.threads > n_cpus:
            raise DataError(
                f"{reader.name} was compressed with {header.threads:,} threads, but this machine has {n_cpus:,} CPUs.",
                f"If you trust it, add --threads {header.threads}.",
            )
        folder = prologue.find_model(context, OnlineConfig(), screen)
        try:
            header.settings.check_model(read_config(folder).model)
        except ConfigError as error:
            raise DataError(
                f"{reader.name} was compressed with another model than {folder.name}: {error.message}",
                "Give the folder of that model: -m FOLDER.",
            ) from None
        prologue.check_files(context, [folder, *texts], ["out"])
        made = {"threads": given.threads or header.threads}
        made |= {name: getattr(header, name) for name in ("device", "dtype") if getattr(given, name) == "auto"}
        machine = given.model_copy(update=made)
        loaded, runtime = prologue.load_model(folder, header.settings, machine, screen)
        from xlcli.coding import workflow

        results = workflow.decompress(loaded, header, reader, runtime, stop=stop)
        write(results, target, screen, stop, model=loaded.name, file=file, force=context.params["force"])
    return 0
