"""`xlcli eval`: scores a text, every token once."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from xlcli.cli import units
from xlcli.cli.options import DEVICE, MODEL, SETTINGS, TALK, Command, Flag, Values, reading
from xlcli.cli.pipe import standard_input
from xlcli.cli.signals import Stop
from xlcli.errors import ConfigError


def run(values: Values) -> int:
    """Renders the events of the workflow `evaluate`."""
    from xlcli.cli import plot, report
    from xlcli.cli.model_options import dry_run, explain_memory, locate, open_model
    from xlcli.cli.render import Screen
    from xlcli.cli.settings import print_config, resolve
    from xlcli.events import Notice, Progress, Score, TokenScore
    from xlcli.store.layout import read_config

    config = resolve(values)
    screen = Screen(values)
    if values.on("print-config"):
        screen.print(print_config(config, values))
        return 0
    picture = values.get("plot")
    if picture is not None:
        plot.check(picture)
    options = config.eval
    folder = locate(values, options)
    if values.on("dry-run"):
        what = f"scores {', '.join(values.words) or 'its own held-out text (' + options.split + ')'}"
        model_config = read_config(folder).model
        batch = 1 if model_config.effective_mem_len(1) is None else options.batch_size or 8
        screen.print(dry_run(folder, options, batch_size=batch, what=what, values=values))
        return 0
    tokens_name = values.get("per-token")
    if tokens_name is not None and options.sweep_mem_len:
        raise ConfigError("--per-token goes with one memory length, not with a sweep.", "Use --mem-len M.")
    scores: list[Score] = []
    with Stop(screen.say) as stop, screen, standard_input(stop), token_file(tokens_name, stop) as tokens:
        screen.wait("loading the model")
        from xlcli.evaluation import evaluate

        model, runtime = open_model(folder, config.runtime, options, screen)
        shape = model.config.model
        explain_memory(shape, options.sweep_mem_len or (options.mem_len,), screen)
        for event in evaluate(
            model, values.words or None, options, runtime, per_token=tokens_name is not None, stop=stop
        ):
            if stop():
                break
            match event:
                case Notice():
                    screen.notice(event)
                case Progress():
                    screen.progress(event)
                case TokenScore() if tokens is not None:
                    tokens.write(report.to_json(report.token_object(event)).encode() + b"\n")
                case Score():
                    scores.append(event)
        if stop():
            return stop.exit_code
        if picture is not None:
            plot.draw(picture, scores)
        if tokens_name == "-":
            for score in scores:
                screen.say(report.score_text(score, shape))
        elif screen.json:
            objects = [report.score_object(score) for score in scores]
            screen.object({"sweep": objects} if options.sweep_mem_len else objects[0])
        else:
            screen.print(report.sweep_text(scores) if options.sweep_mem_len else report.score_text(scores[0], shape))
        return 0


@contextlib.contextmanager
def token_file(name: str | None, stop: Callable[[], bool]) -> Iterator[BinaryIO | None]:
    """Where `--per-token` goes: a file that appears once it is whole, never when stopped; standard output for `-`."""
    if name is None:
        yield None
        return
    if name == "-":
        sys.stdout.flush()
        yield sys.stdout.buffer
        return
    path = Path(name)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror}.", "Choose a file in a folder that exists.") from None
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
        if stop():
            return
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # noqa: PTH101
        os.replace(temporary, path)  # noqa: PTH105
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108


COMMAND = Command(
    name="eval",
    about="Score a text: bits per byte and more, every token once and in order.",
    examples=("xlcli eval --mem-len 512", "xlcli eval book.txt --sweep-mem-len 0,128,512 --json"),
    words="[FILE...]",
    groups={
        "Evaluate": (
            MODEL,
            *reading("eval"),
            Flag("--segment-len", "TOKENS", "tokens read at once", units.count, ("eval.segment_len",), example="128"),
            Flag(
                "--batch-size",
                "N",
                "parts of the text read side by side",
                units.count,
                ("eval.batch_size",),
                example="8",
            ),
            Flag(
                "--split", "valid|test", "which held-out text of the model, when no file is given", keys=("eval.split",)
            ),
            Flag(
                "--sweep-mem-len",
                "M,M,...",
                "one evaluation for each memory length",
                units.lengths,
                ("eval.sweep_mem_len",),
            ),
            Flag(
                "--span",
                "uniform|growing",
                "what a token sees: exactly the memory, or its segment too",
                keys=("eval.span",),
            ),
            Flag(
                "--recall",
                "",
                "measure how much of full attention hashed layers find",
                keys=("eval.recall",),
            ),
            Flag("--per-token", "FILE.jsonl", "write each token with its bits"),
            Flag("--plot", "FILE.png", "draw loss by context (needs the extra xlcli[plot])"),
            Flag("--limit", "SIZE", "score the first so many bytes", units.count, ("eval.limit",), example="64KiB"),
        ),
        "Machine": DEVICE,
        "Settings": SETTINGS,
        "Talk": TALK,
    },
    sections=("eval", "runtime"),
    run=run,
)
