"""Softmax attention of new tokens over memory and themselves (Vaswani et al. 2017; Dai et al. 2019, section 3.2)."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor, nn

from xlcli.model.position import Position
from xlcli.ops.attend import attend, attend_one
from xlcli.ops.span import Frame
from xlcli.state import Memory


class FullAttention(nn.Module):
    """Multi-head attention; projections have no bias, as in the paper."""

    def __init__(self, *, dim: int, n_heads: int, head_dim: int, position: Position, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.scale = head_dim**-0.5
        self.dropout = dropout
        self.query = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.key = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.output = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.position = position

    def forward(self, x: Tensor, memory: Memory, frame: Frame) -> tuple[Tensor, Memory]:
        """Branch output (b t d) for input x (b t d), and the memory after it."""
        q = self._heads(self.query(x))
        k, v, memory = memory.extend(x, self.project, frame.keep)
        bias = self.position.bias(q, k, frame)
        q, k, term = self.position.rotate(q, k, frame)
        dropout = self.dropout if self.training else 0.0
        if term is not None and q.shape[-2] == 1 and frame.visible is None and not dropout:
            y = attend_one(q, k, v, term=term, scale=self.scale)
        else:
            if term is not None:
                query, key = term
                b, h = q.shape[:2]
                q = torch.cat((q, query), dim=-1)
                k = torch.cat((k, repeat(key, "s f -> b h s f", b=b, h=h)), dim=-1)
            if bias is not None:
                bias = bias * self.scale
            y = attend(q, k, v, visible=frame.visible, scale=self.scale, bias=bias, dropout=dropout)
        return self.output(rearrange(y, "b h t e -> b t (h e)")), memory

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (b h t e) of x (b t d); keys carry no position."""
        return self._heads(self.key(x)), self._heads(self.value(x))

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "b t (h e) -> b h t e", h=self.n_heads)
