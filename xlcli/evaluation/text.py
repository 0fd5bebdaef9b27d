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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.config import EvalConfig
from xlcli.config.inference import ContextSettings
from xlcli.errors import ResourceError
from xlcli.events import Notice, Prediction, Progress, Row, Scored, TokenScore
from xlcli.files import cache_folder
from xlcli.inference import longest_memory
from xlcli.metrics import LN2, TextCounter, TextCounts
from xlcli.online import Scorer
from xlcli.runtime import Runtime
from xlcli.state import State
from xlcli.store.folder import LoadedModel
from xlcli.store.state_files import WordPosition
from xlcli.text.base import Tokenizer
from xlcli.text.corpus import Corpus, Part
from xlcli.text.documents import Joined, is_within_unblanked
from xlcli.text.oddities import Oddities
from xlcli.text.pretokenize import divided, whole_characters
from xlcli.text.tokens import TokenFile, token_file
from xlcli.words import Predictions, Words

TOKENS_PER_CALL = {"cpu": 2**11, "cuda": 2**14}  # maximum of `tokens_per_call` by device: enough tokens to keep it busy
CPU_ACTIVATIONS = 2**19  # activations of a layer in a call above which a CPU is slower (measured: widths of 192 to 512)
DEFAULT_SEGMENT_LEN = 512  # longest default where hidden scores are computed: a longer one hides most of its scores
LEAST_SEGMENT_LEN = 64  # shortest segment chosen by default: shorter ones cost more calls than they hide scores
MAX_SEGMENT_LEN = 2**12  # longest segment where the length changes no result; bounds the size of the attention mask
STATE_LIMIT = 2**28  # maximum bytes of memory tensors for the default batch size
LONGEST_CHARACTER = 4  # bytes of the longest UTF-8 character
SCORED_PER_WARMUP = 10  # the default batch size warms up on at most one token for so many of the text

_SENTENCE_BEGIN = re.compile(r"(?!.*\d:\d)[\"'“‘«(¿¡]*[^\W\d_a-z]")
_SENTENCE_END = re.compile(r"[.?!…。？！؟۔।።။។][\"'”’»)]*(?=\s+[\"'“‘«(¿¡]*[^\W\d_a-z]|\s*$)")
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
        if self.scored is None:
            return len(self.tokens)
        return int(self.scored[: len(self.tokens)].sum())

    @property
    def documents(self) -> NDArray[np.int64]:
        """First token of each document, ascending from 0; of one document if they are not separated."""
        if self.tokens.documents is None:
            return np.zeros(1, np.int64)
        return self.tokens.documents

    @property
    def longest_document(self) -> int:
        return int(np.diff(self.documents, append=len(self.tokens)).max())

    def _with_rows(self, scores: TokenScores) -> Iterator[tuple[list[tuple[int, Row]], TokenScore]]:
        """Each token with its scores, after the rows that begin up to there, with their places; reads the text."""
        places_and_rows = self.part.corpus.rows()
        upcoming = next(places_and_rows, None)
        for token in scores.tokens(self.part.read(), self.tokens, range(len(self.tokens))):
            begun = []
            while upcoming is not None and upcoming[0] <= token.byte:
                begun.append(upcoming)
                upcoming = next(places_and_rows, None)
            yield begun, token

    def rows_and_tokens(self, scores: TokenScores) -> Iterator[Row | TokenScore]:
        """Each token with its scores, in order, and each row before its first token."""
        for begun, token in self._with_rows(scores):
            yield from (row for _, row in begun)
            yield token

    def word_scores(
        self, scores: TokenScores, *, by_line: bool, with_tokens: bool, search: Search | None = None
    ) -> Iterator[Scored]:
        """Yields words and rows as soon as they are complete, and tokens if asked for. `by_line`: as of `Words`."""
        assert scores.predictions is not None
        words = Words(scores.predictions.boundaries, WordPosition(starts=deque()), by_line=by_line)
        document_starts = iter(self.documents[1:].tolist())
        next_start = next(document_starts, None)
        further = None
        for number, (begun, token) in enumerate(self._with_rows(scores)):
            if number == next_start:
                next_start = next(document_starts, None)
                yield from words.end(token.byte, scores.prediction(number, after=True))
                words.reset()
            for place, row in begun:
                while words.at.n_begun < row.document - 1:  # rows without text
                    words.at.begin(place, {})
                words.at.begin(place, row.fields)
            if search is not None:
                further = partial(search, number, token.text)
            parts: list[Scored] = [*words.feed(token, further)]
            # A token comes after the row that begins with it, so that a list gives it the columns of this row.
            n_until_row = 0
            for n_parts, part in enumerate(parts, 1):
                if isinstance(part, Row):
                    n_until_row = n_parts
            yield from parts[:n_until_row]
            if with_tokens:
                yield token
            yield from parts[n_until_row:]
        yield from words.end(self.part.n_bytes, scores.prediction(len(self.tokens), after=True))


