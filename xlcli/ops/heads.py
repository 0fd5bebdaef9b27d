"""Products of heads of queries with heads of keys and values, each of which several heads of queries may share.

Ainslie et al. 2023 (grouped-query attention): successive heads of queries read one head of keys and values.
"""

from __future__ import annotations

from torch import Tensor


def share(x: Tensor, keys: Tensor) -> Tensor:
    """Rows of the heads of x (... h t e) joined to those of the g heads of keys (... g s e): (... g h/g·t e).

    A view if x is contiguous or every head has its own keys.
    """
    *rows, h, t, e = x.shape
    g = keys.shape[-3]
    return x if h == g else x.reshape(*rows, g, h // g * t, e)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Product (... h t s) of each head of x (... h t e) with its head of y (... g e s)."""
    return (share(x, y) @ y).view(*x.shape[:-1], y.shape[-1])
