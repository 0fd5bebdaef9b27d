"""Dropout layer (Srivastava et al. 2014)."""

from __future__ import annotations

from torch import Tensor, nn

from xlcli.ops.dropout import ALL_ROWS, dropout


class Dropout(nn.Dropout):
    """Dropout of inputs of any shape in training.

    Attributes:
        share: Rows of the batch that the inputs are.
    """

    share = ALL_ROWS

    def forward(self, x: Tensor) -> Tensor:
        """Inputs with some elements zero, unchanged outside training."""
        return dropout(x, self.p, self.share) if self.training and self.p else x
