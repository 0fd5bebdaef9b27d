"""Linear attention with random features of the softmax kernel, the Performer (Choromanski et al. 2021, section 2)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor

from xlcli.memory import Memory, Sums
from xlcli.model.attention import Projected
from xlcli.model.position import Position
from xlcli.ops.favor import attend_linear, draw_features, key_features, query_features
from xlcli.ops.span import AttentionContext


class LinearAttention(Projected):
    """Multi-head attention whose memory is two running sums over every token read: constant in size, no span.

    The random rows behind the features, `features` (f e), are a buffer that is saved with the model; all heads share
    them. They are not a number until the first `redraw`.
    """

    features: Tensor

    def __init__(
        self, *, dim: int, n_heads: int, head_dim: int, position: Position, n_features: int, orthogonal: bool
    ) -> None:
        super().__init__(dim=dim, n_heads=n_heads, head_dim=head_dim, position=position)
        self.orthogonal = orthogonal
        self.register_buffer("features", torch.full((n_features, head_dim), math.nan))

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draws fresh features. Sums of the features before mean nothing with them: states must start anew."""
        f, e = self.features.shape
        with torch.no_grad():
            self.features.copy_(draw_features(f, e, generator, orthogonal=self.orthogonal))

    def init_memory(self, batch: int, kind: Literal["keyvalue", "hidden"]) -> Memory:
        """Sums of nothing for `batch` rows, whatever the kind; float64, for a stream may add tokens for ever."""
        f, e = self.features.shape
        s = self.features.new_zeros((batch, self.n_heads, f, e), dtype=torch.float64)
        return Sums(s, s.new_zeros(s.shape[:3]))

    def receptive_field(self, mem_len: int) -> int | None:
        """No limit."""
        return None

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        """Branch output (b t d) for input x (b t d), and the memory after it."""
        assert isinstance(memory, Sums)
        q = self.position.rotate(self._heads(self.query(x)), context)
        k, v = self.project(x, context)
        with torch.autocast(x.device.type, enabled=False):
            k = key_features(k, self.features)
            y, s, z = attend_linear(query_features(q, self.features), k, v.to(k.dtype), memory.s, memory.z)
        return self.output(rearrange(y.to(v.dtype), "b h t e -> b t (h e)")), _after(s, z, context)

    def update_memory(self, x: Tensor, memory: Memory, context: AttentionContext) -> Memory:
        """The memory after x (b t d), when nobody asks for the output."""
        assert isinstance(memory, Sums)
        k, v = self.project(x, context)
        with torch.autocast(x.device.type, enabled=False):
            k = key_features(k, self.features)
            return _after(memory.s + k.mT @ v.to(k.dtype), memory.z + k.sum(2), context)


def _after(s: Tensor, z: Tensor, context: AttentionContext) -> Memory:
    """What is remembered: the sums, gradient stopped; nothing at the end of an independent segment."""
    s, z = s.detach(), z.detach()
    return Sums(s, z) if context.keep else Sums(torch.zeros_like(s), torch.zeros_like(z))
