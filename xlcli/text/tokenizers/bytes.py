"""Byte tokenizer: 256 ids, any data, no training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from xlcli.text.tokenizers.base import Tokenizer


class BytesTokenizer(Tokenizer):
    """The id of a token is the value of its byte."""

    kind = "bytes"
    vocab_size = 256
    start_id = 10
    fingerprint = sha256(b"bytes").hexdigest()
    id_sizes = np.ones(256, np.int32)

    def encode(self, data: bytes) -> NDArray[np.int32]:
        """Byte values."""
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def sizes(self, ids: NDArray[np.int32] | Sequence[int], data: bytes) -> NDArray[np.int32]:
        """One byte for each token."""
        return np.ones(len(data), np.int32)

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """The bytes."""
        return np.asarray(ids, np.uint8).tobytes()

    def files(self) -> dict[str, bytes]:
        """No files."""
        return {}

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The byte tokenizer."""
        return cls()

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int | None = None) -> Self:
        """The byte tokenizer; nothing is read."""
        return cls()
