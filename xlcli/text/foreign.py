"""Tokenizers that come with models of others: `tokenizer.json` of Hugging Face, and token ids without a vocabulary.

A text is divided into parts, and each part is tokenized alone. Parts end where neither a token of the vocabulary nor a
pattern of the tokenizer goes on: before a blank or a line end that follows no white space, or where a line begins.
Which of these places are safe for a tokenizer is found out by trying them. So the tokens of the parts are those of the
whole text, however it is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.text.base import REMEDY, PieceTokenizer, Tokenizer
from xlcli.text.pretokenize import Splitter, whole_characters

if TYPE_CHECKING:
    import tokenizers

LONGEST_PART = 2**16 - 1  # maximum bytes of a part; a longer run without a place to cut is cut anyway

_SOLID = rb"(?<=[^\s\x1c-\x1f]%b)(?<![\xc2\x80\x81\x9a][\x80-\x8a\x9f\xa0\xa8\xa9\xaf]%b)"
"""The character before %b is no white space. Some other characters of several bytes are taken for white space, too."""
_WIDE = rb"\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
"""White space of several bytes."""
_BEFORE = ("", "x", "1", "12", "123", "x.", "x'", "é", "漢", "🙂", "e\u0301", "-", "x's", "[", "A", "xA")
_AFTER = ("y", " y", "1", ".", "'y", "\ny", "漢", "\t", "e\u0301", "Y")
_INDENTED = (" y", "  y", "   y", "    .", "\ty", "\t\t1", " \ty", "  漢")
_NOT_ASCII = ("é", "漢", "🙂", "\u0301", "١")

_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_OTHERS = {byte: 256 + i for i, byte in enumerate(sorted({*range(256)} - _PRINTABLE))}
BYTE_CHARACTERS = "".join(chr(_OTHERS.get(byte, byte)) for byte in range(256))
"""The character that stands for each byte in vocabularies of bytes (GPT-2)."""
_BYTE_OF = {ord(char): byte for byte, char in enumerate(BYTE_CHARACTERS)}
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
_REMOVING = ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit")
"""Pre-tokenizers that remove blanks or other characters."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")  # patterns of published tokenizers
_WRITE_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_READ_SPACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}


class PartSplitter(Splitter):
    """Parts that end at the places (of length 0) that a regular expression finds."""

    ends_at_lines = False

    def __init__(self, places: bytes) -> None:
        self._places = re.compile(places)

    def split(self, data: bytes) -> list[bytes]:
        if not data:
            return []
        parts = self._places.split(data)
        if len(data) <= LONGEST_PART:
            return parts
        return [*chain.from_iterable(map(_bounded, parts))]

    def stable_prefix_len(self, data: bytes) -> int:
        return sum(map(len, self.split(data[: whole_characters(data)])[:-1]))


def _bounded(part: bytes) -> list[bytes]:
    """The part in pieces of at most `LONGEST_PART` bytes, between characters and not before a line end."""
    pieces = []
    while len(part) > LONGEST_PART:
        longest = LONGEST_PART
        if part[longest] == ord("\n"):
            longest -= 1
        cut = whole_characters(part[:longest])
        pieces.append(part[:cut])
        part = part[cut:]
    return [*pieces, part]


