"""Further figures of an evaluation: the loss by context, documents, and pairs of texts.

The texts of a pair are successive documents, each scored as if it were alone, with its line end. Two comparisons: of
probabilities, and of means per token, which do not prefer the shorter text. Equal ones count half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlcli.config import EvalConfig
from xlcli.errors import DataError, named
from xlcli.evaluation.passes import Batches, ContextSums, Pass, score_text
from xlcli.evaluation.text import TokenizedText
from xlcli.events import (
    ContextBin,
    ContinuationScore,
    DocumentScore,
    Notice,
    PairScore,
    PairShare,
    Progress,
    ProgressMeter,
    Row,
    Scored,
)
from xlcli.metrics import LN2, TextCounter, TextCounts, bits_per, misfit, perplexity, share_interval
from xlcli.store.folder import LoadedModel
from xlcli.store.origin import TRAIN_FILES, was_trained_on
from xlcli.text.corpus import Part
from xlcli.text.loaders import EvalLoader
from xlcli.text.pretokenize import divided
from xlcli.text.tokenizers import Coverage

WINDOW_LIMIT = 2**20  # maximum number of tokens in the windows for the loss by context length
MOST_UNLIKE = 1.02  # ratio of bytes per character of two documents, to which a few curly quotes come
SHORT_WINDOW = 64  # tokens of at least half of them, in tokens, since a long window has few tokens with a short context


def loss_by_context(
    run: Pass, whole: Batches, sums: ContextSums, tokens_per_token: float
) -> Generator[Progress, None, tuple[ContextBin, ...]]:
    """Returns the loss by context: from sums over the text, and with memory also from windows that are read again."""
    if run.lengths.has_memory and not run.lengths.by_document:
        windows = _windows(run, whole, tokens_per_token)
        n_tokens = sum(loader.batch_size * loader.sequence_len for loader in windows)
        batches = Batches(windows, whole.longest, n_by_context=len(run.text.tokens))
        yield from score_text(run, batches, sums, ProgressMeter("loss by context", n_tokens, "tokens"))
    return sums.bins()


def _windows(run: Pass, whole: Batches, tokens_per_token: float) -> list[EvalLoader]:
    """Returns batches of windows over the text, with `tokens_per_token` of it, half in short and half in long ones."""
    lengths, ids, start_id = run.lengths, run.text.tokens.ids, run.model.tokenizer.start_id
    n_tokens = len(ids)
    long = min(lengths.max_context, n_tokens)
    short = min(SHORT_WINDOW, long)
    n_to_read = int(min(n_tokens * tokens_per_token, WINDOW_LIMIT))
    n_long = 0
    if long > short:
        n_long = n_to_read // 2 // long
    n_short = (n_to_read - n_long * long) // short
    loaders: list[EvalLoader] = []
    # The window at the beginning of the text is left out if it has been read with the text.
    for width, n_windows, n_left_out in ((short, n_short, 1), (long, n_long, whole.n_by_context)):
        starts = np.linspace(0, n_tokens - width, n_windows + 1)[n_left_out:].astype(np.int64)
        batch_size = whole.size
        if lengths.tokens_per_call is not None:
            batch_size = max(1, lengths.tokens_per_call // width)
        for first in range(0, len(starts), batch_size):
            batch = starts[first : first + batch_size]
            loaders.append(EvalLoader(ids, batch, batch + width, lengths.segment_len, start_id, offsets=batch))
    return loaders


def document_sums(text: TokenizedText, nats: NDArray[Any]) -> NDArray[np.float64]:
    """Bits, bytes and number of the scored tokens of each document (d 3), given the surprisal of all tokens (n)."""
    scored = np.ones(len(nats), bool) if text.scored is None else text.scored
    columns = (nats, text.tokens.sizes(slice(None)) * scored, scored)
    sums = np.column_stack([np.add.reduceat(column, text.documents, dtype=np.float64) for column in columns])
    sums[:, 0] /= LN2
    return sums


def _documents(text: TokenizedText, *, by_line: bool) -> Iterator[tuple[Row, int, slice]]:
    """Each row, file or line, its size in bytes, and its tokens: a token belongs to the document that it ends in."""
    part = replace(text.part, starts=None)
    edges = [*part.documents, part.n_bytes]
    token_ends = np.cumsum(text.tokens.sizes(slice(None)), dtype=np.int64)
    n_before = np.searchsorted(token_ends, edges, side="right").tolist()  # tokens that end before each edge
    rows = part.corpus.rows()
    upcoming = next(rows, None)
    row = Row(1, {})
    for index, (start, end) in enumerate(pairwise(edges)):
        while upcoming is not None and upcoming[0] <= start:
            row = upcoming[1]
            upcoming = next(rows, None)
        if by_line:
            row = replace(row, document=index + 1)
        yield row, end - start, slice(n_before[index], n_before[index + 1])


def document_scores(
    text: TokenizedText, nats: NDArray[Any], record: Mapping[str, Any], *, by_line: bool
) -> Iterator[Row | DocumentScore]:
    """Each row or file, or each line, and its score, given the surprisal of all tokens (n).

    The record of the model says whether it is training text, if it has a list of these. Reads the text.
    """
    part = replace(text.part, starts=None)
    trained_on = {name: was_trained_on(record, digest) for digest, name in part.files()}
    for (row, n_bytes, tokens), counts in zip(_documents(text, by_line=by_line), _counts_of(part), strict=True):
        inside = nats[tokens]
        sum_of_nats = float(inside.sum(dtype=np.float64))
        columns = {}
        if TRAIN_FILES in record:
            columns["trained_on"] = trained_on[row.file or part.corpus.sources[0].name]
        yield row
        yield DocumentScore(
            document=row.document,
            bytes=n_bytes,
            characters=counts.chars,
            words=counts.words,
            tokens=len(inside),
            bits=sum_of_nats / LN2,
            bits_per_byte=bits_per(sum_of_nats, n_bytes),
            bits_per_char=bits_per(sum_of_nats, counts.chars) if counts.chars else None,
            word_perplexity=perplexity(sum_of_nats, counts.words) if counts.words else None,
            columns=columns,
        )


def foreign_notices(text: TokenizedText, nats: NDArray[Any], model: LoadedModel, *, by_line: bool) -> Iterator[Notice]:
    """Warnings of documents that cost more than without any model, or are spelled in parts of characters.

    The arguments are those of `document_scores`. If all documents are so, the score of the whole text says it.
    """
    n_documents = 0
    foreign, spelled = list[str](), list[str]()
    for row, n_bytes, tokens in _documents(text, by_line=by_line):
        n_documents += 1
        name = f"number {row.document}"
        if row.file is not None:
            name += f", {row.file},"
        if misfit(model.name, float(nats[tokens].sum(dtype=np.float64)) / LN2, n_bytes):
            foreign.append(name)
        coverage = Coverage(model.tokenizer, model.name)
        coverage.add(text.tokens.ids[tokens], text.tokens.sizes(tokens))
        if coverage.is_spelled:
            spelled.append(name)
    for names, problem, remark in (
        (foreign, "cost more than 8 bits per byte", "the cost without any model: their scores mean little"),
        (spelled, "are spelled in parts of characters", f"for which {model.name} has no pieces"),
    ):
        if 0 < len(names) < n_documents:
            count = f"{len(names):,} of {n_documents:,} documents"
            yield Notice(f"{count} {problem} ({names[0]} is the first), {remark}", "warning")


def script_notice(parts: Sequence[Row | DocumentScore]) -> Iterator[Notice]:
    """A warning of documents with unlike bytes per character, as of other quotes or scripts."""
    sizes = [part.bytes / part.characters for part in parts if isinstance(part, DocumentScore) and part.characters]
    if sizes and max(sizes) > MOST_UNLIKE * min(sizes):
        range_of_sizes = f"{min(sizes):.2f} to {max(sizes):.2f} bytes per character"
        remark = "bits per byte do not compare them. Compare bits per character, and translations by their total bits"
        yield Notice(f"the documents have {range_of_sizes}, so {remark} (--documents FILE.tsv)", "warning")


def _counts_of(part: Part) -> Iterator[TextCounts]:
    """Size of each document."""
    counter = TextCounter()
    for portion, ends_document in divided(part.read(), part.documents, at_lines=False):
        counter.feed(portion)
        if ends_document:
            yield counter.counts()
            counter = TextCounter()
    yield counter.counts()


def row_scores(text: TokenizedText, nats: NDArray[Any], options: EvalConfig) -> Iterator[Scored]:
    """The row of each pair, or continuation, and its score, given the surprisal of each token (n)."""
    rows = [row for _, row in text.part.corpus.rows()]
    bits, n_bytes, n_tokens = document_sums(text, nats).T
    if options.pairs:
        for second in range(1, len(rows), 2):  # the texts of a pair are successive documents
            first, pair = second - 1, rows[second].document // 2
            yield Row(pair, rows[second].fields)
            yield PairScore(pair, float(bits[first]), float(bits[second]), int(n_tokens[first]), int(n_tokens[second]))
        return
    bits_per_byte = bits / n_bytes
    groups = None
    if options.by is not None:
        _, groups = np.unique([str(row.fields[options.by]) for row in rows], return_inverse=True)
    best, best_per_byte = _are_lowest(bits, groups), _are_lowest(bits_per_byte, groups)
    for i, row in enumerate(rows):
        yield row
        yield ContinuationScore(
            row=row.document,
            bits=float(bits[i]),
            bits_per_byte=float(bits_per_byte[i]),
            bytes=int(n_bytes[i]),
            tokens=int(n_tokens[i]),
            best=best[i],
            best_per_byte=best_per_byte[i],
        )


def _are_lowest(values: NDArray[np.float64], groups: NDArray[np.int64] | None) -> Sequence[bool | None]:
    """Whether each value (n) is the lowest one of its group (n); None without groups."""
    if groups is None:
        return [None] * len(values)
    lowest = np.full(len(values), np.inf)
    np.minimum.at(lowest, groups, values)
    are_lowest: list[bool] = (values == lowest[groups]).tolist()
    return are_lowest


def pair_shares(scores: Iterable[Row | PairScore], by: str | None) -> tuple[PairShare, ...]:
    """Results of all pairs and, if rows are grouped by a key, of each group."""
    groups = defaultdict[str | None, list[PairScore]](list)
    group = ""  # of the present row
    for row_or_score in scores:
        if isinstance(row_or_score, PairScore):
            groups[None].append(row_or_score)
            if by is not None:
                groups[group].append(row_or_score)
        elif by is not None:
            group = str(row_or_score.fields[by])
    return tuple(_pair_share(name, pairs) for name, pairs in groups.items())


def _pair_share(group: str | None, pairs: Sequence[PairScore]) -> PairShare:
    """The share of pairs whose first text is more probable; a sign is 1 for such a pair, -1 for another, 0 if equal."""
    n = len(pairs)
    signs, signs_per_token = list[int](), list[int]()
    for pair in pairs:
        per_token = pair.second_bits / pair.second_tokens - pair.first_bits / pair.first_tokens
        signs.append(int(np.sign(pair.second_bits - pair.first_bits)))
        signs_per_token.append(int(np.sign(per_token)))
    share = (n + sum(signs)) / 2 / n
    share_per_token = (n + sum(signs_per_token)) / 2 / n
    low, high = share_interval(share, n)
    return PairShare(group, n, share, low, high, share_per_token, tuple(signs), signs.count(0))


def tie_notice(rows: Iterable[Scored]) -> Iterator[Notice]:
    """A warning that names pairs whose texts are equally probable: most are mistakes of their table."""
    pairs = [row for row in rows if isinstance(row, PairScore)]
    ties = [str(pair.pair) for pair in pairs if pair.first_bits == pair.second_bits]
    if ties:
        remark = "both texts are equal, or equally probable"
        yield Notice(f"{len(ties)} of {len(pairs)} pairs count as half ({named(ties, most=3)}): {remark}", "warning")


def share_correct(scores: Sequence[Any], by: str) -> dict[str, float]:
    """Returns the fields `correct…` of `Score`, given rows and their continuations by turns.

    The field `by` of a row names its group. Returns nothing if no row is marked; `DataError` if only some groups are.
    """
    groups = defaultdict[str, list[tuple[bool, ContinuationScore]]](list)
    for row, score in zip(scores[::2], scores[1::2], strict=True):
        is_correct = str(row.fields.get("correct")).lower() in ("1", "1.0", "true", "yes")
        groups[str(row.fields[by])].append((is_correct, score))
    unmarked = [group for group, rows in groups.items() if not any(is_correct for is_correct, _ in rows)]
    if len(unmarked) == len(groups):
        return {}
    if unmarked:
        raise DataError(f"{by} {unmarked[0]} has no row that is correct.", "Write 1 or true in its right row.")
    # Rows that are equally probable share the point of their group.
    points, points_per_byte, chances = [], [], []
    for rows in groups.values():
        chances.append(fmean(is_correct for is_correct, _ in rows))
        points.append(fmean(is_correct for is_correct, score in rows if score.best))
        points_per_byte.append(fmean(is_correct for is_correct, score in rows if score.best_per_byte))
    low, high = share_interval(fmean(points), len(points))
    figures = {"correct": fmean(points), "correct_low": low, "correct_high": high, "correct_by_chance": fmean(chances)}
    return figures | {"correct_per_byte": fmean(points_per_byte)}
