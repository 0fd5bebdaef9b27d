"""What nobody sees in a text: which characters are odd and which are a script's own, counts, numbers and excerpts."""

import itertools
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlcli.text import misreadings
from xlcli.text.documents import Document
from xlcli.text.oddities import KINDS, Oddities, is_decomposed


def said(text, unit="line", of="line", n_before=0):
    """The notice on a text, which begins a row or file; None if there is none."""
    oddities = Oddities(unit, of, n_before)
    oddities.begin()
    oddities.feed(text.encode())
    notices = [notice.text for notice in oddities.notices()]
    assert len(notices) <= 1
    return notices[0] if notices else None


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        ("cafe\u0301", "decomposed letters", "cafe<U+0301>"),
        ("10 \u212b", "decomposed letters", "10 <U+212B>"),
        ("e\u0302\u0301", "decomposed letters", "e<U+0302><U+0301>"),
        ("\u00ea\u0301", "decomposed letters", "<U+00EA><U+0301>"),
        ("\u1112\u1161\u11ab", "decomposed letters", "<U+1112><U+1161><U+11AB>"),
        ("\u0915\u093c and cafe\u0301", "decomposed letters", "cafe<U+0301>"),
        ("caf\u00e9\u200b was", "zero-width characters", "caf\u00e9<U+200B> was"),
        ("\u200cTwo", "zero-width characters", "<U+200C>Two"),
        ("end\u200d", "zero-width characters", "end<U+200D>"),
        ("a\u2060b", "zero-width characters", "a<U+2060>b"),
        ("co\u00adop", "soft hyphens", "co<U+00AD>op"),
        ("\u200ecaf\u00e9", "direction marks", "<U+200E>caf\u00e9"),
        ("a \u2067b\u2069", "direction marks", "a <U+2067>b"),
        ("the \ufeffcaf\u00e9", "byte-order marks", "the <U+FEFF>caf\u00e9"),
        ("caf\ufffd", "lost or private characters", "caf<U+FFFD>"),
        ("the \ufb01rst", "ligatures", "the <U+FB01>rst"),
        ("\U0001d41bold", "mathematical letters", "<U+1D41B>old"),
        ("a \uff44og", "full-width", "a <U+FF44>og"),
        ("caf\u00c3\u00a9", "wrong encoding", "caf\u00c3\u00a9"),
        ("don\u00e2\u20ac\u2122t", "wrong encoding", "don\u00e2\u20ac\u2122t"),
        ("don\u00e2\x80\x99t", "wrong encoding", "don\u00e2<U+0080><U+0099>t"),
        ("a \x93dog\x94", "wrong encoding", "a <U+0093>dog<U+0094>"),
        ("\u00d0\u0178\u00d1\u20ac\u00d0\u00b8", "wrong encoding", "\u00d0\u0178\u00d1\u20ac\u00d0\u00b8"),
        ("\u0633\u0644\u200b\u0627\u0645", "zero-width characters", "\u0633\u0644<U+200B>"),  # Arabic
        ("\u0633\u2060\u0644", "zero-width characters", "\u0633<U+2060>"),
        ("\u0e01\u2060\u0e02", "zero-width characters", "\u0e01<U+2060>"),
        ("\u0915\u200b\u0937", "zero-width characters", "\u0915<U+200B>"),
        ("\u0e20\u0e32\u200c\u0e29\u0e32", "zero-width characters", "\u0e32<U+200C>\u0e29"),
        ("iOS\u200c\u0e20\u0e32\u0e29\u0e32", "zero-width characters", "iOS<U+200C>"),
        ("\u0e01\u200b\u0e32\u0e23", "zero-width characters", "\u0e01<U+200B>\u0e32"),  # before a vowel
        ("\u0e17\u200b\u0e35\u0e48", "zero-width characters", "\u0e17<U+200B>\u0e35"),  # before a mark
        ("\u0e40\u200b\u0e1b\u0e47\u0e19", "zero-width characters", "\u0e40<U+200B>\u0e1b"),  # behind a vowel
        ("\u0e81\u200b\u0eb2\u0e99", "zero-width characters", "\u0e81<U+200B>\u0eb2"),  # Lao
        ("\u1780\u200b\u17b6", "zero-width characters", "\u1780<U+200B>\u17b6"),  # Khmer
        ("\u0645\u062d\u0640\u0640\u0645\u062f", "tatweel", "\u062d<U+0640><U+0640>\u0645"),
        ("\u0645\u062d\u200f\u0645\u062f abc", "direction marks", "\u062d<U+200F>\u0645"),
        ("\u0634\u0643\u0631\u0627!\u200f", "direction marks", "!<U+200F>"),
        ("\u202b\u05e9\u05dc\u05d5\u05dd\u202c", "direction marks", "<U+202B>"),
        ("\uff76\uff85", "half-width", "<U+FF76>"),
        ("\ufeb3\u0644", "Arabic presentation forms", "<U+FEB3>"),
        ("\ufb90", "Arabic presentation forms", "<U+FB90>"),
        ("\u0e40\u0e40\u0e21\u0e48", "Thai or Lao signs", "<U+0E40><U+0E40>"),
        ("\u0e19\u0e49\u0e4d\u0e32", "Thai or Lao signs", "<U+0E4D><U+0E32>"),
        ("\u0e01\u0e48\u0e48\u0e32", "Thai or Lao signs", "<U+0E48><U+0E48>"),
        ("\u0e17\u0e48\u0e35", "Thai or Lao signs", "<U+0E48><U+0E35>"),
        ("\u0e19\u0e33\u0e49", "Thai or Lao signs", "<U+0E33><U+0E49>"),
        ("\u0e19\u0e32\u0e48", "Thai or Lao signs", "<U+0E32><U+0E48>"),
        ("\u0e44\u0e1b \u0e48\u0e01", "Thai or Lao signs", " <U+0E48>\u0e01"),
        ("\u0e01\u0eb2\u0e19", "Lao letters", "\u0e01<U+0EB2>\u0e19"),
        ("\u0645\u06cc\u200c \u0631\u0648\u062f", "zero-width characters", "\u06cc<U+200C> "),
        ("\u0645\u06cc\u200c\u200c\u0631\u0648\u062f", "zero-width characters", "<U+200C><U+200C>"),
        ("AT&amp;T", "HTML entities", "AT&amp;T"),
        ("it&#39;s", "HTML entities", "it&#39;s"),
        (" &#x27;s", "HTML entities", " &#x27;s"),
        ("\x1b[31mred", "control characters", "<U+001B>[31mred"),
        ("a\x07", "control characters", "a<U+0007>"),
        ("the\u00a0dog", "rare blanks", "the<U+00A0>dog"),
        ("one.\u2029Two", "rare blanks", "one.<U+2029>Two"),
        ("the\u3000dog", "rare blanks", "the<U+3000>dog"),
        ("<?xml version='1.0'?>", "XML or HTML", "<?xml version='1.0'?>"),
        ("\n <!DOCTYPE html>", "XML or HTML", " <!DOCTYPE html>"),
        ('<TEI xmlns="http">', "XML or HTML", '<TEI xmlns="http">'),
        ('<doc id="1">', "XML or HTML", '<doc id="1">'),
        ("<body>One", "XML or HTML", "<body>One"),
        ("the <b>dog</b>", "HTML tags", "<b>"),
        ("in it.<br>And", "HTML tags", "<br>"),
        ("a well\u2011known dog", "hyphens", "well<U+2011>known"),
        ("a well\u2010known dog", "hyphens", "well<U+2010>known"),
        ("wasn<U+2019>t", "written as codes", "<U+2019>"),
        ("was_x000D_ here", "written as codes", "_x000D_"),
        ("caf\\u00e9", "written as codes", "\\u00e9"),
        ("don=E2=80=99t", "written as codes", "don=E2=80=99t"),
        ("don\u00b4t", "apostrophes", "don<U+00B4>t"),
        ("don`t", "apostrophes", "don`t"),
        ("don\u2018t", "apostrophes", "don<U+2018>t"),
        ("don\u02bct", "apostrophes", "don<U+02BC>t"),
        ("the be\u017ft of friends", "the long s", "be<U+017F>t"),
        ("it`s", "apostrophes", "it`s"),
        ("a well\u2212known dog", "hyphens", "well<U+2212>known"),
        ("The dog\uff0c he said", "full-width", "dog<U+FF0C>"),
        ("don<e2><80><99>t", "written as codes", "don<e2><80><99>t"),
        ("don\\xe2\\x80\\x99t", "written as codes", "don\\xe2\\x80"),
        ("don\u201a\u00c4\u00f4t", "wrong encoding", "don\u201a\u00c4"),
        ("don\u00d5t", "wrong encoding", "don\u00d5t"),
        ("don?t", "wrong encoding", "don?t"),
        ("the do\u0332g\u0332", "lines under or through", "do<U+0332>g"),
        ("the d\u0336o\u0336g", "lines under or through", "d<U+0336>o"),
        ("was\U000e0041\U000e0042 here", "zero-width characters", "was<U+E0041>"),
        ("the dog\ufe0f ran", "zero-width characters", "dog<U+FE0F>"),
        ("the\u061cdog", "direction marks", "the<U+061C>dog"),
        ("c\u0430f\u00e9", "look-alike letters", "c<U+0430>f\u00e9"),
        ("\u0397ello", "look-alike letters", "<U+0397>ello"),
        ("d\u0585g", "look-alike letters", "d<U+0585>g"),
        ("The dog saw \u0430 cat", "look-alike letters", "saw <U+0430> cat"),
        ("\u0410 cat and \u0430 dog", "look-alike letters", "<U+0410> cat"),
    ],
)
def test_what_is_odd_in_any_text_is_named_and_shown(text, kind, shown):
    notice = said(text)
    assert kind in notice
    assert shown[:20] in notice
    assert notice.count(" with ") == 1


