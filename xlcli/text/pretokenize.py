"""Where text may be cut without changing how it is tokenized: the one rule shared by corpora and pipes.

Text is a row of *words*: a run of blanks, then anything but blanks and line ends, then at most one line end. No token
crosses the border of a word, whatever the vocabulary, so text cut between words tokenizes as the whole does. A word
longer than `LONGEST` bytes (one line of Chinese, a run of one character) is cut there, at a whole UTF-8 character: the
place is counted from the start of the word, so it too depends on the text alone and never on how the text arrived.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

LONGEST = 1024
"""No word is longer than this many bytes."""

_WORD = re.compile(rb" *[^ \n]*\n?")


def words(data: bytes) -> list[bytes]:
    """The words of a text that begins at a word border; joined they are the text."""
    found = _WORD.findall(data)
    found.pop()  # the pattern always matches once more, emptily, at the end
    if found and max(map(len, found)) > LONGEST:
        return [part for word in found for part in _parts(word)]
    return found


def stable_prefix_len(data: bytes) -> int:
    """Length of the longest prefix that is whole words whatever follows; 0 if there is none.

    `data` begins at a word border.
    """
    if data.endswith(b"\n"):
        return len(data)
    start = data.rfind(b"\n") + 1
    blank = data.rfind(b" ")
    if blank >= start:
        start += len(data[start : blank + 1].rstrip(b" "))
    return start + sum(len(part) for part in _parts(data[start:])[:-1])


def whole_characters(data: bytes) -> int:
    """Length of `data` without an unfinished UTF-8 character at its end (bytes that begin none count as finished)."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            need = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF8 else 1
            return len(data) - back if need > back else len(data)
        if byte < 0x80:
            break
    return len(data)


class PreTokenizer:
    """Takes bytes in any portions and gives back whole words, so that the tokens never depend on the portions.

    Everything given back, joined, is everything taken so far less `pending`, which is never longer than `LONGEST`.
    `pending` and `position` are the whole state: `PreTokenizer(pending, position)` goes on exactly.

    Args:
        pending: bytes taken but not given back yet, of an earlier cutter.
        position: bytes given back so far, by an earlier cutter.
        stable_prefix_len: a vocabulary's own rule; default: the one that suits all.
    """

    def __init__(
        self, pending: bytes = b"", position: int = 0, *, stable_prefix_len: Callable[[bytes], int] = stable_prefix_len
    ) -> None:
        self.pending = pending
        self.position = position
        self._safe_cut = stable_prefix_len

    def feed(self, portion: bytes) -> bytes:
        """The whole words that are certain now; may be empty."""
        return self._give(self.pending + portion, final=False)

    def finish(self) -> bytes:
        """What is still pending: the text ends, or is declared to end, here."""
        return self._give(self.pending, final=True)

    def flush(self) -> bytes:
        """What is pending but for an unfinished UTF-8 character, when a silent pipe must not hold text back."""
        held = self.pending[whole_characters(self.pending) :]
        self.pending = self.pending[: len(self.pending) - len(held)]
        given = self._give(self.pending, final=True)
        self.pending = held
        return given

    def _give(self, text: bytes, *, final: bool) -> bytes:
        cut = len(text) if final else self._safe_cut(text)
        self.pending = text[cut:]
        self.position += cut
        return text[:cut]


def whole_words(portions: Iterable[bytes], at_least: int = 2**18) -> Iterator[bytes]:
    """The same text in portions of whole words, of `at_least` bytes but for the last one."""
    cutter = PreTokenizer()
    waiting: list[bytes] = []
    size = 0
    for portion in portions:
        waiting.append(portion)
        size += len(portion)
        if size >= at_least:
            if whole := cutter.feed(b"".join(waiting)):
                yield whole
            waiting, size = [], 0
    if rest := cutter.feed(b"".join(waiting)) + cutter.finish():
        yield rest


def _parts(word: bytes) -> list[bytes]:
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
