"""How much of what full attention would weigh does hashed attention find? Asked of a model on a text of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from xlcli.memory import Buckets
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.lm import LanguageModel
from xlcli.ops.context import AttentionContext
from xlcli.ops.lsh_attention import meet, recall
from xlcli.ops.lsh_table import rank_in_buckets
from xlcli.state import State

QUERIES = 256
"""Tokens that are asked, spread over those whose memory is full, or over the second half of a shorter text."""
AT_ONCE = 2**24
"""Scores held at a time."""


class _Heard(NamedTuple):
    """What one application of a hashed layer made of a call: q, k (b h t e) and global_ranks (b h r t)."""

    layer: LSHAttention
    q: Tensor
    k: Tensor
    global_ranks: Tensor

    @staticmethod
    def joined(calls: Sequence[_Heard]) -> _Heard:
        """Of the same layer in successive calls."""
        layers, q, k, global_ranks = zip(*calls, strict=True)
        return _Heard(layers[0], torch.cat(q, 2), torch.cat(k, 2), torch.cat(global_ranks, 3))


def lsh_recall(model: LanguageModel, tokens: Tensor, state: State, call: int) -> list[float]:
    """Mean share of the softmax weight of full attention that each hashed layer finds, in order of use, 0 to 1.

    Queries and keys are those of the model as it is, which hashes; full attention is over all of its memory length. The
    tokens of each call are held, so the text should be no longer than is worth it.

    Args:
        model: Whose blocks are applied to every token of every call.
        tokens: A text (1 t) of at least two tokens.
        state: A state that has read nothing; `uniform`, or of segments at least as long as the text.
        call: Tokens of a call.
    """
    n = tokens.shape[1]
    limit = state.span.mem_len or n
    calls = []
    for piece in torch.split(tokens, call, dim=1):
        with _listening(model) as heard:
            _, state = model(piece, state)
        calls.append(heard)
    first = max(1, limit if limit < n else n // 2)
    places = torch.linspace(first, n - 1, min(QUERIES, n - first), device=tokens.device).long()
    return [_share(_Heard.joined(parts), places, limit) for parts in zip(*calls, strict=True)]


@contextmanager
def _listening(model: LanguageModel) -> Iterator[list[_Heard]]:
    """Notes what hashed layers are given, and takes nothing away."""
    heard: list[_Heard] = []

    def note(layer: LSHAttention, given: tuple[Tensor, Buckets, AttentionContext]) -> None:
        x, memory, context = given
        with torch.autocast(x.device.type, enabled=False):
            q, k, _, buckets = layer.project(x, memory, context)
        heard.append(_Heard(layer, q, k, rank_in_buckets(buckets, memory.table.counts).global_ranks))

    layers = [module for module in model.modules() if isinstance(module, LSHAttention)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def _share(heard: _Heard, places: Tensor, limit: int) -> float:
    """Mean over heads and the queries at these places (s)."""
    layer, q, k, global_ranks = heard
    keys = torch.arange(k.shape[2], device=k.device)
    total = 0.0
    for some in torch.split(places, max(1, AT_ONCE // (layer.n_heads * len(keys)))):
        distance = some[:, None] - keys
        there = (distance >= 1) & (distance <= limit)
        seen = meet(global_ranks[..., some], global_ranks, layer.bucket_size)
        total += recall(q[:, :, some], k, seen, there, scale=layer.scale).double().sum().item()
    return total / (layer.n_heads * len(places))