@pytest.mark.parametrize(
    "text",
    [
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 CD\u200c\u0647\u0627",  # Persian
        "\u0915\u094d\u200d\u0937 \u0958\u0932\u092e \u0915\u093c \u0930\u094d\u200d\u0939 \u09dc",  # Hindi, Bengali
        "\U0001f469\u200d\U0001f4bb \u2764\ufe0f\u200d\U0001f525 1\ufe0f\u20e3 \U0001f44d\U0001f3fd",  # emoji
        "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",  # a flag
        "\u05e9\u05bc\u05b8\u05c1\u05dc\u05d5\u05b9\u05dd \ufb2a \u200fabc\u200e (x)",  # Hebrew
        "\u0645\u064f\u062d\u064e\u0645\u0651\u064e\u062f \u2067abc\u2069",  # Arabic
        "\u0e20\u0e32\u0e29\u0e32\u200b\u0e44\u0e17\u0e22 \u0e19\u0e49\u0e33 \u0e17\u0e35\u0e48",  # Thai
        "\u0e20\u0e32\u0e29\u0e32\u200b\u0e17\u0e35\u0e48\u200b\u200b\u0e40\u0e1b\u0e47\u0e19\u200b, \u0e46",  # too
        "O\u2018zbekiston, o\u02bbzbek, Ma\u02bcno sanʼat g\u2018alaba cʼhoar",  # Uzbek, Breton
        "\u043a\u043e\u043c\u043f\u02bc\u044e\u0442\u0435\u0440 \u043f\u02bc\u044f\u0442\u044c",  # Ukrainian
        "Facebook\u0e25\u0e07\u0e17\u0e38\u0e19 iPhone\u0e23\u0e38\u0e48\u0e19",
        "\u0661\u0662\u0663 \u200f5 \u0643\u062a\u0628\u200f",  # Arabic with numbers
        "\u0631\u062d\u0645\u0640\u0670\u0646 1445 \u0647\u0640 \u0627\u0644\u0640BBC",  # tatweel that is needed
        "\u1797\u17b6\u179f\u17b6\u200b\u1781\u17d2\u1798\u17c2\u179a",  # Khmer
        "\u0645\u062d\u0645\u062f \ufdfa",  # one sign for a phrase
        "\u00e4\u00f6\u00fc\u00c4\u00d6\u00dc\u00df\n\u00e9\u00e8\u00ea\u00eb \u00e0\u00e2\u00e4",  # letters
        "\u00e4\u00e4\u00e4\u00e4\u00e4\u00e4\u00e4, \u00bd\u00d7\u00bd\u00d7\u00bc",
        "Il dit\u00a0: \u00ab\u00a0oui\u00a0\u00bb, 10\u202f000\u00a0\u20ac",  # French
        "\uff34\u30b7\u30e3\u30c4\uff12\uff10\u5e74\u3000\u3067\u3059",  # Japanese
        "\u1ecc\u0300r\u00fanm\u00ecl\u00e0 Ti\u1ebfng Vi\u1ec7t \u00e9\u00fc\u00f1",  # Yoruba, Vietnamese
        "N\u00c3O IRM\u00c3\u201d \u201c\u00c2\u201d \u00e0\u00a0\u00ab",  # Portuguese
        "\u0401\u043b\u043a\u0430 \u0438 \u0439\u043e\u0434, \ud55c\uad6d\uc5b4, \u0395\u03bb\u03bb\u03ac\u03b4\u03b1",
        "x\u00b2 + \u00bd \u2026 \u2122 5\u00b5m \u2018a\u2019 \u201cb\u201d \u2014",
        "s.replace('&', '&amp;'); x = &sum; a && b; '<td>&nbsp;</td>'; R&D; AT&T;",
        "<unk> was a <s> dog\ta cat\n<p1>in the middle</p1> of C:\\new",
        "\u2764\ufe0f \u203c\ufe0f \u2194\ufe0f \u2139\ufe0f \u845b\U000e0100",  # emoji, a form of a Chinese character
        "\u0410 \u043e\u043d \u043f\u0438\u0448\u0435\u0442 \u0432 LaTeX \u0441 \u0394t, \u03bcm",  # Russian
        "it\u2019s 5\u2032 long; `code`s, 100 %, a%b, http://x/a?b=C3&d=A9",
        "  indented,  doubled ,  at the end ",
        "*one* and [two](three) and _four_\nNA",
    ],
)
def test_what_a_script_needs_is_not_odd(text):
    assert said(text) is None


