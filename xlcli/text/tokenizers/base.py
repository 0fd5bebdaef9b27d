"""What every vocabulary can do.

A vocabulary never sees the end of a text before it is sure of it: `stable_prefix_len` says how much of what has arrived can be
tokenized now. There is no symbol for the beginning; a text is taken to begin after `start_id`, a line end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FILE = "tokenizer.json"
SCHEMA = 1
"""Version of `tokenizer.json`. A reader refuses a newer one."""


class Tokenizer(Protocol):
    """A vocabulary.

    Attributes:
        kind: its name in `TOKENIZERS`.
        vocab_size: ids are 0 to `vocab_size` - 1.
        start_id: the token (a line end) that a text is taken to begin after.
        fingerprint: SHA-256 over kind and vocabulary.
    """

    kind: str
    vocab_size: int
    start_id: int
    fingerprint: str

    def encode(self, data: bytes) -> NDArray[np.int32]:
        """Ids of `data`, which begins at a safe place. Any bytes are taken."""
        ...

    def sizes(self, ids: NDArray[np.int32] | Sequence[int], data: bytes) -> NDArray[np.int32]:
        """Bytes of text that each of `ids`, the tokens of `data`, stands for; they sum to `len(data)`."""
        ...

    def decode(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """Text of `ids`: that of each token alone, joined. The inverse of `encode`, except for words."""
        ...

    def stable_prefix_len(self, data: bytes) -> int:
        """Length of the longest prefix of `data` whose tokens are the same whatever follows; 0 if there is none."""
        ...

    def files(self) -> dict[str, bytes]:
        """Contents of the files it needs beside `tokenizer.json`, by name."""
        ...

    def save(self, folder: Path) -> None:
        """Write the vocabulary into `folder`; `tokenizer.json`, which describes it, last."""
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
