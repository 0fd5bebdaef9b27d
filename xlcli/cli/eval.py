"""`xlcli eval`: scores a text, every token once."""

from __future__ import annotations

import filecmp
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from xlcli.cli import options, prologue, report
from xlcli.cli.launch import is_to_launch, launch
from xlcli.cli.options import option, plot_option
from xlcli.cli.outputs import write_output
from xlcli.cli.page import Page
from xlcli.cli.plot import draw_by_context
from xlcli.cli.render import Screen
from xlcli.cli.tables import Table
from xlcli.config import EvalConfig, ModelConfig
from xlcli.errors import ConfigError, DataError
from xlcli.events import Done, Score, StoppedEarlyError, TokenScore
from xlcli.files import cache_folder, is_pipe
from xlcli.ranks import environment, join
from xlcli.store.layout import HELD_OUT, read_config

app = typer.Typer()


@app.command("eval", epilog="xlcli eval --mem-len 512\nxlcli eval book.txt --sweep-mem-len 0,128,512 --json")
def evaluate(
    context: typer.Context,
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE|-...]")] = None,
    model: Annotated[
        list[str] | None,
        option("Model", "-m, --model NAME|FOLDER", "Model; several make a table. Default: newest, else bundled."),
    ] = None,
    per_token: Annotated[
        str | None, option("Results", "--per-token FILE.jsonl", "Write each token with its bits.")
    ] = None,
    words: Annotated[
        str | None,
        option("Results", "--words FILE.tsv", "Write the bits of each word, or of each pair; JSON lines if in .jsonl."),
    ] = None,
    plot: Annotated[str | None, plot_option("Results", "Plot loss by context length")] = None,
    html: options.Html = None,
    dry_run: options.DryRun = False,
    **_: Any,
) -> int:
    """Score a text: bits per byte and more, every token once and in order."""
    config, screen = prologue.begin(context)
    settings, names = config.eval, prologue.named_models(context)
    n_models = max(1, len(names))
    if per_token is not None and words is not None:
        raise ConfigError("--per-token and --words need a run each.", "Leave out one of them.")
    path = words if per_token is None else per_token
    if context.params["by"] and not settings.pairs:
        raise ConfigError("--by needs --pairs.", "Add --pairs FIRST,SECOND.")
    if context.params["logprobs"] and per_token is None:
        raise ConfigError("--logprobs needs a list of tokens.", "Add --per-token FILE.jsonl.")
    if context.params["split_punctuation"] and words is None:
        raise ConfigError("--split-punctuation needs words.", "Add --words FILE.tsv.")
    output = "--words" if words else "--per-token" if per_token else "--html" if html else None
    if output is not None and settings.sweep_mem_len:
        raise ConfigError(f"{output} needs one memory length, not a sweep.", "Use --mem-len M.")
    if n_models > 1 and (output is not None or any(map(is_pipe, files or ()))):
        raise ConfigError(
            f"{output or 'standard input or a pipe'} needs one model, not {n_models}.", "Give one -m NAME."
        )
    unplotted = "a stride" if settings.stride is not None else settings.online_option
    if unplotted is not None and plot is not None:
        raise ConfigError(f"--plot shows the loss by context, which {unplotted} does not measure.", "Omit one of them.")
    prologue.check_texts(files or (), "xlcli eval -m {}")
    folders = prologue.find_models(context, settings, screen)
    if not files:
        prologue.note_unread_pipe(screen, "FILE")
        check_held_out(names, folders, settings.split)
    prologue.check_files(context, [*folders, *(files or ())], ["per_token", "words", "plot", "html"])
    if dry_run:
        for folder in folders:
            show_plan(folder, files, settings, screen)
        return 0
    cache_folder(screen.say)  # which all processes share
    nproc = config.runtime.nproc or 1
    if is_to_launch(nproc):
        return launch(context.obj, nproc)
    if not environment().is_first:
        path = plot = html = None  # outputs of the first process
    with (
        join(config.runtime.timeout) as ranks,
        screen.stop() as stop,
        nullcontext() if html is None else Page(Path(html)) as page,
    ):
        screen.expect_pipes(files or ())
        scores: list[Score] = []
        missing: list[str] = []
        is_listed = False
        by_token = per_token is not None or page is not None
        table = Table(partial(screen.say, level="warning"), words or "-", json=screen.json or per_token is not None)

        def run(folder: Path) -> Iterator[Any]:
            loaded, runtime = prologue.load_model(folder, settings, config.runtime, screen, ranks)
            from xlcli import evaluation

            asked = {"per_token": by_token, "words": words is not None}
            return evaluation.evaluate(loaded, files or None, settings, runtime, stop=stop, **asked)

        def read(events: Iterator[Any]) -> Iterator[str]:
            """Lines of the output, up to its end; tokens are added to the page, all other events are shown or kept."""
            nonlocal is_listed
            for event in events:
                if isinstance(event, Done):
                    is_listed = True
                    return
                if isinstance(event, Score):
                    is_unique = [each.name for each in folders].count(folder.name) == 1
                    scores.append(event if is_unique else replace(event, model=str(folder)))
                elif not screen.shows(event):
                    if isinstance(event, TokenScore) and page is not None:
                        page.add(event)
                    if per_token is not None or not isinstance(event, TokenScore):
                        yield table.line(event)

        for folder in folders:  # a model leaves the RAM before the next one is loaded
            events = run(folder)
            if path in (None, "-"):
                for line in read(events):
                    screen.print(line, json=table.json)
            elif not write_lines(Path(path), read(events), lambda: is_listed):
                missing.append(path)
            list(read(events))  # what is measured when the output is in place
            if ranks.broadcast(stop()):
                break
        scores = [score for score in scores if not score.partial] or scores[:1]
        shape = settings.shape(read_config(folders[0]).model)
        if page is not None and is_listed:
            first = scores[0]
            facts = [("perplexity per token", f"{first.perplexity:.5g}")]
            if first.word_perplexity is not None:
                facts.append(("perplexity per word", f"{first.word_perplexity:.5g}"))
            kept = report.context(shape, first.mem_len, first.segment_len, first.stride)
            page.save(first.file, first.model, kept, facts, first.by_context)
            screen.say(f"page written to {html}")
        elif html is not None:
            missing.append(html)
        if plot is not None and not stop():
            draw_by_context(plot, scores)
            screen.say(f"plot written to {plot}")
        elif plot is not None:
            missing.append(plot)
        for name in missing:
            screen.say(f"{name} was not written: the evaluation was stopped", "warning")
        if scores:
            n_rows = n_models * len(settings.sweep) if n_models > 1 or settings.sweep_mem_len else 0
            show_scores(scores, screen, shape, n_rows=n_rows, to_stderr=path == "-")
        return stop.exit_code


