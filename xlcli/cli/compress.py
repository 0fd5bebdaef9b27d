"""`xlcli compress`: compresses a text with the predictions of a model."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from xlcli.cli import options, prologue, report
from xlcli.cli.options import option
from xlcli.cli.outputs import check_standard_output
from xlcli.cli.pipe import open_source, portions
from xlcli.cli.render import Screen
from xlcli.cli.signals import Stop, Stopped
from xlcli.coding import Output
from xlcli.errors import ConfigError, DataError
from xlcli.events import Coded, StoppedEarlyError
from xlcli.files import is_pipe, linked, write_atomic

SUFFIX = ".xl"
"""Suffix of compressed texts."""
app = typer.Typer()


@app.command(epilog="xlcli compress chapter.txt\ncat app.log | xlcli compress - -o app.log.xl -m models/app")
def compress(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE|-")],
    model: options.Model = None,
    out: Annotated[
        str | None, option("Output", "-o, --out FILE.xl", "Compressed text; - is standard output. Default: FILE.xl.")
    ] = None,
    **_: Any,
) -> int:
    """Compress a text with the predictions of a model, to the size that eval reports.

    To decompress it, the same model, versions and type of processor are needed.
    """
    config, screen = prologue.begin(context)
    settings = config.compress
    target = out or ("-" if is_pipe(file) else file + SUFFIX)
    texts = [] if file == "-" else [file]
    prologue.check_texts(texts, "xlcli compress -m {} FILE")
    folder = prologue.find_model(context, settings, screen)
    context.params["out"] = check_target(target, screen)
    prologue.check_files(context, [folder, *texts], ["out"])
    source = open_source(file)
    check_standard_output(file)
    with screen.stop() as stop:
        screen.expect_pipes([file])
        loaded, runtime = prologue.load_model(folder, settings, config.runtime, screen)
        from xlcli.coding import workflow
        from xlcli.text.formats import ends_in_crlf

        status = os.fstat(source)
        size = status.st_size if stat.S_ISREG(status.st_mode) else None
        crlf = bool(size) and file != "-" and ends_in_crlf(filter(None, portions(open_source(file), stop, None)))
        data = portions(source, stop, None)
        results = workflow.compress(loaded, data, settings, runtime, size=size, crlf=crlf, stop=stop)
        write(results, target, screen, stop, model=loaded.name, file=file, force=context.params["force"])
    return 0


def check_target(target: str, screen: Screen) -> str:
    """The name of the output, if something can be written there.

    Raises:
        ConfigError: It is a terminal, or standard output that `--json` uses.
    """
    if target == "-" and screen.json:
        raise ConfigError("--json prints on standard output, as the result does.", "Add -o FILE.")
    if target == "-" and os.isatty(1):
        raise ConfigError("the result is not text for a terminal.", "Add -o FILE, or redirect standard output.")
    return target


def write(
    results: Iterable[Output], target: str, screen: Screen, stop: Stop, *, model: str, file: str, force: bool
) -> None:
    """Writes the bytes of a workflow, to a file all or nothing, and shows its events.

    Raises:
        ConfigError: Another process has written the file, or is writing it, and there is no `force`.
        Stopped: A signal ended the workflow.
    """
    done: list[Coded] = []

    def pieces() -> Iterator[bytes]:
        for result in results:
            if isinstance(result, Coded):
                done.append(result)
            elif not screen.shows(result):
                yield result

    with ending(stop):
        if target == "-":
            for piece in pieces():
                screen.write(piece)
        else:
            write_atomic(linked(Path(target)), pieces(), is_new=not force)
    screen.clear()
    [coded] = done
    n_bytes = max(1, coded.bytes)
    bits_per_byte = 8 * coded.compressed_bytes / n_bytes if coded.bytes else 0.0
    if screen.json:
        figures = {**report.fields(coded), "bits_per_byte": bits_per_byte}
        screen.object({"model": model, "file": file, "out": target, **figures})
    else:
        sizes = f"text {report.size(coded.bytes)}, compressed {report.size(coded.compressed_bytes)}"
        surprisal = f"{coded.bits / n_bytes:.3f} by the model"
        speed = f"{coded.seconds:.0f} s, {report.size(coded.bytes / max(coded.seconds, 1e-9))}/s"
        screen.say(f"{sizes}: {bits_per_byte:.3f} bits per byte, {surprisal}; {speed}")


@contextlib.contextmanager
def ending(stop: Stop) -> Iterator[None]:
    """Context in which the end of the input after a signal is no error.

    Raises:
        Stopped: A signal ended the work.
    """
    try:
        yield
    except (StoppedEarlyError, DataError):
        if not stop():
            raise
        raise Stopped(stop.exit_code) from None
