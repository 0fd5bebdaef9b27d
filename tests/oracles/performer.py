"""The Performer from its paper (Choromanski et al. 2021), one feature, query and key at a time, nothing stabilized."""

import torch


def feature(x, row):
    """One positive feature of the softmax kernel: exp(w·x - |x|²/2), section 2.3, lemma 1."""
    return torch.exp(row @ x - x @ x / 2)


def kernel(q, k, rows):
    """The estimate of exp(q·k / sqrt(e)): the mean over features; each side takes e^(1/4) of the temperature."""
    q, k = q / len(q) ** 0.25, k / len(k) ** 0.25
    return sum(feature(q, row) * feature(k, row) for row in rows) / len(rows)


def softmax_kernel(q, k):
    """What is estimated."""
    return torch.exp(q @ k / len(q) ** 0.5)


def attention(q, k, v, rows):
    """Causal attention (t e) of one head (section 2.2); the last len(q) keys are those of the queries' own tokens."""
    before = len(k) - len(q)
    out = []
    for i in range(len(q)):
        weights = [kernel(q[i], k[j], rows) for j in range(before + i + 1)]
        out.append(sum(w * v[j] for j, w in enumerate(weights)) / sum(weights))
    return torch.stack(out)


def rotated(x, position):
    """RoPE (Su et al. 2021, section 3.2.2) of one vector, feature f paired with feature f + e/2."""
    half = len(x) // 2
    out = x.clone()
    for f in range(half):
        angle = torch.tensor(position * 10000 ** (-2 * f / len(x)), dtype=torch.float64).to(x.dtype)
        sin, cos = torch.sin(angle), torch.cos(angle)
        out[f] = x[f] * cos - x[f + half] * sin
        out[f + half] = x[f] * sin + x[f + half] * cos
    return out


def branch(x, weights, rows, *, n_heads, rotate=False):
    """Branch output (t d) for the whole text x (t d); `weights` are W_q, W_k, W_v, W_o."""
    width = weights["W_q"].shape[0] // n_heads
    heads = []
    for h in range(n_heads):
        part = slice(h * width, (h + 1) * width)
        q, k, v = (x @ weights[name][part].T for name in ("W_q", "W_k", "W_v"))
        if rotate:
            q = torch.stack([rotated(row, i) for i, row in enumerate(q)])
            k = torch.stack([rotated(row, i) for i, row in enumerate(k)])
        heads.append(attention(q, k, v, rows))
    return torch.cat(heads, 1) @ weights["W_o"].T


def attend_linear(q, k, v, s, z):
    """Causal attention of features (b h t f) and values (b h t e), one token at a time, and the new sums s and z."""
    out = []
    for i in range(q.shape[2]):
        s = s + torch.einsum("bhf,bhe->bhfe", k[:, :, i], v[:, :, i])
        z = z + k[:, :, i]
        numerator = torch.einsum("bhf,bhfe->bhe", q[:, :, i], s)
        out.append(numerator / torch.einsum("bhf,bhf->bh", q[:, :, i], z)[..., None])
    return torch.stack(out, 2), s, z
