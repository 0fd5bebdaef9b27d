"""Which encoding bytes are in that are not UTF-8, and text of an alphabet that was read in another of its encodings."""

import pytest

from xlcli.text.misreadings import conversion, find, likely_encodings

# From the Universal Declaration of Human Rights.
TEXTS = {
    "Arabic": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. وقد وهبوا عقلا وضميرا وعليهم أن يعامل بعضهم بعضا",
    "Persian": "تمام افراد بشر آزاد به دنيا مى آيند و از لحاظ حيثيت و حقوق با هم برابرند. همه داراى عقل و وجدان",
    "Hebrew": "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם. כולם חוננו בתבונה ובמצפון",
    "Russian": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью",
    "Ukrainian": "Всі люди народжуються вільними і рівними у своїй гідності та правах. Вони наділені розумом і совістю",
    "Uzbek": "Барча одамлар эркин, қадр-қиммат ва ҳуқуқларда тенг бўлиб туғиладилар. Улар ақл ва виждон соҳибидирлар",
    "Greek": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. Είναι προικισμένοι",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม",
    "Chinese": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "Taiwanese": "人人生而自由，在尊嚴和權利上一律平等。他們賦有理性和良心，並應以兄弟關係的精神相對待。",
    "Dialogue": "“天气很好，”他说，“我们去吧！”她问：“去哪儿？”“去公园。”他回答。",
    "Japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 양심을",
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten. Sie sollen einander Größe wünschen, täglich",
    "French": "Tous les êtres humains naissent libres et égaux en dignité. Ils sont doués de raison et de conscience",
    "Polish": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni obdarzeni",
}
ENCODINGS = {
    "Arabic": ["cp1256", "iso-8859-6", "cp720"],
    "Persian": ["cp1256"],
    "Hebrew": ["cp1255", "cp862"],
    "Russian": ["cp1251", "koi8-r", "cp866", "iso-8859-5"],
    "Ukrainian": ["cp1251"],
    "Greek": ["cp1253", "cp737"],
    "Thai": ["cp874"],
    "Chinese": ["gb18030"],
    "Taiwanese": ["big5"],
    "Dialogue": ["gb18030"],
    "Japanese": ["euc-jp", "shift-jis"],
    "Korean": ["euc-kr"],
    "German": ["cp1252", "macintosh"],
    "French": ["cp1252", "macintosh"],
    "Polish": ["cp1250"],
}


def damaged(data):
    """The bytes from the first one on that is not UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[error.start :]
    raise AssertionError


@pytest.mark.parametrize(
    ("language", "encoding"), [(language, each) for language, encodings in ENCODINGS.items() for each in encodings]
)
def test_the_first_encoding_that_is_named_reads_the_text(language, encoding):
    for n_times in (1, 100):
        data = damaged((TEXTS[language] * n_times).encode(encoding))
        found = likely_encodings(data)
        assert len(found) in (1, 2)
        assert data.decode(found[0]) == data.decode(encoding)
        assert f"iconv -f {found[0]} -t utf-8" in conversion(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 9,
        bytes(range(0x80, 0x100)),
        "Zürich ist groß, ".encode() + b"sch\xf6n und " + "größer, äußerst".encode(),  # UTF-8 but for one byte
    ],
)
def test_no_encoding_is_named_of_what_is_no_text_in_one(data):
    assert likely_encodings(damaged(data)) == []


def test_a_text_in_utf8_with_some_damage_is_not_to_be_converted_from_another_encoding():
    data = b"\xf6n und " + "größer, äußerst groß".encode()
    assert "iconv -c -f utf-8" in conversion(data)


def misread(text, written, read):
    return "".join(bytes([byte]).decode(read, "ignore") or chr(byte) for byte in text.encode(written))


@pytest.mark.parametrize(
    ("language", "written", "read"),
    [
        ("Arabic", "iso-8859-6", "cp1256"),
        ("Arabic", "cp1256", "iso-8859-6"),
        *(("Russian", written, read) for written in ("koi8-r", "cp866", "iso-8859-5") for read in ("cp1251",)),
        ("Russian", "cp1251", "koi8-r"),
        ("Ukrainian", "cp1251", "koi8-r"),
        ("Japanese", "shift-jis", "latin-1"),
        ("Japanese", "shift-jis", "cp1252"),
    ],
)
def test_an_alphabet_in_another_of_its_encodings_is_named(language, written, read):
    found = find(misread(TEXTS[language], written, read))
    assert found is not None
    assert found.diagnosis.endswith(f" in {written}, read as {read}")


@pytest.mark.parametrize("read", ["latin-1", "cp1252"])
@pytest.mark.parametrize(
    "text", ["नमस्ते, आज मौसम बहुत अच्छा है।", "გამარჯობა, დღეს კარგი ამინდია", "ሰላም፣ ዛሬ ጥሩ ነው።", "இன்று வானிலை"]
)
def test_utf8_of_any_script_is_known_in_western_encodings(text, read):
    found = find(misread(text, "utf-8", read))
    assert found is not None
    assert found.diagnosis == f"UTF-8 read as {read}"
    assert find(text) is None


@pytest.mark.parametrize("language", TEXTS)
def test_a_text_in_its_own_alphabet_is_not_misread(language):
    text = TEXTS[language]
    for start in range(0, len(text), 7):
        for n in (15, 40, 200):
            piece = text[start : start + n]
            assert find(piece) is None
            assert find(piece.upper()) is None
