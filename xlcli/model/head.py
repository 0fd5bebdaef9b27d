"""From the last hidden states to predictions: per-token surprisal in token order, or logits."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F


class SoftmaxHead(nn.Module):
    """Linear map to the vocabulary; its weight (v d) may be the embedding's."""

    def __init__(self, *, weight: Tensor, bias: bool) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.empty(weight.shape[0])) if bias else None

    def logits(self, x: Tensor) -> Tensor:
        """(... d) to float32 or wider (... v)."""
        logits = F.linear(x, self.weight, self.bias)
        return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits

    def nll(self, x: Tensor, targets: Tensor) -> Tensor:
        """Nats (b t) of `targets` (b t) given x (b t d)."""
        losses = F.cross_entropy(
            rearrange(self.logits(x), "b t v -> (b t) v"), rearrange(targets, "b t -> (b t)"), reduction="none"
        )
        return rearrange(losses, "(b t) -> b t", b=x.shape[0])
