"""What a run will be: everything the user left open is decided here, from the text and the machine, and said aloud."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xlcli import config as settings
from xlcli import presets
from xlcli.config import (
    Config,
    TrainConfig,
    Tree,
)
from xlcli.errors import ConfigError

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
BUDGETS = ("max_steps", "max_tokens", "max_time")
"""The keys of `train` that end a run."""
FREE = frozenset(
    {f"train.{key}" for key in (*BUDGETS, "eval_every", "save_every", "keep_checkpoints", "lr", "adam_lr", "grad_clip")}
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
