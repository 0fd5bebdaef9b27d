"""`xlcli train`: makes a model of a text."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from xlcli.cli import units
from xlcli.cli.options import DEVICE, SEED, SETTINGS, TALK, Command, Flag, Values, mem_len, nearest
from xlcli.cli.pipe import standard_input
from xlcli.cli.signals import Stop
from xlcli.errors import ConfigError, DataError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.config import Config
    from xlcli.events import Event

AUTOMATIC = ("small", "base", "tiny")
"""Presets that may be chosen when none is named; which one is only known once text and device are."""


def run(values: Values) -> int:
    """Renders the events of the workflow `train`."""
    from xlcli.cli.render import Screen
    from xlcli.cli.settings import above_preset, print_config

    preset = values.get("preset")
    config = legal_config(values, preset)
    screen = Screen(values)
    if values.on("print-config"):
        if preset is None and not screen.json:
            screen.print(f"# No --preset: one is chosen by text and device. This is with {AUTOMATIC[0]}.\n\n")
        screen.print(print_config(config, values))
        return 0
    check_paths(values, (config.text.valid, config.text.test))
    if values.on("resume") and values.on("overwrite"):
        raise ConfigError("--resume and --overwrite exclude each other.", "Give one of them.")
    folder = Path(values.get("out") or Path("models") / model_name(values.words))
    with Stop(screen.say) as stop, screen, standard_input(stop):
        screen.wait("starting")
        from xlcli.events import Plan
        from xlcli.training import train

        begun = False
        for event in train(
            above_preset(values),
            values.words,
            folder,
            preset=preset,
            resume=values.on("resume"),
            overwrite=values.on("overwrite"),
            dry_run=values.on("dry-run"),
            allow_data_change=values.on("allow-data-change"),
            stop=stop,
        ):
            begun = begun or isinstance(event, Plan)
            if stop() and not begun:
                break  # nothing has been learned that could be saved
            try:
                show(event, screen, dry_run=values.on("dry-run"))
            except BrokenPipeError:
                screen.abandon_stdout()
        return stop.exit_code


def legal_config(values: Values, preset: str | None) -> Config:
    """The configuration with this preset, or else with the first automatic one that what was set is legal with."""
    from xlcli.cli.settings import resolve
    from xlcli.presets import read_preset

    if preset is not None:
        return resolve(values, read_preset(preset))
    refusals = []
    for name in AUTOMATIC:
        try:
            return resolve(values, read_preset(name))
        except ConfigError as error:
            refusals.append(error)
    raise refusals[0]


def check_paths(values: Values, held_out: tuple[str | float | None, ...]) -> None:
    """Refuses what is plainly missing before torch is loaded; the corpus reader judges the rest."""
    if not values.words:
        raise ConfigError(
            "train needs a text: a file, a folder, or - for standard input.", "Type xlcli train corpus.txt."
        )
    for name in (*values.words, *(part for part in held_out if isinstance(part, str))):
        if name == "-" or os.path.lexists(name):
            continue
        path = Path(name)
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, beside)
        raise DataError(
            f"there is no file {name}.", f"Did you mean {path.parent / near}?" if near else "Check the path."
        )


def model_name(words: tuple[str, ...]) -> str:
    """Name of the model of a corpus: the first file's name without its endings."""
    if words[0] == "-":
        return "stdin"
    name = Path(words[0]).absolute().name.removesuffix(".gz").removesuffix(".txt")
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "corpus"


def show(event: Event, screen: Screen, *, dry_run: bool) -> None:
    """One event of the workflow to the screen."""
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


COMMAND = Command(
    name="train",
    about="Train a model on a text and save it in models/. Everything has a default.",
    examples=(
        "xlcli train corpus.txt",
        "xlcli train books/ notes.txt.gz --preset small --max-time 30m --out models/mine",
    ),
    words="FILE|FOLDER|-...",
    groups={
        "Text": (
            Flag("--tokenizer", "auto|bytes|sentencepiece|words", "how text becomes tokens", keys=("text.tokenizer",)),
            Flag("--vocab-size", "N", "size of the vocabulary", units.count, ("text.vocab_size",), example="4096"),
            Flag(
                "--valid", "FILE|FRACTION", "held-out text to choose by (5 % off the end)", units.share, ("text.valid",)
            ),
            Flag("--test", "FILE|FRACTION", "held-out text to judge by (5 % off the end)", units.share, ("text.test",)),
        ),
        "Model": (
            Flag("-o/--out", "FOLDER", "where the model goes (models/<corpus>)"),
            Flag("--resume", "", "go on with the run in that folder"),
            Flag("--overwrite", "", "begin anew in that folder"),
            Flag("--allow-data-change", "", "resume although the text has changed"),
            Flag("--preset", "NAME", "start from these settings; see xlcli models"),
            Flag(
                "--dropout",
                "RATE",
                "all four dropout rates",
                units.number,
                tuple(f"model.dropout.{name}" for name in ("embedding", "attention", "residual", "feedforward")),
            ),
        ),
        "Training": (
            Flag(
                "--segment-len",
                "TOKENS",
                "tokens read at once by each lane",
                units.count,
                ("train.segment_len",),
                example="128",
            ),
            mem_len("train"),
            Flag(
                "--span",
                "uniform|growing",
                "what a token sees: exactly the memory, or its segment too",
                keys=("train.span",),
            ),
            Flag(
                "--batch-size", "N", "lanes of text read side by side", units.count, ("train.batch_size",), example="16"
            ),
            Flag(
                "--grad-accum",
                "N",
                "take each step in N parts, to save memory",
                units.count,
                ("train.grad_accum",),
                example="2",
            ),
            Flag("--lr", "RATE", "highest learning rate", units.number, ("train.lr",), example="0.01"),
            Flag("--optimizer", "muon|adamw", "how to learn", keys=("train.optimizer",)),
            Flag(
                "--warmup-steps",
                "N",
                "steps until the highest learning rate",
                units.count,
                ("train.warmup_steps",),
                example="100",
            ),
            Flag("--max-steps", "N", "budget in steps", units.count, ("train.max_steps",), example="1000"),
            Flag("--max-tokens", "N", "budget in tokens", units.count, ("train.max_tokens",), example="10M"),
            Flag("--max-time", "TIME", "budget in time (10m on CPU, 30m on CUDA)", units.duration, ("train.max_time",)),
            Flag(
                "--eval-every",
                "N|TIME",
                "steps (100) or time (60s) between held-out scores",
                units.cadence,
                ("train.eval_every",),
            ),
            Flag("--save-every", "N|TIME", "steps or time between checkpoints", units.cadence, ("train.save_every",)),
            Flag(
                "--keep-checkpoints", "N", "checkpoints to keep", units.count, ("train.keep_checkpoints",), example="2"
            ),
            SEED,
        ),
        "Machine": (
            *DEVICE,
            Flag("--compile", "", "compile the model first; pays in long runs", keys=("runtime.compile",)),
        ),
        "Settings": SETTINGS,
        "Talk": TALK,
    },
    sections=("model", "text", "train", "runtime"),
    run=run,
)