ARABIC = "كان الليل مظلما في الشتاء."
THAI = "คำอธิบายภาษาไทยออก"
RUSSIAN = "привет мир, как дела"


HEBREW = "הלילה היה חשוך מאוד בחורף"
GREEK = "η νύχτα ήταν πολύ σκοτεινή"
GERMAN = "Die Tür ist schön, groß und heiß."
FRENCH = "L’été où j’étais là, ça va."


def in_wrong_encoding(text, written, read):
    """The text as a program shows it; a byte without a character becomes a control character, as in browsers."""
    chars = [bytes([byte]).decode(read, "ignore") or chr(byte) for byte in text.encode(written)]
    return "".join(chars)


@pytest.mark.parametrize("text", [ARABIC, THAI, RUSSIAN, HEBREW, GREEK, GERMAN, FRENCH])
@pytest.mark.parametrize(
    "read", ["latin-1", "cp1252", "mac_roman", "cp437", "cp850", "cp1250", "cp1251", "cp1256", "cp874", "cp866"]
)
def test_text_in_utf8_that_was_read_otherwise_is_named(text, read):
    notice = said(in_wrong_encoding(text, "utf-8", read))
    assert "1 with characters of a wrong encoding (line 1: '" in notice
    assert f"', probably UTF-8 read as {read}; read the source in its own encoding)" in notice
    assert notice.count("; read the source in its own encoding") == notice.count(" with ")  # nothing is to be removed
    assert said(text) is None


