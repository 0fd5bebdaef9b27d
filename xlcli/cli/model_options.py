"""What eval, generate and stream share: find the model, say what it will cost, load it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlcli.cli import report
from xlcli.cli.options import Values
from xlcli.cli.render import Screen
from xlcli.config import (
    AttentionConfig,
    EvalConfig,
    InferenceConfig,
    LinearAttentionConfig,
    LocalAttentionConfig,
    LSHAttentionConfig,
    ModelConfig,
    RuntimeConfig,
    UniversalStackConfig,
)
from xlcli.errors import ConfigError, StateError
from xlcli.store.discover import find, summarize
from xlcli.store.layout import read_config

if TYPE_CHECKING:
    from xlcli.inference import SaveState
    from xlcli.runtime import Runtime
    from xlcli.store.folder import LoadedModel
    from xlcli.store.layout import SavedConfig
    from xlcli.store.state_files import SessionState

_PROGRAM_BYTES = 300 * 2**20
"""Memory of the interpreter with torch loaded and nothing computed."""


def locate(values: Values, options: InferenceConfig) -> Path:
    """Folder of the model that is meant.

    Raises:
        ConfigError: It was asked to be read in a way that the model cannot be.
    """
    folder = find(values.get("model"))
    model = read_config(folder).model
    universal = isinstance(model.stack, UniversalStackConfig)
    hashed = any(isinstance(layer, LSHAttentionConfig) for layer in model.attentions)
    wanted = {
        "n-steps": (options.n_steps, universal, "is not universal and applies its blocks once"),
        "n-hashes": (options.n_hashes, hashed, "has no hashed attention"),
    }
    if isinstance(options, EvalConfig) and options.recall:
        halts = isinstance(model.stack, UniversalStackConfig) and model.stack.act
        why = "lets tokens halt" if hashed else "has no hashed attention"
        wanted["recall"] = (True, hashed and not halts, why)
    for option, (value, possible, why) in wanted.items():
        if value is not None and not possible:
            given = values.given(option)
            name = given.source if given else f"{values.command.name}.{option.replace('-', '_')}"
            said = name if value is True else f"{name} {value}"
            raise ConfigError(f"model {folder.name} {why}: {said} means nothing to it.", f"Leave out {name}.")
    return folder


def explain_memory(model: ModelConfig, mem_lens: Iterable[int | None], screen: Screen) -> None:
    """Says so when a memory length that was asked for makes no difference to this model."""
    longest = max((length for length in mem_lens if length is not None), default=0)
    kinds = set(model.attentions)
    if longest and all(isinstance(layer, LinearAttentionConfig) for layer in kinds):
        screen.say("linear attention remembers everything it has read, whatever the memory length, unless 0", "warning")
    elif longest > (sees := model.remembered(longest)) and all(
        isinstance(layer, LocalAttentionConfig) for layer in kinds
    ):
        screen.say(f"local attention sees {sees} tokens back: a longer memory changes nothing", "warning")


def dry_run(folder: Path, options: InferenceConfig, *, batch_size: int, what: str, values: Values) -> str:
    """The plan of a command that uses a model: its size and the memory it needs, without loading it."""
    config = read_config(folder)
    summary = summarize(folder)
    length = config.train.mem_len if options.mem_len is None else options.mem_len
    parameters = summary.parameters or 0
    remembered = length or config.train.segment_len
    state = 4 * batch_size * config.model.memory_floats(remembered, options.n_steps, options.n_hashes)
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
        ("memory", f"{_remembered(config, length, options)}, {_at_a_time(batch_size)}: {report.size(state)}"),
        ("needs", f"about {report.size(plan['memory_bytes'])} of main memory"),
    ]
    return "".join(f"{name:8} {text}\n" for name, text in rows)


def _remembered(config: SavedConfig, length: int, options: InferenceConfig) -> str:
    """What each layer remembers, and how many do."""
    model = config.model
    steps = (
        f" at each of {options.n_steps or model.stack.n_steps} steps"
        if isinstance(model.stack, UniversalStackConfig)
        else ""
    )
    parts = []
    for kind, n in Counter(model.attentions).items():
        what = _remembered_by(kind, length, config.train.segment_len, options.n_hashes)
        if n == model.n_layers:
            return f"{what} in {f'each of {n} layers' if n > 1 else 'one layer'}{steps}"
        parts.append(f"{what} in {n} layer{'s' if n > 1 else ''}")
    return f"{', '.join(parts)}{steps}"


def _remembered_by(attention: AttentionConfig, length: int, segment_len: int, n_hashes: int | None) -> str:
    segment = f"a segment of {segment_len} tokens"
    match attention:
        case LinearAttentionConfig():
            return f"sums over {'everything read' if length else segment}"
        case LSHAttentionConfig() as hashed:
            n_buckets = math.prod(hashed.factors)
            return f"the last {hashed.bucket_size} tokens of {n_hashes or hashed.n_hashes} x {n_buckets} buckets"
        case LocalAttentionConfig(window=window):
            length = min(length, window)
    return f"{length} tokens" if length else segment


def _at_a_time(batch_size: int) -> str:
    return f"{batch_size} texts at a time" if batch_size > 1 else "one text at a time"


def open_model(folder: Path, config: RuntimeConfig, screen: Screen) -> tuple[LoadedModel, Runtime]:
    """Chooses device and number type and loads the model there; imports torch."""
    from xlcli.runtime import make_runtime
    from xlcli.store.folder import load

    runtime = make_runtime(config)
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
