"""Sentencepiece tokenizer (byte-pair encoding), lossless for any bytes.

Tab, line end and carriage return, which the sentencepiece trainer strips or refuses, are replaced by their Unicode
pictures. A word that its pieces do not decode to (invalid UTF-8, U+2581, the pictures themselves) is spelled in
byte pieces <0xNN> where needed. Words are encoded independently and cached. A line end is always a separate piece:
if ":" and a line end were one piece, a prompt that ends in ":" could not continue as in the training text.

Byte-pair encoding, not the unigram model: on the same text and vocabulary size it had more bytes per token, trained in
a tenth of the time, and has no float sum whose rounding depends on the length of the text.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.text.pretokenize import split_words, whole_words
from xlcli.text.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

FILE = "tokenizer.model"
LARGEST_FILE = 2**25
"""Maximum bytes of a sentencepiece model; one of 2^20 pieces is smaller."""
SMALLEST_VOCABULARY = 300
DEFAULT_VOCABULARY = 2048
CACHED_WORDS = 2**15
"""Maximum number of words whose ids are cached."""

_SPACE = "\u2581"
_PICTURES = {"\t": "\u2409", "\n": "\u240a", "\r": "\u240d"}
_TO_PICTURES = str.maketrans(_PICTURES)
_DECODED = {picture: char for char, picture in _PICTURES.items()} | {_SPACE: " "}
_FROM_PICTURES = str.maketrans(_DECODED)
_UNTRAINABLE = frozenset({*_DECODED, "\u2585", "\0"})
"""Characters with a special meaning here or in the trainer; words that contain one are not trained on."""
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
_FIXED_PIECES = 257
"""256 byte pieces and <unk>, which is never used."""
_COVERAGE = 0.9995
"""Share of the text covered by characters that have a piece; rarer ones are spelled in byte pieces."""
_CACHED_BYTES = 48
_REMEDY = "Copy the model folder again from its source."


class SentencePieceTokenizer(Tokenizer):
    """Sentencepiece model with byte fallback.

    Args:
        proto: Serialized sentencepiece model with all 256 byte pieces.
        name: Its file, for error messages.

    Raises:
        CheckpointError: `proto` is not such a model.
    """

    kind = "sentencepiece"

    def __init__(self, proto: bytes, name: str = FILE) -> None:
        from sentencepiece import SentencePieceProcessor

        if len(proto) > LARGEST_FILE:
            raise CheckpointError(f"{name} has {len(proto)} bytes, more than any tokenizer.", _REMEDY)
        model = SentencePieceProcessor()
        try:
            model.LoadFromSerializedProto(proto)
            pieces = [model.IdToPiece(i) for i in range(model.GetPieceSize())]
        except (RuntimeError, ValueError, OSError):
            raise CheckpointError(f"{name} is not a sentencepiece model, or is damaged.", _REMEDY) from None
        self._model: SentencePieceProcessor = model
        self._proto = proto
        self._name = name
        self.vocab_size = len(pieces)
        self.fingerprint = sha256(b"sentencepiece" + proto).hexdigest()
        self._text: list[bytes] = []
        byte_ids: dict[int, int] = {}
        for i, piece in enumerate(pieces):
            if model.IsByte(i) and _BYTE_PIECE.fullmatch(piece):
                byte_ids[int(piece[3:5], 16)] = i
                self._text.append(bytes([int(piece[3:5], 16)]))
            elif model.IsUnknown(i) or model.IsControl(i):
                self._text.append(b"")
            else:
                self._text.append(piece.translate(_FROM_PICTURES).encode())
        if len(byte_ids) != 256:
            raise CheckpointError(
                f"{name} has no byte pieces, so it cannot encode every text.", "Train it with byte fallback."
            )
        self._byte_ids = [byte_ids[value] for value in range(256)]
        self.id_sizes = np.array([len(text) for text in self._text], np.int32)
        self._cache = _WordCache(self)
        self.start_id = int(self.encode(b"\n")[0])

    def encode(self, data: bytes) -> NDArray[np.int32]:
        """Ids of `data`, any bytes that start at a word boundary; `decode` is the inverse."""
        return np.frombuffer(b"".join(map(self._cache.__getitem__, split_words(data))), np.int32)

    def sizes(self, ids: NDArray[np.int32] | Sequence[int], data: bytes) -> NDArray[np.int32]:
        """Bytes of text of each of `ids`, the tokens of `data`; their sum is `len(data)`."""
        return self.id_sizes[np.asarray(ids, np.intp)]

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """Text of `ids`, each decoded independently."""
        return b"".join([self._text[i] for i in ids])

    def files(self) -> dict[str, bytes]:
        """The sentencepiece model."""
        return {FILE: self._proto}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The tokenizer saved in `folder`.

        Raises:
            CheckpointError: The file is missing, too large, damaged or has no byte pieces.
        """
        from xlcli.files import read_bounded

        return cls(read_bounded(folder / FILE, LARGEST_FILE), str(folder / FILE))

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int | None = None) -> Self:
        """Trains a tokenizer of about `vocab_size` pieces (None: 2048), fewer for a short text.

        Deterministic, given the text in `chunks` and the size. Time and memory grow with the text, so give a sample.

        Raises:
            ConfigError: `vocab_size` is too small for the byte pieces.
            DataError: The text is empty.
        """
        vocab_size = vocab_size or DEFAULT_VOCABULARY
        if vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"a sentencepiece vocabulary of {vocab_size} is too small: 256 are byte pieces.",
                f"Give --vocab-size {SMALLEST_VOCABULARY} or more, or --tokenizer bytes.",
            )
        counts: Counter[bytes] = Counter()
        for portion in whole_words(chunks):
            counts.update(split_words(portion))
        if not counts:
            raise DataError("the text to train the tokenizer on is empty.", "Give a file with text in it.")
        return cls(_train(counts, vocab_size))

    def _encode_word(self, word: bytes) -> bytes:
        try:
            ids = self._pieces(word.decode())
        except UnicodeDecodeError:
            ids = []
        if self.decode(ids) != word:
            ids = list(self._spell(word))
        return np.array(ids, np.int32).tobytes()

    def _pieces(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._model.EncodeAsIds(text.translate(_TO_PICTURES))
        except (RuntimeError, OSError):
            raise CheckpointError(f"{self._name} cannot encode text; it is damaged.", _REMEDY) from None
        return ids

    def _spell(self, word: bytes) -> Iterator[int]:
        """Pieces where they decode to the bytes of `word`, byte pieces elsewhere."""
        stretch = ""
        for char in word.decode(errors="surrogateescape") + "\ud800":
            if char in _DECODED or "\ud800" <= char <= "\udfff":
                if stretch:
                    ids = self._pieces(stretch)
                    if self.decode(ids) != (text := stretch.encode()):
                        ids = [self._byte_ids[value] for value in text]
                    yield from ids
                    stretch = ""
                if char != "\ud800":
                    yield from (self._byte_ids[value] for value in char.encode(errors="surrogateescape"))
            else:
                stretch += char


class _WordCache(dict[bytes, bytes]):
    """Ids of words as bytes of int32; emptied when it is full."""

    def __init__(self, tokenizer: SentencePieceTokenizer) -> None:
        super().__init__()
        self._encode = tokenizer._encode_word

    def __missing__(self, word: bytes) -> bytes:
        ids = self._encode(word)
        if len(word) <= _CACHED_BYTES:
            if len(self) >= CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _train(counts: Counter[bytes], vocab_size: int) -> bytes:
    """Serialized model trained on words with these counts."""
    from sentencepiece import SentencePieceTrainer

    texts: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        text = word.decode(errors="ignore")
        if _UNTRAINABLE.isdisjoint(text):
            text = text.translate(_TO_PICTURES)
            body = text.removesuffix(_PICTURES["\n"]).removesuffix(_PICTURES["\r"])
            texts[body] += count
            texts[text[len(body) :]] += count
            for char in text:
                characters[char] += count
    kept = _frequent(characters, most=(vocab_size - _FIXED_PIECES) // 2)
    rare = str.maketrans(dict.fromkeys(characters.keys() - kept, "\n"))
    stretches: Counter[str] = Counter()
    for text, count in texts.items():
        for stretch in text.translate(rare).split("\n"):
            stretches[stretch] += count
    del stretches[""]
    rows = sorted(stretches.items(), key=lambda row: (-row[1], row[0])) or [(_PICTURES["\n"], 1)]
    proto = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(f"{text}\t{count}" for text, count in rows),
        input_format="tsv",
        model_writer=proto,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        allow_whitespace_only_pieces=True,
        byte_fallback=True,
        hard_vocab_limit=False,
        max_sentence_length=2**20,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=4,
    )
    return proto.getvalue()


def _frequent(characters: Counter[str], most: int) -> set[str]:
    """The most frequent characters, up to `_COVERAGE` of the text and `most` in number."""
    kept: set[str] = set()
    uncovered = characters.total() * (1 - _COVERAGE)
    missing = characters.total()
    for char, count in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        if missing <= uncovered or len(kept) >= most:
            break
        kept.add(char)
        missing -= count
    return kept
