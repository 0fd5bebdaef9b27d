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
    """Encodings of a language, by names of Python and iconv, and its `usual` letters.

    They are at least `least_share` of its letters beyond ASCII.
    """

    name: str
    encodings: tuple[str, ...]
    usual: frozenset[str]
    least_share: float = 0.45


_LEVEL_1 = bytes(byte for row in range(0xB0, 0xD8) for cell in range(0xA1, 0xFF) for byte in (row, cell))
"""The 3,755 most common Chinese characters in GB 2312."""
_BIG5_CELLS = *range(0x40, 0x7F), *range(0xA1, 0xFF)
_BIG5_LEVEL_1 = bytes(byte for row in range(0xA4, 0xC6) for cell in _BIG5_CELLS for byte in (row, cell))
"""5,338 of the 5,401 most common Chinese characters in Big5."""
_CHINESE_SIGNS = frozenset("，。、：；？！（）《》「」“”…")
_BIG5 = _Language("Chinese", ("big5",), _CHINESE_SIGNS.union(_BIG5_LEVEL_1.decode("big5")), 0.9)
_LANGUAGES = (
    _Language("Arabic", ("cp1256", "cp720", "iso-8859-6"), frozenset("اليمونرتبه")),
    _Language("Hebrew", ("cp1255", "cp862"), frozenset("יוהלארמתבש")),
    _Language("Cyrillic", ("cp1251", "koi8-r", "cp866", "iso-8859-5"), frozenset("оеаинтсрвлі")),
    _Language("Greek", ("cp1253", "cp737"), frozenset("αοιετσνηυςρκάόίέή")),
    _Language("Thai", ("cp874",), frozenset("านรอกเงมยลวดสตทัี่้ิ")),
    _Language("Chinese", ("gb18030",), _CHINESE_SIGNS.union(_LEVEL_1.decode("gb2312", "ignore")), 0.85),
    _BIG5,
    _Language("Japanese", ("euc-jp", "shift-jis"), frozenset(map(chr, range(0x3041, 0x30FF))), 0.3),
    _Language("Korean", ("euc-kr",), frozenset(map(chr, range(0xAC00, 0xD7A4))), 0.8),
)
_ALPHABETS = _LANGUAGES[:4]  # with one byte for a letter, in several encodings


class _Reading(NamedTuple):
    """An encoding in which text is read by mistake, and languages and encodings in which it was written.

    Text in the `right` language is right as it is.
    """

    encoding: str
    written: list[tuple[_Language, str]]
    right: _Language | None = None


_WRITTEN_AS = [(language, encoding) for language in _LANGUAGES for encoding in language.encodings]
_READINGS = [_Reading(encoding, _WRITTEN_AS) for encoding in _WESTERN]
for _alphabet in _ALPHABETS:
    for _read in _alphabet.encodings:
        _others = [(_alphabet, encoding) for encoding in _alphabet.encodings if encoding != _read]
        _READINGS.append(_Reading(_read, _others, right=_alphabet))
