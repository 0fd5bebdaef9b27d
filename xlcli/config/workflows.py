"""Configuration of text, training and runtime, and the whole configuration."""

from __future__ import annotations

from typing import Annotated, Literal, NoReturn

from pydantic import Field, model_validator

from xlcli.config.attention import LSHAttentionConfig
from xlcli.config.base import BaseConfig, Count, InvalidSettingError, Length, Positive, Rate, SpanKind, WeightEncoding
from xlcli.config.inference import BenchConfig, CompressConfig, EvalConfig, GenerateConfig, StreamConfig
from xlcli.config.model import ModelConfig
from xlcli.config.position import ClampLen
from xlcli.config.stack import UniversalStackConfig
from xlcli.errors import ConfigError

Interval = Count | Positive
"""Interval in steps (int) or in seconds (float)."""
TokenizerKind = Literal["auto", "bytes", "sentencepiece", "words"]


class TextConfig(BaseConfig):
    """Text and tokenizer.

    Attributes:
        tokenizer: `auto` chooses by content and size of the text.
        vocab_size: Vocabulary size; None chooses by text size.
        valid: Validation text: a file, or a fraction off the end of the text. None is 5%, at most 1 MiB.
        test: Test text, as `valid`.
        binary: Take the bytes of files as they are: nothing is unpacked or converted, and any byte is accepted.
        text_field: Key of the text in JSON lines and Parquet files; None is `text`, if there is such a key.
    """

    tokenizer: TokenizerKind = "auto"
    vocab_size: Annotated[int, Field(ge=2, le=2**24)] | None = None
    valid: str | float | None = None
    test: str | float | None = None
    binary: bool = False
    text_field: str | None = None

    @model_validator(mode="after")
    def _check_fractions(self) -> TextConfig:
        for name, value in (("valid", self.valid), ("test", self.test)):
            if isinstance(value, float) and not 0.0 <= value < 0.5:
                raise InvalidSettingError(
                    f"text.{name}", f"{value} is not a fraction from 0 to below 0.5", "Give 0.05, or a file."
                )
        return self


