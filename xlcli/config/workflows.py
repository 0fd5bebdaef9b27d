"""Configuration of each workflow: text, training, evaluation, generation, streaming; and of the runtime."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from xlcli.config.attention import ATTENTIONS, MAX_HASHES, MemoryDtype
from xlcli.config.base import BaseConfig, Count, InvalidSettingError, Length, Positive, Rate
from xlcli.config.model import ModelConfig
from xlcli.config.position import ClampLen
from xlcli.errors import ConfigError

Interval = Count | Positive
"""Interval in steps (int) or in seconds (float)."""
TokenizerKind = Literal["auto", "bytes", "sentencepiece", "words"]
SpanKind = Literal["uniform", "growing"]
WeightEncoding = Literal["float32", "bfloat16", "int8"]
"""Encoding in which weights are written; see `xlcli.store.encodings`."""
Dtype = Literal["auto", "float32", "bfloat16", "int8"]
"""Number type of weights or memory at inference."""


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
                    f"text.{name}", f"{value} is not a fraction from 0 up to 0.5", "Give 0.05, or a file."
                )
        return self


class TrainConfig(BaseConfig):
    """A training run. It ends when its first budget is spent, and so do schedules `linear`, `cosine` and `wsd`.

    Attributes:
        segment_len: Tokens per training segment.
        mem_len: Memory length of each layer in tokens; 0 disables recurrence.
        memory: Memory of softmax attention: `keyvalue` keeps keys and values, `hidden` keeps layer inputs and projects
            them again in each step (Dai et al. 2019), which costs about a sixth more.
        span: Tokens that a token attends to; see `xlcli.ops.span.Span`.
        reset_on_document: No token attends to an earlier document, and absolute positions count from its beginning.
        random_lengths: Draw segment and memory length of each step at random, up to the configured ones; see
            `xlcli.training.lengths`.
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
            `xlcli.training.patience`; None disables it.
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


class InferenceConfig(BaseConfig):
    """Inference settings of a trained model; None uses the trained value, `auto` that of `dtypes`.

    Attributes:
        mem_len: Memory length of each layer in tokens; 0 disables recurrence.
        n_steps: Number of times a universal stack applies its blocks.
        n_hashes: Number of hash rounds of LSH attention.
        clamp_len: Largest distance of the position encoding: keys further back are at this one, if the encoding can
            clamp distances, and have less weight. None uses that of `model.position`, else the largest one of training.
        weight_dtype: Number type that the weights are rounded to when the model is loaded.
        memory_dtype: Number type of past keys and values, which are rounded before their first use.
    """

    mem_len: Length | None = None
    n_steps: Annotated[int, Field(ge=1, le=1024)] | None = None
    n_hashes: Annotated[int, Field(ge=1, le=MAX_HASHES)] | None = None
    clamp_len: ClampLen | None = None
    weight_dtype: Dtype = "auto"
    memory_dtype: Dtype = "auto"

    def check_model(self, model: ModelConfig) -> None:
        """`ConfigError` if a setting does not apply to this model."""
        model.for_inference(self.n_steps, self.n_hashes)
        if self.clamp_len is not None and not model.has_softmax:
            reason = "needs softmax attention, but this model has none"
            raise ConfigError(f"clamp_len {reason}.", "Leave it out.", key="clamp_len", reason=reason)
        if self.memory_dtype in ("bfloat16", "int8") and not model.rounds_memory:
            *kinds, last = (kind for kind, table in ATTENTIONS.items() if table.rounds_memory)
            reason = f"needs {', '.join(kinds)} or {last} attention in every layer"
            raise ConfigError(
                f"memory_dtype {reason}.", "Leave it out, or use float32.", key="memory_dtype", reason=reason
            )

    def dtypes(self, model: ModelConfig) -> tuple[WeightEncoding, MemoryDtype]:
        """Number types of the weights and the memory of this model; `auto` is float32.

        A state that is continued keeps the number type of its memory.
        """
        weight = "float32" if self.weight_dtype == "auto" else self.weight_dtype
        memory = "float32" if self.memory_dtype == "auto" else self.memory_dtype
        return weight, memory


AdaptedWeights = Literal["all", "blocks"]
"""Weights that change during adaptation: all, or those of the blocks without embedding tables and head."""


