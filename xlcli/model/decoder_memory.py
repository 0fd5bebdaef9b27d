"""Memory that a `Decoder` needs, from the shapes of a network."""

from __future__ import annotations

from collections.abc import Hashable

from xlcli.model.attention.full import FullAttention
from xlcli.model.attention.local import LocalAttention
from xlcli.model.decoder import has_kernel, may_decode
from xlcli.model.lm import LanguageModel
from xlcli.model.position.alibi import AlibiPosition
from xlcli.model.position.t5 import T5Position
from xlcli.model.position.xl import XLPosition

BYTES = {"bfloat16": 2, "int8": 1}
"""Bytes of a packed weight; float32 matrices are not copied unless several are joined."""


def weight_bytes(network: LanguageModel, encoding: str) -> int:
    """Size in bytes of the copies of the matrices of blocks; 0 if there is no decoder."""
    total = 0
    for block in filter(has_kernel, network.stack.layers() if may_decode(network) else ()):
        attention, feed_forward = block.attention, block.feedforward
        assert isinstance(attention, FullAttention)
        gate = feed_forward.gate
        joined = [attention.query, attention.key, attention.value]
        single = [attention.output, feed_forward.down]
        (single if gate is None else joined).append(feed_forward.up)
        joined += [] if gate is None else [gate]
        copied = joined + single if encoding in BYTES else joined
        total += BYTES.get(encoding, 4) * sum(part.weight.numel() for part in copied)
    return total


def table_bytes(network: LanguageModel, mem_len: int) -> int:
    """Size in bytes of the tables by distance with memory of `mem_len` tokens; 0 if there is no decoder."""
    tables: dict[Hashable, int] = {}
    for block in filter(has_kernel, network.stack.layers() if may_decode(network) else ()):
        attention = block.attention
        assert isinstance(attention, FullAttention)
        position, h, width = attention.position, attention.n_heads, attention.output.weight.shape[1]
        n = 1 + (min(mem_len, attention.window) if isinstance(attention, LocalAttention) else mem_len)
        if isinstance(position, XLPosition):
            is_shared = position.n_features * h <= width  # else the position keys of each layer are projected
            key: Hashable = "xl" if is_shared else position.relative
            rows = position.n_features if is_shared else width
        elif isinstance(position, (AlibiPosition, T5Position)):
            key, rows = (position.table if isinstance(position, T5Position) else "alibi", h), h
        else:
            continue
        tables[key] = max(tables.get(key, 0), 4 * rows * n)
    return sum(tables.values())
