"""Tokens and words as they are shown, with their bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class DisplayToken(NamedTuple):
    """A token or a word: its text, made safe for a terminal, its size in bytes and its bits."""

    text: str
    n_bytes: int
    bits: float


def group_by_word(tokens: Iterable[DisplayToken]) -> Iterator[DisplayToken]:
    """Tokens joined to words. A word begins with the token that begins with a blank, or ends the line."""
    word: list[DisplayToken] = []
    for token in tokens:
        if token.text[:1] in (" ", "\t", "\n") and any(part.text.strip() for part in word):
            yield concatenate(word)
            word = []
        word.append(token)
    if word:
        yield concatenate(word)


def concatenate(tokens: Sequence[DisplayToken]) -> DisplayToken:
    """One word of these tokens."""
    texts, sizes, bits = zip(*tokens, strict=True)
    return DisplayToken("".join(texts), sum(sizes), sum(bits))
