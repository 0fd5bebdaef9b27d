"""Evaluation: the surprisal of a text under a model. Every token is scored once, in order.

Batch size and segment length change the speed, not the result: each sequence but the first starts with unscored warmup
tokens, as many as the receptive field. Exceptions: without memory, and with the span "growing" of published setups, the
result depends on the segment length. Documents that are scored as if each were alone are the sequences of a batch.

Loss by context length: without memory, and by document, it comes from the pass over the text, whose segments or
documents all start with empty memory. Otherwise nearly every token of that pass has full memory, so the first sequence
counts, and windows of up to twice the memory length, evenly spread over the text, are read again from empty memory.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xlcli.config import EvalConfig
from xlcli.errors import ConfigError, DataError, named
from xlcli.evaluation import figures
from xlcli.evaluation.alternatives import NextWords
from xlcli.evaluation.frequency import Frequencies
from xlcli.evaluation.neighbors import with_neighbors
from xlcli.evaluation.passes import ContextSums, Pass, Totals, score_text, text_batches
from xlcli.evaluation.regions import check_regions, with_regions
from xlcli.evaluation.spread import remark_on_memory, spread_of
from xlcli.evaluation.text import TokenizedText, TokenScores, choose_lengths, is_list_of_sentences, odd_texts, tokenize
from xlcli.events import Done, Notice, Progress, ProgressMeter, Score, Scored, StoppedEarlyError, until
from xlcli.inference import check_memory, check_settings, compile_cache, window_notice
from xlcli.machine import peak_rss_bytes
from xlcli.metrics import LN2, TextCounts, bits_per, misfit, perplexity
from xlcli.online import make_scorer, not_finite
from xlcli.runtime import Runtime
from xlcli.store.folder import LoadedModel
from xlcli.store.layout import HELD_OUT
from xlcli.store.origin import origin_of, was_trained_on
from xlcli.store.state_files import WordPosition
from xlcli.text.corpus import Corpus, Part, gather
from xlcli.text.documents import Joined
from xlcli.text.sources import InputFormat, open_source
from xlcli.text.tokenizers import Coverage, n_unknown
from xlcli.text.tokens import TokenFile
from xlcli.words import Predictions, Words, with_remark_on_rows

Event = Notice | Progress | Scored | Done | Score
LISTED_DOCUMENTS = 20  # number of documents up to which a `Score` has the score of each


def evaluate(
    model: LoadedModel,
    source: Sequence[str | Path] | None,
    options: EvalConfig,
    runtime: Runtime,
    *,
    per_token: bool = False,
    words: bool = False,
    documents: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Scores a text.

    Args:
        model: The model.
        source: Files, folders or `-`, joined to one text; None is the held-out text `options.split` of the model.
        options: Memory lengths, segment length, stride, batch size, and `limit`, the maximum bytes of text.
        runtime: Device and number type.
        per_token: Also yield a `TokenScore` for each token, in order, then `Done`, before each `Score`.
        words: Also yield a `WordScore` for each word, or a `PairScore` or `ContinuationScore` for each row if rows are
            compared, after the `Row` that it is in, if any; then `Done`. Regions come as `RegionScore` after their row.
        documents: Also yield a `DocumentScore` for each document, after its `Row`; then `Done`.
        stop: Called between calls of the model; when true, evaluation ends with the score of the tokens read.

    Yields:
        Progress, notices, and a `Score` for each memory length.

    Raises:
        ConfigError: A setting does not apply to this model, or differs from those the model was loaded with.
        DataError: The text cannot be read, or the model has no held-out text.
        CheckpointError, DivergedError: The loss is not finite.
        ResourceError: The memory does not fit the machine, or the disk is too full for the tokens.
    """
    # Words, and columns of tokens, need more of a prediction than the surprisal.
    reads_out = (words and not options.by_row) or (per_token and bool(options.columns))
    layers = options.asked.layers_of(model.config.model, options.context_cache)
    predictions = Predictions(model.tokenizer, options, runtime.device, layers) if reads_out else None
    if options.asked.of_words and not words:
        raise ConfigError(f"--columns {','.join(options.asked.of_words)} is of words only.", "Use --words FILE.tsv.")
    check_settings(model, options, runtime)
    check_memory(model, runtime, 1, segment_len=1)  # of any text
    frequencies = None
    try:
        if options.asked.frequency:
            counting = Frequencies.read(options.asked.frequency, punctuation=options.split_punctuation)
            frequencies = yield from until(stop, counting)
        text = yield from until(stop, _read(model, source, options))
    except StoppedEarlyError:
        yield _NOT_BEGUN
        return
    lists = per_token, words, documents
    yield from _Evaluation(model, text, options, runtime, predictions, frequencies, *lists, stop).run()


