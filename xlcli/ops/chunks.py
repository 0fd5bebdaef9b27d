"""Chunks of tokens or of attention scores: the intermediate values of only one chunk are in memory, or in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def map_chunks(function: Callable[..., Tensor], parts: Iterable[tuple[Tensor, ...]], device: torch.device) -> Tensor:
    """Concatenation (b t ...) of the results (b c ...) of `function` for each part.

    Only the parts are saved for the backward pass, which recomputes each result with the same dropout.
    """
    if not torch.is_grad_enabled():
        return torch.cat([function(*part) for part in parts], dim=1)
    # With its cache, autocast would share one 16-bit copy of a weight among parts and sum its gradients in 16 bits.
    with torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    ):
        return torch.cat([checkpoint(function, *part, use_reentrant=False) for part in parts], dim=1)


def score_chunks(n_rows: int, n_heads: int, size: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Sequences and heads of chunks of attention scores: whole sequences, or some heads of one sequence.

    Args:
        n_rows: Number of sequences.
        n_heads: Number of heads.
        size: Number of scores of one head of one sequence.
        limit: Maximum number of scores of a chunk, unless those of one head are more.
    """
    at_once = max(1, limit // size)
    rows, heads = max(1, at_once // n_heads), min(at_once, n_heads)
    for row in range(0, n_rows, rows):
        for head in range(0, n_heads, heads):
            yield slice(row, min(row + rows, n_rows)), slice(head, min(head + heads, n_heads))
