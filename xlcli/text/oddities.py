"""What nobody sees or means in a text, but a model scores: found in its lines, counted and shown. The text stays as is.

What some scripts need is not odd there: joiners in Persian, Hindi and emoji, zero-width spaces between words of Thai,
direction marks where Hebrew or Arabic stands beside Latin letters or numbers, no-break blanks of French and of numbers,
full-width letters beside Chinese or Japanese.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from html.entities import name2codepoint
from typing import Any, Literal

import re2

from xlcli.events import Notice
from xlcli.text import misreadings
from xlcli.text.documents import LONGEST_LINE, Document
from xlcli.text.misreadings import Found

PATTERN_BYTES = 2**26  # maximum size of the automaton of all patterns
MARKED_LETTERS = 256  # of a letter and its marks that are looked at: NFC takes the square of their number
EXCERPT = 24  # number of characters that are shown on either side


def is_decomposed(letters: str) -> bool:
    """True if NFC joins letters with their marks, or replaces them by equal ones.

    NFC also reorders marks, as in Hebrew, and divides letters, as in Hindi: both forms are usual there, so not odd.
    """
    letters = letters[:MARKED_LETTERS]
    composed = unicodedata.normalize("NFC", letters)
    return len(composed) <= len(letters) and sorted(composed) != sorted(letters)


def is_no_encyclopedia(line: str) -> bool:
    """False of lines with the word of Persian that has the ة of Arabic, and a letter of its own."""
    return "دایرة" not in line


def has_no_digit(line: str) -> bool:
    """False of lines of logs, in whose brackets are times and levels."""
    return not any(map(str.isdigit, line))


@dataclass(frozen=True, eq=False)
class Kind:
    """What a line has, what to do about it, and a pattern whose last group, or all of it, is shown.

    `of` is where it is odd: in `any` line, in a `line` of what is no log, in a `row` that is scored on its own, in the
    `first` line of a file or row, in a `later` line of a row, or in a `prompt`.
    """

    name: str
    remedy: str
    pattern: str
    of: Literal["any", "line", "row", "first", "later", "prompt"] = "line"
    least_share: float = 0.0  # in a smaller share of all rows or lines it is usual
    most_share: float = 1.0  # in a larger share it is usual, too
    accepts: Callable[[str], bool] = bool  # true for a finding that is odd; by default for all that is not empty

    @cached_property
    def compiled(self) -> Any:
        return re2.compile(self.pattern)

    def find(self, line: str) -> Found | None:
        """The first one that is odd."""
        for match in self.compiled.finditer(line):
            if self.accepts(match[0]):
                return Found(*match.span(match.lastindex or 0))
        return None


class WrongEncoding(Kind):
    """Characters that were read in a wrong encoding, in lines with the pattern. They are shown as one sees them."""

    def find(self, line: str) -> Found | None:
        return misreadings.find(line)


_BESIDE = "(?:^|[^{0}])({1})(?:[^{0}]|$)"  # with neither neighbor among these
_LATIN = re2.compile(r"\p{Latin}")
_WITHOUT = "^[^{0}]*?({1})[^{0}]*$"  # in a line without these
_TAGS = r"\x{e0020}-\x{e007f}"  # behind a flag, those of England, Scotland and Wales
_EMOJI = r"\p{So}\p{Sk}\p{Sm}\x{203c}\x{2049}\x{2139}\x{3030}\x{303d}"
_JOINED = rf"\p{{Lo}}\p{{M}}{_EMOJI}{_TAGS}"  # letters without case, their signs, and emoji
_RIGHT_TO_LEFT = r"\p{Arabic}\p{Hebrew}\p{Syriac}\p{Thaana}\p{Nko}"
_LEFT_TO_RIGHT = r"\p{Lu}\p{Ll}\p{N}"  # and numbers
_EAST_ASIAN = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\x{3001}-\x{303f}"
_UNBLANKED = r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Tai_Tham}\p{Javanese}\p{Balinese}"  # scripts
_DIRECTION = r"[\x{61c}\x{200e}\x{200f}\x{202a}-\x{202e}\x{2066}-\x{2069}]"
_NEEDLESS_DIRECTION = (  # in a line of one direction, or within a word
    rf"{_WITHOUT.format(_RIGHT_TO_LEFT, _DIRECTION)}|{_WITHOUT.format(_LEFT_TO_RIGHT, _DIRECTION)}"
    rf"|[{_RIGHT_TO_LEFT}]({_DIRECTION}+)[{_RIGHT_TO_LEFT}]"
)
_JOINER = r"[\x{34f}\x{180e}\x{200c}\x{200d}\x{fe00}-\x{fe0f}\x{e0000}-\x{e0fff}]+"
_BREAK = r"\x{200b}+"
_BROKEN = rf"\x{{200b}}{_UNBLANKED}"
_VOWELS_BEFORE = r"\x{e40}-\x{e44}\x{ec0}-\x{ec4}"  # of Thai and Lao, written before their consonant
_VOWELS_BEHIND = r"\x{e30}\x{e32}\x{e33}\x{e45}\x{eb0}\x{eb2}\x{eb3}"
_IN_SYLLABLE = rf"[{_VOWELS_BEFORE}]({_BREAK})|({_BREAK})[\p{{M}}{_VOWELS_BEHIND}]"  # no word begins or ends so
_ZERO_WIDTH = (
    rf"{_BESIDE.format(_JOINED, _JOINER)}|{_BESIDE.format(_BROKEN, _BREAK)}|{_IN_SYLLABLE}"
    r"|\p{Arabic}\x{200c}(\x{200c}+)|[\x{620}-\x{646}\x{648}-\x{6d3}](\x{200c})\s"  # Kurdish needs it behind \u0647
    r"|[\p{Thai}\p{Lao}]([\x{200c}\x{200d}]+)|([\x{200c}\x{200d}]+)[\p{Thai}\p{Lao}]"
    r"|([\x{2060}-\x{2065}\x{206a}-\x{206f}\x{fff9}-\x{fffb}]+)"
)
_ARABIC_FORMS = r"[\x{fb50}-\x{fbb1}\x{fbd3}-\x{fd3d}\x{fd50}-\x{fdf9}\x{fe70}-\x{fefc}]"  # but ﷺ, for a phrase
# Letters of the two alphabets; a text with other letters is Urdu, Pashto, Uyghur or of another language.
_ARABIC_ALPHABET, _PERSIAN_ADDED = "ءآأؤإئابةتثجحخدذرزسشصضطظعغفقكلمنهوىي", "پچژگکیۀ"
_OF_OTHERS = "".join(
    char
    for char in map(chr, range(0x620, 0x780))
    if unicodedata.category(char) == "Lo" and char not in _ARABIC_ALPHABET + _PERSIAN_ADDED
)
# Between two signs of a language: no brackets and quotes, in which another one may stand, and no joiner of Persian.
_RUN = rf"[{_ARABIC_ALPHABET}{_PERSIAN_ADDED}\p{{M}}\s\x{{640}}،؛.؟]*?"
_ARABIC = r"(?:[ةإ]|(?:^|\s)(?:هذا|هذه|الت[يی]|الذ[يی]|ف[يی]|أن)\s)"
_PERSIAN = r"(?:(?:^|\s)(?:از|ا[يی]ن|است|برا[يی])(?:\s|$))"  # no words of Pashto, which has ک and both yehs
_MIXED = "|".join((
    *(rf"ك{_RUN}([یک])", rf"[یک]{_RUN}(ك)"),
    *(rf"{_ARABIC}{_RUN}([یک])", rf"([یک]){_RUN}{_ARABIC}"),
    *(rf"{_PERSIAN}{_RUN}([يك])", rf"([يك]){_RUN}{_PERSIAN}"),
))  # fmt: skip
_MIXED_ALPHABETS = rf"^[^{_OF_OTHERS}]*?(?:{_MIXED})[^{_OF_OTHERS}]*$"
# Two เ for แ; Thai and Lao vowels in two parts, as NFKC writes them; marks twice; a tone before the vowel above or
# below, behind one that stands in the line, or on no letter.
_TONE = r"[\x{e48}-\x{e4b}\x{ec8}-\x{ecb}]"
_THAI = (
    rf"[{_VOWELS_BEFORE}{_VOWELS_BEHIND}]{_TONE}|(?:^|\s)({_TONE})[\p{{Thai}}\p{{Lao}}]"
    r"|เเ|\x{e4d}[\x{e48}-\x{e4b}]?\x{e32}|\x{ecd}[\x{ec8}-\x{ecb}]?\x{eb2}"
    r"|[\x{e48}-\x{e4b}][\x{e31}\x{e34}-\x{e39}\x{e48}-\x{e4b}]|[\x{e31}\x{e34}-\x{e39}]{2}"
)
_LINES = r"[\x{305}\x{332}\x{333}\x{335}-\x{338}\x{20d0}-\x{20dc}\x{20e5}-\x{20ea}]"
_FULL_WIDTH = r"[\x{ff01}-\x{ff06}\x{ff08}-\x{ff5e}]"
_HALF_WIDTH = r"[\x{ff61}-\x{ff9f}\x{ffa1}-\x{ffdc}\x{ffe8}-\x{ffee}]"
_OTHER_WIDTH = rf"{_WITHOUT.format(_EAST_ASIAN, _FULL_WIDTH)}|({_HALF_WIDTH})"
_FILLERS = r"\x{115f}\x{2800}\x{3164}\x{ffa0}"
_RARE_BLANK = rf"[\x{{a0}}\x{{1680}}\x{{2000}}-\x{{200a}}\x{{2028}}\x{{2029}}\x{{202f}}\x{{205f}}\x{{3000}}{_FILLERS}]"
_OTHER_SCRIPTS = r"\p{Cyrillic}\p{Armenian}\p{Cherokee}ΑΒΕΖΗΙΚΜΝΟΡΤΥΧοϲϳ"  # of Greek only what looks so
_LIKE_LATIN = "АВЕЅІЈКМНОРСТУХаеорсухіѕјһԁԛԝ"  # letters of Cyrillic
_ONLY_LIKE_LATIN = rf"^\P{{Cyrillic}}*?([{_LIKE_LATIN}]+)(?:\P{{Cyrillic}}|[{_LIKE_LATIN}])*$"
_LOOK_ALIKE = rf"\p{{Latin}}[{_OTHER_SCRIPTS}]|[{_OTHER_SCRIPTS}]\p{{Latin}}|{_ONLY_LIKE_LATIN}"
_APOSTROPHE = (  # but o‘ and g‘ as in Uzbek
    r"\p{Latin}([\x{b4}\x{2032}\x{ff07}\x{201b}])\p{Latin}|[^ogOG\P{Latin}](\x{2018})\p{Latin}"
    r"|^[^`]*[a-z](`)(?:s|t|m|d|re|ve|ll)\b[^`]*$|[a-z](\x{2bc})(?:s|t|m|re|ve|ll)\b"
)
_HYPHEN = r"[\x{2010}\x{2011}]|\p{L}([\x{2012}\x{2212}])\p{L}"
_MISSING = (
    r"(?i)^(?:NA|N/A|#N/A|<NA>|NaN|NaT|[(\[]?NULL[)\]]?|None|undefined|\\N|#(?:REF|VALUE|NAME|NUM|DIV/0)[!?]"
    r"|\.|-+|-[789]+|999+|\{\}|\[\]|\[object Object\])$"
)
_CODE = (
    r"_x[\dA-F]{4}_|<U\+[\dA-F]{4,6}>|\p{L}\\u[\da-fA-F]{4}|=[C-F][\dA-F]=[89AB][\dA-F]|[a-z]=92[a-z]"
    r"|\\x[c-f][\da-f]\\x[89ab][\da-f]|<[c-f][\da-f]><[89ab][\da-f]>"
)
_ESCAPE = r"(?:^|\PL)\\u[\da-fA-F]{4}|\\['\"nrt]|(?:=[0-7][\dA-F]){2}|%[\dA-F]{2}|\p{L}('')\p{L}|^(b['\"]).*['\"]$"
_INLINE_TAG = r"(?i)</?(?:b|i|u|em|strong|br|p|div|span|sub|sup|font)(?:\s[^<>]*)?/?>"
_ENTITY = rf"&(?:#\d+|#[xX][\da-fA-F]+|apos|{'|'.join(name2codepoint)});"
_DECOMPOSED = r"\p{L}\p{M}+|[\x{340}-\x{387}\x{1f71}-\x{1ffd}\x{2126}-\x{212b}\x{f900}-\x{faff}]|[\x{1100}-\x{11ff}]+"
_TAG = r"(?i)^\s*()<(?:\?xml|!doctype\s|(?:html|head|body|div|p|tei)[\s>]|[a-z][\w:.-]*\s+[\w:.-]+=[\"'])"
_BEFORE_REGION, _BEHIND_REGION = r"[\s(\"'“]", r"[\s.,;:!?)\"'”]"
_INSIDE_REGION = r"[^\s\"{0}](?:[^{0}]*[^\s{0}])?"
_FURTHER_REGION = rf"(?:\s|{_BEHIND_REGION}[^{{0}}]*{_BEFORE_REGION})[{{0}}]{_INSIDE_REGION}[{{0}}]"
# All marks of a line are those of one region, or of several:
_REGION = (
    rf"^(?:[^{{0}}]*{_BEFORE_REGION})?([{{0}}]){_INSIDE_REGION}[{{0}}](?:{_FURTHER_REGION})*"
    rf"(?:{_BEHIND_REGION}[^{{0}}]*)?$"
)
_BRACKETS = _REGION.format(r"\[\]")
_JSON = r"^\s*(\{\s*\"[^\"]*\"\s*:|\[\s*\{)"
_WORD = r"^\s*(?:\p{Latin}|\p{Cyrillic}|\p{Greek}|\p{M}|\p{N}|\p{P})+\s*$"  # of a script that has blanks
_DOUBLE_REGION = r"^[^*]*(\*\*[^\s*][^*]*\*\*)(?:[^*]+\*\*[^\s*][^*]*\*\*)*[^*]*$"
_REMOVE = "remove them"
_PLAIN = "write plain letters (NFKC of them alone)"
_COLUMN = "mark the region in another column"
_THAI_ORDER = "write แ, ำ, each mark once, tones after ิ or ุ and before า or ำ"
_YEH_AND_KAF = "write ي and ك in Arabic, ی and ک in Persian"
_REGION_MARK = "eval --region-mark reads them"
_ENCODING = "read the source in its own encoding"
KINDS = (  # the shares are higher than in books, Markdown and logs
    Kind("decomposed letters", "normalize the text to NFC", _DECOMPOSED, accepts=is_decomposed),
    Kind("zero-width characters", _REMOVE, _ZERO_WIDTH),
    Kind("soft hyphens", _REMOVE, r"\x{ad}"),
    Kind("direction marks", _REMOVE, _NEEDLESS_DIRECTION),
    Kind("byte-order marks", _REMOVE, r"\x{feff}", "any"),
    Kind("lost or private characters", _ENCODING, r"[\x{fffc}\x{fffd}]|\p{Co}", "any"),
    Kind("look-alike letters of another script", "write it in one script", _LOOK_ALIKE, accepts=_LATIN.search),
    Kind("lines under or through letters", _REMOVE, _LINES),
    Kind("accents or primes as apostrophes", "write '", _APOSTROPHE),
    WrongEncoding("characters of a wrong encoding", _ENCODING, misreadings.WORTH_A_LOOK, "any"),
    Kind("ligatures or mathematical letters", _PLAIN, r"[\x{fb00}-\x{fb06}\x{1d400}-\x{1d7ff}]"),
    Kind("the long s (\u017f)", "write s", r"\x{17f}"),
    Kind("Arabic presentation forms", _PLAIN, _ARABIC_FORMS),
    Kind(
        "Persian letters in Arabic or Arabic ones in Persian",
        _YEH_AND_KAF,
        _MIXED_ALPHABETS,
        accepts=is_no_encyclopedia,
    ),
    Kind("letters drawn out (tatweel)", _REMOVE, r"\p{Arabic}\p{M}*(\x{640}+)\p{Arabic}"),
    Kind("Thai or Lao signs in parts, twice or in another order", _THAI_ORDER, _THAI),
    Kind("Lao letters within Thai words", "write it in one script", r"\p{Thai}(\p{Lao}+)|(\p{Lao}+)\p{Thai}"),
    Kind("full-width or half-width letters or marks", _PLAIN, _OTHER_WIDTH),
    Kind("HTML entities", "decode them", rf"(?:^ ?|[^= ] |[^\s\"'>=;])({_ENTITY})(?:[^\"'<=]|$)"),
    Kind("HTML tags", _REMOVE, _INLINE_TAG),
    Kind("characters written as codes", "decode them", _CODE),
    Kind("hyphens that are not -", "write -", _HYPHEN),
    Kind("control characters", _REMOVE, r"[\x00-\x08\x0b\x0d-\x1f\x7f]", "any"),
    Kind("no-break or other rare blanks", "write spaces", _BESIDE.format(rf"\d«—–;:!?»%€{_EAST_ASIAN}", _RARE_BLANK)),
    Kind("blanks at an end or two together", _REMOVE, r"^[\s\p{Z}]+|[\s\p{Z}]+$|[\s\p{Z}]{2,}", "row"),
    Kind("tabs or form feeds", "write blanks", r"[\t\f]", "row"),
    Kind("escapes of another program", "decode them", _ESCAPE, "row"),
    Kind("JSON inside a text", "extract the text from it", _JSON, "row"),
    Kind("the text of a missing value (NA)", "leave them out if the value is missing", _MISSING, "row"),
    Kind("line breaks inside (\\n)", "write blanks", r"\S", "later", most_share=0.2),
    Kind("one word", "join the words of a sentence in one row", _WORD, "row", least_share=0.5),
    Kind("quotes around all", _REMOVE, r'^(").*"$', "row", least_share=0.5),
    Kind("a mark of judgment (*The)", "remove it", r"^([*?%]+)\p{L}[^*]*$", "row"),
    Kind("divisions of a text (A / B)", _COLUMN, r"\S( [/|] )\S", "row", least_share=0.2),
    Kind("asterisks around words (*was*)", _REGION_MARK, _REGION.format("*"), "row", least_share=0.2),
    Kind("double asterisks around words (**was**)", _REGION_MARK, _DOUBLE_REGION, "row", least_share=0.2),
    Kind("bars around words (|was|)", _REGION_MARK, _REGION.format("|"), "row", least_share=0.2),
    Kind("underscores around words (_was_)", _REGION_MARK, _REGION.format("_"), "row", least_share=0.9),
    Kind("brackets around words ([was])", _REGION_MARK, _BRACKETS, "row", least_share=0.8, accepts=has_no_digit),
    Kind("other marks around words ({was}, ~was~)", _REGION_MARK, _REGION.format("{}~#^"), "row", least_share=0.2),
    Kind("a beginning in XML or HTML", "extract the text from the tags: docs/start.md", _TAG, "first"),
    Kind("a blank at the end", "remove it: tokens begin with a blank", r"[\t\p{Z}]+\z", "prompt"),
)


@cache  # compiling the patterns takes some milliseconds, which each call of `Model.score` would pay
def _kinds_of(places: frozenset[str]) -> tuple[list[Kind], Any]:
    """The kinds of oddities of these places, and their patterns, which find in one pass those that a line has."""
    kinds = [kind for kind in KINDS if kind.of in places]
    options = re2.Options()
    options.max_mem = PATTERN_BYTES
    patterns = re2.Set.SearchSet(options)
    for kind in kinds:
        patterns.Add(kind.pattern)
    patterns.Compile()
    return kinds, patterns


class Oddities:
    """Counts what is odd in the units of a text: `line`, `row` or `prompt`, after `n_before` others.

    `of` are the kinds to look for: those of `any` line, for a log; also of a `line`; or also of a `row` or `prompt`.
    Kinds in a smaller share of the units than `least_share` are not named.
    """

    def __init__(self, unit: str, of: str, n_before: int = 0, *, least_share: float = 0.0) -> None:
        self._least_share = least_share
        self._n_begun = n_before
        self._is_first = n_before == 0
        self._has_crlf = False  # the text comes before CR LF is read as LF
        self._held = bytearray()
        self._look_for(unit, of)
        self._place = ""  # of the row that arrived last in the input, if it is known
        self._file = ""  # the name with which places in it begin
        self._n_before_file = 0
        self._counts = Counter[Kind]()
        self._latest: dict[Kind, int] = {}  # numbers of the units that were counted last
        self._first: dict[Kind, str] = {}

    def _look_for(self, unit: str, of: str) -> None:
        self._unit = unit
        places = {"any", of}
        if of != "any":
            places |= {"line", "first"}
        if unit == "row":
            places.add("later")
        self._kinds, self._patterns = _kinds_of(frozenset(places))

    def begin(self, file: str | None = None) -> None:
        """Begins a row or prompt, or a file of lines; `file` is the name of a file that begins, if it is to be told."""
        self._search_held()
        self._is_first = True
        if file is not None:
            self._file = f"{file}, "
            self._n_before_file = self._n_begun
        if self._unit != "line":
            self._n_begun += 1

    def feed(self, portion: bytes) -> None:
        """Takes the next bytes; an unfinished line at their end waits."""
        self._held += portion
        if b"\n" in portion:
            *lines, self._held = self._held.split(b"\n")
            for line in lines:
                self.search(line)
        if len(self._held) > LONGEST_LINE:
            self._search_held()

    def watched(self, portions: Iterable[bytes | None], *, has_rows: bool = True) -> Iterator[bytes | None]:
        """The portions of a text, each once taken; CR LF may end lines. With `has_rows` a `Document` begins a row."""
        self._has_crlf = True
        for portion in portions:
            if isinstance(portion, Document) and portion.line:
                self._place = f"line {portion.line:,}"
            if has_rows and isinstance(portion, Document) and not portion.continues:
                if self._unit == "line":  # known only now
                    self._look_for("row", "row")
                    self._n_begun = 0
                self.begin()
            self.feed(portion or b"")
            yield portion

    def search(self, text: bytes | bytearray) -> None:
        """Looks for oddities in the next line, or in a whole prompt, and counts each kind once in a unit."""
        if self._unit == "line":
            self._n_begun += 1
        if self._has_crlf:
            text = text.removesuffix(b"\r")
        line = text.decode("utf-8", "replace")
        is_first = self._is_first
        self._is_first = is_first and not line.strip()
        found = {}
        for number in sorted(self._patterns.Match(line) or []):
            kind = self._kinds[number]
            is_elsewhere = (kind.of == "first" and not is_first) or (kind.of == "later" and is_first)
            place = None if is_elsewhere else kind.find(line)
            if place is not None:
                found[kind] = place
        # What else is odd in a misread line, such as half of a letter, is not to be removed from it.
        misread = {kind: place for kind, place in found.items() if kind.remedy == _ENCODING}
        for kind, place in (misread or found).items():
            if self._latest.get(kind) == self._n_begun:
                continue
            self._latest[kind] = self._n_begun
            self._counts[kind] += 1
            if kind in self._first:  # only the first one is shown
                continue
            where = self._place or f"{self._file}{self._unit} {self._n_begun - self._n_before_file:,}"
            self._first[kind] = f"{where}: '{_excerpt(line, place.start, place.end)}'"
            likely = misreadings.likely_encodings(bytes(text)) if "\ufffd" in line else []
            diagnosis = " or ".join(likely) or place.diagnosis
            if diagnosis:
                self._first[kind] += f", probably {diagnosis}"

    def _search_held(self) -> None:
        if self._held:
            self.search(self._held)
            self._held = bytearray()

    def notices(self) -> Iterator[Notice]:
        """One notice on all that was found; at the end of the text."""
        self._search_held()
        parts = []
        for kind, count in self._counts.items():
            if max(kind.least_share, self._least_share) <= count / self._n_begun <= kind.most_share:
                parts.append(f"{count:,} with {kind.name} ({self._first[kind]}; {kind.remedy})")
        if parts:
            yield Notice(f"{self._unit}s that need a look: {'; '.join(parts)}", "warning")


def _excerpt(line: str, start: int, end: int) -> str:
    """What was found and its surroundings, with code points for it and for what cannot be printed."""
    first, shown = max(0, start - EXCERPT), []
    for at, char in enumerate(line[first : end + EXCERPT], first):
        if "!" <= char <= "~" or (char.isprintable() and not start <= at < end):
            shown.append(char)
        else:
            shown.append(f"<U+{ord(char):04X}>")
    return "".join(shown)
