"""Token embedding."""

from __future__ import annotations

from torch import Tensor, nn


class TokenEmbedding(nn.Module):
    """Rows of one matrix, multiplied by sqrt(dim) when `scaled` (Vaswani et al. 2017, section 3.4)."""

    def __init__(self, *, vocab_size: int, dim: int, scaled: bool, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, dim)
        self.scale = dim**0.5 if scaled else 1.0
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(b t) to (b t d)."""
        x = self.table(tokens)
        return self.dropout(x * self.scale if self.scale != 1.0 else x)  # type: ignore[no-any-return]
