"""Scores text the honest way: every token once, in order, with as much memory before it as in one long pass.

How the text is cut into calls and lanes changes the speed and never the result: a later lane first reads the
`n_layers * mem_len` tokens before its own, which is as far as a prediction can see; where that has no limit there is
one lane. Only without memory, or with the growing span of the published set-ups, does the segment length matter; lanes
then begin where segments do.

Loss by context seen: without memory it comes from the pass itself, whose segments all start cold. With memory every
token of the pass but the first ones has a full one, so windows evenly spread over the text, the longest of
`2 * mem_len` tokens, are read once more from a cold start; the longest not if it would be the whole text.
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
from xlcli.errors import CheckpointError, DataError
from xlcli.events import ContextBin, Notice, Progress, Score, TokenScore
from xlcli.metrics import bits_per, context_bin_edges, perplexity
from xlcli.model.recall import QUERIES, lsh_recall
from xlcli.text.corpus import Corpus, open_corpus
from xlcli.text.loaders import EvalLoader
from xlcli.tokenized import ProgressMeter, TokenizedText, column, tokenize

if TYPE_CHECKING:
    from xlcli.runtime import Runtime
    from xlcli.state import State
    from xlcli.store.folder import LoadedModel

TOKENS_A_CALL = {"cpu": 2**11, "cuda": 2**14}
"""Tokens of all lanes together that one call reads when nobody says: enough to keep the device busy."""
LONGEST_CALL = 512
"""Most tokens of a lane that one call reads when nobody says; beyond the memory length the attention mask is waste."""
LARGEST_CALL = 2**12
"""Most tokens of a lane that one call reads whatever is said, where that changes nothing: the mask grows with it."""
STATE_LIMIT = 2**28
"""Bytes of memory tensors that a batch size chosen here may take."""
PROBE_SHARE = 4
"""The windows read for the loss by context hold at most one in so many tokens of the text,"""
PROBE_LIMIT = 2**20
"""and at most so many tokens; half of them in windows of `SHORT_PROBE`: a long one tells little of its beginning."""
SHORT_PROBE = 64
LONGEST_RECALL = 2**17
"""Most tokens on which it is measured what hashing finds: their keys are held."""

Event = Notice | Progress | TokenScore | Score
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Plan:
    """One reading of a text."""

    mem_len: int
    segment_len: int
    batch_size: int
    span: SpanKind
    warm: int


@dataclass
class _Sums:
    """What a reading adds up to; nats, bytes and tokens by the number of tokens seen, less one."""

    nats: float
    by_context: tuple[Floats, Floats, Floats]
    steps: float | None


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
        source: Files, folders or `-`, read as one text; None is the model's own held-out text.
        options: Memory lengths, segment and batch size, how much of the text (`limit`, in bytes).
        runtime: Where to compute.
        per_token: Also yield the score of every token, in the order of the text, before the score of the whole.
        stop: Asked between calls of the model; once true, there are no more scores.

    Yields:
        Progress, and a `Score` for each memory length.

    Raises:
        ConfigError: The model was loaded with other values of `n_steps` or `n_hashes` than the options name.
        DataError: The text cannot be read, or the model has no held-out text.
        CheckpointError: The model gives numbers that are not finite.
        ResourceError: There is no room for the tokens on disk.
    """
    model.check_settings(options.n_steps, options.n_hashes)
    corpus = _open(model, source, options)
    with ExitStack() as files:
        text = yield from tokenize(corpus, model.tokenizer, options.limit, files)
        if model.tokenizer.kind == "words":
            yield from _warn_of_unknown_words(text.ids)
        for mem_len in options.sweep_mem_len or (options.mem_len,):
            plan = _plan(model, runtime, options, mem_len, len(text.ids))
            costs = column(len(text.ids), files) if per_token else None
            started = time.perf_counter()
            done = yield from _read_all(model, runtime, text, plan, costs, stop)
            if done is None:
                yield Notice("stopped before the whole text was read: no score.", "warning")
                return
            sums, plan = done
            seconds = time.perf_counter() - started
            if not math.isfinite(sums.nats):
                raise CheckpointError(f"model {model.name} gives no finite score.", "Its weights are damaged.")
            if plan.mem_len:
                sums.by_context = yield from _probe(model, runtime, text, plan, sums.by_context, stop)
            if costs is not None:
                yield from text.scores(costs)
            recall = _recall(model, runtime, text, plan) if options.recall else ()
            yield _score(model, runtime, text, plan, sums, seconds, recall)


def _open(model: LoadedModel, source: Sequence[str | Path] | None, options: EvalConfig) -> Corpus:
    if source is not None:
        return open_corpus(source)
    path = model.held_out(options.split)
    if path is None:
        raise DataError(f"model {model.name} keeps no {options.split} text.", "Give a file: xlcli eval FILE.")
    return open_corpus([path])


