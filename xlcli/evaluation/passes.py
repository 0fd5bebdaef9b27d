"""Passes of the model over a text: in order, and windows from empty memory; the loss by context (`ContextSums`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xlcli.evaluation.text import Lengths, TokenizedText, TokenScores
from xlcli.events import ContextBin, Progress, ProgressMeter
from xlcli.inference import check_memory, longest_memory
from xlcli.metrics import LN2, bits_per, context_bin_edges, half_width
from xlcli.model.head import Readout
from xlcli.model.lm import ScoreOutput
from xlcli.model.stack import Ponder
from xlcli.online import Scorer
from xlcli.runtime import Runtime
from xlcli.state import State
from xlcli.store.folder import LoadedModel
from xlcli.text.loaders import EvalBatch, EvalLoader, document_loaders, text_loader

MOST_CALLS = 8  # largest number of calls that are read at once: 4,096 tokens in calls of 512
MOST_PRODUCTS = 2**40  # products of weights and tokens between two reports of progress: some 10 seconds on two cores
LEAST_SEQUENCES = 5  # number of sequences with tokens in a bin from which its uncertainty is estimated


@dataclass(frozen=True)
class Pass:
    """A model that reads a text: what every pass over it needs."""

    model: LoadedModel
    scorer: Scorer
    runtime: Runtime
    text: TokenizedText
    lengths: Lengths
    stop: Callable[[], bool]


@dataclass
class Totals:
    """Sums over a text."""

    documents: int = 0  # number of documents scored to their end
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0
    steps: float | None = None  # None without adaptive computation time

    def add(
        self, nats: NDArray[np.float64], n_bytes: NDArray[Any], scored: NDArray[np.bool_], ponder: Ponder | None
    ) -> None:
        """Adds the surprisal and the size (b t) of tokens, 0 where none is scored, and the steps of the others."""
        self.nats += float(nats.sum())
        self.tokens += int(scored.sum())
        self.bytes += int(n_bytes.sum())
        if ponder is not None:
            steps = ponder.steps[:, -nats.shape[1] :].double().cpu().numpy()
            self.steps = (self.steps or 0.0) + float(steps[scored].sum())


@dataclass(frozen=True)
class Batches:
    """The sequences of a pass, in batches."""

    loaders: Sequence[EvalLoader]
    longest: int  # longest context whose loss is measured
    n_by_context: int  # number of sequences, at the beginning of a batch, in which it is

    @property
    def size(self) -> int:
        return max(loader.batch_size for loader in self.loaders)


def score_text(
    run: Pass, batches: Batches, by_context: ContextSums, meter: ProgressMeter, scores: TokenScores | None = None
) -> Generator[Progress, None, Totals]:
    """Returns sums over all sequences, or those before a stop; adds to `by_context`, and fills `scores` of tokens."""
    text, lengths = run.text, run.lengths
    n_tokens = len(text.tokens)
    readout = None if scores is None else scores.predictions
    document_ends = np.append(text.documents[1:], n_tokens)
    n_calls = sum(math.ceil(loader.sequence_len / loader.segment_len) for loader in batches.loaders)
    n_called = 0
    totals = Totals()
    for loader in batches.loaders:
        by_context.start(loader.batch_size)
        for batch, out in _scored(run, loader, readout):
            scored = batch.scored
            # Numbers (b t) of the tokens; those after the end of a sequence are not scored, but must be legal.
            index = np.minimum(batch.positions[:, None] + np.arange(scored.shape[1]), n_tokens - 1)
            if text.scored is not None:
                scored = scored & text.scored[index]
            nats = np.where(scored, out.nll.double().cpu().numpy(), 0.0)
            sizes = np.where(scored, text.tokens.sizes(index), 0)
            totals.add(nats, sizes, scored, out.ponder)
            token_ends = index[scored] + 1
            next_document_ends = document_ends[np.searchsorted(document_ends, token_ends)]
            totals.documents += int((token_ends == next_document_ends).sum())
            if not lengths.has_memory:  # every segment starts with empty memory
                by_context.start(len(nats))
            if lengths.stride is None:  # tokens of overlapping windows have no one context
                is_measured = scored.copy()
                is_measured[batches.n_by_context :] = False
                measured_nats = np.where(is_measured, nats, 0.0)
                by_context.add(batch.inputs.shape[1], measured_nats, np.where(is_measured, sizes, 0), is_measured)
            if scores is not None:
                scores.nats[index[scored]] = nats[scored]
            if scores is not None and out.readout is not None:
                scores.keep(out.readout.float().cpu().numpy(), scored, batch.positions, loader.ends)
            n_called += 1
            # Progress is the share of calls, because those that only warm up take time, too.
            yield from meter.report((meter.total or 0) * n_called // n_calls)
        if run.stop():
            return totals
    return totals


def _scored(run: Pass, loader: EvalLoader, readout: Readout | None) -> Iterator[tuple[EvalBatch, ScoreOutput]]:
    """The calls of a loader, each with the scores of its targets, until stopped.

    A plain network reads a group of calls at once, layer by layer: where no text follows, the memory of a layer is
    freed when the next one begins. Any other scorer reads groups of one call.
    """
    network, device = run.model.network, run.runtime.device
    state = run.lengths.init_state(run.scorer, loader.offsets)
    group_len = 1
    score_group: Callable[..., list[ScoreOutput]] = partial(_score_call, run.scorer)
    if run.scorer is network and network.reads_by_layer(state, readout):
        n_products = network.n_parameters * loader.batch_size * loader.segment_len
        group_len, score_group = min(MOST_CALLS, max(1, MOST_PRODUCTS // n_products)), network.score_by_layer
    n_left = math.ceil(loader.sequence_len / loader.segment_len)
    batches = iter(loader)
    while n_left > 0 and not run.stop():
        group = [*islice(batches, group_len)]
        n_left -= len(group)
        calls = []
        for inputs, targets, *_ in group:
            calls.append((torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)))
        with torch.inference_mode(), run.runtime.autocast():
            outs = score_group(calls, state, readout=readout, continues=n_left > 0)
        state = outs[-1].state
        for number, (batch, out) in enumerate(zip(group, outs, strict=True)):
            if number > 0 and run.stop():  # the loop has asked for the first one
                return
            yield batch, out


def _score_call(
    scorer: Scorer, calls: Sequence[tuple[Tensor, Tensor]], state: State, *, readout: Readout | None, continues: bool
) -> list[ScoreOutput]:
    """The scores of a group of one call by any scorer, which returns its memory even if no text `continues` it."""
    [(tokens, targets)] = calls
    return [scorer.score(tokens, targets, state, readout=readout)]


def text_batches(run: Pass, *, reads_end: bool = False) -> Batches:
    """Batches that together score each token once, each sequence from empty memory.

    Batches of documents, which are of similar length, come in random order, so that a stopped evaluation is not one of
    the shortest documents. `reads_end`: as of `EvalLoader`. `ResourceError` if the memory does not fit the machine.
    """
    text, lengths = run.text, run.lengths
    ids, start_id = text.tokens.ids, run.model.tokenizer.start_id
    batch_size, segment_len = lengths.batch_size, lengths.segment_len
    if lengths.stride is not None:  # sequences start where a window does
        segment_len = segment_len // lengths.stride * lengths.stride
    if lengths.by_document:
        in_order = document_loaders(
            ids,
            text.documents,
            batch_size=batch_size,
            segment_len=segment_len,
            start_id=start_id,
            n_tokens=lengths.tokens_per_call,
        )
        by_length = [*in_order]
        loaders = [by_length[i] for i in np.random.default_rng(0).permutation(len(by_length))]
    else:
        loaders = [text_loader(ids, batch_size, segment_len, lengths.warmup_len, start_id)]
    loaders = [replace(loader, reads_end=reads_end) for loader in loaders]
    # The largest batch decides whether the memory fits.
    largest = max(loaders, key=lambda loader: loader.batch_size * loader.sequence_len)
    segment_len = max(1, min(segment_len, largest.sequence_len))
    check_memory(
        run.model,
        run.runtime,
        longest_memory(run.model, lengths, largest.sequence_len),
        batch_size=largest.batch_size,
        segment_len=segment_len,
        memory_dtype=lengths.memory_dtype,
    )
    if not lengths.has_memory:
        return Batches(loaders, segment_len, n_by_context=len(ids))
    longest = min(lengths.max_context, text.longest_document)
    if lengths.by_document:
        return Batches(loaders, longest, n_by_context=len(ids))
    is_first_long = bool(loaders[0].ends[0] >= longest)
    return Batches(loaders, longest, n_by_context=int(is_first_long))  # the other sequences warm up


class ContextSums:
    """Sums by context bin, for contexts of up to `longest` tokens.

    The margin of a bin comes from the standard error of a ratio of two sums over sequences that start with empty memory
    (Cochran 1977, Sampling Techniques, section 6.4). Tokens of one sequence are no independent samples.
    """

    def __init__(self, longest: int) -> None:
        self.edges = context_bin_edges(longest)
        n_bins = len(self.edges) - 1
        self.nats, self.n_bytes, self.n_tokens, self.n_sequences = np.zeros((4, n_bins))
        self.products = np.zeros((3, n_bins))  # sums over sequences of nats squared, nats times bytes, bytes squared
        self._open, self._n_read = np.zeros((3, 0, n_bins)), 0
        """Nats, bytes and tokens of the sequences being read (b) in each bin, and how many tokens of each were read."""

    def start(self, batch_size: int) -> None:
        """Begins a batch of sequences, and adds those of the batch before to the sums."""
        nats, n_bytes, n_tokens = self._open  # each (b bin)
        self.nats += nats.sum(0)
        self.n_bytes += n_bytes.sum(0)
        self.n_tokens += n_tokens.sum(0)
        self.n_sequences += (n_tokens > 0).sum(0)
        for total, products in zip(self.products, (nats * nats, nats * n_bytes, n_bytes * n_bytes), strict=True):
            total += products.sum(0)
        self._open = np.zeros((3, batch_size, len(self.nats)))
        self._n_read = 0

    def add(self, n_read: int, nats: NDArray[np.float64], n_bytes: NDArray[Any], n_tokens: NDArray[Any]) -> None:
        """Adds values (b t) of a call that read so many tokens of each sequence; omits contexts beyond `longest`."""
        shortest = self._n_read + 1  # context, of the first column
        longest = min(self._n_read + nats.shape[1], self.edges[-1] - 1)
        self._n_read += n_read
        contexts = np.arange(shortest, longest + 1)
        if not len(contexts):
            return
        # Columns (t) are in order of context, so those of a bin are neighbors, and can be added from the first one on.
        bin_of_column = np.searchsorted(self.edges, contexts, "right") - 1
        bins, first_columns = np.unique(bin_of_column, return_index=True)
        for total, values in zip(self._open, (nats, n_bytes, n_tokens), strict=True):
            total[:, bins] += np.add.reduceat(values[:, : len(contexts)], first_columns, axis=1, dtype=np.float64)

    def bins(self) -> tuple[ContextBin, ...]:
        """The loss in each context bin that has tokens; no batch is open afterwards."""
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
        # The sum of (nats - ratio * bytes)^2 over sequences; rounding can make it negative.
        squares = max(0.0, float(np.dot(self.products[:, i], (1.0, -2 * ratio, ratio * ratio))))
        return half_width(math.sqrt(squares * n / (n - 1)) / n_bytes / LN2, n - 1)
