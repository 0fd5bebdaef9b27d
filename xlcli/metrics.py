"""Bits per byte, bits per character and perplexities from sums of nats; sizes of texts. Never imports torch.

Bits per byte is the main score because it does not depend on the vocabulary: nats / ln 2 / bytes of text, each token
scored once. A character is a Unicode code point. A word is a run of bytes that are not ASCII white space, or a line
end, as in the published word-level benchmarks (Mikolov et al. 2010, Merity et al. 2017). The perplexity per word of a
word-level model is thus its perplexity per token, and comparable with a byte-level model.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from xlcli.text.formats import Utf8
from xlcli.text.pretokenize import UNBLANKED

LN2 = math.log(2.0)  # nats per bit
_STRETCH = re.compile(f"{UNBLANKED}+")
LEAST_UNBLANKED = 0.05  # share of the characters of a text: a name or a quotation in such a script changes little
LEAST_JUDGED = 200  # bytes of a text from which on its score may say that a model is of no use for it
LONGEST_MEAN = 8  # characters in a row, above which they are phrases: words of Thai have about four


def bits_per(nats: float, count: int) -> float:
    """Mean bits per unit of text; 0 if `count` is 0."""
    return nats / LN2 / count if count else 0.0


def misfit(model: str, bits: float, n_bytes: int) -> str | None:
    """Remark about a score, in bits of so many bytes, that is worse than the size of the text itself; else None.

    A text of less than `LEAST_JUDGED` bytes says nothing about a model, since few words may be rare by chance.
    """
    if n_bytes < LEAST_JUDGED or bits <= 8.0 * n_bytes:
        return None
    return (
        "more than 8 bits per byte, the cost without any model: "
        f"model {model} was trained on a different kind of text, or on too little."
    )


def perplexity(nats: float, count: int) -> float:
    """Exponential of the mean nats per unit of text; infinity on overflow, 1 if `count` is 0."""
    try:
        return math.exp(nats / count) if count else 1.0
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class TextCounts:
    """Size of a text. `words` counts the end of a line as a word."""

    bytes: int
    chars: int | None = None  # None if the text is not UTF-8
    words: int | None = None  # None, too, if it is not UTF-8, or what stands between blanks is phrases (`has_phrases`)

    @property
    def has_phrases(self) -> bool:
        """True if enough of the text is in scripts without blanks between words, and nobody has put them there."""
        return self.chars is not None and self.words is None


class TextCounter:
    """Counts a text read in portions, in constant RAM; the counts do not depend on the division."""

    def __init__(self) -> None:
        self._utf8 = Utf8()
        self._words = 0
        self._n_unblanked = 0  # characters of scripts without blanks
        self._n_stretches = 0  # of such characters
        self._sizes_before = (0, 0, 0)  # characters, and those two numbers, before the present document
        self._has_phrases = False  # a document before does
        self._last = ""  # character
        self._inside = False

    def feed(self, data: bytes) -> None:
        if not data:
            return
        text = self._utf8.feed(data)
        if not text.isascii():
            stretches = _STRETCH.findall(text)
            self._n_unblanked += sum(map(len, stretches))
            self._n_stretches += len(stretches)
            is_continued = _STRETCH.match(self._last) and _STRETCH.match(text)
            if is_continued:
                self._n_stretches -= 1
        self._last = text[-1:] or self._last
        self._words += len(data.split()) + data.count(b"\n")
        if self._inside and not data[:1].isspace():  # its first word began in the portion before
            self._words -= 1
        self._inside = not data[-1:].isspace()

    def end_word(self) -> None:
        """Ends the word at the end of the text so far."""
        self._inside = False

    def end_document(self) -> None:
        """Ends a document at the end of the text so far: if only one of them has phrases, the text has, too."""
        sizes = (self._utf8.n_chars or 0, self._n_unblanked, self._n_stretches)
        chars, n_unblanked, n_stretches = (
            size - before for size, before in zip(sizes, self._sizes_before, strict=True)
        )
        self._sizes_before = sizes
        self._has_phrases = self._has_phrases or _are_phrases(chars, n_unblanked, n_stretches)

    def counts(self) -> TextCounts:
        """Counts of the text, at its end. A text that ends in an unfinished character is not UTF-8."""
        self._utf8.feed(b"", final=True)
        chars = self._utf8.n_chars
        if chars is None:  # it is not UTF-8
            return TextCounts(self._utf8.n_bytes)
        self.end_document()
        if self._has_phrases or _are_phrases(chars, self._n_unblanked, self._n_stretches):
            return TextCounts(self._utf8.n_bytes, chars)
        return TextCounts(self._utf8.n_bytes, chars, self._words)


def _are_phrases(chars: int, n_unblanked: int, n_stretches: int) -> bool:
    """True if a text of so many characters has many of scripts without blanks, in long stretches."""
    return n_unblanked > max(LONGEST_MEAN * n_stretches, LEAST_UNBLANKED * chars)


def context_bin_edges(longest: int) -> list[int]:
    """Edges of the context bins: 1, 2, 4, 8, ..., `longest` + 1. A bin includes its lower edge, not its upper one."""
    edges = [1]
    while 2 * edges[-1] < longest:
        edges.append(2 * edges[-1])
    return [*edges, longest + 1]


def share_interval(share: float, n: int) -> tuple[float, float]:
    """95 % confidence interval of a share of `n` independent cases (Wilson 1927)."""
    z = 1.959964  # 97.5 % quantile of the normal distribution
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return (middle - half) / scale, (middle + half) / scale


def half_width(standard_error: float, freedom: float) -> float:
    """Half the width of the 95 % confidence interval of a mean, with `freedom` degrees of freedom (1 or more).

    The quantile of Student's t distribution is a Cornish-Fisher expansion (Abramowitz and Stegun 1964, 26.7.5), less
    than 2 % too small with 4 degrees of freedom or more, and 4 % with 2. Below that it is at most 3 % too large.
    """
    if freedom < 2:
        of_one, of_two = 12.7062, 4.3027  # quantiles, between which their logarithm is nearly linear in 1 / freedom
        return standard_error * of_two * math.pow(of_one / of_two, 2 / freedom - 1)
    z = 1.959964  # 97.5 % quantile of the normal distribution
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return standard_error * (z + math.fsum(term / freedom**i for i, term in enumerate(terms, 1)))
