"""Passes of the model over a text: the text in order, and windows of it from empty memory.

`ContextSums` collects the loss by context length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xlcli.evaluation.text import Lengths, TokenizedText, TokenScores
from xlcli.events import ContextBin, Progress, ProgressMeter
from xlcli.inference import check_memory, longest_memory
from xlcli.metrics import LN2, bits_per, context_bin_edges, half_width
from xlcli.online import Reader
from xlcli.runtime import Runtime
from xlcli.store.folder import LoadedModel
from xlcli.text.loaders import EvalLoader, document_loaders, text_loader

WINDOW_LIMIT = 2**20
"""Maximum number of tokens in the windows for the loss by context length."""
SHORT_WINDOW = 64
"""Tokens of at least half of them, in tokens, since a long window has few tokens with a short context."""
LEAST_SEQUENCES = 5
"""Number of sequences with tokens in a bin from which its uncertainty is estimated."""


@dataclass(frozen=True)
class Pass:
    """A model that reads a text: what every pass over it needs."""

    model: LoadedModel
    reader: Reader
    runtime: Runtime
    text: TokenizedText
    lengths: Lengths
    stop: Callable[[], bool]


@dataclass
class Totals:
    """Sums over a text, and the batch size.

    `documents` is the number of documents scored to their end; `steps` is None without adaptive computation time.
    `counts_context`: the number of tokens that a sequence has read is the context of the next one. `n_by_context` is
    the number of sequences of a batch whose tokens `by_context` has, the first ones.
    """

    batch_size: int
    by_context: ContextSums
    counts_context: bool
    n_by_context: int
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0
    steps: float | None = None


def score_text(
    run: Pass,
    loaders: Sequence[EvalLoader],
    totals: Totals,
    meter: ProgressMeter,
    scores: TokenScores | None = None,
) -> Iterator[Progress]:
    """Adds the scores of all sequences to `totals` until stopped, and fills the `scores` of each token."""
    text, lengths, runtime, n = run.text, run.lengths, run.runtime, len(run.text.tokens)
    ends = np.append(text.documents[1:], n)
    n_called, n_calls = 0, sum(-(-loader.sequence_len // loader.segment_len) for loader in loaders)
    for loader in loaders:
        state, n_read = None, 0
        totals.by_context.start(loader.batch_size)
        for inputs, targets, scored, positions in loader:
            if run.stop():
                return
            if state is None:
                state = lengths.init_state(run.reader, loader.offsets)
            x, y = (torch.from_numpy(array).to(runtime.device) for array in (inputs, targets))
            with torch.inference_mode(), runtime.autocast():
                readout = None if scores is None else scores.predictions
                surprisal, state, ponder, features = run.reader.score(x, y, state, readout=readout)
            nll = np.where(scored, surprisal.double().cpu().numpy(), 0.0)
            totals.nats += float(nll.sum())
            if ponder is not None:
                steps = ponder.steps[:, -targets.shape[1] :].double().cpu().numpy()
                totals.steps = (totals.steps or 0.0) + float(steps[scored].sum())
            index = np.minimum(positions[:, None] + np.arange(nll.shape[1]), n - 1)
            sizes = np.where(scored, text.tokens.sizes(index), 0)
            totals.tokens += int(scored.sum())
            totals.bytes += int(sizes.sum())
            read = index[scored] + 1
            totals.documents += int((ends[np.searchsorted(ends, read)] == read).sum())
            first = n_read if totals.counts_context else 0
            n_read += inputs.shape[1]
            if not lengths.has_memory:  # every segment starts with empty memory
                totals.by_context.start(len(nll))
            if lengths.stride is None:
                kept = scored & (np.arange(len(nll))[:, None] < totals.n_by_context)
                totals.by_context.add(first, np.where(kept, nll, 0.0), np.where(kept, sizes, 0), kept)
            if scores is not None:
                scores.nats[index[scored]] = nll[scored]
                if features is not None:
                    scores.keep(features.float().cpu().numpy(), scored, positions, loader.ends)
            n_called += 1
            yield from meter.report((meter.total or 0) * n_called // n_calls)  # also calls that only warm up take time


def pass_loaders(run: Pass, *, reads_end: bool = False) -> tuple[list[EvalLoader], Totals]:
    """Loaders that together score each token once, each from empty memory, and their sums.

    Batches of documents, which are of similar length, come in random order, so that a stopped evaluation is not one of
    the shortest documents. `reads_end`: as of `EvalLoader`.

    Raises:
        ResourceError: The memory does not fit the machine.
    """
    text, lengths, runtime = run.text, run.lengths, run.runtime
    ids, start_id = text.tokens.ids, run.model.tokenizer.start_id
    size, segment_len = lengths.batch_size, lengths.segment_len
    if lengths.stride is not None:  # sequences start where a window does
        segment_len = segment_len // lengths.stride * lengths.stride
    settings: dict[str, int] = {"batch_size": size, "start_id": start_id}
    if lengths.by_document:
        n_tokens = lengths.tokens_per_call
        found = [*document_loaders(ids, text.documents, segment_len=segment_len, n_tokens=n_tokens, **settings)]
        loaders = [found[i] for i in np.random.default_rng(0).permutation(len(found))]
    else:
        loaders = [text_loader(ids, size, segment_len, lengths.warmup_len, start_id)]
    loaders = [replace(loader, reads_end=reads_end) for loader in loaders]
    largest = max(loaders, key=lambda loader: loader.batch_size * loader.sequence_len)
    segment_len = max(1, min(segment_len, largest.sequence_len))
    on_cpu = runtime.device.type == "cpu"  # whose memory all ranks of the machine share
    check_memory(
        run.model,
        runtime,
        longest_memory(run.model, lengths, largest.sequence_len),
        batch_size=-(-largest.batch_size // runtime.ranks.size) * (runtime.ranks.local_size if on_cpu else 1),
        segment_len=segment_len,
        memory_dtype=lengths.memory_dtype,
    )
    n_sequences, longest = max(loader.batch_size for loader in loaders), segment_len
    n_by_context = n_sequences
    if lengths.has_memory:
        longest = min(lengths.max_context, text.longest_document)
        if not lengths.by_document:  # the others warm up
            n_by_context = int(loaders[0].ends[0] >= longest)
    return loaders, Totals(n_sequences, ContextSums(longest), lengths.has_memory, n_by_context)


def context_loaders(run: Pass, totals: Totals, share: float) -> tuple[list[EvalLoader], Totals]:
    """Loaders of windows for the loss by context length, and their sums, which continue those of the whole text.

    `share` is the number of their tokens per token of the text. The window at its beginning has been read with it.
    """
    lengths, ids, start_id = run.lengths, run.text.tokens.ids, run.model.tokenizer.start_id
    n, longest = len(ids), min(lengths.max_context, len(ids))
    budget, short = int(min(n * share, WINDOW_LIMIT)), min(SHORT_WINDOW, longest)
    n_long = budget // (2 * longest) if longest > short else 0
    n_short = (budget - n_long * longest) // short
    loaders: list[EvalLoader] = []
    for width, n_windows, n_read in ((short, n_short, 1), (longest, n_long, totals.n_by_context)):
        starts = np.linspace(0, n - width, n_windows + 1)[n_read:].astype(np.int64)
        rows = totals.batch_size if lengths.tokens_per_call is None else max(1, lengths.tokens_per_call // width)
        loaders += [
            EvalLoader(ids, batch, batch + width, lengths.segment_len, start_id, offsets=batch)
            for batch in np.split(starts, range(rows, len(starts), rows))
            if len(batch)
        ]
    return loaders, Totals(totals.batch_size, totals.by_context, counts_context=True, n_by_context=n)


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
        """Adds values (b t) of the next tokens; the first column has a context of `first` + 1 tokens.

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