class TokenizersTokenizer(PieceTokenizer):
    """BPE or unigram of a `tokenizer.json` of Hugging Face that changes no text; a BPE of bytes may lack some of them.

    The names of special tokens are text like any other. Nothing is put before a text (no dummy prefix), and it is not
    brought into the normal form NFC.

    `data` is the file, and `name` its path, for errors. Of the `vocab_size` ids of the model those without a token have
    no text; a text begins with `start_id`. `ConfigError` if the package `tokenizers` is missing, `CheckpointError` if
    the file is damaged, does not fit `vocab_size`, or has a tokenizer that changes text.
    """

    kind = "tokenizers"
    file = "vocabulary.json"
    splitter: PartSplitter
    described = ("vocab_size", "start_id")

    def __init__(self, data: bytes, name: str = file, *, vocab_size: int, start_id: int) -> None:
        super().__init__(data, name)
        self.vocab_size, self.start_id = vocab_size, start_id
        self.fingerprint = sha256(f"tokenizers:{vocab_size}:{start_id}:".encode() + data).hexdigest()
        try:
            content = json.loads(data)
            steps = plain_steps(content["pre_tokenizer"])
            of_bytes = any(step["type"] == "ByteLevel" for step in steps + plain_steps(content["decoder"]))
            texts = _vocabulary(content, of_bytes=of_bytes)
            special_names = {token["id"]: token["content"] for token in content["added_tokens"] if token["special"]}
            # The package must change no text, and have no other ids.
            changes = [step for step in plain_steps(content["normalizer"]) if step != _WRITE_SPACE]
            changes += [step for step in steps if step["type"] in _REMOVING or step.get("behavior") == "Removed"]
            if changes:
                raise _lossy(name, f"{changes[0]['type']!a:.80} changes it or removes a part of it")
            self._model = _load(content)
            if not texts.keys() >= {*self._model.get_vocab().values()}:
                raise ValueError("its added tokens have other ids")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{name} cannot be used: {type(error).__name__} {error!s:.200}.", REMEDY) from None
        if not all(0 <= i < vocab_size for i in {start_id, *texts.keys() - special_names.keys()}):
            raise CheckpointError(f"{name} has tokens that are none of the {vocab_size} of the model.", REMEDY)
        # Names of special tokens are text like any other, so that these tokens are never found.
        texts |= dict.fromkeys(special_names, b"")
        self.separate_ids = [i for i in special_names if i < vocab_size]
        self.special_names = list(special_names.values())
        self._special = re.compile("([\udc80-\udcff])" if of_bytes else f"([{_SPACE}\udc80-\udcff])")
        is_complete = self._set_texts([texts.get(i, b"") for i in range(vocab_size)])
        if not is_complete and (not of_bytes or self._byte_ids[ord("\n")] < 0):
            raise _lossy(name, "it has no tokens for line ends or bytes")
        if not is_complete:
            self.stand_in = next(iter(self._find("\ufffd")), start_id)
        self.splitter = PartSplitter(self._places(b"\r".join(texts.values())))

    def _find(self, text: str) -> list[int]:
        try:
            return self._model.encode(text, add_special_tokens=False).ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as in `_load`
            problem = f"{self._name} cannot encode a part of the text: {error!s:.200}."
            raise CheckpointError(problem, "Leave that part out, or use another model.") from None

    def _places(self, texts: bytes) -> bytes:
        """Regular expression of the places at which a text may be cut; `texts` of all tokens, with CR between them."""
        # After a line end, before each character that no token has behind a line end and no pattern joins to it.
        crossed = b"".join(re.findall(rb"\n(\S)", texts)).decode("latin-1")
        unsafe = ""  # inside of a class of a regular expression
        for ascii_char in map(chr, range(128)):
            if ascii_char in crossed or not self._is_safe("\n", ascii_char):
                unsafe += re.escape(ascii_char)
        if not crossed.isascii() or not self._is_safe("\n", *_NOT_ASCII):
            unsafe += "\x80-\xff"
        solid_line_end = _SOLID % (b"\n", b"\n")
        after_line_end = b"(?:(?<=\\A\n)|%b)" % solid_line_end
        before_safe = b"(?=[^\\s\x1c-\x1f%b])(?!%b)" % (unsafe.encode("latin-1"), _WIDE)
        places = [after_line_end + before_safe]
        # Before a blank or a line end.
        solid = _SOLID % (b"", b"")
        for char in (b" ", b"\n"):
            examples = [char.decode() + text for text in _AFTER]
            if not re.search(solid + char, texts) and self._is_safe("", *examples):
                places.append(solid + b"(?=%b)" % char)
        # Before the indentation of a line.
        indented = {indent.decode() + "y" for indent in re.findall(rb"\n([ \t]+)", texts)}
        shortest_indented = sorted(indented, key=len)[:256]
        if all(self._is_safe(end, *_INDENTED, *shortest_indented) for end in ("\n", "\n\n", " \n")):
            places.append(b"(?<=\n)(?=[ \t]+[^\\s\x1c-\x1f])(?![ \t]+(?:%b))" % _WIDE)
        return b"|".join(places)

    def _is_safe(self, end: str, *examples: str) -> bool:
        """True if text up to `end` has the same tokens alone as before what follows, such as `examples`."""
        parts = [(before + end, example + "y z") for before in _BEFORE for example in examples]
        return all(self._find(head) + self._find(tail) == self._find(head + tail) for head, tail in parts)


