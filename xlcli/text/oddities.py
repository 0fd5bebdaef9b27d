"""What nobody sees or means in a text, but a model scores: found in its lines, counted and shown. The text stays as is.

What some scripts need is not odd there: joiners in Persian, Hindi and emoji, zero-width spaces in Thai, direction marks
beside Hebrew or Arabic, no-break blanks of French and of numbers, full-width letters beside Chinese or Japanese.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from html.entities import name2codepoint
from typing import NamedTuple

from xlcli.events import Notice

LONGEST = 2**24
"""Number of bytes after which a line is searched in parts, so that RAM stays bounded."""
EXCERPT = 24
"""Number of characters that are shown on either side of an oddity."""
LONGEST_ITEM = 250
"""Number of characters above which a row is hardly an item with a marked region."""


class Kind(NamedTuple):
    """A kind of oddity: what a line has, what to do about it, and a pattern whose last group, or all of it, is shown.

    Without a pattern it is letters that NFC changes. In less than `least_share` of all rows or lines it is usual prose.
    """

    name: str
    remedy: str
    pattern: str | None
    least_share: float = 0.0

    def find(self, line: str) -> tuple[int, int] | None:
        """Place of the first one."""
        if self.pattern is None:
            return _decomposed(line)
        found = re.search(self.pattern, line)
        return None if found is None else found.span(found.lastindex or 0)


_JOINING = r"\u0590-\u061b\u061d-\u1dff\ua800-\uabff\ufb1d-\ufdff\ufe70-\ufefc\U00010a00-\U00011fff"
"""Scripts that join letters, or write words without blanks, from Hebrew to Mongolian."""
_JOINED = rf"{_JOINING}\u2190-\u2bff\ufe0f\U0001f000-\U0001faff"
"""Their letters, and emoji."""
_RIGHT_TO_LEFT = r"\u0590-\u061b\u061d-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff"
_DIRECTION = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_EAST_ASIAN = r"\u3001-\u9fff\uac00-\ud7af\uff65-\uff9f"
_FULL_WIDTH = r"\uff10-\uff19\uff21-\uff3a\uff41-\uff5a"
_LIKE_LATIN = (
    r"\u0410\u0412\u0415\u041a\u041c-\u041e\u0420-\u0422\u0425\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456"
)
_INSIDE = r"\x80-\xbfŒœŠšŸŽžƒˆ˜‚„†‡•‰‹›€™"
"""What Latin-1 and Windows-1252 make of bytes inside a UTF-8 character, except quotes and dashes."""
_WITHOUT = "^(?=[^{0}]*([{0}]))(?!.*[{1}])"
"""The first of these characters in a line without those."""
_MARKED = rf"^(?=.{{1,{LONGEST_ITEM}}}$).*?(?:^|(?<=[\s\"'“(]))(%s)(?=\S)(?:(?!\1).)+(?<=\S)\1(?=[\s.,;:!?\"'”)]|$)"
"""A region between marks."""
_REMOVE, _PLAIN, _COLUMN = "remove them", "write plain letters (NFKC)", "mark the region in another column"

KINDS = (
    Kind("decomposed letters", "normalize the text to NFC", None),
    Kind(
        "zero-width characters", _REMOVE, rf"[\u034f\u180e\u200b-\u200d\u2060-\u206f](?<![{_JOINED}].)(?![{_JOINED}])"
    ),
    Kind("invisible tags", _REMOVE, r"[\U000e0001-\U000e007f](?<![\U0001f3f4\U000e0020-\U000e007f].)"),
    Kind("soft hyphens", _REMOVE, r"\xad(?<!Ã.)"),
    Kind("direction marks", _REMOVE, _WITHOUT.format(_DIRECTION, _RIGHT_TO_LEFT)),
    Kind("byte-order marks", _REMOVE, r"\ufeff"),
    Kind("lost characters", "convert the source anew, from the encoding that it has", r"\ufffd"),
    Kind("ligatures or mathematical letters", _PLAIN, r"[\ufb00-\ufb06\U0001d400-\U0001d7ff]"),
    Kind("full-width letters", _PLAIN, _WITHOUT.format(_FULL_WIDTH, _EAST_ASIAN)),
    Kind(
        "Cyrillic letters like Latin ones",
        "write Latin letters",
        rf"^(?=[^{_LIKE_LATIN}]*[{_LIKE_LATIN}])(?!.*(?![{_LIKE_LATIN}])[\u0400-\u052f])"
        rf".*?((?<=[A-Za-z])[{_LIKE_LATIN}]|[{_LIKE_LATIN}](?=[A-Za-z]))",
    ),
    Kind(
        "characters of a wrong encoding",
        "read the source in its own one, as UTF-8 or Windows-1252",
        # The last group is empty, because this can be seen.
        rf"(?:[ÂÃ](?<![A-ZÀ-Þ].)(?=[{_INSIDE}])|[ÐÑ](?=[{_INSIDE}][ÐÑ][{_INSIDE}])|â(?=[€„\x80])|ï(?=[»¿¬])"
        r"|ð(?=[Ÿ\x9f])|[\x80-\x9f])()",
    ),
    Kind(
        "HTML entities",
        "decode them, for example by html.unescape in Python",
        rf"&(?<![\"'>=;].)(?<!= .)(?:#\d+|#[xX][\da-fA-F]+|apos|{'|'.join(name2codepoint)});(?![\"'<=])",
    ),
    Kind("control characters", _REMOVE, r"[\x00-\x08\x0b\x0e-\x1f\x7f]"),
    Kind(
        "no-break or other rare blanks",
        "write spaces",
        r"[\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
        rf"(?<![\d«—–{_EAST_ASIAN}].)(?![\d;:!?»%€—–{_EAST_ASIAN}])",
    ),
)
"""In any text."""
OF_ROWS = (
    Kind("blanks at an end or two together", _REMOVE, r"^\s+|\s+$|\s\s+"),
    Kind("the text NA", "leave them out if the value is missing", r"^NA$"),
    Kind("marks around words (*was*, |was|)", _COLUMN, _MARKED % r"\*\*?|[|#^~]", least_share=0.2),
    Kind("underscores around words (_was_)", _COLUMN, _MARKED % "_", least_share=0.5),
)
"""In rows of a table, and in lines scored each on its own. The shares are higher than in books, Markdown and logs."""
OF_BEGINNINGS = (
    Kind(
        "a beginning in XML or HTML",
        "extract the text, because tags are scored, too",
        r"(?i)^\s*(?=<(?:\?xml|!doctype\s|(?:html|head|body|div|p|tei|teicorpus)[\s>]|[a-z][\w:.-]*\s+[\w:.-]+=[\"']))",
    ),
)
"""In the first line of a file or row."""
OF_PROMPTS = (Kind("a blank at the end", "remove it: tokens begin with the blank before a word", r"[^\S\n]+\Z"),)
_USUAL = re.compile(
    r"[\t\r -%'-~¡-¬®-ÁÄ-ÏÒ-áã-îñ-ſ\u0391-\u03c9\u05d0-\u05ea\u0621-\u064a–—‘’“”…、。ぁ-ゖァ-ヺ一-\u9fff가-\ud7a3]*+"
)
"""A line without any of `KINDS`; most are, which saves time."""


class Oddities:
    """Counts the units of a text (`line`, `row` or `prompt`) that have something odd, by kind.

    Args:
        unit: Name of what is counted.
        kinds: Kinds to look for beside `KINDS`.
        n_before: Number of units before the text.
    """

    def __init__(self, unit: str, kinds: Sequence[Kind] = (), n_before: int = 0) -> None:
        self.unit, self._kinds = unit, kinds
        self._number = n_before + (unit == "line")  # of the present unit
        self._begins = n_before == 0
        self._held = bytearray()
        self._counts, self._latest, self._first = Counter[Kind](), dict[Kind, int](), dict[Kind, str]()

    def begin(self) -> None:
        """Begins a row or prompt, or a file of lines."""
        self._search_held()
        self._number += self.unit != "line"
        self._begins = True

    def feed(self, portion: bytes) -> None:
        """Takes the next bytes. The last line waits for its end, in at most `LONGEST` bytes of RAM."""
        self._held += portion
        if b"\n" in portion:
            *lines, rest = bytes(self._held).split(b"\n")
            self._held = bytearray(rest)
            for line in lines:
                self.search(line)
                self._number += self.unit == "line"
        if len(self._held) > LONGEST:
            self._search_held()

    def search(self, text: bytes) -> None:
        """Looks for oddities in a line of the present unit, or in a whole prompt."""
        line = text.removesuffix(b"\r").decode("utf-8", "surrogateescape")
        kinds = [*self._kinds, *(OF_BEGINNINGS if self._begins else ())]
        self._begins = self._begins and not line.strip()
        if not _USUAL.fullmatch(line):
            kinds += KINDS
        for kind in kinds:
            place = kind.find(line)
            if place is not None and self._latest.get(kind) != self._number:
                self._latest[kind] = self._number
                self._counts[kind] += 1
                if kind not in self._first:
                    self._first[kind] = f"{self.unit} {self._number:,}: '{_excerpt(line, *place)}'"

    def _search_held(self) -> None:
        self.search(bytes(self._held))
        self._held.clear()

    def notices(self) -> Iterator[Notice]:
        """One notice at the end of the text, if anything was found."""
        self._search_held()
        told = [kind for kind in self._first if self._counts[kind] >= kind.least_share * self._number]
        if told:
            parts = [f"{self._counts[kind]:,} with {kind.name} ({self._first[kind]}; {kind.remedy})" for kind in told]
            yield Notice(f"{self.unit}s that need a look: {'; '.join(parts)}", "warning")


def _decomposed(line: str) -> tuple[int, int] | None:
    """Place of the first letter that NFC joins with its marks, or replaces by an equal one.

    NFC also reorders marks, as in Hebrew, and divides letters, as in Hindi: both forms are usual there, so not odd.
    """
    if unicodedata.is_normalized("NFC", line):
        return None
    for word in re.finditer(r"\S+", line):
        composed = unicodedata.normalize("NFC", word[0])
        if len(composed) <= len(word[0]) and sorted(composed) != sorted(word[0]):
            n_equal = [old == new for old, new in zip(word[0], composed, strict=False)].index(False)
            return word.start() + n_equal, word.start() + n_equal + 2
    return None


def _excerpt(line: str, start: int, end: int) -> str:
    """The surroundings of an oddity, with code points for it and for what cannot be printed."""
    first, shown = max(0, start - EXCERPT), []
    for at, char in enumerate(line[first : end + EXCERPT], first):
        is_plain = "!" <= char <= "~" or (char.isprintable() and not start <= at < end)
        shown.append(char if is_plain else f"<U+{ord(char):04X}>")
    return "".join(shown)
