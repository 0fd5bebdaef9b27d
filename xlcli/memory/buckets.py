"""Memory of LSH attention: a table of the latest tokens of every hash bucket, of constant size (`ops/lsh_table.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xlcli.memory.base import Memory
from xlcli.ops.lsh_table import RANKS_PER_BUCKET, Table


@dataclass(frozen=True)
class Buckets(Memory):
    """Table of hash buckets. An empty table has no slots.

    `owned` marks a table that no other memory shares, which `writable` may return as it is. Under inference mode
    writing then changes it in place, so the old memory must not be used any more; copy it with `State.fork`.
    """

    table: Table
    owned: bool = False
    kind = "buckets"
    counts_tokens = True
    axes: ClassVar[Mapping[str, str]] = {
        "keys": "bhrnce",
        "values": "bhrncw",
        "positions": "bhrnc",
        "global_ranks": "bhrncr",
        "counts": "bhrn",
    }
    dtypes: ClassVar[Mapping[str, torch.dtype]] = dict.fromkeys(("positions", "global_ranks", "counts"), torch.int64)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Buckets:
        """Memory of the tensors of a table."""
        return Buckets(Table(**tensors))

    @classmethod
    def check(cls, tensors: Mapping[str, Tensor], batch_size: int) -> None:
        """As the base class, and checks the integers, because bucket numbers are used as indices."""
        super().check(tensors, batch_size)
        limits = {"positions": 2**62, "global_ranks": tensors["counts"].shape[-1] * RANKS_PER_BUCKET}
        for name in cls.dtypes:
            t = tensors[name]
            if t.numel() and not 0 <= int(t.min()) <= int(t.max()) < limits.get(name, RANKS_PER_BUCKET):
                raise ValueError(f"tensor '{name}' of memory '{cls.kind}' holds a number that is out of range")

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the table."""
        return self.table._asdict()

    def empty(self) -> Buckets:
        """Memory of no tokens."""
        return Buckets(Table.empty(self.table.keys, *self.table.counts.shape))

    @property
    def n_hashes(self) -> int:
        """Number of hash rounds."""
        return self.table.counts.shape[2]

    @property
    def settings(self) -> Mapping[str, int]:
        """The number of hash rounds."""
        return {"n_hashes": self.n_hashes}

    def writable(self, bucket_size: int) -> Buckets:
        """This memory if it owns its table and is in inference mode, else a copy: its table may be changed in place."""
        if self.owned and torch.is_inference_mode_enabled():
            return self
        return Buckets(self.table.copy(bucket_size), owned=True)