def _lossy(name: str, reason: str) -> CheckpointError:
    """The error for a tokenizer that xlcli cannot restore a text from."""
    remedy = "Import a copy of the model without it, and give token ids instead of text."
    return CheckpointError(f"{name} has a tokenizer that loses text: {reason}.", remedy)


def plain_steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a sequence, without those that only add something before a text, and without NFC."""
    if step is None or step["type"] in ("NFC", "Prepend"):
        return []
    if step["type"] == "Sequence":
        [key] = {"normalizers", "pretokenizers", "decoders"} & step.keys()
        return [plain_step for part in step[key] for plain_step in plain_steps(part)]
    if step["type"] == "ByteLevel":
        return [step | {"add_prefix_space": False}]
    if step["type"] == "Metaspace":
        return [{key: step[key] for key in step if key != "add_prefix_space"} | {"prepend_scheme": "never"}]
    return [step]


def _vocabulary(content: dict[str, Any], *, of_bytes: bool) -> dict[int, bytes]:
    """Returns the text of each token by its id; `ValueError` if the tokenizer is neither BPE nor unigram."""
    model = content["model"]
    kind = model.get("type", "BPE")  # older files of BPE, such as that of GPT-2, do not say it
    has_affix = model.get("end_of_word_suffix") or model.get("continuing_subword_prefix")
    if kind not in ("BPE", "Unigram") or has_affix:
        raise ValueError("it is neither BPE nor unigram")
    if kind == "BPE":
        ids = model["vocab"]
    else:
        ids = {token: i for i, (token, _) in enumerate(model["vocab"])}
    texts: dict[int, bytes] = {}
    for token in content["added_tokens"]:  # whose texts are as given, while those of the others are spelled
        text = token["content"] if of_bytes else token["content"].replace(_SPACE, " ")
        texts[token["id"]] = text.encode()
    return texts | {i: _text(token, of_bytes=of_bytes) for token, i in ids.items() if i not in texts}


def _text(token: str, *, of_bytes: bool) -> bytes:
    if of_bytes:
        return token.translate(_BYTE_OF).encode("latin-1")
    byte = _BYTE_PIECE.fullmatch(token)
    if byte:
        return bytes.fromhex(byte[1])
    return token.replace(_SPACE, " ").encode()


def _load(content: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer without what it adds to a text. `ConfigError` without the package, `ValueError` if that refuses."""
    try:
        from tokenizers import Tokenizer as Package
    except ImportError:
        reason = "the tokenizer of this model needs the package tokenizers."
        raise ConfigError(reason, "Install it: pip install tokenizers") from None
    changed = content | dict.fromkeys(("truncation", "padding", "post_processor"))
    changed["added_tokens"] = [token | {"lstrip": False, "rstrip": False} for token in content["added_tokens"]]
    for name, key in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        steps = plain_steps(content[name])
        changed[name] = {"type": "Sequence", key: steps} if steps else None
    if "dropout" in content["model"]:
        changed["model"] = content["model"] | {"dropout": None}
    try:
        package: tokenizers.Tokenizer = Package.from_str(json.dumps(changed))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package has no class of its own, and its panics are no `Exception`
        raise ValueError(str(error)) from None
    package.encode_special_tokens = True
    return package


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of pieces of sentencepiece
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3  # numbers of the parts of a model of sentencepiece
_MOST_MERGES = 2**20  # most merges of a model of sentencepiece: four for each piece of a vocabulary of 262,144
LARGEST_PIECES = 2**23  # maximum bytes of a model of sentencepiece: twice as many as of the largest published ones
_MOST_CHARACTERS, _MOST_ADDED = 2**22, 2**14  # sum of the lengths of all tokens; number of added (special) ones
RULES = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def converted(name: str, *files: bytes) -> bytes:
    """The `tokenizer.json` of a model of sentencepiece, or of `vocab.json` of GPT-2 and the files beside it."""
    make = _of_sentencepiece if len(files) == 1 else _of_merges
    return tokenizer_json(name, partial(make, *files), "Add the tokenizer.json of the model to its folder.")


