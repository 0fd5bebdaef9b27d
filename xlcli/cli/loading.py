"""Models, states and texts of a command: found and checked first, then loaded, which imports torch."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xlcli.cli.command import Call
from xlcli.cli.quantities import approximate_count, compact_number, format_bytes
from xlcli.cli.render import Screen
from xlcli.cli.score_report import describe_context, rounding
from xlcli.cli.usage import nearest
from xlcli.config import BenchConfig, Config, EvalConfig, InferenceConfig, RuntimeConfig
from xlcli.errors import CheckpointError, ConfigError, DataError, InvalidSettingError, StateError, counted
from xlcli.files import cache_folder
from xlcli.machine import available_bytes, require_memory
from xlcli.store.discover import choose, find, is_state_file, saved_model, summarize
from xlcli.store.layout import SMALLEST_STORED, SavedConfig, is_model, read_config
from xlcli.store.lock import lock_state

if TYPE_CHECKING:
    from xlcli.inference import SaveState
    from xlcli.runtime import Runtime
    from xlcli.store.folder import LoadedModel
    from xlcli.store.state_files import SessionState

_PROGRAM_BYTES = 300 * 2**20  # RAM in bytes of the interpreter with torch imported
_CACHE_BYTES = 130 * 2**20  # RAM in bytes that a context cache of any size needs, most of it for compiled code
_INDEXED_BYTES = 280  # per token of a context cache, in its index: at most 35 numbers of 8 bytes
_SAVED_BYTES = 8  # per token of a context cache, in a state file
_FLOAT32_BYTES = 4
_ADAPTATION_BYTES = 2 * _FLOAT32_BYTES  # per weight, for adapted weights and gradients; 6 were measured
_WIDENING_BYTES = 2 * _FLOAT32_BYTES  # per weight, for rounded weights, which all become float32; 8 to 9 were measured
_FEW_SEQUENCES = 4
_SMALL_MODEL = 64_000_000
"""Largest number of sequences, and of weights in matrices, that a CPU continues token by token faster than a GPU.

