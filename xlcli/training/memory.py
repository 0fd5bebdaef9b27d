"""Estimated memory of a training run, before anything is allocated."""

from __future__ import annotations

import itertools
import math

import torch

from xlcli.config import (
    Config,
    LinearAttentionConfig,
    LocalAttentionConfig,
    LSHAttentionConfig,
    ModelConfig,
    ReversibleStackConfig,
    TrainConfig,
    UniversalStackConfig,
)
from xlcli.config.position import (
    Contextual1PositionConfig,
    Contextual2PositionConfig,
    ShawPositionConfig,
    T5PositionConfig,
    XLPositionConfig,
)
from xlcli.model.build import build_model
from xlcli.model.feedforward import GATED
from xlcli.model.head import MOST_LOGITS
from xlcli.ops.favor import CHUNK
from xlcli.ops.lsh_attention import LARGE
from xlcli.optim import hidden_matrices
from xlcli.runtime import Runtime

LEARNED_BIASES = T5PositionConfig | ShawPositionConfig | Contextual1PositionConfig | Contextual2PositionConfig
"""Encodings that add to the scores what has a gradient, which the fused kernel on a CPU cannot take."""
SMALL_CHANGE = 2**23
"""What the allocator holds besides."""


def n_parameters(model: ModelConfig) -> int:
    """Numbers to learn, counted without allocating any."""
    with torch.device("meta"):
        return build_model(model).n_parameters


