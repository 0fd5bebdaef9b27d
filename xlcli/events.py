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
    """Message for the user: a choice made automatically, a warning, or a hint at a better choice."""

    text: str
    level: Literal["info", "warning", "detail", "hint"] = "info"


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
    """Plan of a training run, and the result of `--dry-run`.

    `needed_bytes` is an estimated peak of RAM or GPU memory, `available_bytes` are free; `weights` and `weights_bytes`
    are encoding and size of the stored weights. `init` is the name of the model whose weights the run starts from, or
    None. `estimated`: the number of tokens is an estimate from a sample of the text, as in a dry run.
    `valid_from_end`: the validation text was split off the end of `corpus`.
    `left_out`: files among the given ones that are not read, because they are held-out text.
    `held_out_files`: files among the given ones that the seed has drawn as validation and test text.
    `n_ranks` processes train, `n_local_ranks` of them on this machine, with `rows` sequences of a batch each.
    """

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
    needed_bytes: int
    weights: str
    weights_bytes: int
    device: str
    dtype: str
    threads: int
    budget: str
    resumed_at: int
    init: str | None = None
    estimated: bool = False
    available_bytes: int | None = None
    n_ranks: int = 1
    n_local_ranks: int = 1
    rows: int | None = None
    valid_from_end: bool = False
    left_out: tuple[str, ...] = ()
    held_out_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step(Event):
    """One optimizer step. `nats` is the mean loss per token, `fraction` the share of the budget spent, 0 to 1.

    `eta_seconds` is the time until the first budget is spent, at the mean speed of the steps of this process, and
    `last_step` the step at which it is then spent.
    `mean_steps` is the mean number of steps per token of a model with adaptive computation time, else None.
    """

    step: int
    tokens: int
    seconds: float
    nats: float
    bits_per_byte: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    fraction: float
    eta_seconds: float
    last_step: int
    mean_steps: float | None = None


@dataclass(frozen=True, slots=True)
class Validation(Event):
    """Validation during training. `best`: the lowest value so far; the weights were saved."""

    step: int
    tokens: int
    seconds: float
    bits_per_byte: float
    best: bool


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
    """Text of the score of a model: the first `bytes` of the `of_bytes` bytes of its validation text.

    `mem_len` is the memory length in tokens. `xlcli eval -m NAME --limit BYTES` prints the same score.
    """

    bytes: int
    of_bytes: int
    mem_len: int


@dataclass(frozen=True, slots=True)
class Trained(Event):
    """End of a run. `bits_per_byte` is the score of the best weights on the text `scored`.

    `seconds` of training, without the final score and sample. `stopped`: ended before the budget was spent.
    """

    folder: Path
    step: int
    tokens: int
    seconds: float
    bits_per_byte: float | None
    best_step: int | None
    stopped: bool
    sample: str
    scored: ScoredText | None = None


