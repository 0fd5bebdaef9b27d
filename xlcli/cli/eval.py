"""`xlcli eval`: scores a text, every token once."""

from __future__ import annotations

import filecmp
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from xlcli.cli import options, prologue, report
from xlcli.cli.help import App
from xlcli.cli.launch import is_to_launch, launch
from xlcli.cli.options import option, plot_option
from xlcli.cli.outputs import PICTURE, Kept, Sink, write_output
from xlcli.cli.page import Page
from xlcli.cli.plot import draw_by_context
from xlcli.cli.render import Screen
from xlcli.cli.signals import Stop
from xlcli.cli.tables import JoinedListing, Listing, csv_text, form_of
from xlcli.config import Config, EvalConfig, ModelConfig
from xlcli.errors import ConfigError, DataError
from xlcli.events import ContinuationScore, Done, Event, Notice, PairScore, Row, Score, Scored, TokenScore, WordScore
from xlcli.files import cache_folder, is_pipe, read_json
from xlcli.ranks import Ranks, join
from xlcli.store.layout import HELD_OUT, TOKENIZER, read_config, read_record


class Run(NamedTuple):
    """What outputs know of an evaluation: names of the models, the shape of the first one, and how to print.

    `seeds` are groups of models that differ in their seeds only. `n_rows` is the number of models and memory lengths of
    a table; 0 for one score.
    """

    names: Sequence[str]
    seeds: Sequence[Sequence[str]]
    shape: ModelConfig
    n_rows: int
    screen: Screen
    stop: Stop


class Output(NamedTuple):
    """An output of `eval`: the option that names its file, and its sink.

    Attributes:
        option: Type of the option.
        sink: Makes the sink of this file.
        excludes: Other options and settings without which it is made.
        serves: Settings that need this output, or another one that serves them.
        asks: What it takes beside scores: arguments of `xlcli.evaluation.evaluate`.
        check: Refuses the folders of models that it cannot compare.
    """

    option: Any
    sink: Callable[[str, Run], Sink]
    excludes: Sequence[str] = ()
    serves: Sequence[str] = ()
    asks: Sequence[str] = ()
    check: Callable[[Sequence[Path]], None] = lambda _: None


def check_vocabulary(folders: Sequence[Path]) -> None:
    """`ConfigError` if models have no common tokens."""
    if len({read_json(folder / TOKENIZER[0]).get("fingerprint") for folder in folders}) > 1:
        raise ConfigError("--per-token needs models with the same vocabulary.", "Use --words, or one -m NAME.")


def check_single(what: str, folders: Sequence[Path]) -> None:
    """`ConfigError` if there are several models."""
    if len(folders) > 1:
        raise ConfigError(f"{what} needs one model, not {len(folders)}.", "Give one -m NAME.")


def list_scores(path: str, run: Run, *, kinds: tuple[type[Scored], ...], json: bool = False) -> Sink:
    """The list of tokens, words or rows, with columns for each of several models; `json`: by default in JSON lines."""
    form = form_of(path, json=json or run.screen.json)
    if len(run.names) > 1:
        return JoinedListing(path, form, run.screen, kinds, names=run.names)
    return Listing(path, form, run.screen, kinds)


def plot_scores(path: str, run: Run) -> Sink:
    """The plot of the loss by context, unless the evaluation was stopped."""

    def draw(scores: list[Score]) -> None:
        curves = [score for score in scores if score.by_context]
        if run.stop():
            run.screen.not_written(path)
        elif not curves:
            run.screen.say(f"{path} was not written: overlapping windows have no loss by context", "warning")
        else:
            draw_by_context(path, curves)
            run.screen.say(f"plot written to {path}")

    return Kept(Score, draw)


def write_table(path: str, run: Run) -> Sink:
    """The table of the report, unless the evaluation was stopped."""
    form_of(path, json=False)

    def write(scores: list[Score]) -> None:
        if run.stop():
            run.screen.not_written(path)
            return
        rows = [row for score in scores for row in report.score_rows(score)]
        text = csv_text([*rows, *report.seed_rows([] if scores[0].pairs else over_seeds(scores, run))])
        if path == "-":
            run.screen.print(text)
        else:
            write_output(Path(path), [text.encode("utf-8", "surrogateescape")])

    return Kept(Score, write)


