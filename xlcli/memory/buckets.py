"""Memory of LSH attention: a table of the latest tokens of every hash bucket, of constant size (`ops/lsh_table.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from xlcli.memory.base import Memory
from xlcli.ops.lsh_table import RANKS_PER_BUCKET, BucketRanks, Table, insert


class Unwritten(NamedTuple):
    """Tokens to be written into a table."""

    ranks: BucketRanks  # buckets and ranks
    k: Tensor  # keys (b h t e)
    v: Tensor  # values (b h t w)
    start: int  # position of the first token
    bucket_size: int  # number of slots per bucket

    def write(self, table: Table) -> Buckets:
        """Writes the tokens into a table, in place; memory of this table, which it owns."""
        insert(table, self.ranks, self.k, self.v, self.start)
        return Buckets(table, owned=True)


@dataclass(frozen=True)
class Buckets(Memory):
    """Table of hash buckets. An empty table has no slots.

    `owned` marks a table that no other memory shares, which `writable` may return as it is. Under inference mode
    writing then changes it in place, so the old memory must not be used any more; copy it with `State.fork`.

    With gradients the backward pass reads the table again, so the latest tokens stay `unwritten` until they are read:
    into a copy, or into the table itself by `overwrite_earlier`.
    """

    stored: Table
    owned: bool = False
    unwritten: Unwritten | None = None
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

    @property
    def table(self) -> Table:
        """Table of all tokens: a new one if some are unwritten."""
        return self.written().stored

    def tensors(self) -> dict[str, Tensor]:
        return self.table._asdict()

    @property
    def n_rounds(self) -> int:
        return self.stored.counts.shape[2]

    def written(self) -> Buckets:
        """This memory without unwritten tokens. The table is copied if there are any."""
        if self.unwritten is None:
            return self
        return self.unwritten.write(self.stored.copy(self.unwritten.bucket_size))

    def overwrite_earlier(self) -> Buckets:
        """`written`, but in the table of the earlier memory."""
        if self.unwritten is None or not self.stored.n_slots:
            return self.written()
        return self.unwritten.write(self.stored)

    def extended(self, new: Unwritten) -> Buckets:
        """This memory, which has no unwritten tokens, with new ones. They are written at once in inference mode."""
        if not torch.is_inference_mode_enabled():
            return Buckets(self.stored, unwritten=new)
        return new.write(self.writable(new.bucket_size).stored)

    def writable(self, bucket_size: int) -> Buckets:
        """This memory if it owns its table and is in inference mode, else a copy: its table may be changed in place."""
        if self.owned and torch.is_inference_mode_enabled():
            return self
        return Buckets(self.table.copy(bucket_size), owned=True)
