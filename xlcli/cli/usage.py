"""Usage errors of Typer as one sentence and a remedy, and the spelling of options in error messages."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import typer
from typer.core import TyperGroup

from xlcli.cli.options import choices, settings_of
from xlcli.cli.terminal import one_line
from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.config import Option


def explain(error: typer.TyperException, arguments: Sequence[str]) -> ConfigError:
    """`ConfigError` for a usage error of Typer."""
    context: Any = getattr(error, "ctx", None)
    if context is None:
        return ConfigError(one_line(error.format_message()), "See xlcli --help.")
    command = context.command
    see = f"See {context.command_path} --help."
    param = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if param is not None and hasattr(error, "param_type"):
        return _wrong_words(context)
    if param is not None:
        return _bad_value(error.message, context, param)
    if option is not None and hasattr(error, "possibilities"):
        return _no_option(option, context, arguments)
    if option is not None:
        param = next(param for param in command.params if option in param.opts)
        problem = "takes no value" if getattr(param, "is_flag", False) else "needs a value"
        return ConfigError(f"{option} {problem}.", example(context, param.name, option) or see)
    if isinstance(command, TyperGroup):
        words = [word for word in arguments if not word.startswith("-")]
        word = words[context.command_path.count(" ")]
        near = nearest(word, command.commands)
        remedy = f"Did you mean {context.command_path} {near}?" if near else see
        return ConfigError(f"there is no '{context.command_path} {one_line(word)}'.", remedy)
    return _wrong_words(context)


def source(context: typer.Context, name: str) -> str:
    """Where the value of a parameter comes from: `COMMANDLINE`, `ENVIRONMENT` or `DEFAULT`."""
    origin = context.get_parameter_source(name)
    return origin.name if origin is not None else "DEFAULT"


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


def example(context: typer.Context, name: str, spelled: str) -> str:
    """Sentence with a valid value of an option or variable; empty without an example."""
    setting = settings_of(context.info_name).get(name)
    found = setting.option.example if setting is not None and setting.option is not None else ""
    found = found or next(iter(_choices(context, name)), "")
    return f"Try {_typed(spelled, found)}." if found else ""


def _choices(context: typer.Context, name: str) -> tuple[str, ...]:
    """Values of an option whose type is a `Literal`; none for any other option."""
    function: Any = context.command.callback
    parameter = inspect.signature(function, eval_str=True).parameters.get(name)
    return () if parameter is None else choices(get_args(parameter.annotation)[0])


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word of which `word` is a part of at least four letters, or that is similar to it."""
    stem, stems = word.lstrip("-"), {name.lstrip("-"): name for name in known}
    longer = [name for name in stems if len(stem) >= 4 and stem in name]
    found = difflib.get_close_matches(stem, longer or stems, n=1, cutoff=0.0 if longer else 0.75)
    return stems[found[0]] if found else None


def _no_option(option: str, context: Any, arguments: Sequence[str]) -> ConfigError:
    """`ConfigError` for an option that the command of the context does not have."""
    command, path = context.command, context.command_path
    problem, see = f"there is no option {one_line(option)}.", f"See {path} --help."
    if context.parent is None:
        commands = (word for word in arguments if option in _options(command.commands.get(word)))
        after = next(commands, None)
        return ConfigError(problem, f"Write it after the command: xlcli {after} {option}." if after else see)
    group = context.parent
    actions = {} if group.parent is None else group.command.commands
    if owners := [name for name, action in actions.items() if option in _options(action)]:
        return ConfigError(f"{option} applies to {group.command_path} {' and '.join(owners)} only.", "Leave it out.")
    if near := nearest(option, _options(command)):
        return ConfigError(problem, f"Did you mean {near}?")
    if words := [param.metavar.strip("[].") for param in command.params if param.param_type_name == "argument"]:
        word = words[0].partition("|")[0]
        see += f" A {word} that begins with - comes last, after --: {path} -- {word}"
    return ConfigError(problem, see)


def _wrong_words(context: Any) -> ConfigError:
    """`ConfigError` for too few or too many arguments."""
    params = [param for param in context.command.params if param.param_type_name == "argument"]
    least, most = sum(param.required for param in params), len(params)
    if any(param.nargs < 0 for param in params):
        number = f"at least {least} word"
    elif least < most:
        number = f"{least} or {most} words"
    else:
        number = f"{most or 'no'} word{'' if most == 1 else 's'}"
    path = context.command_path
    usage = " ".join([path, *(param.metavar.strip("[].") for param in params)])
    return ConfigError(f"'{path}' takes {number}.", f"Type {usage}.")


def _bad_value(message: str, context: Any, param: Any) -> ConfigError:
    """`ConfigError` for a value that the parser or type of an option refuses."""
    spelled = spelling(context, param)
    if getattr(param, "is_flag", False):
        value = one_line(os.environ.get(spelled, ""))
        return ConfigError(f"{spelled} is '{value}', neither 1 nor 0.", f"Type {spelled}=1, or unset it.")
    reason = message.removeprefix("Value error, ")
    if legal := _choices(context, param.name):
        near = nearest(reason.partition("'")[2].partition("'")[0].lower(), legal)
        remedy = f"Did you mean {_typed(spelled, near)}?" if near else f"Try {_typed(spelled, legal[0])}."
        return ConfigError(reason if param.param_type_name == "argument" else f"{spelled} {reason}", remedy)
    return ConfigError(f"{spelled} {reason}")


def _options(command: Any) -> list[str]:
    """Names of the options of a command and its actions; none for None."""
    commands = [] if command is None else [command, *getattr(command, "commands", {}).values()]
    return [name for each in commands for param in each.params for name in param.opts]


def _typed(spelled: str, value: str) -> str:
    return f"{spelled}={value}" if spelled.isupper() else f"{spelled} {value}"
