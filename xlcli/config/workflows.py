"""The tables of what is done with a model: text, training, evaluation, generation, streams, and where it runs."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from xlcli.config.attention import MAX_HASHES
from xlcli.config.base import BaseConfig, Count, InvalidSettingError, Length, Positive, Rate
from xlcli.config.model import ModelConfig

Interval = Count | Positive
"""How often: a whole number of steps, or, as a number with a decimal point, seconds."""
TokenizerKind = Literal["auto", "bytes", "sentencepiece", "words"]
SpanKind = Literal["uniform", "growing"]


class TextConfig(BaseConfig):
    """How text becomes tokens. `valid` and `test` are fractions cut off the end, or files."""

    tokenizer: TokenizerKind = "auto"
    vocab_size: Annotated[int, Field(ge=2, le=2**24)] | None = None
    valid: str | float | None = None
    test: str | float | None = None

    @model_validator(mode="after")
    def _fractions(self) -> TextConfig:
        for name, value in (("valid", self.valid), ("test", self.test)):
            if isinstance(value, float) and not 0.0 <= value < 0.5:
                raise InvalidSettingError(
                    f"text.{name}", f"{value} is not a fraction from 0 up to 0.5", "Give 0.05, or a file."
                )
        return self


class TrainConfig(BaseConfig):
    """One training run. Of the three budgets the first to be reached ends the run; `linear` and `cosine` land on it.

    Durations are seconds; `eval_every` and `save_every` count steps when whole numbers. `batch_size` counts the lanes
    of text read side by side in one step; `grad_accum` splits them into that many groups without changing the result.
    """

    segment_len: Count = 128
    mem_len: Length = 128
    span: SpanKind = "growing"
    batch_size: Count = 16
    grad_accum: Count = 1
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: Positive | None = None
    adam_lr: Positive = 1e-2
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.01
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    momentum: Rate = 0.95
    warmup_steps: Length | None = None
    lr_schedule: Literal["cosine", "linear", "constant", "inverse_sqrt"] = "linear"
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    grad_clip: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    max_steps: Count | None = None
    max_tokens: Count | None = None
    max_time: Positive | None = None
    eval_every: Interval | None = None
    save_every: Interval | None = None
    keep_checkpoints: Count = 2

    @model_validator(mode="after")
    def _groups(self) -> TrainConfig:
        if self.grad_accum > self.batch_size:
            raise InvalidSettingError(
                "train.grad_accum",
                f"{self.grad_accum} is more than train.batch_size {self.batch_size}",
                "Lower it or raise the batch size: each microbatch needs at least one sequence.",
            )
        return self


class InferenceConfig(BaseConfig):
    """How a trained model reads; None is as trained.

    `n_steps` is how often the blocks of a universal stack are applied, `n_hashes` the rounds of hashed attention.
    """

    mem_len: Length | None = None
    n_steps: Annotated[int, Field(ge=1, le=1024)] | None = None
    n_hashes: Annotated[int, Field(ge=1, le=MAX_HASHES)] | None = None


class EvalConfig(InferenceConfig):
    """One evaluation. `None` means as trained; `recall` also measures what hashed attention finds of full attention."""

    segment_len: Count | None = None
    batch_size: Count | None = None
    span: SpanKind = "uniform"
    split: Literal["valid", "test"] = "valid"
    sweep_mem_len: tuple[Length, ...] = ()
    limit: Count | None = None
    recall: bool = False


class GenerateConfig(InferenceConfig):
    """One generation: how far, how bold, when to stop."""

    max_new_tokens: Length = 256
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 0.8
    top_k: Length = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    stop: tuple[str, ...] = ()
    num_samples: Count = 1


class StreamConfig(InferenceConfig):
    """One pipe. `flush_ms`: score text of an unfinished line when the pipe has been silent for so long."""

    emit: Literal["lines", "tokens", "stats", "none"] = "lines"
    continue_tokens: Length = 0
    save_every: Positive | None = None
    flush_ms: Length | None = None
    reset_on: str | None = None

    @model_validator(mode="after")
    def _pattern(self) -> StreamConfig:
        if self.reset_on is not None:
            try:
                re.compile(self.reset_on.encode())
            except re.error as error:
                raise InvalidSettingError(
                    "stream.reset_on", f"is not a regular expression: {error}", "Check the pattern."
                ) from None
        return self


class RuntimeConfig(BaseConfig):
    """Where and how exactly numbers are computed."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    compile: bool = False
    deterministic: bool = False


class Config(BaseConfig):
    """Everything that can be set."""

    model: ModelConfig = ModelConfig()
    text: TextConfig = TextConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    generate: GenerateConfig = GenerateConfig()
    stream: StreamConfig = StreamConfig()
    runtime: RuntimeConfig = RuntimeConfig()
