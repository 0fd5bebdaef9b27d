"""Outputs of a command: sinks of events, and files, which are checked before its work."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from xlcli.cli.signals import handling
from xlcli.errors import ConfigError
from xlcli.events import Event
from xlcli.files import check_writable, identity, linked, replacing
from xlcli.store.discover import is_state_file
from xlcli.store.layout import METRICS, is_model

_OTHER = "Choose another file."


class Kind(NamedTuple):
    """What an option writes: the suffixes of such files, which say their format; without any, all names will do."""

    suffixes: tuple[str, ...] = ()


PARQUET = ".parquet"
LIST = Kind((".csv", ".tsv", ".jsonl", PARQUET))
TABLE = Kind((".csv",))
PAGE = Kind((".html",))
PICTURE = Kind((".png", ".svg", ".pdf"))
STATE = Kind()


def check_outputs(outputs: Mapping[str, tuple[str | None, Kind]], inputs: Iterable[Path]) -> None:
    """Checks, before the work of a command, that each of its outputs can be written and destroys nothing of value.

    `outputs` has, by parameter, the name of a file, if one was given, and its kind. An existing file is replaced unless
    a stream or another option uses it, or it is a saved state, which only a state replaces, or a training curve:
    `ConfigError` for these, folders, read-only files, other suffixes, missing packages; `ResourceError` on a full disk.
    """
    uses = dict.fromkeys(_identities((), 1, 2), "the output of this command")
    uses |= dict.fromkeys(_identities(inputs, 0), "an input of this command")
    options: dict[Path, str] = {}  # of the outputs so far, by place, since not all exist yet
    for parameter, (name, kind) in outputs.items():
        if name is None:
            continue
        option = f"--{parameter.replace('_', '-')}"
        path = Path(name)
        _check_kind(option, path, kind)
        if name == "-":  # standard output, which has no suffix and replaces nothing
            _check_place(option, name, path, options)
            continue
        status = _status(option, name)
        is_file_or_folder = status is None or stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
        if not is_file_or_folder and kind is not STATE:  # a pipe or device takes all else, also of several options
            continue
        _check_suffix(option, path, kind)
        _check_place(option, name, path.resolve(), options)
        check_writable(linked(path))  # refuses a folder, too
        if status is None:
            continue
        file = identity(status)  # is the same for all names that links give to a file
        if file in uses:
            raise ConfigError(f"{option} {path} is also {uses[file]}.", _OTHER)
        _check_replaced(option, path, kind, status)
        uses[file] = f"the output of {option}"


def _check_place(option: str, name: str, place: Path, options: dict[Path, str]) -> None:
    """`ConfigError` if one of the earlier `options` writes to this place, too; else adds this one to them."""
    earlier = options.setdefault(place, option)
    if earlier != option:
        raise ConfigError(f"{option} {name} is also the output of {earlier}.", _OTHER)


def _check_kind(option: str, path: Path, kind: Kind) -> None:
    """`ConfigError` if an output needs a package that is missing, or is a page for standard output."""
    if kind is PICTURE and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib.", 'Install it: pip install "xlcli[plot]".')
    if path.suffix.lower() == PARQUET and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{option} {path} needs pyarrow.", 'Install it: pip install "xlcli[parquet]".')
    if kind in (PAGE, PICTURE) and str(path) == "-":
        problem = f"{option} needs a file; standard output holds the scores."
        raise ConfigError(problem, f"Name it, for example {option} scores{kind.suffixes[0]}.")


def _status(option: str, name: str) -> os.stat_result | None:
    """Status of a file, or None if there is none; `ConfigError` if no file can have this name."""
    try:
        return Path(name).stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot write {option} {name}: {reason}.", _OTHER) from None


def _check_suffix(option: str, path: Path, kind: Kind) -> None:
    """`ConfigError` if files of this kind have suffixes, and this name has none of them."""
    if not kind.suffixes or path.suffix.lower() in kind.suffixes:
        return
    *others, legal = kind.suffixes
    if others:
        legal = f"{', '.join(others)} or {legal}"
    raise ConfigError(f"{option} {path} does not end in {legal}.", f"Name it {path.stem}{kind.suffixes[0]}.")


def _check_replaced(option: str, path: Path, kind: Kind, status: os.stat_result) -> None:
    """`ConfigError` if a file that exists may not be replaced by one of this kind."""
    if status.st_mode & 0o222 == 0:
        raise ConfigError(f"{option} {path} is read-only.", _OTHER)
    if kind is STATE and status.st_size and not is_state_file(path):
        raise ConfigError(f"{option} {path} exists and is not a saved state.", _OTHER)
    if kind is not STATE and is_state_file(path):
        raise ConfigError(f"{option} {path} is a saved state.", _OTHER)
    if path.name == METRICS and is_model(path.parent):
        raise ConfigError(f"{option} {path} is the training curve of a model.", _OTHER)


@contextmanager
def output_file(path: Path) -> Iterator[Callable[[bytes], object]]:
    """Function that writes an output in pieces, at the end in its place."""
    if path.exists() and not path.is_file():  # a device, or a pipe, which waits for its reader until a signal
        with handling(signal.SIG_DFL):
            out = path.open("wb")
        with out:
            yield out.write
    else:
        with replacing(linked(path)) as (write, _):
            yield write


def write_output(path: Path, pieces: Iterable[bytes]) -> None:
    with output_file(path) as write:
        for piece in pieces:
            write(piece)


class Sink:
    """Takes the events of a workflow but notices and progress.

    It ends by `close`, also if the workflow was stopped, or by `discard` after an error.
    """

    def add(self, event: Any) -> None: ...

    def close(self) -> None: ...

    def discard(self) -> None: ...


class Kept(Sink):
    """Keeps the events of one class for `finish`, which gets them at the end of the workflow, unless there are none."""

    def __init__(self, kind: type[Event], finish: Callable[[list[Any]], object]) -> None:
        self._events: list[Event] = []
        self._kind, self._finish = kind, finish

    def add(self, event: Any) -> None:
        if isinstance(event, self._kind):
            self._events.append(event)

    def close(self) -> None:
        if self._events:
            self._finish(self._events)


def check_standard_output(name: str) -> None:
    """`ConfigError` if standard output is the regular file that is read (`-`: standard input), which would grow."""
    text = _identities((), 0) if name == "-" else _identities([Path(name)])
    is_read = not text.isdisjoint(_identities((), 1))
    if is_read:
        raise ConfigError("standard output is the file that is read.", "Redirect it to another file.")


def _identities(paths: Iterable[Path], *descriptors: int) -> set[tuple[int, int]]:
    """Device and inode of regular files: the paths, files in folders among them, and open descriptors."""
    files: list[Path | int] = [*descriptors]
    for path in paths:
        files.append(path)
        with suppress(OSError):  # it is no folder, or reading it reports the reason
            files += path.iterdir()
    identities = set()
    for file in files:
        with suppress(OSError):
            status = os.stat(file)  # noqa: PTH116 - also of a descriptor
            if stat.S_ISREG(status.st_mode):
                identities.add(identity(status))
    return identities
