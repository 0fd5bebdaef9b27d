"""Output heads: logits, or surprisal of each token, from the last hidden states.

softmax      one table, optionally after a projection to fewer features
adaptive     clusters of the vocabulary, rare ones normalized separately (Grave et al. 2017)

The matrices of a head are arguments and may be shared with the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from xlcli.model.embedding import cluster_of
from xlcli.ops.layers import linear, map_chunks

MAX_LOGITS = {"cpu": 2**23, "cuda": 2**27}
"""Number of logits by device type above which the loss is computed in chunks of about this size.

In float32 a chunk on a CPU takes 32 MiB; glibc returns larger blocks to the system as soon as they are freed. On a GPU
each chunk costs the start of some dozen kernels, here and again in the backward pass.
"""


class Readout:
    """What is kept of predictions: by default all log-probabilities."""

    layers: Sequence[int] = ()  # numbers, from 1, of further blocks that predict, by the last norm and the head

    def __call__(self, log_p: Tensor, targets: Tensor) -> Tensor:
        """Features (b t f) of log-probabilities (b t v) and the tokens (b t) that came."""
        return log_p


class Head(nn.Module):
    """Base of every head.

    `width` is the largest number of logits of one token, `loss_chunk` the number of tokens of each sequence whose loss
    is computed at once; None derives it from `MAX_LOGITS`. `softcap` limits logits z to softcap·tanh(z/softcap).
    """

    def __init__(self, *, width: int, loss_chunk: int | None = None, softcap: float | None = None) -> None:
        super().__init__()
        self.width = width
        self.loss_chunk = loss_chunk
        self.softcap = softcap

    def logits(self, x: Tensor) -> Tensor:
        """Logits (... v) of hidden states (... d), in float32 or wider; their softmax is the prediction."""
        raise NotImplementedError

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """`nll` without chunks: all logits are in memory."""
        raise NotImplementedError

    def nll(self, x: Tensor, targets: Tensor) -> Tensor:
        """Surprisal in nats (b t) of targets (b t), given hidden states x (b t d)."""
        chunks = self._chunks(x)
        if len(chunks) == 1:
            return self.losses(x, targets)
        # Slices, not `split`: the gradients of the parts of `split` all stay allocated until the last one is computed,
        # and fragment the memory that the gradient of the table needs.
        return map_chunks(self.losses, ((x[:, part], targets[:, part]) for part in chunks), x.device)

    @torch.no_grad()
    def read_out(self, x: Tensor, targets: Tensor, readout: Readout) -> tuple[Tensor, Tensor]:
        """`nll`, and `readout` (b t f) of the predictions of targets (b t) that hidden states x (b t d) make.

        The surprisal is that of `nll` to a unit in its last place, without computing the logits twice.
        """
        nll, features = [], []
        for part in self._chunks(x):
            log_p = _log_softmax(self.logits(x[:, part]))
            nll.append(-log_p.gather(-1, targets[:, part, None]).squeeze(-1))
            features.append(readout(log_p, targets[:, part]))
        return torch.cat(nll, dim=1), torch.cat(features, dim=1)

    def _chunks(self, x: Tensor) -> list[slice]:
        """Slices of the tokens of hidden states x (b t d) whose logits are in memory at once."""
        n_tokens = self.loss_chunk
        if n_tokens is None:
            logits_per_place = x.shape[0] * self.width
            n_tokens = math.ceil(MAX_LOGITS[x.device.type] / logits_per_place)
        return [slice(i, i + n_tokens) for i in range(0, x.shape[1], n_tokens)]

    def limit(self, logits: Tensor) -> Tensor:
        """Logits limited by `softcap`, in float32 or wider; unchanged without it."""
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(_widen(logits) / self.softcap)


class SoftmaxHead(Head):
    """Linear layer with table (v w); `projection` (d w), if any, comes first. `gradient_dtype` is as in `Linear`."""

    gradient_dtype: torch.dtype | None = None

    def __init__(self, *, weight: Tensor, projection: Tensor | None = None, bias: bool, **settings: Any) -> None:
        super().__init__(width=weight.shape[0], **settings)
        self.weight = weight
        self.projection = projection
        self.bias = nn.Parameter(torch.empty(weight.shape[0])) if bias else None

    def project(self, x: Tensor) -> Tensor:
        if self.projection is None:
            return x
        return x @ self.projection

    def logits(self, x: Tensor) -> Tensor:
        return _widen(self.scores(x))

    def scores(self, x: Tensor) -> Tensor:
        """`logits` in the type of the matrix product, 16-bit under autocast."""
        return self.limit(linear(self.project(x), self.weight, self.bias, self.gradient_dtype))

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        losses = cross_entropy(self.scores(rearrange(x, "b t d -> (b t) d")), rearrange(targets, "b t -> (b t)"))
        return rearrange(losses, "(b t) -> b t", b=x.shape[0])


class AdaptiveHead(Head):
    """Adaptive softmax (Grave et al. 2017, section 4.3) over clusters of words sorted by frequency.

    The first softmax has the words of the first cluster and one logit for each other cluster, its tail. The probability
    of a tail is divided among its words by a softmax of its own. Cluster i has logit cutoffs[0] + i - 1. As in
    Transformer-XL, the vectors of tail logits have the width of the first cluster, of projected hidden states.
    """

    def __init__(self, *, clusters: Sequence[SoftmaxHead], cutoffs: Sequence[int], bias: bool, **settings: Any) -> None:
        width = cutoffs[0] + len(cutoffs) + max(tail.width for tail in clusters[1:])
        super().__init__(width=width, **settings)
        self.cutoffs = tuple(cutoffs)
        self.first = clusters[0]
        self.rest: Sequence[SoftmaxHead] = nn.ModuleList(clusters[1:])  # type: ignore[assignment]
        self.tails = nn.Linear(clusters[0].weight.shape[1], len(cutoffs), bias=bias)

    def logits(self, x: Tensor) -> Tensor:
        """Log-probabilities (... v) of all words, given hidden states (... d)."""
        head = _widen(self._head(x)).log_softmax(-1)
        words, tails = head.tensor_split([self.cutoffs[0]], dim=-1)
        rare = [tails[..., i, None] + tail.logits(x).log_softmax(-1) for i, tail in enumerate(self.rest)]
        return torch.cat((words, *rare), dim=-1)

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Surprisal in nats (b t) of targets (b t), given hidden states x (b t d). A tail scores its own words only."""
        hidden, words = rearrange(x, "b t d -> (b t) d"), rearrange(targets, "b t -> (b t)")
        cluster = cluster_of(words, self.cutoffs)
        # In the first softmax the target is the word itself, or the tail that has it.
        tail_logit = self.cutoffs[0] + cluster - 1
        losses = cross_entropy(self._head(hidden), torch.where(cluster == 0, words, tail_logit))
        for i, (start, tail) in enumerate(zip(self.cutoffs, self.rest, strict=True), start=1):
            rows = (cluster == i).nonzero().squeeze(1)
            within = cross_entropy(tail.scores(hidden[rows]), words[rows] - start)
            losses = losses.index_add(0, rows, within)
        return rearrange(losses, "(b t) -> b t", b=x.shape[0])

    def _head(self, x: Tensor) -> Tensor:
        """Logits (... cutoffs[0] + n) of the words of the first cluster and of the n tails."""
        x = self.first.project(x)
        words = linear(x, self.first.weight, self.first.bias, self.first.gradient_dtype)
        return self.limit(torch.cat((words, self.tails(x)), dim=-1))