class TrainConfig(BaseConfig):
    """A training run. It ends when its first budget is spent, and so do schedules `linear`, `cosine` and `wsd`.

    Without a budget, the defaults of `xlcli.training.defaults` apply: a time, and a number of passes over the text.

    Attributes:
        segment_len: Tokens per training segment.
        mem_len: Memory length of each layer in tokens; 0 disables recurrence.
        memory: Memory of softmax attention: `keyvalue` keeps keys and values, `hidden` keeps layer inputs and projects
            them again in each step (Dai et al. 2019), which costs about a sixth more.
        span: Tokens that a token attends to; see `xlcli.ops.span.Span`.
        reset_on_document: No token attends to an earlier document, and absolute positions count from its beginning.
        random_lengths: Draw segment and memory length of each step at random, up to the configured ones; see
            `xlcli.training.schedule`.
        batch_size: Sequences per batch.
        grad_accum: Microbatches per step; does not change the result.
        recompute_activations: Keep only the input of each block for the backward pass, which computes the block again:
            less memory, a third more arithmetic, the same result.
        lr: Peak learning rate of the optimizer; None is its default.
        adam_lr: Peak learning rate of parameters that Muon leaves to AdamW; None is its default.
        betas: AdamW betas.
        momentum: Muon momentum.
        warmup_steps: Steps of learning-rate warmup; None is at most 40.
        lr_schedule: Learning-rate schedule after the warmup; see `xlcli.optim.lr_factor`.
        decay_fraction: Share of the budget at its end in which schedule `wsd` decays.
        min_lr_ratio: Final learning rate divided by the peak.
        grad_clip: Gradient-clipping norm; 0 disables clipping.
        max_steps: Budget in steps.
        max_tokens: Budget in tokens.
        max_time: Budget in seconds.
        eval_every: Interval between validations; None is 10 validations in a run.
        patience: Number of validations without improvement after which the run ends early, see
            `xlcli.training.schedule`; None disables it.
        save_every: Interval between checkpoints; None is 60 seconds.
        keep_checkpoints: Number of checkpoints to keep, besides the one that a roll-back restores.
        on_divergence: `rollback` continues from the last checkpoint, behind the text that was read since, at a third of
            the learning rates; at most three times in a run. `stop` ends the run.
        weights: Encoding of the weights of the model folder. Checkpoints are in float32; the final score is that of the
            stored weights.
    """

    segment_len: Count = 128
    mem_len: Length = 128
    memory: Literal["keyvalue", "hidden"] = "hidden"
    span: SpanKind = "growing"
    reset_on_document: bool = False
    random_lengths: bool = False
    batch_size: Count = 16
    grad_accum: Count = 1
    recompute_activations: bool = False
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: Positive | None = None
    adam_lr: Positive | None = None
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.01
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    momentum: Rate = 0.95
    warmup_steps: Length | None = None
    lr_schedule: Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"] = "linear"
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    grad_clip: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    max_steps: Count | None = None
    max_tokens: Count | None = None
    max_time: Positive | None = None
    eval_every: Interval | None = None
    patience: Count | None = None
    save_every: Interval | None = None
    keep_checkpoints: Count = 2
    on_divergence: Literal["rollback", "stop"] = "rollback"
    weights: WeightEncoding = "float32"

    def max_distance(self, model: ModelConfig) -> int:
        """Largest distance from a token to a key in the training of this model."""
        is_growing = self.span == "growing" or not self.mem_len
        return model.max_distance(self.mem_len, self.segment_len - 1 if is_growing else 0)

    def limits(self, model: ModelConfig, clamp_len: ClampLen | None) -> tuple[int | None, int | None]:
        """`Span.clamp_len` and `Span.far_len` at inference; None is the largest distance of training.

        A model that was trained with clamped distances keeps its own, and has given full weight to keys further back.
        With some encodings more keys of full weight than the trained memory has are too many.
        """
        if clamp_len == "none" or not model.has_softmax:
            return None, None
        farthest = self.max_distance(model)
        clamp = (clamp_len or model.clamp_len or farthest) if model.clamps_distances else None
        if clamp_len is not None:
            return clamp, max(clamp_len, farthest if model.clamp_len else 0)
        return clamp, (self.mem_len if model.position.far_beyond_memory else 0) or farthest

    @model_validator(mode="after")
    def _check_grad_accum(self) -> TrainConfig:
        if self.grad_accum > self.batch_size:
            raise InvalidSettingError(
                "train.grad_accum",
                f"{self.grad_accum} is more than train.batch_size {self.batch_size}",
                "Lower it or raise the batch size: each microbatch needs at least one sequence.",
            )
        return self


class RuntimeConfig(BaseConfig):
    """Device, number type and reproducibility.

    Attributes:
        device: `auto` is the first CUDA device, else the CPU.
        dtype: Number type of matrix products. `auto` is bfloat16 in training where the hardware supports it natively,
            else float32.
        threads: CPU threads; None keeps the default of torch. Training on a CPU with a time budget then begins with a
            measurement of how many threads are fastest, unless `deterministic` or OMP_NUM_THREADS is set.
        seed: Seed of the random-number generator; None is 0 in training, else random.
        compile: Compile the model before training.
        deterministic: Use deterministic kernels and a fixed number of threads only.
        shard: In training on several ranks, divide parameters, gradients and optimizer states among them; the result is
            the same up to rounding. With `dtype` bfloat16 parameters of blocks are gathered in bfloat16.
        timeout: Seconds after which a run ends because another rank does not answer.
    """

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    compile: bool = False
    deterministic: bool = False
    shard: bool = False
    timeout: Annotated[float, Field(ge=1e-3, le=1e6)] = 600.0


