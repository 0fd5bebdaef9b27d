"""Configuration of text, training and runtime, and the whole configuration."""

from typing import Annotated, Literal, NoReturn

from pydantic import Field

from xlcli.config import units
from xlcli.config.attention import LSHAttentionConfig
from xlcli.config.base import (
    BaseConfig,
    Count,
    Length,
    NotNegative,
    Option,
    Positive,
    PositiveShare,
    Rate,
    Seconds,
    Share,
    SpanKind,
    Switch,
    WeightEncoding,
)
from xlcli.config.inference import (
    BenchConfig,
    Binary,
    ContextSettings,
    EvalConfig,
    GenerateConfig,
    StreamConfig,
    TextField,
)
from xlcli.config.model import ModelConfig, ReversibleStackConfig, UniversalStackConfig
from xlcli.config.position import LESS_WEIGHT_BEYOND_MEMORY, ClampLen
from xlcli.config.units import COUNT, DURATION, INTERVAL, LENGTHS
from xlcli.errors import InvalidSettingError

Interval = Annotated[Count | Positive, INTERVAL]  # interval in steps (int) or in seconds (float)
ScheduleName = Literal["cosine", "linear", "wsd", "constant", "inverse_sqrt"]  # after warmup; see `xlcli.optim.decay`
TokenizerKind = Literal["auto", "bytes", "sentencepiece", "words"]
HeldOut = Annotated[str | float | None, units.reads(units.share)]  # file, or fraction: whole files, or end of the text


class TextConfig(BaseConfig):
    """Text and tokenizer."""

    tokenizer: Annotated[TokenizerKind, Option("Text", "--tokenizer")] = Field(
        default="auto", description="Choose the tokenizer. auto: by size and content of the text."
    )
    vocab_size: Annotated[
        Annotated[int, Field(ge=2, le=2**24), COUNT] | None, Option("Text", "--vocab-size N", "4096")
    ] = Field(default=None, description="Set the vocabulary size. Default: by size of the text.")
    valid: Annotated[HeldOut, Option("Text", "--valid FILE|FRACTION", "0.05")] = Field(
        default=None, description="Validate on this file, or this fraction of the text. Default: 5%, at most 1 MiB."
    )
    test: Annotated[HeldOut, Option("Text", "--test FILE|FRACTION", "0.05")] = Field(
        default=None, description="Test on this file, or this fraction of the text. Default: 5%, at most 1 MiB."
    )
    binary: Binary = False
    text_field: TextField = None

    def _check(self) -> None:
        for name, value in (("valid", self.valid), ("test", self.test)):
            if isinstance(value, float) and not 0.0 <= value < 0.5:
                reason = f"{value} is not a fraction from 0 to below 0.5"
                raise InvalidSettingError(name, reason, "Give 0.05, or a file.")


