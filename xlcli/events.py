"""Events that workflows yield: frozen values for commands to render and programs to read. Never imports torch.

Units: `seconds` is wall-clock time; `bits_per_byte` is nats / ln 2 / bytes of text; `nats` is a sum; byte offsets count
from the start of the text.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

E = TypeVar("E")
T = TypeVar("T")


class Event:
    """What a workflow yields."""

    __slots__ = ()


# Any workflow


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """Message for the user: a choice made automatically, a warning, or a better choice."""

    text: str
    level: Literal["info", "warning", "detail"] = "info"


@dataclass(frozen=True, slots=True)
class Progress(Event):
    """Progress of a long stage in `unit`s, and `rate` of them per second. `total` is None if unknown."""

    stage: str
    done: int
    total: int | None
    unit: str
    rate: float | None = None


PROGRESS_INTERVAL = 0.2  # minimum seconds between two `Progress` events of a stage


class ProgressMeter:
    """Makes the `Progress` events of one stage, at most one every `PROGRESS_INTERVAL` seconds."""

    def __init__(self, stage: str, total: int | None, unit: str) -> None:
        self.stage, self.total, self.unit = stage, total, unit
        self._started = self._reported = time.monotonic()

    def report(self, done: int) -> Iterator[Progress]:
        """An event for the amount `done`, if the last one is old enough."""
        now = time.monotonic()
        if now - self._reported >= PROGRESS_INTERVAL:
            self._reported = now
            yield Progress(self.stage, done, self.total, self.unit, done / (now - self._started))


class StoppedEarlyError(Exception):
    """`stop` became true before there was anything to save or to score."""


def until(stop: Callable[[], bool], work: Generator[E, None, T]) -> Generator[E, None, T]:
    """Events and result of `work`, which is closed once `stop` is true: `StoppedEarlyError`."""
    while not stop():
        try:
            event = next(work)
        except StopIteration as end:
            if not stop():
                return end.value  # type: ignore[no-any-return]
        else:
            yield event
    work.close()
    raise StoppedEarlyError


# Training


@dataclass(frozen=True, slots=True)
class Plan(Event):
    """Plan of a training run, and the result of `--dry-run`."""

    folder: Path
    corpus: str
    train_bytes: int
    valid_bytes: int
    test_bytes: int
    train_tokens: int | None
    tokenizer: str
    vocab_size: int
    preset: str
    parameters: int
    needed_bytes: int  # estimated peak of RAM or GPU memory
    weights: str  # encoding of the stored weights
    weights_bytes: int
    checkpoint_bytes: int  # estimated size of one, with the state of the optimizer
    checkpoints: int  # number of them that are kept
    device: str
    dtype: str
    threads: int
    budget: str
    resumed_at: int
    init: str | None = None  # name of the model whose weights the run starts from
    estimated: bool = False  # `train_tokens` is an estimate from a sample of the text, as in a dry run
    available_bytes: int | None = None
    n_ranks: int = 1  # number of processes that train
    rows: int | None = None  # sequences of a batch for each of them
    valid_from_end: bool = False  # the validation text was split off the end of `corpus`
    left_out: tuple[str, ...] = ()  # given files that are not read, because they are held-out text
    held_out_files: tuple[str, ...] = ()  # given files that the seed has drawn as validation and test text


@dataclass(frozen=True, slots=True)
class Step(Event):
    """One optimizer step."""

    step: int
    tokens: int
    seconds: float
    nats: float  # mean loss per token
    bits_per_byte: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    fraction: float  # share of the budget spent, 0 to 1
    eta_seconds: float  # time until the first budget is spent, at the mean speed of the steps of this process
    last_step: int  # step at which it is then spent
    mean_steps: float | None = None  # mean number of steps per token with adaptive computation time


@dataclass(frozen=True, slots=True)
class Validation(Event):
    """Validation during training."""

    step: int
    tokens: int
    seconds: float
    bits_per_byte: float
    best: bool  # the lowest value so far; the weights were saved


@dataclass(frozen=True, slots=True)
class Saved(Event):
    """A checkpoint was written."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """All ranks of a run have agreed to stop it, and have saved. Each of them has this event at the same time."""


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Text of the score of a model: the first `bytes` of the `of_bytes` bytes of its validation text."""

    bytes: int  # `xlcli eval -m NAME --limit BYTES` prints the same score
    of_bytes: int
    mem_len: int  # in tokens

    @property
    def is_partial(self) -> bool:
        return self.bytes < self.of_bytes


