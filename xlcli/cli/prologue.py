"""First steps of every command: configuration, screen, model, dry run, loading."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from xlcli.cli import report
from xlcli.cli.outputs import check_outputs
from xlcli.cli.render import Screen
from xlcli.cli.settings import name_option_in_errors, print_config, user_settings
from xlcli.cli.usage import nearest, source, spelling
from xlcli.config import BenchConfig, Config, EvalConfig, InferenceConfig, RuntimeConfig, make
from xlcli.errors import CheckpointError, ConfigError, DataError, InvalidSettingError, StateError
from xlcli.files import cache_folder
from xlcli.machine import available_bytes, require_memory
from xlcli.ranks import SINGLE, Ranks, environment
from xlcli.store.discover import choose, find, is_state_file, saved_model, summarize
from xlcli.store.layout import SavedConfig, is_model, read_config, scored_text
from xlcli.store.lock import lock_state

if TYPE_CHECKING:
    from xlcli.inference import SaveState
    from xlcli.runtime import Runtime
    from xlcli.store.folder import LoadedModel
    from xlcli.store.state_files import SessionState

_PROGRAM_BYTES = 300 * 2**20
"""RAM in bytes of the interpreter with torch imported."""


Rules = Mapping[str, Sequence[str]]
"""Parameters and settings by the name of the one that needs or excludes them. One with an only value is `emit=tokens`,
alternatives are `state|state_out`."""


def begin(context: typer.Context, needs: Rules = {}, excludes: Rules = {}) -> tuple[Config, Screen]:  # noqa: B006
    """The configuration of a command that uses a model, checked by `check_together`, and the screen.

    `--print-config` ends here.
    """
    with name_option_in_errors(context):
        config = make(user_settings(context))
    screen = open_screen(context)
    show_config(context, config, screen)
    settings = getattr(config, str(context.info_name), RuntimeConfig())
    check_together(context, dict.fromkeys(dict(settings)) | settings.model_dump(exclude_defaults=True), needs, excludes)
    return config, screen


def show_config(context: typer.Context, config: Config, screen: Screen, note: str = "") -> None:
    """Prints the configuration after a note and ends, if `--print-config` asks for it."""
    if context.params["print_config"]:
        text = print_config(config, context, as_json=screen.json)
        screen.print(text if screen.json else note + text)
        raise typer.Exit


def check_together(
    context: typer.Context,
    settings: Mapping[str, Any] = {},
    needs: Rules = {},  # noqa: B006
    excludes: Rules = {},  # noqa: B006
) -> None:
    """`ConfigError` for an option without one that it needs, or beside one that it excludes.

    `settings` come before parameters of the same name; those with default values are None.
    """
    params = {param.name: param for param in context.command.params}
    values = {**context.params, **settings}

    def is_given(rule: str) -> bool:
        name, _, only = rule.partition("=")
        value = values[name]
        return value == only or not (only or value is None or value is False or value in ((), []))

    def typed(name: str) -> str:
        if name not in params:
            return f"{context.info_name}.{name}"
        if params[name].param_type_name == "argument":
            return str(params[name].metavar).partition("|")[0].strip("[]")
        return spelling(context, params[name])

    def example(rule: str) -> str:
        name, _, only = rule.partition("|")[0].partition("=")
        return f"{typed(name)} {only or params[name].metavar or ''}".strip()

    for name, rules in needs.items():
        is_alone = not all(any(map(is_given, rule.split("|"))) for rule in rules)
        if is_alone and source(context, name) == "COMMANDLINE":
            wanted = " ".join(map(example, rules))
            raise ConfigError(f"{typed(name)} needs {wanted}.", f"Add {wanted}.")
    for name, others in excludes.items():
        if is_given(name) and (other := next(filter(is_given, others), None)):
            raise ConfigError(f"{typed(name)} and {typed(other)} cannot be combined.", "Give one of them.")


def open_screen(context: typer.Context) -> Screen:
    """Screen with the output options of a command."""
    names = ("json", "quiet", "verbose", "color")
    given = {name: context.params[name] for name in names if name in context.params}
    return Screen(**given, hidden=not environment().is_first)


def find_model(context: typer.Context, settings: InferenceConfig, screen: Screen) -> Path:
    """The folder of the only model, as `find_models`; `ConfigError` if `--model` names several."""
    if (n := len(named_models(context))) > 1:
        raise ConfigError(f"{context.command_path} uses one model, not {n}.", "Give one -m NAME.")
    return find_models(context, settings, screen)[0]


def find_models(context: typer.Context, settings: InferenceConfig, screen: Screen) -> list[Path]:
    """Folders of the models that `--model` names, else of the one that made the saved state, else of a chosen one.

    A choice is reported.

    Raises:
        ConfigError: A setting does not apply to one of these models.
        StateError: There is no such state.
    """
    folders, names = [], named_models(context)
    for name in names or (None,):
        if name is None and (state := state_files(context)[0]) is not None:
            folder = saved_model(state)
            screen.say(f"model {folder.name} (of {state})")
        else:
            folder, reason, passed_over = choose(name)
            for notice in passed_over:
                screen.say(notice, "warning")
            if reason is not None:
                screen.say(f"model {folder.name} ({reason}); choose another with -m NAME")
        with name_option_in_errors(context):
            check_settings(str(context.info_name), settings, read_config(folder), f"model {folder.name}")
        folders.append(folder)
    return folders


def named_models(context: typer.Context) -> list[str]:
    """Names that `--model` gives; not the one of the environment variable, which `choose` reads."""
    return [] if source(context, "model") == "ENVIRONMENT" else context.params["model"] or []


def check_settings(section: str, settings: InferenceConfig, config: Config | SavedConfig, name: str) -> None:
    """`InvalidSettingError` if a setting of this section does not apply to the model."""
    try:
        settings.check_model(config.model)
        for each in settings.sweep if isinstance(settings, EvalConfig | BenchConfig) else (settings,):
            each.reading(config.model, config.train.reading)
    except InvalidSettingError as error:
        reason = f"does not apply to {name}; it {error.reason}"
        raise InvalidSettingError(f"{section}.{error.key}", reason, error.remedy) from None


def print_plan(
    folder: Path, settings: InferenceConfig, screen: Screen, *, batch_size: int, action: str, is_endless: bool = False
) -> None:
    """Prints the plan of a command that uses a model: model size and RAM needed. Nothing is loaded.

    `batch_size` texts are read at a time; if the text `is_endless`, it fills the memory.

    Raises:
        ResourceError: The machine has too little RAM.
    """
    config = read_config(folder)
    model = settings.shape(config.model)
    reading = settings.reading(config.model, config.train.reading)
    parameters = summarize(folder).parameters or 0
    weights = 4 * parameters
    state = batch_size * model.memory_bytes(reading.longest, reading.memory_dtype)
    plan: dict[str, Any] = {
        "model": str(folder),
        "does": action,
        "parameters": parameters,
        "mem_len": reading.mem_len,
        "batch_size": batch_size,
        "weights_bytes": weights,
        "state_bytes": state,
        "needed_bytes": _PROGRAM_BYTES + weights + 2 * state,
        "available_bytes": available_bytes(),
    }
    if screen.json:
        screen.object(plan)
    else:
        texts = {1: "one text at a time"}.get(batch_size, f"{batch_size} texts at a time")
        whole, available = report.size(plan["needed_bytes"]), report.size(plan["available_bytes"])
        rows = [
            ("model", f"{folder} ({report.amount(parameters)} parameters, {report.size(weights)})"),
            ("does", action),
            ("memory", f"{model.describe_memory(reading.mem_len, reading.segment_len)}, {texts}: {report.size(state)}"),
            ("needs", f"about {whole} of RAM; {available} available"),
        ]
        screen.report("".join(f"{name:8} {text}\n" for name, text in rows))
    needed = plan["needed_bytes"] if is_endless else _PROGRAM_BYTES + weights
    require_memory(f"model {folder.name}", needed, "Use a smaller --mem-len or model.")


def load_model(
    folder: Path, settings: InferenceConfig, config: RuntimeConfig, screen: Screen, ranks: Ranks = SINGLE
) -> tuple[LoadedModel, Runtime]:
    """Runtime of the settings, and the model loaded on its device; warns of what has no effect. Imports torch."""
    cache_folder(screen.say)
    with screen.waiting("loading the model"):
        from xlcli.runtime import make_runtime
        from xlcli.store.folder import load

        runtime = make_runtime(config, ranks=ranks)
        model = load(folder, settings, device=runtime.device)
    for warning in model.warnings:
        screen.say(warning, "warning")
    score = model.record.get("bits_per_byte")
    scored = scored_text(model.record)
    about = f", {score:.3f} bits per byte of the {report.scored(scored)}" if isinstance(score, float) and scored else ""
    screen.say(f"model {model.name}: {folder}{about}", "detail")
    reading = settings.reading(model.config.model, model.config.train.reading)
    dtypes = runtime.dtype_name + report.rounding(model.weight_dtype, reading.memory_dtype)
    screen.say(f"{runtime.device} {dtypes}, {report.counted(runtime.threads, 'thread')}", "detail")
    mem_lens = settings.sweep_mem_len if isinstance(settings, EvalConfig) else ()
    if idle := model.config.model.mem_len_warning(max((settings.mem_len or 0, *mem_lens))):
        screen.say(idle, "warning")
    return model, runtime


def check_texts(names: Iterable[str], command: str) -> list[str]:
    """The files among these texts; refuses a missing one or a model, before torch is loaded.

    Reading a text makes all other checks. `command` is a command that uses a model, with `{}` in place of its name.
    """
    files = [name for name in names if name != "-"]
    for path, name in zip(map(Path, files), files, strict=True):
        exists = os.path.lexists(name)
        with suppress(CheckpointError):
            if (exists and is_model(path)) or (not exists and find(name)):
                raise DataError(f"{name} is a model, not a text.", f"Type {command.format(shlex.quote(name))}.")
        if not exists:
            with suppress(OSError):
                if near := nearest(path.name, [other.name for other in path.parent.iterdir()]):
                    raise DataError(f"there is no file {name}.", f"Did you mean {path.parent / near}?")
            raise DataError(f"there is no file {name}.", "Check the path.")
    return files


def note_unread_pipe(screen: Screen, argument: str) -> None:
    """Says that standard input is not read, if it is a pipe; `argument` is what `-` stands in place of."""
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            screen.say(f"standard input is not read; give - as {argument} to read it")


def state_files(context: typer.Context) -> tuple[Path | None, Path | None]:
    """Files of the state to continue and of the state to save, if any; `--state` is both if it exists and has content.

    Raises:
        StateError: There is no state to continue.
    """
    names = map(context.params.get, ("state", "state_in", "state_out"))
    state, before, after = (None if name is None else Path(name) for name in names)
    if state is not None:
        before, after = state if state.exists() and state.stat().st_size else None, state
    if before is not None and not is_state_file(before):
        problem = "is damaged or not a state file" if before.exists() else "does not exist"
        raise StateError(f"state {before} {problem}.", "Make one with --state FILE, or start without it.")
    return before, after


def check_files(context: typer.Context, inputs: Iterable[str | Path]) -> None:
    """Refuses outputs that cannot be written, before a model is loaded; `inputs` are the files and folders read."""
    params, own = context.params, inspect.signature(context.command.callback)  # type: ignore[arg-type]
    outputs = [
        (f"--{name.replace('_', '-')}", params[name], head)
        for name, param in own.parameters.items()
        for head in get_args(param.annotation)
        if isinstance(head, re.Pattern) and params[name] is not None
    ]
    check_outputs(outputs, map(Path, [*inputs, *filter(None, [params.get("config_file")])]), force=params["force"])


def open_model(
    context: typer.Context,
    folder: Path,
    settings: InferenceConfig,
    config: RuntimeConfig,
    screen: Screen,
    log: Path | None = None,
) -> tuple[LoadedModel, Runtime, SessionState | None, SaveState | None]:
    """`load_model`, the saved session, and a function that saves one, None if there is no file for it.

    The file to save in is locked until the command ends. `log` is the file that is followed.

    Raises:
        BusyError: Another process saves in that file.
        StateError: The state belongs to another log, whose place in it would be lost.
    """
    state_in, state_out = state_files(context)
    if state_out is not None:
        context.with_resource(lock_state(state_out.resolve()))
    model, runtime = load_model(folder, settings, config, screen)
    from xlcli.store.state_files import load_state, save_state

    resume = None
    if state_in is not None:
        resume = load_state(state_in, model=model, device=str(runtime.device))
        own = resume.source and Path(os.fsdecode(resume.source.path))
        is_replaced = state_out is not None and state_in.resolve() == state_out.resolve()
        if own not in (None, log) and is_replaced:
            remedy = f"Use it with xlcli stream {shlex.quote(str(own))} --follow, or choose another --state."
            raise StateError(f"{state_in} belongs to the log {own}.", remedy)
        state = resume.model_state
        rounded = report.rounding("float32", state.memory_dtype)
        read = f"{report.counted(state.seen, 'token')} read{rounded}"
        screen.say(f"state {state_in}: {read}", "info" if state_in == state_out else "detail")
    return model, runtime, resume, None if state_out is None else partial(save_state, state_out, model=model)
