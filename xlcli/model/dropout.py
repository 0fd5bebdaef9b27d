"""Dropout layer (Srivastava et al. 2014)."""

from __future__ import annotations

from torch import Tensor, nn

from xlcli.ops.dropout import dropout


class Dropout(nn.Dropout):
    """Dropout of inputs of any shape in training."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs with some elements zero, unchanged outside training."""
        return dropout(x, self.p) if self.training and self.p else x
