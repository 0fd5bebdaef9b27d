"""Default values of a training run that depend on text and device."""

from __future__ import annotations

import torch

from xlcli import config as settings
from xlcli.config import Config, TrainConfig, Tree
from xlcli.errors import ConfigError
from xlcli.store.origin import RATE_FACTOR

CPU_SECONDS, CUDA_SECONDS = 600.0, 1800.0
"""Default time budgets."""
VALIDATIONS = 10
"""Default number of validations in a run."""
SAVE_SECONDS = 60.0
"""Default time between checkpoints."""
RATES = {"muon": 6e-3, "adamw": 2e-3}
"""Default learning rates."""
WARMUP_STEPS = 40
"""Default warmup in steps; at most a tenth of a budget in steps or tokens."""
TINY_BELOW = 100_000
"""Bytes of training text below which the default preset is `tiny`."""
BASE_ABOVE = 8_000_000
"""Bytes of training text from which the default preset on a GPU is `base`."""
BUDGETS = ("max_steps", "max_tokens", "max_time")
"""Keys of `train` that limit a run."""
CHANGEABLE = frozenset(
    {f"train.{key}" for key in (*BUDGETS, "eval_every", "save_every", "keep_checkpoints", "lr", "adam_lr", "grad_clip")}
    | {"train.weights", "text.valid", "text.test"}
    | {f"runtime.{key}" for key in ("device", "dtype", "threads", "compile", "deterministic")}
)
"""Keys that may change when a run is resumed. Held-out text is compared by content (`checkpoint.load`), not by path."""


def choose_preset(train_bytes: int, device: torch.device) -> str:
    """The automatic preset for a training text of this size on this device."""
    if train_bytes < TINY_BELOW:
        return "tiny"
    return "base" if device.type == "cuda" and train_bytes >= BASE_ABOVE else "small"


def fill_in(
    config: Config, *, tokenizer: str, vocab_size: int, device: torch.device, from_model: bool = False
) -> Config:
    """The configuration with tokenizer and vocabulary of the text, and defaults for budget, learning rate and seed.

    `from_model`: the run starts from the weights of a model.
    """
    train: Tree = {}
    if all(getattr(config.train, budget) is None for budget in BUDGETS):
        train["max_time"] = CUDA_SECONDS if device.type == "cuda" else CPU_SECONDS
    if config.train.lr is None:
        train["lr"] = RATES[config.train.optimizer] * (RATE_FACTOR if from_model else 1.0)
    return settings.change(
        config,
        {
            "model": {"vocab_size": vocab_size},
            "text": {"tokenizer": tokenizer},
            "train": train,
            "runtime": {"seed": config.runtime.seed or 0},
        },
    )


def resumed(saved: Config, changes: Tree) -> Config:
    """The saved configuration of a run with the user's changes. A new budget replaces all saved budgets.

    Raises:
        ConfigError: A changed key is not in `CHANGEABLE`.
    """
    if any(budget in changes.get("train", {}) for budget in BUDGETS):
        changes = settings.merge({"train": dict.fromkeys(BUDGETS)}, changes)
    if changes.get("text", {}).get("tokenizer") == "auto":
        changes = settings.merge(changes, {"text": {"tokenizer": saved.text.tokenizer}})
    config = settings.change(saved, changes)
    sections = {"model", "text", "train", "runtime"}
    changed = settings.differences(saved.model_dump(include=sections), config.model_dump(include=sections))
    if wrong := [key for key in changed if key not in CHANGEABLE]:
        key = next((key for key in wrong if key.endswith(".kind")), wrong[0])  # a kind implies its other keys
        reason = "cannot change when a run is resumed"
        raise ConfigError(
            f"{key} {reason}.", "Leave it out, or train a new model with -o NAME.", key=key, reason=reason
        )
    return config


def tokens_per_step(train: TrainConfig) -> int:
    """Tokens per training step."""
    return train.batch_size * train.segment_len


def warmup_steps(train: TrainConfig) -> int:
    """Steps of learning-rate warmup."""
    if train.warmup_steps is not None:
        return train.warmup_steps
    limits = [WARMUP_STEPS]
    if train.max_steps is not None:
        limits.append(train.max_steps // 10)
    if train.max_tokens is not None:
        limits.append(train.max_tokens // tokens_per_step(train) // 10)
    return min(limits)


def budget_in_words(config: Config) -> str:
    """The budgets in words, such as `2,000 steps or 10 minutes`."""
    train = config.train
    words = []
    if train.max_steps is not None:
        words.append(f"{train.max_steps:,} step{'' if train.max_steps == 1 else 's'}")
    if train.max_tokens is not None:
        words.append(f"{train.max_tokens:,} token{'' if train.max_tokens == 1 else 's'}")
    if train.max_time is not None:
        minutes = train.max_time / 60
        seconds = f"{train.max_time:g} second{'' if train.max_time == 1 else 's'}"
        words.append(f"{minutes:g} minutes" if minutes >= 2 else seconds)
    return " or ".join(words)
