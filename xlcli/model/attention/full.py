"""Softmax attention of new tokens over memory and themselves (Vaswani et al. 2017; Dai et al. 2019, section 3.2)."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor

from xlcli.config import MemoryDtype
from xlcli.memory import Hidden, Int8KeyValue, KeyValue, Memory, TokenBuffers, TokenMemory
from xlcli.model.attention import ProjectedAttention
from xlcli.model.position import ScoreRule
from xlcli.ops.attend import attend
from xlcli.ops.context import AttentionContext, VisibleKeys
from xlcli.ops.layers import ALL_ROWS
from xlcli.ops.scoring import Scoring, Sinks
from xlcli.ops.span import Span


class FullAttention(ProjectedAttention):
    """Multi-head attention; scores are multiplied by `scale`.

    `n_sinks` first tokens of a text are kept besides the memory, but not as layer inputs. `share` is as in `Dropout`.
    """

    share = ALL_ROWS

    def __init__(self, *, scale: float, dropout: float, n_sinks: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.scale = scale
        self.dropout = dropout
        self.n_sinks = n_sinks

    def init_memory(self, batch: int, kind: Literal["keyvalue", "hidden"], dtype: MemoryDtype = "float32") -> Memory:
        """Empty memory of `batch` sequences: keys and values, or layer inputs for training."""
        weight = self.key.weight
        like = torch.empty(0, dtype=weight.dtype, device=weight.device)  # not divided among ranks, as a weight may be
        if kind == "hidden":
            return Hidden(like.new_empty(batch, 0, weight.shape[1]))
        empty = like.new_empty(batch, self.n_kv_heads, 0, self.head_dim)
        if dtype == "int8":
            return Int8KeyValue(Int8KeyValue.encode(empty, empty), 0, 0)
        if dtype == "bfloat16":
            empty = empty.bfloat16()
        return KeyValue((empty, empty), 0, 0)

    def accepts(self, memory: Memory, span: Span, seen: int) -> bool:
        if not isinstance(memory, TokenMemory) or not super().accepts(memory, span, seen):
            return False
        n_sinks = 0 if isinstance(memory, Hidden) else min(self.n_sinks, seen)
        return memory.n_sinks == n_sinks and memory.length == self.receptive_field(span.n_kept(seen))

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        assert isinstance(memory, TokenMemory)
        if isinstance(memory, TokenBuffers) and memory.n_sinks < self.n_sinks:
            n_missing = self.n_sinks - memory.n_sinks
            memory = memory.with_sinks(*self.unplaced(x[:, :n_missing]))
        q = self.queries(x, context) if context.needs_output else None
        k, v, memory = memory.extend(x, partial(self.project, context=context), context.keep)
        if q is None:
            return x, memory
        sinks = None
        seen = None if self.training else context.visible_sinks(memory.n_sinks)
        if seen is not None:
            keys, values = memory.sinks
            sinks = Sinks(self.position.at_clamp(q, context), keys, values, seen)
        y = self.attend(q, k, v, context.mask, context, sinks)
        return context.apply(self.output, rearrange(y, "b h t e -> b t (h e)")), memory

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        context: AttentionContext,
        sinks: Sinks | None = None,
    ) -> Tensor:
        """Output (b h t w) for queries (b h t e), keys (b g s e) and values (b g s w), with all position terms."""
        position = self.position
        q_with_bias, term = position.term(q, context)
        scoring = Scoring(
            scale=self.scale,
            term=term,
            shifted=position.shifted(q, context),
            far=position.far(q, k, context),
            far_bias=context.far_bias,
            sinks=sinks,
            bias=position.bias(q, k, context, ScoreRule(self.scale, self._project_vectors)),
            value_bias=position.value_bias(context),
        )
        dropout = self.dropout if self.training else 0.0
        needed = None if context.rows is None else context.rows.needed
        return attend(q_with_bias, k, v, visible, scoring, dropout=dropout, share=self.share, needed=needed)

    def _project_vectors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(self._heads(self.query(x))), self.key_norm(self._heads(self.key(x)))