_IN_LATIN = "àáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿßœąćęłńśźżčďěňřšťůžğışőűățș£§°©®²³µ¼½¿¡–—‘’“”„…•€™\ufeff\ufffd"
_LATIN = _Language("Latin", (), frozenset(_IN_LATIN), 1.0)
_IN_LATIN_LETTERS = ("cp1252", "cp1250", "iso-8859-2", "cp1254", "macintosh", "cp850")
_OTHER_SCRIPTS = _Language("other", (), frozenset(map(chr, range(0x900, 0x1380))), 1.0)  # from Devanagari to Ethiopic
_ANY_LATIN = _LATIN._replace(encodings=_IN_LATIN_LETTERS, least_share=0.7)
_OTHER_SIGNS = {
    "(?:[\x81-\x9f][@-~\x80-ü]){3}": "Japanese in shift-jis, read as latin-1",
    "(?:‚[\xa0-ñŸ]|ƒ[@-~]){2}": "Japanese in shift-jis, read as cp1252",  # Hiragana, Katakana
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
_SAMPLE = 2**13  # bytes of a text from which its encoding is guessed
_LEAST_LETTERS = 20  # letters of an alphabet that are looked at: fewer may be unusual ones in any text
_LEAST_DIFFERENT, _LARGEST_SHARE = 5, 0.4  # fewer different letters, or more of one of them, are a list and no text
_NO_BYTE = "\uffff"
_ALONE = re.compile(rb"(?<![\x80-\xff])[\x80-\xff](?![\x80-\xff])")
_LEAST_ALONE = 0.25  # share of single bytes beyond ASCII: at most 0.1 in other scripts, at least 0.3 in Latin ones
_WITHIN_WORD = re.compile("(?<=[a-z])[^\x00-\x7f\\w’](?=[a-z])|\ufffd")  # what no word has
_CLEARLY = 0.1  # by which the first encoding exceeds others that are not named


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
    found = _find_utf8(line) or _find_language(line)
    if found is not None:
        return found
    for pattern, diagnosis in _OTHER_SIGNS.items():
        match = re.search(pattern, line)
        if match:
            return Found(match.end(), match.end(), diagnosis)
    return None


def _find_utf8(line: str) -> Found | None:
    """Returns the end of the first misread word of UTF-8, by the encoding that explains most of the line, or None."""
    found = None
    most_bytes = 0
    for encoding in _READ_AS:
        as_bytes = line.translate(_byte_of(encoding))
        diagnosis = f"UTF-8 read as {encoding}"
        words = []
        for match in _UTF8_WORD.finditer(as_bytes):
            is_word = _is_word(match[0], line[match.start() : match.end()])
            if not is_word and _find_utf8(match[0].encode("latin-1").decode("utf-8", "replace")) is not None:
                is_word = True
                diagnosis = f"UTF-8 read as {encoding}, twice"
            if is_word:
                words.append(match)
        n_bytes = sum(len(word[0]) for word in words)
        if n_bytes > most_bytes:
            most_bytes = n_bytes
            end = words[0].end()
            found = Found(end, end, diagnosis)
    return found


def _is_word(as_bytes: str, misread: str) -> bool:
    """Returns whether bytes, one a character, are a word of a language in UTF-8, and the misread word is none."""
    word = as_bytes.encode("latin-1").decode("utf-8", "replace")
    has_ascii = any(char.isascii() and char.isalnum() for char in word)
    if has_ascii and _excess(word, _LATIN) >= 0.0:
        is_capital = misread.isupper() and any(char.isascii() and char.isalpha() for char in word)
        return not is_capital  # IRMÃ” is such a word, and right as it is
    n_beyond_ascii = sum(not char.isascii() for char in word)
    if n_beyond_ascii < 3:
        return False
    return any(_excess(word.lower(), language) >= 0.0 for language in (*_LANGUAGES, _LATIN, _OTHER_SCRIPTS))


def _find_language(line: str) -> Found | None:
    """Returns the end of the stretch without ASCII letters that is most like a misread language, and how, or None."""
    found = None
    largest_excess = 0.0
    for reading in _READINGS:
        as_bytes = line.translate(_byte_of(reading.encoding))
        has_other_characters = max(as_bytes, default="") > "\xff"  # which this encoding does not have
        if has_other_characters:
            continue
        for stretch in _STRETCH.finditer(as_bytes):
            shown = line[stretch.start() : stretch.end()]
            if _is_list(shown):
                continue
            if reading.right is not None:
                is_too_short = sum(map(str.isalpha, shown)) < _LEAST_LETTERS
                if is_too_short or _excess(shown.lower(), reading.right) >= 0.0:
                    continue  # it is a text as it is, or nobody can tell
            data = stretch[0].encode("latin-1")
            for language, written in reading.written:
                excess = _excess(data.decode(written, "replace"), language)
                if excess > largest_excess:
                    largest_excess = excess
                    diagnosis = f"{language.name} in {written}, read as {reading.encoding}"
                    found = Found(stretch.end(), stretch.end(), diagnosis)
    return found


def likely_encodings(data: bytes) -> list[str]:
    """Returns the encodings, two at most, in which bytes are probably a text, the likelier first; none for UTF-8."""
    data = data[:_SAMPLE]
    if _is_mostly_utf8(data):
        return []
    n_beyond_ascii = sum(byte > 0x7F for byte in data)
    # Letters with accents stand alone among those of ASCII; other scripts have no ASCII letters, but in Big5.
    is_latin = len(_ALONE.findall(data)) > _LEAST_ALONE * n_beyond_ascii
    if n_beyond_ascii < _LEAST_LETTERS and not is_latin:
        return []
    ranked: list[tuple[float, int, str]] = []  # excess, its tie-break, and encoding
    for language in (_ANY_LATIN, _BIG5) if is_latin else _LANGUAGES:
        for encoding in language.encodings:
            text = data.decode(encoding, "replace")
            n_impossible = len(_WITHIN_WORD.findall(text))
            excess = _excess(text, language) - n_impossible / max(1, n_beyond_ascii)
            if excess > 0.0:
                ranked.append((excess, -len(ranked), encoding))  # of equal ones the first is more usual
    ranked.sort(reverse=True)
    likely = [encoding for excess, _, encoding in ranked if excess > ranked[0][0] - _CLEARLY]
    return likely[:2]


def _is_list(stretch: str) -> bool:
    """True for a list or a drawn table: few different characters, each equally often, or one very often."""
    characters = [char for char in stretch.lower() if not char.isascii()]
    counts = Counter(characters).values()
    is_varied = len(counts) >= _LEAST_DIFFERENT and max(counts) <= _LARGEST_SHARE * len(characters)
    is_punctuation = all(unicodedata.category(char).startswith("P") for char in characters)
    return not is_varied or len({*counts}) == 1 or is_punctuation


def _excess(text: str, language: _Language) -> float:
    """Returns by how much the share of usual letters beyond ASCII exceeds the least one of a language.

    A text of mostly capital letters has -1. A capital letter behind a small one, or a Latin letter, takes the place of
    a usual one: Arabic in iso-8859-6 is é and ê among Arabic letters in cp1256.
    """
    characters = [char for char in text if not char.isascii()]
    n_capital = sum(map(str.isupper, characters))
    if 2 * n_capital > len(characters) > 1:
        return -1.0
    n_usual = sum(char.lower() in language.usual for char in characters)
    for char, following in pairwise(text):
        is_capital_within_word = char.islower() and following.isupper() and not following.isascii()
        n_usual -= is_capital_within_word
    if language.name != "Latin":
        n_usual -= sum(char in _LATIN.usual and char.isalpha() for char in characters)
    return n_usual / max(1, len(characters)) - language.least_share


def _is_mostly_utf8(data: bytes) -> bool:
    n_beyond = sum(not char.isascii() for char in data.decode("utf-8", "ignore"))
    n_damaged = data.decode("utf-8", "replace").count("\ufffd") - data.count("\ufffd".encode())
    return n_beyond > n_damaged or n_damaged == 0


def conversion(data: bytes) -> str:
    """What to type to make a text UTF-8 that has these bytes from the first one on that is not."""
    if _is_mostly_utf8(data):
        return "Remove what is damaged: iconv -c -f utf-8 -t utf-8 OLD > NEW"
    likely = likely_encodings(data) or ["ENCODING"]
    command = f"Convert it: iconv -f {likely[0]} -t utf-8 OLD > NEW"
    if len(likely) > 1:
        command += f" (or -f {likely[1]})"
    return command
