"""Pre-tokenization: the text is split into words, and no token of any tokenizer crosses a word boundary.

A word is a run of spaces, then any bytes but spaces and line ends, then at most one line end. A word of more than
`LONGEST` bytes (a line of Chinese, a run of one character) is split every `LONGEST` bytes, before an unfinished UTF-8
character. Boundaries depend on the text alone, so that text read in portions has the same tokens as the whole.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

LONGEST = 1024  # maximum bytes of a word
UNBLANKED = "[\u0e00-\u109f\u1780-\u17ff\u200b\u3001-\u30ff\u3400-\u9fff\uff00-\uff1f\U00020000-\U0003ffff]"
"""Pattern of a character of Thai, Lao, Tibetan, Burmese, Khmer, Japanese or Chinese: no blanks between words."""

_WORD = re.compile(rb" *[^ \n]*\n?")


class Splitter:
    """Divides a text into parts whose tokens together are those of the text. The parts of this one are words."""

    ends_at_lines = True  # a part ends with every line end, whatever follows

    def split(self, data: bytes) -> list[bytes]:
        """The parts of a text that starts where a part does; joined they are the text."""
        words = _WORD.findall(data)
        words.pop()  # the pattern always matches the empty end
        if words and max(map(len, words)) > LONGEST:
            return [part for word in words for part in _parts(word)]
        return words

    def stable_prefix_len(self, data: bytes) -> int:
        r"""Length of the longest prefix of `data` that is whole parts for any continuation; 0 if there is none.

        Example: 4 for b"a\nbc  de", because "  de" may go on.
        """
        line_start = data.rfind(b"\n") + 1
        last_line = data[line_start:]
        # The spaces before a word belong to it.
        before_last_word = last_line[: last_line.rfind(b" ") + 1].rstrip(b" ")
        last_word = last_line[len(before_last_word) :]
        finished_parts = _parts(last_word)[:-1]
        return line_start + len(before_last_word) + sum(map(len, finished_parts))

    def flushable_len(self, data: bytes) -> int:
        """Length of what may be tokenized of `data`, an unfinished part, before it is known how it goes on."""
        return whole_characters(data)


WORDS = Splitter()


def whole_characters(data: bytes) -> int:
    """Length of `data` without an unfinished UTF-8 character at its end. Bytes that are not UTF-8 count as whole.

    The first byte of a character of n bytes, from two to four, begins with n ones; the bytes after it with one.
    """
    for n_present in range(1, min(3, len(data)) + 1):
        byte = data[-n_present]
        is_ascii = byte < 0b1000_0000
        is_first_of_several = byte >= 0b1100_0000
        if is_first_of_several:
            n_leading_ones = 8 - (byte ^ 0xFF).bit_length()
            if n_present < n_leading_ones <= 4:
                return len(data) - n_present
        if is_ascii or is_first_of_several:
            break
    return len(data)


class PreTokenizer:
    """Turns a text in portions of any size into portions of whole words, or parts of another splitter."""

    def __init__(self, splitter: Splitter = WORDS, *, by_line: bool = False) -> None:
        # Unfinished part at the end of the input so far, which is not returned yet; a word has at most
        # `LONGEST` bytes.
        self.pending = b""
        self._splitter = splitter
        self.by_line = by_line  # lines are texts of their own: a part ends with every line end

    def feed(self, portion: bytes) -> bytes:
        """The parts that are complete with this portion; may be empty."""
        text = self.pending + portion
        start = text.rfind(b"\n") + 1 if self.by_line else 0
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
    """A text given in portions of any size, in portions that end between words (or other parts of `splitter`).

    No word goes on into the next document; documents begin at the ascending offsets `documents`. Input is gathered to
    `at_least` bytes before it is divided, or to the end of a document, unless words end there in any case.
    """
    pretokenizer = PreTokenizer(splitter)
    waiting: list[bytes] = []
    n_waiting_bytes = 0
    for portion, ends_document in divided(portions, documents, at_lines=splitter.ends_at_lines):
        waiting.append(portion)
        n_waiting_bytes += len(portion)
        if not ends_document and n_waiting_bytes < at_least:
            continue
        whole = pretokenizer.feed(b"".join(waiting))
        if ends_document:
            whole += pretokenizer.finish()  # the word at the end cannot go on
        if whole:
            yield whole
        waiting.clear()
        n_waiting_bytes = 0
    last = pretokenizer.feed(b"".join(waiting)) + pretokenizer.finish()
    if last:
        yield last


def divided(
    portions: Iterable[bytes], documents: Sequence[int], *, at_lines: bool = True
) -> Iterator[tuple[bytes, bool]]:
    r"""The portions, cut before each of the ascending offsets `documents`, each with True if a document ends with it.

    `at_lines`: no cut after a line end, because a word begins there in any case.
    Example: b"abc\nd" and documents at 0, 2, 4 give (b"ab", True), (b"c\nd", False).
    """
    start = 0  # offsets in the text: of this portion, and of the next one
    for portion in portions:
        end = start + len(portion)
        n_before = bisect_right(documents, start)
        n_until_end = bisect_right(documents, end)
        n_yielded = 0  # bytes of this portion
        for document in documents[n_before:n_until_end]:
            cut = document - start
            is_after_line = portion[cut - 1 : cut] == b"\n"
            if at_lines and is_after_line:
                continue
            yield portion[n_yielded:cut], True
            n_yielded = cut
        yield portion[n_yielded:], False
        start = end


def _parts(word: bytes) -> list[bytes]:
    """The word in parts of at most `LONGEST` bytes; UTF-8 characters are not split."""
    parts = []
    start = 0
    while len(word) - start > LONGEST:
        stop = start + LONGEST
        # Back to the first byte of the character there, which has at most three others. Without one it is no UTF-8.
        for n_back in range(4):
            continues_character = word[stop - n_back] & 0b1100_0000 == 0b1000_0000
            if not continues_character:
                stop -= n_back
                break
        parts.append(word[start:stop])
        start = stop
    parts.append(word[start:])
    return parts
