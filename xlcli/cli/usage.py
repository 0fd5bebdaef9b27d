"""Remedies for usage errors of Typer, and the spelling of options in error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from xlcli.cli.options import choices, settings_of
from xlcli.cli.terminal import one_line
from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.config import Option


def explain(error: typer.TyperException, context: Any) -> ConfigError:
    """`ConfigError` with the sentence of a usage error of Typer, and a remedy."""
    text = one_line(error.format_message().replace("Value error, ", "").partition(" (Possible options")[0]).rstrip(".")
    text = text.replace("Input should be a valid boolean, unable to interpret input", "it should be true or false")
    remedy = context and _remedy(error, context)
    return ConfigError(f"{text[:1].lower()}{text[1:]}.", remedy or "See xlcli --help.")


def _remedy(error: Any, context: Any) -> str:
    """What to type instead."""
    command, path = context.command, context.command_path
    see = f"See {path} --help."
    words = [param.metavar.strip("[].") for param in command.params if param.param_type_name == "argument"]
    if (option := getattr(error, "option_name", None)) is not None:
        if param := next((param for param in command.params if option in param.opts), None):
            return example(str(context.info_name), param.name, option, choices_of(param)) or see
        if near := nearest(option, [name for param in command.params for name in param.opts]):
            return f"Did you mean {near}?"
        if context.parent is None and (after := next(filter(command.list_commands(context).count, context.obj), None)):
            return f"Options come after the command: xlcli {after} {option}."
        if words and not re.fullmatch("--[a-z][a-z-]*", option):  # rather a text than a mistyped option
            word = words[0].partition("|")[0]
            see += f" A {word} that begins with - comes last, after --: {path} -- {word}"
        return see
    param = getattr(error, "param", None)
    if param is not None and not hasattr(error, "param_type"):
        return _legal(error.message, context, param) or see
    if isinstance(command, TyperGroup):
        near = nearest(error.message.partition("'")[2].partition("'")[0], command.list_commands(context))
        return f"Did you mean {path} {near}?" if near else see
    return f"Type {' '.join([path, *words])}."


def _legal(message: str, context: Any, param: Any) -> str:
    """Sentence with a legal value of an option; empty if none is known."""
    spelled, legal = spelling(context, param), choices_of(param)
    if getattr(param, "is_flag", False):
        return f"Type {spelled}=1, or unset it."
    near = nearest(message.partition("'")[2].partition("'")[0].lower(), legal)
    if near:
        return f"Did you mean {_typed(spelled, near)}?"
    return example(str(context.info_name), param.name, spelled, legal)


def source(context: typer.Context, name: str) -> str:
    """Where the value of a parameter comes from: `COMMANDLINE`, `ENVIRONMENT` or `DEFAULT`."""
    origin = context.get_parameter_source(name)
    return "DEFAULT" if origin is None else origin.name


def typed_names(context: typer.Context) -> list[str]:
    """Names of the parameters on the command line, in their order in the help."""
    return [param.name for param in context.command.params if source(context, param.name) == "COMMANDLINE"]


def spelling(context: typer.Context, param: Any) -> str:
    """The option as it was given, `--mem-len` or `XLCLI_MEM_LEN`; of an argument, its command."""
    if param.param_type_name == "argument":
        return str(context.command_path)
    if source(context, param.name) == "ENVIRONMENT":
        return str(param.envvar or f"{context.auto_envvar_prefix}_{param.name.upper()}")
    return str(max(param.opts, key=len))


def variable(name: str, option: Option | None) -> str:
    """The environment variable of a setting, named like its option if it has one."""
    words = max(option.spellings, key=len).lstrip("-") if option is not None else name
    return "XLCLI_" + words.replace("-", "_").upper()


def example(command: str, name: str, spelled: str, legal: Sequence[str] = ()) -> str:
    """Sentence with a valid value of an option or variable of a command; empty without an example.

    `legal` are the values of a choice that is no setting.
    """
    setting = settings_of(command).get(name)
    if setting is not None:
        legal = choices(setting.field.annotation)
        if setting.option is not None and setting.option.example:
            legal = (setting.option.example, *legal)
    return f"Try {_typed(spelled, legal[0])}." if legal else ""


def choices_of(param: Any) -> tuple[str, ...]:
    """Values of an option or argument that is a choice; none of any other one."""
    return choices(param.type_descriptor.annotation)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word of which `word` is a part of at least four letters, or that is similar to it."""
    stem, stems = word.lstrip("-"), {name.lstrip("-"): name for name in known}
    longer = [name for name in stems if len(stem) >= 4 and stem in name]
    found = difflib.get_close_matches(stem, longer or stems, n=1, cutoff=0.0 if longer else 0.75)
    return next(map(stems.get, found), None)


def _typed(spelled: str, value: str) -> str:
    return f"{spelled}={value}" if spelled.isupper() else f"{spelled} {value}"
