"""Position term of Transformer-XL (Dai et al. 2019, section 3.3), as rotation of the query and by the relative shift.

The score of query i and key j is (q_i + u)·k_j + (q_i + v)·(W_R R_{i-j}), where R are sinusoids of the distance. Let
a and b be the sine and cosine halves of W_Rᵀ(q_i + v). The angle-difference identities give exactly

    Σ_f a_f sin((i-j)ω_f) + b_f cos((i-j)ω_f) = q̃_i · p_j
    q̃_i = [a sin iω + b cos iω ; b sin iω - a cos iω]        p_j = [cos jω ; sin jω]

The position term is thus one more inner product, with keys that depend on the position only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rotate_query(c: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Queries q̃ (b h t f) from c = W_Rᵀ(q + v) (b h t f), sine half first, and query angles (t f/2)."""
    a, b = c.chunk(2, dim=-1)
    return torch.cat((a * sin + b * cos, b * sin - a * cos), dim=-1)


def position_keys(sin: Tensor, cos: Tensor) -> Tensor:
    """Keys p (s f) from key angles (s f/2)."""
    return torch.cat((cos, sin), dim=-1)


def shifted_scores(q: Tensor, r: Tensor) -> Tensor:
    """Position term by the relative shift of the paper (appendix B).

    Args:
        q: Queries plus position bias, q + v (b h t e).
        r: Projected sinusoids W_R R (h s e) for distances s-1 down to 0.

    Returns:
        Scores (b h t s). Entries of future keys are arbitrary and must be masked.
    """
    scores = torch.einsum("bhte,hse->bhts", q, r)
    b, h, t, s = scores.shape
    padded = F.pad(scores, (1, 0)).view(b, h, s + 1, t)
    return padded[:, :, 1:].reshape(b, h, t, s)
