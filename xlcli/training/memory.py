"""Estimated peak RAM, or GPU memory, of a training run, by arithmetic on its sizes; comparison with the machine.

The factors were fitted to measured peaks (`benchmarks/training_memory.py`); the estimate is within a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from xlcli.config import Config, ReversibleStackConfig
from xlcli.config.attention import AttentionConfig, LinearAttentionConfig, LSHAttentionConfig, SoftmaxAttentionConfig
from xlcli.machine import available_bytes, fitting, require_memory
from xlcli.model.head import MAX_LOGITS
from xlcli.ops.lsh_attention import GATHERED_TOKENS
from xlcli.runtime import Runtime

FRAGMENTATION = 1.3
"""Bytes the allocator holds per byte of live activations: 1.2 to 1.5 with glibc (`benchmarks/training_memory.py`)."""
ACCURACY = 2
"""Largest ratio of the estimate to the peak. A run is refused if even its estimate divided by it is too much."""
LARGEST_MACHINE = 2**44  # bytes above which sizes of tensors could exceed the limits of torch
LARGEST_SCORES = 2**25
"""Bytes of attention weights of a layer, and of logits, above which they are computed again in the backward pass."""


def require(
    configs: Sequence[Config], runtime: Runtime, n_parameters: int = 0, *, on_any_machine: bool = False
) -> None:
    """`ResourceError`, with settings that do fit, if none of the configurations can fit the machine, or any machine."""

    def need(config: Config, sizes: Mapping[str, int]) -> int:
        train = config.train.model_copy(update=sizes)
        train = train.model_copy(update={"grad_accum": min(train.grad_accum, train.batch_size)})
        return needed_bytes(config.model_copy(update={"train": train}), runtime, n_parameters) // ACCURACY

    device, config = str(runtime.device), configs[0]
    available = available_bytes(device)
    limit = LARGEST_MACHINE // ACCURACY if on_any_machine else available
    if min(need(candidate, {}) for candidate in configs) <= limit:
        return
    settings = {name: getattr(config.train, name) for name in ("batch_size", "segment_len", "mem_len")}
    smaller = "Use a smaller model, such as --preset tiny."
    remedy = fitting(settings, lambda sizes: ACCURACY * need(config, sizes), available, smaller)
    require_memory("this training run", need(config, {}), remedy, device)


def needed_bytes(config: Config, runtime: Runtime, n_parameters: int = 0) -> int:
    """Estimated peak in bytes, without the libraries: weights, gradients, optimizer, memory of all rows, activations.

    Of a run on several ranks, the peak of those that share the memory of the device; a model that is divided among them
    counts as if each had all of it.

    Args:
        config: Settings of the run.
        runtime: Device, number type and ranks.
        n_parameters: Number of parameters; 0 counts the matrices of blocks only, which the text does not determine.
    """
    model, train, ranks = config.model, config.train, runtime.ranks
    batch_size = max(train.grad_accum, train.batch_size // ranks.size)
    mem_len = _longest_memory(config)
    n_weights = n_parameters or model.n_matrix_weights
    n_moments = 2 * n_weights
    if train.optimizer == "muon":  # has one moment of a matrix, AdamW two
        n_moments -= model.n_matrix_weights
    if train.average_share:
        n_moments += n_weights
    states = 0
    for layer in model.attentions:
        if not mem_len:
            continue
        # Keys and values of tokens, or what a kind has instead of them; `hidden` keeps their inputs if these are less.
        size = layer.memory_bytes(mem_len, model.head_dim)
        if train.memory == "hidden" and isinstance(layer, SoftmaxAttentionConfig):
            size = min(size, 4 * model.dim * (layer.effective_mem_len(mem_len) or 0))
        states += model.n_repeats * size
    activations = _activation_bytes(config, runtime, -(-batch_size // train.grad_accum), mem_len)
    of_rank = 4 * (2 * n_weights + n_moments) + batch_size * states + int(FRAGMENTATION * activations)
    n_ranks = ranks.local_size if runtime.device.type == "cpu" else 1  # that share the memory of the device
    return of_rank * n_ranks


def _activation_bytes(config: Config, runtime: Runtime, rows: int, mem_len: int) -> int:
    """Activations of a microbatch of `rows` sequences at the end of its forward pass."""
    model, train = config.model, config.train
    n_new, tokens = train.segment_len, rows * train.segment_len
    size = runtime.dtype.itemsize
    of_token = 6 * model.dim
    if model.feedforward.chunk_len is None:  # else its activations are computed again
        of_token += 4 * model.ffn_dim
    if model.dropout.is_used:
        of_token += 6 * model.dim
    dense = model.dropout.attention > 0 or "bias" in model.position.needs
    blocks = []
    for layer in model.attentions:
        width = key_width = layer.n_heads * model.head_dim
        if isinstance(layer, SoftmaxAttentionConfig):
            key_width = layer.key_heads * model.head_dim
        earlier = rows * (layer.effective_mem_len(mem_len) or 0)
        block = size * (tokens * (of_token + 2 * width + 2 * key_width) + earlier * 2 * (model.dim + key_width))
        scores = rows * _score_bytes(layer, model.head_dim, n_new, mem_len)
        if isinstance(layer, SoftmaxAttentionConfig):
            if dense:
                scores *= 2
            elif scores > LARGEST_SCORES:  # they are computed again in the backward pass
                scores = 0
        blocks.append(block + scores)
    of_blocks = model.n_repeats * sum(blocks)
    if train.recompute_activations or isinstance(model.stack, ReversibleStackConfig):
        of_blocks = max(blocks) + 8 * tokens * model.dim * model.depth  # one at a time, and the inputs of all
    n_logits = rows * min(n_new, model.loss_chunk or n_new) * (model.vocab_size or 0)
    logits = 2 * min(LARGEST_SCORES, 4 * n_logits)
    if runtime.device.type == "cuda":  # logits, their logarithms and gradients, once in 16 bits
        logits = 14 * min(MAX_LOGITS["cuda"], n_logits)
    return of_blocks + 24 * tokens * model.dim + logits


def _score_bytes(layer: AttentionConfig, head_dim: int, n_new: int, mem_len: int) -> int:
    """Attention weights of `n_new` tokens of a sequence in a layer, or what a kind has instead of them."""
    if isinstance(layer, LinearAttentionConfig):
        return 4 * n_new * 2 * layer.n_heads * layer.n_features
    if isinstance(layer, LSHAttentionConfig):
        n_buckets = math.prod(layer.factors)
        if n_new <= GATHERED_TOKENS * n_buckets:
            return 4 * n_new * layer.n_heads * layer.n_hashes * layer.bucket_size
        slots = layer.n_heads * layer.n_hashes * (n_new + n_buckets * layer.bucket_size // 2)  # half of a tile is empty
        return 4 * slots * (7 * head_dim + 5 * layer.bucket_size // 2)
    reach = (layer.effective_mem_len(n_new) or 0) + (layer.effective_mem_len(mem_len) or 0)
    return 4 * layer.n_heads * n_new * reach


def _longest_memory(config: Config) -> int:
    """Memory length in tokens, at most the tokens of a sequence that a budget in steps or tokens allows."""
    train = config.train
    lengths = [train.mem_len]
    if train.max_steps is not None:
        lengths.append(train.max_steps * train.segment_len)
    if train.max_tokens is not None:
        lengths.append(-(-train.max_tokens // train.batch_size) + train.segment_len)
    return config.model.tokens_in_memory(train.mem_len, min(lengths))
