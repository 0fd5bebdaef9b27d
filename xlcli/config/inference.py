"""Configuration of the workflows that use a trained model: evaluation, generation, streaming, bench."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field

from xlcli.config import units
from xlcli.config.attention import ATTENTIONS, MAX_HASHES, MemoryDtype
from xlcli.config.base import (
    BaseConfig,
    Count,
    Length,
    NotNegative,
    Option,
    PositiveShare,
    Rate,
    Seconds,
    Share,
    SpanKind,
    Switch,
    WeightEncoding,
    compile_pattern,
)
from xlcli.config.columns import Columns
from xlcli.config.model import ModelConfig
from xlcli.config.position import ClampLen, LearnedPositionConfig
from xlcli.config.units import COUNT, DURATION, LENGTHS, NUMBER
from xlcli.errors import InvalidSettingError

Dtype = Literal["auto", "float32", "bfloat16", "int8"]  # number type of weights or memory at inference


Binary = Annotated[Switch, Option("Text", "--binary", "1"), Field(description="Read the input as raw bytes.")]
TextField = Annotated[
    str | None,
    Option("Text", "--text-field KEY"),
    Field(description="Read the text from this key or column. Default: text (JSON lines, Parquet)."),
]
NBest = Annotated[int, Field(ge=0, le=1000), COUNT]  # number of the most probable tokens


_SEGMENT_LEN = Option("Memory", "--segment-len TOKENS", "128")


@dataclass(frozen=True)
class ContextSettings:
    """How a model reads a text, with nothing left open."""

    mem_len: int  # memory length in tokens; 0 makes segments independent
    segment_len: int  # length of an independent segment in tokens
    memory_dtype: MemoryDtype  # number type of past keys and values
    reset_on_document: bool  # each document is read as if it were alone
    span: SpanKind = "uniform"  # tokens that a token attends to
    stride: int | None = None  # distance of overlapping windows of `segment_len` tokens; None: segments are independent

    @property
    def init_arguments(self) -> dict[str, Any]:
        """Arguments of `LanguageModel.init_state`."""
        lengths = {"mem_len": self.mem_len, "segment_len": self.segment_len, "stride": self.stride}
        return lengths | {"span": self.span, "memory_dtype": self.memory_dtype}

    @property
    def has_memory(self) -> bool:
        """True if a token attends to earlier segments."""
        return self.mem_len > 0

    @property
    def longest(self) -> int:
        """Number of tokens in a full memory."""
        return self.mem_len or self.segment_len

    @property
    def max_context(self) -> int:
        """Longest context whose loss is measured, with memory."""
        return 2 * self.mem_len


def context_settings(
    model: ModelConfig,
    trained: ContextSettings,
    settings: "InferenceConfig",
    *,
    segment_len: int | None = None,
    span: SpanKind = "uniform",
    reset_on_document: bool | None = None,
) -> ContextSettings:
    """How a text is read from its beginning: as the user has set it, and as the model was `trained` where that is open.

    Open are settings and keywords that are None or `auto`. Not for a saved state, which keeps its own values.
    `InvalidSettingError` if values exclude each other, or do not apply to the model.
    """
    asked: dict[str, Any] = {
        "mem_len": settings.mem_len,
        "segment_len": segment_len,
        "stride": settings.stride,
        "memory_dtype": settings.memory_dtype,
        "span": span,
        "reset_on_document": reset_on_document,
    }
    given = {name: value for name, value in asked.items() if value not in (None, "auto")}
    reading = replace(trained, **given)
    position = model.position
    if isinstance(position, LearnedPositionConfig) and position.overflow == "slide":
        # It has a trained vector for each position of a window, and none for what memory would let it see behind.
        if settings.mem_len:
            raise InvalidSettingError("mem_len", "has learned positions, which end with its window", "Leave it out.")
        reading = _in_windows(reading, position.max_len)
    _check_stride(reading)
    return reading


def _in_windows(reading: ContextSettings, n_positions: int) -> ContextSettings:
    """The same for a model with a table of `n_positions`: in windows that overlap by half, unless a stride is given.

    `InvalidSettingError` if a window is longer than the table.
    """
    if reading.segment_len > n_positions:
        reason = f"is more than its {n_positions} positions"
        raise InvalidSettingError("segment_len", reason, f"Use {n_positions} or less.")
    if reading.mem_len or reading.stride is not None:
        return reading
    return replace(reading, stride=math.ceil(reading.segment_len / 2))


def _check_stride(reading: ContextSettings) -> None:
    """`InvalidSettingError` if a text cannot be read in overlapping windows that begin every `stride` tokens."""
    if reading.stride is None:
        return
    if reading.mem_len:
        reason = "needs a memory length of 0, because each window is read anew"
        raise InvalidSettingError("stride", reason, "Use --mem-len 0 alone.")
    if reading.stride > reading.segment_len:
        reason = f"needs a window of at least {reading.stride} tokens, not {reading.segment_len}"
        raise InvalidSettingError("stride", reason, "Use a smaller stride, or a longer window with --segment-len.")


AdaptedWeights = Literal["feedforward", "blocks", "all"]
"""Weights that change during adaptation: feed-forward matrices, token vectors and the table of a softmax, all but
embedding tables and head, or all."""


class LearningConfig(BaseConfig):
    """What a model learns while it reads; a saved state has its own settings, which those that are given must equal.

    See `xlcli.online.adaptation` (dynamic evaluation, Krause et al. 2018) and `xlcli.online.mixture`.
    """

    adapt: Annotated[Switch, Option("Memory", "--adapt", "1")] = Field(
        default=False, description="Adapt the weights to the text while reading it; the model folder does not change."
    )
    adapt_block: Annotated[int, Field(ge=1, le=2**12), COUNT] = Field(
        default=128, description="Number of tokens between two steps of adaptation."
    )
    adapt_lr: PositiveShare | None = Field(
        default=None,
        description="Initial learning rate of adaptation: root mean square change of a matrix per step. "
        "Default: 0.0006, for an imported model 0.0001.",
    )
    adapt_decay: Rate = Field(
        default=0.001, description="Share of the distance to the trained weights that each step takes back."
    )
    adapt_weights: AdaptedWeights = Field(
        default="feedforward",
        description="Weights that adapt: feed-forward matrices, token vectors and softmax table "
        "(feedforward); all but embeddings and head (blocks); or all.",
    )
    context_cache: Annotated[
        Annotated[int, Field(ge=1, le=2**22), COUNT] | None, Option("Memory", "--context-cache TOKENS", "100k")
    ] = Field(default=None, description="Also predict what followed the same context earlier in the last N tokens.")

    @property
    def online_option(self) -> str | None:
        """Option that makes a model learn while it reads, None if there is none."""
        if self.adapt:
            return "--adapt"
        if self.context_cache is not None:
            return "--context-cache"
        return None

    @property
    def learning(self) -> "LearningConfig":
        return self


class InferenceConfig(BaseConfig):
    """Inference settings of a trained model; None and `auto` are decided by `reading` and `weights`."""

    mem_len: Annotated[Length | None, Option("Memory", "--mem-len TOKENS", "512")] = Field(
        default=None,
        description="Let each layer remember this many tokens; 0 disables memory. Default: as in training.",
    )
    n_steps: Annotated[int, Field(ge=1, le=1024), COUNT] | None = Field(
        default=None, description="How often a universal model applies its blocks. Default: as trained."
    )
    n_hashes: Annotated[int, Field(ge=1, le=MAX_HASHES), COUNT] | None = Field(
        default=None, description=f"Number of hash rounds of LSH attention, 1 to {MAX_HASHES}. Default: as trained."
    )
    n_sinks: Annotated[int, Field(ge=0, le=2**16), COUNT] | None = Field(
        default=None,
        description="Number of first tokens of a text that stay visible beside the memory (Xiao et al. 2024). Default: "
        "n_sinks of model.position.",
    )
    clamp_len: ClampLen | None = Field(
        default=None,
        description="Largest distance of positions xl and rope; tokens further back count as being there. "
        "none: no limit. Default: clamp_len of model.position, else the largest trained distance, "
        "with less weight for tokens further back.",
    )
    weight_dtype: Dtype = Field(
        default="auto",
        description="Round weights to this type when loading the model; auto is float32. Only compiled "
        "kernels gain speed.",
    )
    memory_dtype: Dtype = Field(
        default="auto",
        description="Round keys and values in memory to this type before their first use; auto is float32, or "
        "as in a saved state.",
    )
    stride: Count | None = Field(
        default=None,
        description="With mem_len 0: read overlapping windows of segment_len tokens, and score the last stride tokens "
        "of each (all of the first). Default: independent segments, or half a window with position.overflow slide.",
    )

    @property
    def asks_for_windows(self) -> bool:
        """True if overlapping windows are asked for; a table of positions may need them, too."""
        return self.stride is not None

    def shape(self, model: ModelConfig) -> ModelConfig:
        """The model with these settings of its stack and layers; `InvalidSettingError` if it has no such setting."""
        return model.for_inference(self.n_steps, self.n_hashes, self.n_sinks)

    def check_model(self, model: ModelConfig) -> None:
        """`InvalidSettingError` if a setting does not apply to this model."""
        self.shape(model)
        has_clamp = model.has_softmax if self.clamp_len == "none" else model.clamps_distances
        if self.clamp_len is not None and not has_clamp:
            reason = "needs softmax attention, and position xl or rope unless it is none"
            raise InvalidSettingError("clamp_len", reason, "Leave it out.")
        if self.memory_dtype in ("bfloat16", "int8") and not model.rounds_memory:
            kinds = [kind for kind, table in ATTENTIONS.items() if table.rounds_memory]
            reason = f"needs {', '.join(kinds[:-1])} or {kinds[-1]} attention in every layer"
            raise InvalidSettingError("memory_dtype", reason, "Leave it out, or use float32.")

    @property
    def learning(self) -> LearningConfig:
        """What the model learns while it reads: nothing, unless a section has these settings."""
        return LearningConfig()

    @property
    def weights(self) -> WeightEncoding:
        """Number type that the weights are rounded to; `auto` is float32, which does not round them."""
        if self.weight_dtype == "auto":
            return "float32"
        return self.weight_dtype

    def reading(self, model: ModelConfig, trained: ContextSettings) -> ContextSettings:
        """How a text is read with these settings, by a model that was `trained` so; see `context_settings`."""
        return context_settings(model, trained, self)


class OnlineConfig(LearningConfig, InferenceConfig):
    """Inference settings of a model that may learn while it reads."""


class ScoreConfig(InferenceConfig):
    """Scores of a text, whole or as it arrives."""

    each_line: Annotated[Switch, Option("Memory", "--each-line", "1")] = Field(
        default=False, description="Score each line on its own, for example unrelated sentences."
    )
    reset_on_document: Annotated[Switch | None, Option("Memory", "--reset-on-document", "1")] = Field(
        default=None,
        description="Score each document on its own: a row (JSONL, CSV, Parquet) or a file. Default: as trained.",
    )
    reset_on_change: Annotated[str | None, Option("Memory", "--reset-on-change KEY")] = Field(
        default=None, description="Clear the memory where this column or key differs from the row before."
    )
    binary: Binary = False
    text_field: TextField = None
    split_punctuation: Switch = Field(default=False, description="Score punctuation marks as separate words.")
    columns: Annotated[str, Option("Text", "--columns LIST", "rank,logprobs=5")] = Field(
        default="", description="Add columns such as length, previous=2, rank or layers (docs/words.md)."
    )

    @property
    def asked(self) -> Columns:
        return Columns.read(self.columns)

    def check_model(self, model: ModelConfig) -> None:
        super().check_model(model)
        self.asked.layers_of(model, self.learning.context_cache)

    def _check(self) -> None:
        Columns.read(self.columns)
        if self.binary and self.text_field is not None:
            raise InvalidSettingError("text_field", "reads rows, and --binary does not", "Leave one of them out.")

    def _refuse_beside(self, key: str, reason: str, others: Sequence[str]) -> None:
        """`InvalidSettingError` for `key`, which is used, if one of these other settings is, too."""
        for other in others:
            if self._is_used(other):
                options = [part for part in type(self).model_fields[other].metadata if isinstance(part, Option)]
                spelled = max(options[0].spellings, key=len) if options else other
                raise InvalidSettingError(key, f"{reason} and cannot be combined with {spelled}", f"Omit {spelled}.")

    def _is_used(self, name: str) -> bool:
        return bool(getattr(self, name))


class EvalConfig(ScoreConfig, LearningConfig, InferenceConfig):
    """An evaluation."""

    segment_len: Annotated[Count | None, _SEGMENT_LEN] = Field(
        default=None,
        description="Read this many tokens per call. Changes scores only without memory or with span growing.",
    )
    context: Annotated[Count | None, Option("Memory", "--context TOKENS", "20")] = Field(
        default=None,
        description="Predict each token from exactly this many tokens before it, read anew: strict, and slow.",
    )
    batch_size: Count | None = Field(default=None, description="Sequences per batch; changes speed, not results.")
    span: SpanKind = Field(
        default="uniform",
        description="Attention span: exactly the memory length (uniform), or memory and the segment so far (growing).",
    )
    split: Annotated[Literal["valid", "test"], Option("Text", "--split")] = Field(
        default="valid", description="Which held-out text to score if no FILE is given."
    )
    sweep_mem_len: Annotated[tuple[Length, ...], LENGTHS, Option("Memory", "--sweep-mem-len M,M,...", "0,128,512")] = (
        Field(default=(), description="Evaluate once for each of these memory lengths.")
    )
    limit: Annotated[Count | None, Option("Text", "--limit SIZE", "64KiB")] = Field(
        default=None, description="Score only this many bytes from the beginning of the text."
    )
    context_share: Share = Field(
        default=0.1, description="Share of the text that is read again for the loss by context."
    )
    pairs: Annotated[
        tuple[str, str] | None, units.reads(lambda text: text.split(",")), Option("Results", "--pairs A,B", "good,bad")
    ] = Field(default=None, description="Compare the texts in these two columns or keys of each row.")
    by: Annotated[str | None, Option("Results", "--by KEY")] = Field(
        default=None, description="With --pairs or --score-field: group rows by this column or key."
    )
    score_field: Annotated[str | None, Option("Results", "--score-field KEY")] = Field(
        default=None, description="Score only the text in this column or key, as a continuation of --text-field."
    )
    region_mark: Annotated[str | None, Option("Results", "--region-mark MARKS", "'*'")] = Field(
        default=None,
        description="Sum words between these marks, such as '*' or '[]', which are removed; or column:NAME.",
    )
    joiner: str | None = Field(
        default=None,
        description="With score_field: text between context and continuation, unless there is white space. "
        "Default: a blank, or nothing within a script without blanks, such as Thai.",
    )

    def reading(self, model: ModelConfig, trained: ContextSettings) -> ContextSettings:
        scores_parts = self.each_line or self.by_row or self.reset_on_change is not None
        reset = True if scores_parts else self.reset_on_document
        settings, segment_len = self, self.segment_len
        if self.context is not None:
            # One window for each token, whose last token alone is scored.
            settings, segment_len = self.model_copy(update={"mem_len": 0, "stride": 1}), self.context
        return context_settings(
            model, trained, settings, segment_len=segment_len, span=self.span, reset_on_document=reset
        )

    @property
    def asks_for_windows(self) -> bool:
        return super().asks_for_windows or self.context is not None

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Columns or keys of the texts; none for the default one."""
        if self.pairs is not None:
            return self.pairs
        return tuple(field for field in (self.text_field, self.score_field) if field)

    @property
    def region_column(self) -> str | None:
        """Column or key that names the words of regions, if one does; else `region_mark` has their marks, if any."""
        name = (self.region_mark or "").removeprefix(_REGION_COLUMN)
        return name if name and name != self.region_mark else None

    @property
    def by_row(self) -> bool:
        """True if rows are compared."""
        return self.pairs is not None or self.score_field is not None

    @property
    def sweep(self) -> list[Self]:
        """The settings of each evaluation, one for each memory length."""
        return [self.model_copy(update={"mem_len": mem_len}) for mem_len in self.sweep_mem_len or (self.mem_len,)]

    def _check(self) -> None:
        super()._check()
        if self.adapt:
            self._refuse_beside("adapt", "reads one text in order", _OUT_OF_ORDER)
        if self.context_cache is not None:
            self._refuse_beside("context_cache", "reads one text in order", _OUT_OF_ORDER)
        if self.context is not None:
            self._refuse_beside("context", "reads each token anew", _OTHER_CONTEXTS)
        if self.reset_on_change:
            self._refuse_beside("reset_on_change", "divides rows", ("each_line", "binary"))
        if self.pairs is not None:
            self._refuse_beside("pairs", "compares whole rows", ("text_field", "score_field", *_PARTS_OF_TEXT))
        if self.score_field:
            self._refuse_beside("score_field", "compares whole rows", _PARTS_OF_TEXT)
        if self.region_mark is not None:
            self._refuse_beside("region_mark", "sums words of whole rows", ("pairs", "score_field", "limit", "binary"))
            if not self.region_column and not _MARKS.fullmatch(self.region_mark):
                reason = "is one mark, or two: neither letters nor digits nor blanks"
                raise InvalidSettingError("region_mark", reason, "Try '*', '[]', or column:NAME for numbers of words.")
        if self.region_column is not None:
            self._refuse_beside("region_mark", "counts words between blanks", ("split_punctuation",))
        if self.pairs is not None and self.pairs[0] == self.pairs[1]:
            raise InvalidSettingError("pairs", "compares two columns or keys", "Write --pairs FIRST,SECOND.")
        if self.score_field and self.text_field in (None, self.score_field):
            raise InvalidSettingError("score_field", "needs the text before it", "Add --text-field KEY.")
        if self.asked.n_searched and (self.online_option or self.span != "uniform"):
            reason = "searches words, which needs a uniform span, without --adapt or --context-cache"
            raise InvalidSettingError("columns", reason, "Leave out alternatives and word_entropy.")

    def _is_used(self, name: str) -> bool:
        """True if a setting of `_OUT_OF_ORDER` or `_PARTS_OF_TEXT` changes how the text is read."""
        if name == "batch_size":
            return self.batch_size not in (None, 1)  # one sequence is read in order
        if name == "span":
            return self.span != "uniform"
        if name == "mem_len":
            return self.mem_len is not None  # 0 is a memory length, too
        return super()._is_used(name)


