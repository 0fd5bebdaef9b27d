"""Feed-forward branches with two matrices (Vaswani et al. 2017) or three, gated (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xlcli.model.dropout import Dropout
from xlcli.ops.autocast import cast_for_products
from xlcli.ops.chunks import map_chunks
from xlcli.ops.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu_,
    "relu2": lambda x: F.relu_(x).square(),
    "gelu": F.gelu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}
"""Feed-forward kind to activation function, which may overwrite its input."""
GATED = frozenset({"swiglu", "geglu"})
"""Kinds whose activation is multiplied by a second projection."""


class FeedForward(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) if gated.

    `chunk_len` is the number of tokens of each sequence that are computed at once and recomputed in the backward pass
    (Kitaev et al. 2020, section 3): activations take (b c f) instead of (b t f). None computes all at once.
    """

    def __init__(
        self, *, kind: str, dim: int, ffn_dim: int, bias: bool, dropout: float, chunk_len: int | None = None
    ) -> None:
        super().__init__()
        self.chunk_len = chunk_len
        self.activation = ACTIVATIONS[kind]
        self.gate = Linear(dim, ffn_dim, bias=bias) if kind in GATED else None
        self.up = Linear(dim, ffn_dim, bias=bias)
        self.down = Linear(ffn_dim, dim, bias=bias)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Output (b t d) for input (b t d)."""
        if self.chunk_len is None:
            return self._branch(x)
        return map_chunks(self._branch, ((part,) for part in torch.split(x, self.chunk_len, dim=1)), x.device)

    def _branch(self, x: Tensor) -> Tensor:
        x = cast_for_products(x)
        up = self.up(x)
        inner = self.activation(up) if self.gate is None else self.activation(self.gate(x)) * up
        out: Tensor = self.down(self.dropout(inner))
        return out
