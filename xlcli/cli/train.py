"""`xlcli train`: trains a model on a text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from xlcli.cli import complete, options, units
from xlcli.cli.help import CONTEXT, Command
from xlcli.cli.options import Unit
from xlcli.cli.pipe import standard_input
from xlcli.cli.signals import Stop
from xlcli.cli.terminal import discard_stdout
from xlcli.cli.usage import nearest
from xlcli.errors import ConfigError, DataError, DivergedError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.cli.tensorboard import EventFile
    from xlcli.config import Config
    from xlcli.events import Event

SECTIONS = ("text", "train", "runtime", "model")
"""Sections of the configuration that the command uses."""
app = typer.Typer()


@app.command(
    cls=Command,
    context_settings=CONTEXT,
    epilog="xlcli train corpus.txt\nxlcli train books/ notes.txt.gz --preset small --max-time 30m --out models/mine",
)
def train(
    context: typer.Context,
    paths: Annotated[list[str] | None, typer.Argument(metavar="FILE|FOLDER|-...")] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "-o", "--out", metavar="FOLDER", help="Model folder. Default: models/<corpus>.", rich_help_panel="Run"
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in that folder from its newest checkpoint.", rich_help_panel="Run"
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the model in that folder.", rich_help_panel="Run")
    ] = False,
    allow_data_change: Annotated[
        bool, typer.Option("--allow-data-change", help="Resume although the text has changed.", rich_help_panel="Run")
    ] = False,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            autocompletion=complete.presets,
            help="Preset to start from, see xlcli models presets. Default: by text size and device.",
            rich_help_panel="Run",
        ),
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(
            "--init",
            metavar="NAME|FOLDER",
            autocompletion=complete.models,
            help="Start from the weights, vocabulary and shape of this model instead of new weights.",
            rich_help_panel="Run",
        ),
    ] = None,
    tokenizer: Annotated[
        Literal["auto", "bytes", "sentencepiece", "words"] | None,
        typer.Option("--tokenizer", help="Tokenizer. auto: by size and content of the text.", rich_help_panel="Text"),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            metavar="N",
            parser=Unit(units.count, "4096"),
            help="Vocabulary size.",
            rich_help_panel="Text",
        ),
    ] = None,
    valid: Annotated[
        Any,
        typer.Option(
            "--valid",
            metavar="FILE|FRACTION",
            parser=Unit(units.share, "0.05"),
            help="Validation text: a file, or a fraction split off the end of the text. Default: 5%.",
            rich_help_panel="Text",
        ),
    ] = None,
    test: Annotated[
        Any,
        typer.Option(
            "--test",
            metavar="FILE|FRACTION",
            parser=Unit(units.share, "0.05"),
            help="Test text: a file, or a fraction split off the end of the text. Default: 5%.",
            rich_help_panel="Text",
        ),
    ] = None,
    binary: options.Binary = False,
    text_field: options.TextField = None,
    segment_len: Annotated[
        int | None,
        typer.Option(
            "--segment-len",
            metavar="TOKENS",
            parser=Unit(units.count, "128"),
            help="Tokens per training segment.",
            rich_help_panel="Memory",
        ),
    ] = None,
    mem_len: options.MemLen = None,
    reset_on_document: Annotated[
        bool,
        typer.Option(
            "--reset-on-document",
            help="Let no token attend to an earlier document: a text of JSON lines or a Parquet file, else a file.",
            rich_help_panel="Memory",
        ),
    ] = False,
    span: options.Span = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            parser=Unit(units.count, "16"),
            help="Sequences per batch.",
            rich_help_panel="Training",
        ),
    ] = None,
    grad_accum: Annotated[
        int | None,
        typer.Option(
            "--grad-accum",
            metavar="N",
            parser=Unit(units.count, "2"),
            help="Number of microbatches that a batch is split into; more need less memory.",
            rich_help_panel="Training",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr",
            metavar="RATE",
            parser=Unit(units.number, "0.01"),
            help="Peak learning rate.",
            rich_help_panel="Training",
        ),
    ] = None,
    optimizer: Annotated[
        Literal["muon", "adamw"] | None, typer.Option("--optimizer", help="Optimizer.", rich_help_panel="Training")
    ] = None,
    warmup_steps: Annotated[
        int | None,
        typer.Option(
            "--warmup-steps",
            metavar="N",
            parser=Unit(units.count, "100"),
            help="Steps of learning-rate warmup.",
            rich_help_panel="Training",
        ),
    ] = None,
    dropout: Annotated[
        Any,
        typer.Option(
            "--dropout",
            metavar="RATE",
            parser=Unit(dropout_rates, "0.1"),
            help="Dropout rate of embeddings, attention, residual and feed-forward branches.",
            rich_help_panel="Training",
        ),
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            "--max-steps",
            metavar="N",
            parser=Unit(units.count, "1000"),
            help="Budget in steps.",
            rich_help_panel="Training",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            parser=Unit(units.count, "10M"),
            help="Budget in tokens.",
            rich_help_panel="Training",
        ),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(
            "--max-time",
            metavar="TIME",
            parser=Unit(units.duration, "10m"),
            help="Budget in time. Default without any budget: 10m on CPU, 30m on CUDA.",
            rich_help_panel="Training",
        ),
    ] = None,
    eval_every: Annotated[
        float | None,
        typer.Option(
            "--eval-every",
            metavar="N|TIME",
            parser=Unit(units.interval, "5m"),
            help="Steps (such as 100) or time (such as 60s) between validations. Default: 10 per run, fewer if they "
            "take more than a tenth of the time.",
            rich_help_panel="Training",
        ),
    ] = None,
    save_every: Annotated[
        float | None,
        typer.Option(
            "--save-every",
            metavar="N|TIME",
            parser=Unit(units.interval, "5m"),
            help="Steps (such as 100) or time (such as 60s) between checkpoints. Default: 60s.",
            rich_help_panel="Training",
        ),
    ] = None,
    keep_checkpoints: Annotated[
        int | None,
        typer.Option(
            "--keep-checkpoints",
            metavar="N",
            parser=Unit(units.count, "2"),
            help="Number of checkpoints to keep. Default: 2.",
            rich_help_panel="Training",
        ),
    ] = None,
    on_divergence: Annotated[
        Literal["rollback", "stop"] | None,
        typer.Option(
            "--on-divergence",
            help="If the loss is no longer finite: continue from the last checkpoint at a third of the learning rate, "
            "at most three times, or stop. Default: rollback.",
            rich_help_panel="Training",
        ),
    ] = None,
    weights: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        typer.Option(
            "--weights",
            help="Encoding of the saved weights; int8 is a quarter of float32. The final score is that of the saved "
            "weights.",
            rich_help_panel="Run",
        ),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard",
            help="Write the training curve for TensorBoard into the folder tensorboard of the model.",
            rich_help_panel="Run",
        ),
    ] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            metavar="N",
            parser=Unit(units.count, "2"),
            help="Number of CPU threads. Default: chosen by measuring, so that runs do not repeat to the bit.",
            rich_help_panel="Machine",
        ),
    ] = None,
    seed: options.Seed = None,
    compile: Annotated[  # noqa: A002
        bool,
        typer.Option(
            "--compile", help="Compile the model before training; faster in long runs only.", rich_help_panel="Machine"
        ),
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE.png",
            help="Plot the training curve at the end or when stopped (needs the extra xlcli[plot]).",
            rich_help_panel="Output",
        ),
    ] = None,
    config_file: options.ConfigFile = None,
    overrides: options.Overrides = None,
    print_config: options.PrintConfig = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_progress: options.NoProgress = False,
    color: options.Color = None,
    force: options.Force = False,
    debug: options.Debug = False,
) -> int:
    """Train a model on a text and save it in models/. Everything has a default."""
    from xlcli.cli.prologue import open_screen
    from xlcli.cli.settings import option_names, user_settings
    from xlcli.cli.tensorboard import EventFile, check_tensorboard
    from xlcli.store.discover import find
    from xlcli.store.origin import configurations

    settings = user_settings(context, SECTIONS)
    with option_names(context, SECTIONS):
        is_new = print_config or not resume
        model = find(init) if init is not None and is_new else None
        configs = configurations(settings, preset, model) if is_new else {}
        screen = open_screen(context)
        if print_config:
            print_preset(configs, screen, is_chosen=preset is not None or model is not None)
            return 0
        check_paths(paths or (), settings.get("text", {}))
        if plot is not None:
            check_run_plot(plot, paths or (), force=force)
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite exclude each other.", "Give one of them.")
        if tensorboard:
            check_tensorboard()
        folder = Path(out or Path("models") / model_name(paths or ()))
        with screen.stop() as stop, screen.until(stop), standard_input(stop, screen.keyboard_ended):
            if "-" in (paths or ()):
                screen.expect_keyboard()
            screen.wait("starting")
            from xlcli import training

            if resume:
                events = training.resume(
                    paths or (),
                    folder,
                    settings,
                    preset=preset,
                    init=init,
                    dry_run=dry_run,
                    allow_data_change=allow_data_change,
                    stop=stop,
                )
            else:
                events = training.train(
                    paths or (), folder, configs, init=model, overwrite=overwrite, dry_run=dry_run, stop=stop
                )
            event_file = EventFile(folder) if tensorboard else None
            try:
                show_all(events, screen, stop, event_file, dry_run=dry_run)
            except DivergedError:
                draw_run(plot, folder, screen)
                raise
            finally:
                if event_file:
                    event_file.close()
            if not dry_run:
                draw_run(plot, folder, screen)
            return stop.exit_code


def check_run_plot(plot: str, paths: Sequence[str], *, force: bool) -> None:
    """Refuses a plot that cannot be drawn, or a file of it that is an input or of another kind."""
    from xlcli.cli.outputs import check_outputs
    from xlcli.cli.plot import check_plot

    check_plot(plot)
    check_outputs({"--plot": plot}, map(Path, paths), force=force)


def draw_run(plot: str | None, folder: Path, screen: Screen) -> None:
    """Draws the training curve of the run in `folder`, if a plot is asked for and a step was taken."""
    from xlcli.cli.plot import draw_training
    from xlcli.store.records import read_metrics
    from xlcli.store.staging import place_of_run

    if plot is None:
        return
    if draw_training(plot, read_metrics(place_of_run(folder)), folder.name):
        screen.say(f"plot written to {plot}")
    else:
        screen.say(f"no step was taken, so {plot} was not written", "warning")


def dropout_rates(text: str) -> dict[str, float]:
    """The same rate for every dropout of a model."""
    return dict.fromkeys(("embedding", "attention", "residual", "feedforward"), units.number(text))


def print_preset(configs: Mapping[str, Config], screen: Screen, *, is_chosen: bool) -> None:
    """Prints the configuration of the first preset; unless the user chose it, a comment says so."""
    from xlcli.cli.settings import print_config

    name, config = next(iter(configs.items()))
    if not is_chosen and not screen.json:
        screen.print(f"# No --preset: text size and device decide. This is preset {name}.\n\n")
    screen.print(print_config(config, SECTIONS, as_json=screen.json))


def check_paths(paths: Sequence[str], held_out: Mapping[str, object]) -> None:
    """Refuses a missing file before torch is loaded; the corpus reader makes all other checks."""
    if not paths:
        raise ConfigError(
            "train needs a text: a file, a folder, or - for standard input.", "Type xlcli train corpus.txt."
        )
    for name in (*paths, *(part for part in map(held_out.get, ("valid", "test")) if isinstance(part, str))):
        if name == "-" or os.path.lexists(name):
            continue
        path = Path(name)
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        raise DataError(
            f"there is no file {name}.", f"Did you mean {path.parent / near}?" if near else "Check the path."
        )


def model_name(paths: Sequence[str]) -> str:
    """Default name of a model: the name of its first file without suffixes."""
    if paths[0] == "-":
        return "stdin"
    name = Path(paths[0]).absolute().name
    for suffix in (r"\.(gz|bz2|xz|zst)", r"\.(txt|jsonl|parquet)"):
        name = re.sub(suffix + "$", "", name)
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "corpus"


def show_all(
    events: Iterator[Event], screen: Screen, stop: Stop, event_file: EventFile | None, *, dry_run: bool
) -> None:
    """Shows the events of a run and writes its metrics until it ends, or until a stop request before its `Plan`."""
    from xlcli.events import Plan

    begun = False
    for event in events:
        begun = begun or isinstance(event, Plan)
        if stop() and not begun:
            break  # no step was taken, so there is nothing to save
        if event_file:
            event_file.add(event)
        try:
            show(event, screen, dry_run=dry_run)
        except BrokenPipeError:
            discard_stdout()


def show(event: Event, screen: Screen, *, dry_run: bool) -> None:
    """Shows one event of the workflow."""
    from xlcli.cli import report
    from xlcli.events import Notice, Plan, Progress, Saved, Step, Trained, Validation

    if screen.json and isinstance(event, Plan | Step | Validation | Saved | Trained):
        screen.object(report.event_object(event))
    match event:
        case Notice():
            screen.notice(event)
        case Progress():
            screen.progress(event)
        case Plan() if dry_run and not screen.json:
            screen.print(report.plan_text(event))
        case Plan():
            screen.say(report.plan_text(event).rstrip("\n"))
        case Step():
            screen.step(event)
        case Validation():
            screen.say(report.validation_line(event))
        case Saved():
            screen.say(report.saved_line(event), "detail")
        case Trained() if not screen.json:
            screen.print(report.trained_text(event))
