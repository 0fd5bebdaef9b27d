"""Texts that tokenizers read in different ways, and vocabularies for them."""

import random

from toys import PROSE

from xlcli.text.base import Tokenizer
from xlcli.text.tokenizers import TOKENIZERS

_WHITE = (" ", "  ", "   ", "\n", "\n\n", "\t", "\r", "\r\n", "\x0b", "\x0c")
_PARTS = (
    *_WHITE,
    *("\x00", "\x1c", "\x85", "\xa0", "\u2028", "\u3000", "\u200d", "\ufeff", "\ufffd", "▁", "␉", "␊", "␍", "▅"),
    *("a", "b", "ab", "aba", "aa", "aaaa", "=", "==", "----", "the", " the", "fox", "dog", " lazy", "1234", "'s"),
    *(
        "é",
        "e\u0301",
        "Å",
        "世",
        "界",
        "漢字",
        "🦊",
        "👩\u200d🚀",
        "<unk>",
        "<eos>",
        "<s>",
        "<0x41>",
        "<0x0A>",
        "\\xff",
    ),
)
_ODD = "aaaa aba abaab ababab\r\n\t----\n== a\u0301 漢字\t🦊 <unk> <eos>\n" * 9
_TRAINED = (PROSE + _ODD).encode() + b"\xff caf\xe9 \\xff\n"
_SIZES = {"sentencepiece": 500, "sentencepiece-small": 350, "words-small": 30}
VOCABULARIES = ("bytes", "sentencepiece", "sentencepiece-small", "words", "words-small")


def texts(n: int) -> list[str]:
    """Odd texts, the empty one first."""
    draw, found = random.Random(0), [""]
    for _ in range(n - 1):
        at, parts = draw.randrange(len(PROSE)), draw.choice((_PARTS, " \n\t\rab", "aab=-", (*_WHITE, "fox", "dog")))
        found.append(draw.choice((PROSE[at : at + 90], "")) + "".join(draw.choices(parts, k=draw.randrange(1, 60))))
    return found


def vocabulary(name: str) -> Tokenizer:
    """One trained on prose and odd words, some of which are not UTF-8."""
    return TOKENIZERS[name.partition("-")[0]].train([_TRAINED], _SIZES.get(name))
