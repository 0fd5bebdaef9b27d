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

FRAGMENTATION = 1.3  # bytes held per byte of live activations: 1.2 to 1.5 with glibc (`benchmarks/training_memory.py`)
ACCURACY = 2  # largest ratio of estimate to peak: a run is refused if even its estimate divided by it is too much
FLOAT_BYTES = 4  # of weights, gradients, moments, memory and scores, which are in float32
LARGEST_MACHINE = 2**44  # bytes above which sizes of tensors could exceed the limits of torch
LARGEST_SCORES = 2**25  # bytes of attention weights per layer, and of logits, above which backward computes them again


def require(
    configs: Sequence[Config], runtime: Runtime, n_parameters: int = 0, *, on_any_machine: bool = False
) -> None:
    """`ResourceError`, with settings that do fit, if none of the configurations can fit the machine, or any machine."""

    def least_bytes(config: Config, sizes: Mapping[str, int]) -> int:
        train = config.train.model_copy(update=sizes)
        train = train.model_copy(update={"grad_accum": min(train.grad_accum, train.batch_size)})
        return needed_bytes(config.model_copy(update={"train": train}), runtime, n_parameters) // ACCURACY

    device = str(runtime.device)
    available = available_bytes(device)
    limit = LARGEST_MACHINE // ACCURACY if on_any_machine else available
    if min(least_bytes(config, {}) for config in configs) <= limit:
        return
    config = configs[0]
    sizes = {name: getattr(config.train, name) for name in ("batch_size", "segment_len", "mem_len")}
    smaller = "Use a smaller model, such as --preset tiny."
    # The proposed sizes fit even if the run takes as much as the estimate.
    remedy = fitting(sizes, lambda lowered: ACCURACY * least_bytes(config, lowered), available, smaller)
    require_memory("this training run", least_bytes(config, {}), remedy, device)