class TrainConfig(BaseConfig):
    """A training run. It ends when its first budget is spent, and so do schedules `linear`, `cosine` and `wsd`.

    Without a budget, the defaults of `xlcli.training.defaults` apply: a time, and a number of passes over the text.
    """

    segment_len: Annotated[Count, Option("Memory", "--segment-len TOKENS", "128")] = Field(
        default=128, description="Train on segments of this many tokens."
    )
    mem_len: Annotated[Length, Option("Memory", "--mem-len TOKENS", "512")] = Field(
        default=128, description="Let each layer remember this many tokens; 0 disables memory."
    )
    memory: Literal["keyvalue", "hidden"] = Field(
        default="hidden",
        description="Memory of softmax attention. hidden keeps layer inputs and projects them again in each "
        "step (Dai et al. 2019), a sixth more arithmetic; keyvalue keeps keys and values.",
    )
    span: SpanKind = Field(
        default="growing",
        description="Attention span: exactly the memory length (uniform), or memory and the segment so far (growing).",
    )
    reset_on_document: Switch = Field(
        default=False,
        description="Mask attention across documents, and count absolute positions within each. A document is "
        "a row (JSONL, CSV, Parquet) or a file.",
    )
    shuffle: Switch = Field(
        default=False,
        description="Read the text in pieces of about 4,096 tokens in random order, cut and ordered anew in each pass. "
        "Full and local attention with relative positions read each piece from empty memory.",
    )
    line_share: Share = Field(
        default=0.0,
        description="Share of the pieces of train.shuffle to read line by line, each line from empty memory. "
        "The model then also scores single lines well. Lines should be sentences, turns or paragraphs.",
    )
    batch_size: Annotated[Count, Option("Training", "--batch-size N", "16")] = Field(
        default=16, description="Use this many sequences per batch."
    )
    grad_accum: Count = Field(
        default=1, description="Divide each batch into this many microbatches: less RAM, same result."
    )
    recompute_activations: Switch = Field(
        default=False,
        description="Keep only the input of each block and recompute the rest in the backward pass: less RAM, "
        "a third more arithmetic, same result.",
    )
    optimizer: Literal["muon", "adamw"] = Field(default="muon", description="Optimizer.")
    lr: Annotated[Positive | None, Option("Training", "--lr RATE", "0.01")] = Field(
        default=None, description="Set the peak learning rate. Default: by optimizer."
    )
    adam_lr: Positive | None = Field(
        default=None, description="Peak learning rate of parameters that Muon leaves to AdamW. Default: AdamW's."
    )
    weight_decay: NotNegative = Field(default=0.01, description="Weight decay.")
    betas: Annotated[tuple[Rate, Rate], units.reads(lambda text: [units.number(part) for part in text.split(",")])] = (
        Field(default=(0.9, 0.95), description="Betas of AdamW.")
    )
    momentum: Rate = Field(default=0.95, description="Momentum of Muon.")
    warmup_steps: Length | None = Field(
        default=None, description="Steps of learning-rate warmup. Default: 40, at most a tenth of the budget."
    )
    lr_schedule: ScheduleName = Field(default="linear", description="Learning-rate schedule after the warmup.")
    decay_fraction: PositiveShare = Field(
        default=0.2, description="Last share of the budget, in which the schedule wsd decays."
    )
    min_lr_ratio: Share = Field(default=0.0, description="Final learning rate divided by the peak.")
    average_share: Share = Field(
        default=0.0,
        description="Average the weights over the last share of the run so far, and validate and keep the "
        "average; 0 averages nothing.",
    )
    grad_clip: NotNegative = Field(default=1.0, description="Gradient-clipping norm; 0 disables clipping.")
    max_steps: Annotated[Count | None, Option("Training", "--max-steps N", "1000")] = Field(
        default=None, description="Stop after this many steps."
    )
    max_tokens: Annotated[Count | None, Option("Training", "--max-tokens N", "10M")] = Field(
        default=None, description="Stop after this many tokens."
    )
    max_time: Annotated[Seconds | None, Option("Training", "--max-time TIME", "10m")] = Field(
        default=None,
        description="Stop after this time. Default without a budget: 10m (CPU) or 30m (CUDA), or a few passes "
        "over the text.",
    )
    eval_every: Interval | None = Field(
        default=None,
        description="Steps (100) or time (60s) between validations. Default: 10 validations per run, fewer if "
        "they take over a tenth of a time budget.",
    )
    patience: Annotated[Count | None, Option("Training", "--patience N", "3")] = Field(
        default=None, description="Decay the learning rate and end the run after N validations without improvement."
    )
    save_every: Interval | None = Field(
        default=None, description="Steps (100) or time (60s) between checkpoints. Default: 60s."
    )
    keep_checkpoints: Count = Field(default=2, description="Number of checkpoints to keep.")
    keep_at: Annotated[tuple[Count, ...], LENGTHS] = Field(
        default=(),
        description="Also keep the model, as it is after the first step that reaches each of these numbers of tokens, "
        "in the folder kept (such as 1M,2M,5M).",
    )
    on_divergence: Literal["rollback", "stop"] = Field(
        default="rollback",
        description="If the loss is not finite: stop, or return once to the last checkpoint and continue "
        "after the text read since, at a third of the learning rates (rollback).",
    )
    weights: WeightEncoding = Field(
        default="float32",
        description="Number type of the saved weights; the final score is theirs. Checkpoints are in float32.",
    )

    def max_distance(self, model: ModelConfig) -> int:
        """Largest distance from a token to a key in the training of this model."""
        sees_segment = self.span == "growing" or not self.mem_len
        n_earlier = self.segment_len - 1 if sees_segment else 0
        return model.max_distance(self.mem_len, n_earlier)

    @property
    def reading(self) -> ContextSettings:
        return ContextSettings(self.mem_len, self.segment_len, "float32", self.reset_on_document, self.span)

    def limits(self, model: ModelConfig, clamp_len: ClampLen | None) -> tuple[int | None, int | None]:
        """`Span.clamp_len` and `Span.full_len` at inference; `clamp_len` None: as far as distances went in training.

        A model that was trained with clamped distances keeps its own, and has given full weight to keys further back;
        so has one whose `clamp_len` is given, as in the code of the authors of Transformer-XL. With some encodings more
        keys of full weight than the trained memory has are too many.
        """
        if clamp_len == "none":
            return None, None
        if clamp_len is not None or not model.has_softmax:
            return clamp_len, None
        farthest = self.max_distance(model)
        full_len = farthest
        if self.mem_len and model.position.kind in LESS_WEIGHT_BEYOND_MEMORY:
            full_len = self.mem_len
        if not model.clamps_distances:
            return None, full_len
        return model.clamp_len or farthest, full_len

    def _check(self) -> None:
        if self.grad_accum > self.batch_size:
            reason = f"{self.grad_accum} is more than train.batch_size {self.batch_size}"
            remedy = "Lower it or raise the batch size: each microbatch needs at least one sequence."
            raise InvalidSettingError("grad_accum", reason, remedy)


