"""Compressive memory (Rae et al. 2020): the latest tokens, and pooled blocks of older ones.

A block is pooled when its last token is read. Its tokens stay until they are out of reach, and attention chooses by
position which of the two it reads (`ops/compression.py`). The inputs of the last tokens are kept for the block that is
unfinished at the end of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from xlcli.files.tensors import with_prefix
from xlcli.memory.base import Memory
from xlcli.memory.tokens import Hidden, Int8KeyValue, KeyValue, Project, TokenMemory
from xlcli.ops.compression import Tiers

Pool = Callable[[Tensor], Tensor]
"""Function from blocks of inputs (b n c d) to one vector of each block (b n d)."""


@dataclass(frozen=True)
class Compressive(Memory):
    """Two tiers of one kind: `tokens`, and `pooled` blocks; `tail` (b t d) are the inputs of the last rate - 1 tokens.

    The pooled tier has a fixed number of slots from the first call on. Those of blocks that do not exist are not read.
    """

    tokens: TokenMemory
    pooled: TokenMemory
    tail: Tensor
    tier: ClassVar[type[TokenMemory]]
    kinds: ClassVar[dict[type[Memory], type[Compressive]]] = {}
    """Kind of both tiers to subclass."""
    counts_tokens = True

    def __init_subclass__(cls, tier: type[TokenMemory]) -> None:
        cls.tier, cls.kind = tier, f"compressive-{tier.kind}"
        cls.kinds[tier] = cls
        axes = {name: axes for name, axes in tier.axes.items() if "m" in axes}
        pooled = {f"pooled_{name}": own.replace("m", "c") for name, own in axes.items()}
        cls.axes = {f"token_{name}": own for name, own in axes.items()} | pooled | {"tail": "btd"}
        cls.dtypes = {f"{part}_{name}": dtype for part in ("token", "pooled") for name, dtype in tier.dtypes.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Memory of the tensors of both tiers and the tail."""
        tokens, pooled = (with_prefix(f"{part}_", tensors) for part in ("token", "pooled"))
        return cls(cls.tier.from_tensors(tokens), cls.tier.from_tensors(pooled), tensors["tail"])

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of both tiers and the tail."""
        tokens = {f"token_{name}": t for name, t in self.tokens.tensors().items()}
        pooled = {f"pooled_{name}": t for name, t in self.pooled.tensors().items()}
        return tokens | pooled | {"tail": self.tail}

    @property
    def dtype(self) -> torch.dtype | None:
        """Number type of keys and values."""
        return self.tokens.dtype

    def extend(
        self, x: Tensor, pool: Pool, project: Project, project_pooled: Project, tiers: Tiers
    ) -> tuple[Tensor, Tensor, Self]:
        """Appends tokens with inputs x (b t d), and the blocks that they complete, into which no gradient flows.

        Returns:
            Keys and values (b h s e) of the blocks, then of the tokens that some query attends to; and the new memory.
        """
        rate, n_blocks = tiers.rate, tiers.n_complete
        inputs = torch.cat((self.tail.to(x.dtype), x), dim=1).detach()
        with torch.no_grad():
            first = rate - 1 - tiers.begun
            blocks = inputs[:, first : first + rate * n_blocks]
            pooled = pool(rearrange(blocks, "b (n c) d -> b n c d", c=rate)).to(x.dtype)
        if not self.pooled.length:
            pooled = F.pad(pooled, (0, 0, max(0, tiers.n_slots - n_blocks), 0))
        block_k, block_v, slots = self.pooled.extend(pooled, project_pooled, tiers.n_slots)
        token_k, token_v, tokens = self.tokens.extend(x, project, tiers.n_kept)
        oldest = n_blocks - block_k.shape[2]
        read = slice(tiers.blocks.start - oldest, tiers.blocks.stop - oldest)
        latest = token_k.shape[2] - len(tiers.tokens)
        k, v = (
            torch.cat((of_blocks[:, :, read], of_tokens[:, :, latest:]), dim=2)
            for of_blocks, of_tokens in ((block_k, token_k), (block_v, token_v))
        )
        return k, v, type(self)(tokens, slots, inputs[:, inputs.shape[1] - self.tail.shape[1] :].clone())


class CompressiveHidden(Compressive, tier=Hidden):
    """Tiers of layer inputs, for training."""


class CompressiveKeyValue(Compressive, tier=KeyValue):
    """Tiers of keys and values in 32 or 16 bits."""


class CompressiveInt8(Compressive, tier=Int8KeyValue):
    """Tiers of keys and values in int8."""