@dataclass(frozen=True, slots=True)
class Trained(Event):
    """End of a run."""

    folder: Path
    step: int
    tokens: int
    seconds: float  # of training, without the final score and sample
    bits_per_byte: float | None  # score of the best weights on the text `scored`
    best_step: int | None
    stopped: bool  # the run ended before its budget was spent
    sample: str
    scored: ScoredText | None = None
    # Validations of the weights that the run started from and of the best ones, if it started from a model. They can be
    # compared with each other, but not with `bits_per_byte`.
    start_validation: float | None = None
    best_validation: float | None = None
    improves: bool = False  # the time was over, and the last step was the best


# Evaluation, streaming and benchmarks


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model predicted in the place of a token."""

    word_ends: tuple[float, ...]  # log2 of the probability that a word ends here: after a letter, after a mark
    entropy: float  # in bits
    columns: Mapping[str, Any] = field(default_factory=dict)  # those that were asked for
    # `word_ends` by the prediction of each column that has its own: of an inner block, or at a temperature.
    column_ends: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenScore(Event):
    """One token of evaluated or streamed text."""

    line: int  # number of its line, from 1
    byte: int  # its offset
    text: bytes
    bits: float  # surprisal
    prediction: Prediction | None = None  # if it was asked for


@dataclass(frozen=True, slots=True)
class Row(Event):
    """A document begins."""

    document: int  # its number
    fields: Mapping[str, Any]  # the other columns or keys, if it is a row of a table or a JSON object
    regions: Sequence[tuple[int, int]] = field(default=(), repr=False)  # where marked regions begin and end
    file: str | None = field(default=None, repr=False)  # name of its file, if several are read

    @property
    def place(self) -> str:
        """What a message calls it: `row 3`, or `row 3 of all, in b.csv,` if several files are read."""
        if self.file is None:
            return f"row {self.document:,}"
        return f"row {self.document:,} of all, in {self.file},"


@dataclass(frozen=True, slots=True)
class WordScore(Event):
    """One word of evaluated or streamed text (`xlcli.words`)."""

    document: int  # number of its document, from 1: a row, a text of JSON lines, a file
    line: int  # number of its line, from 1
    number: int  # number of the word in its line, from 1
    byte: int
    word: str  # its text; bytes that are not UTF-8 are U+FFFD
    bits: float
    naive_bits: float  # sum of the surprisals of its tokens
    token_entropy: float  # entropy in bits of the prediction of its first token
    tokens: int
    # Further columns that were asked for, by their names.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # Entropy in bits of the prediction of the token after it, if the word ended by that prediction.
    next_entropy: float | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RegionScore(Event):
    """Words that the user has marked (`xlcli.evaluation.regions`). The event comes after the words of their text."""

    document: int
    region: int  # number of the region in the text, from 1
    number: int  # number of its first word in the text, from 1
    byte: int
    text: str
    words: int
    bits: float  # sum over the words, as `naive_bits` and `tokens`
    naive_bits: float
    token_entropy: float  # of the first word
    tokens: int
    next_bits: float | None  # bits of the word after the region; None at the end
    next_two_bits: float | None  # bits of the two words after it
    columns: Mapping[str, Any] = field(default_factory=dict)  # as `xlcli.evaluation.regions` says


@dataclass(frozen=True, slots=True)
class DocumentScore(Event):
    """A document, scored alone or after others. `characters`, `words`, and what is per each: as of `TextCounts`."""

    document: int
    bytes: int
    characters: int | None
    words: int | None
    tokens: int
    bits: float
    bits_per_byte: float
    bits_per_char: float | None
    word_perplexity: float | None
    # `trained_on`: a file with the same text as its file is in the training text of the model; None if that is unknown.
    # Left out if the record of the model lists no files.
    columns: Mapping[str, bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContextBin:
    """Loss of tokens with a context of at least `start` and fewer than `stop` tokens, counted from an empty memory."""

    start: int
    stop: int
    tokens: int
    bits_per_byte: float
    margin: float | None = None  # half the width of the 95 % interval of `bits_per_byte`, if it can be estimated


@dataclass(frozen=True, slots=True)
class PairScore(Event):
    """Two texts of a row that are compared: surprisal in bits and tokens of each."""

    pair: int
    first_bits: float
    second_bits: float
    first_tokens: int
    second_tokens: int


@dataclass(frozen=True, slots=True)
class PairShare:
    """Share of the pairs of a group whose first text is more probable, with its 95 % interval. Ties count as half."""

    group: str | None  # None: all pairs
    pairs: int
    share: float
    low: float
    high: float
    share_per_token: float  # the same of means per token
    # Not in JSON: 1 for each pair whose first text is more probable, -1 if the second one is, else 0.
    signs: tuple[int, ...] = field(default=(), repr=False)
    ties: int = 0  # pairs whose texts are equal, or equally probable


@dataclass(frozen=True, slots=True)
class Spread:
    """Bits per byte of several documents with 95 % intervals (`xlcli.evaluation.spread`), or a difference of them."""

    documents: int
    bits_per_byte: float  # of the whole text
    bits_per_byte_low: float | None  # None, as the other bounds, if there are fewer than five documents
    bits_per_byte_high: float | None
    document_mean: float  # mean over documents, however long each is
    document_mean_low: float | None
    document_mean_high: float | None


@dataclass(frozen=True, slots=True)
class Discordance:
    """Pairs of a group in which only one of two models gives the first text the higher probability."""

    group: str | None  # None: all pairs
    only_model: int
    only_other: int
    p: float  # of the exact test of McNemar, two-sided


@dataclass(frozen=True, slots=True)
class Comparison:
    """An evaluation less another one of the same text: the spread of the difference, or pairs that they disagree on."""

    spread: Spread | None = None
    pairs: tuple[Discordance, ...] = ()


@dataclass(frozen=True, slots=True)
class ContinuationScore(Event):
    """Surprisal of the continuation of a row after its context; its tokens and bytes are with the blank before it."""

    row: int
    bits: float
    bits_per_byte: float
    bytes: int
    tokens: int
    best: bool | None = None  # its bits are the lowest ones of its group; None without groups
    best_per_byte: bool | None = None  # so are its bits per byte


Scored = TokenScore | Row | WordScore | RegionScore | DocumentScore | PairScore | ContinuationScore
"""Parts of a text with their scores, and the rows that they are in."""


@dataclass(frozen=True, slots=True)
class Done(Event):
    """End of the parts that were asked for: the whole text is scored, but maybe not all of its `Score` is measured."""


VALIDATION_TOKENS = 2**15
"""Maximum number of tokens of a validation during training, from the beginning of the validation text."""


@dataclass(frozen=True, slots=True)
class Score(Event):
    """One evaluation; its fields are the JSON keys of `xlcli eval`."""

    model: str
    position: str
    attention: str
    parameters: int
    file: str
    bytes: int
    chars: int | None  # None, as `words`, if the text is not UTF-8
    words: int | None
    tokens: int
    nats: float
    bits_per_byte: float
    bits_per_char: float | None
    perplexity: float
    word_perplexity: float | None
    mem_len: int
    segment_len: int
    batch_size: int
    span: str
    tokens_per_second: float
    peak_rss_bytes: int
    seconds: float
    device: str
    dtype: str
    weight_dtype: str = "float32"  # number type that weights were rounded to
    memory_dtype: str = "float32"  # number type that the memory was rounded to
    unknown_words: int | None = None  # words scored as `<unk>`, if the vocabulary is one of words
    documents: int = 1  # documents that were scored to their end, each on its own; 1 if the text was not divided
    each_line: bool = False  # the documents are lines
    crlf: int = 0  # CR LF in the files that were read as LF
    stride: int | None = None  # distance in tokens of overlapping windows of `segment_len` tokens, if there are any
    adapt: bool = False  # the weights were adapted to the text while it was read
    context_cache: int | None = None  # tokens of the cache, if there is one
    mean_steps: float | None = None  # mean number of steps per token with adaptive computation time
    partial: bool = False  # evaluation was stopped; all values are of the tokens scored until then
    finished: bool = True  # the training of the model has ended
    train_steps: int | None = None  # None: unknown, or it started from another model
    by_context: tuple[ContextBin, ...] = ()  # empty with a stride, adaptation or a cache
    pairs: tuple[PairShare, ...] = ()  # of all pairs of texts and of each group, if pairs were compared
    correct: float | None = None  # share of groups whose most probable continuation is the correct one, if rows say it
    correct_low: float | None = None  # bounds of its 95 % interval
    correct_high: float | None = None
    correct_by_chance: float | None = None  # the share that a choice at random has on average
    correct_per_byte: float | None = None  # `correct` of means per byte
    spread: Spread | None = None  # over documents, if there are several that are neither pairs nor groups
    # Not in JSON: bits and bytes of each document; and its `Row` and `DocumentScore`, by turns, if they are few.
    sums: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    by_document: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Speed(Event):
    """Speed of a task with one memory length; its fields, if they apply, are the JSON keys of `xlcli bench`."""

    task: Literal["decode", "eval", "train"]
    model: str
    parameters: int
    mem_len: int
    segment_len: int
    batch_size: int
    calls: int  # number of timed calls, to which `tokens`, `seconds` and `tokens_per_second` belong
    tokens: int
    tokens_per_second: float
    # Median duration of a call, divided by its tokens; `_p90` and `_p99` are percentiles, the latter from 100
    # calls on.
    ms_per_token: float
    ms_per_token_p90: float
    peak_rss_bytes: int  # peak RAM of the process up to the last timed call, without the comparison
    seconds: float
    device: str
    dtype: str
    threads: int
    ms_per_token_p99: float | None = None
    # Time of a call over one token and the `mem_len` tokens before it of one sequence, from empty memory. None
    # if it does not fit the machine.
    recompute_ms_per_token: float | None = None
    recompute_ratio: float | None = None  # that time over `ms_per_token`
    weight_dtype: str = "float32"
    memory_dtype: str = "float32"
    first_token_seconds: float | None = None  # time from a prompt of `prompt_tokens` tokens to the next token
    prompt_tokens: int | None = None
    kernels: bool | None = None  # whether compiled kernels decode


@dataclass(frozen=True, slots=True)
class LineScore(Event):
    """One line of a stream with its line end."""

    line: int
    byte: int
    bytes: int
    text: builtins.bytes
    tokens: int
    bits: float
    bits_per_byte: float
    spans: tuple[tuple[builtins.bytes, float], ...]  # texts and bits of its tokens, for coloring


@dataclass(frozen=True, slots=True)
class RecordScore(LineScore):
    """One record of a stream: a row, what a pattern found in a line, or an event of lines, from its first `line` on."""

    fields: Mapping[str, Any]  # those of its row with the text, as they came


@dataclass(frozen=True, slots=True)
class StreamStats(Event):
    """Totals of a stream since this run began, without what a resumed state has read before."""

    lines: int
    bytes: int
    tokens: int
    bits: float
    bits_per_byte: float | None  # None if there was nothing to score
    seconds: float
    busy_seconds: float  # without waits for input; a stream that is busy all the time does not keep up
    lines_per_second: float  # while busy
    tokens_per_second: float  # while busy
    mem_len: int
    state_bytes: int
    final: bool
    shown: int | None = None  # lines or tokens selected; None if all are
    crlf: int = 0
    records: int = 0  # rows and events of the text, whose `lines` are those of their texts; 0 if it is plain
    skipped: int = 0  # lines of the input without a text


# Generation


@dataclass(frozen=True, slots=True)
class GeneratedText(Event):
    """Next text of a sample, in whole UTF-8 characters."""

    sample: int
    text: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token in nats by the model, before temperature, repetition penalty and filters."""

    token: int  # its id
    text: bytes
    logprob: float
    best: tuple[TokenLogprob, ...] = ()  # the most probable tokens in its place, if they were asked for


@dataclass(frozen=True, slots=True)
class Generated(Event):
    """One finished sample; its fields are the JSON keys of `xlcli generate`."""

    sample: int
    prompt: str
    text: str
    tokens: int
    seed: int
    stop_reason: Literal["length", "stop", "interrupted"]
    tokens_per_second: float
    logprobs: tuple[TokenLogprob, ...] | None = None  # if they were asked for
