"""Tokenizers that come with models of others: `tokenizer.json` of Hugging Face, and token ids without a vocabulary.

A text is divided into parts, and each part is tokenized alone. Parts end where neither a token of the vocabulary nor a
pattern of the tokenizer goes on: before a blank, or between a line end and the next line, if the character before it is
no white space. Which of these places are safe for a tokenizer is found out by trying them. So the tokens of the parts
are those of the whole text, however it is cut.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.text.base import REMEDY, Tokenizer, WordCache
from xlcli.text.pretokenize import Splitter, whole_characters

if TYPE_CHECKING:
    import tokenizers

LONGEST_PART = 2**16 - 1
"""Maximum bytes of a part; a longer run without a place to cut is cut anyway."""

_SOLID = rb"(?<=[^\s\x1c-\x1f]%b)(?<![\xc2\x80\x81\x9a][\x80-\x8a\x85\x9f\xa0\xa8\xa9\xaf]%b)"
"""The character before %b is no white space. Some other characters of several bytes are taken for white space, too."""
_BEFORE = ("x", "1", "12", "123", "x.", "x'", "é", "漢", "🙂", "e\u0301", "-", "x's", "[", "A", "xA")
_AFTER_BLANK = (" y", "  y", " 1", " .", " 'y", " \ny", " 漢", " \t", " e\u0301", " Y")
_NOT_ASCII = (
    rb"[\x80-\xc1\xc3-\xe0\xe4-\xff]|\xc2[\x80-\x84\x86-\x9f\xa1-\xbf]|\xe1[\x80-\x99\x9b-\xbf]|\xe2[\x82-\xbf]|"
    rb"\xe3[\x81-\xbf]"
)
"""The beginning of a character that is neither ASCII nor white space."""
_OTHERS = ("é", "漢", "🙂", "\u0301", "١")

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)}
"""Characters that stand for bytes in vocabularies of bytes (GPT-2)."""
_TO_LATIN = str.maketrans(_BYTES)
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
_WRITE_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_NOT_UTF8 = re.compile("([\\udc80-\\udcff])")


class PartSplitter(Splitter):
    """Parts that end before a blank or behind another text that a regular expression finds."""

    ends_at_lines = False
    _reach = 4
    """Bytes before a place that decide about it."""

    def __init__(self, places: bytes) -> None:
        self._places = re.compile(places)

    def split(self, data: bytes) -> list[bytes]:
        """The parts of a text that starts where a part does."""
        ends = [*self._ends(data, 0), len(data)]
        parts = [data[start:end] for start, end in zip([0, *ends], ends, strict=False) if start < end]
        if len(data) <= LONGEST_PART:
            return parts
        return [piece for part in parts for piece in self._bounded(part)]

    def stable_prefix_len(self, data: bytes, known: int = 0) -> int:
        """Length of the longest prefix of `data` that is whole parts for any continuation; 0 if there is none."""
        size, start, first, least = 2**8, 0, len(data), max(0, known - self._reach)
        while not start and first > least:
            first = max(least, len(data) - size)
            start, size = max(self._ends(data, first), default=0), 8 * size
        return start + sum(map(len, self._bounded(data[start:])[:-1]))

    def _bounded(self, part: bytes) -> list[bytes]:
        """The part in pieces of at most `LONGEST_PART` bytes, between characters and not before a line end."""
        pieces, start = [], 0
        while len(part) - start > LONGEST_PART:
            stop = start + LONGEST_PART
            stop = start + whole_characters(part[start : stop - (part[stop] == ord("\n"))])
            pieces.append(part[start:stop])
            start, self.has_cut = stop, True
        return [*pieces, part[start:]]

    def _ends(self, data: bytes, first: int) -> Iterator[int]:
        return (match.end() - (match[0] == b" ") for match in self._places.finditer(data, first))


class TokenizersTokenizer(Tokenizer):
    """BPE or unigram of a `tokenizer.json` of Hugging Face.

    The names of special tokens are text like any other. Nothing is put before a text (no dummy prefix), and it is not
    brought into the normal form NFC. So a vocabulary with all bytes spells every text, unless there is another
    normalizer: then, or without all bytes, `is_lossless` is false, and sizes count the bytes of the text as it was.

    Args:
        data: The file.
        name: Its path, for errors.
        vocab_size: Number of ids of the model; those without a token have no text.
        start_id: Id of the token that begins a text.

    Raises:
        ConfigError: The package `tokenizers` is missing, or the tokenizer is of another kind.
        CheckpointError: The file is damaged, or does not fit `vocab_size`.
    """

    kind = "tokenizers"
    file = "vocabulary.json"
    described = ("vocab_size", "start_id")

    def __init__(self, data: bytes, name: str = file, *, vocab_size: int, start_id: int) -> None:
        super().__init__(data, name)
        self.vocab_size, self.start_id = vocab_size, start_id
        self.fingerprint = sha256(f"tokenizers:{vocab_size}:{start_id}:".encode() + data).hexdigest()
        try:
            content = json.loads(data)
            model, steps = content["model"], _steps(content["pre_tokenizer"]) + _steps(content["decoder"])
            of_bytes = any(step["type"] == "ByteLevel" for step in steps)
            if model["type"] == "BPE":
                ids, unknown = model["vocab"], model["vocab"].get(model["unk_token"])
            else:
                ids, unknown = {token: i for i, (token, _) in enumerate(model["vocab"])}, model["unk_id"]
            if model["type"] not in ("BPE", "Unigram") or model.get("end_of_word_suffix"):
                raise ValueError("it is neither BPE nor unigram")
            if len({*ids.values()}) < len(ids):
                raise ValueError("two tokens have one id")
            special = {token["id"] for token in content["added_tokens"] if token["special"]}
            texts = {i: _text(token, of_bytes=of_bytes) for token, i in ids.items()}
            is_byte = _BYTES.__contains__ if of_bytes else _BYTE_PIECE.fullmatch
            byte_ids = {texts[i]: i for token, i in ids.items() if is_byte(token) and i not in special}
            joined = b"\0".join(texts.values())
            texts |= {token["id"]: token["content"].encode() for token in content["added_tokens"]}
            normalizers = _steps(content["normalizer"])
            self.is_lossless = len(byte_ids) == 256 and all(step == _WRITE_SPACE for step in normalizers)
            self._model = _load(content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{name} cannot be used: {type(error).__name__} {error!s:.200}.", REMEDY) from None
        if not all(0 <= i < vocab_size for i in {start_id, *texts} - special):
            raise CheckpointError(f"{name} has tokens that are none of the {vocab_size} of the model.", REMEDY)
        self._text = [b"" if i in special else texts.get(i, b"") for i in range(vocab_size)]
        self._byte_ids = [byte_ids.get(bytes([value]), start_id) for value in range(256)]
        self.id_sizes = np.array([len(text) for text in self._text], np.int32) if self.is_lossless else None
        self.unknown_id = None if self.is_lossless else unknown
        self._special = special - {self.unknown_id}
        self.separate_ids = [i for i in self._special if i < vocab_size]
        self.splitter: PartSplitter = PartSplitter(self._places(joined))
        self._cache = WordCache(self._encode_part)

    def tokens(self, data: bytes, at: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids of `data`, and the bytes of text of each, whose sum is `len(data)`; both (t)."""
        found = np.frombuffer(b"".join(map(self._cache.__getitem__, self.splitter.split(data))), np.int32)
        if self.id_sizes is not None:
            return found, self.id_sizes[found]
        ids, sizes = found.reshape(-1, 2).T.copy()
        return ids, sizes

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """Text of `ids`, each decoded independently; special tokens have none."""
        return b"".join([self._text[i] for i in ids])

    def take_notices(self) -> list[str]:
        """What one should know of the scores of texts that were tokenized since the last call."""
        changed = "the tokenizer of this model does not keep every character: bits per byte are lower than without loss"
        cut = f"text without blanks is cut every {LONGEST_PART:,} bytes, where the tokenizer might not"
        was_cut, self.splitter.has_cut = self.splitter.has_cut, False
        return [changed] * (not self.is_lossless) + [cut] * was_cut

    def _encode_part(self, part: bytes) -> bytes:
        """Ids as bytes of int32; each with its size behind it if the tokenizer is not lossless."""
        text, found = part.decode(errors="surrogateescape"), list[int]()
        if not self.is_lossless:
            return np.array([*self._sized(text)], np.int32).tobytes()
        for i, piece in enumerate(_NOT_UTF8.split(text)):  # every second one is a byte that is not UTF-8
            found += [self._byte_ids[ord(piece) - 0xDC00]] if i % 2 else self._spell(piece)
        return np.array(found, np.int32).tobytes()

    def _spell(self, text: str) -> list[int]:
        """Ids whose texts are `text`: of bytes where the tokenizer would change it, or find a special token."""
        ids = self._find(text).ids
        if self.decode(ids) == text.encode():
            return ids
        half = len(text) // 2
        if not half:
            return [self._byte_ids[byte] for byte in text.encode()]
        return self._spell(text[:half]) + self._spell(text[half:])

    def _sized(self, text: str) -> Iterator[tuple[int, int]]:
        """Ids of a text that may be changed, each with its bytes; a byte that is not UTF-8 becomes U+FFFD."""
        found, half = self._find(_NOT_UTF8.sub("\ufffd", text)), len(text) // 2
        is_text = bool(found.ids) and self._special.isdisjoint(found.ids)
        if half and found.ids and not is_text:
            yield from self._sized(text[:half])
            yield from self._sized(text[half:])
            return
        ids = found.ids if is_text else [self.start_id if self.unknown_id is None else self.unknown_id]
        n_bytes = [0, *itertools.accumulate(len(char.encode(errors="surrogateescape")) for char in text)]
        ends = [*itertools.accumulate((n_bytes[end] for _, end in found.offsets), max)][: len(ids) - 1]
        yield from zip(ids, map(operator.sub, [*ends, n_bytes[-1]], [0, *ends]), strict=True)

    def _find(self, text: str) -> tokenizers.Encoding:
        try:
            return self._model.encode(text, add_special_tokens=False)
        except Exception as error:  # the package has no class of its own
            raise CheckpointError(f"{self._name} cannot encode text: {error}.", REMEDY) from None

    def _places(self, texts: bytes) -> bytes:
        """Regular expression of the places at which a text may be cut; `texts` of all tokens, with NUL between them."""
        places, after = [], {*re.findall(rb"\n(\S)", texts)}
        if not re.search(rb"[^\s\0] ", texts) and self._is_safe("", _AFTER_BLANK):
            places.append(b" " + _SOLID % (b" ", b" "))
        if self.is_lossless:  # unknown characters may be joined beyond a line end
            chars = [char for char in map(chr, range(33, 127)) if char.encode() not in after]
            begins = [b"[%b]" % re.escape(char).encode() for char in chars if self._is_safe("\n", [char])]
            begins += [_NOT_ASCII] * (max(after, default=b"") < b"\x80" and self._is_safe("\n", _OTHERS))
            places += [b"\n" + _SOLID % (b"\n", b"\n") + b"(?=%b)" % b"|".join(begins)] * bool(begins)
        return b"|".join(places) or b"(?!)"

    def _is_safe(self, end: str, examples: Iterable[str]) -> bool:
        """True if text up to `end` has the same tokens alone as before what follows, such as `examples`."""
        pairs = [(before + end, after + "y z") for before, after in itertools.product(_BEFORE, examples)]
        return all(self._find(a).ids + self._find(b).ids == self._find(a + b).ids for a, b in pairs)


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a sequence, without those that only add something before a text, and without NFC."""
    if step is None or step["type"] in ("NFC", "Prepend"):
        return []
    if step["type"] == "Sequence":
        parts = next(step[key] for key in ("normalizers", "pretokenizers", "decoders") if key in step)
        return [each for part in parts for each in _steps(part)]
    if step["type"] == "ByteLevel":
        return [step | {"add_prefix_space": False}]
    if step["type"] == "Metaspace":
        return [{key: step[key] for key in step if key != "add_prefix_space"} | {"prepend_scheme": "never"}]
    return [step]


def _text(token: str, *, of_bytes: bool) -> bytes:
    """Text of a token of the vocabulary."""
    if of_bytes:
        return token.translate(_TO_LATIN).encode("latin-1")
    byte = _BYTE_PIECE.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_SPACE, " ").encode()


def _load(content: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer without what it adds to a text.

    Raises:
        ConfigError: The package is missing.
        ValueError: The package does not read it.
    """
    try:
        from tokenizers import Tokenizer as Package
    except ImportError:
        raise ConfigError(
            "the tokenizer of this model needs the package tokenizers.", "Install it: pip install 'xlcli[import]'"
        ) from None
    changed = content | dict.fromkeys(("truncation", "padding", "post_processor"))
    for name, key in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        steps = _steps(content[name])
        changed[name] = {"type": "Sequence", key: steps} if steps else None
    if "dropout" in content["model"]:
        changed["model"] = content["model"] | {"dropout": None}
    try:
        package = Package.from_str(json.dumps(changed))
    except Exception as error:  # the package has no class of its own
        raise ValueError(str(error)) from None
    package.encode_special_tokens = True
    return package


