"""The configuration tree: frozen, strict, typed. TOML and dotted overrides in, JSON out. Never imports torch.

`None` means "decide for me"; `train` resolves such fields and saves what it decided in the model's `config.json`.
An illegal combination is refused here, in milliseconds, with the legal choices.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from xlcli.errors import ConfigError

SCHEMA = 1
"""Version of `config.json`. A reader refuses a newer one."""

Count = Annotated[int, Field(ge=1, le=2**31)]
"""How many of something there must be at least one of."""
Length = Annotated[int, Field(ge=0, le=2**31)]
"""A length in tokens; zero is meaningful."""
Rate = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
"""A probability of dropping."""
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

Every = Count | Positive
"""How often: a whole number of steps, or, as a number with a decimal point, seconds."""
TokenizerKind = Literal["auto", "bytes", "sentencepiece", "words"]
SpanKind = Literal["uniform", "growing"]


class Section(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


S = TypeVar("S", bound=Section)


class NoPosition(Section):
    """No position information beyond what causality gives."""

    kind: Literal["none"] = "none"


class XLPosition(Section):
    """Transformer-XL's relative encoding (Dai et al. 2019, section 3.3): content bias u, position bias v, sinusoids.

    `n_features` is the number of sinusoid features (the paper uses `dim`); `tied` shares u and v over the layers;
    `clamp_len` treats every farther distance as this one.
    """

    kind: Literal["xl"] = "xl"
    n_features: Annotated[int, Field(ge=2, le=2**16, multiple_of=2)] | None = None
    tied: bool = False
    clamp_len: Count | None = None


PositionConfig = Annotated[NoPosition | XLPosition, Field(discriminator="kind")]


class FullAttention(Section):
    """Softmax attention over the whole span. `head_dim` defaults to `dim / n_heads`."""

    kind: Literal["full"] = "full"
    n_heads: Count = 4
    head_dim: Count | None = None


POSITION_NEEDS: dict[str, frozenset[str]] = {"none": frozenset(), "xl": frozenset({"rotate"})}
"""Hooks that each position encoding uses."""
ATTENTION_OFFERS: dict[str, frozenset[str]] = {"full": frozenset({"rotate"})}
"""Hooks that each kind of attention calls."""


class FeedForwardConfig(Section):
    """Position-wise feed-forward branch; the gated kinds have three matrices, the others two."""

    kind: Literal["relu", "gelu", "swiglu", "geglu"] = "swiglu"
    ffn_dim: Count | None = None


class NormConfig(Section):
    """Where and how activations are normalised. `post` is the published Transformer-XL."""

    kind: Literal["layer", "rms"] = "rms"
    placement: Literal["pre", "post"] = "pre"


class EmbeddingConfig(Section):
    """Token embedding and output head. `tied` shares one matrix; `scaled` multiplies by sqrt(dim) as in the paper."""

    tied: bool = True
    scaled: bool = False


class DropoutConfig(Section):
    """Dropout rates in training."""

    embedding: Rate = 0.0
    attention: Rate = 0.0
    residual: Rate = 0.0
    feedforward: Rate = 0.0


class ModelConfig(Section):
    """Shape of the network. `vocab_size` is filled in from the tokenizer."""

    vocab_size: Annotated[int, Field(ge=2, le=2**24)] = 256
    dim: Count = 128
    n_layers: Annotated[int, Field(ge=1, le=1024)] = 4
    attention: FullAttention = FullAttention()
    position: PositionConfig = XLPosition()
    feedforward: FeedForwardConfig = FeedForwardConfig()
    norm: NormConfig = NormConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    dropout: DropoutConfig = DropoutConfig()
    bias: bool = False
    init_std: Positive = 0.02

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.attention.head_dim or self.dim // self.attention.n_heads

    @property
    def ffn_dim(self) -> int:
        """Inner width of the feed-forward branch: 4 dim, or 8/3 dim (rounded up to 64) when gated, unless set."""
        if self.feedforward.ffn_dim is not None:
            return self.feedforward.ffn_dim
        if self.feedforward.kind in ("swiglu", "geglu"):
            return -(-8 * self.dim // 3 // 64) * 64 or 64
        return 4 * self.dim

    @model_validator(mode="after")
    def _legal(self) -> ModelConfig:
        if self.attention.head_dim is None and self.dim % self.attention.n_heads:
            raise ValueError(
                f"model.dim {self.dim} is not divisible by model.attention.n_heads {self.attention.n_heads}; "
                "change one of them or set model.attention.head_dim"
            )
        missing = POSITION_NEEDS[self.position.kind] - ATTENTION_OFFERS[self.attention.kind]
        if missing:
            legal = [kind for kind, needs in POSITION_NEEDS.items() if needs <= ATTENTION_OFFERS[self.attention.kind]]
            raise ValueError(
                f"attention '{self.attention.kind}' cannot use position '{self.position.kind}' "
                f"(it needs {', '.join(sorted(missing))}); legal here: {', '.join(legal)}"
            )
        return self


class TextConfig(Section):
    """How text becomes tokens. `valid` and `test` are fractions cut off the end, or files."""

    tokenizer: TokenizerKind = "auto"
    vocab_size: Annotated[int, Field(ge=2, le=2**24)] | None = None
    valid: str | float | None = None
    test: str | float | None = None

    @model_validator(mode="after")
    def _fractions(self) -> TextConfig:
        for name, value in (("valid", self.valid), ("test", self.test)):
            if isinstance(value, float) and not 0.0 <= value < 0.5:
                raise ValueError(f"text.{name} {value} is not a fraction from 0 up to 0.5; give 0.05, or a file")
        return self


class TrainConfig(Section):
    """One training run. Of the three budgets the first to be reached ends the run; the schedule lands on it.

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
    decay: Literal["cosine", "linear"] = "linear"
    final_lr: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    clip: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    max_steps: Count | None = None
    max_tokens: Count | None = None
    max_time: Positive | None = None
    eval_every: Every | None = None
    save_every: Every | None = None
    keep: Count = 2

    @model_validator(mode="after")
    def _groups(self) -> TrainConfig:
        if self.grad_accum > self.batch_size:
            raise ValueError(
                f"train.grad_accum {self.grad_accum} is more than train.batch_size {self.batch_size}; "
                "a step cannot be taken in more parts than it has lanes"
            )
        return self


