"""Columns of a word that it decides alone, or with those beside it in its document: a row, a file, a line."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from xlcli.config.columns import Columns
from xlcli.events import Scored, WordScore


def with_neighbors(parts: Iterable[Scored], asked: Columns) -> Iterator[Scored]:
    """The parts of a text in order, with the columns asked for; a word comes once the next one is known."""
    earlier: deque[WordScore] = deque(maxlen=asked.previous)  # words of the document, the latest one first
    held: list[Scored] = []  # a word, if there was one, and what came after it
    for part in parts:
        if isinstance(part, WordScore):
            yield from _completed(held, part, earlier, asked)
            held = []
        if isinstance(part, WordScore) or held:
            held.append(part)
        else:
            yield part
    yield from _completed(held, None, earlier, asked)


def _completed(
    held: Sequence[Scored], following: WordScore | None, earlier: deque[WordScore], asked: Columns
) -> Iterator[Scored]:
    """A word with its columns, and what came after it; the word is added to the `earlier` ones."""
    if not held:
        return
    word, *others = held
    assert isinstance(word, WordScore)
    if earlier and earlier[0].document != word.document:
        earlier.clear()
    if following is not None and following.document != word.document:
        following = None
    yield replace(word, columns={**word.columns, **_columns(word, following, earlier, asked)})
    yield from others
    earlier.appendleft(word)


def _columns(
    word: WordScore, following: WordScore | None, earlier: Sequence[WordScore], asked: Columns
) -> dict[str, Any]:
    """Returns the columns of a word, given the `following` one, if any, and the `earlier` ones, the latest first."""
    columns: dict[str, Any] = {}
    if asked.length:
        columns["length"] = len(word.word)
    if asked.last:
        columns["last"] = following is None
    next_entropy = word.next_entropy
    if next_entropy is None and following is not None and following.line == word.line:
        # A character that is a word ends by no prediction. Its next token begins the next word.
        next_entropy = following.token_entropy
    if asked.next_entropy:
        columns["next_entropy"] = next_entropy
    if asked.entropy_reduction:
        columns["entropy_reduction"] = None if next_entropy is None else word.token_entropy - next_entropy
    names = ["bits", "length", "tokens"]
    if asked.frequency:
        names.append("frequency")
    for distance in range(1, asked.previous + 1):
        values: dict[str, Any] = {}  # none without so many words before it
        if distance <= len(earlier):
            before = earlier[distance - 1]
            values = {**before.columns, "bits": before.bits, "length": len(before.word), "tokens": before.tokens}
        for name in names:
            columns[f"previous_{distance}_{name}"] = values.get(name)
    return columns
