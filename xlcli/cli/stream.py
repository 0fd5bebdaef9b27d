"""`xlcli stream`: scores text as it arrives."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlcli.cli import options
from xlcli.cli.command import App, Call
from xlcli.cli.loading import OpenedModel, check_texts, find_model, open_model, print_plan, state_files
from xlcli.cli.objects import fields, text_object
from xlcli.cli.options import option
from xlcli.cli.outputs import PAGE, STATE, Sink, check_standard_output
from xlcli.cli.page import Page
from xlcli.cli.pipe import followed, label, open_source, portions
from xlcli.cli.quantities import approximate_count
from xlcli.cli.render import Screen
from xlcli.cli.score_report import describe_context, describe_learning, stats_line
from xlcli.cli.signals import Stop
from xlcli.cli.tables import Table, beside, form_of
from xlcli.config import StreamConfig
from xlcli.errors import ConfigError
from xlcli.events import Event, LineScore, RecordScore, Row, StreamStats, TokenScore, WordScore

if TYPE_CHECKING:
    from xlcli.store.state_files import SessionState
    from xlcli.text.follow import FollowedFile

SAVE_SECONDS = 60.0  # interval between two saves with `--state`, unless `--save-every` says otherwise
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


@app.command("stream", "cat book.txt | xlcli stream", "xlcli stream app.log --follow --state log.state --json")
def stream(
    call: Call,
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE]")] = None,
    model: options.Model = None,
    follow: Follow = False,
    from_end: FromEnd = False,
    state: options.State = None,
    state_in: options.StateIn = None,
    state_out: options.StateOut = None,
    html: options.Html = None,
    dry_run: options.DryRun = False,
) -> int:
    config = call.config()
    settings = config.stream
    files = files or ["-"]
    name = files[0]
    check_combination(call, settings, files, follow=follow, saves=state is not None or state_out is not None)
    if settings.save_every is None and state:
        settings = settings.model_copy(update={"save_every": SAVE_SECONDS})
    texts = [name] if follow else check_texts([name], "xlcli stream -m {}")  # what is followed is waited for
    saved = state_files(call, state, state_in, state_out)
    call.require("frozen", "--state-in FILE (of stream NORMAL.log --state-out FILE)", is_given=saved.before is not None)
    folder = find_model(call, model, settings, saved)
    outputs = {"state": (state, STATE), "state_out": (state_out, STATE), "html": (html, PAGE)}
    call.check_files([folder, *texts], outputs)
    if dry_run:
        is_endless = follow or name == "-"
        print_plan(folder, settings, call.screen, batch_size=1, action=f"scores {name}", is_endless=is_endless)
        return 0
    check_standard_output(name)
    log = Path(os.path.abspath(name)) if follow else None  # noqa: PTH100
    descriptor = None if follow else open_source(name)
    with call.screen.stop() as stop:
        call.screen.expect_pipes([name])
        opened = open_model(call, folder, settings, config.runtime, saved, log)
        if log is None:
            if state is not None and opened.resume is not None and name != "-":
                call.screen.say(f"{name} is read from its beginning; only with --follow a state goes on within a file")
            data = portions(descriptor or 0, stop, settings.pause_ms, settings.save_every)
        else:
            file = open_log(log, opened.resume, call.screen, from_end=from_end)
            data = followed(followed_lines(file, settings), stop)
            save = opened.save
            if save is not None:
                opened = opened._replace(save=lambda session: save(replace(session, source=file.position)))
        # A generator: nothing is read before `screen.drive` asks for events.
        text = read_text(data, descriptor, settings, opened, call.screen, label(name))
        saves_start = follow and settings.save_every is not None
        title = label(Path(name).name)
        print_scores(text, opened, settings, call.screen, stop, html=html, title=title, saves_start=saves_start)
        return stop.exit_code


def check_combination(call: Call, settings: StreamConfig, files: Sequence[str], *, follow: bool, saves: bool) -> None:
    """`ConfigError` for options that need others, or a file that cannot be read so; `saves`: a state is saved."""
    call.require("columns", "--emit tokens --json", is_given=settings.emit == "tokens" and call.screen.json)
    if settings.split_punctuation:
        call.require("split_punctuation", "--emit words", is_given=settings.emit == "words")
    call.require("save_every", "--state FILE", is_given=saves)
    call.require("from_end", "--follow", is_given=follow)
    if len(files) > 1:
        raise ConfigError("stream reads one file, or standard input.", "Join files first: cat FILE... | xlcli stream.")
    is_other_than_file = os.path.exists(files[0]) and not os.path.isfile(files[0])  # noqa: PTH110, PTH113
    if follow and (files[0] == "-" or is_other_than_file):
        raise ConfigError("--follow needs a regular file.", "Name a file. A pipe is read until it ends.")


def print_scores(
    text: Iterator[bytes | None],
    opened: OpenedModel,
    settings: StreamConfig,
    screen: Screen,
    stop: Stop,
    *,
    html: str | None,
    title: str,
    saves_start: bool,
) -> None:
    """Scores the text, prints what was asked for, and writes the page, if one was, with a title."""
    from xlcli import streaming

    model, runtime, resume, save = opened
    arguments: dict[str, Any] = {"resume": resume, "save": save, "stop": stop, "saves_start": saves_start}
    sinks: list[Sink] = [_ScorePrinter(screen, settings, model.name, resume)]
    if html is not None:
        page = Page(Path(html))
        sinks.append(_PageOfStream(page, title, describe_session(opened, settings), model.name, screen))
        arguments |= {"on_token": page.add, "on_word": page.add_word}  # whatever is printed
    screen.drive(streaming.stream(model, text, settings, runtime, **arguments), *sinks)


def describe_session(opened: OpenedModel, settings: StreamConfig) -> str:
    """Context of a token in words, with what the model learns, and the state that the stream continues."""
    config, resume = opened.model.config, opened.resume
    if resume is None:
        mem_len = settings.reading(config.model, config.train.reading).mem_len
        learning = describe_learning(adapt=settings.adapt, context_cache=settings.context_cache)
        return describe_context(config.model, mem_len, config.train.segment_len) + learning
    state = resume.model_state  # its settings hold
    context = describe_context(config.model, state.span.mem_len, config.train.segment_len)
    context_cache = None if state.cache is None else state.cache.settings["context_cache"]
    context += describe_learning(adapt=state.adaptation is not None, context_cache=context_cache)
    return f"{context}, continues a state after {approximate_count(state.seen, 'token')}"


def open_log(log: Path, resume: SessionState | None, screen: Screen, *, from_end: bool) -> FollowedFile:
    """The file that is followed, at the place of the saved session in it."""
    from xlcli.text.follow import FollowedFile

    place = resume.source if resume and resume.source and resume.source.path == os.fsencode(log) else None
    if resume is not None and place is None and not from_end:
        screen.say(f"the state has no place in {log}, which is read from its beginning", "warning")
    return FollowedFile(log, place, partial(screen.say, level="warning"), from_end=from_end)


def followed_lines(file: FollowedFile, settings: StreamConfig) -> Iterator[bytes | None]:
    """Lines of a log: records one by one, since the place in the log is saved behind each; else many at once."""
    if settings.text_field is not None or settings.reads_lines:
        return file.portions(bytes.find)
    if settings.flush_ms is None:
        return file.portions(bytes.rfind)
    return file.portions(bytes.rfind, line_seconds=0)  # the stream waits before it scores an unfinished line


def read_text(
    data: Iterator[bytes | None],
    source: int | None,
    settings: StreamConfig,
    opened: OpenedModel,
    screen: Screen,
    name: str,
) -> Iterator[bytes | None]:
    """Returns the text of `data` as it arrives. `source` is its descriptor; None for a followed file, JSON or plain."""
    from xlcli.config.base import compile_pattern
    from xlcli.text.documents import LINE_TEXT, live_texts
    from xlcli.text.formats import plain_text, text_of, with_notice_of_bytes
    from xlcli.text.json_rows import json_rows
    from xlcli.text.line_rows import EventStart, line_rows

    if settings.binary:
        return data
    warn = partial(screen.say, level="warning")
    any_bytes = opened.model.tokenizer.kind == "bytes"
    must_be_text = not any_bytes and opened.resume is None  # what continues a stream may begin within a character
    is_followed = source is None
    text_regex = event_start = None
    if settings.text_regex is not None:
        text_regex = compile_pattern(settings.text_regex, "stream.text_regex")
    if settings.event_start is not None:
        event_start = EventStart(compile_pattern(settings.event_start, "stream.event_start"), warn)
    read_rows = partial(live_texts, event_start=event_start)
    if opened.resume is not None:
        before = opened.resume.stream
        read_rows = partial(read_rows, n_before=before.input_line, stream=before.stream, unfinished=before.unfinished)
    if settings.reads_lines:
        if not is_followed:
            data = plain_text(data, name, any_bytes=any_bytes, notice=warn)
        if must_be_text:
            data = with_notice_of_bytes(data, name, warn)
        return read_rows(line_rows(data, name, text_regex, event_start), name, [LINE_TEXT], warn)
    text_fields = [settings.text_field] if settings.text_field else []
    if is_followed and text_fields:
        return read_rows(json_rows(data), name, text_fields, warn, settings.reset_on_change)
    if not is_followed:
        data = text_of(data, name, text_fields, source, any_bytes=any_bytes, notice=warn, read=read_rows)
    return with_notice_of_bytes(data, name, warn) if must_be_text else data


@dataclass
class _PageOfStream(Sink):
    """Writes the page of a stream at its end, also after an error. The stream itself fills it."""

    page: Page
    title: str
    context: str
    model: str
    screen: Screen

    def close(self) -> None:
        if self.page.n_tokens:
            self.page.save(self.title, self.model, self.context)
            self.screen.say(f"page written to {self.page.path}")

    discard = close


class _ScorePrinter(Sink):
    """Prints the scores and the totals of a stream of a model of this name."""

    def __init__(self, screen: Screen, settings: StreamConfig, model: str, resume: SessionState | None) -> None:
        self._screen, self._emit, self._top, self._model = screen, settings.emit, settings.top, model
        has_header = resume is not None and resume.stream is not None and resume.stream.words is not None
        self._table = Table(partial(screen.say, level="warning"), form_of("-", json=screen.json), continued=has_header)

    def add(self, event: Event) -> None:
        screen = self._screen
        match event:
            case Row() | WordScore() | TokenScore():
                screen.print(self._table.line(event), json=screen.json)
            case RecordScore() if screen.json:
                scores = fields(event, "byte", "bytes", "text", "spans", "fields")
                screen.object(beside(event.fields, scores) | scores)
            case LineScore() if screen.json:
                screen.object(text_object(event))
            case LineScore():
                screen.scored_line(f"{event.bits_per_byte:.3f}\t", event.spans)
            case StreamStats():
                if self._emit == "stats" and screen.json:
                    screen.object(event)
                elif self._emit == "stats":
                    screen.report(f"{stats_line(event)}\n")
                if event.final:
                    self._say_at_end(event)

    def _say_at_end(self, stats: StreamStats) -> None:
        """Says, beside the output, a remark on the model, how much was selected, and totals not printed as text."""
        from xlcli.metrics import misfit

        remark = misfit(self._model, stats.bits, stats.bytes)
        if remark is not None:
            self._screen.say(remark, "warning")
        if stats.shown is not None:
            self._screen.say(self._shown(stats, stats.shown))
        are_printed_as_text = self._emit == "stats" and not self._screen.json
        if not are_printed_as_text:
            self._screen.say(stats_line(stats))

    def _shown(self, stats: StreamStats, n_shown: int) -> str:
        """`12 of 3,400 lines shown`: how much of the output `--min-bits` or `--top` has selected."""
        units = "records" if self._emit == "lines" and stats.records else self._emit
        totals = {"lines": stats.lines, "tokens": stats.tokens, "records": stats.records}  # words are not counted
        of_all = f" of {totals[units]:,}" if units in totals else ""
        if self._top is not None and n_shown == 0:
            return f"0{of_all} {units} shown; --top starts after {math.ceil(1 / self._top):,}"
        return f"{n_shown:,}{of_all} {units} shown"

    def close(self) -> None:
        self._screen.model_text(b"", final=True)
