"""Relative encoding of Transformer-XL (Dai et al. 2019, section 3.3): score = (q+u)·k + (q+v)·(W_R R_distance).

`biases.content` is the paper's u, `biases.position` its v, `relative` its W_{k,R}.

R are sinusoids of the distance. Let a and b be the sine and cosine halves of W_Rᵀ(q_i + v). The angle-difference
identities give exactly

    Σ_f a_f sin((i-j)ω_f) + b_f cos((i-j)ω_f) = q̃_i · p_j
    q̃_i = [a sin iω + b cos iω ; b sin iω - a cos iω]        p_j = [cos jω ; sin jω]

The position term is thus one more inner product, with keys that depend on the position only. The relative shift of the
paper computes (q + v)·(W_R R_distance), projects R in every call, and moves each row of scores to its place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from xlcli.model.position import Position
from xlcli.ops.context import AttentionContext
from xlcli.ops.positions import Positions, frequencies
from xlcli.ops.scoring import Clamp, ScoreTerm, ShiftedTerm


class XLBiases(nn.Module):
    """Bias vectors u and v (h e), one pair per layer or, tied, one pair for all layers."""

    def __init__(self, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.content = nn.Parameter(torch.empty(n_heads, head_dim))
        self.position = nn.Parameter(torch.empty(n_heads, head_dim))


class RotationTables(NamedTuple):
    """Constants of a call: sin iω twice and cos iω with both signs (t f) of its queries, and position keys (s f)."""

    sin: Tensor
    cos: Tensor
    keys: Tensor

    @classmethod
    def make(cls, positions: Positions, n_features: int, dtype: torch.dtype) -> RotationTables:
        """Tables of `n_features`, computed in float64, then rounded."""
        sin, cos = positions.angles(n_features, dtype)
        query_sin, query_cos = sin[positions.n_memory :], cos[positions.n_memory :]
        signed_cos = torch.cat((query_cos, -query_cos), dim=-1)
        return cls(torch.cat((query_sin, query_sin), dim=-1), signed_cos, torch.cat((cos, sin), dim=-1))


class XLPosition(Position):
    """The position term by rotated queries, or by the relative shift where that is faster or the only form.

    Distances are clamped at the `clamp_len` of the span. Beyond it the term is one number for each query.
    """

    def __init__(self, *, n_features: int, biases: XLBiases) -> None:
        super().__init__()
        self.n_heads, self.head_dim = biases.content.shape
        self.n_features = n_features
        self.relative = nn.Linear(n_features, biases.content.numel(), bias=False)
        self.biases = biases

    def term(self, q: Tensor, context: AttentionContext) -> tuple[Tensor, ScoreTerm | None]:
        """Queries q + u, and the position term of queries q̃ and keys p, unless `shifted` gives it."""
        content = q + rearrange(self.biases.content, "h e -> h 1 e").to(q.dtype)
        if self._uses_shift(context):
            return content, None
        form = self.n_features, q.dtype
        tables = context.constant(("tables", *form), lambda: RotationTables.make(context.positions, *form))
        c = self._by_feature(self._biased(q))
        query = rotate_query(c, tables)
        clamp_len = context.clamp_len
        if clamp_len is None:
            return content, ScoreTerm(query, tables.keys, None)

        def farthest() -> Tensor:
            return self._sinusoids(torch.tensor([clamp_len], device=q.device), q)

        clamp = Clamp(c @ context.constant(("farthest", *form), farthest).mT, clamp_len)
        return content, ScoreTerm(query, tables.keys, clamp)

    def _by_feature(self, q: Tensor) -> Tensor:
        """W_Rᵀ q (b h t f) of queries q (b h t e)."""
        weight = rearrange(self.relative.weight, "(h e) f -> h e f", h=self.n_heads).to(q.dtype)
        if q.device.type == "cpu":
            return q @ weight
        # The sequences of a head in one product: the matrices would be copied for each sequence.
        rows = rearrange(q, "b h t e -> h (b t) e") @ weight
        return rearrange(rows, "h (b t) f -> b h t f", b=len(q))

    def shifted(self, q: Tensor, context: AttentionContext) -> ShiftedTerm | None:
        """The position term of queries q + v and keys W_R R (h d e) by the distance; None where `term` gives it.

        There is a key for each distance that a query of this call sees, from the largest to 0.
        """
        if not self._uses_shift(context):
            return None

        def sinusoids() -> Tensor:
            farthest = context.positions.farthest(context.mask.max_distance)
            distances = torch.arange(farthest, -1, -1, device=q.device)
            if context.clamp_len is not None:
                distances = distances.clamp(max=context.clamp_len)
            return self._sinusoids(distances, self.relative.weight)

        sinusoids_of_call = context.constant(("sinusoids", self.n_features), sinusoids)  # the same for all layers
        keys = rearrange(self.relative(sinusoids_of_call), "d (h e) -> h d e", h=self.n_heads)
        return ShiftedTerm(self._biased(q), keys.to(q.dtype))

    def _uses_shift(self, context: AttentionContext) -> bool:
        """True if the position term is computed by the relative shift, false if by rotated queries.

        Both give the same numbers. With gradients, clamped distances need the shift. In inference the faster form is
        taken: on a CPU by the number of multiplications; on a GPU always rotation, because its fast kernels take a
        second inner product of queries and keys, but no scores.
        """
        # Only training is compiled; the compiler would divide a graph at the question for inference mode.
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return context.clamp_len is not None
        if context.device.type != "cpu":
            return False
        # Multiplications for each key and head; the shift also projects the sinusoids of each distance.
        by_rotation = context.n_new * self.n_features
        by_shift = context.n_new * self.head_dim + self.n_features * self.head_dim
        return by_shift < by_rotation

    def _sinusoids(self, distance: Tensor, like: Tensor) -> Tensor:
        """Sines and cosines (n f) of distances (n), in the type of `like`."""
        angle = distance[:, None] * frequencies(self.n_features, distance.device)
        return torch.cat((angle.sin(), angle.cos()), dim=-1).to(like.dtype)

    def _biased(self, q: Tensor) -> Tensor:
        """q + v (b h t e)."""
        return q + rearrange(self.biases.position, "h e -> h 1 e").to(q.dtype)


def rotate_query(c: Tensor, tables: RotationTables) -> Tensor:
    """Queries q̃ (b h t f) from c = W_Rᵀ(q + v) = [a ; b] (b h t f), sine half first."""
    halves_swapped = c.roll(c.shape[-1] // 2, dims=-1)  # [b ; a]
    return c * tables.sin + halves_swapped * tables.cos
