"""Options of `xlcli train` alone; those that it shares with other commands are in `xlcli.cli.options`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from xlcli.cli import units
from xlcli.cli.options import Unit


def dropout_rates(text: str) -> dict[str, float]:
    """The same rate for every dropout of a model."""
    return dict.fromkeys(("embedding", "attention", "residual", "feedforward"), units.number(text))


Paths = Annotated[list[str] | None, typer.Argument(metavar="FILE|FOLDER|-...")]
Out = Annotated[
    str | None,
    typer.Option(
        "-o", "--out", metavar="FOLDER", help="Model folder. Default: models/<corpus>.", rich_help_panel="Run"
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Continue the run in that folder from its newest checkpoint.", rich_help_panel="Run"),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the model in that folder.", rich_help_panel="Run")
]
AllowDataChange = Annotated[
    bool, typer.Option("--allow-data-change", help="Resume although the text has changed.", rich_help_panel="Run")
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Preset to start from, see xlcli models presets. Default: by text size and device.",
        rich_help_panel="Run",
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        "--init",
        metavar="NAME|FOLDER",
        help="Start from the weights, vocabulary and shape of this model instead of new weights.",
        rich_help_panel="Run",
    ),
]
Tokenizer = Annotated[
    Literal["auto", "bytes", "sentencepiece", "words"] | None,
    typer.Option("--tokenizer", help="Tokenizer. auto: by size and content of the text.", rich_help_panel="Text"),
]
VocabSize = Annotated[
    int | None,
    typer.Option(
        "--vocab-size",
        metavar="N",
        parser=Unit(units.count, "4096"),
        help="Vocabulary size.",
        rich_help_panel="Text",
    ),
]
Valid = Annotated[
    Any,
    typer.Option(
        "--valid",
        metavar="FILE|FRACTION",
        parser=Unit(units.share, "0.05"),
        help="Validation text: a file, or a fraction split off the end of the text. Default: 5%.",
        rich_help_panel="Text",
    ),
]
Test = Annotated[
    Any,
    typer.Option(
        "--test",
        metavar="FILE|FRACTION",
        parser=Unit(units.share, "0.05"),
        help="Test text: a file, or a fraction split off the end of the text. Default: 5%.",
        rich_help_panel="Text",
    ),
]
SegmentLen = Annotated[
    int | None,
    typer.Option(
        "--segment-len",
        metavar="TOKENS",
        parser=Unit(units.count, "128"),
        help="Tokens per training segment.",
        rich_help_panel="Memory",
    ),
]
ResetOnDocument = Annotated[
    bool,
    typer.Option(
        "--reset-on-document",
        help="Let no token attend to an earlier document: a text of JSON lines or a Parquet file, else a file.",
        rich_help_panel="Memory",
    ),
]
RandomLengths = Annotated[
    bool,
    typer.Option(
        "--random-lengths",
        help="Draw segment and memory length of each training step at random, up to the given ones.",
        rich_help_panel="Memory",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        parser=Unit(units.count, "16"),
        help="Sequences per batch.",
        rich_help_panel="Training",
    ),
]
GradAccum = Annotated[
    int | None,
    typer.Option(
        "--grad-accum",
        metavar="N",
        parser=Unit(units.count, "2"),
        help="Number of microbatches that a batch is split into; more need less memory.",
        rich_help_panel="Training",
    ),
]
RecomputeActivations = Annotated[
    bool,
    typer.Option(
        "--recompute-activations",
        help="Keep only the input of each block for the backward pass: less memory, a third more arithmetic.",
        rich_help_panel="Training",
    ),
]
Lr = Annotated[
    float | None,
    typer.Option(
        "--lr",
        metavar="RATE",
        parser=Unit(units.number, "0.01"),
        help="Peak learning rate.",
        rich_help_panel="Training",
    ),
]
Optimizer = Annotated[
    Literal["muon", "adamw"] | None, typer.Option("--optimizer", help="Optimizer.", rich_help_panel="Training")
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        parser=Unit(units.count, "1"),
        help="Seed of the random-number generator. Default: 0.",
        rich_help_panel="Machine",
    ),
]
WarmupSteps = Annotated[
    int | None,
    typer.Option(
        "--warmup-steps",
        metavar="N",
        parser=Unit(units.count, "100"),
        help="Steps of learning-rate warmup.",
        rich_help_panel="Training",
    ),
]
Dropout = Annotated[
    Any,
    typer.Option(
        "--dropout",
        metavar="RATE",
        parser=Unit(dropout_rates, "0.1"),
        help="Dropout rate of embeddings, attention, residual and feed-forward branches.",
        rich_help_panel="Training",
    ),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        "--max-steps",
        metavar="N",
        parser=Unit(units.count, "1000"),
        help="Budget in steps.",
        rich_help_panel="Training",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        parser=Unit(units.count, "10M"),
        help="Budget in tokens.",
        rich_help_panel="Training",
    ),
]
MaxTime = Annotated[
    float | None,
    typer.Option(
        "--max-time",
        metavar="TIME",
        parser=Unit(units.duration, "10m"),
        help="Budget in time, without the final score and sample. Default without any budget: 10m on CPU, 30m on CUDA, "
        "or less for a short text: 4 passes, 2 with --init.",
        rich_help_panel="Training",
    ),
]
EvalEvery = Annotated[
    float | None,
    typer.Option(
        "--eval-every",
        metavar="N|TIME",
        parser=Unit(units.interval, "5m"),
        help="Steps (such as 100) or time (such as 60s) between validations. Default: 10 per run, fewer if they "
        "take more than a tenth of a budget in time.",
        rich_help_panel="Training",
    ),
]
Patience = Annotated[
    int | None,
    typer.Option(
        "--patience",
        metavar="N",
        parser=Unit(units.count, "3"),
        help="After N successive validations without improvement, decay the learning rate (by default over a quarter "
        "of the steps so far, see train.decay_fraction) and end the run. Default: none.",
        rich_help_panel="Training",
    ),
]
SaveEvery = Annotated[
    float | None,
    typer.Option(
        "--save-every",
        metavar="N|TIME",
        parser=Unit(units.interval, "5m"),
        help="Steps (such as 100) or time (such as 60s) between checkpoints. Default: 60s.",
        rich_help_panel="Training",
    ),
]
KeepCheckpoints = Annotated[
    int | None,
    typer.Option(
        "--keep-checkpoints",
        metavar="N",
        parser=Unit(units.count, "2"),
        help="Number of checkpoints to keep. Default: 2.",
        rich_help_panel="Training",
    ),
]
OnDivergence = Annotated[
    Literal["rollback", "stop"] | None,
    typer.Option(
        "--on-divergence",
        help="If the loss is no longer finite: continue from the last checkpoint at a third of the learning rate, "
        "at most three times, or stop. Default: rollback.",
        rich_help_panel="Training",
    ),
]
Weights = Annotated[
    Literal["float32", "bfloat16", "int8"] | None,
    typer.Option(
        "--weights",
        help="Encoding of the saved weights; int8 is a quarter of float32. The final score is that of the saved "
        "weights.",
        rich_help_panel="Run",
    ),
]
Tensorboard = Annotated[
    bool,
    typer.Option(
        "--tensorboard",
        help="Write the training curve for TensorBoard into the folder tensorboard of the model.",
        rich_help_panel="Run",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        parser=Unit(units.count, "2"),
        help="Number of CPU threads. Default: chosen by measuring, so that runs do not repeat to the bit.",
        rich_help_panel="Machine",
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the model before training; faster in long runs only.", rich_help_panel="Machine"
    ),
]
NProc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        parser=Unit(units.at_least(1), "2"),
        help="Train with N processes of this machine, which share the batch; with --dry-run, print the plan for N.",
        rich_help_panel="Machine",
    ),
]
Shard = Annotated[
    bool,
    typer.Option(
        "--shard",
        help="On several processes: divide the model and its optimizer among them (FSDP2); less memory. Blocks are "
        "gathered in bfloat16 if products are.",
        rich_help_panel="Machine",
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE.png",
        help="Plot the training curve at the end or when stopped (needs the extra xlcli[plot]).",
        rich_help_panel="Output",
    ),
]
