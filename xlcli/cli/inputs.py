"""`xlcli stream --inputs`: scores several files and named pipes at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xlcli.cli.pipe import PORTION, open_source, poll
from xlcli.cli.signals import Stop
from xlcli.errors import ConfigError, DataError, StateError

if TYPE_CHECKING:
    from xlcli.events import StreamStats
    from xlcli.inference import SaveState
    from xlcli.store.state_files import SessionState
    from xlcli.streaming.several import Input

MAX_FILES = 16
"""Maximum number of regular files that are read at a time; the others follow. Named pipes do not wait."""
SCAN_SECONDS = 1.0
"""Time between two looks at the folders."""

TextOf = Callable[[int, Iterator[bytes | None], str, bool], Iterator[bytes | None]]
"""Text of a source, from its descriptor, its portions, its name, and whether it continues a stream."""
OpenStates = Callable[[str | None, str | None, Path], tuple["SessionState | None", "SaveState | None"]]
"""`open_states` of an input, from the names of its state files and its path."""


class InputFiles:
    """Files and named pipes, and all of them in folders, also those that appear later. A stream has its file's name.

    Args:
        paths: Files, named pipes and folders.
        text_of: Text of a source.
        open_states: Opens the state files of an input.
        state_in: Folder with the saved state NAME.state of stream NAME; a stream without one starts anew.
        state_out: Folder in which states are saved.
        stop: Stop request that ends a wait.
        flush_ms: Maximum time of a wait in milliseconds, if any.
        warn: Called with a warning for each file that is not read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        text_of: TextOf,
        open_states: OpenStates,
        *,
        state_in: str | None,
        state_out: str | None,
        stop: Stop,
        flush_ms: int | None,
        warn: Callable[[str], None],
    ) -> None:
        self._paths = paths
        self._text_of = text_of
        self._open_states = open_states
        self._state_in, self._state_out = state_in, state_out
        self._stop = stop
        self._flush_ms = flush_ms
        self._warn = warn
        self._known: dict[str, Path] = {}
        self._refused: set[Path] = set()
        self._pipes: list[Path] = []
        self._files: list[Path] = []  # those whose turn has not come
        self._open: dict[int, bool] = {}  # descriptor to whether it is a regular file
        self._next_scan = 0.0

    def appeared(self) -> Sequence[Input]:
        """Streams that have appeared since the last call, and files whose turn has come."""
        now = time.monotonic()
        if now >= self._next_scan:
            self._next_scan = now + SCAN_SECONDS
            for path in found(self._paths, self._refuse):
                if path.name not in self._known:
                    self._known[path.name] = path
                    (self._pipes if path.is_fifo() else self._files).append(path)
                elif path != (known := self._known[path.name]):
                    self._refuse(path, f"has the same name as {known}")
        n_free = MAX_FILES - sum(self._open.values())
        opened = self._pipes + self._files[:n_free]
        self._pipes, self._files = [], self._files[n_free:]
        return [self._input(path) for path in opened]

    def wait(self) -> None:
        """Waits until an input has bytes, a folder is to be looked at again, or unfinished lines are to be scored."""
        limits = [] if self._flush_ms is None else [self._flush_ms]
        if any(path.is_dir() for path in self._paths):
            limits.append(int(1000 * SCAN_SECONDS))
        poll(dict.fromkeys((*self._open, self._stop.fd), select.POLLIN)).poll(min(limits, default=None))

    def _refuse(self, path: Path, reason: str) -> None:
        """Warns once that a file is not read."""
        if path not in self._refused:
            self._refused.add(path)
            self._warn(f"{path} {reason} and is not read")

    def _input(self, path: Path) -> Input:
        from xlcli.streaming.several import Input

        saved = _state_file(self._state_in, path.name)
        if saved is not None and not Path(saved).exists():
            saved = None
        out = _state_file(self._state_out, path.name)
        return Input(path.name, self._text(path, saved is not None), partial(self._open_states, saved, out, path))

    def _text(self, path: Path, is_continued: bool) -> Iterator[bytes | None]:
        """Text of a file as it arrives."""
        # Opening a named pipe would wait for its writer.
        source = open_source(str(path), os.O_NONBLOCK)
        self._open[source] = stat.S_ISREG(os.fstat(source).st_mode)
        try:
            yield from self._text_of(source, self._portions(source, path.name), path.name, is_continued)
        finally:
            del self._open[source]
            os.close(source)

    def _portions(self, source: int, name: str) -> Iterator[bytes | None]:
        """Bytes of a source, or None if it has none now."""
        ready = poll({source: select.POLLIN})
        while not self._stop():
            data = None
            if ready.poll(0):
                try:
                    with contextlib.suppress(BlockingIOError):
                        data = os.read(source, PORTION)
                except OSError as error:
                    raise DataError(f"cannot read {name}: {error.strerror}.", "Check the path.") from None
            if data == b"":
                return
            yield data