class OnlineConfig(InferenceConfig):
    """Inference settings of a model that learns while it reads; None uses the default, or the value of a saved state.

    Attributes:
        adapt: Adapt the weights to the text: dynamic evaluation (Krause et al. 2018), see `xlcli.online.adaptation`.
        adapt_block: Number of tokens between steps of the optimizer.
        adapt_lr: Learning rate.
        adapt_decay: Share of the distance to the trained weights that a step takes back.
        adapt_weights: Weights that change.
        context_cache: Number of latest tokens among which the present context is looked up, see `xlcli.online.cache`;
            None has no cache.
    """

    adapt: bool = False
    adapt_block: Annotated[int, Field(ge=1, le=2**12)] | None = None
    adapt_lr: Positive | None = None
    adapt_decay: Rate | None = None
    adapt_weights: AdaptedWeights | None = None
    context_cache: Annotated[int, Field(ge=1, le=2**22)] | None = None

    @property
    def learns_by(self) -> str | None:
        """Option that makes a model learn while it reads, None if there is none."""
        return "--adapt" if self.adapt else "--context-cache" if self.context_cache else None


class CompressConfig(OnlineConfig):
    """A compression; the result contains its settings."""


class EvalConfig(OnlineConfig):
    """An evaluation.

    Attributes:
        segment_len: Tokens per call of the model; changes the result only without memory or with span `growing`.
        stride: Without memory, distance in tokens between overlapping windows of `segment_len` tokens, each of which is
            read anew and scores its last `stride` tokens, the first one all; None scores independent segments.
        batch_size: Sequences per batch; does not change the result.
        span: Tokens that a token attends to; see `xlcli.ops.span.Span`.
        reset_on_document: Score each document as if it were alone; None is the value of training.
        split: Held-out text of the model that is scored when no text is given.
        sweep_mem_len: Memory lengths; one evaluation for each.
        limit: Number of bytes to score; None is the whole text.
        recall: Also measure the recall of LSH attention.
        binary: As `text.binary`.
        text_field: As `text.text_field`.
    """

    segment_len: Count | None = None
    stride: Count | None = None
    batch_size: Count | None = None
    span: SpanKind = "uniform"
    reset_on_document: bool | None = None
    split: Literal["valid", "test"] = "valid"
    sweep_mem_len: tuple[Length, ...] = ()
    limit: Count | None = None
    recall: bool = False
    binary: bool = False
    text_field: str | None = None

    def check_model(self, model: ModelConfig) -> None:
        """`ConfigError` if a setting does not apply to this model."""
        super().check_model(model)
        if self.recall and not model.supports_recall:
            hashed = any(layer.supports_recall for layer in model.attentions)
            reason = "cannot be measured with adaptive computation time" if hashed else "needs LSH attention"
            raise ConfigError(f"recall {reason}.", "Leave it out.", key="recall", reason=reason)

    def check_stride(self, segment_len: int) -> None:
        """`ConfigError` if the stride is longer than the window, by default `segment_len` tokens."""
        window = self.segment_len or segment_len
        if self.stride is not None and self.stride > window:
            raise ConfigError(
                f"a stride of {self.stride} tokens is longer than the window of {window} tokens.",
                "Use a smaller --stride, or a longer window with --segment-len.",
            )

    @model_validator(mode="after")
    def _check_adaptation(self) -> EvalConfig:
        if self.learns_by is None:
            return self
        conflicts = {
            "batch_size": self.batch_size not in (None, 1),
            "stride": self.stride is not None,
            "span": self.span != "uniform",
            "reset_on_document": bool(self.reset_on_document),
        }
        if conflict := next((name for name, is_given in conflicts.items() if is_given), None):
            flag = f"--{conflict.replace('_', '-')}"
            key = "eval.adapt" if self.adapt else "eval.context_cache"
            raise InvalidSettingError(key, f"reads one text in order, without {flag}", f"Omit {flag}.")
        return self

    @model_validator(mode="after")
    def _check_mem_len(self) -> EvalConfig:
        if self.stride is not None and (self.mem_len != 0 or self.sweep_mem_len):
            raise InvalidSettingError(
                "eval.stride",
                "needs a memory length of 0, because each window is read anew",
                "Use --mem-len 0 instead of --sweep-mem-len." if self.sweep_mem_len else "Add --mem-len 0.",
            )
        return self