Search = Callable[[int, bytes, int | None], Mapping[str, Any]]
"""Columns of the word that begins with a token: its number and text, and the argument of `further` of `Words.feed`."""


class TokenScores:
    """Scores of the tokens of a text, by their number, in unnamed files that are deleted when `files` closes.

    `nats` is the surprisal of each (n), `predictions` what is kept of their predictions, if anything. `ResourceError`
    if the cache folder is full.
    """

    def __init__(self, n_tokens: int, predictions: Predictions | None, files: ExitStack) -> None:
        self.nats = mapped_scores((n_tokens,), files)
        self.predictions = predictions
        self._features = None
        if predictions is not None:
            self._features = mapped_scores((n_tokens, predictions.size), files)
        self._after: dict[int, NDArray[Any]] = {}  # documents, by the number of the token that comes next

    def keep(
        self, features: NDArray[Any], scored: NDArray[np.bool_], positions: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> None:
        """Keeps features (b t f) of `scored` tokens (b t) and at `ends` (b); `positions` (b) of the first tokens."""
        assert self._features is not None
        rows, columns = scored.nonzero()
        self._features[positions[rows] + columns] = features[rows, columns]
        # The prediction after the last token of a sequence says what may follow its end.
        is_end_here = (positions <= ends) & (ends < positions + features.shape[1])
        for row in np.flatnonzero(is_end_here).tolist():
            self._after[int(ends[row])] = features[row, ends[row] - positions[row]].copy()

    def prediction(self, token: int, *, after: bool = False) -> Prediction | None:
        """The prediction of a token, or `after` the document that ends before it, if it was kept."""
        if self.predictions is None or self._features is None:
            return None
        if not after:
            return self.predictions.value(self._features[token].tolist())
        if token not in self._after:
            return None
        return self.predictions.value(self._after[token].tolist())

    def tokens(self, portions: Iterator[bytes], tokens: TokenFile, numbers: range) -> Iterator[TokenScore]:
        """The tokens with these numbers and their scores; `portions` are their text, which begins at line 1, byte 0."""
        line, byte = 1, 0
        portion = b""
        start = 0  # of the token in the portion
        for number in numbers:
            size = int(tokens.sizes(number))
            while start + size > len(portion):
                portion = portion[start:] + next(portions)  # the token goes on in the next portion
                start = 0
            text = portion[start : start + size]
            bits = float(self.nats[number]) / LN2
            yield TokenScore(line, byte, text, bits, self.prediction(number))
            line += text.count(b"\n")
            byte += size
            start += size


def odd_texts(text: TokenizedText, options: EvalConfig) -> Iterator[Notice]:
    """A notice on rows or lines whose scores are hardly what the user wants; reads the text again.

    Rows are numbered as documents are, and both texts of a pair are one row. If there are several files, the notice
    names them, and counts in each.
    """
    corpus = text.part.corpus
    oddities = Oddities("line", "row" if options.each_line else "line")
    begins: Sequence[int] = [*itertools.accumulate(corpus.facts.sizes, initial=0)]
    names: dict[int, str] = {}  # of files, by the offset of each
    if len(corpus.sources) > 1:
        names = dict(zip(begins, [source.name for source in corpus.sources], strict=False))
    has_rows = len(corpus.facts.documents) > len(corpus.sources)  # as JSON with the default key
    if has_rows or options.text_fields:
        oddities = Oddities("row", "row")
        begins = corpus.facts.documents
    if options.pairs:
        begins = begins[::2]
    oddities.begin(names.get(0))
    n_read = 0
    for portion, is_end in divided(text.part.read(), begins, at_lines=False):
        oddities.feed(portion)
        n_read += len(portion)
        if is_end:
            oddities.begin(names.get(n_read))
    yield from oddities.notices()


def is_list_of_sentences(head: bytes) -> bool:
    """True if nearly every line of a text that begins so is one sentence.

    Blank lines do not count, unless they divide the lines into paragraphs of different lengths: then it is a story.
    """
    text = head.decode("utf-8", "replace")
    lines = [*filter(str.strip, text.split("\n"))]
    if len(lines) < LEAST_SENTENCES:
        return False
    paragraphs = re.split(r"\n\s*\n", text.strip())
    lengths = {paragraph.count("\n") for paragraph in paragraphs if "\n" in paragraph}
    if len(lengths) > 1:
        return False
    return sum(map(_is_sentence, lines)) >= SENTENCES_SHARE * len(lines)


def _is_sentence(line: str) -> bool:
    end = _SENTENCE_END.search(line)
    if end is None or line[end.end() :].strip():  # none ends, or the first one ends before the line does
        return False
    return _SENTENCE_BEGIN.match(line) is not None


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    limit: int | None,
    *,
    by_document: bool = False,
    starts: Sequence[int] | None = None,
) -> Generator[Notice | Progress, None, TokenizedText]:
    """Tokenizes the first `limit` bytes of a text (None: all), cut between characters. Yields progress.

    With `by_document` no token is in two documents, which begin at `starts` (None: as the corpus says). `DataError` if
    the text is empty or cannot be read, `ResourceError` if the cache folder is full.
    """
    yield from corpus.scan()
    yield from corpus.notices()
    n_bytes = corpus.n_bytes
    if limit is not None and limit < n_bytes:
        n_bytes = _between_characters(corpus, limit)
    part = Part(corpus, 0, n_bytes, starts)
    tokens = yield from token_file(part, tokenizer, by_document=by_document)
    fields = corpus.sources[0].input_format.text_fields
    if isinstance(fields, Joined):
        text = yield from _continuations(part, tokens, fields)
        return text
    if tokenizer.kind == "ids":  # of which neither characters nor words are known
        return TokenizedText(part, tokens, TextCounts(part.n_bytes))
    counter = TextCounter()
    for portion, ends_document in divided(part.read(), part.documents, at_lines=False):
        counter.feed(portion)
        if ends_document:
            counter.end_document()
        if ends_document and by_document:
            counter.end_word()
    return TokenizedText(part, tokens, counter.counts())