def score_texts(
    model: LoadedModel, texts: Sequence[bytes], options: EvalConfig, runtime: Runtime
) -> Iterator[list[Scored] | Progress]:
    """Tokens and words of each text, scored in batches, each independently. Raises the same errors as `evaluate`."""
    check_settings(model, options, runtime)
    tokenized = [model.tokenizer.tokens(text) for text in texts]
    ends = np.cumsum([len(ids) for ids, _ in tokenized], dtype=np.int64)
    starts = np.append(0, ends)[:-1]
    if not ends.any():
        yield from ([] for _ in texts)
        return
    ids = np.concatenate([ids for ids, _ in tokenized])
    sizes = np.concatenate([sizes for _, sizes in tokenized])
    # The texts are the documents of one text; a document cannot be empty.
    tokens = TokenFile(ids, int(sizes.sum()), text_sizes=sizes, documents=starts[ends > starts])
    text = TokenizedText(Part(Corpus(()), 0, tokens.n_bytes), tokens, TextCounts(tokens.n_bytes))
    scorer = make_scorer(model.network, model.tokenizer, model.learning(options))
    readout = Predictions(model.tokenizer, options, runtime.device)
    with ExitStack() as files:
        scores = TokenScores(len(ids), readout, files)
        run = Pass(model, scorer, runtime, text, choose_lengths(model, runtime, options, text), lambda: False)
        batches = text_batches(run, reads_end=True)
        meter = ProgressMeter("scoring", len(ids), "tokens")
        yield from score_text(run, batches, ContextSums(batches.longest), meter, scores)
        if not np.isfinite(scores.nats).all():
            raise not_finite(model.name, options)
        for data, start, end in zip(texts, starts.tolist(), ends.tolist(), strict=True):
            words = Words(readout.boundaries, WordPosition())
            scored_tokens = [*scores.tokens(iter([data]), tokens, range(start, end))]
            parts: list[Scored] = [*scored_tokens]
            for token in scored_tokens:
                parts += words.feed(token)
            parts += words.end(len(data), scores.prediction(end, after=True))
            yield parts


_PHRASES_NOTICE = (
    "no perplexity per word, because the text has a script without blanks between words: "
    "its words are phrases between blanks, or single Chinese characters and Hiragana"
)
_REGION_NOTICE = "a region without blanks around it is the whole phrase that it stands in: put blanks around it"
_NOT_BEGUN = Notice("stopped before anything was scored.", "warning")