@pytest.mark.parametrize(
    ("language", "text", "written"),
    [
        *(("Arabic", ARABIC, written) for written in ("cp1256", "cp720", "iso-8859-6")),
        *(("Hebrew", HEBREW, written) for written in ("cp1255", "cp862")),
        *(("Cyrillic", RUSSIAN, written) for written in ("cp1251", "koi8-r", "cp866", "iso-8859-5")),
        *(("Greek", GREEK, written) for written in ("cp1253", "cp737")),
        ("Thai", THAI, "cp874"),
        ("Chinese", "你好，我们在黑暗的夜里航行。", "gb18030"),
        ("Japanese", "夜は暗かったです。", "euc-jp"),
        ("Korean", "밤은 어두웠고 우리는 어두운 밤에 걸었다", "euc-kr"),
    ],
)
@pytest.mark.parametrize("read", ["cp1252", "mac_roman", "cp437", "cp850"])
def test_a_text_in_a_wrong_encoding_is_named_with_its_language(language, text, written, read):
    notice = said(in_wrong_encoding(text, written, read))
    assert f", probably {language} in {written}, read as " in notice
    if (written, read) != ("cp862", "cp850"):  # these letters are those of cp437, too
        assert f"read as {read}; " in notice
    assert notice.count("; read the source in its own encoding") == notice.count(" with ")
    assert said(text) is None


