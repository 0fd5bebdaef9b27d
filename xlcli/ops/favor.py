"""FAVOR+: softmax attention estimated by random features, at a cost linear in time (Choromanski et al. 2021).

With rows w of a Gaussian matrix, exp(q·k) = E[exp(w·q - |q|²/2) exp(w·k - |k|²/2)] (lemma 1). These features are
positive and make attention a ratio of running sums over keys. Orthogonal rows lower the variance (section 2.4). Queries
and keys are each scaled by head_dim^-1/4, so the kernel is exp(q·k / √head_dim).

The features of a token depend on no other token. The usual stabilizer, a maximum over keys, would depend on later ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LIMIT = 40.0
"""Largest exponent of a key feature. 10^9 tokens at the limit sum to e^61; float32 ranges from e^-87 to e^88.

Features of a key of norm r at head width e are near exp(40 - e/2 - r²/2√e), and near exp(-r²/2√e) for e >= 80. At
e = 256 and r = 2√e, twice the usual norm, that is e^-32.
"""

CHUNK = 64  # number of tokens per chunk; fastest on a CPU for 64 to 256 features and head widths 32 and 64


def draw_features(
    n_features: int, head_dim: int, generator: torch.Generator | None, *, orthogonal: bool = True
) -> Tensor:
    """Gaussian matrix (f e). With `orthogonal`, blocks of `head_dim` rows are orthogonal; each row stays Gaussian."""
    n_blocks = math.ceil(n_features / head_dim)
    shape = (n_blocks, head_dim, head_dim)
    device = generator.device if generator else None
    rows = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
    if orthogonal:
        norms = torch.randn(shape, generator=generator, device=device, dtype=torch.float64).norm(dim=-1)
        directions, triangle = torch.linalg.qr(rows)
        # The distribution is uniform over rotations and reflections only if the diagonal of the triangle is positive.
        directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
        rows = directions * norms.unsqueeze(-1)
    return rows.flatten(0, 1)[:n_features].float()


def query_features(q: Tensor, w: Tensor) -> Tensor:
    """Features (b h t f) of unscaled queries (b h t e) with Gaussian matrix w (f e), in float32 or wider.

    They are scaled for each query so that the largest is 1; attention is unchanged.
    """
    q, w = _scaled(q, w)
    exponent = F.linear(q, w, -_share(w))
    # The scale cancels in the ratio and in its gradients, hence detach.
    return (exponent - exponent.detach().amax(-1, keepdim=True)).exp()


def key_features(k: Tensor, w: Tensor) -> Tensor:
    """Features (b h t f) of unscaled keys (b h t e) with Gaussian matrix w (f e), at most e^LIMIT; float32 or wider.

    Since w·k - |k|²/2 <= |w|²/2, features can be bounded for each key alone: the key feature is multiplied by
    e^(LIMIT - |w|²/2) and the query feature divided by it. For |w|²/2 > LIMIT the factor is 1, because ordinary keys
    would underflow; features of keys close to such a w are clamped.
    """
    k, w = _scaled(k, w)
    exponent = F.linear(k, w, _share(w)) - _half_square(k)
    return exponent.clamp(max=LIMIT).exp()


def attend_linear(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention out_i = Σ_{j<=i} (q_i·k_j) v_j / Σ_{j<=i} q_i·k_j, of features (b h t f) and values (b h t e).

    `s` (b h f e) is the sum of k ⊗ v over earlier tokens, `z` (b h f) that of k. Returns the output (b h t e), and both
    sums including the new tokens. Features and values have one type; sums may have a wider one, because errors add up.

    Computed in chunks: masked matrix products for the tokens of a chunk, running sums for the tokens before it.
    """
    if q.shape[2] == 1:
        s = s + k.mT * v
        z = z + k.squeeze(2)
        return _ratio(q @ s.to(q.dtype), q @ z.to(q.dtype).unsqueeze(-1)), s, z
    # The denominator is the numerator for a constant value of 1, appended as last column of v and s.
    v, s = F.pad(v, (0, 1), value=1.0), torch.cat((s, z.unsqueeze(-1)), dim=-1)
    out = []
    chunks = (torch.split(x, CHUNK, dim=2) for x in (q, k, v))
    for q_c, k_c, v_c in zip(*chunks, strict=True):
        within = (q_c @ k_c.mT).tril() @ v_c
        out.append(within + q_c @ s.to(q.dtype))
        s = s + k_c.mT @ v_c
    both = torch.cat(out, 2)
    return _ratio(both[..., :-1], both[..., -1:]), s[..., :-1], s[..., -1]


def _scaled(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """x · head_dim^-1/4 and w, in float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype) * x.shape[-1] ** -0.25, w.to(dtype)


def _half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


def _share(w: Tensor) -> Tensor:
    """LIMIT - |w|²/2 (f), at least 0: added to exponents of keys and subtracted from exponents of queries."""
    return (LIMIT - _half_square(w).squeeze(-1)).clamp(min=0.0)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / denominator.clamp(min=torch.finfo(denominator.dtype).tiny)
