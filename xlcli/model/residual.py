"""Residual connections: the input of a branch, and the sum of its output and the stream x.

pre        x + branch(norm(x))              Xiong et al. 2020
post       norm(x + branch(x))              Vaswani et al. 2017, and the published Transformer-XL
sandwich   x + norm(branch(norm(x)))        Ding et al. 2021
rezero     x + alpha branch(x)              Bachlechner et al. 2021; alpha is learned and starts at 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from xlcli.model.dropout import Dropout


class Residual(nn.Module):
    """x + branch(x)."""

    initial_constants: ClassVar[Mapping[str, float]] = {}
    """Parameters with a constant initial value (`model/init.py`)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)

    def pre(self, x: Tensor) -> Tensor:
        """Input of the branch (b t d)."""
        return x

    def post(self, y: Tensor) -> Tensor:
        """Addition to the stream (b t d), from the output of the branch."""
        return self.dropout(y)  # type: ignore[no-any-return]

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        """Stream (b t d) after the branch."""
        return x + self.post(y)


class PreNorm(Residual):
    """x + branch(norm(x))."""

    def __init__(self, norm: nn.Module, dropout: float) -> None:
        super().__init__(dropout)
        self.norm = norm

    def pre(self, x: Tensor) -> Tensor:
        """norm(x)."""
        return self.norm(x)  # type: ignore[no-any-return]


class PostNorm(Residual):
    """norm(x + branch(x))."""

    def __init__(self, norm: nn.Module, dropout: float) -> None:
        super().__init__(dropout)
        self.norm = norm

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        """Normalized sum."""
        return self.norm(x + self.post(y))  # type: ignore[no-any-return]


class Sandwich(PreNorm):
    """x + norm(branch(norm(x)))."""

    def __init__(self, norm: nn.Module, last_norm: nn.Module, dropout: float) -> None:
        super().__init__(norm, dropout)
        self.last_norm = last_norm

    def post(self, y: Tensor) -> Tensor:
        """norm(y)."""
        return super().post(self.last_norm(y))


class ReZero(Residual):
    """x + alpha branch(x)."""

    initial_constants: ClassVar[Mapping[str, float]] = {"alpha": 0.0}

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.alpha = nn.Parameter(torch.empty(()))

    def post(self, y: Tensor) -> Tensor:
        """alpha y."""
        return super().post(self.alpha * y)