_REGION_COLUMN = "column:"  # before the name of a column in `region_mark`, longer than any marks
_MARKS = re.compile(r"(?:[^\w\s]|_){1,2}")
_OUT_OF_ORDER = ("batch_size", "span", "reset_on_document", "reset_on_change", "each_line", "pairs", "score_field")
"""Settings of an evaluation with which tokens are not read one after the other."""
_OTHER_CONTEXTS = ("mem_len", "segment_len", "stride", "sweep_mem_len", "span", "adapt", "context_cache")
"""Settings of an evaluation that give a token more or less context."""
_PARTS_OF_TEXT = ("reset_on_change", "each_line", "limit", "binary", "columns")  # concern lines, bytes or tokens


class Sampling(NamedTuple):
    """Distribution of the next token, made from the one of the model; by default the same. See `GenerateConfig`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class GenerateConfig(LearningConfig, InferenceConfig):
    """Sampling of a continuation."""

    max_new_tokens: Annotated[Length, Option("Sampling", "-n, --max-new-tokens N", "256")] = Field(
        default=256, description="Generate at most this many tokens. Default: 256."
    )
    temperature: Annotated[
        Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False), NUMBER] | None,
        Option("Sampling", "-t, --temperature T", "0.8"),
    ] = Field(
        default=None,
        description="Set temperature (0: greedy). Default: 0.8; subword models add --top-p 0.95 "
        "--repetition-penalty 1.1.",
    )
    top_k: Annotated[Length | None, Option("Sampling", "-k, --top-k K", "40")] = Field(
        default=None, description="Sample from the K most probable tokens; 0 keeps all."
    )
    top_p: Annotated[PositiveShare | None, Option("Sampling", "--top-p P", "0.95")] = Field(
        default=None,
        description="Sample from the most probable tokens whose probabilities sum to P (Holtzman et al. 2020).",
    )
    min_p: Annotated[Share | None, Option("Sampling", "--min-p P", "0.05")] = Field(
        default=None, description="Drop tokens with less than P times the highest probability (Nguyen et al. 2024)."
    )
    repetition_penalty: Annotated[
        Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False), NUMBER] | None,
        Option("Sampling", "--repetition-penalty X", "1.1"),
    ] = Field(default=None, description="Make recent tokens less probable if above 1 (Keskar et al. 2019).")
    stop: Annotated[tuple[str, ...], units.reads(lambda text: [text]), Option("Sampling", "--stop TEXT", "END")] = (
        Field(default=(), description="Stop before this text. May be repeated.")
    )
    num_samples: Annotated[int, Field(ge=1, le=2**16), COUNT, Option("Sampling", "--num-samples N", "3")] = Field(
        default=1, description="Generate this many continuations."
    )
    logprobs: Annotated[NBest | None, Option("Output", "--logprobs N", "5")] = Field(
        default=None,
        description="With --json: add log probabilities (nats) of each token and the N best, before sampling filters.",
    )

    def _check(self) -> None:
        if self.context_cache is not None and self.num_samples > 1:
            reason = "continues one text, not several samples"
            raise InvalidSettingError("context_cache", reason, "Leave out one of the two.")

    def sampling(self, vocabulary: str) -> Sampling:
        """The distribution to sample from, with a vocabulary of this kind.

        Without any setting it is `TUNED` for subwords. Otherwise what is not set changes nothing, but for a temperature
        of 0.8: a temperature of 1 samples from the distribution of the model. Bytes get no penalty, as they repeat.
        """
        settings = {name: getattr(self, name) for name in Sampling._fields}
        changes = {name: value for name, value in settings.items() if value is not None}
        if not changes and vocabulary in ("sentencepiece", "tokenizers"):
            return TUNED
        return Sampling(**{"temperature": TUNED.temperature} | changes)


TUNED = Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1)  # on validation text (benchmarks/sampling.py)


class StreamConfig(ScoreConfig, LearningConfig, InferenceConfig):
    """Scoring of a stream."""

    emit: Annotated[Literal["lines", "words", "tokens", "stats", "none"], Option("Text", "--emit")] = Field(
        default="lines", description="Print these scores. Default: lines."
    )
    min_bits: Annotated[NotNegative | None, Option("Text", "--min-bits X", "3")] = Field(
        default=None, description="Print only lines of at least X bits per byte, or words or tokens of at least X bits."
    )
    top: Annotated[
        Annotated[float, Field(ge=0.001, lt=1.0), units.reads(units.fraction)] | None,
        Option("Text", "--top SHARE", "1%"),
    ] = Field(
        default=None, description="Print only the most surprising lines, words or tokens: this share of the last 1,000."
    )
    save_every: Annotated[Seconds | None, Option("Memory", "--save-every TIME", "10m")] = Field(
        default=None, description="Save the state this often. Default: 1m with --state, else only at the end."
    )
    flush_ms: Annotated[Length | None, Option("Text", "--flush-ms N", "200")] = Field(
        default=None, description="Score an unfinished line after N milliseconds without input."
    )
    reset_on: Annotated[str | None, Option("Memory", "--reset-on REGEX")] = Field(
        default=None, description="Clear the memory before each line that matches this regular expression (RE2)."
    )
    text_regex: Annotated[str | None, Option("Text", "--text-regex REGEX")] = Field(
        default=None,
        description="Score what the group text of this RE2 matches in each line; keep other named groups as fields.",
    )
    event_start: Annotated[str | None, Option("Text", "--event-start REGEX")] = Field(
        default=None, description="Join each line that does not match (RE2) to the event before it: stack traces."
    )
    frozen: Annotated[Switch, Option("Memory", "--frozen", "1")] = Field(
        default=False,
        description="Score each line, row or event from the same state, without learning from the others.",
    )

    def reading(self, model: ModelConfig, trained: ContextSettings) -> ContextSettings:
        scores_parts = self.each_line or self.frozen or self.reset_on_change is not None
        reset = True if scores_parts else self.reset_on_document
        return context_settings(model, trained, self, reset_on_document=reset)

    @property
    def selects(self) -> bool:
        return self.min_bits is not None or self.top is not None

    @property
    def reads_lines(self) -> bool:
        """True if the text is plain, and each line is a record or continues one."""
        is_asked = self.text_regex is not None or self.event_start is not None
        return is_asked and self.text_field is None

    @property
    def reads(self) -> str:
        """The options that say what of the input is the text, as they are given."""
        options = {"text-field": self.text_field, "text-regex": self.text_regex, "event-start": self.event_start}
        return " ".join(f"--{name} {shlex.quote(value)}" for name, value in options.items() if value is not None)

    @property
    def pause_ms(self) -> int | None:
        """Milliseconds without input after which an unfinished line or event is output; None if it waits."""
        if self.flush_ms is None and self.event_start is not None:
            return EVENT_PAUSE_MS
        return self.flush_ms

    def _check(self) -> None:
        super()._check()
        if self.reset_on is not None:
            compile_pattern(self.reset_on, "reset_on")
        if self.text_regex is not None:
            pattern = compile_pattern(self.text_regex, "text_regex")
            if b"text" not in pattern.groupindex:
                raise InvalidSettingError(
                    "text_regex", "has no group text", "Write (?P<text>.*) for the text to score."
                )
            self._refuse_beside("text_regex", "reads plain lines", ("text_field", "binary"))
        if self.event_start is not None:
            compile_pattern(self.event_start, "event_start")
            self._refuse_beside("event_start", "joins lines", ("binary", "each_line"))
        if self.frozen:
            self._refuse_beside("frozen", "returns to one state", ("each_line", "reset_on", "reset_on_change"))
        if self.columns and (self.emit != "tokens" or self.asked.of_words):
            raise InvalidSettingError("columns", "lists columns of tokens only", "Use --emit tokens, or xlcli eval.")
        if self.selects and self.emit not in ("lines", "words", "tokens"):
            key = "top" if self.min_bits is None else "min_bits"
            raise InvalidSettingError(key, f"selects lines, words or tokens, not {self.emit}", "Leave out --emit.")


EVENT_PAUSE_MS = 1000  # default of `StreamConfig.pause_ms` with events, whose end only the next one shows


class BenchConfig(InferenceConfig):
    """A benchmark."""

    mem_len: Length | None = Field(
        default=None, description="Memory length if mem_lens is empty. Default: as in training."
    )
    mem_lens: Annotated[tuple[Length, ...], LENGTHS, Option("Memory", "--mem-len M,M,...", "0,512,3800")] = Field(
        default=(), description="Measure with each of these memory lengths. Default: as trained."
    )
    segment_len: Annotated[Count | None, _SEGMENT_LEN] = Field(
        default=None, description="Read this many tokens per call of eval and train. Default: as in these commands."
    )
    batch_size: Annotated[Count | None, Option("Memory", "--batch-size N", "8")] = Field(
        default=None, description="Use this many sequences per batch. Default: 1 for decode, else as in eval and train."
    )
    seconds: Annotated[float, Field(gt=0.0, le=3600.0), DURATION, Option("Results", "--seconds S", "3")] = Field(
        default=3.0, description="Measure each figure for this long. Default: 3."
    )

    def reading(self, model: ModelConfig, trained: ContextSettings) -> ContextSettings:
        return context_settings(model, trained, self, segment_len=self.segment_len)

    @property
    def sweep(self) -> list[Self]:
        """The settings of each measurement, one for each memory length."""
        return [self.model_copy(update={"mem_len": mem_len}) for mem_len in self.mem_lens or (self.mem_len,)]