def _between_characters(corpus: Corpus, limit: int) -> int:
    """Largest offset up to `limit` between two characters; `limit` if that is 0, because a text cannot be empty."""
    tail_start = max(limit - LONGEST_CHARACTER, 0)
    tail = b"".join(corpus.read(tail_start, limit))
    n_whole = tail_start + whole_characters(tail)
    return n_whole if n_whole > 0 else limit


def _continuations(part: Part, tokens: TokenFile, fields: Joined) -> Generator[Notice, None, TokenizedText]:
    """Returns the text of rows of which only the continuations are scored, and yields notices on unusual rows."""
    counter = TextCounter()
    borders: list[int] = []  # of each row, the offset at which its continuation begins
    n_without_context = 0
    n_unblanked = 0  # rows whose two parts meet within a script without blanks
    n_without_blank = 0  # those of them that indeed have no blank there
    for row_start, row in part.corpus.rows():
        context, continuation = fields.divide(row.fields)
        borders.append(row_start + len(context))
        n_without_context += not context
        if is_within_unblanked(context.decode(), continuation.decode()):
            n_unblanked += 1
            n_without_blank += not continuation[:1].isspace()
        counter.feed(continuation)
        counter.end_word()
        counter.end_document()
    counts = counter.counts()
    if n_unblanked:  # these continuations are parts of phrases, however short
        counts = replace(counts, words=None)
    # A token is scored if it ends behind the border of its row, even if it begins before it.
    token_sizes = tokens.sizes(slice(None))
    token_ends = np.cumsum(token_sizes, dtype=np.int64)
    row_of_token = np.searchsorted(part.documents, token_ends - 1, side="right") - 1
    token_borders = np.array(borders)[row_of_token]
    is_scored = token_ends > token_borders
    is_across = is_scored & (token_ends - token_sizes < token_borders)
    n_across = int(is_across.sum())
    if n_without_context:
        yield Notice(f"rows without context, whose continuation begins a text: {n_without_context:,}")
    if n_across:
        yield Notice(f"{n_across:,} tokens begin in a context and end in its continuation, with which they count")
    if n_without_blank and fields.joiner is None:
        remark = "which their script does not have; --set \"eval.joiner=' '\" puts one there"
        yield Notice(f"{n_without_blank:,} continuations follow their context without a blank, {remark}")
    return TokenizedText(part, tokens, counts, is_scored)


def mapped_scores(shape: tuple[int, ...], files: ExitStack) -> NDArray[Any]:
    try:
        file = files.enter_context(tempfile.TemporaryFile(dir=cache_folder()))  # noqa: SIM115
        if not hasattr(os, "posix_fallocate"):
            return np.memmap(file, np.float32, mode="w+", shape=shape)
        # On a full disk, writing to an unallocated block of a mapped file kills the process by SIGBUS.
        os.posix_fallocate(file.fileno(), 0, 4 * math.prod(shape))
        return np.memmap(file, np.float32, mode="r+", shape=shape)
    except OSError as error:
        problem = f"cannot keep the score of each token in {cache_folder()}: {error.strerror}."
        raise ResourceError(problem, "Set XLCLI_CACHE to a folder on a larger disk, or use --limit.") from None


