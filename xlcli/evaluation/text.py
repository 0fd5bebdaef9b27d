"""A text for evaluation: cached tokens, counts of bytes, characters and words, and the lengths by which it is read."""

from __future__ import annotations

import itertools
import math
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.config import EvalConfig
from xlcli.config.inference import Reading
from xlcli.errors import ResourceError
from xlcli.events import Notice, Prediction, Progress, Row, Scored, TokenScore
from xlcli.files import cache_folder
from xlcli.inference import longest_memory
from xlcli.metrics import LN2, TextCounter, TextCounts
from xlcli.online import Reader
from xlcli.runtime import Runtime
from xlcli.state import State
from xlcli.store.folder import LoadedModel
from xlcli.store.state_files import WordPosition
from xlcli.text.base import Tokenizer
from xlcli.text.corpus import Corpus, Part
from xlcli.text.documents import Joined
from xlcli.text.oddities import Oddities
from xlcli.text.pretokenize import divided, whole_characters
from xlcli.text.tokens import TokenFile, token_file
from xlcli.words import Predictions, Words

TOKENS_PER_CALL = {"cpu": 2**11, "cuda": 2**14}
"""Maximum of `tokens_per_call` by device: enough tokens to keep it busy."""
CPU_ACTIVATIONS = 2**19
"""Number of activations of a layer in a call above which a CPU is slower (measured for widths of 192 to 512)."""
DEFAULT_SEGMENT_LEN = 512
"""Longest segment chosen by default where hidden scores are computed; a longer one would hide most of its scores."""
MAX_SEGMENT_LEN = 2**12
"""Longest segment where the length does not change the result; bounds the size of the attention mask."""
STATE_LIMIT = 2**28
"""Maximum bytes of memory tensors for the default batch size."""


_SENTENCE_BEGIN = re.compile(r"(?!.*\d:\d)[\"'“‘«(¿¡]*[^\W\d_a-z]")
_SENTENCE_END = re.compile(r"[.?!…。？！][\"'”’»)]*(?=\s+[\"'“‘«(¿¡]*[^\W\d_a-z]|\s*$)")
LEAST_SENTENCES, SENTENCES_SHARE = 5, 0.9
"""Lines of a list of sentences, at least, and the share of them that are one sentence: far more than in books, poems,
logs and code (benchmarks/log)."""


@dataclass(frozen=True)
class TokenizedText:
    """A text, its tokens, those that are `scored` (n; None: all), and their size in bytes, characters and words."""

    part: Part
    tokens: TokenFile
    counts: TextCounts
    scored: NDArray[np.bool_] | None = None

    @property
    def n_scored(self) -> int:
        """Number of tokens that are scored."""
        return len(self.tokens) if self.scored is None else int(self.scored[: len(self.tokens)].sum())

    @property
    def documents(self) -> NDArray[np.int64]:
        """First token of each document, ascending from 0; of one document if they are not separated."""
        return np.zeros(1, np.int64) if self.tokens.documents is None else self.tokens.documents

    @property
    def longest_document(self) -> int:
        """Number of tokens of the longest document."""
        return int(np.diff(self.documents, append=len(self.tokens)).max())

    def token_scores(self, scores: TokenScores) -> Iterator[TokenScore]:
        """Each token with its text and its scores, in order; reads the text again."""
        return scores.tokens(self.part.read(), self.tokens, range(len(self.tokens)))

    def _with_rows(self, scores: TokenScores) -> Iterator[tuple[list[tuple[int, Row]], TokenScore]]:
        """Each of `token_scores`, after the rows that begin up to there, with their places."""
        rows = self.part.corpus.rows()
        row = next(rows, None)
        for token in self.token_scores(scores):
            begun = []
            while row is not None and row[0] <= token.byte:
                begun.append(row)
                row = next(rows, None)
            yield begun, token

    def rows_and_tokens(self, scores: TokenScores) -> Iterator[Row | TokenScore]:
        """`token_scores`, and each row before its first token."""
        for begun, token in self._with_rows(scores):
            yield from (row for _, row in begun)
            yield token

    def word_scores(
        self, scores: TokenScores, *, by_line: bool, with_tokens: bool, search: Search | None = None
    ) -> Iterator[Scored]:
        """Words and rows as soon as they are complete, and `token_scores` if asked for. `by_line`: as of `Words`."""
        assert scores.predictions is not None
        words = Words(scores.predictions.boundaries, WordPosition(starts=deque()), by_line=by_line)
        documents = iter(self.documents[1:].tolist())
        ends = next(documents, None)
        for i, (begun, token) in enumerate(self._with_rows(scores)):
            if i == ends:
                ends = next(documents, None)
                yield from words.end(token.byte, scores.prediction(i, after=True))
                words.reset()
            for place, row in begun:
                while words.at.n_begun < row.document - 1:  # rows without text
                    words.at.begin(place, {})
                words.at.begin(place, row.fields)
            if with_tokens:
                yield token
            yield from words.feed(token, None if search is None else partial(search, i, token.text))
        yield from words.end(self.part.n_bytes, scores.prediction(len(self.tokens), after=True))