class ScorePage(Sink):
    """The page of a text."""

    def __init__(self, path: str, run: Run) -> None:
        self._page, self._run = Page(Path(path)), run
        self._score: Score | None = None
        self._is_whole = False

    def add(self, event: Event) -> None:
        """Adds a token or a word, or keeps the score."""
        if isinstance(event, TokenScore):
            self._page.add(event)
        elif isinstance(event, WordScore):
            self._page.add_word(event)
        elif isinstance(event, Score):
            self._score = event
        self._is_whole = self._is_whole or isinstance(event, Done)

    def close(self) -> None:
        """Writes the page of a text that was scored to its end."""
        score, screen = self._score, self._run.screen
        if score is None or not self._is_whole:
            screen.not_written(str(self._page.path))
            return
        figures = {"token": score.perplexity, "word": score.word_perplexity}
        facts = [(f"perplexity per {name}", f"{value:.5g}") for name, value in figures.items() if value is not None]
        kept = report.context(self._run.shape, score.mem_len, score.segment_len, score.stride)
        self._page.save(score.file, score.model, kept, facts, score.by_context)
        screen.say(f"page written to {self._page.path}")


PER_TOKEN = option("Results", "--per-token FILE.jsonl", "Write each token with its bits; .csv or .tsv: as a table.")
WORDS = option("Results", "--words FILE.tsv", "Write the bits of each word or compared row; .jsonl: JSON lines.")
CSV = option("Results", "--csv FILE.csv", "Write the table of figures: a row for each model and memory length.")
PLOT = plot_option("Results", "Plot loss by context length")
OUTPUTS: Mapping[str, Output] = {
    "per_token": Output(
        Annotated[str | None, PER_TOKEN, re.compile(rb'.*\bline(": \d+, "|[\t,])byte(": -?\d+, "|[\t,])text')],
        partial(list_scores, json=True, kinds=(Row, TokenScore)),
        excludes=["words", "score_field", "sweep_mem_len"],
        serves=["columns"],
        asks=["per_token"],
        check=check_vocabulary,
    ),
    "words": Output(
        Annotated[str | None, WORDS, re.compile(rb".*\b(naive_bits|second_tokens|best_per_byte)")],
        partial(list_scores, kinds=(Row, WordScore, PairScore, ContinuationScore)),
        excludes=["sweep_mem_len"],
        serves=["columns", "split_punctuation"],
        asks=["words"],
    ),
    "html": Output(
        options.Html,
        ScorePage,
        excludes=["score_field", "sweep_mem_len"],
        asks=["per_token", "words"],
        check=partial(check_single, "--html"),
    ),
    "csv": Output(Annotated[str | None, CSV, re.compile(rb"model,(position|mem_len),")], write_table),
    "plot": Output(Annotated[str | None, PLOT, PICTURE], plot_scores, excludes=["stride", "adapt", "context_cache"]),
}
"""The outputs beside the report, by their parameters, in the order of their ends."""
app = App()


@app.command(
    "eval",
    "xlcli eval --mem-len 512",
    "xlcli eval book.txt --sweep-mem-len 0,128,512 --json",
    more={name: output.option for name, output in OUTPUTS.items()},
)
def evaluate(
    context: typer.Context,
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE|-...]")] = None,
    model: Annotated[
        list[str] | None,
        option(
            "Model",
            "-m, --model NAME|FOLDER",
            "Use this model; repeat to compare models. Default: newest, else bundled.",
        ),
    ] = None,
    dry_run: options.DryRun = False,
    **_: Any,
) -> int:
    """Scores a text."""
    needs = {"by": ["pairs|score_field"]}
    for setting in {setting: None for output in OUTPUTS.values() for setting in output.serves}:
        needs[setting] = ["|".join(name for name, output in OUTPUTS.items() if setting in output.serves)]
    excludes = {name: output.excludes for name, output in OUTPUTS.items()}
    config, screen = prologue.begin(context, needs, excludes)
    settings, texts = config.eval, files or []
    given = {name: path for name in OUTPUTS if (path := context.params[name]) is not None}
    prologue.check_texts(texts, "xlcli eval -m {}")
    folders = prologue.find_models(context, settings, screen)
    if any(map(is_pipe, texts)):
        check_single("standard input or a pipe", folders)
    if not texts:
        prologue.note_unread_pipe(screen, "FILE")
        check_held_out(prologue.named_models(context), folders, settings.split)
    for name in given:
        OUTPUTS[name].check(folders)
    prologue.check_files(context, [*folders, *texts])
    if dry_run:
        for folder in folders:
            show_plan(folder, texts, settings, screen)
        return 0
    if not texts:
        screen.say(f"the text is {HELD_OUT[settings.split]} of {folders[0].name}; for yours, type xlcli eval FILE")
    cache_folder(screen.say)  # which all processes share
    if is_to_launch(nproc := config.runtime.nproc or 1):
        return launch(context.obj, nproc)
    with join(config.runtime.timeout) as ranks, screen.stop() as stop:
        screen.expect_pipes(texts)
        asked = {argument: True for name in given for argument in OUTPUTS[name].asks}
        events = score_all(folders, texts, config, screen, ranks, stop, asked)
        n_rows = len(folders) * len(settings.sweep) * (len(folders) > 1 or bool(settings.sweep_mem_len))
        shape = settings.shape(read_config(folders[0]).model)
        run = Run(names_of(folders), seeds_of(folders), shape, n_rows, screen, stop)
        screen.drive(events, *(sinks_of(given, run) if ranks.is_first else ()))
        return stop.exit_code