@dataclass(frozen=True)
class Lengths(ContextSettings):
    """How an evaluation reads a text, and its maximum number of sequences."""

    batch_size: int = 1
    warmup_len: int = 0
    by_document: bool = False
    tokens_per_call: int | None = None  # limit of batches of documents and of windows; None if the batch size was given

    def init_state(self, scorer: Scorer, starts: NDArray[np.int64]) -> State:
        """Empty memory of sequences that start at these positions (b) of the text."""
        return scorer.init_state(len(starts), offsets=starts.tolist(), **self.init_arguments)


def tokens_per_call(model: LoadedModel, runtime: Runtime) -> int:
    if runtime.device.type != "cpu":
        return TOKENS_PER_CALL["cuda"]
    return min(TOKENS_PER_CALL["cpu"], max(1, CPU_ACTIVATIONS // model.config.model.dim))


def choose_lengths(model: LoadedModel, runtime: Runtime, options: EvalConfig, text: TokenizedText) -> Lengths:
    """Lengths that the options leave open are as trained, or chosen for speed where they do not change the result."""
    shape = model.config.model
    reading = options.reading(shape, model.config.train.reading)
    n_tokens = text.longest_document
    n_per_call = tokens_per_call(model, runtime)
    by_document = len(text.documents) > 1
    is_exact = reading.has_memory and reading.span == "uniform"  # the segment length does not change the result
    segment_len = reading.segment_len
    if is_exact:
        segment_len = _exact_segment_len(model, runtime, options, reading, n_tokens)
    receptive_field = _receptive_field(model, reading, segment_len, is_exact=is_exact)
    # Every sequence but the first starts with unscored tokens: all on which its first scored token depends.
    warmup_len = 0
    if not by_document:
        warmup_len = n_tokens if receptive_field is None else receptive_field
    # So many sequences keep the machine busy, fit their memory into the limit, and warm up on a small share of tokens.
    state_bytes = shape.memory_bytes(reading.max_context + segment_len, reading.memory_dtype)
    if by_document:
        # The memory of a short document holds no more tokens than the document, unless its size is fixed.
        shortest = shape.memory_bytes(longest_memory(model, reading, 1), reading.memory_dtype)
        most_sequences = min(n_per_call, STATE_LIMIT // shortest)
    else:
        most_by_warmup = n_tokens
        if warmup_len:
            most_by_warmup = 1 + n_tokens // (SCORED_PER_WARMUP * warmup_len)
        most_sequences = min(n_per_call // segment_len, STATE_LIMIT // state_bytes, most_by_warmup)
    batch_size = options.batch_size
    call_limit = None
    if batch_size is None:
        batch_size = max(1, most_sequences)
        call_limit = min(n_per_call, max(1, STATE_LIMIT // state_bytes) * segment_len)
    is_unbounded = receptive_field is None and not by_document
    if is_unbounded or options.online_option is not None:
        batch_size = 1
    stride = None
    if reading.stride is not None:
        stride = min(reading.stride, segment_len)
        warmup_len = segment_len - stride
    return Lengths(
        **vars(reading) | {"segment_len": segment_len, "stride": stride},
        batch_size=batch_size,
        warmup_len=warmup_len,
        by_document=by_document,
        tokens_per_call=call_limit,
    )


def _receptive_field(model: LoadedModel, reading: ContextSettings, segment_len: int, *, is_exact: bool) -> int | None:
    """Number of tokens before a sequence on which its first prediction depends; None: all of them."""
    if not reading.has_memory:
        return 0
    mem_len = reading.longest
    if not is_exact:  # the last token of a segment attends to memory and segment
        mem_len += segment_len
    return model.network.receptive_field(mem_len)


def _exact_segment_len(
    model: LoadedModel, runtime: Runtime, options: EvalConfig, reading: ContextSettings, n_tokens: int
) -> int:
    """The segment length where it changes the speed only: as asked for, else the fastest one for so many tokens."""
    if options.segment_len is not None:
        return min(reading.segment_len, n_tokens, MAX_SEGMENT_LEN)
    power_of_two: int = 2 ** (reading.longest - 1).bit_length()  # not shorter than the memory
    segment_len = min(DEFAULT_SEGMENT_LEN, max(LEAST_SEGMENT_LEN, power_of_two))
    # Attention that reads visible keys only (`ops/attend_blocks.py`) makes longer segments cost no more.
    is_banded = all(layer.is_banded for layer in model.config.model.attentions)
    has_bias = "bias" in model.config.model.position.needs
    if is_banded and not has_bias and runtime.device.type == "cpu":
        n_per_sequence = tokens_per_call(model, runtime) // (options.batch_size or 1)
        segment_len = max(segment_len, min(n_tokens, n_per_sequence))
    if options.adapt:  # whole blocks are read once
        segment_len = max(1, segment_len // options.adapt_block) * options.adapt_block
    return segment_len