def tokenizer_json(name: str, make: Callable[[], dict[str, Any]], remedy: str) -> bytes:
    """The `tokenizer.json` of a function; `CheckpointError` with this remedy if it fails at what it is made of."""
    try:
        tree = dict.fromkeys(("normalizer", "pre_tokenizer", "decoder")) | make()
        return json.dumps(tree).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{name} holds no vocabulary that can be read: {type(error).__name__} {error!s:.200}"
        raise CheckpointError(f"{problem}.", remedy) from None


def _of_merges(pieces: bytes, merges: bytes, added: bytes, special: bytes) -> dict[str, Any]:
    """BPE of bytes, with tokens that are added to it or special."""
    vocabulary, added_ids = json.loads(pieces), json.loads(added)
    special_names = {"<|endoftext|>"}
    for value in json.loads(special).values():
        for token in value if isinstance(value, list) else [value]:
            special_names.add(token["content"] if isinstance(token, dict) else token)
    added_ids |= {name: vocabulary[name] for name in special_names & vocabulary.keys()}
    added_tokens = []
    for name, i in added_ids.items():
        added_tokens.append(RULES | {"id": i, "content": name, "special": name in special_names})
    pairs = [line for line in merges.decode().splitlines() if line and not line.startswith("#version")]
    return {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": pairs},
        "added_tokens": added_tokens,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    }


def _of_sentencepiece(data: bytes) -> dict[str, Any]:
    """BPE or unigram, with the tokens that sentencepiece gives to a text after the blank that it adds."""
    names, scores, kinds = pieces(data)
    messages = {_TRAINER: bytearray(), _NORMALIZER: bytearray()}
    for number, value in _fields(data):
        if number in messages:
            messages[number] += value
    trainer = dict(_fields(bytes(messages[_TRAINER])))
    normalizer = dict(_fields(bytes(messages[_NORMALIZER])))
    if trainer.get(3, 1) not in (1, 2):
        raise ValueError("it is neither BPE nor unigram")
    changes = normalizer.get(2) or normalizer.get(4, 1)  # a table of characters, or blanks that are removed
    return of_pieces(names, scores, kinds, is_unigram=trainer.get(3, 1) == 1, changes=bool(changes))


def pieces(data: bytes) -> tuple[list[str], list[float], list[int]]:
    """Name, score and type of each piece of a model of sentencepiece; `ValueError` if it is too large."""
    if len(data) > LARGEST_PIECES:
        raise ValueError(f"it has more than {LARGEST_PIECES:,} bytes")
    names, scores, kinds = list[str](), bytearray(), list[int]()
    for number, value in _fields(data):
        if number == _PIECE:
            row: dict[int, Any] = {2: bytes(4), 3: NORMAL} | dict(_fields(value))
            names.append(row[1].decode())
            scores += row[2]
            kinds.append(row[3])
    return names, np.frombuffer(scores, "<f4").tolist(), kinds


def _merges(ranks: Mapping[str, tuple[float, int]]) -> list[tuple[str, str]]:
    """All pairs of pieces that are a piece together, by the rank of that piece: sentencepiece joins these neighbors."""
    ranked: list[tuple[tuple[float, int], str, str]] = []
    for name, rank in ranks.items():
        for n in range(1, len(name)):
            left, right = name[:n], name[n:]
            if left in ranks and right in ranks:
                ranked.append((rank, left, right))
        if len(ranked) > _MOST_MERGES:
            raise ValueError(f"its pieces consist of others in more than {_MOST_MERGES:,} ways")
    return [(left, right) for _, left, right in sorted(ranked)]


