"""The Universal Transformer from its paper (Dehghani et al. 2019), one position, step and head at a time.

With `halt`, adaptive computation time (Graves 2016, section 2). Positions are read in order, so that the future cannot
matter; what a position offered as key at a step is kept for those after it.
"""

from typing import NamedTuple

import torch

from oracles import transformer_xl


class Outputs(NamedTuple):
    """States (t d) given back, the weight (t n_steps) of each step in them, N(t) and rho(t) = N(t) + R(t)."""

    out: torch.Tensor
    weights: torch.Tensor
    steps: list[int]
    ponder: list[torch.Tensor]


def layer_norm(x, gain, bias):
    """Ba et al. 2016, equation 4, with 1e-5 under the root."""
    deviation = x - x.sum() / len(x)
    return gain * deviation / ((deviation**2).sum() / len(x) + 1e-5).sqrt() + bias


def block(row, older, weights, *, n_heads, window):
    """Equations 2 and 3 for one position, whose H + P is `row`; `older` (m d) are those of the positions before."""
    attended = transformer_xl.attention(row[None], older, weights, n_heads=n_heads, n_features=0, window=window)[0]
    a = layer_norm(row + attended, *weights["norm_1"])
    inner = (weights["W_1"] @ a + weights["b_1"]).clamp(min=0)
    return layer_norm(a + weights["W_2"] @ inner + weights["b_2"], *weights["norm_2"])


def read(inputs, blocks, *, n_steps, n_heads, window, steps_marked, positions_marked, halt=None, epsilon=None):
    """Inputs (t d) through `n_steps` steps of all `blocks`.

    Steps are counted from 1, positions from 0 as in Vaswani et al. 2017; both are marked by the sum of their sinusoids
    (equations 4 and 5), the position before every block. `halt` are w (d) and b.
    """
    width = inputs.shape[1]
    offered = [[inputs.new_empty(0, width) for _ in blocks] for _ in range(n_steps)]
    out, weights, steps, ponder = [], [], [], []
    for position, state in enumerate(inputs):
        spent, n, rest = inputs.new_zeros(()), None, None
        shares, states = [], []
        for step in range(1, n_steps + 1):
            row = state + transformer_xl.sinusoid(step, width) if steps_marked else state
            for b, named in enumerate(blocks):
                if positions_marked:
                    row = row + transformer_xl.sinusoid(position, width)
                older, offered[step - 1][b] = offered[step - 1][b], torch.cat((offered[step - 1][b], row[None]))
                row = block(row, older, named, n_heads=n_heads, window=window)
            if n is not None:
                shares.append(inputs.new_zeros(()))
                continue
            states.append(row)
            state = row
            if halt is None:
                shares.append(inputs.new_tensor(float(step == n_steps)))
                continue
            p = 1 / (1 + (-(halt[0] @ row + halt[1])).exp())
            if spent + p > 1 - epsilon or step == n_steps:
                n, rest = step, 1 - spent
                shares.append(rest)
            else:
                shares.append(p)
                spent = spent + p
        out.append(sum(share * made for share, made in zip(shares, states, strict=False)))
        weights.append(torch.stack(shares))
        steps.append(n)
        ponder.append(None if n is None else n + rest)
    return Outputs(torch.stack(out), torch.stack(weights), steps, ponder)
