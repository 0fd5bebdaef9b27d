"""Usage errors of Typer as one sentence and a remedy, and the spelling of options in error messages."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

from xlcli.cli.options import Unit
from xlcli.cli.terminal import one_line
from xlcli.errors import ConfigError


def explain(error: typer.TyperException, arguments: Sequence[str], program: TyperGroup) -> ConfigError:
    """`ConfigError` for a usage error of Typer."""
    context: Any = getattr(error, "ctx", None)
    param = getattr(error, "param", None)
    if context is not None and param is not None:
        return _bad_value(error.message, context, param)
    first_word = next((word for word in arguments if not word.startswith("-")), "")
    name = context.info_name if context is not None else first_word
    command = program.commands.get(name)
    see = f"See xlcli {name} --help." if command else "See xlcli --help."
    option = getattr(error, "option_name", None)
    if option is not None and command is None:
        after = next((word for word in arguments if option in _options(program.commands.get(word))), None)
        remedy = f"Write it after the command: xlcli {after} {option}." if after else see
        return ConfigError(f"there is no option {one_line(option)}.", remedy)
    if option is not None and hasattr(error, "possibilities"):
        near = nearest(option, _options(command))
        return ConfigError(f"there is no option {one_line(option)}.", f"Did you mean {near}?" if near else see)
    if option is not None and command is not None:
        param = next(param for param in command.params if option in param.opts)
        problem = "takes no value" if getattr(param, "is_flag", False) else "needs a value"
        return ConfigError(f"{option} {problem}.", _try(option, _example(command.callback, param.name)) or see)
    if command is None and first_word:
        near = nearest(first_word, program.commands)
        remedy = f"Did you mean xlcli {near}?" if near else see
        return ConfigError(f"there is no command '{one_line(first_word)}'.", remedy)
    return ConfigError(one_line(error.format_message()), see)


def source(context: typer.Context, name: str) -> str:
    """Where the value of a parameter comes from: `COMMANDLINE`, `ENVIRONMENT` or `DEFAULT`."""
    origin = context.get_parameter_source(name)
    return origin.name if origin is not None else "DEFAULT"


def spelling(context: typer.Context, param: Any) -> str:
    """The option as it was given: `--mem-len` or `XLCLI_MEM_LEN`."""
    if source(context, param.name) == "ENVIRONMENT":
        return str(param.envvar or f"{context.auto_envvar_prefix}_{param.name.upper()}")
    return str(max(param.opts, key=len))


def suggestion(context: typer.Context, param: Any) -> str:
    """Sentence with a valid value of the option; empty without an example."""
    return _try(spelling(context, param), _example(context.command.callback, param.name))


def choices(function: Any, name: str) -> tuple[str, ...]:
    """Values of an option whose type is a `Literal`; none for any other option."""
    kind, *_ = _declaration(function, name) or (None,)
    return tuple(choice for part in get_args(kind) for choice in get_args(part) if isinstance(choice, str))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most similar to `word`."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _bad_value(message: str, context: Any, param: Any) -> ConfigError:
    """`ConfigError` for a value that the parser or type of an option refuses."""
    spelled = spelling(context, param)
    if param.is_flag:
        value = one_line(os.environ.get(spelled, ""))
        return ConfigError(f"{spelled} is '{value}', neither 1 nor 0.", f"Type {spelled}=1, or unset it.")
    reason = message.removeprefix("Value error, ")
    if legal := choices(context.command.callback, param.name):
        near = nearest(reason.partition("'")[2].partition("'")[0].lower(), legal)
        remedy = f"Did you mean {_typed(spelled, near)}?" if near else f"Try {_typed(spelled, legal[0])}."
        return ConfigError(f"{spelled} {reason}", remedy)
    return ConfigError(f"{spelled} {reason}", suggestion(context, param))


def _options(command: Any) -> list[str]:
    return [] if command is None else [name for param in command.params for name in param.opts]


def _typed(spelled: str, value: str) -> str:
    return f"{spelled} {value}" if spelled.startswith("-") else f"{spelled}={value}"


def _try(spelled: str, example: str) -> str:
    return f"Try {_typed(spelled, example)}." if example else ""


def _declaration(function: Any, name: str) -> tuple[Any, ...]:
    """The type of a parameter of a command's function, then its `typer.Option`."""
    return get_args(get_type_hints(function, include_extras=True).get(name))


def _example(function: Any, name: str) -> str:
    """A valid text for the option."""
    _, *details = _declaration(function, name) or (None,)
    units = [detail.parser for detail in details if isinstance(detail.parser, Unit)]
    return units[0].example if units else (choices(function, name) or ("",))[0]