@pytest.mark.parametrize(
    ("text", "diagnosis"),
    [
        ("caf├⌐", "UTF-8 read as cp437"),
        ("cafÃƒÂ©", "UTF-8 read as cp1252, twice"),
        ("Ã˜Â§Ã™â€žÃ˜Â¬Ã™Ë†", "UTF-8 read as cp1252, twice"),  # الجو
        ("เด็กไปโรงเรียน".encode().decode("iso8859_11"), "UTF-8 read as iso8859_11"),
        ("sch├ñtzen", "UTF-8 read as cp437"),
        ("sch√§tzen", "UTF-8 read as mac_roman"),
        ("cafأ©", "UTF-8 read as cp1256"),
        ("ÇáßÊÇÈ", "Arabic in cp1256, read as cp1252"),
        ("??? ????", "letters that were replaced by ?"),
        ("Price: Â£5", "UTF-8 read as cp1252"),
        ("siÄ… w³a", "UTF-8 read as cp1252"),
        ("donâ€™t and Ø§Ù„Ù„ÙŠÙ„", "UTF-8 read as cp1252"),
        *(
            (text.encode("utf-16-le").decode(), "UTF-16 read as UTF-8")
            for text in ("هذا كتاب جديد", "หนังสือ", "the old man")
        ),
    ],
)
def test_the_probable_encoding_is_named(text, diagnosis):
    assert f", probably {diagnosis}; " in said(text)


@pytest.mark.parametrize(
    "text",
    [
        "äöü, ÄÖÜ, ß äöü",
        "äöåéü ÄÖÅÉÜ",
        "À Á Â Ã Ä Å à á â ã ä å",
        "╔══╦══╗ ║ ▒ ║ └──┬─┐ ├─ äußeres",
        "–—“…” «…» 5 °C",
        "What?? Really???",
        "Він пішов у ліс; МІЛІЦІЯ, 220 кВ, «В»",
        "تک بگ آگاه، أ، ب؟",
        "فيما إذا وجب تدمير هذه النافذة",
        "τα πάντα σ᾽ αυτό",
        "цебуаншки чемчик",
    ],
)
def test_letters_of_a_language_are_no_wrong_encoding(text):
    assert "wrong encoding" not in (said(text) or "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("كان الل\u06ccل مظلما", "<U+06CC>"),  # Arabic with a Persian yeh
        ("ذهب ف\u06cc المدرسة", "<U+06CC>"),
        ("المدرسة ال\u06a9بيرة", "<U+06A9>"),
        ("این \u0643تاب خوب است", "<U+0643>"),  # Persian with Arabic letters
        ("برای من ا\u064aن کتاب", "<U+064A>"),
    ],
)
def test_letters_of_persian_and_arabic_are_not_mixed(text, shown):
    notice = said(text)
    assert "1 with Persian letters in Arabic or Arabic ones in Persian" in notice
    assert shown in notice
    assert notice.count(" with ") == 1


