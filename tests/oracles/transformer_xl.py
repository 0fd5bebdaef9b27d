"""Transformer-XL from its paper (Dai et al. 2019), one query and one key at a time, in the type it is given."""

import math

import torch


def sinusoid(distance: int, n_features: int) -> torch.Tensor:
    """R_distance: sines of the distance times every frequency, then cosines (section 3.3; Vaswani et al. 2017)."""
    half = [10000 ** (-2 * f / n_features) for f in range(n_features // 2)]
    values = [math.sin(distance * w) for w in half] + [math.cos(distance * w) for w in half]
    return torch.tensor(values, dtype=torch.float64)


def attention(x, memory, weights, *, n_heads, n_features, window, clamp_len=None):
    """Branch output for each new token: equation of section 3.3, terms (a) to (d), a head at a time.

    `x` (t, d) new inputs, `memory` (m, d) older ones; `weights` maps paper names to matrices; `window` is how many
    tokens back a token sees (None: all). Key position j counts from the oldest remembered token.
    """
    rows = torch.cat((memory, x))
    m, t = len(memory), len(x)
    width = weights["W_q"].shape[0] // n_heads
    out = []
    for i in range(m, m + t):
        heads = []
        for h in range(n_heads):
            part = slice(h * width, (h + 1) * width)
            q = weights["W_q"][part] @ rows[i]
            scores, values = [], []
            for j in range(i + 1):
                if window is not None and i - j > window:
                    continue
                k = weights["W_kE"][part] @ rows[j]
                score = q @ k
                if "W_kR" in weights:
                    distance = i - j if clamp_len is None else min(i - j, clamp_len)
                    r = weights["W_kR"][part] @ sinusoid(distance, n_features).to(x.dtype)
                    score = score + q @ r + weights["u"][h] @ k + weights["v"][h] @ r
                scores.append(score / math.sqrt(width))
                values.append(weights["W_v"][part] @ rows[j])
            probabilities = torch.softmax(torch.stack(scores), 0)
            heads.append(sum(p * v for p, v in zip(probabilities, values, strict=True)))
        out.append(weights["W_o"] @ torch.cat(heads))
    return torch.stack(out)
