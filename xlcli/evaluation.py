"""Evaluation: the surprisal of a text under a model. Every token is scored once, in order.

Batch size and segment length change the speed, not the result: each sequence but the first starts with unscored warmup
tokens, as many as the receptive field; an unbounded receptive field allows one sequence only. Exceptions: without
memory, and with the span "growing" of published setups, the result depends on the segment length. Sequences start at
multiples of the segment length.

Documents that are scored as if each were alone are the sequences of a batch, each from empty memory to its end.

Loss by context length: without memory, and by document, it comes from the pass over the text, whose segments or
documents all start with empty memory. Otherwise nearly every token of that pass has full memory, so windows of up to
`2 * mem_len` tokens, evenly spread over the text, are read again from empty memory, unless one is the whole text.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli.config import EvalConfig, SpanKind
from xlcli.duration import Clock
from xlcli.errors import CheckpointError, DataError
from xlcli.events import ContextBin, Notice, Progress, ProgressMeter, Score, TokenScore
from xlcli.inference import check_memory
from xlcli.metrics import LN2, TextCounts, bits_per, context_bin_edges, half_width, misfit, perplexity
from xlcli.model.recall import QUERIES, lsh_recall
from xlcli.runtime import Runtime, peak_rss_bytes
from xlcli.text.corpus import gather, open_corpus
from xlcli.text.loaders import DocumentLoader, EvalLoader, document_loaders, inputs_and_targets
from xlcli.text.sources import Reading
from xlcli.text.tokenizers.words import n_unknown
from xlcli.tokenized import TokenizedText, mapped_scores, tokenize

if TYPE_CHECKING:
    from xlcli.state import State
    from xlcli.store.folder import LoadedModel

TOKENS_PER_CALL = {"cpu": 2**11, "cuda": 2**14}
"""Default number of tokens per call of the model, over all sequences: enough to keep the device busy."""
DEFAULT_SEGMENT_LEN = 512
"""Longest segment chosen by default; most of the attention mask of a longer segment would be hidden."""
MAX_SEGMENT_LEN = 2**12
"""Longest segment where the length does not change the result; bounds the size of the attention mask."""
STATE_LIMIT = 2**28
"""Maximum bytes of memory tensors for the default batch size."""
WINDOW_SHARE = 4
"""Tokens of text per token of the windows for the loss by context length."""
WINDOW_LIMIT = 2**20
"""Maximum number of tokens in these windows. Half are in windows of `SHORT_WINDOW` tokens, since a long window has few
tokens with a short context."""
SHORT_WINDOW = 64
BLOCK_TOKENS, LEAST_BLOCKS = 32, 5
"""Tokens of a block, and number of blocks of a bin, from which its uncertainty is estimated."""
RECALL_TOKENS = 2**17
"""Maximum number of tokens on which recall is measured; their keys are kept."""

Event = Notice | Progress | TokenScore | Score
Floats = NDArray[np.float64]


def evaluate(
    model: LoadedModel,
    source: Sequence[str | Path] | None,
    options: EvalConfig,
    runtime: Runtime,
    *,
    per_token: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Scores a text.

    Args:
        model: The model.
        source: Files, folders or `-`, joined to one text; None is the held-out text `options.split` of the model.
        options: Memory lengths, segment length, batch size, and `limit`, the maximum bytes of text.
        runtime: Device and number type.
        per_token: Also yield a `TokenScore` for each token, in order, before each `Score`.
        stop: Called between calls of the model; when true, evaluation ends with the score of the tokens read.

    Yields:
        Progress, notices, and a `Score` for each memory length.

    Raises:
        ConfigError: A setting does not apply to this model, or differs from those the model was loaded with.
        DataError: The text cannot be read, or the model has no held-out text.
        CheckpointError: The loss is not finite.
        ResourceError: The memory does not fit the machine, or the disk is too full for the tokens.
    """
    model.check_settings(options)
    check_memory(model, runtime, 1, segment_len=1, changeable=())  # of any text
    text = yield from _until(stop, _read(model, source, options))
    if text is None:
        yield _NOT_BEGUN
        return
    if options.reset_on_document is None and len(text.documents) > 1:
        yield Notice(
            f"{len(text.documents):,} documents, each scored as if it were alone, as in training; "
            "--set eval.reset_on_document=false scores them as one text."
        )
    unknown = n_unknown(text.tokens.ids) if model.tokenizer.kind == "words" else None
    if unknown:
        yield _unknown_notice(unknown, len(text.tokens))
    mem_lens = options.sweep_mem_len or (options.mem_len,)
    with ExitStack() as files:
        for i, mem_len in enumerate(mem_lens):
            lengths = _choose_lengths(model, runtime, options, mem_len, text)
            nats = mapped_scores(len(text.tokens), files) if per_token else None
            started = time.perf_counter()
            windows = min(len(text.tokens) // WINDOW_SHARE, WINDOW_LIMIT) / len(text.tokens)
            scale = len(mem_lens) * (1 if lengths.by_document else 1 + windows)
            clock = Clock(text.counts.bytes, scale=scale) if i == 0 else None
            totals = yield from _score_text(model, runtime, text, lengths, nats, clock, stop)
            if not (n_tokens := totals.tokens):
                yield _NOT_BEGUN
                return
            counts = text.counts
            if partial := n_tokens < len(text.tokens):
                counts = TextCounts(totals.bytes, 0, None, None)
                yield Notice(f"stopped: {counts.bytes:,} of {text.counts.bytes:,} bytes were scored.", "warning")
            seconds = time.perf_counter() - started
            if not math.isfinite(totals.nats):
                raise CheckpointError(f"model {model.name} gives no finite score.", "Its weights are damaged.")
            bits_per_byte = bits_per(totals.nats, counts.bytes)
            if remark := misfit(model.name, bits_per_byte):
                yield Notice(remark)
            by_context = totals.by_context
            if lengths.mem_len and not partial and not lengths.by_document:
                by_context = yield from _score_windows(
                    model, runtime, text, lengths, totals.batch_size, by_context, stop
                )
            if nats is not None:
                yield from itertools.takewhile(lambda _: not stop(), text.token_scores(nats))
            recall = _recall(model, runtime, text, lengths) if options.recall and not stop() else ()
            yield Score(
                model=model.name,
                file=text.part.corpus.name,
                bytes=counts.bytes,
                chars=counts.chars,
                words=counts.words,
                tokens=n_tokens,
                unknown_words=None if partial else unknown,
                documents=len(text.documents),
                nats=totals.nats,
                bits_per_byte=bits_per_byte,
                bits_per_char=bits_per(totals.nats, counts.chars) if counts.chars else None,
                perplexity=perplexity(totals.nats, n_tokens),
                word_perplexity=perplexity(totals.nats, counts.words) if counts.words else None,
                mem_len=lengths.mem_len,
                segment_len=lengths.segment_len,
                batch_size=totals.batch_size,
                span=lengths.span,
                tokens_per_second=n_tokens / seconds,
                peak_rss_bytes=peak_rss_bytes(),
                seconds=seconds,
                device=str(runtime.device),
                dtype=runtime.dtype_name,
                mean_steps=None if totals.steps is None else totals.steps / n_tokens,
                recall=math.fsum(recall) / len(recall) if recall else None,
                recall_by_layer=recall,
                partial=partial,
                by_context=() if partial and lengths.mem_len else by_context.bins(),
            )
            if stop():
                return


_NOT_BEGUN = Notice("stopped before anything was scored.", "warning")


def _read(
    model: LoadedModel, source: Sequence[str | Path] | None, options: EvalConfig
) -> Generator[Notice | Progress, None, TokenizedText]:
    """The text of `evaluate`, tokenized."""
    if source is not None:
        any_bytes = model.tokenizer.kind == "bytes"
        reading = Reading(binary=options.binary, text_field=options.text_field, any_bytes=any_bytes)
        corpus = yield from gather(source, reading=reading)
    else:
        path = model.held_out(options.split)
        if path is None:
            raise DataError(f"model {model.name} keeps no {options.split} text.", "Give a file: xlcli eval FILE.")
        corpus = open_corpus([path], reading=Reading(binary=True), documents=model.held_out_documents(options.split))
    given, trained = options.reset_on_document, model.config.train.reset_on_document
    by_document = trained if given is None else given
    return (yield from tokenize(corpus, model.tokenizer, options.limit, by_document=by_document))


def _until(
    stop: Callable[[], bool], work: Generator[Notice | Progress, None, TokenizedText]
) -> Generator[Notice | Progress, None, TokenizedText | None]:
    """Events and result of `work`; None as soon as `stop` is true."""
    while not stop():
        try:
            event = next(work)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        yield event
    work.close()
    return None


@dataclass(frozen=True)
class _Lengths:
    """Lengths in tokens, maximum number of sequences, and span of an evaluation.

    `tokens_per_call` limits the batches of an evaluation by document; None if the batch size was given.
    """

    mem_len: int
    segment_len: int
    batch_size: int
    span: SpanKind
    warmup_len: int = 0
    by_document: bool = False
    tokens_per_call: int | None = None


def _choose_lengths(
    model: LoadedModel, runtime: Runtime, options: EvalConfig, mem_len: int | None, text: TokenizedText
) -> _Lengths:
    """Memory length of the options, else of training; lengths that do not change the result are chosen for speed."""
    train = model.config.train
    by_document = len(text.documents) > 1
    n_tokens = text.longest_document
    mem_len = train.mem_len if mem_len is None else mem_len
    exact = mem_len > 0 and options.span == "uniform"
    if options.segment_len is not None:
        segment_len = min(options.segment_len, n_tokens, MAX_SEGMENT_LEN if exact else n_tokens)
    elif exact:
        segment_len = min(DEFAULT_SEGMENT_LEN, max(64, 2 ** (mem_len - 1).bit_length()))
    else:
        segment_len = train.segment_len
    receptive_field = model.network.receptive_field(mem_len if exact else mem_len + segment_len) if mem_len else 0
    warmup_len = n_tokens if receptive_field is None else receptive_field
    state_bytes = 4 * model.config.model.memory_floats(2 * mem_len + segment_len)
    tokens_per_call = TOKENS_PER_CALL.get(runtime.device.type, TOKENS_PER_CALL["cuda"])
    if by_document:
        # The memory of a short document holds no more tokens than the document.
        shortest = 4 * model.config.model.memory_floats(1)
        batch_size = options.batch_size or max(1, min(tokens_per_call, STATE_LIMIT // shortest))
        limit = min(tokens_per_call, max(1, STATE_LIMIT // state_bytes) * segment_len)
        return _Lengths(
            mem_len=mem_len,
            segment_len=segment_len,
            batch_size=batch_size,
            span=options.span,
            by_document=True,
            tokens_per_call=None if options.batch_size else limit,
        )
    by_warmup = 1 + n_tokens // (10 * warmup_len) if warmup_len else n_tokens
    chosen = max(1, min(tokens_per_call // segment_len, STATE_LIMIT // state_bytes, by_warmup))
    batch_size = 1 if receptive_field is None else options.batch_size or chosen
    return _Lengths(
        mem_len=mem_len,
        segment_len=segment_len,
        batch_size=batch_size,
        span=options.span,
        warmup_len=warmup_len,
    )


class _ContextSums:
    """Sums by context bin, for contexts of up to `longest` tokens.

    The margin of a bin comes from the standard error of a ratio of two sums over blocks (Cochran 1977, Sampling
    Techniques, section 6.4). Blocks are runs of up to `BLOCK_TOKENS` tokens, because the surprisals of neighboring
    tokens depend on each other.
    """

    def __init__(self, longest: int) -> None:
        self.edges = context_bin_edges(longest)
        self.nats, self.n_bytes, self.n_tokens, self.n_blocks = np.zeros((4, len(self.edges) - 1))
        self.products = np.zeros((3, len(self.edges) - 1))
        """Sums over blocks of nats squared, nats times bytes, and bytes squared."""

    def add(self, first: int, nats: Floats, n_bytes: NDArray[Any], n_tokens: NDArray[Any]) -> None:
        """Adds values (b t) of tokens; those of the first column have a context of `first` + 1 tokens.

        Tokens with a longer context than `longest` are left out.
        """
        contexts = np.arange(first + 1, min(first + nats.shape[1], self.edges[-1] - 1) + 1)
        if not len(contexts):
            return
        nats, n_bytes, n_tokens = (part[:, : len(contexts)] for part in (nats, n_bytes, n_tokens))
        bins = np.searchsorted(self.edges, contexts, "right") - 1
        starts = np.flatnonzero(np.diff(bins, prepend=-1) | ((contexts - 1) % BLOCK_TOKENS == 0))
        x, y, n = (np.add.reduceat(part, starts, axis=1, dtype=np.float64) for part in (nats, n_bytes, n_tokens))
        totals = (self.nats, self.n_bytes, self.n_tokens, self.n_blocks, *self.products)
        for total, part in zip(totals, (x, y, n, n > 0, x * x, x * y, y * y), strict=True):
            np.add.at(total, bins[starts], part.sum(0))

    def bins(self) -> tuple[ContextBin, ...]:
        """The loss in each context bin that has tokens."""
        return tuple(
            ContextBin(
                start=self.edges[i],
                stop=self.edges[i + 1],
                tokens=int(self.n_tokens[i]),
                bits_per_byte=bits_per(float(self.nats[i]), int(self.n_bytes[i])),
                margin=self._margin(i),
            )
            for i in np.flatnonzero(self.n_tokens).tolist()
        )

    def _margin(self, i: int) -> float | None:
        """Half the width of the 95 % confidence interval of bin `i`; None if it has too few blocks."""
        blocks, n_bytes = int(self.n_blocks[i]), float(self.n_bytes[i])
        if blocks < LEAST_BLOCKS or not n_bytes:
            return None
        ratio = float(self.nats[i]) / n_bytes
        squares = max(0.0, float(np.dot(self.products[:, i], (1.0, -2 * ratio, ratio * ratio))))
        return half_width(math.sqrt(squares * blocks / (blocks - 1)) / n_bytes / LN2, blocks - 1)


@dataclass
class _Totals:
    """Sums over a text, and the batch size. `steps` is None without adaptive computation time."""

    batch_size: int
    by_context: _ContextSums
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0
    steps: float | None = None


def _score_text(
    model: LoadedModel,
    runtime: Runtime,
    text: TokenizedText,
    lengths: _Lengths,
    nats: NDArray[Any] | None,
    clock: Clock | None,
    stop: Callable[[], bool],
) -> Generator[Notice | Progress, None, _Totals]:
    """Scores the text in one pass until stopped. Fills `nats`, the surprisal of each token, if given."""
    n = len(text.tokens)
    loaders = _loaders(model, text, lengths)
    largest = max(loaders, key=lambda loader: loader.batch_size * loader.sequence_len)
    segment_len = max(1, min(lengths.segment_len, largest.sequence_len))
    mem_len = min(lengths.mem_len or segment_len, largest.sequence_len)
    check_memory(
        model,
        runtime,
        mem_len,
        batch_size=largest.batch_size,
        segment_len=segment_len,
        changeable=("batch_size", "segment_len", "mem_len"),
    )
    whole = lengths.mem_len > 0 and (lengths.by_document or _is_window(largest.batch_size, lengths, n))
    longest = min(2 * lengths.mem_len, text.longest_document) if whole else segment_len
    totals = _Totals(max(loader.batch_size for loader in loaders), _ContextSums(longest))
    meter = ProgressMeter(f"memory {lengths.mem_len}", n, "tokens")
    n_called, n_calls = 0, sum(-(-loader.sequence_len // loader.segment_len) for loader in loaders)
    for loader in loaders:
        state = _init_state(model, lengths, loader.offsets)
        for inputs, targets, scored, positions in loader:
            if stop():
                return totals
            nll, steps, state = _token_nats(model, runtime, inputs, targets, state)
            nll = np.where(scored, nll, 0.0)
            totals.nats += float(nll.sum())
            if steps is not None:
                totals.steps = (totals.steps or 0.0) + float(steps[scored].sum())
            index = np.minimum(positions[:, None] + np.arange(nll.shape[1]), n - 1)
            sizes = np.where(scored, text.tokens.sizes(index), 0)
            totals.tokens += int(scored.sum())
            totals.bytes += int(sizes.sum())
            first = int(positions[0] - loader.starts[0]) if whole else 0
            totals.by_context.add(first, nll, sizes, scored)
            if nats is not None:
                nats[index[scored]] = nll[scored]
            n_called += 1
            yield from meter.report(n * n_called // n_calls)  # calls that score nothing, only warm up, take time, too
            if clock is not None:
                yield from clock.report(n_called, n_calls)
    return totals


def _loaders(model: LoadedModel, text: TokenizedText, lengths: _Lengths) -> Sequence[EvalLoader | DocumentLoader]:
    """Loaders that together score each token once; each starts with empty memory."""
    ids, start_id = text.tokens.ids, model.tokenizer.start_id
    size, segment_len = lengths.batch_size, lengths.segment_len
    if not lengths.by_document:
        return [EvalLoader(ids, size, segment_len, lengths.warmup_len, start_id)]
    found = document_loaders(
        ids,
        text.documents,
        batch_size=size,
        segment_len=segment_len,
        start_id=start_id,
        n_tokens=lengths.tokens_per_call,
    )
    return list(found)


def _is_window(batch_size: int, lengths: _Lengths, n_tokens: int) -> bool:
    """Whether the pass over the text is itself a window for the loss by context length."""
    return batch_size == 1 and 0 < n_tokens <= 2 * lengths.mem_len


def _score_windows(
    model: LoadedModel,
    runtime: Runtime,
    text: TokenizedText,
    lengths: _Lengths,
    batch_size: int,
    text_sums: _ContextSums,
    stop: Callable[[], bool],
) -> Generator[Progress, None, _ContextSums]:
    """Sums by context length over windows that start with empty memory; `text_sums` are those of the whole text."""
    ids, n = text.tokens.ids, len(text.tokens)
    longest = min(2 * lengths.mem_len, n)
    widths = sorted({min(SHORT_WINDOW, longest), longest})
    budget = min(n // WINDOW_SHARE, WINDOW_LIMIT) // len(widths)
    by_context = _ContextSums(longest)
    if _is_window(batch_size, lengths, n):
        by_context = text_sums
        widths.pop()
    windows = []
    for width in widths:
        skipped = int(width < longest)  # position 0, at which the longest window begins
        places = np.linspace(0, n - width, max(1, budget // width) + skipped)
        windows.append(places[skipped:].astype(np.int64))
    total = sum(width * len(starts) for width, starts in zip(widths, windows, strict=True))
    n_done, meter = 0, ProgressMeter("loss by context", total, "tokens")
    for width, starts in zip(widths, windows, strict=True):
        for batch in np.split(starts, range(batch_size, len(starts), batch_size)):
            state = _init_state(model, lengths, batch)
            for first in range(0, width, lengths.segment_len):
                if stop():
                    return by_context
                positions = batch[:, None] + np.arange(first, min(first + lengths.segment_len, width))
                inputs, targets = inputs_and_targets(ids, positions, model.tokenizer.start_id)
                nll, _, state = _token_nats(model, runtime, inputs, targets, state)
                by_context.add(first, nll, text.tokens.sizes(positions), np.ones_like(positions))
                n_done += positions.size
                yield from meter.report(n_done)
    return by_context


def _recall(model: LoadedModel, runtime: Runtime, text: TokenizedText, lengths: _Lengths) -> tuple[float, ...]:
    """Recall of each LSH layer on the beginning of the text, or of its longest document."""
    longest = lengths.mem_len + QUERIES if lengths.mem_len else lengths.segment_len
    start = text.documents[np.diff(text.documents, append=len(text.tokens)).argmax()]
    stop = start + min(longest, RECALL_TOKENS, text.longest_document)
    ids = text.tokens.ids[start:stop].astype(np.int64)
    tokens = torch.from_numpy(ids)[None].to(runtime.device)
    if len(ids) < 2:
        return ()
    with torch.inference_mode(), runtime.autocast():
        one_segment = replace(lengths, segment_len=max(lengths.segment_len, len(ids)))
        state = _init_state(model, one_segment, np.zeros(1, np.int64))
        return tuple(lsh_recall(model.network, tokens, state, DEFAULT_SEGMENT_LEN))


def _init_state(model: LoadedModel, lengths: _Lengths, starts: NDArray[np.int64]) -> State:
    """Empty memory of sequences that start at these positions (b) of the text."""
    return model.network.init_state(
        len(starts),
        mem_len=lengths.mem_len,
        segment_len=lengths.segment_len,
        span=lengths.span,
        offsets=starts.tolist(),
    )


def _token_nats(
    model: LoadedModel, runtime: Runtime, inputs: NDArray[np.int64], targets: NDArray[np.int64], state: State
) -> tuple[Floats, Floats | None, State]:
    """Surprisal (b t) in nats of targets (b t), adaptive steps (b t) or None, and the state after inputs (b t)."""
    x, y = (torch.from_numpy(array).to(runtime.device) for array in (inputs, targets))
    with torch.inference_mode(), runtime.autocast():
        nll, state, ponder = model.network.score(x, y, state)
    steps = None if ponder is None else ponder.steps.double().cpu().numpy()
    return nll.double().cpu().numpy(), steps, state


def _unknown_notice(unknown: int, n_words: int) -> Notice:
    return Notice(
        f"{100 * unknown / n_words:.1f} % of the words are not in the vocabulary and scored as <unk>: bits per byte "
        "and per character are lower than those of a model that spells every word, and not comparable with them.",
        "warning",
    )
