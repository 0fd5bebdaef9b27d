"""What a run will be: everything the user left open is decided here, from the text and the machine, and said aloud."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from xlcli import config as settings
from xlcli import presets
from xlcli.config import (
    Config,
    LinearAttention,
    LocalAttention,
    LSHAttention,
    ModelConfig,
    ReversibleStack,
    TrainConfig,
    Tree,
    UniversalStack,
)
from xlcli.config.position import (
    Contextual1Position,
    Contextual2Position,
    ShawPosition,
    T5Position,
    XLPosition,
)
from xlcli.errors import ConfigError
from xlcli.model.build import build_model
from xlcli.model.feedforward import GATED
from xlcli.model.head import MOST_LOGITS
from xlcli.ops.favor import CHUNK
from xlcli.ops.lsh import LARGE
from xlcli.optim import hidden_matrices
from xlcli.parallel import Runtime

CPU_SECONDS, CUDA_SECONDS = 600.0, 1800.0
"""Default time budgets."""
VALIDATIONS = 10
"""How often the default validates in a run."""
SAVE_SECONDS = 60.0
"""Default time between checkpoints."""
RATES = {"muon": 6e-3, "adamw": 2e-3}
"""Default learning rates."""
WARMUP_STEPS = 40
"""Default warm-up; a tenth of a budget given in steps or tokens when that is shorter."""
TINY_BELOW = 100_000
"""Bytes of training text below which the default preset is `tiny`."""
BASE_ABOVE = 8_000_000
"""Bytes of training text from which the default preset on a GPU is `base`."""
LEARNED_BIASES = T5Position | ShawPosition | Contextual1Position | Contextual2Position
"""Encodings that add to the scores what has a gradient, which the fused kernel on a CPU cannot take."""
SMALL_CHANGE = 2**23
"""What the allocator holds besides."""
BUDGETS = ("max_steps", "max_tokens", "max_time")
"""The keys of `train` that end a run."""
FREE = frozenset(
    {f"train.{key}" for key in (*BUDGETS, "eval_every", "save_every", "keep", "lr", "adam_lr", "clip")}
    | {"text.valid", "text.test"}
    | {f"runtime.{key}" for key in ("device", "dtype", "threads", "compile", "deterministic")}
)
"""What may change when a run is resumed. Held-out text may have moved; that it is the same is checked elsewhere."""


def choose_preset(train_bytes: int, device: torch.device) -> str:
    """The preset for a text of this size on this device."""
    if train_bytes < TINY_BELOW:
        return "tiny"
    return "base" if device.type == "cuda" and train_bytes >= BASE_ABOVE else "small"


def decide(tree: Tree, preset: str, *, tokenizer: str, vocab_size: int, device: torch.device) -> Config:
    """The whole configuration: preset, then what the user said, then what follows from text and machine."""
    config = settings.make(presets.read_preset(preset), tree)
    decided: Tree = {"model": {"vocab_size": vocab_size}, "text": {"tokenizer": tokenizer}, "train": {}}
    train = config.train
    if all(getattr(train, budget) is None for budget in BUDGETS):
        decided["train"]["max_time"] = CUDA_SECONDS if device.type == "cuda" else CPU_SECONDS
    if train.lr is None:
        decided["train"]["lr"] = RATES[train.optimizer]
    return settings.make(config.model_dump(mode="json"), decided)


def resumed(saved: Config, tree: Tree) -> Config:
    """The configuration of a run that goes on: as saved, then what the user says now.

    A budget given now replaces those given before.

    Raises:
        ConfigError: Something was asked for that only a new run can have.
    """
    before = saved.model_dump(mode="json")
    if any(budget in tree.get("train", {}) for budget in BUDGETS):
        before["train"] |= dict.fromkeys(BUDGETS)
    config = settings.make(before, tree)
    if config.text.tokenizer == "auto":
        config = settings.make(config.model_dump(mode="json"), {"text": {"tokenizer": saved.text.tokenizer}})
    names = ("model", "text", "train", "runtime")
    old, new = ({name: config.model_dump()[name] for name in names} for config in (saved, config))
    changed = differences(old, new)
    if wrong := [key for key in changed if key not in FREE]:
        key = next((key for key in wrong if key.endswith(".kind")), wrong[0])  # a kind has keys of its own
        raise ConfigError(
            f"{key} cannot change when a run is resumed.", "Leave it out, or train a new model with -o NAME."
        )
    return config


def tokens_per_step(train: TrainConfig) -> int:
    """Tokens that one step reads."""
    return train.batch_size * train.segment_len


def warmup_steps(train: TrainConfig) -> int:
    """Steps until the learning rate is at its highest."""
    if train.warmup_steps is not None:
        return train.warmup_steps
    limits = [WARMUP_STEPS]
    if train.max_steps is not None:
        limits.append(train.max_steps // 10)
    if train.max_tokens is not None:
        limits.append(train.max_tokens // tokens_per_step(train) // 10)
    return min(limits)


def budget_in_words(config: Config) -> str:
    """`10 minutes`, `2,000 steps`, or what is set, joined by `or`."""
    train = config.train
    words = []
    if train.max_steps is not None:
        words.append(f"{train.max_steps:,} steps")
    if train.max_tokens is not None:
        words.append(f"{train.max_tokens:,} tokens")
    if train.max_time is not None:
        minutes = train.max_time / 60
        words.append(f"{minutes:g} minutes" if minutes >= 2 else f"{train.max_time:g} seconds")
    return " or ".join(words)


def parameter_count(model: ModelConfig) -> int:
    """Numbers to learn, counted without allocating any."""
    with torch.device("meta"):
        return build_model(model).parameter_count


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
    alive = sum(sorted(blocks)[-2:] if isinstance(model.stack, ReversibleStack) else blocks)
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
    adaptive = isinstance(model.stack, UniversalStack) and model.stack.act
    kept = 4 * (13 if adaptive else 9) * model.dim
    if model.feedforward.chunk_len is None:
        kept += (4 if model.feedforward.kind in GATED else 2) * model.ffn_dim * itemsize
    if model.dropout.residual or model.dropout.feedforward:
        kept += int(1.5 * (2 * model.dim + model.ffn_dim) * itemsize)
    return kept


def _attention_bytes(config: Config, runtime: Runtime, rows: int) -> float:
    """What the attention of a block keeps of a row, when there are so many and all layers are alike."""
    match config.model.attention:
        case LinearAttention() as attention:
            return _linear_bytes(config, attention, runtime.dtype.itemsize)
        case LSHAttention() as attention:
            return _hashed_bytes(config, attention, runtime.dtype.itemsize, rows)
        case _:
            return _softmax_bytes(config, runtime)


def _softmax_bytes(config: Config, runtime: Runtime) -> int:
    """Queries and keys of memory and call, and scores where no fused kernel takes them."""
    model, length, memory = config.model, config.train.segment_len, config.train.mem_len
    attention, position, itemsize = model.attention, model.position, runtime.dtype.itemsize
    width = _width(model)
    learned = isinstance(position, LEARNED_BIASES) or getattr(position, "clamp_len", None) is not None
    if isinstance(position, XLPosition) and not learned:
        width += attention.n_heads * (position.n_features or model.dim)
    window = attention.window if isinstance(attention, LocalAttention) else memory
    memory = min(memory, window)
    in_blocks = length > 2 * window and isinstance(attention, LocalAttention)
    numbers = (7 if in_blocks else 2) * width * length + (memory + length) * (model.dim + 3 * width)
    plain = runtime.device.type == "cpu" and (itemsize < 4 or model.dropout.attention > 0)
    copies = 3 if plain else 2 if learned else 0
    scores = attention.n_heads * length * (2 * window if in_blocks else memory + length)
    return (numbers + copies * scores) * itemsize


def _linear_bytes(config: Config, attention: LinearAttention, itemsize: int) -> float:
    """Features, and the sums at the border of each chunk, in float32."""
    model, length = config.model, config.train.segment_len
    sums = 0.75 * _remembered_bytes(config) / model.depth
    a_token = attention.n_heads * (attention.n_features * (4 + model.head_dim / CHUNK) + CHUNK)
    return 4 * length * a_token + sums + length * (model.dim + 5 * _width(model)) * itemsize


def _hashed_bytes(config: Config, attention: LSHAttention, itemsize: int, rows: int) -> float:
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
    if isinstance(model.attention, LinearAttention | LSHAttention):
        return 2 * 4 * model.memory_numbers(train.mem_len)
    return 4 * model.depth * (model.remembered(train.mem_len) + train.segment_len) * model.dim


def _logits_bytes(model: ModelConfig, train: TrainConfig, rows: int) -> int:
    """Logits and their gradients, of as many tokens as are scored at a time."""
    width = model.vocab_size
    if model.cutoffs:
        borders = (*model.cutoffs, model.vocab_size)
        width = model.cutoffs[0] + max(stop - start for start, stop in itertools.pairwise(borders))
    chunk = model.loss_chunk or -(-MOST_LOGITS // (rows * width))
    return 3 * 4 * rows * width * min(chunk, train.segment_len)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ."""
    found = []
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key}")
    return found
