"""Attention over compressive memory (Rae et al. 2020, section 3): recent tokens, and pooled blocks of older ones."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from xlcli.config import MemoryDtype
from xlcli.memory import Compressive, Hidden, Memory, TokenMemory
from xlcli.memory.compressive import Pool
from xlcli.model.attention import ProjectedAttention
from xlcli.model.attention.full import FullAttention
from xlcli.ops.attend import attend
from xlcli.ops.compression import CompressedCall, compressed_calls
from xlcli.ops.context import AttentionContext
from xlcli.ops.span import Span

POOLINGS: dict[str, Pool] = {"mean": lambda blocks: blocks.mean(2), "max": lambda blocks: blocks.amax(2)}
"""Value of `model.attention.pooling` to function without parameters."""


class ConvolutionPooling(nn.Module):
    """Convolution with kernel and stride c: the mean of a block plus a learned map, which is zero before training."""

    def __init__(self, dim: int, rate: int) -> None:
        super().__init__()
        self.mix = nn.Linear(rate * dim, dim, bias=False)
        self.initial_constants = {"mix.weight": 0.0}

    def forward(self, blocks: Tensor) -> Tensor:
        """Pooled vectors (b n d) of blocks (b n c d)."""
        flat = rearrange(blocks, "b n c d -> b n (c d)")
        return blocks.mean(2) + F.linear(flat, self.mix.weight.to(flat.dtype))


class CompressiveAttention(FullAttention):
    """Attends at least to the tokens of the span, and to `n_compressed` pooled blocks of `rate` tokens before them.

    A block of c layer inputs becomes one vector (Rae et al. 2020, section 3.2): the mean or maximum of each feature, or
    a convolution.
    """

    def __init__(self, *, dim: int, rate: int, n_compressed: int, pooling: str, **settings: Any) -> None:
        super().__init__(dim=dim, **settings)
        self.rate = rate
        self.n_compressed = n_compressed
        self.pooling: Pool = ConvolutionPooling(dim, rate) if pooling == "convolution" else POOLINGS[pooling]

    def init_memory(self, batch: int, kind: Literal["keyvalue", "hidden"], dtype: MemoryDtype = "float32") -> Memory:
        """Empty memory of `batch` sequences: keys and values, or layer inputs for training."""
        tokens, pooled = (super(CompressiveAttention, self).init_memory(batch, kind, dtype) for _ in range(2))
        assert isinstance(tokens, TokenMemory)
        assert isinstance(pooled, TokenMemory)
        weight = self.key.weight
        tail = torch.zeros(batch, self.rate - 1, self.key.in_features, dtype=weight.dtype, device=weight.device)
        return Compressive.kinds[type(tokens)](tokens, pooled, tail)

    def accepts(self, memory: Memory, span: Span, seen: int) -> bool:
        """True if kind, shape and lengths agree."""
        if not ProjectedAttention.accepts(self, memory, span, seen):
            return False
        assert isinstance(memory, Compressive)
        lengths = memory.tokens.length, memory.pooled.length
        if span.kind == "segment":
            return lengths == (span.n_kept(seen), 0)
        n_slots = self.n_compressed - -span.longest // self.rate
        return lengths == (min(seen, span.longest + self.rate - 1), n_slots if seen else 0)

    def receptive_field(self, n_memory: int) -> int | None:
        """Both tiers, at the place in a block from which a token sees most."""
        return n_memory + self.rate - 1 + self.rate * self.n_compressed

    def forward(self, x: Tensor, memory: Memory, context: AttentionContext) -> tuple[Tensor, Memory]:
        """Output (b t d) for input x (b t d), and the new memory."""
        assert isinstance(memory, Compressive)
        if context.span.kind == "segment":
            y, tokens = super().forward(x, memory.tokens, context)
            assert isinstance(tokens, TokenMemory)
            return y, type(memory)(tokens, memory.pooled, memory.tail)
        calls = compressed_calls(context, self.rate, self.n_compressed)
        learns = isinstance(memory.tokens, Hidden) and isinstance(self.pooling, ConvolutionPooling)
        parts, losses = [], []
        for own in calls:
            inputs, earlier = x, memory
            if own.rows is not None:
                inputs, earlier = x[own.rows], memory.map(partial(torch.index_select, dim=0, index=own.rows))
            q = self.queries(inputs, own.new)
            project, project_pooled = (partial(self.project, context=context) for context in (own.new, own.pooled))
            k, v, after = earlier.extend(inputs, self.pooling, project, project_pooled, own.tiers)
            y = attend(k=k, v=v, visible=own.visible, **self.terms(q, k, own.keys))
            parts.append((self.output(rearrange(y, "b h t e -> b t (h e)")), after))
            if learns and torch.is_grad_enabled():
                losses.append(self._reconstruction_loss(inputs, earlier, own))
        if losses:
            context.losses[id(memory)] = torch.stack(losses).sum() / x.shape[0]
        if len(parts) == 1:
            return parts[0]
        order = torch.cat([own.rows for own in calls if own.rows is not None]).argsort()
        memories = [after.tensors() for _, after in parts]
        joined = {name: torch.cat([m[name] for m in memories])[order] for name in memories[0]}
        return torch.cat([y for y, _ in parts])[order], type(memory).from_tensors(joined)

    def _reconstruction_loss(self, x: Tensor, memory: Compressive, own: CompressedCall) -> Tensor:
        """Attention-reconstruction loss (section 3.2, algorithm 2) of the blocks that leave the tier of tokens.

        Sum over sequences of the mean squared difference of the outputs of content-based attention of the new inputs
        over the tokens of these blocks and over the pooled blocks. Only the pooling function gets a gradient.
        """
        assert isinstance(memory.tokens, Hidden)
        blocks, rate, exact = own.tiers.leaving, self.rate, torch.promote_types(x.dtype, torch.float32)
        if not blocks:
            return x.new_zeros((), dtype=exact)
        x = x.detach().to(exact)
        inputs = torch.cat((memory.tokens.h.to(exact), x), dim=1).detach()
        first = memory.tokens.length + own.tiers.end(blocks.start) - rate + 1
        old = inputs[:, first : first + rate * len(blocks)]
        outputs = []
        with torch.autocast(x.device.type, enabled=False):  # 16 bits are too few for a difference of similar outputs
            q = self._frozen("query", x)
            for h in (old, self.pooling(rearrange(old, "b (n c) d -> b n c d", c=rate))):
                k, v = self._frozen("key", h), self._frozen("value", h)
                outputs.append(attend(q, k, v, visible=None, scale=self.scale))
        return F.mse_loss(outputs[0], outputs[1]) * len(x)

    def _frozen(self, name: Literal["query", "key", "value"], x: Tensor) -> Tensor:
        """Queries, keys or values (b h n e) of inputs (b n d), without positions and with constant weights."""
        layer = {n: p.detach().to(x.dtype) for n, p in self.get_submodule(name).named_parameters()}
        heads = self._heads(F.linear(x, **layer))
        if name == "value":
            return heads
        norm = self.get_submodule(f"{name}_norm")
        normalized: Tensor = functional_call(norm, {n: p.detach() for n, p in norm.named_parameters()}, (heads,))
        return normalized
