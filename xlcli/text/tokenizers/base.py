"""The protocol of tokenizers.

A tokenizer encodes each word (see `xlcli.text.pretokenize`) independently, so that the ids do not depend on how a text
is cut into calls. There is no begin-of-text token: a text is treated as following a line end, `start_id`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

FILE = "tokenizer.json"
SCHEMA = 1
"""Version of `tokenizer.json`; any other is refused."""


class Tokenizer(Protocol):
    """A tokenizer.

    Attributes:
        kind: Name in `registry.TOKENIZERS`.
        vocab_size: Number of ids, which start at 0.
        start_id: Id of a line end, the input before the first token of a text.
        fingerprint: SHA-256 of kind and vocabulary.
        id_sizes: Bytes of text of each id (v); None if they depend on the text.
    """

    kind: str
    vocab_size: int
    start_id: int
    fingerprint: str
    id_sizes: NDArray[np.int32] | None

    def encode(self, data: bytes) -> NDArray[np.int32]:
        """Ids of `data`, any bytes that start at a word boundary."""
        ...

    def sizes(self, ids: NDArray[np.int32] | Sequence[int], data: bytes) -> NDArray[np.int32]:
        """Bytes of text of each of `ids`, the tokens of `data`; their sum is `len(data)`."""
        ...

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """Text of `ids`, each decoded independently. Inverse of `encode`, except for the words tokenizer."""
        ...

    def files(self) -> dict[str, bytes]:
        """Files to save in addition to `tokenizer.json`: name to content."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into `folder`, `tokenizer.json` last."""
        from xlcli.files import write_atomic

        for name, data in self.files().items():
            write_atomic(folder / name, data)
        about = {
            "schema": SCHEMA,
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "fingerprint": self.fingerprint,
        }
        write_atomic(folder / FILE, (json.dumps(about, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The tokenizer saved in `folder`.

        Raises:
            CheckpointError: Its files are missing or damaged.
        """
        ...

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int | None = None) -> Self:
        """A tokenizer trained on the text `chunks`, with about `vocab_size` ids (None: a default).

        Raises:
            ConfigError: The vocabulary size is impossible.
            DataError: The text is empty.
        """
        ...
