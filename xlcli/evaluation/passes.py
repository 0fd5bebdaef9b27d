"""Passes of the model over a text: the text in order, windows of it from empty memory, and recall of LSH attention.

`ContextSums` collects the loss by context length, `Clock` estimates the duration.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli.evaluation.lengths import DEFAULT_SEGMENT_LEN, Lengths
from xlcli.evaluation.text import TokenizedText
from xlcli.events import ContextBin, Notice, Progress, ProgressMeter
from xlcli.inference import check_memory
from xlcli.metrics import LN2, bits_per, context_bin_edges, half_width
from xlcli.model.recall import QUERIES, lsh_recall
from xlcli.online import FixedModel
from xlcli.runtime import Runtime
from xlcli.text.loaders import EvalLoader, WindowLoader, document_loaders, inputs_and_targets, text_loader

if TYPE_CHECKING:
    from xlcli.online import Reader
    from xlcli.state import State
    from xlcli.store.folder import LoadedModel

WINDOW_SHARE = 4
"""Tokens of text per token of the windows for the loss by context length."""
WINDOW_LIMIT = 2**20
"""Maximum number of tokens in these windows. Half are in windows of `SHORT_WINDOW` tokens, since a long window has few
tokens with a short context."""
SHORT_WINDOW = 64
RECALL_TOKENS = 2**17
"""Maximum number of tokens on which recall is measured; their keys are kept."""
LEAST_SEQUENCES = 5
"""Number of sequences with tokens in a bin from which its uncertainty is estimated."""
MEASURE_SECONDS = 2.0
"""Time over which calls are measured."""
LONG_SECONDS = 120.0
"""Duration from which the estimate is reported."""
SHORT_SECONDS = 30.0
"""Duration of the shorter evaluation that is recommended."""

Floats = NDArray[np.float64]


@dataclass
class Totals:
    """Sums over a text, and the batch size.

    `documents` is the number of documents scored to their end; `steps` is None without adaptive computation time.
    """

    batch_size: int
    by_context: ContextSums
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0
    steps: float | None = None


def score_text(
    model: LoadedModel,
    reader: Reader,
    runtime: Runtime,
    text: TokenizedText,
    lengths: Lengths,
    nats: NDArray[Any] | None,
    clock: Clock | None,
    stop: Callable[[], bool],
) -> Generator[Notice | Progress, None, Totals]:
    """Scores the text in one pass until stopped. Fills `nats`, the surprisal of each token, if given."""
    n = len(text.tokens)
    loaders = _loaders(model, text, lengths)
    largest = max(loaders, key=lambda loader: loader.batch_size * loader.sequence_len)
    segment_len = max(1, min(lengths.segment_len, largest.sequence_len))
    mem_len = model.config.model.tokens_in_memory(lengths.mem_len, largest.sequence_len) or segment_len
    on_cpu = runtime.device.type == "cpu"  # whose memory all ranks of the machine share
    check_memory(
        model,
        runtime,
        mem_len,
        batch_size=-(-largest.batch_size // runtime.ranks.size) * (runtime.ranks.local_size if on_cpu else 1),
        segment_len=segment_len,
        memory_dtype=lengths.memory_dtype,
        changeable=("batch_size", "segment_len", "mem_len"),
    )
    whole = lengths.mem_len > 0 and (lengths.by_document or _is_window(largest.batch_size, lengths, n))
    longest = min(2 * lengths.mem_len, text.longest_document) if whole else segment_len
    totals = Totals(max(loader.batch_size for loader in loaders), ContextSums(longest))
    if clock is not None and totals.batch_size < runtime.ranks.size:
        yield few_sequences(totals.batch_size, runtime.ranks.size)
    meter = ProgressMeter(f"memory {lengths.mem_len}", n, "tokens")
    ends = np.append(text.documents[1:], n)
    n_called, n_calls = 0, sum(-(-loader.sequence_len // loader.segment_len) for loader in loaders)
    for loader in loaders:
        state, n_read = None, 0
        totals.by_context.start(loader.batch_size)
        for inputs, targets, scored, positions in loader:
            if stop():
                return totals
            if state is None or lengths.stride is not None:
                state = init_state(reader, lengths, loader.offsets[: len(positions)])
            nll, steps, state = token_nats(reader, runtime, inputs, targets, state)
            nll = np.where(scored, nll, 0.0)
            totals.nats += float(nll.sum())
            if steps is not None:
                totals.steps = (totals.steps or 0.0) + float(steps[scored].sum())
            index = np.minimum(positions[:, None] + np.arange(nll.shape[1]), n - 1)
            sizes = np.where(scored, text.tokens.sizes(index), 0)
            totals.tokens += int(scored.sum())
            totals.bytes += int(sizes.sum())
            read = index[scored] + 1
            totals.documents += int((ends[np.searchsorted(ends, read)] == read).sum())
            first = n_read if whole else 0
            n_read += inputs.shape[1]
            if not lengths.mem_len:  # every segment starts with empty memory
                totals.by_context.start(len(nll))
            if lengths.stride is None:
                totals.by_context.add(first, nll, sizes, scored)
            if nats is not None:
                nats[index[scored]] = nll[scored]
            n_called += 1
            yield from meter.report(n * n_called // n_calls)  # calls that score nothing, only warm up, take time, too
            if clock is not None:
                yield from clock.report(n_called, n_calls)
    return totals


def few_sequences(n_sequences: int, n_ranks: int) -> Notice:
    """Warning that a text is divided into fewer sequences than there are processes."""
    if n_sequences == 1:
        return Notice(f"the text is read as one sequence, by one of {n_ranks} processes; the others wait", "warning")
    sequences = f"{n_sequences} sequences, by {n_sequences} of {n_ranks} processes"
    return Notice(f"the text is read as {sequences}; the others wait", "warning")


def window_share(n_tokens: int) -> float:
    """Tokens of the windows for the loss by context, relative to those of the text."""
    return min(n_tokens // WINDOW_SHARE, WINDOW_LIMIT) / n_tokens


def _loaders(model: LoadedModel, text: TokenizedText, lengths: Lengths) -> Sequence[EvalLoader | WindowLoader]:
    """Loaders that together score each token once; each starts with empty memory.

    Batches of documents, which are of similar length, come in random order, so that a stopped evaluation is not one of
    the shortest documents.
    """
    ids, start_id = text.tokens.ids, model.tokenizer.start_id
    size, segment_len = lengths.batch_size, lengths.segment_len
    if lengths.stride is not None:
        return [WindowLoader(ids, text.documents, size, segment_len, lengths.stride, start_id)]
    if not lengths.by_document:
        return [text_loader(ids, size, segment_len, lengths.warmup_len, start_id)]
    found = list(
        document_loaders(
            ids,
            text.documents,
            batch_size=size,
            segment_len=segment_len,
            start_id=start_id,
            n_tokens=lengths.tokens_per_call,
        )
    )
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def _is_window(batch_size: int, lengths: Lengths, n_tokens: int) -> bool:
    """Whether the pass over the text is itself a window for the loss by context length."""
    return batch_size == 1 and 0 < n_tokens <= 2 * lengths.mem_len


def score_windows(
    model: LoadedModel,
    reader: Reader,
    runtime: Runtime,
    text: TokenizedText,
    lengths: Lengths,
    batch_size: int,
    text_sums: ContextSums,
    stop: Callable[[], bool],
) -> Generator[Progress, None, ContextSums]:
    """Sums by context length over windows that start with empty memory; `text_sums` are those of the whole text."""
    ids, n = text.tokens.ids, len(text.tokens)
    longest = min(2 * lengths.mem_len, n)
    widths = sorted({min(SHORT_WINDOW, longest), longest})
    budget = min(n // WINDOW_SHARE, WINDOW_LIMIT) // len(widths)
    by_context = ContextSums(longest)
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
        rows = batch_size if lengths.tokens_per_call is None else max(1, lengths.tokens_per_call // width)
        for batch in np.split(starts, range(rows, len(starts), rows)):
            state = init_state(reader, lengths, batch)
            by_context.start(len(batch))
            for first in range(0, width, lengths.segment_len):
                if stop():
                    return by_context
                positions = batch[:, None] + np.arange(first, min(first + lengths.segment_len, width))
                inputs, targets = inputs_and_targets(ids, positions, model.tokenizer.start_id)
                nll, _, state = token_nats(reader, runtime, inputs, targets, state)
                by_context.add(first, nll, text.tokens.sizes(positions), np.ones_like(positions))
                n_done += positions.size
                yield from meter.report(n_done)
    return by_context


def measure_recall(model: LoadedModel, runtime: Runtime, text: TokenizedText, lengths: Lengths) -> tuple[float, ...]:
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
        state = init_state(FixedModel(model.network), one_segment, np.zeros(1, np.int64))
        return tuple(lsh_recall(model.network, tokens, state, DEFAULT_SEGMENT_LEN))


def init_state(reader: Reader, lengths: Lengths, starts: NDArray[np.int64]) -> State:
    """Empty memory of sequences that start at these positions (b) of the text."""
    return reader.init_state(
        len(starts),
        mem_len=lengths.mem_len,
        segment_len=lengths.segment_len,
        span=lengths.span,
        offsets=starts.tolist(),
        memory_dtype=lengths.memory_dtype,
    )


def token_nats(
    reader: Reader, runtime: Runtime, inputs: NDArray[np.int64], targets: NDArray[np.int64], state: State
) -> tuple[Floats, Floats | None, State]:
    """Surprisal (b n) in nats, and adaptive steps (b n) or None, of targets (b n); the state after inputs (b t).

    The targets are those of the last n inputs.
    """
    x, y = (torch.from_numpy(array).to(runtime.device) for array in (inputs, targets))
    with torch.inference_mode(), runtime.autocast():
        nll, state, ponder, _ = reader.score(x, y, state)
    steps = None if ponder is None else ponder.steps[:, -targets.shape[1] :].double().cpu().numpy()
    return nll.double().cpu().numpy(), steps, state


class ContextSums:
    """Sums by context bin, for contexts of up to `longest` tokens.

    The margin of a bin comes from the standard error of a ratio of two sums over sequences that start with empty memory
    (Cochran 1977, Sampling Techniques, section 6.4). Tokens of one sequence are no independent samples.
    """

    def __init__(self, longest: int) -> None:
        self.edges = context_bin_edges(longest)
        n_bins = len(self.edges) - 1
        self.nats, self.n_bytes, self.n_tokens, self.n_sequences = np.zeros((4, n_bins))
        self.products = np.zeros((3, n_bins))
        """Sums over sequences of nats squared, nats times bytes, and bytes squared."""
        self._open = np.zeros((3, 0, n_bins))
        """Nats, bytes and tokens of the sequences being read (b) in each bin."""

    def start(self, batch_size: int) -> None:
        """Begins a batch of sequences."""
        x, y, n = self._open
        totals = (self.nats, self.n_bytes, self.n_tokens, self.n_sequences, *self.products)
        for total, part in zip(totals, (x, y, n, n > 0, x * x, x * y, y * y), strict=True):
            total += part.sum(0)
        self._open = np.zeros((3, batch_size, len(self.nats)))

    def add(self, first: int, nats: NDArray[np.float64], n_bytes: NDArray[Any], n_tokens: NDArray[Any]) -> None:
        """Adds values (b t) of the next tokens; those of the first column have a context of `first` + 1 tokens.

        Tokens with a longer context than `longest` are left out.
        """
        contexts = np.arange(first + 1, min(first + nats.shape[1], self.edges[-1] - 1) + 1)
        if not len(contexts):
            return
        bins, columns = np.unique(np.searchsorted(self.edges, contexts, "right") - 1, return_index=True)
        for total, part in zip(self._open, (nats, n_bytes, n_tokens), strict=True):
            total[:, bins] += np.add.reduceat(part[:, : len(contexts)], columns, axis=1, dtype=np.float64)

    def bins(self) -> tuple[ContextBin, ...]:
        """The loss in each context bin that has tokens."""
        self.start(0)
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
        """Half the width of the 95 % confidence interval of bin `i`; None if it has too few sequences."""
        n, n_bytes = int(self.n_sequences[i]), float(self.n_bytes[i])
        if n < LEAST_SEQUENCES or not n_bytes:
            return None
        ratio = float(self.nats[i]) / n_bytes
        squares = max(0.0, float(np.dot(self.products[:, i], (1.0, -2 * ratio, ratio * ratio))))
        return half_width(math.sqrt(squares * n / (n - 1)) / n_bytes / LN2, n - 1)


class Clock:
    """Reports, once, how long an evaluation takes and what makes it shorter.

    Args:
        n_bytes: Length of the text.
        scale: Duration of the whole evaluation as a multiple of the one pass that is measured.
        clock: Time in seconds.
    """

    def __init__(self, n_bytes: int, scale: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._n_bytes, self._scale, self._clock = n_bytes, scale, clock
        self._started: float | None = None

    def report(self, n_done: int, n_calls: int) -> Iterator[Notice]:
        """A notice if it is long, after call `n_done` of `n_calls`; the first is slower and does not count."""
        now = self._clock()
        if n_done == 1:
            self._started = now
        elif self._started is not None and now - self._started >= MEASURE_SECONDS:
            seconds = self._scale * n_calls * (now - self._started) / (n_done - 1)
            self._started = None
            if seconds >= LONG_SECONDS:
                limit = 2 ** max(10, int(math.log2(self._n_bytes * SHORT_SECONDS / seconds)))
                size = f"{limit // 2**20}MiB" if limit >= 2**20 else f"{limit // 2**10}KiB"
                about = f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
                yield Notice(f"this takes about {about}; --limit {size} gives a score in half a minute")
