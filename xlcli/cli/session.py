"""What eval, generate and stream share: find the model, say what it will cost, load it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.cli import report
from xlcli.cli.options import Values
from xlcli.cli.render import Screen
from xlcli.config import RuntimeConfig
from xlcli.errors import ConfigError, StateError
from xlcli.store.discover import find, summarise
from xlcli.store.layout import read_config

if TYPE_CHECKING:
    from xlcli.parallel import Runtime
    from xlcli.reading import Carry, Save
    from xlcli.state import State
    from xlcli.store.folder import Loaded

_PROGRAM_BYTES = 300 * 2**20
"""Memory of the interpreter with torch loaded and nothing computed."""


def locate(values: Values) -> Path:
    """Folder of the model that is meant."""
    return find(values.get("model"))


def dry_run(folder: Path, *, mem_len: int | None, batch_size: int, what: str, values: Values) -> str:
    """The plan of a command that uses a model: its size and the memory it needs, without loading it."""
    config = read_config(folder)
    summary = summarise(folder)
    length = config.train.mem_len if mem_len is None else mem_len
    shape = config.model
    parameters = summary.parameters or 0
    state = 2 * 4 * batch_size * shape.n_layers * length * shape.attention.n_heads * shape.head_dim
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
    if values.on("json"):
        return report.to_json(plan) + "\n"
    rows = [
        ("model", f"{folder} ({report.amount(parameters)} parameters, {report.size(weights)})"),
        ("does", what),
        ("memory", f"{length} tokens in each of {shape.n_layers} layers, {batch_size} at a time: {report.size(state)}"),
        ("needs", f"about {report.size(plan['memory_bytes'])} of main memory"),
    ]
    return "".join(f"{name:8} {text}\n" for name, text in rows)


def open_model(folder: Path, config: RuntimeConfig, screen: Screen) -> tuple[Loaded, Runtime]:
    """Chooses device and number type and loads the model there; imports torch."""
    from xlcli.parallel import setup
    from xlcli.store.folder import load

    runtime = setup(config)
    model = load(folder, device=runtime.device)
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


def state_files(
    state_in: str | None, state_out: str | None, model: Loaded, runtime: Runtime
) -> tuple[tuple[State, Carry] | None, Save | None]:
    """What `--state-in` holds, and a function that writes `--state-out`."""
    from xlcli.store.states import load_state, save_state

    resume = load_state(Path(state_in), model=model, device=str(runtime.device)) if state_in is not None else None
    if state_out is None:
        return resume, None
    path = Path(state_out)

    def save(state: State, carry: Carry) -> None:
        save_state(path, state, carry, model=model)

    return resume, save