class GenerateConfig(OnlineConfig):
    """Sampling of a continuation.

    Attributes:
        max_new_tokens: Maximum number of new tokens.
        temperature: Softmax temperature; 0 is greedy decoding.
        top_k: Number of most probable tokens to sample from; 0 keeps all.
        top_p: Nucleus probability (Holtzman et al. 2020); 1 keeps all tokens.
        min_p: Minimum probability relative to the most probable token (Nguyen et al. 2024).
        repetition_penalty: Penalty on recent tokens (Keskar et al. 2019); 1 disables it.
        stop: Texts that end the continuation.
        num_samples: Number of continuations.
        logprobs: Number of most probable tokens to report with the log probability of each new token; None reports no
            log probabilities.
    """

    max_new_tokens: Length = 256
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 0.8
    top_k: Length = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    stop: tuple[str, ...] = ()
    num_samples: Count = 1
    logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None

    @model_validator(mode="after")
    def _check_cache(self) -> GenerateConfig:
        if self.context_cache is not None and self.num_samples > 1:
            raise InvalidSettingError(
                "generate.context_cache", "continues one text, not several samples", "Leave out one of the two."
            )
        return self


def compile_pattern(pattern: str, key: str) -> Any:
    """Regular expression for lines of text, with the method `search` of `re`.

    The matcher is RE2, whose time is linear in the length of the text, whatever the pattern.

    Raises:
        InvalidSettingError: It is not a regular expression of RE2, or too large.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = 2**20
    try:
        if len(pattern) > 1000:
            raise InvalidSettingError(key, "has more than 1,000 characters", "Shorten the pattern.")
        return re2.compile(pattern.encode(), options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise InvalidSettingError(
            key, f"is not a regular expression: {reason}", "Check the pattern; the syntax is that of RE2."
        ) from None


class StreamConfig(OnlineConfig):
    """Scoring of a stream.

    Attributes:
        emit: Scores to yield.
        continue_tokens: Number of tokens to generate after the end of the input.
        save_every: Seconds between saves of the state; None saves at the end only.
        flush_ms: Milliseconds without input after which an unfinished line is scored; None waits for its end.
        reset_on: Regular expression of RE2; the memory is cleared before each line that matches.
        reset_on_document: Clear the memory before each document; None is the value of training.
        binary: As `text.binary`; the Python function `stream` always takes bytes as they are.
        text_field: As `text.text_field`.
    """

    emit: Literal["lines", "tokens", "stats", "none"] = "lines"
    continue_tokens: Length = 0
    save_every: Positive | None = None
    flush_ms: Length | None = None
    reset_on: str | None = None
    reset_on_document: bool | None = None
    binary: bool = False
    text_field: str | None = None

    @model_validator(mode="after")
    def _check_pattern(self) -> StreamConfig:
        if self.reset_on is not None:
            compile_pattern(self.reset_on, "stream.reset_on")
        return self


class BenchConfig(InferenceConfig):
    """A benchmark.

    Attributes:
        mem_lens: Memory lengths; one measurement for each.
        segment_len: Tokens per call of `eval` and `train`; None is the length that they choose.
        batch_size: Sequences per batch; None is 1 for decoding, else the number that the workflow chooses.
        seconds: Time for each figure.
    """

    mem_lens: tuple[Length, ...] = ()
    segment_len: Count | None = None
    batch_size: Count | None = None
    seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 3.0


class RuntimeConfig(BaseConfig):
    """Device, number type and reproducibility.

    Attributes:
        device: `auto` is the first CUDA device, else the CPU.
        dtype: Number type of matrix products. `auto` is bfloat16 in training where the hardware supports it natively,
            else float32.
        threads: CPU threads; None keeps the default of torch. Training on a CPU then measures how many threads up to
            it are fastest, unless `deterministic`, `compile` or the environment variable OMP_NUM_THREADS is set.
        seed: Seed of the random-number generator; None is 0 in training, else random.
        compile: Compile the model before training.
        deterministic: Use deterministic kernels and a fixed number of threads only.
    """

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    compile: bool = False
    deterministic: bool = False


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
