"""Configuration of a command: options over `--set`, environment, file, preset and defaults. Never imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from xlcli import config
from xlcli.cli.options import SECTIONS, choices, settings_of
from xlcli.cli.terminal import one_line
from xlcli.cli.usage import example, source, spelling, variable
from xlcli.config import Config, Tree
from xlcli.config.tree import UNIONS
from xlcli.errors import ConfigError, InvalidSettingError
from xlcli.files import as_utf8

_NAMES = "xlcli.names"
"""Key of the names of settings in the `meta` of a context: of each dotted key that was set, how it was spelled."""


def user_settings(context: typer.Context) -> Tree:
    """Settings of file, environment, `--set` and options, merged in this order; errors name the option."""
    file = context.params["config_file"]
    of_file = {} if file is None else config.read_toml(Path(file))
    of_file.pop("about", None)
    known = sorted(settings_of(context.info_name).items(), key=lambda item: item[1].option is not None)
    owners = {variable(name, each.option): name for name, each in known}  # of two settings, that with the option
    variables = {name: each for each, name in owners.items()}
    in_environment = {name: value for name in variables if (value := os.environ.get(variables[name]))}
    spelled = {param.name: spelling(context, param) for param in context.command.params}
    layers: list[tuple[Tree, Callable[[str], str]]] = [
        (of_file, lambda key: f"{file}: {key}"),
        (_in_sections(context, in_environment, variables), lambda key: variables.get(key.partition(".")[2], key)),
        (_read_overrides(context), str),
        (
            _in_sections(context, _read_options(context, spelled), spelled),
            lambda key: spelled.get(key.partition(".")[2], key),
        ),
    ]
    tree, names = Tree(), context.meta.setdefault(_NAMES, {})
    for layer, spell in layers:
        for section in SECTIONS[str(context.info_name)]:
            if not isinstance(value := layer.get(section, {}), Mapping):
                raise ConfigError(f"'{section}' is {value!r}, but should be a table.", "Set one of its keys.")
        names |= {key: spell(key) for key in _keys(layer)}
        tree = config.merge(tree, layer)
    return tree


@contextlib.contextmanager
def name_option_in_errors(context: typer.Context) -> Iterator[None]:
    """Context in which an `InvalidSettingError` names the key as the user gave it: option, variable, key, file."""
    try:
        yield
    except InvalidSettingError as error:
        names, key = context.meta[_NAMES], error.key
        if key.rpartition(".")[2].isdigit():  # an item of a list
            key = key.rpartition(".")[0]
        name = names.get(key, error.key)
        remedy = error.remedy
        if name.startswith(("-", "XLCLI_")):
            remedy = remedy or example(context, error.key.split(".")[1], name)
        raise ConfigError(f"{name} {error.reason}.", remedy or "Change that value.") from None


def print_config(resolved: Config, context: typer.Context, *, as_json: bool) -> str:
    """The text of `--print-config`: the sections that a command uses, as TOML with comments or as JSON."""
    tree = resolved.model_dump(mode="json", include=set(SECTIONS[str(context.info_name)]))
    return json.dumps(tree, indent=2) + "\n" if as_json else to_toml(tree, resolved).lstrip("\n")


def to_toml(tree: Mapping[str, Any], section: Any = None, prefix: str = "") -> str:
    """Tables as TOML. A key without a value becomes a comment, and so do meaning and choices of a key of a section."""
    reason = "is not set" if prefix.startswith("model.") else "is decided when the run starts"
    lines, tables = [], []
    for key, value in tree.items():
        field = None if section is None else type(section).model_fields[key]
        if isinstance(value, Mapping):
            name, below = f"{prefix}{key}", getattr(section, key, None)
            body = to_toml(value, below, f"{name}.")
            tables.append(f"\n[{name}]\n{body}" if not body.startswith("\n[") else body)
            continue
        if field is not None:
            kinds = UNIONS.get(prefix.rstrip(".").rpartition(".")[2], {}) if key == "kind" else {}
            legal = ", ".join(kinds or choices(field.annotation))
            about = f"{field.description or ''} {legal and f'Choices: {legal}.'}".strip()
            lines.append(textwrap.fill(about, 79, initial_indent="# ", subsequent_indent="# ") + "\n")
        lines.append(f"# {key} {reason}\n" if value is None else f"{key} = {_toml_value(value)}\n")
    return "".join(lines) + "".join(tables)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{key} = {_toml_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _read_overrides(context: typer.Context) -> Tree:
    """Tables of all `--set a.b=c`; a section that the command does not use is refused."""
    tree, sections = Tree(), SECTIONS[str(context.info_name)]
    for text in context.params["overrides"] or ():
        override = config.parse_override(text)
        section = next(iter(override))
        if section in Config.model_fields and section not in sections:
            raise ConfigError(
                f"'xlcli {context.info_name}' does not use {section}.*.",
                f"It uses {', '.join(f'{name}.*' for name in sections)}.",
            )
        tree = config.merge(tree, override)
    return tree


def _read_options(context: typer.Context, spelled: Mapping[str, str]) -> dict[str, Any]:
    """Values of the settings on the command line."""
    given = {name: value for name, value in context.params.items() if source(context, name) == "COMMANDLINE"}
    for name, value in given.items():
        if value == "":
            remedy = example(context, name, spelled[name]) or f"See xlcli {context.info_name} --help."
            raise ConfigError(f"{spelled[name]} was given an empty value.", remedy)
    return {name: given[name] for name in settings_of(context.info_name) if name in given}


def _in_sections(context: typer.Context, values: Mapping[str, Any], spelled: Mapping[str, str]) -> Tree:
    """The tree of these values of settings."""
    tree: Tree = {}
    for name, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and as_utf8(text) != text:
                raise ConfigError(f"{spelled[name]} '{one_line(text)}' is not UTF-8.", "Give a text in UTF-8.")
        tree.setdefault(settings_of(context.info_name)[name].section, {})[name] = value
    return tree


def _keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a tree and of its tables."""
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