class EvalConfig(Section):
    """One evaluation. `None` means as trained."""

    mem_len: Length | None = None
    segment_len: Count | None = None
    batch_size: Count | None = None
    span: SpanKind = "uniform"
    split: Literal["valid", "test"] = "valid"
    sweep_mem_len: tuple[Length, ...] = ()
    limit: Count | None = None


class GenerateConfig(Section):
    """One generation: how far, how bold, when to stop."""

    max_new_tokens: Length = 256
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 0.8
    top_k: Length = 0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    stop: tuple[str, ...] = ()
    num_samples: Count = 1
    mem_len: Length | None = None


class StreamConfig(Section):
    """One pipe. `flush_ms`: score text of an unfinished line when the pipe has been silent for so long."""

    mem_len: Length | None = None
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
                raise ValueError(f"stream.reset_on is not a regular expression: {error}") from None
        return self


class RuntimeConfig(Section):
    """Where and how exactly numbers are computed."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    compile: bool = False
    deterministic: bool = False


class Config(Section):
    """Everything that can be set."""

    model: ModelConfig = ModelConfig()
    text: TextConfig = TextConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    generate: GenerateConfig = GenerateConfig()
    stream: StreamConfig = StreamConfig()
    runtime: RuntimeConfig = RuntimeConfig()


Tree = dict[str, Any]
"""A nested table as TOML gives it."""


def read_toml(path: Path) -> Tree:
    """Tables of a TOML file; `ConfigError` with the line when it cannot be read."""
    try:
        if path.stat().st_size > 2**20:
            raise ConfigError(f"{path} is larger than 1 MiB.", "A configuration file is short; check the path.")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.", "Check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.", "Mend that line.") from None


def parse_override(text: str) -> Tree:
    """`a.b=c` as a nested table. The value is TOML (`3`, `0.1`, `true`, `[1, 2]`) or else a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not all(part.isidentifier() for part in key.strip().split(".")):
        raise ConfigError(f"'{text}' is not of the form a.b=c.", "Type for example --set model.dim=256.")
    try:
        parsed: Any = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return parsed  # type: ignore[no-any-return]


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Tables of both, `above` winning. A table whose `kind` changes is replaced: its other keys meant other things."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(old, Mapping)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            result[key] = merge(old, value)
        else:
            result[key] = value
    return result


def make(*layers: Mapping[str, Any]) -> Config:
    """Validated configuration from tables, later ones winning; `ConfigError` names the key and the legal values."""
    tree: Tree = Config().model_dump(mode="json")
    for layer in layers:
        tree = merge(tree, layer)
    return validate(Config, tree)


def validate(kind: type[S], tree: Mapping[str, Any]) -> S:
    """`tree` as a section of this kind, or `ConfigError` in one sentence."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(tree))
    except (TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise _explain(kind, error) from None
        raise ConfigError(
            f"the configuration holds a value of no legal type: {error}.", "Use numbers, texts, true or false."
        ) from None


def to_json(section: Section) -> str:
    """Canonical JSON of a section: sorted keys, one line end at the end."""
    return json.dumps(section.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"


def _explain(kind: type[Section], error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    where = [str(part) for part in first["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
    name = ".".join(where)
    if first["type"] == "extra_forbidden":
        known = list(_keys(kind))
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            where[-1], [key.rpartition(".")[2] for key in known], n=1, cutoff=0.5
        )
        near = [next(key for key in known if key == near[0] or key.endswith("." + near[0]))] if near else []
        return ConfigError(
            f"unknown key '{name}'.", f"Did you mean '{near[0]}'?" if near else "See xlcli --print-config for the keys."
        )
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] == "value_error":
        return ConfigError(f"{message}.")
    return ConfigError(f"'{name}' is {first['input']!r}: {message[:1].lower() + message[1:]}.", "Change that value.")


def _keys(kind: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in kind.model_fields.items():
        nested = [
            k
            for k in (field.annotation, *get_args(field.annotation))
            if isinstance(k, type) and issubclass(k, BaseModel)
        ]
        yield prefix + name
        for section in nested:
            yield from _keys(section, f"{prefix}{name}.")