_NUMBER = re.compile(rb"\s*\S+(?:[^\S\n]*\n)?")


class IdSplitter(PartSplitter):
    """Parts are numbers with white space."""

    _reach = LONGEST_PART

    def __init__(self) -> None:
        super().__init__(rb"\S[^\S\n]*\n|\S(?=[^\S\n]+\S)")

    def flushable_len(self, data: bytes) -> int:
        """0: more digits may come."""
        return 0


class IdsTokenizer(Tokenizer):
    """Decimal ids of tokens, separated by white space, of a model without a vocabulary."""

    kind = "ids"
    described = ("vocab_size", "start_id")
    id_sizes = None
    is_lossless = False

    def __init__(self, vocab_size: int, start_id: int) -> None:
        super().__init__()
        if not 0 <= start_id < vocab_size:
            raise CheckpointError(f"start_id {start_id} is none of {vocab_size} tokens.", REMEDY)
        self.vocab_size, self.start_id = vocab_size, start_id
        self.fingerprint = sha256(f"ids:{vocab_size}:{start_id}".encode()).hexdigest()
        self.splitter, self.separate_ids = IdSplitter(), range(vocab_size)

    def tokens(self, data: bytes, at: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids, and the size of each with white space; both (t), empty for white space alone."""
        ids, ends = list[int](), [0]
        for match in _NUMBER.finditer(data):
            number, size = match[0].strip(), match.end() - match.start()
            if not number.isdigit() or size > LONGEST_PART or len(number) > 10 or int(number) >= self.vocab_size:
                place, shown = at + match.end() - len(match[0].lstrip()), number[:20].decode("utf-8", "replace")
                raise DataError(
                    f"at byte {place} of the text, {shown!r} is no token of the model.",
                    f"Give ids from 0 to {self.vocab_size - 1}, separated by white space: the model has no vocabulary.",
                )
            ids.append(int(number))
            ends.append(match.end())
        ends[-1] = len(data) if ids else 0
        return np.array(ids, np.int32), np.diff(ends).astype(np.int32)

    def take_notices(self) -> list[str]:
        """What one should know of the scores of texts that were tokenized since the last call."""
        return ["the text is token ids: compare models by perplexity per token; bytes are those of the numbers"]

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """Each number followed by a space."""
        return b"".join([b"%d " % i for i in ids])
