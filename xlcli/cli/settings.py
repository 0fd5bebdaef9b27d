"""Configuration of a command: options over `--set`, environment, file, preset and defaults. Never imports torch."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xlcli import config
from xlcli.cli.options import SECTIONS, choices, settings_of
from xlcli.cli.terminal import one_line
from xlcli.cli.usage import example, variable
from xlcli.config import Config, Tree
from xlcli.config.tree import UNIONS
from xlcli.errors import ConfigError
from xlcli.files import as_utf8

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class UserSettings(NamedTuple):
    """Settings that a user has given to a command."""

    tree: Tree  # values by section
    spelled: Mapping[str, str]  # how each dotted key was written: as option, variable, key, or key of a file


def read_settings(
    command: str, params: Mapping[str, Any], typed: Collection[str], spelled: Mapping[str, str]
) -> UserSettings:
    """Settings of file, environment, `--set` and options, merged in this order.

    Options are in `params`, `typed` if on the command line, `spelled` as given. `ConfigError` if a value is illegal.
    """
    tree = Tree()
    written: dict[str, str] = {}
    for layer, spell in (
        _of_file(params["config_file"]),
        _of_environment(command),
        _of_overrides(command, params["overrides"] or ()),
        _of_options(command, params, typed, spelled),
    ):
        for section in SECTIONS[command]:
            value = layer.get(section, {})
            if not isinstance(value, Mapping):
                raise ConfigError(f"'{section}' is {value!r}, but should be a table.", "Set one of its keys.")
        for key in _keys(layer):
            written[key] = spell(key)
        tree = config.merge(tree, layer)
    return UserSettings(tree, written)


_Layer = tuple[Tree, Callable[[str], str]]  # settings from one source, and how a dotted key is written there


def _of_file(file: str | None) -> _Layer:
    tree = Tree()
    if file is not None:
        tree = config.read_toml(Path(file))
        tree.pop("about", None)  # the description of a preset
    return tree, lambda key: f"{file}: {key}"


def _of_environment(command: str) -> _Layer:
    """Returns the settings of environment variables that are not empty, and the variable of each setting."""
    settings = settings_of(command)
    owners: dict[str, str] = {}  # the setting of each variable
    # If two settings have one variable, it is of the one with an option, which comes last.
    for name in sorted(settings, key=lambda name: settings[name].option is not None):
        owners[variable(name, settings[name].option)] = name
    variables = {name: name_of_variable for name_of_variable, name in owners.items()}
    texts = {name: os.environ.get(name_of_variable) for name, name_of_variable in variables.items()}
    return _in_sections(command, {name: text for name, text in texts.items() if text}, variables)


def _of_overrides(command: str, overrides: Sequence[str]) -> _Layer:
    """Settings of all `--set a.b=c`; refuses a section that the command does not use, and two values of one key."""
    tree = Tree()
    by_key: dict[str, Tree] = {}
    for text in overrides:
        override = config.parse_override(text)  # a tree of one value
        key = text.partition("=")[0].strip()
        if key in by_key and by_key[key] != override:
            raise ConfigError(f"--set gives {key} twice, with different values.", "Give it once.")
        by_key[key] = override
        section = key.partition(".")[0]
        if section in Config.model_fields and section not in SECTIONS[command]:
            used = ", ".join(f"{name}.*" for name in SECTIONS[command])
            raise ConfigError(f"'xlcli {command}' does not use {section}.*.", f"It uses {used}.")
        tree = config.merge(tree, override)
    return tree, str


def _of_options(command: str, params: Mapping[str, Any], typed: Collection[str], spelled: Mapping[str, str]) -> _Layer:
    """Settings on the command line."""
    for name in typed:
        if params[name] == "":
            remedy = example(command, name, spelled[name]) or f"See xlcli {command} --help."
            raise ConfigError(f"{spelled[name]} was given an empty value.", remedy)
    values = {name: params[name] for name in settings_of(command) if name in typed}
    return _in_sections(command, values, spelled)


def _in_sections(command: str, values: Mapping[str, Any], spelled: Mapping[str, str]) -> _Layer:
    """The tables of these settings, given and spelled by their names without the section."""
    tree = Tree()
    settings = settings_of(command)
    for name, value in values.items():
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and as_utf8(text) != text:
                raise ConfigError(f"{spelled[name]} '{one_line(text)}' is not UTF-8.", "Give a text in UTF-8.")
        tree.setdefault(settings[name].section, {})[name] = value
    return tree, lambda key: spelled.get(key.partition(".")[2], key)


def _keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a tree and of its tables."""
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")


def to_toml(tree: Mapping[str, Any], section: Any = None, prefix: str = "") -> str:
    """Tables as TOML. A key without a value becomes a comment, and so do meaning and choices of a key of a section.

    `section` is the configuration with these values, `prefix` the dotted name of the table with its point.
    """
    reason = "is not set" if prefix.startswith("model.") else "is decided when the run starts"
    lines = tables = ""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{key}"
            body = to_toml(value, getattr(section, key, None), f"{name}.")
            if not body.startswith("\n["):  # it has keys of its own, and not only tables
                tables += f"\n[{name}]\n"
            tables += body
            continue
        if section is not None:
            lines += _about(key, type(section).model_fields[key], prefix)
        if value is None:
            lines += f"# {key} {reason}\n"
        else:
            lines += f"{key} = {_toml_value(value)}\n"
    return lines + tables


def _about(key: str, field: FieldInfo, prefix: str) -> str:
    """Meaning and choices of a key as comments."""
    about = field.description or ""
    legal: Collection[str] = choices(field.annotation)
    if key == "kind":  # of a table that has other keys for each kind
        table_name = prefix.rstrip(".").rpartition(".")[2]
        legal = UNIONS.get(table_name) or legal
    if legal:
        about += f" Choices: {', '.join(legal)}."
    return textwrap.fill(about.strip(), 79, initial_indent="# ", subsequent_indent="# ") + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        items = (f"{key} = {_toml_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which TOML forbids
    return json.dumps(value)
