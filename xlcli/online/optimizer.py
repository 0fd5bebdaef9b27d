"""Optimizer of adaptation: gradients divided by their root mean square, with decay toward the trained weights.

Krause et al. 2018 (section 3.2) divide by the root mean square of gradients on training text. Here the mean runs over
the blocks that were read, and that of a matrix is factored into rows and columns (Shazeer and Stern 2018, algorithm 4):
two vectors in place of a matrix, so a step reads and writes little more than weights and gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-16
"""Added to mean squares: gradients below its root count as zero."""


@dataclass(frozen=True)
class Optimizer:
    """Settings, and the names of the weights that change.

    Attributes:
        names: Weights that change.
        lr: Learning rate.
        decay: Share of the distance to the trained weights that a step takes back.
        beta: Share of the mean squares that a step keeps.
    """

    names: Collection[str]
    lr: float
    decay: float
    beta: float = 0.99

    def init_moments(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Mean squares before the first step: `NAME.rows` and `NAME.columns` of a matrix, `NAME` of other weights."""
        moments = {}
        for name, weight in weights.items():
            if weight.ndim == 2:
                moments[f"{name}.rows"] = weight.new_zeros(weight.shape[0])
                moments[f"{name}.columns"] = weight.new_zeros(weight.shape[1])
            else:
                moments[name] = torch.zeros_like(weight)
        return moments

    def step(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        trained: Mapping[str, Tensor],
        n_steps: int,
    ) -> None:
        """Changes weights and mean squares in place, after `n_steps` earlier steps.

        Of an embedding table, whose gradient is sparse, only the rows of the tokens change, each scaled by its own mean
        square.
        """
        correction = 1 / (1 - self.beta ** (n_steps + 1))
        for name, gradient in gradients.items():
            weight, origin = weights[name], trained[name]
            if gradient.is_sparse:
                self._step_rows(weight, gradient.coalesce(), moments[f"{name}.rows"], origin)
                continue
            if weight.ndim == 2:
                rows, columns = moments[f"{name}.rows"], moments[f"{name}.columns"]
                squares = gradient.square()
                rows.lerp_(squares.mean(1), 1 - self.beta)
                columns.lerp_(squares.mean(0), 1 - self.beta)
                of_rows, of_columns = rows * correction + EPSILON, columns * correction + EPSILON
                gradient = gradient * (of_rows.mean() / of_rows).sqrt_()[:, None]
                weight.addcmul_(gradient, of_columns.rsqrt(), value=-self.lr)
            else:
                mean = moments[name].mul_(self.beta).addcmul_(gradient, gradient, value=1 - self.beta)
                weight.addcmul_(gradient, (mean * correction + EPSILON).rsqrt(), value=-self.lr)
            if self.decay:
                weight.lerp_(origin, self.decay)

    def _step_rows(self, weight: Tensor, gradient: Tensor, means: Tensor, origin: Tensor) -> None:
        """A step of the rows of a table (n d) whose gradient is sparse."""
        rows, values = gradient.indices()[0], gradient.values()
        squares, before = values.square().mean(1), means[rows]
        mean = torch.where(before > 0, before.lerp(squares, 1 - self.beta), squares)
        means[rows] = mean
        new = weight[rows].addcmul_(values, (mean + EPSILON).rsqrt_()[:, None], value=-self.lr)
        weight[rows] = new.lerp_(origin[rows], self.decay)