def needed_bytes(config: Config, runtime: Runtime, n_parameters: int = 0) -> int:
    """Estimated peak in bytes, without the libraries: weights, gradients, optimizer, memory of all rows, activations.

    Of a run on several ranks, the peak of those that share the memory of the device; a model that is divided among them
    counts as if each had all of it. With 0 parameters only the matrices of blocks count, which need no text.
    """
    model, train = config.model, config.train
    n_sequences = max(train.grad_accum, train.batch_size // runtime.ranks.size)  # of a rank
    mem_len = _longest_memory(config)
    n_weights = n_parameters or model.n_matrix_weights
    optimized_bytes = FLOAT_BYTES * (2 * n_weights + _n_moments(config, n_weights))  # weights and gradients
    memory_bytes = n_sequences * _memory_bytes(config, mem_len)
    rows = math.ceil(n_sequences / train.grad_accum)  # of a microbatch
    activation_bytes = int(FRAGMENTATION * _activation_bytes(config, runtime, rows, mem_len))
    rank_bytes = optimized_bytes + memory_bytes + activation_bytes
    if runtime.device.type == "cpu":  # its ranks share the RAM
        return rank_bytes * runtime.ranks.local_size
    return rank_bytes


def checkpoint_bytes(config: Config, n_parameters: int, weights_bytes: int) -> int:
    """Size of a checkpoint on disk: weights in training, moments, memory, and the best weights as they are stored."""
    memory_bytes = config.train.batch_size * _memory_bytes(config, _longest_memory(config))
    optimized_bytes = FLOAT_BYTES * (n_parameters + _n_moments(config, n_parameters))
    return optimized_bytes + memory_bytes + weights_bytes


def _n_moments(config: Config, n_weights: int) -> int:
    """AdamW has two moments of each weight, Muon one of each in a matrix. An average counts as another moment."""
    n_moments = 2 * n_weights
    if config.train.optimizer == "muon":
        n_moments -= config.model.n_matrix_weights
    if config.train.average_share:
        n_moments += n_weights
    return n_moments


def _memory_bytes(config: Config, mem_len: int) -> int:
    """Memory of one sequence in all layers: keys and values, or what a kind has; hidden: their inputs, if less."""
    if mem_len == 0:
        return 0
    model = config.model
    n_bytes = 0
    for layer in model.attentions:
        layer_bytes = layer.memory_bytes(mem_len, model.head_dim)
        if config.train.memory == "hidden" and isinstance(layer, SoftmaxAttentionConfig):
            input_bytes = FLOAT_BYTES * model.dim * (layer.effective_mem_len(mem_len) or 0)
            layer_bytes = min(layer_bytes, input_bytes)
        n_bytes += layer_bytes
    return model.stack.n_steps * n_bytes


def _activation_bytes(config: Config, runtime: Runtime, rows: int, mem_len: int) -> int:
    """Activations of a microbatch of `rows` sequences at the end of its forward pass."""
    model, train = config.model, config.train
    n_tokens = rows * train.segment_len
    block_bytes = [_block_bytes(layer, config, runtime, rows, mem_len) for layer in model.attentions]
    stack_bytes = model.stack.n_steps * sum(block_bytes)
    if train.recompute_activations or isinstance(model.stack, ReversibleStackConfig):
        input_bytes = 8 * n_tokens * model.dim * model.depth
        stack_bytes = max(block_bytes) + input_bytes  # one block at a time, and the inputs of all
    embedding_bytes = 24 * n_tokens * model.dim
    n_logits = rows * min(train.segment_len, model.loss_chunk or train.segment_len) * (model.vocab_size or 0)
    logit_bytes = 2 * min(LARGEST_SCORES, FLOAT_BYTES * n_logits)
    if runtime.device.type == "cuda":  # logits, their logarithms and gradients, once in 16 bits
        logit_bytes = 14 * min(MAX_LOGITS["cuda"], n_logits)
    return stack_bytes + embedding_bytes + logit_bytes


def _block_bytes(layer: AttentionConfig, config: Config, runtime: Runtime, rows: int, mem_len: int) -> int:
    """Activations of a microbatch of `rows` sequences in the block of an attention layer."""
    model, segment_len = config.model, config.train.segment_len
    # Numbers for each new token, beside queries, keys and values.
    token_numbers = 6 * model.dim
    if model.feedforward.chunk_len is None:  # else the activations of this branch are computed again
        token_numbers += 4 * model.ffn_dim
    if model.dropout.is_used:
        token_numbers += 6 * model.dim
    query_width = key_width = layer.n_heads * model.head_dim
    score_bytes = rows * _score_bytes(layer, model.head_dim, segment_len, mem_len)
    if isinstance(layer, SoftmaxAttentionConfig):
        key_width = layer.key_heads * model.head_dim
        keeps_scores = model.dropout.attention > 0 or "bias" in model.position.needs
        if keeps_scores:  # before and after the softmax
            score_bytes *= 2
        elif score_bytes > LARGEST_SCORES:  # they are computed again in the backward pass
            score_bytes = 0
    numbers_of_new = rows * segment_len * (token_numbers + 2 * query_width + 2 * key_width)
    numbers_of_memory = rows * (layer.effective_mem_len(mem_len) or 0) * 2 * (model.dim + key_width)
    return runtime.dtype.itemsize * (numbers_of_new + numbers_of_memory) + score_bytes


def _score_bytes(layer: AttentionConfig, head_dim: int, n_new: int, mem_len: int) -> int:
    """Attention weights of `n_new` tokens of a sequence in a layer, or what a kind has instead of them."""
    if isinstance(layer, LinearAttentionConfig):
        return FLOAT_BYTES * n_new * 2 * layer.n_heads * layer.n_features  # features of queries and keys
    if isinstance(layer, LSHAttentionConfig):
        n_tables = layer.n_heads * layer.n_hashes
        n_buckets = math.prod(layer.factors)
        gathers_keys = n_new <= GATHERED_TOKENS * n_buckets  # of each token, else tokens are sorted into tiles
        if gathers_keys:
            return FLOAT_BYTES * n_new * n_tables * layer.bucket_size
        n_slots = n_tables * (n_new + n_buckets * layer.bucket_size // 2)  # half of a tile is empty
        return FLOAT_BYTES * n_slots * (7 * head_dim + 5 * layer.bucket_size // 2)
    n_keys = (layer.effective_mem_len(n_new) or 0) + (layer.effective_mem_len(mem_len) or 0)
    return FLOAT_BYTES * layer.n_heads * n_new * n_keys


def _longest_memory(config: Config) -> int:
    """Memory length in tokens, at most the tokens of a sequence that a budget in steps or tokens allows."""
    train = config.train
    lengths = [train.mem_len]
    if train.max_steps is not None:
        lengths.append(train.max_steps * train.segment_len)
    if train.max_tokens is not None:
        tokens_of_sequence = math.ceil(train.max_tokens / train.batch_size)
        lengths.append(tokens_of_sequence + train.segment_len)  # the last step may exceed the budget
    return config.model.tokens_in_memory(train.mem_len, min(lengths))
