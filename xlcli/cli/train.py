"""`xlcli train`: trains a model on a text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from xlcli.cli import options
from xlcli.cli.command import App, Call
from xlcli.cli.entry import discard_stdout
from xlcli.cli.launch import is_to_launch, launch
from xlcli.cli.loading import check_texts
from xlcli.cli.objects import fields
from xlcli.cli.options import option, plot_option
from xlcli.cli.outputs import PICTURE, Sink
from xlcli.cli.plot import draw_training
from xlcli.cli.render import Screen
from xlcli.cli.run_report import plan_text, trained_text
from xlcli.cli.signals import Stop
from xlcli.config import Config, TextConfig, Tree, make
from xlcli.errors import CheckpointError, ConfigError, DivergedError
from xlcli.events import Event, Plan, Saved, Step, Stopping, Trained, Validation
from xlcli.files import cache_folder, is_pipe
from xlcli.ranks import Ranks, join
from xlcli.store.commit import place_of_run
from xlcli.store.discover import LOCAL, find
from xlcli.store.layout import read_config, read_metrics
from xlcli.store.origin import NEW, configurations

RESUME = "If there is a checkpoint, --resume continues from it."  # remedy if a process of a run is lost
app = App()

Init = Annotated[
    str | None,
    option(
        "Run",
        "--init NAME|FOLDER|none",
        "Start from this model, or from scratch (none). Default: the bundled model for similar text.",
        autocompletion=options.complete_models,
    ),
]
Preset = Annotated[
    str | None,
    option(
        "Run",
        "--preset NAME",
        "Use this preset (xlcli models presets lists them). Default: by text and device.",
        autocompletion=options.complete_presets,
    ),
]
Resume = Annotated[bool, option("Run", "--resume", "Continue the run in the model folder from its newest checkpoint.")]


@app.command(
    "train", "xlcli train corpus.txt", "xlcli train books/ notes.txt.gz --preset small --max-time 30m -o models/mine"
)
def train(
    call: Call,
    paths: Annotated[list[str] | None, typer.Argument(metavar="FILE|FOLDER|-...")] = None,
    out: Annotated[
        str | None, option("Run", "-o, --out FOLDER", "Save the model in this folder. Default: models/<corpus>.")
    ] = None,
    resume: Resume = False,
    overwrite: Annotated[bool, option("Run", "--overwrite", "Replace the model in the model folder.")] = False,
    preset: Preset = None,
    init: Init = None,
    plot: Annotated[str | None, plot_option("Output", "Plot the training curve at the end or when stopped")] = None,
    dry_run: options.DryRun = False,
) -> int:
    with call.naming_settings():
        settings = call.settings.tree
        # Text and runtime are needed at once; the rest depends on preset and model.
        known = make({name: settings.get(name, {}) for name in ("runtime", "text")})
        model = None
        configs: Mapping[str, Config] = {}
        if call.params["print_config"] or not resume:
            if init is not None and init != NEW:
                model = find(init)
            configs = configurations(settings, preset, model, or_bundled=init is None)
        show_config(call, configs, is_decided=preset is not None or model is not None)
        if resume and overwrite:
            raise call.conflict("resume", "overwrite")
        texts = check_paths(call, paths or [], known.text, plot)
        folder = Path(out or Path(LOCAL) / model_name(texts))
        screen = call.screen
        cache_folder(screen.say)  # which all processes share
        nproc = known.runtime.nproc or 1
        if is_to_launch(nproc):
            check_division(nproc, texts, folder, settings, configs)
            if not dry_run:
                return launch(call.obj, nproc, RESUME)
        with join(known.runtime.timeout, RESUME) as ranks, screen.stop() as stop:
            screen.expect_pipes(texts)
            screen.wait("starting")
            from xlcli import training

            shared: dict[str, Any] = {"dry_run": dry_run, "stop": stop, "paused": lambda: stop.paused, "ranks": ranks}
            if resume:
                events = training.resume(paths or (), folder, settings, preset=preset, init=init, **shared)
            else:
                events = training.train(paths or (), folder, configs, init=model, overwrite=overwrite, **shared)
            screen.wait("reading the text")
            sinks: list[Sink] = []
            if ranks.is_first:
                sinks.append(_Report(screen, folder, plot, dry_run=dry_run))
            screen.drive(agreed(events, ranks, stop), *sinks)
            return stop.exit_code


def show_config(call: Call, configs: Mapping[str, Config], *, is_decided: bool) -> None:
    """With `--print-config`, prints the first configuration and ends. `is_decided`: the user has named it."""
    if call.params["print_config"]:
        name, config = next(iter(configs.items()))
        note = ""
        if not is_decided:
            note = f"# No --preset: text and device decide, or the bundled model. This is preset {name}.\n\n"
        call.show_config(config, note)


def check_paths(call: Call, paths: Sequence[str], text: TextConfig, plot: str | None) -> list[str]:
    """The texts of a run, held-out ones last, if they exist and the plot can be written."""
    if not paths:
        reason = "train needs a text: a file, a folder, or - for standard input."
        raise ConfigError(reason, "Type xlcli train corpus.txt.")
    held_out = [part for part in (text.valid, text.test) if isinstance(part, str)]
    texts = [*paths, *held_out]
    check_texts(texts, "xlcli train FILE --init {}")
    call.check_files(paths, {"plot": (plot, PICTURE)})
    return texts


def agreed(events: Iterable[Event], ranks: Ranks, stop: Stop) -> Iterator[Event]:
    """Events of a run for the first process; all take the signal that one of them has received."""
    for event in events:
        if isinstance(event, Stopping):
            stop.take(max(ranks.gather(stop.signal or 0)))
        if ranks.is_first:
            yield event


def check_division(
    n_ranks: int, paths: Sequence[str], folder: Path, settings: Tree, configs: Mapping[str, Config]
) -> None:
    """Refuses a run that cannot be divided among so many processes: one of `configs`, or the resumed one."""
    Ranks(size=n_ranks).require_files(paths)
    possible_configs = list(configs.values())
    if not possible_configs:
        with suppress(CheckpointError):  # the run reports it
            possible_configs = [make(read_config(place_of_run(folder)).model_dump(mode="json"), settings)]
    refusals = []
    for config in possible_configs:
        try:
            config.check_division(n_ranks)
        except ConfigError as error:
            refusals.append(error)
    if refusals and len(refusals) == len(possible_configs):  # the run would choose another one
        raise refusals[0]


def model_name(paths: Sequence[str]) -> str:
    """Default name of a model: the name of its first file without suffixes."""
    if is_pipe(paths[0]):
        return "stdin"
    name = Path(paths[0]).absolute().name
    for suffix in (r"\.(gz|bz2|xz|zst)", r"\.(txt|jsonl|parquet)"):
        name = re.sub(suffix + "$", "", name)
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "corpus"


class _Report(Sink):
    """Shows the events of a run until the reader of stdout has gone; draws the plot, also if the run has diverged."""

    def __init__(self, screen: Screen, folder: Path, plot: str | None, *, dry_run: bool) -> None:
        self._screen, self._folder, self._plot, self._dry_run = screen, folder, plot, dry_run
        self._has_plan = False  # without one, the folder may hold an earlier model

    def add(self, event: Event) -> None:
        self._has_plan = self._has_plan or isinstance(event, Plan)
        try:
            self._show(event)
        except BrokenPipeError:
            discard_stdout()

    def _show(self, event: Event) -> None:
        screen = self._screen
        if screen.json and isinstance(event, Plan | Step | Validation | Saved | Trained):
            screen.object({"event": type(event).__name__.lower(), **fields(event)})
        match event:
            case Plan() if self._dry_run and not screen.json:
                screen.report(plan_text(event))
            case Plan():
                screen.say(plan_text(event).rstrip("\n"))
            case Step():
                screen.step(event)
            case Validation():
                best = "  best so far" if event.best else ""
                screen.say(f"step {event.step}  validation {event.bits_per_byte:.4f} bits/byte{best}")
            case Saved():
                screen.say(f"step {event.step}  saved in {event.folder}", "detail")
            case Trained() if not screen.json:
                screen.report(trained_text(event))

    def close(self) -> None:
        if self._plot is None or not self._has_plan or self._dry_run:
            return
        if draw_training(self._plot, read_metrics(place_of_run(self._folder)), self._folder.name):
            self._screen.say(f"plot written to {self._plot}")
        else:
            self._screen.say(f"no step was taken, so {self._plot} was not written", "warning")

    def discard(self) -> None:
        if isinstance(sys.exception(), DivergedError):
            self.close()
