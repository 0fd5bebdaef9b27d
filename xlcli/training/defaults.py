"""Default values of a training run that depend on text and device."""

from __future__ import annotations

import torch

from xlcli import config as settings
from xlcli.config import Config, RuntimeConfig, TrainConfig, Tree
from xlcli.errors import InvalidSettingError, plural_noun
from xlcli.optim import ADAM_RATE
from xlcli.store.folder import LoadedModel
from xlcli.store.origin import first_cause, imported, origin_of, text_size

CPU_SECONDS, CUDA_SECONDS = 600.0, 1800.0  # default time budgets
VALIDATIONS = 10  # default number of validations in a run
SAVE_SECONDS = 60.0  # default time between checkpoints
RATES = {"muon": 6e-3, "adamw": 2e-3}  # default learning rates
IMPORTED_RATE = 1e-4  # learning rate of a run from an imported model (benchmarks/log)
TINY_BELOW = 100_000  # bytes of training text below which the default preset is `tiny`
SHORT_BELOW = 2_000_000  # bytes of training text below which the default preset is `short`, unless it is `tiny`
BASE_ABOVE = 8_000_000  # bytes of training text from which the default preset on a GPU is `base`
SHORT_TEXT_FACTOR, FULL_RATE_TOKENS = 0.3, 600_000
"""Peak learning rates of a run that starts from a model, relative to those of the model's training: this factor for
short texts, 1 from this number of tokens on, in between in proportion to the tokens (benchmarks/log)."""
PASSES, DROPOUT_PASSES = 4, 8  # passes after which a run without budget ends, without and with dropout (benchmarks/log)
LEAST_TOKENS, LEAST_STEPS = 600_000, 300  # tokens and steps that such a run takes at least
INIT_PASSES, INIT_LEAST_STEPS = 2, 20  # the same for a run that starts from a model
LARGEST_BUDGET = 2**31  # maximum of `train.max_tokens`
BUDGETS = ("max_steps", "max_tokens", "max_time")  # keys of `train` that limit a run
_CHANGEABLE_TRAIN = (
    {*BUDGETS, "eval_every", "patience", "save_every", "keep_checkpoints", "keep_at", "lr", "adam_lr", "grad_clip"}
    | {"on_divergence", "weights", "recompute_activations"}
)  # fmt: skip
CHANGEABLE = frozenset(
    {f"train.{key}" for key in _CHANGEABLE_TRAIN}
    | {f"runtime.{key}" for key in RuntimeConfig.model_fields if key != "seed"}
    | {"text.valid", "text.test"}
)
"""Keys that may change when a run is resumed. Held-out text is compared by content (`checkpoint.load`), not by path."""


def choose_preset(train_bytes: int, device: torch.device) -> str:
    """The automatic preset for a training text of this size on this device."""
    if train_bytes < TINY_BELOW:
        return "tiny"
    if train_bytes < SHORT_BELOW:
        return "short"
    return "base" if device.type == "cuda" and train_bytes >= BASE_ABOVE else "small"


def fill_in(
    config: Config,
    *,
    tokenizer: str,
    vocab_size: int,
    device: torch.device,
    n_tokens: int = LARGEST_BUDGET,
    model: LoadedModel | None = None,
) -> Config:
    """The configuration with tokenizer and vocabulary of the text, and a value for each setting that is still None.

    These are learning rates, seed and, unless a budget is given, a time and a number of passes over the text of
    `n_tokens`. A run that starts from `model` takes the learning rates of that model in part, and fewer passes.
    """
    train = config.train
    lr, adam_lr = RATES[train.optimizer], ADAM_RATE
    if model is not None:
        lr, adam_lr = _inherited_rates(train.optimizer, model, n_tokens)
    filled_train: Tree = {}
    if train.lr is None:
        filled_train["lr"] = lr
    if train.adam_lr is None:
        filled_train["adam_lr"] = adam_lr
    if is_open(train):  # the run ends with whichever is used up first
        filled_train["max_time"] = CUDA_SECONDS if device.type == "cuda" else CPU_SECONDS
        max_tokens = _default_tokens(config, n_tokens, has_new_weights=model is None)
        if max_tokens < LARGEST_BUDGET:
            filled_train["max_tokens"] = max_tokens
    filled = {
        "model": {"vocab_size": vocab_size},
        "text": {"tokenizer": tokenizer},
        "train": filled_train,
        "runtime": {"seed": config.runtime.seed or 0},
    }
    return settings.change(config, filled)


