"""`xlcli eval`: scores a text, every token once."""

from __future__ import annotations

import filecmp
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from xlcli.cli import options, prologue, report
from xlcli.cli.help import App
from xlcli.cli.launch import is_to_launch, launch
from xlcli.cli.options import option, plot_option
from xlcli.cli.outputs import Kept, Sink
from xlcli.cli.page import Page
from xlcli.cli.plot import draw_by_context
from xlcli.cli.render import Screen
from xlcli.cli.signals import Stop
from xlcli.cli.tables import JoinedListing, Listing, Table
from xlcli.config import Config, EvalConfig, ModelConfig
from xlcli.errors import ConfigError, DataError
from xlcli.events import ContinuationScore, Done, Event, PairScore, Row, Score, TokenScore, WordScore
from xlcli.files import cache_folder, is_pipe, read_json
from xlcli.ranks import Ranks, join
from xlcli.store.layout import HELD_OUT, TOKENIZER, read_config

app = App()


@app.command("eval", "xlcli eval --mem-len 512", "xlcli eval book.txt --sweep-mem-len 0,128,512 --json")
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
        option("Results", "--words FILE.tsv", "Write the bits of each word, or of each row; JSON lines if in .jsonl."),
    ] = None,
    plot: Annotated[str | None, plot_option("Results", "Plot loss by context length")] = None,
    html: options.Html = None,
    dry_run: options.DryRun = False,
    **_: Any,
) -> int:
    """Scores a text."""
    config, screen = prologue.begin(
        context,
        needs={
            "by": ["pairs|score_field"],
            "columns": ["per_token|words"],
            "split_punctuation": ["words"],
        },
        excludes={
            "per_token": ["words"],
            "score_field": ["per_token", "html"],
            "sweep_mem_len": ["per_token", "words", "html"],
            "plot": ["stride", "adapt", "context_cache"],
        },
    )
    settings, names, texts = config.eval, prologue.named_models(context), files or []
    pipe = next(filter(is_pipe, texts), None)
    outputs_of_one = {"--html": html, "standard input or a pipe": pipe}
    if len(names) > 1 and (output := next((name for name, value in outputs_of_one.items() if value), None)):
        raise ConfigError(f"{output} needs one model, not {len(names)}.", "Give one -m NAME.")
    prologue.check_texts(texts, "xlcli eval -m {}")
    folders = prologue.find_models(context, settings, screen)
    if not texts:
        prologue.note_unread_pipe(screen, "FILE")
        check_held_out(names, folders, settings.split)
    if per_token and len({read_json(folder / TOKENIZER[0]).get("fingerprint") for folder in folders}) > 1:
        raise ConfigError("--per-token needs models with the same vocabulary.", "Use --words, or one -m NAME.")
    prologue.check_files(context, [*folders, *texts], ["per_token", "words", "plot", "html"])
    if dry_run:
        for folder in folders:
            show_plan(folder, texts, settings, screen)
        return 0
    cache_folder(screen.say)  # which all processes share
    if is_to_launch(nproc := config.runtime.nproc or 1):
        return launch(context.obj, nproc)
    with join(config.runtime.timeout) as ranks, screen.stop() as stop:
        screen.expect_pipes(texts)
        events = score_all(folders, texts, config, screen, ranks, stop, tokens=bool(per_token or html), words=words)
        screen.drive(events, *(outputs(context, folders, settings, screen, stop) if ranks.is_first else ()))
        return stop.exit_code


def score_all(
    folders: Sequence[Path],
    texts: Sequence[str],
    config: Config,
    screen: Screen,
    ranks: Ranks,
    stop: Stop,
    *,
    tokens: bool,
    words: str | None,
) -> Iterator[Event]:
    """Events of the evaluation of each model, which leaves the RAM before the next one is loaded."""
    for folder, name in zip(folders, names_of(folders), strict=True):
        loaded, runtime = prologue.load_model(folder, config.eval, config.runtime, screen, ranks)
        from xlcli import evaluation

        asked = {"per_token": tokens, "words": words is not None}
        events = evaluation.evaluate(loaded, texts or None, config.eval, runtime, stop=stop, **asked)
        del loaded
        for event in events:
            yield replace(event, model=name) if isinstance(event, Score) and name != folder.name else event
        if ranks.broadcast(stop()):
            break


