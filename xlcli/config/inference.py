"""Configuration of the workflows that use a trained model: evaluation, generation, streaming, compression, bench."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from xlcli.config.attention import ATTENTIONS, MAX_HASHES, MemoryDtype
from xlcli.config.base import (
    BaseConfig,
    Count,
    InvalidSettingError,
    Length,
    Positive,
    Rate,
    SpanKind,
    WeightEncoding,
    compile_pattern,
)
from xlcli.config.model import ModelConfig
from xlcli.config.position import ClampLen
from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.config.workflows import TrainConfig

Dtype = Literal["auto", "float32", "bfloat16", "int8"]
"""Number type of weights or memory at inference."""


class Reading(NamedTuple):
    """How a model reads a text, with nothing left open.

    Attributes:
        mem_len: Memory length in tokens; 0 makes segments independent.
        segment_len: Length of an independent segment in tokens.
        memory_dtype: Number type of past keys and values.
        reset_on_document: Each document is read as if it were alone.
    """

    mem_len: int
    segment_len: int
    memory_dtype: MemoryDtype
    reset_on_document: bool

    @property
    def longest(self) -> int:
        """Number of tokens in a full memory."""
        return self.mem_len or self.segment_len


class InferenceConfig(BaseConfig):
    """Inference settings of a trained model; None and `auto` are decided by `reading` and `weights`.

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

    def shape(self, model: ModelConfig) -> ModelConfig:
        """The model with these settings of its stack and its layers; `ConfigError` if it has no such setting."""
        return model.for_inference(self.n_steps, self.n_hashes)

    def check_model(self, model: ModelConfig) -> None:
        """`ConfigError` if a setting does not apply to this model."""
        self.shape(model)
        if self.clamp_len is not None and not model.has_softmax:
            reason = "needs softmax attention, but this model has none"
            raise ConfigError(f"clamp_len {reason}.", "Leave it out.", key="clamp_len", reason=reason)
        if self.memory_dtype in ("bfloat16", "int8") and not model.rounds_memory:
            *kinds, last = (kind for kind, table in ATTENTIONS.items() if table.rounds_memory)
            reason = f"needs {', '.join(kinds)} or {last} attention in every layer"
            raise ConfigError(
                f"memory_dtype {reason}.", "Leave it out, or use float32.", key="memory_dtype", reason=reason
            )

    @property
    def weights(self) -> WeightEncoding:
        """Number type that the weights are rounded to; `auto` is float32, which does not round them."""
        return "float32" if self.weight_dtype == "auto" else self.weight_dtype

    def reading(self, train: TrainConfig) -> Reading:
        """How a text is read from its beginning: trained values for what is not set; `auto` is float32.

        A state that is continued keeps its own values.
        """
        open_settings = {name: getattr(self, name, None) is None for name in ("mem_len", "reset_on_document")}
        chosen = {name: getattr(train if is_open else self, name) for name, is_open in open_settings.items()}
        memory_dtype = "float32" if self.memory_dtype == "auto" else self.memory_dtype
        return Reading(**chosen, segment_len=train.segment_len, memory_dtype=memory_dtype)


AdaptedWeights = Literal["all", "blocks"]
"""Weights that change during adaptation: all, or those of the blocks without embedding tables and head."""


class OnlineConfig(InferenceConfig):
    """Inference settings of a model that learns while it reads; None uses the default, or the value of a saved state.

    Attributes:
        adapt: Adapt the weights to the text: dynamic evaluation (Krause et al. 2018), see `xlcli.online.adaptation`.
        adapt_block: Number of tokens between steps of the optimizer.
        adapt_lr: Learning rate: the root mean square of the changes that a step makes to a weight matrix.
        adapt_decay: Share of the distance to the trained weights that a step takes back.
        adapt_weights: Weights that change.
        context_cache: Number of latest tokens among which the present context is looked up, see `xlcli.online.cache`;
            None has no cache.
    """

    adapt: bool = False
    adapt_block: Annotated[int, Field(ge=1, le=2**12)] | None = None
    adapt_lr: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
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


class Sampling(NamedTuple):
    """Distribution of the next token, relative to that of the model; by default the same. See `GenerateConfig`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class GenerateConfig(OnlineConfig):
    """Sampling of a continuation.

    Attributes:
        max_new_tokens: Maximum number of new tokens.
        temperature: Softmax temperature; 0 is greedy decoding. This and the four others: see `sampling` for None.
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
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] | None = None
    top_k: Length | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] | None = None
    stop: tuple[str, ...] = ()
    num_samples: Annotated[int, Field(ge=1, le=2**16)] = 1
    logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None

    @model_validator(mode="after")
    def _check_cache(self) -> GenerateConfig:
        if self.context_cache is not None and self.num_samples > 1:
            raise InvalidSettingError(
                "generate.context_cache", "continues one text, not several samples", "Leave out one of the two."
            )
        return self

    def sampling(self, vocabulary: str) -> Sampling:
        """The distribution to sample from, with a vocabulary of this kind.

        Without any setting it is `TUNED` for subwords. Otherwise what is not set changes nothing, but for a temperature
        of 0.8, so a temperature of 1 samples from the distribution of the model. The penalty is not for bytes, which
        repeat in any text.
        """
        given = {name: value for name in Sampling._fields if (value := getattr(self, name)) is not None}
        if not given and vocabulary == "sentencepiece":
            return TUNED
        return Sampling(**{"temperature": TUNED.temperature} | given)


TUNED = Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1)
"""Chosen on validation text by `benchmarks/sampling.py` (docs/log.md)."""


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
