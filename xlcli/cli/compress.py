"""`xlcli compress` and `xlcli decompress`: texts compressed with the predictions of a model."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from xlcli.cli import options, prologue, report
from xlcli.cli.help import App
from xlcli.cli.options import option
from xlcli.cli.outputs import NEW, FileSink, check_standard_output
from xlcli.cli.pipe import label, open_source, portions
from xlcli.cli.render import Screen
from xlcli.cli.signals import Stop, Stopped
from xlcli.coding import FileReader, Header
from xlcli.config import OnlineConfig, RuntimeConfig
from xlcli.errors import ConfigError, DataError
from xlcli.events import Coded, StoppedEarlyError
from xlcli.files import is_pipe
from xlcli.store.discover import find_maker
from xlcli.store.layout import read_config

SUFFIX = ".xl"
"""Suffix of compressed texts."""
app = App()


@app.command("compress", "xlcli compress chapter.txt", "cat app.log | xlcli compress - -o app.log.xl -m models/app")
def compress(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE|-")],
    model: options.Model = None,
    out: Annotated[
        str | None,
        option("Output", "-o, --out FILE.xl", "Write the compressed text here (-: standard output). Default: FILE.xl."),
        NEW,
    ] = None,
    **_: Any,
) -> int:
    """Compresses a text."""
    config, screen = prologue.begin(context)
    settings = config.compress
    target = out or ("-" if is_pipe(file) else file + SUFFIX)
    texts = prologue.check_texts([file], "xlcli compress -m {} FILE")
    folder = prologue.find_model(context, settings, screen)
    if target == "-" and os.isatty(1):
        raise ConfigError("the result is not text for a terminal.", "Add -o FILE, or redirect standard output.")
    check_target(context, target, screen)
    prologue.check_files(context, [folder, *texts])
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
        with ending(stop):
            screen.drive(results, _Result(context, target, screen, loaded.name))
    return 0


@app.command("decompress", "xlcli decompress chapter.txt.xl", "xlcli decompress app.log.xl -o - | tail")
def decompress(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE.xl|-")],
    model: Annotated[
        list[str] | None,
        option("Model", "-m, --model NAME|FOLDER", "Use this model. Default: the one named in the file."),
    ] = None,
    out: Annotated[
        str | None,
        option("Output", "-o, --out FILE", "Write the text here (-: standard output). Default: the name without .xl."),
        NEW,
    ] = None,
    **_: Any,
) -> int:
    """Restores a text."""
    config, screen = prologue.begin(context)
    texts = prologue.check_texts([file], "xlcli decompress -m {} FILE.xl")
    if out is None and file != "-" and not file.endswith(SUFFIX):
        raise ConfigError(f"{file} does not end in {SUFFIX}, so the output has no name.", "Add -o FILE.")
    target = out or ("-" if file == "-" else file.removesuffix(SUFFIX))
    check_target(context, target, screen)
    source = open_source(file)
    check_standard_output(file)
    with screen.stop() as stop:
        screen.expect_pipes([file])
        reader = FileReader(portions(source, stop, None), label(file))
        with ending(stop):
            header = reader.header()
        context.params["model"] = model or [str(find_maker(header.model, reader.name))]
        folder = prologue.find_model(context, OnlineConfig(), screen)
        try:
            header.settings.check_model(read_config(folder).model)
        except ConfigError as error:
            raise DataError(
                f"{reader.name} was not compressed with model {folder.name}: {error.message}",
                "Give the folder of that model: -m FOLDER.",
            ) from None
        prologue.check_files(context, [folder, *texts])
        machine = machine_of(header, reader.name, config.runtime)
        loaded, runtime = prologue.load_model(folder, header.settings, machine, screen)
        from xlcli.coding import workflow

        results = workflow.decompress(loaded, header, reader, runtime, stop=stop)
        with ending(stop):
            screen.drive(results, _Result(context, target, screen, loaded.name))
    return 0


def machine_of(header: Header, name: str, given: RuntimeConfig) -> RuntimeConfig:
    """The given machine, with the threads, device and number type with which a text was compressed where they are open.

    Raises:
        DataError: It was compressed with more threads than this machine has.
    """
    n_cpus = os.cpu_count() or 1
    if given.threads is None and header.threads > n_cpus:
        raise DataError(
            f"{name} was compressed with {header.threads:,} threads, but this machine has {n_cpus:,} CPUs.",
            f"If you trust it, add --threads {header.threads}.",
        )
    made: dict[str, Any] = {"threads": given.threads or header.threads}
    made |= {name: getattr(header, name) for name in ("device", "dtype") if getattr(given, name) == "auto"}
    return given.model_copy(update=made)


def check_target(context: typer.Context, target: str, screen: Screen) -> None:
    """Sets the parameter `out`; `ConfigError` if that is standard output, which `--json` uses."""
    if target == "-" and screen.json:
        raise ConfigError("--json and the result would both go to standard output.", "Add -o FILE.")
    context.params["out"] = target


class _Result(FileSink):
    """Writes the bytes of a workflow, to a file all or nothing, and reports its end."""

    def __init__(self, context: typer.Context, target: str, screen: Screen, model: str) -> None:
        super().__init__(target, screen.write, is_new=not context.params["force"])
        self._names = {"model": model, "file": context.params["file"], "out": target}
        self._screen = screen

    def add(self, event: bytes | Coded) -> None:
        if isinstance(event, bytes):
            self.write(event)
            return
        self.save()
        self._screen.clear()
        n_bytes = max(1, event.bytes)
        bits_per_byte = 8 * event.compressed_bytes / n_bytes * (event.bytes > 0)
        if self._screen.json:
            self._screen.object({**self._names, **report.fields(event), "bits_per_byte": bits_per_byte})
            return
        sizes = f"text {report.size(event.bytes)}, compressed {report.size(event.compressed_bytes)}"
        surprisal = f"{event.bits / n_bytes:.3f} by the model"
        speed = f"{event.seconds:.0f} s, {report.size(event.bytes / max(event.seconds, 1e-9))}/s"
        self._screen.say(f"{sizes}: {bits_per_byte:.3f} bits per byte, {surprisal}; {speed}")


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