# Evaluation, streaming and benchmarks


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model predicted in the place of a token: its entropy in bits, and the `columns` that were asked for.

    `word_ends` are log2 of the probabilities that a word ends here after a letter, and after a punctuation mark, and
    `column_ends` these of each column that has bits by another prediction: of an inner block, at a temperature.
    """

    word_ends: tuple[float, ...]
    entropy: float
    columns: Mapping[str, Any] = field(default_factory=dict)
    column_ends: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenScore(Event):
    """One token of evaluated or streamed text: number of its line from 1, byte offset, text, surprisal in bits.

    `prediction` is None unless asked for.
    """

    line: int
    byte: int
    text: bytes
    bits: float
    prediction: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Row(Event):
    """A document begins: its number, and the other columns or keys if it is a row of a table or a JSON object.

    `regions` are the offsets in its text at which marked regions begin and end, `file` the name of its file if several
    are read.
    """

    document: int
    fields: Mapping[str, Any]
    regions: Sequence[tuple[int, int]] = field(default=(), repr=False)
    file: str | None = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """What a message calls it: `row 3`, or `row 3 of all, in b.csv,` if several files are read."""
        if self.file is None:
            return f"row {self.document:,}"
        return f"row {self.document:,} of all, in {self.file},"


@dataclass(frozen=True, slots=True)
class WordScore(Event):
    """One word of evaluated or streamed text (`xlcli.words`).

    Attributes:
        document: Number of its document, from 1: a row, a text of JSON lines, a file.
        line: Number of its line, from 1.
        number: Number of the word in its line, from 1.
        word: Its text; bytes that are not UTF-8 are U+FFFD.
        naive_bits: Sum of the surprisals of its tokens.
        token_entropy: Entropy in bits of the prediction of its first token.
        columns: Further columns that were asked for, by their names.
        next_entropy: Entropy in bits of the prediction of the token after it, if the word ended by that prediction.
    """

    document: int
    line: int
    number: int
    byte: int
    word: str
    bits: float
    naive_bits: float
    token_entropy: float
    tokens: int
    columns: Mapping[str, Any] = field(default_factory=dict)
    next_entropy: float | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RegionScore(Event):
    """Words that the user has marked (`xlcli.evaluation.regions`). The event comes after the words of their text.

    `region` and `number` are the numbers of the region and of its first word in the text, from 1. `next_bits` are those
    of the word after it, `next_two_bits` of the two after it, None at the end. `bits` and `tokens` are sums,
    `token_entropy` is that of the first word, and `columns` are as `xlcli.evaluation.regions` says.
    """

    document: int
    region: int
    number: int
    byte: int
    text: str
    words: int
    bits: float
    naive_bits: float
    token_entropy: float
    tokens: int
    next_bits: float | None
    next_two_bits: float | None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DocumentScore(Event):
    """A document, scored alone or after others. `characters`, `words`, `word_perplexity`: as of `TextCounts`."""

    document: int
    bytes: int
    characters: int | None
    words: int | None
    tokens: int
    bits: float
    bits_per_byte: float
    word_perplexity: float | None


@dataclass(frozen=True, slots=True)
class ContextBin:
    """Loss of tokens with a context of at least `start` and fewer than `stop` tokens, counted from an empty memory.

    `margin` is half the width of the 95 % confidence interval of `bits_per_byte`; None if it cannot be estimated.
    """

    start: int
    stop: int
    tokens: int
    bits_per_byte: float
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class PairScore(Event):
    """Two texts of a row that are compared: number of the pair, surprisal in bits and tokens of each."""

    pair: int
    first_bits: float
    second_bits: float
    first_tokens: int
    second_tokens: int


@dataclass(frozen=True, slots=True)
class PairShare:
    """Share of the `pairs` of a group (None: all) whose first text is more probable, with its 95 % interval.

    `share_per_token` compares means per token. Equal texts count half. `signs`, not in JSON, are 1 for each pair whose
    first text is more probable, -1 if the second one is, else 0.
    """

    group: str | None
    pairs: int
    share: float
    low: float
    high: float
    share_per_token: float
    signs: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Spread:
    """Bits per byte of several documents with 95 % intervals (`xlcli.evaluation.spread`), or a difference of them.

    `bits_per_byte` is that of the whole text, `document_mean` the mean over documents, however long each is. The
    intervals are None if there are fewer than five documents.
    """

    documents: int
    bits_per_byte: float
    bits_per_byte_low: float | None
    bits_per_byte_high: float | None
    document_mean: float
    document_mean_low: float | None
    document_mean_high: float | None


@dataclass(frozen=True, slots=True)
class Discordance:
    """Pairs of a group (None: all) in which only one of two models gives the first text the higher probability.

    In the others both do, or none, or texts are equal. `p` is of the exact test of McNemar, two-sided.
    """

    group: str | None
    only_model: int
    only_other: int
    p: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """An evaluation less another one of the same text: the spread of the difference, or pairs that they disagree on."""

    spread: Spread | None = None
    pairs: tuple[Discordance, ...] = ()


@dataclass(frozen=True, slots=True)
class ContinuationScore(Event):
    """Surprisal of the continuation of a row after its context, and the size of its tokens, with the blank before it.

    `best`, `best_per_byte`: its bits, or bits per byte, are the lowest ones of its group; None without groups.
    """

    row: int
    bits: float
    bits_per_byte: float
    bytes: int
    tokens: int
    best: bool | None = None
    best_per_byte: bool | None = None


Scored = TokenScore | Row | WordScore | RegionScore | DocumentScore | PairScore | ContinuationScore
"""Parts of a text with their scores, and the rows that they are in."""


@dataclass(frozen=True, slots=True)
class Done(Event):
    """End of the parts that were asked for: the whole text is scored, but maybe not all of its `Score` is measured."""


ROUNDING_TOKENS = 2**14  # number of tokens at the beginning of a text on which the cost of rounding is measured
VALIDATION_TOKENS = 2**15
"""Maximum number of tokens of a validation during training, from the beginning of the validation text."""


@dataclass(frozen=True, slots=True)
class Score(Event):
    """One evaluation; its fields are the JSON keys of `xlcli eval`. `chars`, `words`: None if the text is not UTF-8.

    `unknown_words` is the number of words scored as `<unk>`, None unless the vocabulary is one of words.
    `mean_steps` is the mean number of steps per token of a model with adaptive computation time, else None.
    `weight_dtype` and `memory_dtype` are the number types that weights and memory were rounded to. `rounding_cost` is
    the difference in bits per byte to the unrounded model over the first `ROUNDING_TOKENS` tokens, None without
    rounding.
    `partial`: evaluation was stopped; all values are of the tokens scored until then. `finished`: the training of the
    model has ended.
    `documents` is the number of documents that were scored to their end, each as if it were alone; 1 if the text was
    not divided. `each_line`: they are its lines.
    `stride` is the distance in tokens of overlapping windows of `segment_len` tokens, None without them; with windows,
    `by_context` is empty.
    `crlf` is the number of CR LF in the files that were read as LF.
    `adapt`: the weights were adapted to the text while it was read. `context_cache`: number of tokens of the cache, if
    any. With either, `by_context` is empty.
    `pairs` has the results of all pairs of texts and of each group, if pairs were compared. `correct` is the share of
    groups of continuations whose most probable one is correct, if rows say which one is; `correct_per_byte` compares
    means per byte.
    `by_document`, not in JSON, has the `Row` and `DocumentScore` of each document, by turns, if they are few.
    `spread` is that over documents, if there are several that are neither pairs nor groups. `sums`, not in JSON, are
    bits and bytes of each, from which it comes.
    """

    model: str
    position: str
    attention: str
    parameters: int
    file: str
    bytes: int
    chars: int | None
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
    weight_dtype: str = "float32"
    memory_dtype: str = "float32"
    rounding_cost: float | None = None
    unknown_words: int | None = None
    documents: int = 1
    each_line: bool = False
    crlf: int = 0
    stride: int | None = None
    adapt: bool = False
    context_cache: int | None = None
    mean_steps: float | None = None
    partial: bool = False
    finished: bool = True
    by_context: tuple[ContextBin, ...] = ()
    pairs: tuple[PairShare, ...] = ()
    correct: float | None = None
    correct_per_byte: float | None = None
    spread: Spread | None = None
    sums: tuple[tuple[float, float], ...] = field(default=(), repr=False)
    by_document: tuple[Any, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Speed(Event):
    """Speed of a task with one memory length; its fields are the JSON keys of `xlcli bench`.

    Fields that do not apply to a task are None.

    Attributes:
        calls: Number of timed calls, to which `tokens`, `seconds` and `tokens_per_second` belong.
        ms_per_token: Median duration of a call, divided by its tokens; `_p90` and `_p99` are percentiles, the latter
            from 100 calls on.
        first_token_seconds: Time from a prompt of `prompt_tokens` tokens to the next token.
        recompute_ms_per_token: Time of a call over one token and the `mem_len` tokens before it of one sequence, from
            empty memory. None if it does not fit the machine.
        recompute_ratio: That time over `ms_per_token`.
        peak_rss_bytes: Peak RAM of the process up to the last timed call, without the comparison.
        kernels: Whether compiled kernels decode.
    """

    task: Literal["decode", "eval", "train"]
    model: str
    parameters: int
    mem_len: int
    segment_len: int
    batch_size: int
    calls: int
    tokens: int
    tokens_per_second: float
    ms_per_token: float
    ms_per_token_p90: float
    peak_rss_bytes: int
    seconds: float
    device: str
    dtype: str
    threads: int
    ms_per_token_p99: float | None = None
    recompute_ms_per_token: float | None = None
    recompute_ratio: float | None = None
    weight_dtype: str = "float32"
    memory_dtype: str = "float32"
    first_token_seconds: float | None = None
    prompt_tokens: int | None = None
    kernels: bool | None = None


@dataclass(frozen=True, slots=True)
class LineScore(Event):
    """One line of a stream with its line end. `spans` are its tokens for coloring: (text, bits)."""

    line: int
    byte: int
    bytes: int
    text: builtins.bytes
    tokens: int
    bits: float
    bits_per_byte: float
    spans: tuple[tuple[builtins.bytes, float], ...]


@dataclass(frozen=True, slots=True)
class RecordScore(LineScore):
    """One record of a stream: a row, what a pattern found in a line, or an event of several lines.

    `line` is the line of the input at which it begins. `fields` are those of its row with the text, as they came.
    """

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StreamStats(Event):
    """Totals of a stream since this run began, without what a resumed state has read before.

    `shown` is the number of lines or tokens selected, None if all are. `records` are the rows and events of the text,
    whose `lines` are those of their texts; 0 if it is plain. `skipped` are the lines of the input without a text.
    `seconds` and `lines_per_second` are with waits for input; `tokens_per_second` is the speed of the model.
    """

    lines: int
    bytes: int
    tokens: int
    bits: float
    bits_per_byte: float
    seconds: float
    lines_per_second: float
    tokens_per_second: float
    mem_len: int
    state_bytes: int
    final: bool
    shown: int | None = None
    crlf: int = 0
    records: int = 0
    skipped: int = 0


# Generation


@dataclass(frozen=True, slots=True)
class GeneratedText(Event):
    """Next text of a sample, in whole UTF-8 characters."""

    sample: int
    text: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a token in nats by the model, before temperature, repetition penalty and filters.

    `token` is its id. `best` are the most probable tokens in its place, if they were asked for, the best one first.
    """

    token: int
    text: bytes
    logprob: float
    best: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Generated(Event):
    """One finished sample; its fields are the JSON keys of `xlcli generate`. `logprobs`: None unless asked for."""

    sample: int
    prompt: str
    text: str
    tokens: int
    seed: int
    stop_reason: Literal["length", "stop", "interrupted"]
    tokens_per_second: float
    logprobs: tuple[TokenLogprob, ...] | None = None