A GPU takes 5 µs for each of about 40 operators in a layer, for one sequence or hundreds. (Guesses from counts.)"""


class StateFiles(NamedTuple):
    """The file of the state to continue, and the file to save the new one in; None: there is none."""

    before: Path | None
    after: Path | None


NO_STATE = StateFiles(None, None)


def state_files(call: Call, state: str | None, state_in: str | None, state_out: str | None) -> StateFiles:
    """Returns the files of `--state`, `--state-in` and `--state-out`; `--state` is both files, if it exists.

    `ConfigError` if `--state` is given beside another one, `StateError` if there is no state to continue.
    """
    if state is not None and state_in is not None:
        remedy = f"Give one of them. To keep {state_in} as it is, continue a copy: cp {state_in} {state}"
        raise ConfigError(call.conflict("state", "state_in").message, remedy)
    if state is not None and state_out is not None:
        raise call.conflict("state", "state_out")
    before = None if state_in is None else Path(state_in)
    after = None if state_out is None else Path(state_out)
    if state is not None:
        after = Path(state)
        before = after if after.exists() else None
    if before is None or is_state_file(before):
        return StateFiles(before, after)
    problem = "is damaged or not a state file"
    remedy = "Make one with --state FILE, or start without it."
    if not before.exists():
        problem = "does not exist"
    elif before.stat().st_size == 0:
        problem = "is empty"
        remedy = "Restore it, or remove it to begin a new one."
    raise StateError(f"state {before} {problem}.", remedy)


def find_model(
    call: Call, names: Sequence[str] | None, settings: InferenceConfig, state: StateFiles = NO_STATE
) -> Path:
    """The folder of the only model, as `find_models`; `ConfigError` if `--model` names several."""
    folders = find_models(call, names, settings, state)
    if len(folders) > 1:
        raise ConfigError(f"{call.command_path} uses one model, not {len(folders)}.", "Give one -m NAME.")
    return folders[0]


def find_models(
    call: Call, names: Sequence[str] | None, settings: InferenceConfig, state: StateFiles = NO_STATE
) -> list[Path]:
    """Folders of the models that `--model` names, else of the one that made the saved state, else of a chosen one.

    A choice is reported. `ConfigError` if a setting does not apply to one of these models.
    """
    folders = [choose(name)[0] for name in named_models(call, names)]
    if not folders and state.before is not None:
        folders = [saved_model(state.before)]
        call.screen.say(f"model {folders[0].name} (of {state.before})")
    elif not folders:
        folder, reason, passed_over = choose(None)
        for notice in passed_over:
            call.screen.say(notice, "warning")
        if reason is not None:
            call.screen.say(f"model {folder.name} ({reason}); choose another with -m NAME")
        folders = [folder]
    for folder in folders:
        with call.naming_settings():
            check_settings(call.name, settings, read_config(folder), f"model {folder.name}")
    return folders


def named_models(call: Call, names: Sequence[str] | None) -> Sequence[str]:
    """Names that `--model` gives; not the one of the environment variable, which `choose` reads."""
    if names is None or not call.is_typed("model"):
        return ()
    return names


def check_settings(section: str, settings: InferenceConfig, config: Config | SavedConfig, name: str) -> None:
    """`InvalidSettingError` if a setting of this section does not apply to the model."""
    variants: Sequence[InferenceConfig] = [settings]
    if isinstance(settings, EvalConfig | BenchConfig):
        variants = settings.sweep
    try:
        settings.check_model(config.model)
        for variant in variants:
            variant.reading(config.model, config.train.reading)  # raises if they contradict each other
    except InvalidSettingError as error:
        reason = f"does not apply to {name}; it {error.reason}"
        raise InvalidSettingError(f"{section}.{error.key}", reason, error.remedy) from None


def print_plan(
    folder: Path, settings: InferenceConfig, screen: Screen, *, batch_size: int, action: str, is_endless: bool = False
) -> None:
    """Prints the plan of a command: model size, RAM, and disk of a state; `ResourceError` if RAM is too small."""
    config = read_config(folder)
    model = settings.shape(config.model)
    reading = settings.reading(config.model, config.train.reading)
    summary = summarize(folder)
    parameters = summary.parameters or 0
    weights_bytes = _FLOAT32_BYTES * parameters
    if parameters >= SMALLEST_STORED:
        weights_bytes = min(weights_bytes, summary.bytes)
    saved_bytes = model.memory_bytes(reading.longest, reading.memory_dtype)  # of one text
    state_bytes = batch_size * saved_bytes
    needed_bytes = _PROGRAM_BYTES + weights_bytes + 2 * state_bytes  # a call makes a new state of the one before
    cache_tokens = settings.learning.context_cache
    if cache_tokens is not None:
        needed_bytes += _CACHE_BYTES + _INDEXED_BYTES * cache_tokens
        saved_bytes += _SAVED_BYTES * cache_tokens
    if settings.learning.adapt:
        needed_bytes += _ADAPTATION_BYTES * parameters
        saved_bytes += _FLOAT32_BYTES * parameters
        is_rounded = weights_bytes < _FLOAT32_BYTES * parameters
        if is_rounded:
            needed_bytes += _WIDENING_BYTES * parameters
    available = available_bytes()
    if screen.json:
        plan = {"model": str(folder), "does": action, "parameters": parameters, "mem_len": reading.mem_len}
        plan |= {"batch_size": batch_size, "weights_bytes": weights_bytes, "state_bytes": state_bytes}
        screen.object(plan | {"saved_bytes": saved_bytes, "needed_bytes": needed_bytes, "available_bytes": available})
    else:
        unit = "window" if reading.stride else "text"
        texts = f"{counted(batch_size, unit)} at a time"
        context = describe_context(model, reading.mem_len, reading.segment_len, reading.stride)
        screen.report(
            f"model    {folder} ({compact_number(parameters)} parameters, {format_bytes(weights_bytes)})\n"
            f"does     {action}\n"
            f"context  {context}\n"
            f"memory   {texts}: {format_bytes(state_bytes)}\n"
            f"needs    about {format_bytes(needed_bytes)} of RAM; {format_bytes(available)} available\n"
        )
        if not isinstance(settings, EvalConfig):
            screen.report(f"state    up to {format_bytes(saved_bytes)} on disk, if it is saved\n")
    # Only a text without end surely fills the memory.
    least_bytes = needed_bytes if is_endless else _PROGRAM_BYTES + weights_bytes
    require_memory(f"model {folder.name}", least_bytes, "Use a smaller --mem-len or model.")


def check_texts(names: Iterable[str], command: str) -> list[str]:
    """The files among these texts; refuses a missing one or a model, before torch is loaded.

    Reading a text makes all other checks. `command` is a command that uses a model, with `{}` in place of its name.
    """
    files = [name for name in names if name != "-"]
    for name in files:
        if _is_model(name):
            raise DataError(f"{name} is a model, not a text.", f"Type {command.format(shlex.quote(name))}.")
        if not os.path.lexists(name):
            raise DataError(f"there is no file {name}.", _similar_file(Path(name)))
    return files


def _is_model(name: str) -> bool:
    """True if a text is the folder of a model, or there is no such file but a model of this name."""
    if os.path.lexists(name):
        return is_model(Path(name))
    try:
        find(name)
    except CheckpointError:
        return False
    return True


def _similar_file(path: Path) -> str:
    """Remedy for a file that does not exist."""
    with suppress(OSError):
        near = nearest(path.name, [other.name for other in path.parent.iterdir()])
        if near:
            return f"Did you mean {path.parent / near}?"
    return "Check the path."


def note_unread_pipe(screen: Screen, argument: str) -> None:
    """Says that standard input is not read, if it is a pipe; `argument` is what `-` stands in place of."""
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            screen.say(f"standard input is not read; give - as {argument} to read it")


def load_model(
    folder: Path, settings: InferenceConfig, config: RuntimeConfig, screen: Screen, *, n_sequences: int | None = None
) -> tuple[LoadedModel, Runtime]:
    """Loads a model on the device that `config` names, and reports it; returns the runtime, too. Imports torch.

    `n_sequences` are read token by token; None: texts are read in long calls. A small model that continues few texts
    takes the CPU in place of a GPU that the user did not ask for.
    """
    cache_folder(screen.say)  # made now, so that it says at once if it is only a temporary folder
    with screen.waiting("loading the model"):
        from xlcli.model.decoder import may_decode
        from xlcli.runtime import make_runtime
        from xlcli.store.folder import load

        runtime = make_runtime(config)
        takes_cpu = False
        if _may_prefer_cpu(folder, config, runtime, n_sequences):
            model = load(folder, settings)
            takes_cpu = may_decode(model.network)
        if takes_cpu:
            runtime = make_runtime(config.model_copy(update={"device": "cpu"}))
        else:
            model = load(folder, settings, device=runtime.device)
    if takes_cpu:
        screen.say("using the CPU, which is faster for a few texts at once; --device cuda uses the GPU")
    _report_model(model, folder, runtime, settings, screen)
    return model, runtime


def _may_prefer_cpu(folder: Path, config: RuntimeConfig, runtime: Runtime, n_sequences: int | None) -> bool:
    """True if a CPU may continue these sequences faster than the GPU, which the user did not ask for."""
    if config.device != "auto" or runtime.device.type == "cpu" or runtime.dtype_name != "float32":
        return False
    if n_sequences is None or n_sequences > _FEW_SEQUENCES:
        return False
    return read_config(folder).model.n_matrix_weights <= _SMALL_MODEL


def _report_model(
    model: LoadedModel, folder: Path, runtime: Runtime, settings: InferenceConfig, screen: Screen
) -> None:
    """Prints warnings of a model, what was loaded (--verbose), and a warning of a memory length without effect."""
    for warning in model.warnings:
        screen.say(warning, "warning")
    screen.say(f"model {model.name}: {folder}", "detail")
    reading = settings.reading(model.config.model, model.config.train.reading)
    dtypes = runtime.dtype_name + rounding(model.weight_dtype, reading.memory_dtype)
    screen.say(f"{runtime.device} {dtypes}, {approximate_count(runtime.threads, 'thread')}", "detail")
    mem_lens = [settings.mem_len or 0]  # without one it is as in training
    if isinstance(settings, EvalConfig):
        mem_lens += settings.sweep_mem_len
    warning_of_idle_memory = model.config.model.mem_len_warning(max(mem_lens))
    if warning_of_idle_memory is not None:
        screen.say(warning_of_idle_memory, "warning")


class OpenedModel(NamedTuple):
    """A loaded model, the session to continue, and the function that saves one; None: there is none."""

    model: LoadedModel
    runtime: Runtime
    resume: SessionState | None
    save: SaveState | None


def open_model(
    call: Call,
    folder: Path,
    settings: InferenceConfig,
    config: RuntimeConfig,
    state: StateFiles,
    log: Path | None = None,
    *,
    n_sequences: int = 1,
) -> OpenedModel:
    """`load_model` of texts that are read token by token, with the saved session.

    The file to save in is locked until the command ends. `log` is the file that is followed. `BusyError` if another
    process saves in the same file, `StateError` if the state belongs to another log, whose place in it would be lost.
    """
    if state.after is not None:
        call.with_resource(lock_state(state.after.resolve()))
    model, runtime = load_model(folder, settings, config, call.screen, n_sequences=n_sequences)
    from xlcli.store.state_files import load_state, save_state

    resume = None
    if state.before is not None:
        resume = load_state(state.before, model=model, device=str(runtime.device))
        _check_log(state, resume, log)
        tokens = approximate_count(resume.model_state.seen, "token")
        memory_dtype = rounding("float32", resume.model_state.memory_dtype)
        # Only with `--state` it depends on an earlier command whether a state is continued.
        level = "info" if state.before == state.after else "detail"
        call.screen.say(f"state {state.before}: {tokens} read{memory_dtype}", level)
    save: Any = None
    if state.after is not None:
        save = partial(save_state, state.after, model=model)
    return OpenedModel(model, runtime, resume, save)


def _check_log(state: StateFiles, resume: SessionState, log: Path | None) -> None:
    """`StateError` if a state of another log would be replaced."""
    assert state.before is not None
    is_replaced = state.after is not None and state.before.resolve() == state.after.resolve()
    if resume.source is None or not is_replaced:
        return
    log_of_state = Path(os.fsdecode(resume.source.path))
    if log_of_state != log:
        remedy = f"Use it with xlcli stream {shlex.quote(str(log_of_state))} --follow, or choose another --state."
        raise StateError(f"{state.before} belongs to the log {log_of_state}.", remedy)
