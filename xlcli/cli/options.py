"""Options shared by several commands, and `Unit`, the parser of values with units.

An option named like a configuration key sets that key; see `xlcli.cli.settings`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from xlcli.cli import units
from xlcli.cli.terminal import one_line


@dataclass(frozen=True)
class Unit:
    """A Typer parser: `read` turns option text into a value, `example` is a valid text for error messages."""

    read: Callable[[str], Any]
    example: str

    def __call__(self, text: str) -> Any:
        """The value of `text`; `typer.BadParameter` says why there is none."""
        if not text:
            raise typer.BadParameter("was given an empty value.")
        try:
            return self.read(text)
        except ValueError as error:
            raise typer.BadParameter(f"'{one_line(text)}' is {error}.") from None


def option(panel: str, names: str, about: str, parser: Unit | None = None, **settings: Any) -> Any:
    """An option for `Annotated`.

    Args:
        panel: Heading in the help.
        names: Names and value as the help shows them: `-m, --model NAME|FOLDER`.
        about: Its help.
        parser: Reads the value.
        settings: Further arguments of `typer.Option`.
    """
    spelled, _, value = names.replace(", ", ",").partition(" ")
    return typer.Option(
        *spelled.split(","), metavar=value or None, parser=parser, help=about, rich_help_panel=panel, **settings
    )


Model = Annotated[
    str | None,
    option("Model", "-m, --model NAME|FOLDER", "Model. Default: the newest in ./models, else the bundled one."),
]
MemLen = Annotated[
    int | None,
    option(
        "Memory",
        "--mem-len TOKENS",
        "Memory length of each layer in tokens; 0 disables recurrence.",
        Unit(units.count, "512"),
    ),
]
ClampLen = Annotated[
    str | None,
    option(
        "Memory",
        "--clamp-len TOKENS|none",
        "Largest distance of positions xl and rope; tokens further back are at it. Default: that of training.",
        Unit(units.count_or_none, "512"),
    ),
]
Adapt = Annotated[
    bool, option("Memory", "--adapt", "Adapt the weights to the text while it is read; the model is not changed.")
]
ContextCache = Annotated[
    int | None,
    option(
        "Memory",
        "--context-cache TOKENS",
        "Mix predictions with the tokens that followed the same context among this many latest tokens.",
        Unit(units.count, "100k"),
    ),
]
Span = Annotated[
    Literal["uniform", "growing"] | None,
    option(
        "Memory",
        "--span",
        "Attention span: exactly the memory length (uniform), or memory and the segment so far (growing).",
    ),
]
NSteps = Annotated[
    int | None,
    option(
        "Model",
        "--n-steps N",
        "Number of times a universal model applies its blocks. Default: as trained.",
        Unit(units.count, "8"),
    ),
]
NHashes = Annotated[
    int | None,
    option(
        "Model",
        "--n-hashes N",
        "Number of hash rounds of LSH attention, 1 to 8. Default: as trained.",
        Unit(units.count, "8"),
    ),
]
StateIn = Annotated[str | None, option("Memory", "--state-in FILE", "Continue from the state saved in this file.")]
StateOut = Annotated[str | None, option("Memory", "--state-out FILE", "Save the state at the end, or when stopped.")]
Binary = Annotated[bool, option("Text", "--binary", "Take the bytes of the input as they are, text or not.")]
ResetOnDocument = Annotated[
    bool,
    option(
        "Memory",
        "--reset-on-document",
        "Clear the memory before each document: a text of JSON lines or a Parquet file, else a file. "
        "Default: as the model was trained.",
    ),
]
TextField = Annotated[
    str | None, option("Text", "--text-field KEY", "Key of the text in JSON lines and Parquet files. Default: text.")
]

Html = Annotated[
    str | None,
    option(
        "Output",
        "--html FILE.html",
        "Write a page with the text colored by surprisal, the curve along it and its most surprising lines.",
    ),
]
Force = Annotated[bool, option("Output", "--force", "Overwrite files of any kind with the outputs, inputs too.")]
Device = Annotated[
    str | None, option("Machine", "--device auto|cpu|cuda[:N]", "Device to compute on.", Unit(units.device, "cpu"))
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    option("Machine", "--dtype", "Precision of matrix products. Compiled kernels of generation need float32."),
]
WeightDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"] | None,
    option(
        "Machine",
        "--weight-dtype",
        "Number type that the weights are rounded to. Default: float32. Only compiled kernels are faster with it.",
    ),
]
MemoryDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"] | None,
    option(
        "Machine",
        "--memory-dtype",
        "Number type of the keys and values in memory. Default: float32, or that of a saved state.",
    ),
]
Threads = Annotated[int | None, option("Machine", "--threads N", "Number of CPU threads.", Unit(units.count, "2"))]
NProc = Annotated[
    int | None,
    option(
        "Machine",
        "--nproc N",
        "Compute with N processes of this machine, which share the sequences of a batch.",
        Unit(units.at_least(1), "2"),
    ),
]
Seed = Annotated[
    int | None,
    option("Machine", "--seed N", "Seed of the random-number generator. Default: random.", Unit(units.count, "1")),
]

ConfigFile = Annotated[
    str | None, option("Settings", "--config FILE.toml", "Read settings from a TOML file.", envvar="XLCLI_CONFIG")
]
Overrides = Annotated[
    list[str] | None,
    option("Settings", "--set a.b=c", "Set one key of the configuration. May be repeated.", allow_from_autoenv=False),
]
PrintConfig = Annotated[
    bool,
    option("Settings", "--print-config", "Print the resulting configuration (TOML, or JSON with --json) and exit."),
]
DryRun = Annotated[
    bool, option("Settings", "--dry-run", "Print the plan, the model size and the memory needed, and exit.")
]

Json = Annotated[bool, option("Output", "--json", "Print JSON on stdout.")]
Quiet = Annotated[bool, option("Output", "-q, --quiet", "Print results, warnings and errors only.")]
Verbose = Annotated[bool, option("Output", "-v, --verbose", "Print details on stderr.")]
Color = Annotated[
    Literal["auto", "always", "never"] | None,
    option("Output", "--color", "Use color. auto: on a terminal, unless NO_COLOR is set."),
]
Debug = Annotated[bool, option("Output", "--debug", "Show a traceback on errors.")]