def _widen(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


CHUNK = 2**17  # number of logits whose float32 values a CPU holds at once: 512 KiB stay in its cache (measured)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Surprisal in nats (n), in float32 or wider, of targets (n) under logits (n v) of any floating type."""
    # Without a gradient, a CPU sums probabilities in float64: the sum of 50,000 in float32 is 1e-5 off (measured).
    if logits.device.type == "cpu":
        return _CrossEntropy.apply(logits, targets)  # type: ignore[no-any-return, no-untyped-call]
    return F.cross_entropy(_widen(logits), targets, reduction="none")


def _log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities (... v), summed as in `cross_entropy`, on a CPU in the place of the logits."""
    if logits.device.type != "cpu":
        return logits.log_softmax(-1)
    flat = logits.view(-1, logits.shape[-1])
    for rows in _chunks(flat):
        flat[rows] = flat[rows].log_softmax(-1, dtype=torch.float64)
    return logits


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        nll = logits.new_empty(len(targets), dtype=dtype)
        for rows in _chunks(logits):
            part, index = logits[rows].to(dtype), targets[rows, None]
            if ctx.needs_input_grad[0]:
                nll[rows] = -part.log_softmax(-1).gather(1, index).squeeze(1)
            else:
                # log Σ exp(z) - z of the target, with the largest z taken out of the exponents.
                most = part.amax(-1, keepdim=True)
                total = (part - most).exp_().sum(-1, keepdim=True, dtype=torch.float64)
                nll[rows] = (total.log() + most - part.gather(1, index)).squeeze(1).to(dtype)
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows in _chunks(logits):
            # The gradient of logits is the softmax, less 1 at the target.
            scale = grad[rows, None]
            p = logits[rows].softmax(-1, dtype=grad.dtype)
            out[rows] = p.mul_(scale).scatter_add_(1, targets[rows, None], -scale)
        return out, None


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of the rows of logits (n v), each of about `CHUNK` logits."""
    n, size = len(logits), max(1, CHUNK // logits.shape[1])
    return [slice(i, i + size) for i in range(0, n, size)]
