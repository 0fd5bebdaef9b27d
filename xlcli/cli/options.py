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


Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="NAME|FOLDER",
        help="Model. Default: the newest in ./models, else the bundled one.",
        rich_help_panel="Model",
    ),
]
MemLen = Annotated[
    int | None,
    typer.Option(
        "--mem-len",
        metavar="TOKENS",
        parser=Unit(units.count, "512"),
        help="Memory length of each layer in tokens; 0 disables recurrence.",
        rich_help_panel="Memory",
    ),
]
ClampLen = Annotated[
    str | None,
    typer.Option(
        "--clamp-len",
        metavar="TOKENS|none",
        parser=Unit(units.count_or_none, "512"),
        help="Largest distance of positions xl and rope; tokens further back are at it. Default: that of training.",
        rich_help_panel="Memory",
    ),
]
Adapt = Annotated[
    bool,
    typer.Option(
        "--adapt",
        help="Adapt the weights to the text while it is read; the model is not changed.",
        rich_help_panel="Memory",
    ),
]
ContextCache = Annotated[
    int | None,
    typer.Option(
        "--context-cache",
        metavar="TOKENS",
        parser=Unit(units.count, "100k"),
        help="Mix predictions with the tokens that followed the same context among this many latest tokens.",
        rich_help_panel="Memory",
    ),
]
Span = Annotated[
    Literal["uniform", "growing"] | None,
    typer.Option(
        "--span",
        help="Attention span: exactly the memory length (uniform), or memory and the segment so far (growing).",
        rich_help_panel="Memory",
    ),
]
NSteps = Annotated[
    int | None,
    typer.Option(
        "--n-steps",
        metavar="N",
        parser=Unit(units.count, "8"),
        help="Number of times a universal model applies its blocks. Default: as trained.",
        rich_help_panel="Model",
    ),
]
NHashes = Annotated[
    int | None,
    typer.Option(
        "--n-hashes",
        metavar="N",
        parser=Unit(units.count, "8"),
        help="Number of hash rounds of LSH attention, 1 to 8. Default: as trained.",
        rich_help_panel="Model",
    ),
]
StateIn = Annotated[
    str | None,
    typer.Option(
        "--state-in", metavar="FILE", help="Continue from the state saved in this file.", rich_help_panel="Memory"
    ),
]
StateOut = Annotated[
    str | None,
    typer.Option(
        "--state-out", metavar="FILE", help="Save the state at the end, or when stopped.", rich_help_panel="Memory"
    ),
]
Binary = Annotated[
    bool,
    typer.Option("--binary", help="Take the bytes of the input as they are, text or not.", rich_help_panel="Text"),
]
ResetOnDocument = Annotated[
    bool,
    typer.Option(
        "--reset-on-document",
        help="Clear the memory before each document: a text of JSON lines or a Parquet file, else a file. Default: as "
        "the model was trained.",
        rich_help_panel="Memory",
    ),
]
TextField = Annotated[
    str | None,
    typer.Option(
        "--text-field",
        metavar="KEY",
        help="Key of the text in JSON lines and Parquet files. Default: text.",
        rich_help_panel="Text",
    ),
]

Html = Annotated[
    str | None,
    typer.Option(
        "--html",
        metavar="FILE.html",
        help="Write a page with the text colored by surprisal, the curve along it and its most surprising lines.",
        rich_help_panel="Output",
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Overwrite files of any kind with the outputs, inputs too.", rich_help_panel="Output"),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda[:N]",
        parser=Unit(units.device, "cpu"),
        help="Device to compute on.",
        rich_help_panel="Machine",
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(
        "--dtype",
        help="Precision of matrix products. Compiled kernels of generation need float32.",
        rich_help_panel="Machine",
    ),
]
WeightDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"] | None,
    typer.Option(
        "--weight-dtype",
        help="Number type that the weights are rounded to. Default: float32. Only compiled kernels are faster with it.",
        rich_help_panel="Machine",
    ),
]
MemoryDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "int8"] | None,
    typer.Option(
        "--memory-dtype",
        help="Number type of the keys and values in memory. Default: float32, or that of a saved state.",
        rich_help_panel="Machine",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        parser=Unit(units.count, "2"),
        help="Number of CPU threads.",
        rich_help_panel="Machine",
    ),
]
NProc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        parser=Unit(units.at_least(1), "2"),
        help="Compute with N processes of this machine, which share the sequences of a batch.",
        rich_help_panel="Machine",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        parser=Unit(units.count, "1"),
        help="Seed of the random-number generator. Default: random.",
        rich_help_panel="Machine",
    ),
]

ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        envvar="XLCLI_CONFIG",
        help="Read settings from a TOML file.",
        rich_help_panel="Settings",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="a.b=c",
        allow_from_autoenv=False,
        help="Set one key of the configuration. May be repeated.",
        rich_help_panel="Settings",
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Print the resulting configuration (TOML, or JSON with --json) and exit.",
        rich_help_panel="Settings",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print the plan, the model size and the memory needed, and exit.", rich_help_panel="Settings"
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.", rich_help_panel="Output")]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Print results, warnings and errors only.", rich_help_panel="Output")
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print details on stderr.", rich_help_panel="Output")]
Color = Annotated[
    Literal["auto", "always", "never"] | None,
    typer.Option("--color", help="Use color. auto: on a terminal, unless NO_COLOR is set.", rich_help_panel="Output"),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.", rich_help_panel="Output")]
