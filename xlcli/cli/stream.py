"""`xlcli stream`: scores text as it arrives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlcli.cli import options, prologue, report
from xlcli.cli.options import option
from xlcli.cli.outputs import check_standard_output
from xlcli.cli.page import Page
from xlcli.cli.pipe import followed, open_source, portions
from xlcli.cli.render import Screen
from xlcli.cli.tables import Table
from xlcli.config import StreamConfig
from xlcli.errors import ConfigError
from xlcli.events import Event, LineScore, Row, StreamStats, TokenScore, WordScore

if TYPE_CHECKING:
    from xlcli.inference import SaveState
    from xlcli.store.folder import LoadedModel
    from xlcli.store.state_files import SessionState
    from xlcli.text.follow import FollowedFile

app = typer.Typer()


@app.command(
    epilog="cat book.txt | xlcli stream\nxlcli stream app.log --follow --state log.state --json",
)
def stream(
    context: typer.Context,
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE]")] = None,
    model: options.Model = None,
    follow: Annotated[
        bool,
        option(
            "Text",
            "--follow",
            "Wait for text that is appended to FILE, also when it is rotated; go on where --state ended.",
            allow_from_autoenv=False,
        ),
    ] = False,
    from_end: Annotated[
        bool,
        option("Text", "--from-end", "With --follow, begin at the end of FILE, unless there is a state of it."),
    ] = False,
    state: options.State = None,
    state_in: options.StateIn = None,
    state_out: options.StateOut = None,
    html: options.Html = None,
    dry_run: options.DryRun = False,
    **_: Any,
) -> int:
    """Score text line by line as it arrives, without end, in constant RAM."""
    config, screen = prologue.begin(context)
    settings = config.stream
    name = files[0] if files else "-"
    if files and len(files) > 1:
        raise ConfigError("stream reads one file, or standard input.", "Join files first: cat FILE... | xlcli stream.")
    if context.params["logprobs"] and not (settings.emit == "tokens" and screen.json):
        raise ConfigError("--logprobs needs tokens as JSON.", "Add --emit tokens --json.")
    if context.params["split_punctuation"] and settings.emit != "words":
        raise ConfigError("--split-punctuation needs words.", "Add --emit words.")
    if settings.save_every is not None and not (state or state_out):
        raise ConfigError("--save-every needs a file to save in.", "Add --state memory.state.")
    if settings.save_every is None and state:
        settings = settings.model_copy(update={"save_every": 60.0})
    if follow and (name == "-" or (os.path.exists(name) and not os.path.isfile(name))):  # noqa: PTH110, PTH113
        raise ConfigError("--follow needs a regular file.", "Name one. A pipe is read until it ends.")
    if from_end and not follow:
        raise ConfigError("--from-end needs a file that is followed.", "Add --follow.")
    texts = [] if name == "-" else [name]
    if not follow:  # which waits for the file
        prologue.check_texts(texts, "xlcli stream -m {}")
    folder = prologue.find_model(context, settings, screen)
    prologue.check_files(context, [folder, *texts], ["state", "state_out", "html"])
    if dry_run:
        is_endless = follow or name == "-"
        prologue.print_plan(folder, settings, screen, batch_size=1, action=f"scores {name}", is_endless=is_endless)
        return 0
    check_standard_output(name)
    source = None if follow else open_source(name)
    label = "standard input" if name == "-" else name
    with screen.stop() as stop, nullcontext() if html is None else Page(Path(html)) as page:
        screen.expect_pipes([name])
        log = Path(os.path.abspath(name)) if follow else None  # noqa: PTH100
        loaded, runtime, resume, save = prologue.open_model(context, folder, settings, config.runtime, screen, log)
        from xlcli import streaming
        from xlcli.text.follow import FollowedFile

        if log is not None:
            place = resume.source if resume and resume.source and resume.source.path == os.fsencode(log) else None
            if resume is not None and place is None and not from_end:
                screen.say(f"the state has no place in {name}, which is read from its beginning", "warning")
            file = FollowedFile(log, place, partial(screen.say, level="warning"), from_end=from_end)
            by_line, unfinished = settings.text_field is not None, settings.flush_ms is not None
            data = followed(file.portions(by_line=by_line, unfinished=unfinished), stop)
            save = None if save is None else partial(save_with_place, save, file)
        else:
            assert source is not None
            data = portions(source, stop, settings.flush_ms, settings.save_every)
        text = read_text(data, source, settings, loaded, screen, name=label, is_continued=resume is not None)
        on_token = None if page is None else page.add
        events = streaming.stream(
            loaded, text, settings, runtime, resume=resume, save=save, stop=stop, on_token=on_token
        )
        try:
            is_listed = resume is not None and resume.stream is not None and resume.stream.words is not None
            table = Table(partial(screen.say, level="warning"), "-", json=screen.json, continued=is_listed)
            for event in events:
                if isinstance(event, Row | WordScore):
                    screen.print(table.line(event), json=screen.json)
                elif not screen.shows(event):
                    show(event, screen, emit=settings.emit, model=loaded.name)
            screen.model_text(b"", final=True)
        finally:
            if page is not None and page.n_tokens:
                reading = settings.reading(loaded.config.model, loaded.config.train)
                mem_len = reading.mem_len if resume is None else resume.model_state.span.mem_len
                kept = report.context(loaded.config.model, mem_len, loaded.config.train.segment_len)
                page.save(label, loaded.name, kept)
                screen.say(f"page written to {html}")
        return stop.exit_code


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
    fields = () if settings.text_field is None else (settings.text_field,)
    warn = partial(screen.say, level="warning")
    if source is None:
        text = json_lines(data, name, fields, warn) if fields else data
    else:
        formats = {"any_bytes": any_bytes, "token_ids": model.tokenizer.kind == "ids"}
        text = text_of(data, name, fields, source, notice=warn, **formats)
    # Text that continues a stream may begin within a character.
    return text if any_bytes or is_continued or source is None else checked(text, name)


def show(event: Event, screen: Screen, *, emit: str, model: str) -> None:
    """Shows one event of the workflow."""
    from xlcli.metrics import misfit

    match event:
        case LineScore() | TokenScore() if screen.json:
            screen.object(report.text_object(event))
        case LineScore():
            screen.scored_line(f"{event.bits_per_byte:.3f}\t", event.spans)
        case TokenScore():
            quoted = report.to_json(event.text)
            screen.print(f"{event.byte}\t{event.bits:.3f}\t{quoted}\n")
        case StreamStats():
            if emit == "stats" and screen.json:
                screen.object(event)
            elif emit == "stats":
                screen.report(f"{report.stats_line(event)}\n")
            if event.final and (remark := misfit(model, event.bits_per_byte)):
                screen.say(remark)
            if event.final and event.shown is not None:
                of_all = {"lines": f" of {event.lines:,}", "tokens": f" of {event.tokens:,}"}.get(emit, "")
                screen.say(f"{event.shown:,}{of_all} {emit} shown")
            if event.final and not (emit == "stats" and not screen.json):
                screen.say(report.stats_line(event))