def of_pieces(
    names: list[str], scores: list[float], kinds: list[int], *, is_unigram: bool, changes: bool
) -> dict[str, Any]:
    """BPE or unigram of these pieces; `changes` says that a text is changed before it is divided."""
    ids = {name: i for i, name in enumerate(names)}
    unknown = kinds.index(UNKNOWN)
    if len(ids) < len(names) or max(map(len, ids)) > 256:
        raise ValueError("it has a piece twice or of more than 256 characters")
    if is_unigram:
        model = {"type": "Unigram", "unk_id": unknown, "vocab": [*zip(names, scores, strict=True)]}
    else:
        ranks = {name: (-scores[i], i) for name, i in ids.items() if kinds[i] == NORMAL}
        model = {"type": "BPE", "vocab": ids, "merges": _merges(ranks), "unk_token": names[unknown], "fuse_unk": True}
    return {
        "model": model | {"byte_fallback": True},
        "added_tokens": added(names, kinds),
        "normalizer": {"type": "NFKC"} if changes else _WRITE_SPACE,
        "decoder": {"type": "Sequence", "decoders": [_READ_SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    }


def added(names: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens that are found before a text is divided into pieces, and those that are never found in it."""
    rows = [(i, name, kinds[i]) for i, name in enumerate(names) if kinds[i] in (UNKNOWN, CONTROL, USER_DEFINED)]
    if sum(map(len, names)) > _MOST_CHARACTERS or len(rows) > _MOST_ADDED:
        raise ValueError("it has too many or too long tokens")
    return [
        RULES | {"id": i, "content": name, "special": kind != USER_DEFINED, "normalized": _SPACE in name}
        for i, name, kind in rows
    ]


_LONGEST_NUMBER = 10  # bytes
_NUMBER_ITSELF, _FOUR_BYTES = 0, 5  # types of the fields of a message that are not bytes with their size


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message of Protocol Buffers: a number, or bytes with their size or four."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        field, wire_type = key >> 3, key & 7
        if wire_type == _NUMBER_ITSELF:
            number, at = _number(data, at)
            yield field, number
            continue
        size = 4
        if wire_type != _FOUR_BYTES:
            size, at = _number(data, at)
        yield field, data[at : at + size]
        at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number, seven bits a byte, the lowest first, and the offset after it. The highest bit says that more follow."""
    number = 0
    for i, byte in enumerate(data[at : at + _LONGEST_NUMBER]):
        number |= (byte & 0b0111_1111) << 7 * i
        is_last = byte < 0b1000_0000
        if is_last:
            return number, at + i + 1
    return number, at + _LONGEST_NUMBER


_NUMBER = re.compile(rb"\S+(?:[^\S\n]*\n)?")
_MOST_DIGITS = 10


class IdSplitter(Splitter):
    """Parts are numbers with the white space before them and the end of their line."""

    ends_at_lines = False

    def stable_prefix_len(self, data: bytes) -> int:
        ends = [match.end() for match in _NUMBER.finditer(data)]
        if ends and data[ends[-1] - 1] != ord("\n"):
            ends.pop()  # more digits may come
        if ends:
            return ends[-1]
        is_too_long = len(data) > LONGEST_PART  # for a number
        return len(data) if is_too_long else 0

    def flushable_len(self, data: bytes) -> int:
        return 0  # more digits may come


class IdsTokenizer(Tokenizer):
    """Decimal ids of tokens, separated by white space, of a model without a vocabulary."""

    kind = "ids"
    described = ("vocab_size", "start_id")
    id_sizes = None
    caveat = "the text is token ids: compare models by perplexity per token; bytes are those of the numbers"

    def __init__(self, vocab_size: int, start_id: int) -> None:
        super().__init__()
        if not 0 <= start_id < vocab_size:
            raise CheckpointError(f"start_id {start_id} is none of {vocab_size} tokens.", REMEDY)
        self.vocab_size, self.start_id = vocab_size, start_id
        self.fingerprint = sha256(f"ids:{vocab_size}:{start_id}".encode()).hexdigest()
        self.splitter, self.separate_ids = IdSplitter(), range(vocab_size)

    def tokens(self, data: bytes, at: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids, and the size of each with white space; both (t), empty for white space alone."""
        ids: list[int] = []
        ends = [0]
        for match in _NUMBER.finditer(data):
            number = match[0].rstrip()
            is_too_long = match.end() - ends[-1] > LONGEST_PART or len(number) > _MOST_DIGITS
            if not number.isdigit() or is_too_long or int(number) >= self.vocab_size:
                shown = number[:20].decode("utf-8", "replace")
                problem = f"at byte {at + match.start()} of the text, {shown!r} is no token of the model."
                ids_of_model = f"ids from 0 to {self.vocab_size - 1}"
                raise DataError(problem, f"Give {ids_of_model}, separated by white space: the model has no vocabulary.")
            ids.append(int(number))
            ends.append(match.end())
        if ids:
            ends[-1] = len(data)  # the last one has the white space after it
        return np.array(ids, np.int32), np.diff(ends).astype(np.int32)

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        return b" ".join([b"%d" % i for i in ids])