Search = Callable[[int, bytes, int | None], Mapping[str, Any]]
"""Columns of the word that begins with a token: its number and text, and the argument of `further` of `Words.feed`."""


class TokenScores:
    """Scores of the tokens of a text, by their number, in unnamed files that are deleted when `files` closes.

    `nats` is the surprisal of each (n), `predictions` what is kept of their predictions, if anything.

    Raises:
        ResourceError: The cache folder is full.
    """

    def __init__(self, n_tokens: int, predictions: Predictions | None, files: ExitStack) -> None:
        self.nats = mapped_scores((n_tokens,), files)
        self.predictions = predictions
        self._features = None if predictions is None else mapped_scores((n_tokens, predictions.size), files)
        self._after: dict[int, NDArray[Any]] = {}  # documents, by the number of the token that comes next

    def keep(
        self, features: NDArray[Any], scored: NDArray[np.bool_], positions: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> None:
        """Keeps features (b t f) of `scored` tokens (b t), and those at the ends (b) of sequences.

        `positions` (b) are the numbers of the first tokens.
        """
        assert self._features is not None
        rows, columns = scored.nonzero()
        self._features[positions[rows] + columns] = features[rows, columns]
        for row in np.flatnonzero((positions <= ends) & (ends < positions + features.shape[1])).tolist():
            self._after[int(ends[row])] = features[row, ends[row] - positions[row]].copy()

    def prediction(self, token: int, *, after: bool = False) -> Prediction | None:
        """The prediction of a token, or `after` the document that ends before it, if it was kept."""
        if self.predictions is None or self._features is None:
            return None
        if after and token not in self._after:
            return None
        return self.predictions.value((self._after if after else self._features)[token].tolist())

    def tokens(self, portions: Iterator[bytes], tokens: TokenFile, numbers: range) -> Iterator[TokenScore]:
        """The tokens with these numbers, whose text are the portions, with their scores."""
        line, byte, at, portion = 1, 0, 0, b""
        for token in numbers:
            size = int(tokens.sizes(token))
            while len(portion) < at + size:
                portion, at = portion[at:] + next(portions), 0
            text = portion[at : at + size]
            yield TokenScore(line, byte, text, float(self.nats[token]) / LN2, self.prediction(token))
            line, at, byte = line + text.count(b"\n"), at + size, byte + size


def odd_texts(text: TokenizedText, options: EvalConfig) -> Iterator[Notice]:
    """A notice on rows or lines whose scores are hardly what the user wants; reads the text again.

    Rows are numbered as documents are, and both texts of a pair are one row.
    """
    corpus = text.part.corpus
    oddities = Oddities("line", "row" if options.each_line else "line")
    begins: Sequence[int] = [*itertools.accumulate(corpus.facts.sizes, initial=0)]
    has_rows = len(corpus.facts.documents) > len(corpus.sources)  # as JSON with the default key
    if has_rows or options.text_fields:
        oddities = Oddities("row", "row")
        begins = corpus.facts.documents[:: 1 + bool(options.pairs)]
    oddities.begin()
    for portion, is_end in divided(text.part.read(), begins, at_lines=False):
        oddities.feed(portion)
        if is_end:
            oddities.begin()
    yield from oddities.notices()


def is_list_of_sentences(head: bytes) -> bool:
    """True if nearly every line of a text that begins so is one sentence; blank lines do not count."""
    lines = [*filter(str.strip, head.decode("utf-8", "replace").split("\n"))]
    return len(lines) >= LEAST_SENTENCES and sum(map(_is_sentence, lines)) >= SENTENCES_SHARE * len(lines)


def _is_sentence(line: str) -> bool:
    end = _SENTENCE_END.search(line)
    return end is not None and not line[end.end() :].strip() and _SENTENCE_BEGIN.match(line) is not None


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    limit: int | None,
    *,
    by_document: bool = False,
    starts: Sequence[int] | None = None,
) -> Generator[Notice | Progress, None, TokenizedText]:
    """Tokenizes the first `limit` bytes of a text (None: all), cut between characters. Yields progress.

    With `by_document` no token is in two documents, which begin at `starts` (None: as the corpus says).

    Raises:
        DataError: The text is empty or cannot be read.
        ResourceError: The cache folder is full.
    """
    yield from corpus.scan()
    yield from corpus.notices()
    stop = corpus.n_bytes
    if limit is not None and limit < stop:
        tail = b"".join(corpus.read(max(limit - 4, 0), limit))
        stop = limit - len(tail) + whole_characters(tail) or limit
    part = Part(corpus, 0, stop, starts)
    tokens = yield from token_file(part, tokenizer, by_document=by_document)
    if isinstance(fields := corpus.sources[0].reading.text_fields, Joined):
        return (yield from _continuations(part, tokens, fields))
    counter = TextCounter()
    for portion, is_end in divided(part.read(), part.documents if by_document else ()):
        counter.feed(portion)
        if is_end:
            counter.end_word()
    return TokenizedText(part, tokens, TextCounts(part.n_bytes) if tokenizer.kind == "ids" else counter.counts())


