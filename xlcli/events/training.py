"""Events of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a training run, and the result of `--dry-run`.

    `memory_bytes` is an estimated peak, `available_bytes` the free memory of the device; `weights` and `weights_bytes`
    are encoding and size of the stored weights. `init` is the name of the model whose weights the run starts from, or
    None. `estimated`: sizes and number of tokens are estimates from a sample of the text, as in a dry run.
    `n_ranks` processes train, `n_local_ranks` of them on this machine, with `rows` sequences of a batch each.
    """

    folder: Path
    corpus: str
    train_bytes: int
    valid_bytes: int
    test_bytes: int
    train_tokens: int | None
    tokenizer: str
    vocab_size: int
    preset: str
    parameters: int
    memory_bytes: int
    weights: str
    weights_bytes: int
    device: str
    dtype: str
    threads: int
    budget: str
    resumed_at: int
    init: str | None = None
    estimated: bool = False
    available_bytes: int | None = None
    n_ranks: int = 1
    n_local_ranks: int = 1
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. `nats` is the mean loss per token, `fraction` the share of the budget spent, 0 to 1.

    `eta_seconds` is the time until the first budget is spent, at the mean speed of the steps of this process.

    `mean_steps` is the mean number of steps per token of a model with adaptive computation time, else None. In float16,
    `loss_scale` is the scale of the next loss and `skipped` the number of steps without an update so far, whose
    `grad_norm` is None: their scaled gradients overflowed.
    """

    step: int
    tokens: int
    seconds: float
    nats: float
    bits_per_byte: float
    lr: float
    grad_norm: float | None
    tokens_per_second: float
    fraction: float
    eta_seconds: float
    mean_steps: float | None = None
    loss_scale: float | None = None
    skipped: int | None = None


@dataclass(frozen=True, slots=True)
class Validation:
    """Validation during training. `best`: the lowest value so far; the weights were saved."""

    step: int
    tokens: int
    seconds: float
    bits_per_byte: float
    best: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint was written."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Stopping:
    """All ranks of a run have agreed to stop it, and have saved. Each of them has this event at the same time."""


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Text of the score of a model: the first `bytes` of the `of_bytes` bytes of its validation text.

    `mem_len` is the memory length in tokens. `xlcli eval -m NAME --limit BYTES` prints the same score.
    """

    bytes: int
    of_bytes: int
    mem_len: int


@dataclass(frozen=True, slots=True)
class Trained:
    """End of a run. `bits_per_byte` is the score of the best weights on the text `scored`.

    `seconds` are those of training, without the final score and sample. `stopped`: ended before the budget was spent.
    """

    folder: Path
    step: int
    tokens: int
    seconds: float
    bits_per_byte: float | None
    best_step: int | None
    stopped: bool
    sample: str
    scored: ScoredText | None = None