class Config(BaseConfig):
    """The whole configuration."""

    model: ModelConfig = ModelConfig()
    text: TextConfig = TextConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    generate: GenerateConfig = GenerateConfig()
    stream: StreamConfig = StreamConfig()
    compress: CompressConfig = CompressConfig()
    bench: BenchConfig = BenchConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _check_documents(self) -> Config:
        separate = all(layer.separates_documents for layer in self.model.attentions)
        if self.train.reset_on_document and not separate:
            raise InvalidSettingError(
                "train.reset_on_document",
                f"needs full or local attention: attention '{self.model.attention.kind}' cannot hide the documents "
                "before",
                "Leave it out, or set model.attention.kind to full or local.",
            )
        return self

    @model_validator(mode="after")
    def _check_auxiliary_losses(self) -> Config:
        if self.train.memory == "keyvalue" and any(layer.needs_hidden_memory for layer in self.model.attentions):
            raise InvalidSettingError(
                "train.memory",
                "keyvalue keeps no inputs, which the loss of a convolution (model.attention.pooling) reads",
                "Set train.memory to hidden, or model.attention.pooling to mean or max.",
            )
        return self

    @model_validator(mode="after")
    def _check_training(self) -> Config:
        if self.train.recompute_activations and self.model.stack.recomputes_activations:
            raise InvalidSettingError(
                "train.recompute_activations",
                f"does not apply: stack '{self.model.stack.kind}' keeps no activations",
                "Leave it out, or set model.stack.kind to standard or universal.",
            )
        if self.train.recompute_activations and self.runtime.compile:
            raise InvalidSettingError(
                "train.recompute_activations",
                "and runtime.compile exclude each other: the compiler chooses itself what to recompute",
                "Leave one of them out.",
            )
        if self.train.random_lengths and self.runtime.compile:
            raise InvalidSettingError(
                "train.random_lengths",
                "and runtime.compile exclude each other: one segment length and one memory length are compiled",
                "Leave one of them out.",
            )
        return self

    def check_division(self, n_ranks: int) -> None:
        """Raises `ConfigError` if a run with this configuration cannot be divided among so many ranks."""
        if n_ranks == 1:
            return
        train, model = self.train, self.model
        unit = n_ranks * train.grad_accum
        if train.batch_size % unit:
            below = train.batch_size // unit * unit
            nearest = f"--batch-size {below} or {below + unit}" if below else f"--batch-size {unit}"
            parts = f"{n_ranks} processes" + (f" with {train.grad_accum} microbatches" if train.grad_accum > 1 else "")
            reason = f"is {train.batch_size}, which {parts} cannot divide equally"
            raise ConfigError(f"train.batch_size {reason}.", f"Use {nearest}.", key="train.batch_size", reason=reason)
        stack = model.stack
        if isinstance(stack, UniversalStackConfig) and stack.act and any(model.dropout.model_dump().values()):
            _refuse("model.dropout", "with adaptive computation time depends on the number of processes", "Set it to 0")
        hashed = any(isinstance(layer, LSHAttentionConfig) for layer in model.attentions)
        if hashed and model.dropout.attention:
            _refuse("model.dropout.attention", "with LSH attention depends on the number of processes", "Set it to 0")
        if not self.runtime.shard:
            return
        if self.runtime.compile:
            _refuse("runtime.shard", "and runtime.compile exclude each other", "Leave one of them out")
        if self.runtime.dtype == "float16":
            _refuse("runtime.shard", "cannot scale the loss of float16", "Use --dtype bfloat16")
        if model.norm.placement == "rezero":
            _refuse("runtime.shard", "cannot divide the factors of ReZero", "Use another model.norm.placement")


def _refuse(key: str, reason: str, remedy: str) -> NoReturn:
    """Refuses a run on several ranks."""
    raise ConfigError(f"{key} {reason}.", f"{remedy}, or train in a single process.", key=key, reason=reason)