def _continuations(part: Part, tokens: TokenFile, fields: Joined) -> Generator[Notice, None, TokenizedText]:
    """The text of rows of which only continuations are scored. A token across the border counts as continuation."""
    sizes, counter, borders = tokens.sizes(slice(None)), TextCounter(), list[int]()
    for start, row in part.corpus.rows():
        context, continuation = fields.divide(row.fields)
        borders.append(start + len(context))
        counter.feed(continuation)
        counter.end_word()
    ends = np.cumsum(sizes, dtype=np.int64)
    border = np.array(borders)[np.searchsorted(part.documents, ends - 1, side="right") - 1]
    if n := int(((ends - sizes < border) & (border < ends)).sum()):
        yield Notice(f"{n:,} tokens begin in a context and end in its continuation, with which they count")
    return TokenizedText(part, tokens, counter.counts(), border < ends)


def mapped_scores(shape: tuple[int, ...], files: ExitStack) -> NDArray[Any]:
    """Array of float32 scores of this shape, for `TokenScores`."""
    try:
        file = files.enter_context(tempfile.TemporaryFile(dir=cache_folder()))  # noqa: SIM115
        if not hasattr(os, "posix_fallocate"):
            return np.memmap(file, np.float32, mode="w+", shape=shape)
        # On a full disk, writing to an unallocated block of a mapped file kills the process by SIGBUS.
        os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
        return np.memmap(file, np.float32, mode="r+", shape=shape)
    except OSError as error:
        raise ResourceError(
            f"cannot keep the score of each token in {cache_folder()}: {error.strerror}.",
            "Set XLCLI_CACHE to a folder on a larger disk, or use --limit.",
        ) from None