def names_of(folders: Sequence[Path]) -> list[str]:
    """Names of models, with their folders if two have the same."""
    names = [folder.name for folder in folders]
    return [str(folder) if names.count(folder.name) > 1 else folder.name for folder in folders]


def outputs(
    context: typer.Context, folders: Sequence[Path], settings: EvalConfig, screen: Screen, stop: Stop
) -> list[Sink]:
    """Where tokens, words and scores go: the list, the page, the plot, and the report, in the order of their ends."""
    per_token, words, plot, html = (context.params[name] for name in ("per_token", "words", "plot", "html"))
    path, shape = words or per_token, settings.shape(read_config(folders[0]).model)
    n_rows = len(folders) * len(settings.sweep) * (len(folders) > 1 or bool(settings.sweep_mem_len))
    sinks: list[Sink] = []
    if path is not None:
        form = path if words else "-"  # tokens are JSON
        table = Table(partial(screen.say, level="warning"), form, json=screen.json or per_token is not None)
        kinds = (Row, TokenScore) if per_token else (Row, WordScore, PairScore, ContinuationScore)
        listing, is_joined = (table, path, screen, kinds), len(folders) > 1
        sinks.append(JoinedListing(*listing, names=names_of(folders)) if is_joined else Listing(*listing))
    if html is not None:
        sinks.append(_ScorePage(Path(html), shape, screen))

    def draw(scores: list[Score]) -> None:
        if stop():
            screen.not_written(plot)
        else:
            draw_by_context(plot, scores)
            screen.say(f"plot written to {plot}")

    def show(scores: list[Score]) -> None:
        if scores := [score for score in scores if not score.partial] or scores[:1]:
            show_scores(scores, screen, shape, n_rows=n_rows, to_stderr=path == "-")

    if plot is not None:
        sinks.append(Kept(Score, draw))
    return [*sinks, Kept(Score, show)]


class _ScorePage(Sink):
    """The page of a text that a model of this shape scores."""

    def __init__(self, path: Path, shape: ModelConfig, screen: Screen) -> None:
        self._page, self._shape, self._screen = Page(path), shape, screen
        self._score: Score | None = None
        self._is_whole = False

    def add(self, event: Event) -> None:
        if isinstance(event, TokenScore):
            self._page.add(event)
        elif isinstance(event, Score):
            self._score = event
        self._is_whole = self._is_whole or isinstance(event, Done)

    def close(self) -> None:
        score = self._score
        if score is None or not self._is_whole:
            self._screen.not_written(str(self._page.path))
            return
        figures = {"token": score.perplexity, "word": score.word_perplexity}
        facts = [(f"perplexity per {name}", f"{value:.5g}") for name, value in figures.items() if value is not None]
        kept = report.context(self._shape, score.mem_len, score.segment_len, score.stride)
        self._page.save(score.file, score.model, kept, facts, score.by_context)
        self._screen.say(f"page written to {self._page.path}")


def check_held_out(names: Sequence[str], folders: Sequence[Path], split: str) -> None:
    """`DataError` if several models keep different held-out texts of this split."""
    texts = [folder / HELD_OUT[split] for folder in folders]
    if len(texts) > 1 and not all(text.is_file() and filecmp.cmp(texts[0], text, shallow=False) for text in texts):
        models = " ".join(f"-m {shlex.quote(name)}" for name in names)
        raise DataError(
            f"the models do not have the same held-out text ({HELD_OUT[split]}).",
            f"Give a text that is new to all of them: xlcli eval FILE {models}",
        )


def show_plan(folder: Path, texts: Sequence[str], settings: EvalConfig, screen: Screen) -> None:
    """Prints what the evaluation of this model would do."""
    trained = read_config(folder)
    text = ", ".join(texts) or f"the text {HELD_OUT[settings.split]} of the model"
    batch_size = settings.batch_size or 8
    if trained.model.effective_mem_len(1) is None or settings.online_option:
        batch_size = 1
    prologue.print_plan(folder, settings, screen, batch_size=batch_size, action=f"scores {text}")


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
