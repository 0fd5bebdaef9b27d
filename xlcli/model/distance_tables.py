"""Tables by distance that the kernels of `kernels/decode.py` read: position keys, additions to scores, rotations.

A table grows with the memory, and layers with the same position encoding share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from xlcli.kernels.records import BLOCK_LEN, RANK
from xlcli.memory import TokenBuffers
from xlcli.model.attention.full import FullAttention
from xlcli.model.position import ScoreRule
from xlcli.model.position.distance import AlibiPosition, T5Position
from xlcli.model.position.rope import RopePosition
from xlcli.model.position.xl import XLPosition
from xlcli.model.position.xl_tables import block_basis, n_shared_features, position_blocks, shared_keys
from xlcli.ops.context import AttentionContext
from xlcli.ops.span import Span

ABSENT = torch.empty(0, 0)  # in place of an array that a kernel does not read; its address is 0
SHORTEST_TABLE = 256  # length of the first table by distance, unless no more distances can occur


class GrowingTable(NamedTuple):
    """How to make a table by distance. Its last column, or row, belongs to distance 0."""

    field: str  # name of the table in `Tables`
    key: Hashable  # layers with the same key share the table; parameters in a key count by identity
    make: Callable[[int], Tensor]  # the table of the distances 0 to n - 1
    size: Callable[[int], int]  # how many numbers that table has


def growing_tables(attention: FullAttention) -> list[GrowingTable]:
    """The tables by distance that a layer may need."""
    position, n_heads, head_dim = attention.position, attention.n_heads, attention.head_dim
    if isinstance(position, XLPosition):
        n_shared = n_shared_features(position)
        keys = GrowingTable(
            "position_keys",
            key=(XLPosition, position.n_features, n_shared),
            make=partial(shared_keys, position),
            size=lambda n: n_shared * n,
        )
        if n_shared == position.n_features:
            return [keys]
        block_size = n_heads * head_dim * 2 * RANK
        blocks = GrowingTable(
            "position_blocks",
            key=position.relative,
            make=partial(position_blocks, position),
            size=lambda n: block_size * math.ceil(n / BLOCK_LEN),
        )
        return [keys, blocks]
    if isinstance(position, (AlibiPosition, T5Position)):
        key = type(position), *position.parameters(), n_heads
        return [GrowingTable("bias", key, partial(score_additions, attention), lambda n: n_heads * n)]
    if isinstance(position, RopePosition):
        # Its size is not counted, because it is made only for keys beyond a clamp.
        make_turns = partial(turns_by_distance, position, head_dim)
        return [GrowingTable("turns", (RopePosition, head_dim, position.series), make_turns, lambda n: 0)]
    return []


def turns_by_distance(position: RopePosition, head_dim: int, n: int) -> Tensor:
    """Sines, then cosines (n r), of the rotations by 0 to n - 1 positions."""
    return torch.cat(position.angles(torch.arange(n), head_dim), dim=-1).float()


def score_additions(attention: FullAttention, n: int) -> Tensor:
    """Additions (h n) of a position encoding to the scores of keys at the distances n - 1 to 0."""
    q = torch.zeros(1, attention.n_heads, 1, attention.head_dim)
    context = AttentionContext(Span("uniform", n, n), n_memory=n - 1, n_new=1, keep=0, device=torch.device("cpu"))
    bias = attention.position.bias(q, q, context, ScoreRule(attention.scale, lambda x: (x, x)))
    assert bias is not None
    return bias[:, 0]


class Tables(NamedTuple):
    """Arrays of `CACHE` by distance, in the order of its fields."""

    position_keys: Tensor = ABSENT
    position_blocks: Tensor = ABSENT
    basis: Tensor = ABSENT
    bias: Tensor = ABSENT
    sin: Tensor = ABSENT
    cos: Tensor = ABSENT
    turns: Tensor = ABSENT


class VisibleSinks(NamedTuple):
    """Numbers (b) of sinks that the queries see, and sines and cosines (b r/2) that turn queries to their distance."""

    counts: Tensor
    sin: Tensor
    cos: Tensor


@dataclass(frozen=True)
class Shared:
    """Fields of `CACHE` from `n_distances` on, which layers of one kind share, and the arrays at their addresses."""

    fields: tuple[float, ...]
    arrays: Sequence[Tensor]
    sees_sinks: bool


class DistanceTables:
    """The tables of a network, as long as its calls have needed them so far."""

    def __init__(self) -> None:
        self.tables: dict[Hashable, tuple[int, Tensor]] = {}

    def share(self, attention: FullAttention, memory: TokenBuffers, context: AttentionContext) -> Shared:
        """The fields for layers like this one, whose memory has a row for the new token already."""
        tables = self._tables_for(attention, memory.length, context)
        sinks = visible_sinks(attention, memory, context)
        sink_arrays = sinks or VisibleSinks(ABSENT, ABSENT, ABSENT)
        span = context.span
        # No key is further back than the memory is long, so its length is as good as no limit.
        clamp_len = memory.length if span.clamp_len is None else span.clamp_len
        full_len = memory.length if span.full_len is None else span.full_len
        fields = [
            max(tables.position_keys.shape[1], tables.bias.shape[1]),
            tables.position_blocks.shape[1],
            clamp_len,
            full_len,
            *map(Tensor.data_ptr, tables),
            0 if sinks is None else memory.n_sinks,
            *map(Tensor.data_ptr, sink_arrays),
            span.far_bias,
        ]
        return Shared(tuple(fields), [*tables, *sink_arrays], sees_sinks=sinks is not None)

    def _tables_for(self, attention: FullAttention, length: int, context: AttentionContext) -> Tables:
        """The tables of a layer for `length` keys, the new one included."""
        position, clamp_len = attention.position, context.span.clamp_len
        farthest = context.mask.max_distance
        longest = context.span.segment_len if farthest is None else 1 + farthest
        if isinstance(position, RopePosition):
            sin, cos = query_angles(position, attention.head_dim, context)
            has_far_keys = clamp_len is not None and length > clamp_len + 1
            if clamp_len is None or not has_far_keys:
                return Tables(sin=sin, cos=cos)
            [turns] = growing_tables(attention)
            return Tables(sin=sin, cos=cos, turns=self._table(turns, length - clamp_len, longest))
        if isinstance(position, XLPosition) and clamp_len is not None:  # all keys further back are at this distance
            length, longest = min(length, clamp_len + 1), min(longest, clamp_len + 1)
        arrays = {table.field: self._table(table, length, longest) for table in growing_tables(attention)}
        if isinstance(position, XLPosition) and "position_blocks" in arrays:  # which are products with this basis
            arrays["basis"] = block_basis(position.n_features)
        return Tables(**arrays)

    def _table(self, table: GrowingTable, length: int, longest: int) -> Tensor:
        """The table of at least `length` distances. It grows by doubling, up to `longest`."""
        known_length, known = self.tables.get(table.key, (0, ABSENT))
        if known_length >= length:
            return known
        self.tables.pop(table.key, None)
        del known  # before the new one is made, so that only one takes RAM
        new_length = max(length, min(max(2 * length, SHORTEST_TABLE), longest))
        new = table.make(new_length).contiguous()
        self.tables[table.key] = new_length, new
        return new


def query_angles(position: RopePosition, head_dim: int, context: AttentionContext) -> tuple[Tensor, Tensor]:
    """Sines and cosines (b r/2) of the angles by which the query of each sequence is rotated."""
    assert context.tokens is not None
    positions = context.positions.latest(1).expand_as(context.tokens)[:, 0]
    sin, cos = position.angles(positions, head_dim)
    return sin.float().contiguous(), cos.float().contiguous()


def visible_sinks(attention: FullAttention, memory: TokenBuffers, context: AttentionContext) -> VisibleSinks | None:
    """What the queries need to know of the sinks; None if no query sees any."""
    seen, position = context.visible_sinks(memory.n_sinks), attention.position
    if seen is None or not isinstance(position, RopePosition):
        return None
    counts = seen.sum(-1)[:, 0]
    sin, cos = (part[:, 0, 0].float() for part in position.clamp_angles(attention.head_dim, context))
    batch = len(memory.sinks[0])
    return VisibleSinks(*(row.expand(batch, -1).contiguous() for row in (counts, sin, cos)))
