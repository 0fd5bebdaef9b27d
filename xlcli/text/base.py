"""What all tokenizers have in common, and the cache of those that encode word by word."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from re import Pattern
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from xlcli.errors import ConfigError, DataError
from xlcli.files import write_atomic
from xlcli.text.pretokenize import WORDS, Splitter

FILE = "tokenizer.json"
SCHEMA = 1  # version of `tokenizer.json`; any other is refused
REMEDY = "Copy the model again from its source."
CACHED_WORDS = 2**15
_CACHED_BYTES = 48


class Tokenizer(ABC):
    """Text to token ids and back, by a vocabulary. `CheckpointError` if the vocabulary file is damaged."""

    kind: str  # key of `TOKENIZERS`
    file: str | None = None  # name of the vocabulary file; None if there is none
    # Arguments of the class besides the vocabulary, which `tokenizer.json` has.
    described: ClassVar[tuple[str, ...]] = ()
    vocab_size: int  # number of ids, which start at 0
    # The input before the first token of a text: the id of a line end, or of the mark of a beginning.
    start_id: int
    fingerprint: str  # SHA-256 of kind and vocabulary
    id_sizes: NDArray[np.int32] | None  # bytes of text of each id (v); None if they depend on the text
    splitter: Splitter = WORDS  # where a text may be cut
    unknown_id: int | None = None  # id of what is not in the vocabulary, if there is one
    stand_in = -1  # id that a byte without a token gets from `any_tokens`; -1 if each byte has a token
    separate_ids: Collection[int] = ()  # ids before which a word ends, whatever their text
    caveat: str | None = None  # what a reader of scores should know, if anything
    special_names: Collection[str] = ()  # names of tokens that are text like any other, such as <|im_start|>

    def __init__(self, data: bytes = b"", name: str = "") -> None:
        self.data, self._name = data, name

    def encode(self, data: bytes) -> NDArray[np.int32]:
        """Ids of `data`, any bytes that start where a text may be cut."""
        return self.tokens(data)[0]

    @abstractmethod
    def tokens(self, data: bytes, at: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids of `data`, and the bytes of text of each, whose sum is `len(data)`; both (t).

        `at` is the offset of `data` in the text, for errors. `DataError` if the text has no tokens of this kind.
        """

    def any_tokens(self, data: bytes, at: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`tokens`, but with `stand_in` for each byte that has no token, with the size 1."""
        return self.tokens(data, at)

    @abstractmethod
    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """Text of `ids`: their texts, with blanks between them if tokens are words or numbers."""

    def text_after(self, last: int, token: int) -> bytes:
        """Text of a token that follows another one, with the blank between them, if there is one."""
        return self.decode([last, token])[len(self.decode([last])) :]

    @cached_property
    def texts(self) -> list[bytes]:
        """Text of each id."""
        return [self.decode([i]) for i in range(self.vocab_size)]

    @property
    def line_ends(self) -> NDArray[np.bool_]:
        """True for the ids whose text has the end of a line (v); the next token begins a line."""
        return np.array([b"\n" in text for text in self.texts])

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into `folder`, `tokenizer.json` last."""
        if self.file is not None:
            write_atomic(folder / self.file, self.data)
        about = {
            "schema": SCHEMA,
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            **{key: getattr(self, key) for key in self.described},
            "fingerprint": self.fingerprint,
        }
        write_atomic(folder / FILE, (json.dumps(about, indent=2) + "\n").encode())

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int | None = None) -> Self:
        """A tokenizer with about `vocab_size` ids; `ConfigError` if that is impossible, `DataError` without a text."""
        raise ConfigError(f"a tokenizer of kind {cls.kind} comes with a model.", "Give --tokenizer sentencepiece.")


class WordCache(dict[bytes, bytes]):
    """What `encode` returns for words; emptied when it is full."""

    def __init__(self, encode: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: bytes) -> bytes:
        ids = self._encode(word)
        if len(word) <= _CACHED_BYTES:
            if len(self) >= CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids


class PieceTokenizer(Tokenizer):
    """Tokens of any text, or of text without the bytes that have no token; `decode` is the inverse of `encode`."""

    _special: Pattern[str]
    """Characters, in a group, that are spelled in bytes."""

    def _set_texts(self, texts: list[bytes]) -> bool:
        """Sets the text of each id, and the first id of each byte; False if a byte has no token (its id is -1 then)."""
        self._texts = texts
        self.id_sizes = np.array([len(text) for text in texts], np.int32)
        first_ids = {text: i for i, text in reversed([*enumerate(texts)])}
        self._byte_ids = [first_ids.get(bytes([value]), -1) for value in range(256)]
        self._cache = WordCache(self._encode_part)
        return min(self._byte_ids) >= 0

    @cached_property
    def cuts_characters(self) -> NDArray[np.bool_]:
        """True for the ids whose text begins or ends within a character (v)."""
        return np.array([text.decode(errors="ignore").encode() != text for text in self._texts])

    @abstractmethod
    def _find(self, text: str) -> list[int]:
        """Ids of a text; some other text where the tokenizer changes it."""

    def tokens(self, data: bytes, at: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        ids, sizes = self._spelled(data)
        missing = np.flatnonzero(ids < 0)
        if missing.size:
            place = int(sizes[: missing[0]].sum())  # of the first byte without a token
            problem = f"the model has no token for byte 0x{data[place]:02x}, at offset {at + place} of the text."
            raise DataError(problem, "Remove the byte, or use another model: --binary cannot help.")
        return ids, sizes

    def any_tokens(self, data: bytes, at: int = 0) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        ids, sizes = self._spelled(data)
        return np.where(ids < 0, np.int32(self.stand_in), ids), sizes

    def _spelled(self, data: bytes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids of `data`, -1 for a byte without a token, and the bytes of text of each; both (t)."""
        assert self.id_sizes is not None
        encoded_parts = map(self._cache.__getitem__, self.splitter.split(data))
        ids = np.frombuffer(b"".join(encoded_parts), np.int32)
        return ids, np.where(ids < 0, np.int32(1), self.id_sizes[ids])

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """Text of `ids`, each decoded independently; special tokens have none."""
        return b"".join([self._texts[i] for i in ids])

    def _encode_part(self, part: bytes) -> bytes:
        """Ids as bytes of int32: pieces where they decode to `part`; elsewhere, and for special characters, bytes."""
        ids: list[int] = []
        for i, text in enumerate(self._special.split(part.decode(errors="surrogateescape"))):
            data = text.encode(errors="surrogateescape")
            is_special = i % 2 == 1  # between the others, as `split` returns groups
            pieces = [] if is_special else self._find(text)
            if self.decode(pieces) == data:
                ids += pieces
            else:
                ids += [self._byte_ids[value] for value in data]
        return np.array(ids, np.int32).tobytes()
