"""LSH attention with shared queries and keys: the Reformer (Kitaev et al. 2020, section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from xlcli.config import MemoryDtype
from xlcli.config.attention import MAX_HASHES
from xlcli.memory import Buckets, Memory
from xlcli.memory.buckets import Unwritten
from xlcli.model.attention import Attention
from xlcli.model.position import Position
from xlcli.ops.context import AttentionContext
from xlcli.ops.layers import Linear
from xlcli.ops.lsh_attention import attend_hashed, attend_hashed_one
from xlcli.ops.lsh_gather import KeyWindow, Lookup
from xlcli.ops.lsh_table import Table, draw_rotations, hash_buckets, rank_in_buckets
from xlcli.ops.span import Span


class LSHAttention(Attention):
    """Multi-head attention to the last `bucket_size` earlier tokens of a token's bucket in each of `n_hashes` rounds.

    A key is its query divided by its norm. With `query_scale` queries are multiplied by a learned factor of their head,
    exp(`log_scale`), which has that initial value (as the scale of Henry et al. 2020, section 3). The hash directions
    `rotations` (r f e) are shared by all heads and saved with the model; they are NaN until `redraw`. The
    memory fixes the number of rounds used.
    """

    rotations: Tensor

    def __init__(
        self,
        *,
        dim: int,
        n_heads: int,
        head_dim: int,
        position: Position,
        factors: Sequence[int],
        bucket_size: int,
        n_hashes: int,
        dropout: float,
        query_scale: float | None = None,
    ) -> None:
        super().__init__(position)
        self.n_heads = n_heads
        self.factors = tuple(factors)
        self.bucket_size = bucket_size
        self.n_hashes = n_hashes
        self.dropout = dropout
        self.query = Linear(dim, n_heads * head_dim, bias=False)
        self.value = Linear(dim, n_heads * head_dim, bias=False)
        self.output = Linear(n_heads * head_dim, dim, bias=False)
        self.log_scale: nn.Parameter | None = None
        if query_scale is not None:
            self.log_scale = nn.Parameter(torch.empty(n_heads))
            self.initial_constants = {"log_scale": math.log(query_scale)}
        n_directions = sum(n // 2 for n in self.factors)
        self.register_buffer("rotations", torch.full((MAX_HASHES, n_directions, head_dim), math.nan))

    def redraw(self, generator: torch.Generator | None = None) -> None:
        r, _, e = self.rotations.shape
        with torch.no_grad():
            self.rotations.copy_(draw_rotations(r, self.factors, e, generator))

    def init_memory(self, batch: int, kind: Literal["keyvalue", "hidden"], dtype: MemoryDtype = "float32") -> Memory:
        like = self.rotations.to(torch.promote_types(self.rotations.dtype, torch.float32))
        n_buckets = math.prod(self.factors)
        return Buckets(Table.empty(like, batch, self.n_heads, self.n_hashes, n_buckets))

    def accepts(self, memory: Memory, span: Span, seen: int) -> bool:
        """True if kind and shape agree; the number of rounds may be any that there are directions for."""
        if not isinstance(memory, Buckets):
            return False
        n_heads, n_rounds, *rest = memory.shape
        layer_heads, _, *layer_rest = self.init_memory(0, "keyvalue").shape
        if n_heads != layer_heads or rest != layer_rest:
            return False
        has_directions = 1 <= n_rounds <= len(self.rotations)
        return has_directions and memory.table.n_slots in (0, self.bucket_size)  # 0: never written

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        assert isinstance(memory, Buckets)
        memory = memory.written()
        start = context.span.next_position(context.start)
        key_window = KeyWindow(start, start - context.n_memory, context.mask.max_distance)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, buckets = self.project(x, memory, context)
            if context.n_new == 1 and context.needs_output and torch.is_inference_mode_enabled():
                # One token reads its own buckets only, which is faster on a CPU.
                memory = memory.writable(self.bucket_size)
                y = attend_hashed_one(q, k, v, buckets, memory.stored, key_window)
            else:
                ranks = rank_in_buckets(buckets, memory.stored.counts)
                y = v  # read by nobody unless it is replaced
                if context.needs_output:
                    has_earlier = context.n_memory > 0 and memory.stored.n_slots > 0
                    lookup = Lookup(ranks, memory.stored if has_earlier else None, key_window, self.bucket_size)
                    y = attend_hashed(q, k, v, lookup, self.dropout if self.training else 0.0)
                if context.keep:
                    # The backward pass reads the table as it is now, so the next call writes the new tokens.
                    new = Unwritten(ranks, k.detach(), v.detach(), start, self.bucket_size)
                    memory = memory.extended(new)
        if not context.keep:
            memory = memory.empty()
        if not context.needs_output:
            return x, memory
        return context.apply(self.output, rearrange(y.to(self.output.weight.dtype), "b h t e -> b t (h e)")), memory

    def project(self, x: Tensor, memory: Buckets, context: AttentionContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values (b h t e) of x (b t d), and buckets (b h r t) in each round of the memory."""
        # Queries are hashed before they get positions, so the visible keys do not depend on those.
        x = x.to(self.query.weight.dtype)
        wide = torch.promote_types(x.dtype, torch.float32)
        heads = "b t (h e) -> b h t e"
        q = rearrange(self.query(x).to(wide), heads, h=self.n_heads)
        v = rearrange(self.value(x).to(wide), heads, h=self.n_heads)
        buckets = hash_buckets(q, self.rotations[: memory.n_rounds].to(wide), self.factors)
        q = self.position.place(q, context)
        k = F.normalize(q, dim=-1)
        if self.log_scale is not None:
            q = q * rearrange(self.log_scale.to(wide).exp(), "h -> h 1 1")
        return q, k, v, buckets