@pytest.mark.parametrize(
    "text",
    [
        "این کتاب را برای من بخوان",
        "ذهب الولد إلى المدرسة في الصباح",
        "می\u200cروم به مدرسة",  # Persian with a word of Arabic
        "دایرة المعارف",
        "به\u200c ڕێوه\u200c",  # Kurdish
        "น้ำท่วมแล้ว เปิ้ลไปซื้อ ( ่ ) ນ້ຳ ไทย ພາສາ",
        "او گفت: «ذهب إلى المدرسة» و رفت",  # a quotation
        "زما کتاب په پښتو کې دی او ښه ښاري کتابتون لري",  # Pashto, with letters of its own
        "ازبکي توکي",  # Pashto without them
        "یہ کتاب ہے اور وہ بڑی ہے",  # Urdu
        "بۇ كىتاب ياخشى",  # Uyghur
    ],
)
def test_languages_that_have_their_own_yeh_and_kaf_are_not_odd(text):
    assert said(text) is None


def test_kinds_in_few_lines_are_not_named_if_a_least_share_is_given():
    for n, is_odd in ((100, True), (101, False)):
        oddities = Oddities("line", "line", least_share=0.01)
        oddities.feed(b"a\xe2\x80\x8bb\n" + b"plain\n" * (n - 1))
        assert bool([*oddities.notices()]) == is_odd


@given(st.text(st.characters(max_codepoint=0x2FFF)))
def test_any_line_can_be_looked_at_for_a_wrong_encoding(text):
    found = misreadings.find(text)
    assert found is None or 0 <= found.start <= found.end <= len(text)
    assert misreadings.find(text.encode("ascii", "ignore").decode().replace("?", "")) is None


@given(st.text(max_size=9))
def test_letters_that_nfc_keeps_are_never_decomposed(text):
    assert not is_decomposed(unicodedata.normalize("NFC", text))


@pytest.mark.parametrize("letter", "\u00e9\u1ebf\u0390\u0439\u304c\ud55c\u01d8\u1e69")
def test_letters_that_nfc_joins_are_decomposed_in_full_and_in_part(letter):
    apart = unicodedata.normalize("NFD", letter)
    assert is_decomposed(apart)
    assert "decomposed" in said(f"x{apart}")
    partly = unicodedata.normalize("NFC", apart[:-1]) + apart[-1]
    assert is_decomposed(partly) == (partly != letter)


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        (" The dog.", "blanks", "<U+0020>The"),
        ("The  dog.", "blanks", "The<U+0020><U+0020>dog"),
        ("The dog. ", "blanks", "dog.<U+0020>"),
        ("The dog.\t", "blanks", "dog.<U+0009>"),
        ("The dog.\u00a0", "blanks at an end", "dog.<U+00A0>"),
        ("NA", "the text of a missing value", "NA"),
        ("nan", "the text of a missing value", "nan"),
        ("#N/A", "the text of a missing value", "#N/A"),
        (r"\N", "the text of a missing value", r"\N"),
        ("The\tdog", "tabs", "The<U+0009>dog"),
        (".", "the text of a missing value", "."),
        ("-99", "the text of a missing value", "-99"),
        ("undefined", "the text of a missing value", "undefined"),
        ("(null)", "the text of a missing value", "(null)"),
        ("[object Object]", "the text of a missing value", "[object"),
        ("don''t go", "escapes", "don''t"),
        ("b'The dog.'", "escapes", "b'The"),
        ('"The dog was."', "quotes around all", '"The dog'),
        ("*The dog are.", "a mark of judgment", "*The"),
        ("??The dog are.", "a mark of judgment", "??The"),
        ("The dog / was / here", "divisions", "dog<U+0020>/<U+0020>was"),
        ("The dog | was here", "divisions", "dog<U+0020>|<U+0020>was"),
        ("dog.", "one word", "dog."),
        ("one\\ntwo", "escapes", "\\ntwo"),
        ("the%20dog", "escapes", "%20dog"),
        ("\\u201ethe dog", "escapes", "\\u201e"),
        ('{"content": "The dog."}', "JSON inside a text", '{"content": '),
        ('[{"content": "The dog."}]', "JSON inside a text", '[{"content": '),
        ("The dog {was} here.", "other marks", "{was}"),
        ("The dog ~was here~.", "other marks", "~was here~"),
        ("The **dog** was", "double asterisks", "**dog**"),
        ("The dog *was* here.", "asterisks", "*was*"),
        ("The dog |was here|", "bars", "|was here|"),
        ("_was_ it?", "underscores", "_was_"),
        ("The dog [was] here.", "brackets", "[was]"),
    ],
)
def test_rows_are_looked_at_more_closely(text, kind, shown):
    notice = said(text + "\n", "row", "row")
    assert kind in notice
    assert shown in notice
    assert said(text.replace("\u00a0", " ")) is None


