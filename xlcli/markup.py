r"""Text that is shown: characters that would act are made visible, and words get the color of their bits in HTML.

A terminal executes control characters: text could repaint the screen, set the title or fill the clipboard. C0 (except
newline and tab), ESC, DEL, C1 and bidirectional control characters are therefore replaced by escapes such as `\x1b`.

Every word has the color of its bits, in the same steps in a terminal, a page and a notebook, so that texts can be
compared. Where a script has no blanks between words, a token has a color.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
BIDI_CONTROLS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
SEPARATORS = (0x2028, 0x2029)
_INVALID_BYTES = range(0xDC80, 0xDD00)  # surrogates with which Python stands for bytes that are not UTF-8
_ESCAPES = {code: f"\\x{code:02x}" for code in _CONTROLS}
_ESCAPES |= {code: f"\\u{code:04x}" for code in (*BIDI_CONTROLS, *SEPARATORS)}
_ESCAPES |= {code: f"\\x{code - 0xDC00:02x}" for code in _INVALID_BYTES}
_ESCAPES |= {ord("\r"): "\\r", ord("\n"): "\n", ord("\t"): "\t"}

STEP_BITS = 4  # another color begins at each multiple of so many bits of a word, up to the last color
BACKGROUNDS = ("#fdf3d7", "#fbdc92", "#f8b765", "#f08d62", "#e4697f")
"""Colors on light ground of the steps from 1 on, with letters in `INK`. A word of step 0 has none."""
INK = "#1b1b1f"

_WITHOUT_BLANKS = re.compile(  # letters of Thai, Lao, Tibetan, Burmese, Khmer; Chinese characters are words anyway
    rb"(?:\xe0[\xb8-\xbf]|\xe1[\x80\x81\x9e\x9f])[\x80-\xbf]|\xe1\x82[\x80-\x9f]|\xea[\xa7\xa9][\xa0-\xbf]"
)


class Part(NamedTuple):
    """A word, or a token, of a text: from a byte to another, perhaps with what is after it; its surprisal."""

    start: int
    end: int
    bits: float


def visible(text: str) -> str:
    """`text` with control characters escaped, except newline and tab."""
    return text.translate(_ESCAPES)


def escaped(text: bytes | bytearray) -> str:
    """HTML of a text, with control characters and bytes that are not UTF-8 as escapes."""
    return escape(visible(text.decode("utf-8", "backslashreplace")), quote=False)


def colored(
    text: bytes | bytearray, parts: Sequence[Part], paint: Callable[[str, float], str], most_bytes: int | None = None
) -> str:
    """HTML of a text: `paint` makes that of each part from its HTML and bits. Blanks after a part belong to none.

    It ends, with an ellipsis, before a part that begins after `most_bytes`.
    """
    html = []
    end = 0
    text_end = Part(len(text), len(text), 0.0)
    for part, following in pairwise([*parts, text_end]):
        html.append(escaped(text[end : part.start]))
        if most_bytes is not None and part.start > most_bytes:
            return "".join(html) + "..."
        end = min(part.end, following.start)
        inner = escaped(text[part.start : end])
        shown = inner.rstrip()
        html.append(paint(shown, part.bits) + inner[len(shown) :])
    return "".join(html) + escaped(text[end:])


def by_token(text: bytes | bytearray, words: Sequence[Part], tokens: Sequence[tuple[int, float]]) -> list[Part]:
    """The parts of a text that get a color, in order: its words, but tokens where a script has no blanks.

    `tokens` are their first bytes, which may be before the text for the first one, and their bits.
    """
    if not _WITHOUT_BLANKS.search(text):
        return [*words]
    parts = []
    for word, following in pairwise([*words, Part(len(text), len(text), 0.0)]):
        if not _WITHOUT_BLANKS.search(text, word.start, min(word.end, following.start)):
            parts.append(word)
    starts = [start for start, _ in tokens]
    for stretch in re.finditer(rb"\S+", text):
        begin, end = stretch.span()
        if _WITHOUT_BLANKS.search(text, begin, end):
            first = max(0, bisect_right(starts, begin) - 1)
            parts += _joined(text, begin, end, tokens[first : bisect_left(starts, end)])
    return sorted(parts)


def _joined(text: bytes | bytearray, begin: int, end: int, tokens: Sequence[tuple[int, float]]) -> Iterator[Part]:
    """The tokens of a stretch of text, joined where one begins within a character or with a mark."""
    start, sum_bits = begin, 0.0
    for token_start, bits in tokens:
        if token_start > start and not continues(text[token_start : token_start + 4]):
            yield Part(start, token_start, sum_bits)
            start, sum_bits = token_start, 0.0
        sum_bits += bits
    yield Part(start, end, sum_bits)


def continues(text: bytes | bytearray) -> bool:
    """True if a text begins within a character, or with a mark that is drawn with the character before it."""
    is_within_character = text[:1] >= b"\x80" and text[:1] < b"\xc0"
    return is_within_character or unicodedata.category(text.decode("utf-8", "replace")[:1] or " ").startswith("M")


def direction(text: bytes | bytearray) -> str:
    """Attribute `dir` of HTML: `rtl` if more letters of a text are written from right to left than from left to right.

    The browser's own choice is the first letter: a line of Arabic that begins with a Latin name would be turned around.
    """
    if text.isascii():
        return "ltr"
    n = Counter(map(unicodedata.bidirectional, text.decode("utf-8", "replace")))
    return "rtl" if n["R"] + n["AL"] > n["L"] else "ltr"


def color_step(bits: float) -> int:
    """Number of a word's color: 0 below `STEP_BITS` bits, 1 below twice as many; the last for all above, and NaN."""
    last = len(BACKGROUNDS)
    if not math.isfinite(bits):
        return last
    return min(last, int(max(0.0, bits) / STEP_BITS))


def legend(paint: Callable[[str, float], str]) -> str:
    """`0 4 8 12 16 20+`: the bits at which each color begins, each painted by a function of text and bits."""
    samples = []
    for step in range(len(BACKGROUNDS) + 1):
        bits = STEP_BITS * step
        samples.append(paint(str(bits), bits))
    return f"{' '.join(samples)}+"