def _default_tokens(config: Config, n_tokens: int, *, has_new_weights: bool) -> int:
    """Budget in tokens of a run on a text of `n_tokens`: some passes over it, or more if these are very few steps."""
    tokens_per_step = config.train.batch_size * config.train.segment_len
    if not has_new_weights:
        return max(INIT_PASSES * n_tokens, INIT_LEAST_STEPS * tokens_per_step)
    passes = DROPOUT_PASSES if config.model.dropout.is_used else PASSES
    return max(passes * n_tokens, LEAST_TOKENS, LEAST_STEPS * tokens_per_step)


def _inherited_rates(optimizer: str, model: LoadedModel, n_tokens: int) -> tuple[float, float]:
    """Derives the rates of `optimizer`, and of AdamW beside Muon, for a text of `n_tokens` from those of `model`."""
    if imported(model.record):
        return IMPORTED_RATE, IMPORTED_RATE
    trained = model.config.train
    lr, adam_lr = RATES[optimizer], ADAM_RATE
    if optimizer == trained.optimizer and trained.lr is not None:
        lr = trained.lr
    if trained.adam_lr is not None:
        adam_lr = trained.adam_lr
    factor = rate_factor(n_tokens)
    size = text_size(model.record)
    started_from_another = bool(origin_of(model.record))
    if started_from_another and size is not None:
        _, n_tokens_of_model = size
        factor /= rate_factor(n_tokens_of_model)  # the model's rates were lowered for its own text already
    return factor * lr, factor * adam_lr


def is_open(train: TrainConfig) -> bool:
    """True if no budget is given, so that a run ends by the clock and does not repeat to the bit."""
    return all(getattr(train, budget) is None for budget in BUDGETS)


def rate_factor(n_tokens: int) -> float:
    """Peak learning rates for a text of this length, divided by the rates of the model that a run starts from."""
    return min(max(n_tokens / FULL_RATE_TOKENS, SHORT_TEXT_FACTOR), 1.0)


def resumed(saved: Config, changes: Tree) -> Config:
    """Returns the configuration of a resumed run: the saved one with the user's `changes`, which are checked.

    A budget unlike the saved one replaces all: with `max_steps` 200, a run saved with `max_steps` 100 and `max_time` 60
    has no `max_time` any more. `InvalidSettingError` if a changed key is not in `CHANGEABLE`, or no budget is left.
    """
    wanted = settings.change(saved, changes).train
    given_budgets = [key for key in BUDGETS if key in changes.get("train", {})]
    for key in given_budgets:
        is_new_budget = getattr(wanted, key) not in (None, getattr(saved.train, key))
        if is_new_budget:
            no_budgets = {"train": dict.fromkeys(BUDGETS)}
            changes = settings.merge(no_budgets, changes)
            break
    if changes.get("text", {}).get("tokenizer") == "auto":
        changes = settings.merge(changes, {"text": {"tokenizer": saved.text.tokenizer}})
    config = settings.change(saved, changes)
    if is_open(config.train):
        raise InvalidSettingError(f"train.{given_budgets[0]}", "was the last budget of the run", "Give another one.")
    sections = {"model", "text", "train", "runtime"}  # the others are no part of a run
    changed = settings.differences(saved.model_dump(include=sections), config.model_dump(include=sections))
    refused = [key for key in changed if key not in CHANGEABLE]
    if refused:
        remedy = "Leave it out, or train a new model with -o NAME."
        raise InvalidSettingError(first_cause(refused), "cannot change when a run is resumed", remedy)
    return config


def budget_in_words(config: Config, n_tokens: int) -> str:
    """The budgets of a run on `n_tokens` of text in words, such as `40,000 tokens (4.0 passes) or 10 minutes`."""
    train = config.train
    words = []
    if train.max_steps is not None:
        words.append(f"{train.max_steps:,} {plural_noun(train.max_steps, 'step')}")
    if train.max_tokens is not None:
        tokens = f"{train.max_tokens:,} {plural_noun(train.max_tokens, 'token')}"
        n_passes = train.max_tokens / max(n_tokens, 1)
        if n_passes >= 100:
            tokens += f" ({n_passes:,.0f} passes)"
        elif n_passes >= 1:
            tokens += f" ({n_passes:.1f} passes)"
        words.append(tokens)
    if train.max_time is not None:
        time = f"{train.max_time:g} {plural_noun(train.max_time, 'second')}"
        if train.max_time >= 120:
            time = f"{train.max_time / 60:g} minutes"
        words.append(time)
    return " or ".join(words)