class RuntimeConfig(BaseConfig):
    """Device, number type and reproducibility."""

    device: Annotated[str, units.reads(units.device), Option("Machine", "--device auto|cpu|cuda[:N]", "cpu")] = Field(
        default="auto",
        description="Compute on this device. auto: the first CUDA device, or the CPU where that is faster.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Number type of matrix products. auto: bfloat16 in training where the hardware supports "
        "it natively, else float32. Compiled kernels of generation need float32.",
    )
    threads: Annotated[Annotated[int, Field(ge=1, le=1024), COUNT] | None, Option("Machine", "--threads N", "2")] = (
        Field(default=None, description="Use N CPU threads. Default: the fastest (train), else PyTorch's.")
    )
    seed: Annotated[
        Annotated[int, Field(ge=0, lt=2**63), COUNT] | None,
        Option("Machine", "--seed N", "1", ("train", "generate", "stream")),
    ] = Field(default=None, description="Set the random seed. Default: 0 in training, else random.")
    nproc: Annotated[Count | None, Option("Machine", "--nproc N", "2", ("train",))] = Field(
        default=None, description="Train with N processes on this machine, which share the sequences of a batch."
    )
    compile: Switch = Field(default=False, description="Compile the model before training; faster in long runs only.")
    deterministic: Switch = Field(
        default=False, description="Use deterministic kernels and a fixed number of threads only."
    )
    shard: Switch = Field(
        default=False,
        description="Divide parameters, gradients and optimizer states among the training processes (FSDP2): "
        "less RAM, same result up to rounding. With bfloat16, blocks are gathered in bfloat16.",
    )
    timeout: Annotated[float, Field(ge=1e-3, le=1e6), DURATION] = Field(
        default=600.0, description="End the run if another process does not answer for this long."
    )


