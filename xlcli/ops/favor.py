"""FAVOR+: softmax attention estimated by random features, at a cost linear in time (Choromanski et al. 2021).

With rows w of a Gaussian matrix, exp(q·k) = E[exp(w·q - |q|²/2) exp(w·k - |k|²/2)] (lemma 1): positive features, which
make attention a ratio of running sums over keys. Orthogonal rows lower the variance (section 2.4). Queries and keys are
each scaled by head_dim^-1/4, so that the kernel is exp(q·k / √head_dim).

No feature depends on another token: a maximum over keys, the usual stabilizer, would tell a query of later ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LIMIT = 40.0
"""Largest exponent of a key feature: 10^9 tokens at the limit sum to e^61, and float32 reaches from e^-87 to e^88.

A key of norm r at head width e lies near exp(40 - e/2 - r²/2√e), from e = 80 on near exp(-r²/2√e): at e = 256 and twice
the ordinary norm √e that is e^-32.
"""

CHUNK = 64
"""Tokens attended at once; measured on a CPU for 64 to 256 features and head widths 32 and 64."""


def draw_features(
    n_features: int, head_dim: int, generator: torch.Generator | None, *, orthogonal: bool = True
) -> Tensor:
    """Rows of a Gaussian matrix (f e); orthogonal within blocks of `head_dim` rows, each row Gaussian by itself."""
    shape = (-(-n_features // head_dim), head_dim, head_dim)
    device = generator.device if generator else None
    rows = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    if orthogonal:
        norms = torch.randn(shape, generator=generator, device=device, dtype=torch.float64).norm(dim=-1)
        directions, triangle = torch.linalg.qr(rows)
        # Uniform over all rotations and reflections only with the signs that make the triangle's diagonal positive.
        directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        rows = directions * norms.unsqueeze(-1)
    return rows.flatten(0, 1)[:n_features].float()


def query_features(q: Tensor, w: Tensor) -> Tensor:
    """Features (b h t f) of queries (b h t e), up to a factor for each query, which cancels: the largest is 1.

    Args:
        q: Queries, unscaled. The result is float32, or float64 where they are.
        w: Rows of a Gaussian matrix (f e).
    """
    q, w = _scaled(q, w)
    exponent = F.linear(q, w, -_share(w))
    # The factor cancels from gradients as well.
    return (exponent - exponent.detach().amax(-1, keepdim=True)).exp()


def key_features(k: Tensor, w: Tensor) -> Tensor:
    """Features (b h t f) of keys (b h t e), at most e^LIMIT.

    Since w·k - |k|²/2 <= |w|²/2, features are bounded without a look at another key: the key's is multiplied by
    e^(LIMIT - |w|²/2) and the query's divided. Where |w|²/2 > LIMIT that would make ordinary keys underflow and is left
    out; what a key nearly equal to such a w then has above the limit is cut off.

    Args:
        k: Keys, unscaled. The result is float32, or float64 where they are.
        w: Rows of a Gaussian matrix (f e).
    """
    k, w = _scaled(k, w)
    exponent = F.linear(k, w, _share(w)) - _half_square(k)
    return exponent.clamp(max=LIMIT).exp()


def attend_linear(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention out_i = Σ_{j<=i} (q_i·k_j) v_j / Σ_{j<=i} q_i·k_j.

    A chunk of tokens at a time: masked matrix products within it, the running sums for what is before it. q, k and v
    are of one type; sums may be wider, as they should be when very many tokens are added one at a time.

    Args:
        q: Features of queries (b h t f).
        k: Features of keys (b h t f).
        v: Values (b h t e).
        s: Σ k ⊗ v of the tokens before (b h f e).
        z: Σ k of the tokens before (b h f).

    Returns:
        out (b h t e), and s and z with these tokens added.
    """
    if q.shape[2] == 1:
        return _attend_one(q, k, v, s, z)
    # The denominator is the numerator of a value that is always one: a last column of v and s.
    v, s = F.pad(v, (0, 1), value=1.0), torch.cat((s, z.unsqueeze(-1)), dim=-1)
    out = []
    for q_c, k_c, v_c in zip(*(torch.split(x, CHUNK, dim=2) for x in (q, k, v)), strict=True):
        out.append((q_c @ k_c.mT).tril() @ v_c + q_c @ s.to(q.dtype))
        s = s + k_c.mT @ v_c
    both = torch.cat(out, 2)
    return _ratio(both[..., :-1], both[..., -1:]), s[..., :-1], s[..., -1]


def _attend_one(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_linear` of a single token."""
    s = s + k.mT * v
    z = z + k.squeeze(2)
    return _ratio(q @ s.to(q.dtype), q @ z.to(q.dtype).unsqueeze(-1)), s, z


def _scaled(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x · head_dim^-1/4 and w, in float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) * x.shape[-1] ** -0.25, w.to(dtype)


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


def _share(w: Tensor) -> Tensor:
    """LIMIT - |w|²/2 (f), or 0 when that is less: added to the exponents of keys, taken from those of queries."""
    return (LIMIT - _half_square(w).squeeze(-1)).clamp(min=0.0)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / denominator.clamp(min=torch.finfo(denominator.dtype).tiny)
