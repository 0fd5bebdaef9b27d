"""Recall of LSH attention: the share of the weight of full attention that falls on the keys found by hashing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from xlcli.memory import Buckets
from xlcli.model.attention.lsh import LSHAttention
from xlcli.model.lm import LanguageModel
from xlcli.ops.context import AttentionContext
from xlcli.ops.lsh_table import rank_in_buckets
from xlcli.state import State
from xlcli.store.folder import LoadedModel

CALL, N_TOKENS = 512, 2**17
"""Number of tokens of a call, and at most of the text."""
QUERIES = 256
"""Number of queries measured, evenly spread over the tokens with a full memory, or over the second half of a shorter
text."""
MAX_SCORES = 2**24
"""Maximum number of attention scores in memory."""


class _LayerCall(NamedTuple):
    """Queries and keys (b h t e) and global ranks (b h r t) of one LSH layer in one call."""

    layer: LSHAttention
    q: Tensor
    k: Tensor
    global_ranks: Tensor


def lsh_recall(model: LanguageModel, tokens: Tensor, state: State, call_len: int) -> list[float]:
    """Mean recall of each LSH layer, in the order of use, 0 to 1.

    The model with LSH attention computes queries and keys. Full attention is over the whole memory length.

    Args:
        model: Model under test; must not use adaptive computation time.
        tokens: Text (1 t) of at least two tokens. The queries and keys of all tokens are held in memory.
        state: New state with span `uniform`, or `segment` with segments at least as long as the text.
        call_len: Number of tokens per call.
    """
    n = tokens.shape[1]
    limit = state.span.mem_len or n
    recorded: list[_LayerCall] = []

    def record(layer: LSHAttention, given: tuple[Tensor, Buckets, AttentionContext]) -> None:
        x, memory, context = given
        with torch.autocast(x.device.type, enabled=False):
            q, k, _, buckets = layer.project(x, memory, context)
        recorded.append(_LayerCall(layer, q, k, rank_in_buckets(buckets, memory.table.counts).global_ranks))

    layers = [module for module in model.modules() if isinstance(module, LSHAttention)]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    parts = torch.split(tokens, call_len, dim=1)
    try:
        for part in parts:
            _, state = model(part, state)
    finally:
        for hook in hooks:
            hook.remove()
    n_layers = len(recorded) // len(parts)
    first = max(1, limit if limit < n else n // 2)
    positions = torch.linspace(first, n - 1, min(QUERIES, n - first), device=tokens.device).long()
    return [_mean_recall(recorded[i::n_layers], positions, limit) for i in range(n_layers)]


def _mean_recall(calls: Sequence[_LayerCall], positions: Tensor, limit: int) -> float:
    """Mean recall of a layer over heads and the queries at these positions (s), from its successive calls."""
    layer = calls[0].layer
    q, k = torch.cat([call.q for call in calls], dim=2), torch.cat([call.k for call in calls], dim=2)
    global_ranks = torch.cat([call.global_ranks for call in calls], dim=3)
    keys = torch.arange(k.shape[2], device=k.device)
    total = 0.0
    for part in torch.split(positions, max(1, MAX_SCORES // (layer.n_heads * len(keys)))):
        distance = part[:, None] - keys
        visible = (distance >= 1) & (distance <= limit)
        difference = global_ranks[..., part, None] - global_ranks[..., None, :]
        found = ((difference >= 1) & (difference <= layer.bucket_size)).any(2)
        weights = (q[:, :, part] @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1)
        total += (weights * found).double().sum().item()
    return total / (layer.n_heads * len(positions))


def recall_of_text(model: LoadedModel, text: bytes, mem_len: int) -> float | None:
    """Mean recall over the LSH layers of a model at the beginning of a text; None without such layers."""
    ids = torch.tensor(model.tokenizer.encode(text)[:N_TOKENS].tolist())[: mem_len + QUERIES, None].T
    with torch.inference_mode():
        state = model.network.init_state(1, mem_len=mem_len, segment_len=CALL)
        found = lsh_recall(model.network, ids, state, CALL)
    return sum(found) / len(found) if found else None