def memory_bytes(config: Config, parameters: int, runtime: Runtime) -> int:
    """Estimated peak of training beyond the libraries: weights, gradients, optimizer, activations, logits, memory.

    What a layer keeps for its backward pass was counted in the code; the numbers that could not be are fitted to peaks
    measured on a CPU (`benchmarks/training_memory.py`), which the estimate meets within 20 %.
    """
    model, train, itemsize = config.model, config.train, runtime.dtype.itemsize
    rows = -(-train.batch_size // train.grad_accum)
    adamw = parameters if train.optimizer == "adamw" else parameters - _muon_count(model)
    kept = 4 * (3 * parameters + adamw) + (parameters * itemsize if itemsize < 4 else 0)
    alike = [config.model_copy(update={"model": model.of_layer(attention)}) for attention in model.attentions]
    tokens = train.segment_len * _token_bytes(model, itemsize)
    blocks = [_attention_bytes(layer, runtime, rows) + tokens for layer in alike] * (model.depth // model.n_layers)
    # Of a reversible stack one block is alive, and its gradients.
    alive = sum(sorted(blocks)[-2:] if isinstance(model.stack, ReversibleStackConfig) else blocks)
    remembered = sum(map(_remembered_bytes, alike)) // model.n_layers
    remembered *= train.batch_size * (1 if train.grad_accum == 1 else 2)
    return int(kept + 1.1 * (rows * alive + _logits_bytes(model, train, rows))) + remembered + SMALL_CHANGE


def _muon_count(model: ModelConfig) -> int:
    """Numbers to learn that Muon takes."""
    with torch.device("meta"):
        network = build_model(model)
    matrices = hidden_matrices(network)
    return sum(p.numel() for p in network.parameters() if id(p) in matrices)


def _token_bytes(model: ModelConfig, itemsize: int) -> int:
    """What a block keeps of a token besides attention: the stream and its norms in float32, the feed-forward branch."""
    adaptive = isinstance(model.stack, UniversalStackConfig) and model.stack.act
    kept = 4 * (13 if adaptive else 9) * model.dim
    if model.feedforward.chunk_len is None:
        kept += (4 if model.feedforward.kind in GATED else 2) * model.ffn_dim * itemsize
    if model.dropout.residual or model.dropout.feedforward:
        kept += int(1.5 * (2 * model.dim + model.ffn_dim) * itemsize)
    return kept


def _attention_bytes(config: Config, runtime: Runtime, rows: int) -> float:
    """What the attention of a block keeps of a row, when there are so many and all layers are alike."""
    match config.model.attention:
        case LinearAttentionConfig() as attention:
            return _linear_bytes(config, attention, runtime.dtype.itemsize)
        case LSHAttentionConfig() as attention:
            return _hashed_bytes(config, attention, runtime.dtype.itemsize, rows)
        case _:
            return _softmax_bytes(config, runtime)


def _softmax_bytes(config: Config, runtime: Runtime) -> int:
    """Queries and keys of memory and call, and scores where no fused kernel takes them."""
    model, length, memory = config.model, config.train.segment_len, config.train.mem_len
    attention, position, itemsize = model.attention, model.position, runtime.dtype.itemsize
    width = _width(model)
    learned = isinstance(position, LEARNED_BIASES) or getattr(position, "clamp_len", None) is not None
    if isinstance(position, XLPositionConfig) and not learned:
        width += attention.n_heads * (position.n_features or model.dim)
    window = attention.window if isinstance(attention, LocalAttentionConfig) else memory
    memory = min(memory, window)
    in_blocks = length > 2 * window and isinstance(attention, LocalAttentionConfig)
    numbers = (7 if in_blocks else 2) * width * length + (memory + length) * (model.dim + 3 * width)
    plain = runtime.device.type == "cpu" and (itemsize < 4 or model.dropout.attention > 0)
    copies = 3 if plain else 2 if learned else 0
    scores = attention.n_heads * length * (2 * window if in_blocks else memory + length)
    return (numbers + copies * scores) * itemsize


def _linear_bytes(config: Config, attention: LinearAttentionConfig, itemsize: int) -> float:
    """Features, and the sums at the border of each chunk, in float32."""
    model, length = config.model, config.train.segment_len
    sums = 0.75 * _remembered_bytes(config) / model.depth
    a_token = attention.n_heads * (attention.n_features * (4 + model.head_dim / CHUNK) + CHUNK)
    return 4 * length * a_token + sums + length * (model.dim + 5 * _width(model)) * itemsize


def _hashed_bytes(config: Config, attention: LSHAttentionConfig, itemsize: int, rows: int) -> float:
    """Chunks of queries, keys, values and scores in each round, or in one round at a time where that would be much."""
    model, length, size = config.model, config.train.segment_len, attention.bucket_size
    n_buckets = math.prod(attention.factors)
    # Of even hashes; the last chunk of a bucket is not full.
    of_bucket = max(length / n_buckets / size + 0.5, 1 - math.exp(-length / n_buckets))
    chunks = attention.n_heads * n_buckets * of_bucket
    rounds = attention.n_hashes if rows * chunks * size**2 < LARGE else 1 / model.depth
    a_round = chunks * size * (7 * model.head_dim + 3 * size)
    return 4 * rounds * a_round + length * (model.dim + 9 * _width(model)) * itemsize


def _width(model: ModelConfig) -> int:
    return model.attention.n_heads * model.head_dim


def _remembered_bytes(config: Config) -> int:
    """Training memory of a row before and after a step, when all layers are alike."""
    model, train = config.model, config.train
    if isinstance(model.attention, LinearAttentionConfig | LSHAttentionConfig):
        return 2 * 4 * model.memory_floats(train.mem_len)
    return 4 * model.depth * ((model.effective_mem_len(train.mem_len) or 0) + train.segment_len) * model.dim


def _logits_bytes(model: ModelConfig, train: TrainConfig, rows: int) -> int:
    """Logits and their gradients, of as many tokens as are scored at a time."""
    width = model.vocab_size
    if model.cutoffs:
        borders = (*model.cutoffs, model.vocab_size)
        width = model.cutoffs[0] + max(stop - start for start, stop in itertools.pairwise(borders))
    chunk = model.loss_chunk or -(-MOST_LOGITS // (rows * width))
    return 3 * 4 * rows * width * min(chunk, train.segment_len)