def found(paths: Sequence[Path], refuse: Callable[[Path, str], None] = lambda path, reason: None) -> list[Path]:
    """The paths, with the files and named pipes in a folder in its place, without hidden ones, in alphabetical order.

    Sub-folders, sockets and devices in folders are skipped, broken links refused.
    """
    listed: list[Path] = []
    for given in paths:
        if not given.is_dir():
            listed.append(given)
            continue
        for path in sorted(given.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_file() or path.is_fifo():
                listed.append(path)
            elif path.is_symlink() and not path.exists():
                refuse(path, "is a broken link")
    return listed


def check_inputs(paths: Sequence[Path], state_in: str | None, state_out: str | None) -> list[Path]:
    """The inputs that exist, checked before a model is loaded; makes the folder of states.

    Raises:
        ConfigError: Two inputs have the same name or are the same, or the place for states is no folder.
        DataError: There is no input, or one does not exist.
        StateError: There is no folder of saved states.
    """
    for path in paths:
        if not path.exists():
            raise DataError(f"there is no file {path}.", "Check the path.")
    inputs = found(paths)
    if not inputs:
        raise DataError(f"{paths[0]} has no files.", "Put files or named pipes in it before the start.")
    named: dict[str, Path] = {}
    for path in inputs:
        other = named.setdefault(path.name, path)
        if other is not path and other.resolve() == path.resolve():
            raise ConfigError(f"{path} is given twice.", "Give it, or its folder, once.")
        if other is not path:
            raise ConfigError(f"{other} and {path} have the same name.", "Rename one: output and states use the names.")
    if state_in is not None and not Path(state_in).is_dir():
        raise StateError(f"{state_in} is no folder of saved states.", "With --inputs, give that of --state-out.")
    if state_out is not None:
        place = Path(state_out)
        if place.exists() and not place.is_dir():
            raise ConfigError(f"--state-out {place} is a file.", "With --inputs, give a folder.")
        if any(path.is_dir() and place.resolve() == path.resolve() for path in paths):
            raise ConfigError(f"the states in {place} would be read as inputs.", "Give --state-out another folder.")
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make --state-out {place}: {error.strerror}.", "Choose another folder.") from None
    return inputs


def total(finals: Sequence[StreamStats]) -> StreamStats:
    """Sums over all streams."""
    n_bytes, bits = sum(stats.bytes for stats in finals), sum(stats.bits for stats in finals)
    tokens, seconds = sum(stats.tokens for stats in finals), max(stats.seconds for stats in finals)
    return dataclasses.replace(
        finals[0],
        lines=sum(stats.lines for stats in finals),
        bytes=n_bytes,
        tokens=tokens,
        bits=bits,
        bits_per_byte=bits / n_bytes if n_bytes else 0.0,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        state_bytes=sum(stats.state_bytes for stats in finals),
    )


def _state_file(folder: str | None, name: str) -> str | None:
    return None if folder is None else str(Path(folder) / f"{name}.state")