class _Evaluation(NamedTuple):
    """The arguments of `evaluate`, the text, and what is kept of the prediction of each token."""

    model: LoadedModel
    text: TokenizedText
    options: EvalConfig
    runtime: Runtime
    predictions: Predictions | None
    frequencies: Frequencies | None
    per_token: bool
    words: bool
    documents: bool
    stop: Callable[[], bool]

    @property
    def is_listed(self) -> bool:
        """True if more than the `Score` is asked for."""
        return self.per_token or self.words or self.documents

    def run(self) -> Iterator[Event]:
        """Notices on the text, then the events of each memory length of `options.sweep`, the last one its `Score`."""
        model, options = self.model, self.options
        yield from self._notices_on_text()
        scorer = make_scorer(model.network, model.tokenizer, model.learning(options))
        sweep = [choose_lengths(model, self.runtime, one, self.text) for one in options.sweep]
        yield from window_notice(sweep[0], options, self.text.longest_document)
        yield from compile_cache(options, self.stop)
        scores: list[Score] = []
        for number, lengths in enumerate(sweep, 1):
            run = Pass(model, scorer, self.runtime, self.text, lengths, self.stop)
            for event in self._score(run, f"evaluation {number} of {len(sweep)}"):
                if isinstance(event, Score):
                    scores.append(event)
                yield event
            if self.stop():
                return
        remark = remark_on_memory(scores, model.config.train.mem_len)
        if remark is not None:
            yield Notice(remark)

    def _notices_on_text(self) -> Iterator[Notice]:
        """What a reader of the score should know of the text and its tokens."""
        model, text, options = self.model, self.text, self.options
        if model.tokenizer.caveat is not None:
            yield Notice(model.tokenizer.caveat)
        coverage = Coverage(model.tokenizer, model.name)
        coverage.add(text.tokens.ids, text.tokens.sizes(slice(None)))  # with the tokens of contexts
        yield from coverage.notices()
        yield from _file_notices(text, model)
        if text.counts.has_phrases:
            yield Notice(_PHRASES_NOTICE)
            if options.region_mark is not None:
                yield Notice(_REGION_NOTICE, "warning")
        n_documents = len(text.part.corpus.facts.documents)
        if n_documents > LISTED_DOCUMENTS and not (self.is_listed or options.by_row or options.each_line):
            yield Notice(f"{n_documents:,} documents are too many to list; --documents FILE.tsv writes each")

    def _score(self, run: Pass, stage: str) -> Iterator[Event]:
        """Yields the events of one memory length, the last of which is its `Score`, unless no token was scored.

        `stage` names the progress. Scores of single tokens are on disk until the `Score`.
        """
        options, text = self.options, self.text
        # The prediction after the last token says how its word ends.
        batches = text_batches(run, reads_end=self.words and not options.by_row)
        started = time.perf_counter()
        n_documents = len(text.part.corpus.facts.documents)
        shows_documents = 1 < n_documents <= LISTED_DOCUMENTS and not (options.by_row or options.each_line)
        needs_tokens = self.is_listed or n_documents > 1 or run.lengths.by_document or options.by_row
        with ExitStack() as files:
            scores = TokenScores(len(text.tokens), self.predictions, files) if needs_tokens else None
            sums = ContextSums(batches.longest)
            meter = ProgressMeter(stage, len(text.tokens), "tokens")
            totals = yield from score_text(run, batches, sums, meter, scores)
            seconds = time.perf_counter() - started
            if not totals.tokens:
                yield _NOT_BEGUN
                return
            if not math.isfinite(totals.nats):
                raise not_finite(self.model.name, options)
            is_whole = totals.tokens == text.n_scored
            if not is_whole:
                yield Notice(f"stopped: {totals.bytes:,} of {text.counts.bytes:,} bytes were scored.", "warning")
            remark = misfit(self.model.name, totals.nats / LN2, totals.bytes)
            if remark:
                yield Notice(remark, "warning")
            fields: dict[str, Any] = {"partial": not is_whole}
            if scores is not None:
                fields |= yield from self._measure(run, scores, shows_documents=shows_documents, is_whole=is_whole)
            if options.online_option is None and (is_whole or not run.lengths.has_memory):
                fields["by_context"] = yield from figures.loss_by_context(run, batches, sums, options.context_share)
            unknown_id = self.model.tokenizer.unknown_id
            if is_whole and unknown_id is not None:
                fields["unknown_words"] = n_unknown(text.tokens.ids, unknown_id)
        yield Score(**_score_fields(run, options, totals, batches.size, seconds), **fields)

    def _measure(
        self, run: Pass, scores: TokenScores, *, shows_documents: bool, is_whole: bool
    ) -> Generator[Scored | Notice | Done, None, dict[str, Any]]:
        """Returns the fields of `Score` that come from scores of single tokens; yields what is listed, and notices."""
        options, text = self.options, self.text
        fields: dict[str, Any] = {}
        rows: list[Any] = []
        if options.by_row and is_whole:
            rows += figures.row_scores(text, scores.nats, options)
            yield from figures.tie_notice(rows)
        yield from self._parts(run, scores, rows, is_whole=is_whole)
        if options.pairs:
            fields["pairs"] = figures.pair_shares(rows, options.by)
        elif options.by and rows:
            fields |= figures.share_correct(rows, options.by)
        if not is_whole:  # documents need the scores of all their tokens
            return fields
        if shows_documents:
            documents = tuple(figures.document_scores(text, scores.nats, self.model.record, by_line=False))
            fields["by_document"] = documents
            yield from figures.script_notice(documents)
        if not options.by_row:
            yield from figures.foreign_notices(text, scores.nats, self.model, by_line=options.each_line)
        if run.lengths.by_document and not (options.pairs or options.by):
            fields |= _spread_fields(text, scores, options)
        return fields

    def _parts(
        self, run: Pass, scores: TokenScores, rows: Sequence[Scored], *, is_whole: bool
    ) -> Iterator[Scored | Notice | Done]:
        """Yields the parts of the text that are asked for, until stopped: `rows`, words, tokens or documents."""
        options, text = self.options, self.text
        parts: list[Iterable[Scored | Notice]] = []
        if self.words and options.by_row:
            parts.append(rows)
        if self.words and not options.by_row:
            parts.append(self._words(run, scores))
        elif self.per_token and not options.score_field:
            parts.append(text.rows_and_tokens(scores))
        if self.documents and is_whole:
            parts.append(figures.document_scores(text, scores.nats, self.model.record, by_line=options.each_line))
        for part in chain.from_iterable(parts):
            if self.stop():
                return
            yield part
        if self.is_listed and is_whole:
            yield Done()

    def _words(self, run: Pass, scores: TokenScores) -> Iterator[Scored | Notice]:
        """Yields the words of the text with all columns that are asked for, their rows, and tokens if they are, too."""
        options, text = self.options, self.text
        search = None
        if options.asked.n_searched and scores.predictions is not None:
            search = NextWords(run, scores.predictions)
        words: Iterable[Scored]
        words = text.word_scores(scores, by_line=options.each_line, with_tokens=self.per_token, search=search)
        if self.frequencies is not None:
            words = map(self.frequencies.added_to, words)
        if options.asked.of_words:
            words = with_neighbors(words, options.asked)
        if options.region_mark is not None:
            words = with_regions(words, text.part.corpus, options.region_column)
        return with_remark_on_rows(words, punctuation=options.split_punctuation)


