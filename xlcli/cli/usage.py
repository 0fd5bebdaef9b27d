"""Remedies for usage errors of Typer, and the spelling of options in error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from xlcli.cli.options import choices, settings_of
from xlcli.cli.terminal import one_line
from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.config import Option

ELSEWHERE: Mapping[str, tuple[str, ...]] = {  # what to type here, for commands and options of other tools
    "eval FILE": ("score", "evaluate", "perplexity", "ppl"),
    "eval FILE --words FILE.tsv": ("surprisal",),
    "train FILE --init NAME": ("finetune", "fine-tune"),
    "generate PROMPT": ("sample", "complete"),
    "generate --interactive": ("chat", "run"),
    "import FOLDER": ("convert",),
    "models copy MODEL FOLDER --weights int8": ("quantize",),
    "models": ("list",),
    "bench": ("benchmark",),
    "--mem-len": ("-c", "--ctx", "--ctx-size", "--context", "--context-length"),
    "--segment-len": ("--block-size",),
    "--model": ("--checkpoint",),
    "--init": ("--checkpoint", "--model"),
    "--lr": ("--learning-rate",),
    "--max-new-tokens": ("--n-predict", "--max-length"),
    "--out": ("--output", "--output-dir"),
    "--words FILE.tsv": ("--output", "-o"),
    "> FILE": ("--output", "-o"),
}
ARGUMENTS = ("--checkpoint", "--model", "--file", "-f", "--input", "--prompt", "-p")  # come without an option here


def explain(error: typer.TyperException, context: Any) -> ConfigError:
    """`ConfigError` with the sentence of a usage error of Typer, and a remedy."""
    text = error.format_message().replace("Value error, ", "")
    text = one_line(text.partition(" (Possible options")[0]).rstrip(".")
    text = text.replace("Input should be a valid boolean, unable to interpret input", "it should be true or false")
    remedy = "See xlcli --help."
    if context is not None:
        remedy = _remedy(error, context) or f"See {context.command_path} --help."
    return ConfigError(f"{text[:1].lower()}{text[1:]}.", remedy)


def _remedy(error: Any, context: Any) -> str:
    """What to type instead; empty if nothing is known. Errors that Typer does not export are known by an attribute."""
    if hasattr(error, "option_name"):  # NoSuchOption, or BadOptionUsage of an option that lacks its value
        return _remedy_of_option(error.option_name, context)
    if hasattr(error, "param_type"):  # MissingParameter, a kind of BadParameter that has no value
        return _arguments_alone(context)
    if isinstance(error, typer.BadParameter) and error.param is not None:
        return _remedy_of_value(_quoted(error.message), context, error.param)
    if not isinstance(context.command, TyperGroup):  # UsageError: too many arguments
        return _arguments_alone(context)
    word, commands = _quoted(error.message), context.command.list_commands(context)  # UsageError: no such command
    meant = _meant_elsewhere(word, commands) or nearest(word, commands)
    return f"Did you mean {context.command_path} {meant}?" if meant else ""


def _remedy_of_option(option: str, context: Any) -> str:
    """Returns what to type instead of an option that lacks its value or does not exist; empty if nothing is known."""
    spellings = []
    for param in context.command.params:
        if option in param.opts:  # it exists and lacks its value
            return example(str(context.info_name), param.name, option, choices_of(param))
        if param.param_type_name == "option":
            spellings += param.opts
    is_long = option.startswith("--")
    is_before_command = context.parent is None
    owners = _other_commands(option, context) if is_long and not is_before_command else ""
    is_whole_word = is_long or option in context.obj  # unlike -c of -corpus.txt
    if is_whole_word:
        # Every command prints what can be redirected, and can be typed without options.
        here = spellings if is_before_command else [*spellings, ">"]
        word = option.replace("_", "-")
        meant = _meant_elsewhere(word, here)
        if meant is not None:
            return f"Did you mean {meant}?{owners}"
        if word in ARGUMENTS and not is_before_command:
            return _arguments_alone(context)
    similar = nearest(option, spellings)
    if similar is not None:
        return f"Did you mean {similar}?{owners}"
    if owners:
        return owners.strip()
    return _remedy_of_order(option, context) if is_before_command else _remedy_of_text(option, context)


def _other_commands(option: str, context: Any) -> str:
    """Returns a sentence on the commands that have the option, ` --context is an option of xlcli eval.`, or nothing."""
    group = context.parent
    commands = []
    for name in group.command.list_commands(group):
        command = group.command.get_command(group, name)
        if any(option in param.opts for param in command.params):
            commands.append(f"{group.command_path} {name}")
    return f" {option} is an option of {', '.join(commands)}." if commands else ""


def _meant_elsewhere(word: str, known: Sequence[str]) -> str | None:
    """What to type instead of a word of other tools; its first part is one of `known`. None if nothing is known."""
    for meant, words in ELSEWHERE.items():
        if word in words and meant.partition(" ")[0] in known:
            return meant
    return None


def _arguments_alone(context: Any) -> str:
    """`Type xlcli export MODEL.`: the command with its arguments and without options."""
    return f"Type {' '.join([context.command_path, *_argument_names(context.command)])}."


def _remedy_of_order(option: str, context: Any) -> str:
    """Returns where an option of a command, as in `xlcli --mem-len 9 eval`, has to stand: after the command."""
    commands = context.command.list_commands(context)
    for word in context.obj:  # of the command line
        if word in commands:
            return f"Options come after the command: xlcli {word} {option}."
    return "A command comes first, as in xlcli eval FILE; xlcli --help lists them."


def _remedy_of_text(option: str, context: Any) -> str:
    """`xlcli generate "-5 degrees"`: a text that begins with `-`, and was taken for an option, comes after `--`."""
    arguments = _argument_names(context.command)
    looks_mistyped = re.fullmatch("--[a-z][a-z-]*", option) is not None
    if looks_mistyped or not arguments:
        return ""
    path = context.command_path
    word = arguments[0].partition("|")[0]
    return f"See {path} --help. A {word} that begins with - comes last, after --: {path} -- {word}"


def _argument_names(command: Any) -> list[str]:
    """Arguments as the help shows them, without brackets."""
    return [param.metavar.strip("[].") for param in command.params if param.param_type_name == "argument"]


def _quoted(message: str) -> str:
    """What a message of Typer has in quotes."""
    return message.partition("'")[2].partition("'")[0]


def _remedy_of_value(value: str, context: Any, param: Any) -> str:
    """What to type instead of an illegal value of an option; empty if no legal one is known."""
    spelled = spelling(context, param)
    if getattr(param, "is_flag", False):
        return f"Type {spelled}=1, or unset it."
    legal = choices_of(param)
    near = nearest(value.lower(), legal)
    if near is not None:
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
    """Returns `Try --mem-len 512.`: a value of the setting `name`, or the first `legal` one of another option."""
    setting = settings_of(command).get(name)
    if setting is not None:
        legal = choices(setting.field.annotation)
        if setting.option is not None and setting.option.example:
            legal = (setting.option.example, *legal)
    if not legal:
        return ""
    return f"Try {_typed(spelled, legal[0])}."


def choices_of(param: Any) -> tuple[str, ...]:
    """Values of an option or argument that is a choice; none of any other one."""
    return choices(param.type_descriptor.annotation)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that contains `word`, or else is similar to it; None if there is none. Leading dashes are ignored.

    `--temp` finds `--temperature`, and `genrate` finds `generate`. A word of less than four letters is in too many.
    """
    stem = word.lstrip("-")
    stems = {name.lstrip("-"): name for name in known}
    longer = [name for name in stems if len(stem) >= 4 and stem in name]
    if longer:
        similar = difflib.get_close_matches(stem, longer, n=1, cutoff=0.0)
    else:
        similar = difflib.get_close_matches(stem, stems, n=1, cutoff=0.75)
    return stems[similar[0]] if similar else None


def _typed(spelled: str, value: str) -> str:
    return f"{spelled}={value}" if spelled.isupper() else f"{spelled} {value}"
