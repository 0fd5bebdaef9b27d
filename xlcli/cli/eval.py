"""`xlcli eval`: scores a text, every token once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xlcli.cli import options
from xlcli.cli.help import CONTEXT, Command
from xlcli.cli.options import option, plot_option
from xlcli.cli.pipe import standard_input
from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.config import ModelConfig
    from xlcli.events import Score, TokenScore

app = typer.Typer()


@app.command(
    "eval",
    cls=Command,
    context_settings=CONTEXT,
    epilog="xlcli eval --mem-len 512\nxlcli eval book.txt --sweep-mem-len 0,128,512 --json",
)
def evaluate(
    context: typer.Context,
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE...]")] = None,
    model: options.Model = None,
    per_token: Annotated[
        str | None, option("Results", "--per-token FILE.jsonl", "Write each token with its bits.")
    ] = None,
    plot: Annotated[str | None, plot_option("Results", "Plot loss by context length")] = None,
    html: options.Html = None,
    dry_run: options.DryRun = False,
    **_: Any,
) -> int:
    """Score a text: bits per byte and more, every token once and in order."""
    from xlcli.cli.prologue import begin, check_files, check_texts, find_model, load_model, print_plan

    config, screen = begin(context)
    from xlcli.cli.launch import is_to_launch, launch
    from xlcli.cli.page import Page
    from xlcli.cli.plot import draw_by_context
    from xlcli.ranks import environment, join

    settings = config.eval
    if settings.sweep_mem_len and (per_token is not None or html is not None):
        output = "--html" if per_token is None else "--per-token"
        raise ConfigError(f"{output} needs one memory length, not a sweep.", "Use --mem-len M.")
    unplotted = "a stride" if settings.stride is not None else settings.online_option
    if unplotted is not None and plot is not None:
        raise ConfigError(f"--plot shows the loss by context, which {unplotted} does not measure.", "Omit one of them.")
    check_texts(files or (), "xlcli eval -m {}")
    folder = find_model(context, settings, screen)
    check_files(context, [folder, *(files or ())], ["per_token", "plot", "html"])
    if dry_run:
        from xlcli.store.layout import read_config

        trained = read_config(folder)
        settings.check_stride(trained.train.segment_len)
        text = (
            ", ".join(files or ()) or f"the {'validation' if settings.split == 'valid' else 'test'} text of the model"
        )
        unbounded = trained.model.effective_mem_len(1) is None
        batch_size = 1 if unbounded or settings.online_option else settings.batch_size or 8
        print_plan(folder, settings, screen, batch_size=batch_size, action=f"scores {text}")
        return 0
    nproc = config.runtime.nproc or 1
    if is_to_launch(nproc):
        return launch(context.obj, nproc)
    if not environment().is_first:
        per_token = plot = html = None  # outputs of the first process
    with (
        join(config.runtime.timeout) as ranks,
        screen.stop() as stop,
        standard_input(stop, screen.keyboard_ended),
        nullcontext() if html is None else Page(Path(html)) as page,
    ):
        if "-" in (files or ()):
            screen.expect_keyboard()
        loaded, runtime = load_model(folder, settings, config.runtime, screen, ranks)
        from xlcli import evaluation
        from xlcli.cli import report
        from xlcli.events import Score

        shape = loaded.config.model
        by_token = per_token is not None or page is not None
        events = evaluation.evaluate(loaded, files or None, settings, runtime, per_token=by_token, stop=stop)
        scores: list[Score] = []

        def tokens() -> Iterator[TokenScore]:
            """The scores of tokens, which are added to the page; all other events are shown or kept."""
            for event in events:
                if isinstance(event, Score):
                    scores.append(event)
                elif not screen.shows(event):
                    if page is not None:
                        page.add(event)
                    yield event

        missing = []
        if per_token in (None, "-"):
            for token in tokens():
                if per_token is not None:
                    screen.object(report.text_object(token))
        elif not write_tokens(Path(per_token), tokens(), stop):
            missing.append(per_token)
        scores = [score for score in scores if not score.partial] or scores
        if stop():
            missing += filter(None, (plot, html))
        else:
            if plot is not None:
                draw_by_context(plot, scores)
                screen.say(f"plot written to {plot}")
            if page is not None:
                first = scores[0]
                facts = [("perplexity per token", f"{first.perplexity:.5g}")]
                if first.word_perplexity is not None:
                    facts.append(("perplexity per word", f"{first.word_perplexity:.5g}"))
                kept = report.context(shape, first.mem_len, first.segment_len, first.stride)
                page.save(first.file, first.model, kept, facts, first.by_context)
                screen.say(f"page written to {html}")
        for name in missing:
            screen.say(f"{name} was not written: the evaluation was stopped", "warning")
        if scores:
            n_lengths = len(settings.sweep_mem_len or ())
            show_scores(scores, screen, shape, n_lengths=n_lengths, to_stderr=per_token == "-")  # noqa: S105
        return stop.exit_code


def write_tokens(path: Path, tokens: Iterable[TokenScore], stop: Callable[[], bool]) -> bool:
    """Writes token scores; a regular file is complete, and not written after a stop, which gives False."""
    from xlcli.cli import report
    from xlcli.cli.outputs import write_output
    from xlcli.events import StoppedEarlyError

    is_file = path.is_file() or not path.exists()

    def lines() -> Iterator[bytes]:
        for token in tokens:
            yield report.to_json(report.text_object(token)).encode() + b"\n"
        if is_file and stop():
            raise StoppedEarlyError

    try:
        write_output(path, lines())
    except StoppedEarlyError:
        return False
    return True


def show_scores(scores: list[Score], screen: Screen, model: ModelConfig, *, n_lengths: int, to_stderr: bool) -> None:
    """Prints at least one score of this model as text or JSON, or as text `to_stderr`.

    `n_lengths` is the number of memory lengths of a sweep; 0 without one.
    """
    from xlcli.cli import report

    if to_stderr:
        for score in scores:
            screen.say(report.score_table(score, model))
    elif screen.json:
        objects = [report.score_object(score) for score in scores]
        is_partial = scores[0].partial or len(scores) != n_lengths
        screen.object({"sweep": objects, "partial": is_partial} if n_lengths else objects[0])
    elif n_lengths and not scores[0].partial:
        screen.report(report.sweep_text(scores, n_lengths))
    else:
        screen.report(report.score_table(scores[0], model))