def _file_notices(text: TokenizedText, model: LoadedModel) -> Iterator[Notice]:
    """Warnings of files with the same text, and of files that are training text of the model, by its record."""
    files = [*text.part.files()]
    names_by_digest = defaultdict[str, list[str]](list)
    for digest, name in files:
        names_by_digest[digest].append(name)
    repeated = [" and ".join(same) for same in names_by_digest.values() if len(same) > 1]
    if repeated:
        remark = "each counts, and intervals over documents are too narrow"
        yield Notice(f"the same text in {named(repeated, most=3)}: {remark}", "warning")
    names = [name for digest, name in files if was_trained_on(model.record, digest)]
    if not names:
        return
    what = f"{names[0]} is"
    if len(files) > 1:
        what = f"{len(names)} of the {len(files)} files ({named(names, most=3)}) are"
    remark = "scores of text that a model was trained on say little of new text"
    yield Notice(f"{what} in the training text of {model.name}; {remark}", "warning")


def _read(
    model: LoadedModel, source: Sequence[str | Path] | None, options: EvalConfig
) -> Generator[Notice | Progress, None, TokenizedText]:
    """The text of `evaluate`, tokenized."""
    if source is None:
        corpus = _held_out_text(model, options)
    else:
        kind = model.tokenizer.kind
        fields = options.text_fields
        if options.score_field:
            fields = Joined(fields, options.joiner)
        input_format = InputFormat(
            binary=options.binary,
            text_fields=fields,
            any_bytes=kind == "bytes",
            each_line=options.each_line,
            region_marks=None if options.region_column else options.region_mark,
        )
        corpus = yield from gather(source, input_format=input_format)
    if options.by is not None:
        yield from _check_values(corpus, options.by, options)
    if options.region_mark is not None:
        yield from check_regions(corpus, options.region_column)
    starts = None
    if options.reset_on_change is not None:
        starts = yield from _check_values(corpus, options.reset_on_change, options)
    by_document = options.reading(model.config.model, model.config.train.reading).reset_on_document
    text = yield from tokenize(corpus, model.tokenizer, options.limit, by_document=by_document, starts=starts)
    if options.online_option and len(text.documents) > 1:
        raise ConfigError(
            f"{len(text.documents):,} documents are scored each as if it were alone, as in training, but "
            f"{options.online_option} learns from one to the next.",
            f"Add --set eval.reset_on_document=false, or use xlcli stream {options.online_option}.",
        )
    yield from _reading_notices(text, options, model.tokenizer.kind, is_held_out=source is None)
    return text


def _held_out_text(model: LoadedModel, options: EvalConfig) -> Corpus:
    path = model.held_out(options.split)
    if options.by_row or options.region_mark is not None:
        reason = "--pairs, --score-field and --region-mark need a file of rows."
        raise DataError(reason, "Give a file: xlcli eval FILE ...")
    if path is None:
        problem = f"model {model.name} keeps no held-out text ({HELD_OUT[options.split]})."
        raise DataError(problem, "Give a file: xlcli eval FILE.")
    documents = None if options.each_line else model.held_out_documents(options.split)
    source = open_source(path, InputFormat(binary=True, each_line=options.each_line))
    return Corpus([source], documents=documents)