def check_held_out(names: Sequence[str], folders: Sequence[Path], split: str) -> None:
    """`DataError` if several models keep different held-out texts of this split."""
    texts = [folder / HELD_OUT[split] for folder in folders]
    if len(texts) > 1 and not all(text.is_file() and filecmp.cmp(texts[0], text, shallow=False) for text in texts):
        models = " ".join(f"-m {shlex.quote(name)}" for name in names)
        raise DataError(
            f"the models do not have the same held-out text ({HELD_OUT[split]}).",
            f"Give a text that is new to all of them: xlcli eval FILE {models}",
        )


def show_plan(folder: Path, files: Sequence[str] | None, settings: EvalConfig, screen: Screen) -> None:
    """Prints what the evaluation of this model would do."""
    trained = read_config(folder)
    text = ", ".join(files or ()) or f"the {'validation' if settings.split == 'valid' else 'test'} text of the model"
    unbounded = trained.model.effective_mem_len(1) is None
    batch_size = 1 if unbounded or settings.online_option else settings.batch_size or 8
    prologue.print_plan(folder, settings, screen, batch_size=batch_size, action=f"scores {text}")


def write_lines(path: Path, lines: Iterable[str], is_whole: Callable[[], bool]) -> bool:
    """Writes an output; False if a regular file was not written, because the lines are not whole at their end."""
    is_file = path.is_file() or not path.exists()

    def checked() -> Iterator[bytes]:
        yield from map(str.encode, lines)
        if is_file and not is_whole():
            raise StoppedEarlyError

    try:
        write_output(path, checked())
    except StoppedEarlyError:
        return False
    return True


def show_scores(scores: list[Score], screen: Screen, shape: ModelConfig, *, n_rows: int, to_stderr: bool) -> None:
    """Prints at least one score as text or JSON, or as text `to_stderr`.

    `n_rows` is the number of models and memory lengths of a table; 0 for one score, of a model of this shape.
    """
    if screen.json and not to_stderr:
        objects = [report.score_object(score) for score in scores]
        is_partial = scores[0].partial or len(scores) != n_rows
        screen.object({"sweep": objects, "partial": is_partial} if n_rows else objects[0])
    else:
        if any(score.pairs for score in scores):
            text = report.pairs_text(scores, shape, screen.columns)
        elif n_rows and not scores[0].partial:
            text = report.sweep_text(scores, n_rows, screen.columns)
        else:
            text = report.score_table(scores[0], shape)
        (screen.say if to_stderr else screen.report)(text)
