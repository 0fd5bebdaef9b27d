"""Further figures of an evaluation: the loss by context, the cost of rounding, and pairs of texts.

The texts of a pair are successive documents, each scored as if it were alone, with its line end. Two comparisons: of
probabilities, and of means per token, which do not prefer the shorter text. Equal ones count half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.config import EvalConfig
from xlcli.errors import DataError
from xlcli.evaluation.passes import Batches, ContextSums, Pass, score_text, text_batches
from xlcli.evaluation.text import TokenizedText, TokenScores
from xlcli.events import ContextBin, ContinuationScore, PairScore, PairShare, Progress, ProgressMeter, Row, Scored
from xlcli.metrics import LN2, bits_per, share_interval
from xlcli.text.loaders import EvalLoader

WINDOW_LIMIT = 2**20
"""Maximum number of tokens in the windows for the loss by context length."""
SHORT_WINDOW = 64
"""Tokens of at least half of them, in tokens, since a long window has few tokens with a short context."""


def loss_by_context(
    run: Pass, whole: Batches, sums: ContextSums, share: float
) -> Generator[Progress, None, tuple[ContextBin, ...]]:
    """The loss by context, whose sums over the text are known.

    With memory, windows of the text are read as well, with `share` tokens per token of it.
    """
    if run.lengths.has_memory and not run.lengths.by_document:
        windows = _windows(run, whole, share)
        n_tokens = sum(loader.batch_size * loader.sequence_len for loader in windows)
        batches = Batches(windows, whole.longest, n_by_context=len(run.text.tokens))
        yield from score_text(run, batches, sums, ProgressMeter("loss by context", n_tokens, "tokens"))
    return sums.bins()


def _windows(run: Pass, whole: Batches, share: float) -> list[EvalLoader]:
    """Batches of windows, spread over the text; those at its beginning have been read with it."""
    lengths, ids, start_id = run.lengths, run.text.tokens.ids, run.model.tokenizer.start_id
    n, longest = len(ids), min(lengths.max_context, len(ids))
    budget, short = int(min(n * share, WINDOW_LIMIT)), min(SHORT_WINDOW, longest)
    n_long = budget // (2 * longest) if longest > short else 0
    n_short = (budget - n_long * longest) // short
    loaders: list[EvalLoader] = []
    for width, n_windows, n_read in ((short, n_short, 1), (longest, n_long, whole.n_by_context)):
        starts = np.linspace(0, n - width, n_windows + 1)[n_read:].astype(np.int64)
        rows = whole.size if lengths.tokens_per_call is None else max(1, lengths.tokens_per_call // width)
        loaders += [
            EvalLoader(ids, batch, batch + width, lengths.segment_len, start_id, offsets=batch)
            for batch in np.split(starts, range(rows, len(starts), rows))
            if len(batch)
        ]
    return loaders


def rounding_cost(exact: Pass, scores: TokenScores) -> Generator[Progress, None, float | None]:
    """Bits per byte by which scores exceed those of a pass without rounding over their beginning; None if stopped."""
    n, batches = exact.text.n_scored, text_batches(exact)
    totals = yield from score_text(
        exact, batches, ContextSums(batches.longest), ProgressMeter("unrounded", n, "tokens")
    )
    if totals.tokens < n:
        return None
    rounded = scores.nats[: len(exact.text.tokens)].sum(dtype=np.float64)
    return bits_per(float(rounded) - totals.nats, totals.bytes)


def document_sums(text: TokenizedText, nats: NDArray[Any]) -> NDArray[np.float64]:
    """Bits, bytes and number of the scored tokens of each document (d 3), given the surprisal of all tokens (n)."""
    scored = np.ones(len(nats), bool) if text.scored is None else text.scored
    columns = (nats, text.tokens.sizes(slice(None)) * scored, scored)
    sums = [np.add.reduceat(column, text.documents, dtype=np.float64) for column in columns]
    return np.column_stack((sums[0] / LN2, *sums[1:]))


def row_scores(text: TokenizedText, nats: NDArray[Any], options: EvalConfig) -> Iterator[Scored]:
    """The row of each pair, or continuation, and its score, given the surprisal of each token (n)."""
    rows, sums = [row for _, row in text.part.corpus.rows()], document_sums(text, nats)
    bits, counts = sums[:, 0], sums[:, 1:].astype(np.int64)
    if options.pairs:
        for i in range(1, len(rows), 2):
            number = rows[i].document // 2
            yield Row(number, rows[i].fields)
            yield PairScore(number, *bits[i - 1 : i + 1].tolist(), *counts[i - 1 : i + 1, 1].tolist())
        return
    values, lowest = np.column_stack((bits, bits / counts[:, 0])), np.full((len(rows), 2), np.inf)
    _, groups = np.unique([str(row.fields.get(options.by or "")) for row in rows], return_inverse=True)
    np.minimum.at(lowest, groups, values)
    best = np.full((len(rows), 2), None) if options.by is None else values == lowest[groups]
    for i, row in enumerate(rows):
        yield row
        yield ContinuationScore(row.document, *values[i].tolist(), *counts[i].tolist(), *best[i].tolist())


def row_results(scores: Sequence[Any], options: EvalConfig) -> dict[str, Any]:
    """Fields of `Score` that rows and their scores make: `pairs`, `correct`, `correct_per_byte`."""
    if options.pairs:
        return {"pairs": pair_shares(scores, options.by)}
    return share_correct(scores, options.by) if options.by and scores else {}


def pair_shares(scores: Iterable[Row | PairScore], by: str | None) -> tuple[PairShare, ...]:
    """Results of all pairs and, if rows are grouped by a key, of each group."""
    signs = defaultdict[str | None, list[tuple[int, int]]](list)
    groups: list[str | None] = [None]
    for each in scores:
        if isinstance(each, Row):
            groups[1:] = [] if by is None else [str(each.fields[by])]
            continue
        first, second = each.first_bits, each.second_bits
        per_token = int(np.sign(second / each.second_tokens - first / each.first_tokens))
        for group in groups:
            signs[group].append((int(np.sign(second - first)), per_token))
    return tuple(_pair_share(group, *zip(*found, strict=True)) for group, found in signs.items())


def _pair_share(group: str | None, signs: tuple[int, ...], per_token: tuple[int, ...]) -> PairShare:
    n = len(signs)
    share, share_per_token = ((n + sum(each)) / 2 / n for each in (signs, per_token))
    return PairShare(group, n, share, *share_interval(share, n), share_per_token, signs)


def share_correct(scores: Sequence[Any], by: str) -> dict[str, float]:
    """`correct` and `correct_per_byte` of `Score`, given rows and their continuations; none if no row is marked.

    `DataError` if only some groups have a row that is marked as correct.
    """
    groups = defaultdict[str, list[tuple[bool, ContinuationScore]]](list)
    for row, score in zip(scores[::2], scores[1::2], strict=True):
        is_correct = str(row.fields.get("correct")).lower() in ("1", "1.0", "true", "yes")
        groups[str(row.fields[by])].append((is_correct, score))
    unmarked = [group for group, rows in groups.items() if not any(is_correct for is_correct, _ in rows)]
    if 0 < len(unmarked) < len(groups):
        raise DataError(f"{by} {unmarked[0]} has no row that is correct.", "Write 1 or true in its right row.")
    shares = {
        name: fmean(fmean(correct for correct, score in rows if getattr(score, best)) for rows in groups.values())
        for name, best in (("correct", "best"), ("correct_per_byte", "best_per_byte"))
    }
    return {} if unmarked else shares
