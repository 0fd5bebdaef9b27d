"""Pre-tokenization: the text is split into words, and no token of any tokenizer crosses a word boundary.

A word is a run of spaces, then any bytes but spaces and line ends, then at most one line end. A word of more than
`LONGEST` bytes (a line of Chinese, a run of one character) is split every `LONGEST` bytes, before an unfinished UTF-8
character. Boundaries depend on the text alone, so that text read in portions has the same tokens as the whole.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

LONGEST = 1024
"""Maximum bytes of a word."""

_WORD = re.compile(rb" *[^ \n]*\n?")


class Splitter:
    """Divides a text into parts whose tokens together are those of the text. The parts of this one are words.

    Attributes:
        ends_at_lines: A part ends with every line end, whatever follows.
    """

    ends_at_lines = True

    def split(self, data: bytes) -> list[bytes]:
        """The parts of a text that starts where a part does; joined they are the text."""
        words = _WORD.findall(data)
        words.pop()  # the pattern always matches the empty end
        if words and max(map(len, words)) > LONGEST:
            return [part for word in words for part in _parts(word)]
        return words

    def stable_prefix_len(self, data: bytes) -> int:
        """Length of the longest prefix of `data` that is whole parts for any continuation; 0 if there is none."""
        if data.endswith(b"\n"):
            return len(data)
        start = data.rfind(b"\n") + 1
        blank = data.rfind(b" ")
        if blank >= start:
            start += len(data[start : blank + 1].rstrip(b" "))
        return start + sum(len(part) for part in _parts(data[start:])[:-1])

    def flushable_len(self, data: bytes) -> int:
        """Length of what may be tokenized of `data`, an unfinished part, before it is known how it goes on."""
        return whole_characters(data)


WORDS = Splitter()


def whole_characters(data: bytes) -> int:
    """Length of `data` without an unfinished UTF-8 character at its end. Bytes that are not UTF-8 count as whole."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            n_ones = 8 - (byte ^ 0xFF).bit_length()  # length of the character
            return len(data) - back if back < n_ones <= 4 else len(data)
        if byte < 0x80:
            break
    return len(data)


class PreTokenizer:
    """Turns a text in portions of any size into portions of whole words, or parts of another splitter.

    Args:
        by_line: Lines are texts of their own: a part ends with every line end.

    Attributes:
        pending: Unfinished part at the end of the input so far, which is not returned yet; a word has at most `LONGEST`
            bytes.
    """

    def __init__(self, splitter: Splitter = WORDS, *, by_line: bool = False) -> None:
        self.pending = b""
        self._splitter, self._by_line = splitter, by_line

    def feed(self, portion: bytes) -> bytes:
        """The parts that are complete with this portion; may be empty."""
        text = self.pending + portion
        start = text.rfind(b"\n") + 1 if self._by_line else 0
        return self._take(text, start + self._splitter.stable_prefix_len(text[start:]))

    def flush(self) -> bytes:
        """The pending bytes without an unfinished UTF-8 character, as if a part ended there."""
        return self._take(self.pending, self._splitter.flushable_len(self.pending))

    def finish(self) -> bytes:
        """The pending bytes, at the end of the text."""
        return self._take(self.pending, len(self.pending))

    def _take(self, text: bytes, length: int) -> bytes:
        self.pending = text[length:]
        return text[:length]


def whole_words(
    portions: Iterable[bytes], at_least: int = 2**18, documents: Sequence[int] = (), splitter: Splitter = WORDS
) -> Iterator[bytes]:
    """The text in portions of whole words or other parts, most of them from at least `at_least` bytes of input.

    A part ends before each of the ascending offsets `documents`; so does a portion, if parts do not end at lines.
    """
    pretokenizer = PreTokenizer(splitter)
    waiting: list[bytes] = []
    size = 0
    for portion, is_end in divided(portions, documents, at_lines=splitter.ends_at_lines):
        waiting.append(portion)
        size += len(portion)
        if is_end or size >= at_least:
            whole = pretokenizer.feed(b"".join(waiting))
            if is_end:
                whole += pretokenizer.finish()
            if whole:
                yield whole
            waiting, size = [], 0
    last = pretokenizer.feed(b"".join(waiting)) + pretokenizer.finish()
    if last:
        yield last


def divided(
    portions: Iterable[bytes], documents: Sequence[int], *, at_lines: bool = True
) -> Iterator[tuple[bytes, bool]]:
    """Portions, each with True if a document ends with it.

    `at_lines`: only one that ends within a line, because after a line end a word begins in any case.
    """
    place = 0
    for portion in portions:
        first, end = 0, place + len(portion)
        for document in documents[bisect_right(documents, place) : bisect_right(documents, end)]:
            stop = document - place
            if not at_lines or portion[stop - 1 : stop] != b"\n":
                yield portion[first:stop], True
                first = stop
        yield portion[first:], False
        place = end


def _parts(word: bytes) -> list[bytes]:
    """The word in parts of at most `LONGEST` bytes; UTF-8 characters are not split."""
    parts = []
    start = 0
    while len(word) - start > LONGEST:
        stop = start + LONGEST
        for back in range(4):
            if word[stop - back] & 0xC0 != 0x80:
                stop -= back
                break
        parts.append(word[start:stop])
        start = stop
    parts.append(word[start:])
    return parts
