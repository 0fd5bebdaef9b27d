"""Text that was read in another encoding than it was written in, found by turning characters into bytes again."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import NamedTuple

_WESTERN = ("cp1252", "latin-1", "mac_roman", "cp437", "cp850")  # their languages need ASCII letters
_READ_AS = (*_WESTERN, *(f"cp{n}" for n in (1250, 1251, 1256, 874, 1253, 1255, 866, 862)), "iso8859_11")
"""Encodings in which programs read UTF-8 by mistake, the likeliest first."""


class Found(NamedTuple):
    """Where something begins and ends in a line, and what has probably happened to the line, if anything."""

    start: int
    end: int
    diagnosis: str = ""


class _Language(NamedTuple):
    """Encodings of a language, and letters of which so large a share of its letters beyond ASCII, or more, consists."""

    name: str
    encodings: tuple[str, ...]
    usual: frozenset[str]
    least_share: float = 0.45


_LEVEL_1 = bytes(byte for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF) for byte in (row, cell))
"""The 3,755 most common Chinese characters in GB 2312."""
_LANGUAGES = (
    _Language("Arabic", ("cp1256", "cp720", "iso8859_6"), frozenset("اليمونرتبه")),
    _Language("Hebrew", ("cp1255", "cp862"), frozenset("יוהלארמתבש")),
    _Language("Cyrillic", ("cp1251", "koi8_r", "cp866", "iso8859_5"), frozenset("оеаинтсрвлі")),
    _Language("Greek", ("cp1253", "cp737"), frozenset("αοιετσνηυςρκάόίέή")),
    _Language("Thai", ("cp874",), frozenset("านรอกเงมยลวดสตทัี่้ิ")),
    _Language("Chinese", ("gb18030",), frozenset(_LEVEL_1.decode("gb2312", "ignore")), 0.75),
    _Language("Japanese", ("euc_jp", "shift_jis"), frozenset(map(chr, range(0x3041, 0x30FF))), 0.3),
    _Language("Korean", ("euc_kr",), frozenset(map(chr, range(0xAC00, 0xD7A4))), 0.6),
)
_WRITTEN_AS = [(language, encoding) for language in _LANGUAGES for encoding in language.encodings]
_IN_LATIN = "àáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿßœąćęłńśźżčďěňřšťůžğışőűățș£§°©®²³µ¼½¿¡–—‘’“”„…•€™\ufeff\ufffd"
_LATIN = _Language("Latin", (), frozenset(_IN_LATIN), 1.0)
_OTHER_SIGNS = {
    r"\?\?[\s,]+\?\?|n\?t\b": "letters that were replaced by ?",
    "[a-zà-ÿ]Õ[a-zà-ÿ]": "mac_roman read as cp1252",
    "[\x80-\x9f]": "cp1252 read as latin-1",
    # Every second byte is that of an alphabet: Latin, Greek, Cyrillic, Hebrew, Arabic or Thai.
    r"(?:[\x00\x03-\x06\x0e][^\x00\x03-\x06\x0e]){3}": "UTF-16 read as UTF-8",
}
WORTH_A_LOOK = r"[^\x{0}-\x{7f}]{2}|\?t\b|\?[\s,]+\?|Õ|[\x{80}-\x{9f}]|[\x{0}\x{3}-\x{6}\x{e}]"
"""Pattern of re2 that a line has in which `find` may find something."""
# Of characters that stand for bytes: a word in UTF-8; a stretch without ASCII letters.
_UTF8_WORD = re.compile(
    "(?<![^ \t])[!-~]*(?:(?:[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|\xf0[\x80-\xbf]{3})[!-~]*)+(?![^ \t])"
)
_STRETCH = re.compile(r"(?<![a-zA-Z\x80-\xff])[\x80-\xff]{3,}(?:[\s\d!-/:;]*+[\x80-\xff]){3,}(?![a-zA-Z])", re.ASCII)
_LEAST_DIFFERENT, _LARGEST_SHARE = 5, 0.4  # fewer different letters, or more of one of them, are a list and no text
_NO_BYTE = "\uffff"


@cache
def _byte_of(encoding: str) -> dict[int, str]:
    """For `translate`: each character beyond ASCII as the character whose number is its byte, and others of Latin-1."""
    table = dict.fromkeys(range(0x80, 0x100), _NO_BYTE)
    for byte in range(0x80, 0x100):
        # A byte without a character is a control character, as browsers read it.
        char = bytes([byte]).decode(encoding, "ignore") or chr(byte)
        table[ord(char)] = chr(byte)
    return table


def find(line: str) -> Found | None:
    """The first sign in a line that it was read in a wrong encoding, and the probable ones; None if it was not."""
    found = _utf8(line) or _language(line)
    if found is not None:
        return found
    for pattern, diagnosis in _OTHER_SIGNS.items():
        match = re.search(pattern, line)
        if match:
            return Found(match.end(), match.end(), diagnosis)
    return None


def _utf8(line: str) -> Found | None:
    """The end of the first word in UTF-8, read in the encoding in which most of the line is such words."""
    found = None
    most_bytes = 0
    for encoding in _READ_AS:
        first_end = n_bytes = 0
        times = ""
        for match in _UTF8_WORD.finditer(line.translate(_byte_of(encoding))):
            is_word = _is_word(match[0], line[match.start() : match.end()])
            if not is_word and _utf8(match[0].encode("latin-1").decode("utf-8", "replace")) is not None:
                is_word = True
                times = ", twice"
            if is_word:
                first_end = first_end or match.end()
                n_bytes += len(match[0])
        if n_bytes > most_bytes:
            found = Found(first_end, first_end, f"UTF-8 read as {encoding}{times}")
            most_bytes = n_bytes
    return found


def _is_word(as_bytes: str, misread: str) -> bool:
    """True if these bytes, one a character, are a word of a language in UTF-8, and what they were read as is not."""
    word = as_bytes.encode("latin-1").decode("utf-8", "replace")
    has_ascii = any(map(str.isalnum, filter(str.isascii, word)))
    is_capital = misread.isupper() and any(map(str.isalpha, filter(str.isascii, word)))
    if has_ascii and _excess(word, _LATIN) >= 0.0:
        return not is_capital  # such as IRMÃ”
    n_beyond = sum(not char.isascii() for char in word)
    return n_beyond >= 3 and any(_excess(word.lower(), language) >= 0.0 for language in (*_LANGUAGES, _LATIN))


def _language(line: str) -> Found | None:
    """The end of the stretch without ASCII letters that looks most like another language, and how it was misread."""
    found = None
    largest_excess = 0.0
    for read in _WESTERN:
        as_bytes = line.translate(_byte_of(read))
        if max(as_bytes, default="") > "\xff":  # a character that this encoding does not have
            continue
        for stretch in _STRETCH.finditer(as_bytes):
            if _is_list(line[stretch.start() : stretch.end()]):
                continue
            data = stretch[0].encode("latin-1")
            for language, written in _WRITTEN_AS:
                excess = _excess(data.decode(written, "replace"), language)
                if excess > largest_excess:
                    largest_excess = excess
                    found = Found(stretch.end(), stretch.end(), f"{language.name} in {written}, read as {read}")
    return found


def _is_list(stretch: str) -> bool:
    """True for a list or a drawn table: few different characters, each equally often, or one very often."""
    characters = [char for char in stretch.lower() if not char.isascii()]
    counts = Counter(characters).values()
    is_varied = len(counts) >= _LEAST_DIFFERENT and max(counts) <= _LARGEST_SHARE * len(characters)
    is_punctuation = all(unicodedata.category(char).startswith("P") for char in characters)
    return not is_varied or len({*counts}) == 1 or is_punctuation


def _excess(text: str, language: _Language) -> float:
    """By how much the share of usual letters among the characters beyond ASCII exceeds the least one of the language.

    It is negative, too, if capital letters are where a text hardly has them. A Latin letter takes the place of a usual
    one: Arabic in iso8859_6 is é and ê among Arabic letters in cp1256.
    """
    characters = [char for char in text if not char.isascii()]
    n_capital = sum(map(str.isupper, characters))
    has_capitals_inside = any(char.islower() and after.isupper() for char, after in pairwise(text))
    if has_capitals_inside or 2 * n_capital > len(characters) > 1:
        return -1.0
    n_usual = sum(char.lower() in language.usual for char in characters)
    if language is not _LATIN:
        n_usual -= sum(char in _LATIN.usual and char.isalpha() for char in characters)
    return n_usual / max(1, len(characters)) - language.least_share
