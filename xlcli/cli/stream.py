"""`xlcli stream`: scores text as it arrives."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlcli.cli import options, prologue, report
from xlcli.cli.help import App
from xlcli.cli.options import option
from xlcli.cli.outputs import Sink, check_standard_output
from xlcli.cli.page import Page
from xlcli.cli.pipe import followed, label, open_source, portions
from xlcli.cli.render import Screen
from xlcli.cli.tables import Table, form_of
from xlcli.config import StreamConfig
from xlcli.errors import ConfigError
from xlcli.events import Event, LineScore, Row, StreamStats, TokenScore, WordScore

if TYPE_CHECKING:
    from xlcli.inference import SaveState
    from xlcli.store.folder import LoadedModel
    from xlcli.store.state_files import SessionState
    from xlcli.text.follow import FollowedFile

app = App()


Follow = Annotated[
    bool,
    option(
        "Text",
        "--follow",
        "Wait for text appended to FILE, across rotations; continue where --state stopped.",
        allow_from_autoenv=False,
    ),
]
FromEnd = Annotated[
    bool, option("Text", "--from-end", "With --follow: begin at the end of FILE, unless --state exists.")
]
NEEDS = {
    "columns": ["emit=tokens", "json"],
    "split_punctuation": ["emit=words"],
    "save_every": ["state|state_out"],
    "from_end": ["follow"],
}


@app.command("stream", "cat book.txt | xlcli stream", "xlcli stream app.log --follow --state log.state --json")
def stream(
    context: typer.Context,
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE]")] = None,
    model: options.Model = None,
    follow: Follow = False,
    from_end: FromEnd = False,
    state: options.State = None,
    state_in: options.StateIn = None,
    state_out: options.StateOut = None,
    html: options.Html = None,
    dry_run: options.DryRun = False,
    **_: Any,
) -> int:
    """Scores text as it arrives."""
    config, screen = prologue.begin(context, NEEDS, excludes={"state": ["state_in", "state_out"]})
    settings, name = config.stream, (files or ["-"])[0]
    if files and len(files) > 1:
        raise ConfigError("stream reads one file, or standard input.", "Join files first: cat FILE... | xlcli stream.")
    if settings.save_every is None and state:
        settings = settings.model_copy(update={"save_every": 60.0})
    if follow and (name == "-" or (os.path.exists(name) and not os.path.isfile(name))):  # noqa: PTH110, PTH113
        raise ConfigError("--follow needs a regular file.", "Name a file. A pipe is read until it ends.")
    texts = [name] if follow else prologue.check_texts([name], "xlcli stream -m {}")  # what is followed is waited for
    folder = prologue.find_model(context, settings, screen)
    prologue.check_files(context, [folder, *texts])
    if dry_run:
        is_endless = follow or name == "-"
        prologue.print_plan(folder, settings, screen, batch_size=1, action=f"scores {name}", is_endless=is_endless)
        return 0
    check_standard_output(name)
    log, source = None, None
    if follow:
        log = Path(os.path.abspath(name))  # noqa: PTH100
    else:
        source = open_source(name)
    with screen.stop() as stop:
        screen.expect_pipes([name])
        loaded, runtime, resume, save = prologue.open_model(context, folder, settings, config.runtime, screen, log)
        from xlcli import streaming

        if log is None:
            data = portions(source or 0, stop, settings.flush_ms, settings.save_every)
        else:
            file = open_log(log, resume, screen, from_end=from_end)
            by_line, unfinished = settings.text_field is not None, settings.flush_ms is not None
            data = followed(file.portions(by_line=by_line, unfinished=unfinished), stop)
            save = save and partial(save_with_place, save, file)
        text = read_text(data, source, settings, loaded, screen, name=label(name), is_continued=resume is not None)
        page = (
            None if html is None else _StreamPage(Path(html), label(name), context_of(loaded, settings, resume), screen)
        )
        how: dict[str, Any] = {"resume": resume, "save": save, "stop": stop}
        how["saves_start"] = follow and settings.save_every is not None
        if page is not None:
            how |= {"on_token": page.page.add, "on_word": page.page.add_word}
        events = streaming.stream(loaded, text, settings, runtime, **how)
        screen.drive(events, _Scores(screen, settings, loaded.name, resume), *filter(None, [page]))
        return stop.exit_code


def open_log(log: Path, resume: SessionState | None, screen: Screen, *, from_end: bool) -> FollowedFile:
    """The file that is followed, at the place of the saved session in it."""
    from xlcli.text.follow import FollowedFile

    place = resume.source if resume and resume.source and resume.source.path == os.fsencode(log) else None
    if resume is not None and place is None and not from_end:
        screen.say(f"the state has no place in {log}, which is read from its beginning", "warning")
    return FollowedFile(log, place, partial(screen.say, level="warning"), from_end=from_end)


def context_of(model: LoadedModel, settings: StreamConfig, resume: SessionState | None) -> tuple[str, str]:
    """Name of the model, and the context of a token in words."""
    reading = settings.reading(model.config.model, model.config.train.reading)
    mem_len = reading.mem_len if resume is None else resume.model_state.span.mem_len
    return model.name, report.context(model.config.model, mem_len, model.config.train.segment_len)


def save_with_place(save: SaveState, file: FollowedFile, session: SessionState) -> None:
    """Saves a session with the place in the file that it has read."""
    save(replace(session, source=file.position))


def read_text(
    data: Iterator[bytes | None],
    source: int | None,
    settings: StreamConfig,
    model: LoadedModel,
    screen: Screen,
    *,
    name: str,
    is_continued: bool,
) -> Iterator[bytes | None]:
    """Text of data in any of the formats, as it arrives from a descriptor, or from a file that is followed."""
    from xlcli.text.documents import json_lines
    from xlcli.text.formats import checked, text_of

    if settings.binary:
        return data
    any_bytes = model.tokenizer.kind == "bytes"
    fields = tuple(filter(None, [settings.text_field]))
    warn = partial(screen.say, level="warning")
    if source is None:
        text = json_lines(data, name, fields, warn, settings.reset_on_change) if fields else data
    else:
        formats = {"any_bytes": any_bytes, "token_ids": model.tokenizer.kind == "ids"}
        text = text_of(data, name, fields, source, notice=warn, **formats)
    # Text that continues a stream may begin within a character.
    return text if any_bytes or is_continued or source is None else checked(text, name)


class _StreamPage(Sink):
    """The page of a stream, which is written also after an error. `about` are the model and the context of a token."""

    def __init__(self, path: Path, title: str, about: tuple[str, str], screen: Screen) -> None:
        self.page, self._title, self._about, self._screen = Page(path), title, about, screen

    def close(self) -> None:
        if self.page.n_tokens:
            self.page.save(self._title, *self._about)
            self._screen.say(f"page written to {self.page.path}")

    discard = close


class _Scores(Sink):
    """Prints the scores and the totals of a stream of a model of this name."""

    def __init__(self, screen: Screen, settings: StreamConfig, model: str, resume: SessionState | None) -> None:
        self._screen, self._emit, self._top, self._model = screen, settings.emit, settings.top, model
        is_listed = resume is not None and resume.stream is not None and resume.stream.words is not None
        self._table = Table(partial(screen.say, level="warning"), form_of("-", json=screen.json), continued=is_listed)

    def add(self, event: Event) -> None:
        screen = self._screen
        match event:
            case Row() | WordScore():
                screen.print(self._table.line(event), json=screen.json)
            case LineScore() | TokenScore() if screen.json:
                screen.object(report.text_object(event))
            case LineScore():
                screen.scored_line(f"{event.bits_per_byte:.3f}\t", event.spans)
            case TokenScore():
                screen.print(f"{event.byte}\t{event.bits:.3f}\t{report.to_json(event.text)}\n")
            case StreamStats():
                self._add_stats(event)

    def _add_stats(self, stats: StreamStats) -> None:
        from xlcli.metrics import misfit

        screen, emit = self._screen, self._emit
        if emit == "stats" and screen.json:
            screen.object(stats)
        elif emit == "stats":
            screen.report(f"{report.stats_line(stats)}\n")
        if not stats.final:
            return
        if remark := misfit(self._model, stats.bits_per_byte):
            screen.say(remark)
        if stats.shown is not None:
            of_all = {"lines": f" of {stats.lines:,}", "tokens": f" of {stats.tokens:,}"}.get(emit, "")
            start = f"; --top starts after {math.ceil(1 / self._top):,}" if self._top and not stats.shown else ""
            screen.say(f"{stats.shown:,}{of_all} {emit} shown{start}")
        if emit != "stats" or screen.json:
            screen.say(report.stats_line(stats))

    def close(self) -> None:
        self._screen.model_text(b"", final=True)
