"""Tables of position encodings by distance, for the kernels of `ops/decode.py`."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from xlcli.model.attention.full import FullAttention
from xlcli.model.position.alibi import AlibiPosition
from xlcli.model.position.rope import RopePosition, rope_angles
from xlcli.model.position.t5 import T5Position
from xlcli.model.position.xl import XLPosition
from xlcli.model.stack import Block
from xlcli.ops.context import AttentionContext
from xlcli.ops.span import Span


class DistanceTables:
    """Tables that grow with the memory; layers with the same encoding share them."""

    def __init__(self) -> None:
        self.tables: dict[Hashable, Tensor] = {}

    def read_bytes(self, longest: int) -> int:
        """Size in bytes of the tables that a call with at most `longest` keys reads."""
        return sum(t[..., :longest].nbytes for t in self.tables.values())

    def of(self, block: Block, length: int, context: AttentionContext) -> tuple[Tensor | None, ...]:
        """Last arrays of `CACHE`: tables of the position encoding for `length` keys, the new one included."""
        attention = block.attention
        assert isinstance(attention, FullAttention)
        position, e = attention.position, attention.output.weight.shape[1] // attention.n_heads
        farthest = context.mask.max_distance
        longest = 1 + farthest if farthest is not None else context.span.segment_len
        if isinstance(position, XLPosition):
            length, longest = (min(n, (context.span.clamp_len or n) + 1) for n in (length, longest))
            if position.n_features <= e:
                keys = self._table(
                    ("xl", position.n_features), length, longest, lambda n: _position_keys(position, n, e)
                )
            else:  # inner products with projected keys are shorter
                keys = self._table(position.relative, length, longest, lambda n: _projected_keys(position, n, e))
            return keys, None, None, None, None
        if isinstance(position, (AlibiPosition, T5Position)):
            source: Hashable = position.table if isinstance(position, T5Position) else "alibi"
            bias = self._table((source, attention.n_heads), length, longest, lambda n: _bias(attention, n, e))
            return None, bias, None, None, None
        if isinstance(position, RopePosition):
            sin, cos = context.cache.constant(
                ("rope step", e, position.base), lambda: _rope_angles(position, context, e)
            )
            turns, clamp_len = None, context.span.clamp_len
            if clamp_len is not None and length > clamp_len + 1:
                n_far = length - clamp_len
                turns = self._table(
                    ("turns", e, position.base), n_far, longest, lambda n: _turns(position, n, e), axis=0
                )
            return None, None, sin, cos, turns
        return None, None, None, None, None

    def _table(self, key: Hashable, length: int, longest: int, make: Callable[[int], Tensor], axis: int = 1) -> Tensor:
        """Table with at least `length` columns, or rows with axis 0; grows by doubling, up to `longest`.

        The last column is that of the query itself.
        """
        table = self.tables.get(key)
        if table is None or table.shape[axis] < length:
            self.tables.pop(key, None)
            table = make(max(length, min(max(2 * length, 256), longest))).contiguous()
            self.tables[key] = table
        return table


def _context(n: int) -> AttentionContext:
    """Context of a call of one token after n - 1 others."""
    return AttentionContext(Span("uniform", n, n), n_memory=n - 1, n_new=1, keep=0, device=torch.device("cpu"))


def _rope_angles(position: RopePosition, context: AttentionContext, width: int) -> tuple[Tensor, Tensor]:
    """Sine and cosine (b width/2) of the angles of the new tokens (b 1)."""
    assert context.tokens is not None
    positions = context.positions.latest(1).expand_as(context.tokens)[:, 0]
    sin, cos = rope_angles(positions, width, position.base)
    return sin.float().contiguous(), cos.float().contiguous()


def _turns(position: RopePosition, n: int, width: int) -> Tensor:
    """Sines, then cosines (n width), of the rotations by 0 to n - 1 positions."""
    return torch.cat(rope_angles(torch.arange(n), width, position.base), dim=-1).float()


def _position_keys(position: XLPosition, n: int, head_dim: int) -> Tensor:
    """Position keys (f n) of distances n - 1 to 0."""
    _, term = position.term(torch.zeros(1, position.n_heads, 1, head_dim), _context(n))
    assert term is not None
    return term.keys.T


def _projected_keys(position: XLPosition, n: int, head_dim: int) -> Tensor:
    """Position keys of distances n - 1 to 0, projected by W_R: (h e n)."""
    cos, sin = _position_keys(position, n, head_dim).chunk(2)
    return position.relative.weight @ torch.cat([-sin, cos])


def _bias(attention: FullAttention, n: int, head_dim: int) -> Tensor:
    """Additions (h n) to the scores of keys at distances n - 1 to 0."""
    q = torch.zeros(1, attention.n_heads, 1, head_dim)
    bias = attention.position.bias(q, q, _context(n), lambda x: (x, x))
    assert bias is not None
    return bias[:, 0]