def _plan(model: LoadedModel, runtime: Runtime, options: EvalConfig, mem_len: int | None, n_tokens: int) -> _Plan:
    """Memory as trained unless said otherwise; lengths that only change the speed chosen for speed."""
    train, shape = model.config.train, model.config.model
    mem_len = train.mem_len if mem_len is None else mem_len
    exact = mem_len > 0 and options.span == "uniform"
    if options.segment_len is not None:
        segment_len = min(options.segment_len, n_tokens, LARGEST_CALL if exact else n_tokens)
    elif exact:
        segment_len = min(LONGEST_CALL, max(64, 2 ** (mem_len - 1).bit_length()))
    else:
        segment_len = train.segment_len
    reach = model.network.receptive_field(mem_len if exact else mem_len + segment_len) if mem_len else 0
    warm = n_tokens if reach is None else reach
    row = 4 * shape.memory_floats(2 * mem_len + segment_len)
    fitting = TOKENS_A_CALL.get(runtime.device.type, TOKENS_A_CALL["cuda"]) // segment_len
    worth_warming = 1 + n_tokens // (10 * warm) if warm else n_tokens
    chosen = max(1, min(fitting, STATE_LIMIT // row, worth_warming))
    batch_size = 1 if reach is None else options.batch_size or chosen
    return _Plan(mem_len, segment_len, batch_size, options.span, warm)


def _start(model: LoadedModel, plan: _Plan, places: NDArray[np.int64]) -> State:
    """The state of rows that begin at these places of the text and have read nothing."""
    return model.network.init_state(
        len(places),
        mem_len=plan.mem_len,
        segment_len=plan.segment_len,
        span=plan.span,
        offsets=places.tolist(),
    )


def _nats(
    model: LoadedModel, runtime: Runtime, tokens: NDArray[np.int64], targets: NDArray[np.int64], state: State
) -> tuple[Floats, Floats | None, State]:
    """Nats (b t) of targets (b t), steps (b t) that each token took, and the state after tokens (b t)."""
    x, y = (torch.from_numpy(array).to(runtime.device) for array in (tokens, targets))
    with torch.inference_mode(), runtime.autocast():
        nats, state, ponder = model.network.score(x, y, state)
    steps = None if ponder is None else ponder.steps.double().cpu().numpy()
    return nats.double().cpu().numpy(), steps, state


def _read_all(
    model: LoadedModel,
    runtime: Runtime,
    text: TokenizedText,
    plan: _Plan,
    costs: NDArray[Any] | None,
    stop: Callable[[], bool],
) -> Generator[Progress, None, tuple[_Sums, _Plan] | None]:
    """Reads the whole text; what it adds up to and the plan as carried out, or None when stopped."""
    scan = EvalLoader(
        text.ids,
        batch_size=plan.batch_size,
        segment_len=plan.segment_len,
        warm=plan.warm,
        start_id=model.tokenizer.start_id,
    )
    plan = replace(plan, batch_size=scan.batch_size)
    from_start = _reads_from_the_start(plan, len(text.ids))
    by_context = tuple(np.zeros(len(text.ids) if from_start else plan.segment_len) for _ in range(3))
    nats, n_done, clock = 0.0, 0, ProgressMeter(f"memory {plan.mem_len}", len(text.ids), "tokens")
    state, all_steps = _start(model, plan, scan.starts), None
    for window in scan:
        if stop():
            return None
        cost, steps, state = _nats(model, runtime, window.tokens, window.targets, state)
        scored = window.scored
        if steps is not None:
            all_steps = (all_steps or 0.0) + float(steps[scored].sum())
        cost = np.where(scored, cost, 0.0)
        nats += float(cost.sum())
        length = cost.shape[1]
        places = np.minimum(window.positions[:, None] + np.arange(length), len(text.ids) - 1)
        for total, part in zip(by_context, (cost, np.where(scored, text.sizes[places], 0), scored), strict=True):
            first = int(window.positions[0]) if from_start else 0
            total[first : first + length] += part.sum(0)
        if costs is not None:
            costs[places[scored]] = cost[scored]
        n_done += int(scored.sum())
        yield from clock.report(n_done)
    return _Sums(nats, by_context, all_steps), plan  # type: ignore[arg-type]


def _reads_from_the_start(plan: _Plan, n_tokens: int) -> bool:
    """Whether the pass is itself a window as long as any that would be read for the loss by context."""
    return plan.batch_size == 1 and 0 < n_tokens <= 2 * plan.mem_len


def _probe(
    model: LoadedModel,
    runtime: Runtime,
    text: TokenizedText,
    plan: _Plan,
    whole: tuple[Floats, Floats, Floats],
    stop: Callable[[], bool],
) -> Generator[Progress, None, tuple[Floats, Floats, Floats]]:
    """Nats, bytes and tokens by tokens seen since a cold start, less one; `whole` are those of the pass."""
    n = len(text.ids)
    longest = min(2 * plan.mem_len, n)
    sums = (np.zeros(longest), np.zeros(longest), np.zeros(longest))
    widths = sorted({min(SHORT_PROBE, longest), longest})
    budget = min(n // PROBE_SHARE, PROBE_LIMIT) // len(widths)
    if _reads_from_the_start(plan, n):
        sums = whole
        widths.pop()
    windows = [np.linspace(0, n - width, max(1, budget // width)).astype(np.int64) for width in widths]
    total = sum(width * len(starts) for width, starts in zip(widths, windows, strict=True))
    done, clock = 0, ProgressMeter("loss by context", total, "tokens")
    for width, starts in zip(widths, windows, strict=True):
        for first in range(0, len(starts), plan.batch_size):
            rows = starts[first : first + plan.batch_size, None]
            state = _start(model, plan, rows[:, 0])
            for at in range(0, width, plan.segment_len):
                if stop():
                    return sums
                columns = np.arange(at, min(at + plan.segment_len, width))
                places = rows + columns
                tokens = text.ids[np.maximum(places - 1, 0)].astype(np.int64)
                tokens[places == 0] = model.tokenizer.start_id
                cost, _, state = _nats(model, runtime, tokens, text.ids[places].astype(np.int64), state)
                for sum_, part in zip(sums, (cost, text.sizes[places], np.ones_like(places)), strict=True):
                    sum_[columns] += part.sum(0)
                done += places.size
                yield from clock.report(done)
    return sums


def _recall(model: LoadedModel, runtime: Runtime, text: TokenizedText, plan: _Plan) -> tuple[float, ...]:
    """What each hashed layer finds of full attention, on the beginning of the text."""
    longest = plan.mem_len + QUERIES if plan.mem_len else plan.segment_len
    ids = text.ids[: min(longest, LONGEST_RECALL)].astype(np.int64)
    tokens = torch.from_numpy(ids)[None].to(runtime.device)
    if len(ids) < 2:
        return ()
    with torch.inference_mode(), runtime.autocast():
        state = _start(model, replace(plan, segment_len=max(plan.segment_len, len(ids))), np.zeros(1, np.int64))
        return tuple(lsh_recall(model.network, tokens, state, LONGEST_CALL))


def _buckets(by_context: tuple[Floats, Floats, Floats]) -> tuple[ContextBin, ...]:
    nats, n_bytes, tokens = by_context
    edges = context_bin_edges(len(nats))
    return tuple(
        ContextBin(start, stop, n, bits_per(float(nats[part].sum()), int(n_bytes[part].sum())))
        for start, stop in itertools.pairwise(edges)
        if (n := int(tokens[(part := slice(start - 1, stop - 1))].sum()))
    )


def _score(
    model: LoadedModel,
    runtime: Runtime,
    text: TokenizedText,
    plan: _Plan,
    sums: _Sums,
    seconds: float,
    recall: tuple[float, ...],
) -> Score:
    from xlcli.runtime import peak_rss_bytes

    counts, nats = text.counts, sums.nats
    return Score(
        model=model.name,
        file=text.corpus.name,
        bytes=counts.bytes,
        chars=counts.chars,
        words=counts.words,
        tokens=len(text.ids),
        nats=nats,
        bits_per_byte=bits_per(nats, counts.bytes),
        bits_per_char=bits_per(nats, counts.chars) if counts.chars else None,
        perplexity=perplexity(nats, len(text.ids)),
        word_perplexity=perplexity(nats, counts.words) if counts.words else None,
        mem_len=plan.mem_len,
        segment_len=plan.segment_len,
        batch_size=plan.batch_size,
        span=plan.span,
        tokens_per_second=len(text.ids) / seconds,
        peak_rss_bytes=peak_rss_bytes(),
        seconds=seconds,
        device=str(runtime.device),
        dtype=runtime.dtype_name,
        mean_steps=None if sums.steps is None else sums.steps / len(text.ids),
        recall=math.fsum(recall) / len(recall) if recall else None,
        recall_by_layer=recall,
        by_context=_buckets(sums.by_context),
    )


def _warn_of_unknown_words(ids: NDArray[Any]) -> Iterator[Notice]:
    unknown = sum(int(np.count_nonzero(ids[at : at + 2**20] == 0)) for at in range(0, len(ids), 2**20))
    if unknown:
        share = f"{100 * unknown / len(ids):.1f} %"
        yield Notice(
            f"{share} of the words are unknown to the model and scored as <unk>: bits per byte and per character are "
            "too low to compare with a model that spells every word.",
            "warning",
        )
