"""Options of `xlcli train` alone; those that it shares with other commands are in `xlcli.cli.options`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from xlcli.cli import units
from xlcli.cli.options import Unit, option


def dropout_rates(text: str) -> dict[str, float]:
    """The same rate for every dropout of a model."""
    return dict.fromkeys(("embedding", "attention", "residual", "feedforward"), units.number(text))


Paths = Annotated[list[str] | None, typer.Argument(metavar="FILE|FOLDER|-...")]
Out = Annotated[str | None, option("Run", "-o, --out FOLDER", "Model folder. Default: models/<corpus>.")]
Resume = Annotated[bool, option("Run", "--resume", "Continue the run in that folder from its newest checkpoint.")]
Overwrite = Annotated[bool, option("Run", "--overwrite", "Replace the model in that folder.")]
AllowDataChange = Annotated[bool, option("Run", "--allow-data-change", "Resume although the text has changed.")]
Preset = Annotated[
    str | None,
    option("Run", "--preset NAME", "Preset to start from, see xlcli models presets. Default: by text size and device."),
]
Init = Annotated[
    str | None,
    option(
        "Run",
        "--init NAME|FOLDER",
        "Start from the weights, vocabulary and shape of this model instead of new weights.",
    ),
]
Tokenizer = Annotated[
    Literal["auto", "bytes", "sentencepiece", "words"] | None,
    option("Text", "--tokenizer", "Tokenizer. auto: by size and content of the text."),
]
VocabSize = Annotated[int | None, option("Text", "--vocab-size N", "Vocabulary size.", Unit(units.count, "4096"))]
Valid = Annotated[
    Any,
    option(
        "Text",
        "--valid FILE|FRACTION",
        "Validation text: a file, or a fraction split off the end of the text. Default: 5%.",
        Unit(units.share, "0.05"),
    ),
]
Test = Annotated[
    Any,
    option(
        "Text",
        "--test FILE|FRACTION",
        "Test text: a file, or a fraction split off the end of the text. Default: 5%.",
        Unit(units.share, "0.05"),
    ),
]
SegmentLen = Annotated[
    int | None, option("Memory", "--segment-len TOKENS", "Tokens per training segment.", Unit(units.count, "128"))
]
ResetOnDocument = Annotated[
    bool,
    option(
        "Memory",
        "--reset-on-document",
        "Let no token attend to an earlier document: a text of JSON lines or a Parquet file, else a file.",
    ),
]
RandomLengths = Annotated[
    bool,
    option(
        "Memory",
        "--random-lengths",
        "Draw segment and memory length of each training step at random, up to the given ones.",
    ),
]
BatchSize = Annotated[int | None, option("Training", "--batch-size N", "Sequences per batch.", Unit(units.count, "16"))]
GradAccum = Annotated[
    int | None,
    option(
        "Training",
        "--grad-accum N",
        "Number of microbatches that a batch is split into; more need less memory.",
        Unit(units.count, "2"),
    ),
]
RecomputeActivations = Annotated[
    bool,
    option(
        "Training",
        "--recompute-activations",
        "Keep only the input of each block for the backward pass: less memory, a third more arithmetic.",
    ),
]
Lr = Annotated[float | None, option("Training", "--lr RATE", "Peak learning rate.", Unit(units.number, "0.01"))]
Optimizer = Annotated[Literal["muon", "adamw"] | None, option("Training", "--optimizer", "Optimizer.")]
Seed = Annotated[
    int | None,
    option("Machine", "--seed N", "Seed of the random-number generator. Default: 0.", Unit(units.count, "1")),
]
WarmupSteps = Annotated[
    int | None, option("Training", "--warmup-steps N", "Steps of learning-rate warmup.", Unit(units.count, "100"))
]
Dropout = Annotated[
    Any,
    option(
        "Training",
        "--dropout RATE",
        "Dropout rate of embeddings, attention, residual and feed-forward branches.",
        Unit(dropout_rates, "0.1"),
    ),
]
MaxSteps = Annotated[int | None, option("Training", "--max-steps N", "Budget in steps.", Unit(units.count, "1000"))]
MaxTokens = Annotated[int | None, option("Training", "--max-tokens N", "Budget in tokens.", Unit(units.count, "10M"))]
MaxTime = Annotated[
    float | None,
    option(
        "Training",
        "--max-time TIME",
        "Budget in time, without the final score and sample. Default without any budget: 10m on CPU, 30m "
        "on CUDA, or less for a short text: 4 passes, 2 with --init.",
        Unit(units.duration, "10m"),
    ),
]
EvalEvery = Annotated[
    float | None,
    option(
        "Training",
        "--eval-every N|TIME",
        "Steps (such as 100) or time (such as 60s) between validations. Default: 10 per run, fewer if "
        "they take more than a tenth of a budget in time.",
        Unit(units.interval, "5m"),
    ),
]
Patience = Annotated[
    int | None,
    option(
        "Training",
        "--patience N",
        "After N successive validations without improvement, decay the learning rate (by default over a "
        "quarter of the steps so far, see train.decay_fraction) and end the run. Default: none.",
        Unit(units.count, "3"),
    ),
]
SaveEvery = Annotated[
    float | None,
    option(
        "Training",
        "--save-every N|TIME",
        "Steps (such as 100) or time (such as 60s) between checkpoints. Default: 60s.",
        Unit(units.interval, "5m"),
    ),
]
KeepCheckpoints = Annotated[
    int | None,
    option("Training", "--keep-checkpoints N", "Number of checkpoints to keep. Default: 2.", Unit(units.count, "2")),
]
OnDivergence = Annotated[
    Literal["rollback", "stop"] | None,
    option(
        "Training",
        "--on-divergence",
        "If the loss is no longer finite: continue from the last checkpoint at a third of the learning "
        "rate, at most three times, or stop. Default: rollback.",
    ),
]
Weights = Annotated[
    Literal["float32", "bfloat16", "int8"] | None,
    option(
        "Run",
        "--weights",
        "Encoding of the saved weights; int8 is a quarter of float32. The final score is that of the saved weights.",
    ),
]
Tensorboard = Annotated[
    bool,
    option(
        "Run", "--tensorboard", "Write the training curve for TensorBoard into the folder tensorboard of the model."
    ),
]
Threads = Annotated[
    int | None,
    option(
        "Machine",
        "--threads N",
        "Number of CPU threads. Default: that of PyTorch; with a time budget, measured at the start.",
        Unit(units.count, "2"),
    ),
]
Compile = Annotated[
    bool, option("Machine", "--compile", "Compile the model before training; faster in long runs only.")
]
NProc = Annotated[
    int | None,
    option(
        "Machine",
        "--nproc N",
        "Train with N processes of this machine, which share the batch.",
        Unit(units.at_least(1), "2"),
    ),
]
Shard = Annotated[
    bool,
    option(
        "Machine",
        "--shard",
        "On several processes: divide the model and its optimizer among them (FSDP2); less memory. "
        "Blocks are gathered in bfloat16 if products are.",
    ),
]
Plot = Annotated[
    str | None,
    option(
        "Output", "--plot FILE.png", "Plot the training curve at the end or when stopped (needs the extra xlcli[plot])."
    ),
]
