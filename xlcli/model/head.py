"""From the last hidden states to predictions: per-token surprisal in token order, or logits.

softmax      one table; factorized when a matrix narrows the hidden states first
adaptive     the vocabulary in clusters, rare ones normalized by themselves (Grave et al. 2017)

A head's matrices are given to it and may be the embedding's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from xlcli.model.embedding import cluster_of
from xlcli.ops.chunks import map_chunks

MOST_LOGITS = 2**23
"""Beyond how many numbers the loss is computed in chunks of its own accord, each about as large.

In float32 that is 32 MiB, from where on the C library of Linux hands memory back as soon as it is free.
"""


class Head(nn.Module):
    """The base of every head. `width` is how many logits it takes, at most, to score a token.

    `loss_chunk` is how many tokens of each row are scored at a time; None is as many as `MOST_LOGITS` allows.
    """

    def __init__(self, *, width: int, loss_chunk: int | None) -> None:
        super().__init__()
        self.width = width
        self.loss_chunk = loss_chunk

    def logits(self, x: Tensor) -> Tensor:
        """(... d) to float32 or wider (... v), whose softmax is the prediction."""
        raise NotImplementedError

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """As `nll`, with all logits alive."""
        raise NotImplementedError

    def nll(self, x: Tensor, targets: Tensor) -> Tensor:
        """Nats (b t) of `targets` (b t) given x (b t d), in the order of the tokens."""
        n_new = x.shape[1]
        chunk = self.loss_chunk or -(-MOST_LOGITS // (x.shape[0] * self.width))
        if chunk >= n_new:
            return self.losses(x, targets)
        # Slices made when they are needed, not `split`: their gradients are added up one by one. Those of a split all
        # stay until the last is there, and the gaps between them do not take another gradient of the table.
        parts = ((x[:, i : i + chunk], targets[:, i : i + chunk]) for i in range(0, n_new, chunk))
        return map_chunks(self.losses, parts, x.device)


class SoftmaxHead(Head):
    """Linear map to the vocabulary by a table (v w); `projection` (d w), if any, projects x to w features first."""

    def __init__(
        self, *, weight: Tensor, projection: Tensor | None = None, bias: bool, loss_chunk: int | None = None
    ) -> None:
        super().__init__(width=weight.shape[0], loss_chunk=loss_chunk)
        self.weight = weight
        self.projection = projection
        self.bias = nn.Parameter(torch.empty(weight.shape[0])) if bias else None

    def project(self, x: Tensor) -> Tensor:
        """(... d) to (... w)."""
        return x if self.projection is None else x @ self.projection

    def logits(self, x: Tensor) -> Tensor:
        """(... d) to float32 or wider (... v)."""
        return _widen(F.linear(self.project(x), self.weight, self.bias))

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Nats (b t) of `targets` (b t) given x (b t d)."""
        losses = _cross_entropy(rearrange(self.logits(x), "b t v -> (b t) v"), rearrange(targets, "b t -> (b t)"))
        return rearrange(losses, "(b t) -> b t", b=x.shape[0])


class AdaptiveHead(Head):
    """Adaptive softmax (Grave et al. 2017, section 4.3) over clusters of words sorted by frequency.

    The first cluster is predicted together with a logit for each later one, a tail, whose words share the probability
    of that logit. Tails are counted from the front: cluster i is logit cutoffs[0] + i - 1. As in Transformer-XL the
    vectors of these logits are as wide as the first cluster's words, and are used where those are.
    """

    def __init__(
        self, *, clusters: Sequence[SoftmaxHead], cutoffs: Sequence[int], bias: bool, loss_chunk: int | None = None
    ) -> None:
        width = cutoffs[0] + len(cutoffs) + max(tail.width for tail in clusters[1:])
        super().__init__(width=width, loss_chunk=loss_chunk)
        self.cutoffs = tuple(cutoffs)
        self.first, self.rest = clusters[0], nn.ModuleList(clusters[1:])
        self.tails = nn.Linear(clusters[0].weight.shape[1], len(cutoffs), bias=bias)

    def logits(self, x: Tensor) -> Tensor:
        """(... d) to log-probabilities (... v) of all words."""
        head = self._head(x).log_softmax(-1)
        words, tails = head.tensor_split([self.cutoffs[0]], dim=-1)
        rare = [tails[..., i, None] + tail.logits(x).log_softmax(-1) for i, tail in enumerate(self._tails())]
        return torch.cat((words, *rare), dim=-1)

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Nats (b t) of `targets` (b t) given x (b t d). A tail scores only its own words."""
        hidden, words = rearrange(x, "b t d -> (b t) d"), rearrange(targets, "b t -> (b t)")
        cluster = cluster_of(words, self.cutoffs)
        frequent = cluster == 0
        losses = _cross_entropy(self._head(hidden), torch.where(frequent, words, self.cutoffs[0] + cluster - 1))
        for i, (start, tail) in enumerate(zip(self.cutoffs, self._tails(), strict=True), start=1):
            rows = (cluster == i).nonzero().squeeze(1)
            within = _cross_entropy(tail.logits(hidden[rows]), words[rows] - start)
            losses = losses.index_add(0, rows, within)
        return rearrange(losses, "(b t) -> b t", b=x.shape[0])

    def _tails(self) -> Iterator[SoftmaxHead]:
        for tail in self.rest:
            assert isinstance(tail, SoftmaxHead)
            yield tail

    def _head(self, x: Tensor) -> Tensor:
        """Logits (... cutoffs[0] + n) of the first cluster's words and the n tails."""
        x = self.first.project(x)
        words = F.linear(x, self.first.weight, self.first.bias)
        return _widen(torch.cat((words, self.tails(x)), dim=-1))


def _widen(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none")