def sinks_of(given: Mapping[str, str], run: Run) -> list[Sink]:
    """The sinks of these outputs, and last the report, which leaves standard output to a list that goes there."""

    def show(scores: list[Score]) -> None:
        if scores := [score for score in scores if not score.partial] or scores[:1]:
            show_scores(scores, run, to_stderr="-" in given.values())

    return [*(OUTPUTS[name].sink(path, run) for name, path in given.items()), Kept(Score, show)]


def score_all(
    folders: Sequence[Path],
    texts: Sequence[str],
    config: Config,
    screen: Screen,
    ranks: Ranks,
    stop: Stop,
    asked: Mapping[str, bool],
) -> Iterator[Event]:
    """Events of the evaluation of each model, which leaves the RAM before the next one is loaded; each notice once.

    `asked` are arguments of `xlcli.evaluation.evaluate`.
    """
    said = set[Event]()
    for folder, name in zip(folders, names_of(folders), strict=True):
        loaded, runtime = prologue.load_model(folder, config.eval, config.runtime, screen, ranks)
        from xlcli import evaluation

        events = evaluation.evaluate(loaded, texts or None, config.eval, runtime, stop=stop, **asked)
        del loaded
        for event in events:
            if isinstance(event, Notice):
                if event in said:
                    continue
                said.add(event)
            yield replace(event, model=name) if isinstance(event, Score) and len(folders) > 1 else event
        if ranks.broadcast(stop()):
            break


def names_of(folders: Sequence[Path]) -> list[str]:
    """Names of models, with their folders if two have the same."""
    names = [folder.name for folder in folders]
    return [str(folder) if names.count(folder.name) > 1 else folder.name for folder in folders]


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
    """Prints what the evaluation of this model would do, with the longest memory of a sweep."""
    settings, trained = max(settings.sweep, key=lambda each: each.mem_len or 0), read_config(folder)
    text = ", ".join(texts) or f"the text {HELD_OUT[settings.split]} of the model"
    batch_size = settings.batch_size or 8
    if trained.model.effective_mem_len(1) is None or settings.online_option:
        batch_size = 1
    prologue.print_plan(folder, settings, screen, batch_size=batch_size, action=f"scores {text}")


def seeds_of(folders: Sequence[Path]) -> list[list[str]]:
    """Names of models that were trained with the same settings on the same text, but with different seeds."""
    groups = defaultdict[str, dict[int, str]](dict)
    for folder, name in zip(folders, names_of(folders), strict=True):
        match record := read_record(folder):
            case {"runtime": {"seed": int(seed)}}:
                about = read_config(folder), *map(record.get, ("corpus_sha256", "train", "init"))
                groups[repr(about)].setdefault(seed, name)
    return [list(group.values()) for group in groups.values() if len(group) > 1]


def over_seeds(scores: Sequence[Score], run: Run) -> list[dict[str, Any]]:
    """Means and standard deviations over seeds, at each memory length."""
    lengths = dict.fromkeys(score.mem_len for score in scores)
    groups = [[s for s in scores if s.model in names and s.mem_len == n] for names in run.seeds for n in lengths]
    return [report.over_seeds(group) for group in groups if len(group) > 1]


def show_scores(scores: list[Score], run: Run, *, to_stderr: bool) -> None:
    """Prints at least one score as text or JSON, or as text `to_stderr`, and what their comparison says."""
    from xlcli.evaluation.spread import compare

    screen = run.screen
    comparisons = [compare(score, scores[0]) for score in scores[1:]]
    seeds = over_seeds(scores, run)
    if screen.json and not to_stderr:
        objects = [report.score_object(score) for score in scores]
        is_partial = scores[0].partial or len(scores) != run.n_rows
        tree = {"sweep": objects, "partial": is_partial, "comparisons": comparisons, "seeds": seeds}
        screen.object(tree if run.n_rows else objects[0])
    else:
        if any(score.pairs for score in scores):
            text = report.pairs_text(scores, run.shape, screen.columns, comparisons, seeds)
        elif run.n_rows and not scores[0].partial:
            text = report.sweep_text(scores, run.n_rows, screen.columns, seeds)
        else:
            text = report.score_table(scores[0], run.shape)
        text += report.spread_text(scores, comparisons, screen.columns)
        (screen.say if to_stderr else screen.report)(text)
