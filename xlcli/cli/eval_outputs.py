"""Files that `xlcli eval` writes beside its report: lists of tokens or words, a page, a table of figures, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, NamedTuple

from xlcli import events
from xlcli.cli.command import Call
from xlcli.cli.options import option, plot_option
from xlcli.cli.outputs import LIST, PAGE, PICTURE, TABLE, Kept, Kind, Sink, write_output
from xlcli.cli.page import Page
from xlcli.cli.plot import draw_by_context, draw_by_memory
from xlcli.cli.render import Screen
from xlcli.cli.score_report import describe_context, describe_learning, document_name, over_seeds, score_rows, seed_rows
from xlcli.cli.signals import Stop
from xlcli.cli.tables import JoinedListing, Listing, csv_text, form_of
from xlcli.config import EvalConfig, ModelConfig
from xlcli.errors import ConfigError
from xlcli.files import read_json
from xlcli.store.layout import TOKENIZER

PerToken = Annotated[
    str | None,
    option("Results", "--per-token FILE.jsonl", "Write each token with its bits; also as .csv, .tsv or .parquet."),
]
Words = Annotated[
    str | None,
    option(
        "Results", "--words FILE.tsv", "Write the bits of each word or compared row; also as .csv, .jsonl, .parquet."
    ),
]
Regions = Annotated[
    str | None, option("Results", "--regions FILE.tsv", "Write the bits of each region of a text (--region-mark).")
]
Documents = Annotated[
    str | None, option("Results", "--documents FILE.tsv", "Write the bits of each document: a row or a file.")
]
Csv = Annotated[
    str | None,
    option("Results", "--csv FILE.csv", "Write the table of figures: a row for each model and memory length."),
]
Plot = Annotated[str | None, plot_option("Results", "Plot the loss by context, or by memory length of a sweep")]


class Run(NamedTuple):
    """What outputs know of an evaluation: names of the models, the shape of the first one, and how to print.

    `columns` are names of the evaluations, each of a model and a memory length, as lists have them in columns. `seeds`
    are groups of models that differ in their seeds only. `n_rows` is the number of evaluations in a table; 0 for one
    score.
    """

    names: Sequence[str]
    columns: Sequence[str]
    seeds: Sequence[Sequence[str]]
    shape: ModelConfig
    n_rows: int
    screen: Screen
    stop: Stop


class ResultFile:
    """A file that `eval` writes beside its report, or standard output for `-`."""

    name: ClassVar[str]  # its option, as a parameter
    kind: ClassVar[Kind]  # what it is, by its suffix
    excludes: ClassVar[Sequence[str]] = ()  # settings with which it cannot be made, and other such files
    lists: ClassVar[Sequence[str]] = ()  # what the evaluation has to yield for it: arguments of `evaluate`

    def __init__(self, path: str) -> None:
        self.path = path

    def check_settings(self, call: Call, settings: EvalConfig) -> None:
        """`ConfigError` if something was given that it excludes."""
        for other in self.excludes:
            value = getattr(settings, other) if hasattr(settings, other) else call.params[other]
            if value:
                raise call.conflict(self.name, other)

    def check_models(self, folders: Sequence[Path]) -> None:
        """`ConfigError` if it cannot be made of these models together."""

    def sink(self, run: Run) -> Sink:
        """Takes the events of the evaluation and writes the file."""
        raise NotImplementedError


class _List(ResultFile):
    """Events of some classes, with the columns of their rows. `is_json`: a pipe gets JSON lines without `--json`."""

    kind = LIST
    kinds: ClassVar[tuple[type[events.Scored], ...]]
    is_json: ClassVar[bool] = False

    def sink(self, run: Run) -> Sink:
        form = form_of(self.path, json=self.is_json or run.screen.json)
        kinds = (events.Row, *self.kinds)
        if len(run.columns) > 1:
            return JoinedListing(self.path, form, run.screen, kinds, run.columns)
        return Listing(self.path, form, run.screen, kinds)


class TokenList(_List):
    """`--per-token`."""

    name = "per_token"
    excludes = ("score_field",)
    lists = ("per_token",)
    kinds = (events.TokenScore,)
    is_json = True

    def check_models(self, folders: Sequence[Path]) -> None:
        vocabularies = {read_json(folder / TOKENIZER[0]).get("fingerprint") for folder in folders}
        if len(vocabularies) > 1:  # rows of tokens could not be joined
            raise ConfigError("--per-token needs models with the same vocabulary.", "Use --words, or one -m NAME.")


class WordList(_List):
    """`--words`: words, or what is said of compared rows."""

    name = "words"
    lists = ("words",)
    kinds = (events.WordScore, events.PairScore, events.ContinuationScore)


class RegionList(_List):
    """`--regions`."""

    name = "regions"
    lists = ("words",)
    kinds = (events.RegionScore,)


class DocumentList(_List):
    """`--documents`."""

    name = "documents"
    excludes = ("pairs", "score_field")
    lists = ("documents",)
    kinds = (events.DocumentScore,)


class PageFile(ResultFile):
    """`--html`."""

    name = "html"
    kind = PAGE
    excludes = ("score_field", "sweep_mem_len")
    lists = ("per_token", "words")

    def check_models(self, folders: Sequence[Path]) -> None:
        check_single("--html", folders)

    def sink(self, run: Run) -> Sink:
        return _PageSink(self.path, run)


def check_single(what: str, folders: Sequence[Path]) -> None:
    """`ConfigError` if there are several models."""
    if len(folders) > 1:
        raise ConfigError(f"{what} needs one model, not {len(folders)}.", "Give one -m NAME.")


class _PageSink(Sink):
    """Collects the page of a text, and writes it if the text was scored to its end."""

    def __init__(self, path: str, run: Run) -> None:
        self._page, self._run = Page(Path(path)), run
        self._score: events.Score | None = None
        self._is_whole = False

    def add(self, event: events.Event) -> None:
        match event:
            case events.Row():
                self._page.begin(document_name(event) or f"document {event.document}")
            case events.TokenScore():
                self._page.add(event)
            case events.WordScore():
                self._page.add_word(event)
            case events.Score():
                self._score = event
            case events.Done():
                self._is_whole = True

    def close(self) -> None:
        score, screen = self._score, self._run.screen
        if score is None or not self._is_whole:
            screen.not_written(str(self._page.path))
            return
        perplexities = [("perplexity per token", f"{score.perplexity:.5g}")]
        if score.word_perplexity is not None:
            perplexities.append(("perplexity per word", f"{score.word_perplexity:.5g}"))
        context = describe_context(self._run.shape, score.mem_len, score.segment_len, score.stride)
        context += describe_learning(adapt=score.adapt, context_cache=score.context_cache)
        title = ", ".join(PurePath(name).name for name in score.file.split(", "))
        self._page.save(title, score.model, context, perplexities, score.by_context)
        screen.say(f"page written to {self._page.path}")


class FigureTable(ResultFile):
    """`--csv`: the table of the report, unless the evaluation was stopped."""

    name = "csv"
    kind = TABLE

    def sink(self, run: Run) -> Sink:
        return Kept(events.Score, lambda scores: self._write(scores, run))

    def _write(self, scores: Sequence[events.Score], run: Run) -> None:
        if run.stop():
            run.screen.not_written(self.path)
            return
        rows = []
        for score in scores:
            rows += score_rows(score)
        if not scores[0].pairs:  # which have a row for each group
            rows += seed_rows(seed_statistics(scores, run))
        text = csv_text(rows)
        if self.path == "-":
            run.screen.print(text)
        else:
            write_output(Path(self.path), [text.encode("utf-8", "surrogateescape")])


class Picture(ResultFile):
    """`--plot`: the loss by memory length of a sweep, else by context, unless the evaluation was stopped."""

    name = "plot"
    kind = PICTURE
    excludes = ("stride", "adapt", "context_cache")

    def sink(self, run: Run) -> Sink:
        return Kept(events.Score, lambda scores: self._draw(scores, run))

    def _draw(self, scores: Sequence[events.Score], run: Run) -> None:
        if run.stop():
            run.screen.not_written(self.path)
            return
        has_several_lengths = len({score.model for score in scores}) < len(scores)
        curves = [score for score in scores if score.by_context]
        if has_several_lengths:
            draw_by_memory(self.path, scores)
        elif curves:
            draw_by_context(self.path, curves)
        else:
            run.screen.say(f"{self.path} was not written: overlapping windows have no loss by context", "warning")
            return
        run.screen.say(f"plot written to {self.path}")


OUTPUTS = TokenList, WordList, RegionList, DocumentList, PageFile, FigureTable, Picture


def seed_statistics(scores: Sequence[events.Score], run: Run) -> list[dict[str, Any]]:
    """Means and standard deviations over seeds, at each memory length, and `difference` to the first group there."""
    from xlcli.evaluation.spread import seed_difference

    lengths = dict.fromkeys(score.mem_len for score in scores)
    first_groups: dict[int, list[events.Score]] = {}  # by memory length
    rows = []
    for names in run.seeds:
        for mem_len in lengths:
            group = [score for score in scores if score.model in names and score.mem_len == mem_len]
            if len(group) < 2:
                continue
            first = first_groups.setdefault(mem_len, group)
            difference = None if first is group else seed_difference(group, first)
            rows.append({**over_seeds(group), "difference": difference})
    return rows
