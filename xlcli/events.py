"""What the workflows yield: frozen values that a command renders and a program can read. Never imports torch.

Units: `seconds` are wall seconds; `bits_per_byte` is nats / ln 2 / bytes of text; `nats` are sums; byte offsets count
from the start of the text.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Notice:
    """Talk: a choice made for the user, or a warning."""

    text: str
    level: Literal["info", "warning", "detail"] = "info"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a long piece of work has come. `total` is None when unknown; `rate` is units a second."""

    stage: str
    done: int
    total: int | None
    unit: str
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a training run is about to do; the last word of `--dry-run`."""

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
    device: str
    dtype: str
    threads: int
    budget: str
    resumed_at: int


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. `nats` is the mean loss per token; `fraction` of the budget spent, 0 to 1.

    `mean_steps` is how often blocks were applied to a token by a model that decides so itself, else None.
    """

    step: int
    tokens: int
    seconds: float
    nats: float
    bits_per_byte: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    fraction: float
    eta_seconds: float
    mean_steps: float | None = None


@dataclass(frozen=True, slots=True)
class Validation:
    """Held-out score in the course of training. `best` when it is the best so far (and was kept)."""

    step: int
    tokens: int
    seconds: float
    bits_per_byte: float
    best: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete on disk."""

    step: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Trained:
    """The end of a run. `bits_per_byte` is the score of the kept weights; `stopped`: before the budget was spent."""

    folder: Path
    step: int
    tokens: int
    seconds: float
    bits_per_byte: float | None
    best_step: int | None
    stopped: bool
    sample: str


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token of evaluated or streamed text: its first byte, its bytes, its surprisal in bits."""

    byte: int
    text: bytes
    bits: float


@dataclass(frozen=True, slots=True)
class ContextBin:
    """Loss of tokens that had seen at least `start` and fewer than `stop` tokens since a cold start."""

    start: int
    stop: int
    tokens: int
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class Score:
    """One evaluation; the JSON keys of `xlcli eval`. `chars`, `words` are None for text that is not UTF-8.

    `mean_steps` is how often blocks were applied to a token by a model that decides so itself, else None. `recall` is
    the share of full attention's weight that hashed layers found, if it was asked for: the mean, and of each in order.
    """

    model: str
    file: str
    bytes: int
    chars: int | None
    words: int | None
    tokens: int
    nats: float
    bits_per_byte: float
    bits_per_char: float | None
    perplexity: float
    word_perplexity: float | None
    mem_len: int
    segment_len: int
    batch_size: int
    span: str
    tokens_per_second: float
    peak_rss_bytes: int
    seconds: float
    device: str
    dtype: str
    mean_steps: float | None = None
    recall: float | None = None
    recall_by_layer: tuple[float, ...] = ()
    by_context: tuple[ContextBin, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """Bytes ready to be shown (whole UTF-8 characters), in order, of one sample."""

    sample: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Generated:
    """One finished sample; the JSON keys of `xlcli generate`."""

    sample: int
    prompt: str
    text: str
    tokens: int
    seed: int
    stop_reason: Literal["length", "stop", "interrupted"]
    prompt_tokens_per_second: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class LineScore:
    """One line of a pipe, its line end included. `spans` are its scored pieces for coloring: (bytes, bits)."""

    line: int
    byte: int
    bytes: int
    tokens: int
    bits: float
    bits_per_byte: float
    text: builtins.bytes
    spans: tuple[tuple[builtins.bytes, float], ...]


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Totals of a pipe so far."""

    lines: int
    bytes: int
    tokens: int
    bits: float
    bits_per_byte: float
    seconds: float
    tokens_per_second: float
    mem_len: int
    state_bytes: int
    final: bool


Event = (
    Notice
    | Progress
    | Plan
    | Step
    | Validation
    | Saved
    | Trained
    | TokenScore
    | Score
    | GeneratedText
    | Generated
    | LineScore
    | StreamStats
)
