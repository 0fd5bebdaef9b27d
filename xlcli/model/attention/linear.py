"""Linear attention with random features of the softmax kernel: the Performer (Choromanski et al. 2021, section 2)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor

from xlcli.config import MemoryDtype
from xlcli.memory import Memory, Sums
from xlcli.model.attention import ProjectedAttention
from xlcli.ops.context import AttentionContext
from xlcli.ops.favor import attend_linear, draw_features, key_features, query_features


class LinearAttention(ProjectedAttention):
    """Multi-head attention; its memory is two running sums over all tokens read: constant size, no span.

    The random matrix `features` (f e) is shared by all heads and saved with the model; it is NaN until `redraw`.
    """

    features: Tensor

    def __init__(self, *, n_features: int, orthogonal: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.orthogonal = orthogonal
        self.register_buffer("features", torch.full((n_features, self.head_dim), math.nan))

    def redraw(self, generator: torch.Generator | None = None) -> None:
        f, e = self.features.shape
        with torch.no_grad():
            self.features.copy_(draw_features(f, e, generator, orthogonal=self.orthogonal))

    def init_memory(self, batch: int, kind: Literal["keyvalue", "hidden"], dtype: MemoryDtype = "float32") -> Memory:
        """Zero sums for `batch` sequences, in float64 because a stream may add any number of tokens."""
        f, e = self.features.shape
        s = self.features.new_zeros((batch, self.n_heads, f, e), dtype=torch.float64)
        return Sums(s, s.new_zeros(s.shape[:3]))

    def receptive_field(self, n_memory: int) -> int | None:
        return None  # sums have all tokens read

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        assert isinstance(memory, Sums)
        q = self.queries(x, context) if context.needs_output else None
        k, v = self.project(x, context)
        with torch.autocast(x.device.type, enabled=False):
            k = key_features(k, self.features)
            if q is None:  # nobody needs the output: the sums are all there is to compute
                return x, sums_to_keep(memory.s + k.mT @ v.to(k.dtype), memory.z + k.sum(2), context)
            y, s, z = attend_linear(query_features(q, self.features), k, v.to(k.dtype), memory.s, memory.z)
        y = context.apply(self.output, rearrange(y.to(v.dtype), "b h t e -> b t (h e)"))
        return y, sums_to_keep(s, z, context)


def sums_to_keep(s: Tensor, z: Tensor, context: AttentionContext) -> Sums:
    """Memory of the sums, detached from the graph; of zeros at the end of an independent segment."""
    sums = Sums(s.detach(), z.detach())
    if not context.keep:
        sums = sums.empty()
    return sums
