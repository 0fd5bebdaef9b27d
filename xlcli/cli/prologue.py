"""Steps that commands share before their work: configuration, screen, model, dry run, loading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from xlcli.cli.settings import print_config, resolve
from xlcli.cli.usage import source, spelling
from xlcli.config import (
    Config,
    EvalConfig,
    InferenceConfig,
    ModelConfig,
    RuntimeConfig,
    UniversalStackConfig,
)
from xlcli.errors import ConfigError, StateError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen
    from xlcli.inference import SaveState
    from xlcli.runtime import Runtime
    from xlcli.store.folder import LoadedModel
    from xlcli.store.state_files import SessionState

_PROGRAM_BYTES = 300 * 2**20
"""Memory of the interpreter with torch loaded and nothing computed."""


def begin(context: typer.Context, sections: Sequence[str]) -> tuple[Config, Screen]:
    """The configuration of eval, generate or stream, and the screen. `--print-config` ends here."""
    config = resolve(context, sections)
    screen = open_screen(context)
    if context.params["print_config"]:
        screen.print(print_config(config, sections, as_json=screen.json))
        raise typer.Exit
    return config, screen


def open_screen(context: typer.Context) -> Screen:
    """The screen that the output options of a command describe."""
    from xlcli.cli.render import Screen

    names = ("json", "quiet", "verbose", "no_progress", "color")
    return Screen(**{name: context.params[name] for name in names})


def find_model(context: typer.Context, options: InferenceConfig) -> Path:
    """Folder of the model that `--model` names.

    Raises:
        ConfigError: An option does not apply to this model.
    """
    from xlcli.store.discover import find
    from xlcli.store.layout import read_config

    folder = find(context.params["model"])
    model = read_config(folder).model
    universal = isinstance(model.stack, UniversalStackConfig)
    hashed = any(layer.supports_recall for layer in model.attentions)
    wanted = {
        "n_steps": (options.n_steps, universal, "is not universal and applies its blocks once"),
        "n_hashes": (options.n_hashes, hashed, "has no hashed attention"),
    }
    if isinstance(options, EvalConfig) and options.recall:
        why = "lets tokens halt" if hashed else "has no hashed attention"
        wanted["recall"] = (True, model.supports_recall, why)
    for name, (value, possible, why) in wanted.items():
        if value is not None and not possible:
            param = next(param for param in context.command.params if param.name == name)
            given = source(context, name) != "DEFAULT"
            option = spelling(context, param) if given else f"{context.info_name}.{name}"
            said = option if value is True else f"{option} {value}"
            raise ConfigError(f"model {folder.name} {why}: {said} means nothing to it.", f"Leave out {option}.")
    return folder


def explain_memory(model: ModelConfig, mem_lens: Iterable[int | None], screen: Screen) -> None:
    """Warns about a memory length that makes no difference to this model."""
    if warning := model.mem_len_warning(max((length for length in mem_lens if length is not None), default=0)):
        screen.say(warning, "warning")


def print_plan(folder: Path, options: InferenceConfig, screen: Screen, *, batch_size: int, what: str) -> None:
    """Prints the plan of a command that uses a model: model size and memory needed. Nothing is loaded."""
    from xlcli.cli import report
    from xlcli.store.discover import summarize
    from xlcli.store.layout import read_config

    config = read_config(folder)
    summary = summarize(folder)
    length = config.train.mem_len if options.mem_len is None else options.mem_len
    parameters = summary.parameters or 0
    remembered = length or config.train.segment_len
    model = config.model.for_inference(options.n_steps, options.n_hashes)
    memory = model.describe_memory(length, config.train.segment_len)
    state = 4 * batch_size * model.memory_floats(remembered)
    weights = 4 * parameters
    plan: dict[str, Any] = {
        "model": str(folder),
        "does": what,
        "parameters": parameters,
        "mem_len": length,
        "batch_size": batch_size,
        "weights_bytes": weights,
        "state_bytes": state,
        "memory_bytes": _PROGRAM_BYTES + weights + 2 * state,
    }
    if screen.json:
        screen.object(plan)
        return
    rows = [
        ("model", f"{folder} ({report.amount(parameters)} parameters, {report.size(weights)})"),
        ("does", what),
        ("memory", f"{memory}, {_at_a_time(batch_size)}: {report.size(state)}"),
        ("needs", f"about {report.size(plan['memory_bytes'])} of main memory"),
    ]
    screen.print("".join(f"{name:8} {text}\n" for name, text in rows))


def _at_a_time(batch_size: int) -> str:
    return f"{batch_size} texts at a time" if batch_size > 1 else "one text at a time"


def load_model(
    folder: Path, config: RuntimeConfig, options: InferenceConfig, screen: Screen
) -> tuple[LoadedModel, Runtime]:
    """Chooses device and number type and loads the model there; imports torch."""
    from xlcli.runtime import make_runtime
    from xlcli.store.folder import load

    runtime = make_runtime(config)
    model = load(folder, device=runtime.device, n_steps=options.n_steps, n_hashes=options.n_hashes)
    screen.clear()
    for warning in model.warnings:
        screen.say(warning, "warning")
    score = model.record.get("bits_per_byte")
    about = f", {score:.3f} bits per byte when trained" if isinstance(score, float) else ""
    screen.say(f"model {model.name}: {folder}{about}", "detail")
    screen.say(f"{runtime.device} {runtime.dtype_name}, {runtime.threads} threads", "detail")
    return model, runtime


def check_state_files(state_in: str | None, state_out: str | None) -> None:
    """Refuses, before anything is loaded, a state that cannot be read or written."""
    if state_in is not None and not Path(state_in).is_file():
        raise StateError(f"there is no saved memory {state_in}.", "Make one with --state-out FILE, or drop --state-in.")
    if state_out is not None and not Path(state_out).absolute().parent.is_dir():
        raise ConfigError(f"the folder of --state-out {state_out} does not exist.", "Choose one that does.")


def open_state_files(
    state_in: str | None, state_out: str | None, model: LoadedModel, runtime: Runtime
) -> tuple[SessionState | None, SaveState | None]:
    """What `--state-in` holds, and a function that writes `--state-out`."""
    from xlcli.store.state_files import load_state, save_state

    resume = load_state(Path(state_in), model=model, device=str(runtime.device)) if state_in is not None else None
    if state_out is None:
        return resume, None
    path = Path(state_out)

    def save(session: SessionState) -> None:
        save_state(path, session, model=model)

    return resume, save