@dataclass(frozen=True)
class Lengths(Reading):
    """How an evaluation reads a text, and its maximum number of sequences.

    `tokens_per_call` limits batches of documents, and of windows for the loss by context; None if the batch size was
    given.
    """

    batch_size: int = 1
    warmup_len: int = 0
    by_document: bool = False
    tokens_per_call: int | None = None

    def init_state(self, reader: Reader, starts: NDArray[np.int64]) -> State:
        """Empty memory of sequences that start at these positions (b) of the text."""
        return reader.init_state(len(starts), offsets=starts.tolist(), **self.state)


def tokens_per_call(model: LoadedModel, runtime: Runtime) -> int:
    """Default number of tokens per call of the model, over all sequences."""
    if runtime.device.type != "cpu":
        return TOKENS_PER_CALL["cuda"]
    return min(TOKENS_PER_CALL["cpu"], max(1, CPU_ACTIVATIONS // model.config.model.dim))


def choose_lengths(model: LoadedModel, runtime: Runtime, options: EvalConfig, text: TokenizedText) -> Lengths:
    """Lengths that the options leave open are as trained, or chosen for speed where they do not change the result."""
    reading, shape = options.reading(model.config.model, model.config.train.reading), model.config.model
    by_document, n_tokens = len(text.documents) > 1, text.longest_document
    exact = reading.has_memory and reading.span == "uniform"
    n_per_call = tokens_per_call(model, runtime)
    segment_len = reading.segment_len
    if options.segment_len is not None and exact:
        segment_len = min(segment_len, n_tokens, MAX_SEGMENT_LEN)
    elif exact:
        segment_len = min(DEFAULT_SEGMENT_LEN, max(64, 2 ** (reading.longest - 1).bit_length()))
        # Attention that reads visible keys only (`ops/attend_blocks.py`) makes longer segments cost no more.
        is_banded = all(layer.is_banded for layer in shape.attentions)
        if is_banded and runtime.device.type == "cpu" and "bias" not in shape.position.needs:
            segment_len = max(segment_len, min(n_tokens, n_per_call // (options.batch_size or 1)))
        if options.adapt:  # whole blocks are read once
            segment_len = max(1, segment_len // options.adapt_block) * options.adapt_block
    receptive_field: int | None = 0
    if reading.has_memory:
        receptive_field = model.network.receptive_field(reading.longest + (not exact) * segment_len)
    warmup_len = n_tokens if receptive_field is None else receptive_field
    state_bytes = shape.memory_bytes(reading.max_context + segment_len, reading.memory_dtype)
    if by_document:
        # The memory of a short document holds no more tokens than the document, unless its size is fixed.
        shortest = shape.memory_bytes(longest_memory(model, reading, 1), reading.memory_dtype)
        largest, warmup_len = min(n_per_call, STATE_LIMIT // shortest), 0
    else:
        by_warmup = 1 + n_tokens // (10 * warmup_len) if warmup_len else n_tokens
        largest = min(n_per_call // segment_len, STATE_LIMIT // state_bytes, by_warmup)
    is_single = options.online_option is not None or (receptive_field is None and not by_document)
    limit = min(n_per_call, max(1, STATE_LIMIT // state_bytes) * segment_len)
    stride = None
    if reading.stride is not None:
        stride = min(reading.stride, segment_len)
        warmup_len = segment_len - stride
    return Lengths(
        **vars(reading) | {"segment_len": segment_len, "stride": stride},
        batch_size=1 if is_single else options.batch_size or max(1, largest),
        warmup_len=warmup_len,
        by_document=by_document,
        tokens_per_call=None if options.batch_size else limit,
    )