class Config(BaseConfig):
    """The whole configuration."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    text: TextConfig = Field(default_factory=TextConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    generate: GenerateConfig = Field(default_factory=GenerateConfig)
    stream: StreamConfig = Field(default_factory=StreamConfig)
    bench: BenchConfig = Field(default_factory=BenchConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)

    @property
    def reads_pieces_apart(self) -> bool:
        """True if each piece of a shuffled text is read from empty memory."""
        counts_in_text = self.model.position.is_absolute and not self.train.reset_on_document
        return self.model.can_hide_documents and not counts_in_text

    def _check(self) -> None:
        train = self.train
        if train.reset_on_document and not self.model.can_hide_documents:
            reason = "needs full or local attention, which hides the documents before, and no model.zero_memory"
            remedy = "Leave it out, or set model.attention.kind to full or local."
            raise InvalidSettingError("train.reset_on_document", reason, remedy)
        if train.line_share and not train.shuffle:
            reason = "is a share of the pieces that train.shuffle reads"
            raise InvalidSettingError(
                "train.line_share", reason, "Set train.shuffle to true, or train.line_share to 0."
            )
        if train.line_share and not self.reads_pieces_apart:
            reason = "needs full or local attention with relative positions, and no model.zero_memory"
            remedy = "Leave it out; with absolute positions, train.reset_on_document=true does as well."
            raise InvalidSettingError("train.line_share", reason, remedy)
        if train.recompute_activations and isinstance(self.model.stack, ReversibleStackConfig):
            reason = f"does not apply: stack '{self.model.stack.kind}' keeps no activations"
            remedy = "Leave it out, or set model.stack.kind to standard or universal."
            raise InvalidSettingError("train.recompute_activations", reason, remedy)
        if train.recompute_activations and self.runtime.compile:
            reason = "and runtime.compile cannot be combined"
            raise InvalidSettingError("train.recompute_activations", reason, "Leave one of them out.")

    def check_division(self, n_ranks: int) -> None:
        """`InvalidSettingError` if a run with this configuration cannot be divided among so many ranks."""
        if n_ranks == 1:
            return
        train, model, stack = self.train, self.model, self.model.stack
        n_parts = n_ranks * train.grad_accum  # each rank divides its sequences again
        if train.batch_size % n_parts:
            below = train.batch_size // n_parts * n_parts
            nearest = f"{below} or {below + n_parts}" if below else f"{n_parts}"
            parts = f"{n_ranks} processes"
            if train.grad_accum > 1:
                parts += f" with {train.grad_accum} microbatches"
            reason = f"is {train.batch_size}, which {parts} cannot divide equally"
            raise InvalidSettingError("train.batch_size", reason, f"Use --batch-size {nearest}.")
        # A mask of dropout is a part of the mask of all rows, unless its shape depends on the rows, as it does here.
        halts = isinstance(stack, UniversalStackConfig) and stack.act
        if halts and model.dropout.is_used:
            _refuse("model.dropout", "with adaptive computation time depends on the number of processes", "Set it to 0")
        if model.has_layer(LSHAttentionConfig) and model.dropout.attention:
            _refuse("model.dropout.attention", "with LSH attention depends on the number of processes", "Set it to 0")
        if self.runtime.shard:
            self._check_shard()

    def _check_shard(self) -> None:
        """`InvalidSettingError` if the parameters cannot be divided among ranks."""
        if self.runtime.compile:
            _refuse("runtime.shard", "and runtime.compile cannot be combined", "Leave one of them out")
        if self.model.zero_memory:
            _refuse("runtime.shard", "cannot fill memory by divided parameters (model.zero_memory)", "Leave it out")
        if self.model.norm.placement == "rezero":
            _refuse("runtime.shard", "cannot divide the factors of ReZero", "Use another model.norm.placement")


def _refuse(key: str, reason: str, remedy: str) -> NoReturn:
    """`InvalidSettingError` for a setting of a run on several ranks."""
    raise InvalidSettingError(key, reason, f"{remedy}, or train in a single process.")