def _check_values(corpus: Corpus, key: str, options: EvalConfig) -> Generator[Notice, None, list[int]]:
    """Returns where the value of `key` changes: the start of each row whose value differs from that of the row before.

    Yields notices on empty values, and on stories that come back. Raises `DataError` if a row lacks the key.
    """
    starts: list[int] = []
    empty, returning = list[str](), list[str]()  # places of rows
    earlier_values: set[str] = set()
    value_before: str | None = None
    for start, row in corpus.rows():
        if options.pairs:  # two documents are a row
            row = replace(row, document=(row.document + 1) // 2)
        if key not in row.fields:
            raise DataError(f"{row.place} has no '{key}'.", "Name a column or key that all rows have.")
        value = str(row.fields[key])
        is_empty = row.fields[key] is None or not value.strip()
        is_change = value != value_before
        if is_empty:
            empty.append(row.place)
        elif is_change and value in earlier_values:
            returning.append(row.place)
        if is_change:
            starts.append(start)
        earlier_values.add(value)
        value_before = value
    if empty:
        remark = f"'{key}' is empty in {len(empty):,} rows ({empty[0]} is the first)"
        yield Notice(f"{remark}; fill these cells, since merged cells have their value only once", "warning")
    if returning and key == options.reset_on_change:
        remark = f"values of '{key}' return after others in {len(returning):,} rows ({returning[0]} is the first)"
        yield Notice(f"{remark}, where the memory is cleared; sort the rows to read each story at once", "warning")
    return starts


def _reading_notices(
    text: TokenizedText, options: EvalConfig, tokenizer: str, *, is_held_out: bool
) -> Iterator[Notice]:
    """Yields notices on documents that are scored apart, or could be, and on odd rows or lines of the text."""
    corpus = text.part.corpus
    n_rows = len(text.part.documents)
    n_scored_apart = len(text.documents)
    is_decided = options.each_line or options.by_row or options.reset_on_change is not None
    is_open = options.reset_on_document is None
    if is_open and n_scored_apart != 1 and not is_decided:
        yield Notice(
            f"{n_scored_apart:,} documents, each scored as if it were alone, as in training; "
            "--set eval.reset_on_document=false scores them as one text."
        )
    if is_held_out:
        return
    has_rows = n_rows > len(corpus.sources)
    if is_open and n_scored_apart == 1 and has_rows:
        yield Notice(
            f"{n_rows:,} rows are read as one text, in which earlier ones influence later ones; --reset-on-document "
            "scores each on its own"
        )
    if tokenizer != "ids" and not options.binary:
        yield from odd_texts(text, options)
    can_divide = n_rows == 1 and options.online_option is None and not is_decided
    if can_divide and is_list_of_sentences(next(corpus.read(0, 2**16))):
        yield Notice(
            f"{corpus.sources[0].name} looks like a list of sentences, which now influence each other; "
            "--each-line scores each on its own"
        )


def _spread_fields(text: TokenizedText, scores: TokenScores, options: EvalConfig) -> dict[str, Any]:
    """Fields of `Score` that documents make: `spread`, `sums`. None if all lines but one are blank."""
    bits_and_bytes = figures.document_sums(text, scores.nats)[:, :2]
    if options.each_line:
        has_text = bits_and_bytes[:, 1] > 1  # more than a line end: blank lines are no documents
        bits_and_bytes = bits_and_bytes[has_text]
    if len(bits_and_bytes) < 2:
        return {}
    return {"spread": spread_of(bits_and_bytes), "sums": tuple(map(tuple, bits_and_bytes.tolist()))}


def _score_fields(run: Pass, options: EvalConfig, totals: Totals, batch_size: int, seconds: float) -> dict[str, Any]:
    """Fields of `Score` of any pass; characters and words of a part of the text were not counted."""
    model, runtime, text = run.model, run.runtime, run.text
    if totals.tokens == text.n_scored:
        counts = text.counts
    else:
        counts = TextCounts(totals.bytes)
    return {
        "model": model.name,
        "position": model.config.model.position.kind,
        "attention": model.config.model.attention.kind,
        "parameters": model.network.n_parameters,
        "weight_dtype": model.weight_dtype,
        "finished": model.record.get("finished") is not False,
        "train_steps": None if origin_of(model.record) else model.record.get("steps"),
        "file": text.part.corpus.name,
        "crlf": sum(text.part.corpus.facts.crlf),
        **asdict(counts),
        "documents": totals.documents if run.lengths.by_document else 1,
        "tokens": totals.tokens,
        "nats": totals.nats,
        "bits_per_byte": bits_per(totals.nats, counts.bytes),
        "bits_per_char": bits_per(totals.nats, counts.chars) if counts.chars else None,
        "perplexity": perplexity(totals.nats, totals.tokens),
        "word_perplexity": perplexity(totals.nats, counts.words) if counts.words else None,
        "mean_steps": None if totals.steps is None else totals.steps / totals.tokens,
        "each_line": options.each_line,
        "adapt": options.adapt,
        "context_cache": options.context_cache,
        "batch_size": batch_size,
        **run.lengths.init_arguments,
        "tokens_per_second": totals.tokens / seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "seconds": seconds,
        "device": str(runtime.device),
        "dtype": runtime.dtype_name,
    }
