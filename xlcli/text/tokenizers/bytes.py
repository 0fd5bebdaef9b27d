"""The vocabulary of 256 byte values: any data, no training, no file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xlcli.text.tokenizers.base import Tokenizer


class BytesTokenizer(Tokenizer):
    """Token id = byte value."""

    kind = "bytes"
    vocab_size = 256
    start_id = 10
    fingerprint = sha256(b"bytes").hexdigest()
    id_sizes = np.ones(256, np.int32)

    def encode(self, data: bytes) -> NDArray[np.int32]:
        """Ids of `data`, one a byte."""
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def sizes(self, ids: NDArray[np.int32] | Sequence[int], data: bytes) -> NDArray[np.int32]:
        """Bytes of each token: ones."""
        return np.ones(len(data), np.int32)

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """The bytes themselves."""
        return np.asarray(ids, np.uint8).tobytes()

    def stable_prefix_len(self, data: bytes) -> int:
        """Every place is safe."""
        return len(data)

    def files(self) -> dict[str, bytes]:
        """Nothing but the name of its kind needs saving."""
        return {}

    @classmethod
    def load(cls, folder: Path) -> BytesTokenizer:
        """The only one there is."""
        return cls()