def test_marks_are_odd_only_in_rows_that_have_them_more_often_than_prose():
    marked, plain = "The dog *was* here.\n", "The dog was here.\n"
    for n, is_odd in ((1, False), (2, True), (10, True)):
        assert ("asterisks" in (said(marked * n + plain * (10 - n), of="row") or "")) == is_odd
    for n, is_odd in ((8, False), (9, True), (10, True)):
        rows = "The dog _was_ here.\n" * n + plain * (10 - n)
        assert ("underscores" in (said(rows, of="row") or "")) == is_odd
    assert said("The *old* dog *was* here, **so**.\nHe had 2 * 3 * 4 dogs.\n", of="row") is None


@pytest.mark.parametrize(
    ("marks", "kind"),
    [
        ("**", "asterisks around words"),
        ("||", "bars around words"),
        ("__", "underscores around words"),
        ("[]", "brackets around words"),
        ("{}", "other marks around words"),
        ("~~", "other marks around words"),
        ("##", "other marks around words"),
        (("**", "**"), "double asterisks around words"),
    ],
)
@pytest.mark.parametrize(
    "sentence",
    [
        "The cat that <the doctor feared> <kept> barking.",
        "<The cat> that the doctor <feared> kept barking.",
        "<The cat> <that the doctor> <feared kept> <barking.>",
        "The cat (<that> the doctor <feared>), <kept> barking.",
        "<The cat>, <barking>",
    ],
)
def test_any_number_of_regions_in_a_row_is_odd(marks, kind, sentence):
    opening, closing = marks
    notice = said(sentence.replace("<", opening).replace(">", closing) + "\n", "row", "row")
    assert f"1 with {kind}" in notice
    assert notice.count(" with ") == 1


@pytest.mark.parametrize("text", ["A dog * 2 and a cat * 3", "2*3*4*5 dogs", "[12:01] [main] 3 dogs", "a_b_c d_e_f"])
def test_marks_that_stand_between_words_and_numbers_are_no_regions(text):
    assert said(text, "row", "row") is None


def test_units_are_counted_once_and_the_first_is_shown():
    notice = said("plain\na\u200bb c\u200bd\nplain\nx\u200by\u00ad\n")
    assert "2 with zero-width characters (line 2: 'a<U+200B>b" in notice
    assert "1 with soft hyphens (line 4" in notice
    assert "(line 12: " in said("plain\na\u200bb", n_before=10)


def test_a_row_of_several_lines_is_one():
    oddities = Oddities("row", "row")
    portions = [Document(b"one\n"), Document(b"two\nt\xe2\x80"), None, b"\x8bhree\nf\xe2\x80\x8bour\n"]
    assert list(oddities.watched(portions)) == portions
    [notice] = oddities.notices()
    assert "1 with zero-width characters (row 2: 't<U+200B>hree'" in notice.text


def test_markup_counts_where_a_file_begins():
    oddities = Oddities("line", "line")
    for text in (b"<html>\n<body>\n<p>one</p>\n", b"plain\n<html>\n", b'\n<?xml version="1.0"?>\n<a/>\n'):
        oddities.begin()
        oddities.feed(text)
    [notice] = oddities.notices()
    assert "2 with a beginning in XML or HTML (line 1: '<html>'" in notice.text


@given(st.lists(st.integers(0, 90)), st.sampled_from(["line", "row"]))
def test_notices_do_not_depend_on_the_division(cuts, of):
    text = "\u00e9\ncafe\u0301\u200b &amp; \r\n  two  \n\n\u201cthe\u00a0dog\u201d *x*\nlast\u00ad".encode()
    whole, divided = Oddities("line", of), Oddities("line", of)
    whole.feed(text)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, stop in itertools.pairwise(places):
        divided.feed(text[start:stop])
    assert list(whole.notices()) == list(divided.notices())


def test_bytes_that_are_not_utf8_are_lost_characters():
    oddities = Oddities("line", "line")
    oddities.feed(b"caf\xc3")
    oddities.feed(b"\xa9\nlatin-1 caf\xe9\n")
    [notice] = oddities.notices()
    assert "1 with lost or private characters (line 2: 'latin-1 caf<U+FFFD>'" in notice.text


def test_a_row_of_several_lines_is_odd_only_among_rows_of_one():
    for n, is_odd in ((5, True), (4, False), (1, False)):
        oddities = Oddities("row", "row")
        for row in [b"The dog\nwas here.\n", *[b"The dog was here.\n"] * (n - 1)]:
            oddities.begin()
            oddities.feed(row)
        assert any("line breaks inside" in notice.text for notice in oddities.notices()) == is_odd


def test_single_words_are_odd_only_if_most_rows_are_so():
    for rows, is_odd in (
        ("The\ndog\nwas here.\n", True),
        ("The\nold dog\nwas here.\n", False),
        ("\u72ac\n" * 3, False),
    ):
        assert ("one word" in (said(rows, of="row") or "")) == is_odd


def test_rows_are_recognized_when_they_arrive():
    oddities = Oddities("line", "line", n_before=10)
    assert list(oddities.watched([Document(b"The  dog.\n"), Document(b"A dog.\n")]))
    [notice] = oddities.notices()
    assert "rows that need a look: 1 with blanks at an end or two together (row 1: " in notice.text


def test_a_prompt_is_one_unit_whose_end_matters():
    for prompt, is_odd in ((b"and ", True), (b"and\t", True), (b"and \n", False), (b"a \nb", False), (b"and", False)):
        oddities = Oddities("prompt", "prompt")
        oddities.begin()
        oddities.search(prompt)
        assert bool(list(oddities.notices())) == is_odd


def test_the_page_on_words_names_each_kind_and_its_remedy():
    page = (Path(__file__).parents[2] / "docs" / "words.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    remedies = {row[0].removeprefix("*in rows:* "): row[-1] for row in rows}
    for kind in KINDS:
        if kind.of != "prompt":
            assert remedies[kind.name.split(" (")[0]] == kind.remedy


def test_a_line_end_of_windows_is_odd_only_where_it_was_read_already():
    oddities = Oddities("line", "line")
    assert b"".join(oddities.watched(iter([b"The dog.\r", b"\nA cat.\r\n"]))) == b"The dog.\r\nA cat.\r\n"
    assert list(oddities.notices()) == []
    assert "control characters" in said("The dog.\r\n")


@pytest.mark.parametrize("line", ["?" * 300_000 + " éé", "a" + "\u0301\u0316" * 100_000, "?? " * 100_000 + "é"])
@pytest.mark.timeout(20)
def test_a_long_line_takes_the_time_of_its_length(line):
    """The square of the length would take minutes."""
    oddities = Oddities("line", "line")
    oddities.search(line.encode())
