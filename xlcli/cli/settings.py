"""From what was typed to a configuration: flag > `--set` > environment > file > preset > default. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xlcli import config
from xlcli.cli import units
from xlcli.cli.options import Given, Values
from xlcli.cli.terminal import one_line
from xlcli.config import Config, Tree
from xlcli.errors import ConfigError

_READERS: dict[str, Callable[[str], Any]] = {
    "max_time": units.duration,
    "eval_every": units.cadence,
    "save_every": units.cadence,
    "valid": units.share,
    "test": units.share,
    **dict.fromkeys(("max_steps", "max_tokens", "limit", "mem_len", "segment_len", "max_new_tokens"), units.count),
}
"""Keys whose value may also be written with a unit, as a text, in a file or after `--set`."""


def typed_layer(given: Mapping[str, Given], values: Values) -> Tree:
    """The tables that flags (or variables) set."""
    tree: Tree = {}
    for flag in values.command.flags:
        if flag.name in given:
            for key in flag.keys:
                value: Any = given[flag.name].value
                for part in reversed(key.split(".")):
                    value = {part: value}
                tree = config.merge(tree, value)
    return tree


def file_layer(values: Values) -> Tree:
    """The tables of `--config FILE`; may hold sections that belong to other commands."""
    name = values.get("config")
    if name is None:
        return {}
    tree = config.read_toml(Path(name))
    tree.pop("about", None)
    return _with_units(tree, name)


def set_layer(values: Values) -> Tree:
    """The tables of all `--set a.b=c`; a section that the command ignores is refused."""
    tree: Tree = {}
    for text in values.get("set") or ():
        override = config.parse_override(text)
        section = next(iter(override))
        legal = values.command.sections
        if section in Config.model_fields and section not in legal:
            raise ConfigError(
                f"'xlcli {values.command.name}' does not use {section}.*.",
                f"It takes {', '.join(f'{name}.*' for name in legal)}.",
            )
        tree = config.merge(tree, _with_units(override, "--set"))
    return tree


def above_preset(values: Values) -> Tree:
    """Everything said by the user, merged."""
    tree: Tree = {}
    for layer in (
        file_layer(values),
        typed_layer(values.environment, values),
        set_layer(values),
        typed_layer(values.flags, values),
    ):
        tree = config.merge(tree, layer)
    return tree


def resolve(values: Values, *below: Tree) -> Config:
    """The configuration; errors name the option as it was given. `below` are presets."""
    try:
        return config.make(*below, above_preset(values))
    except ConfigError as error:
        raise _renamed(error, values) from None


def is_set(tree: Mapping[str, Any], key: str) -> bool:
    """Whether the dotted key is in the tables."""
    section, _, name = key.partition(".")
    return name in tree.get(section, {})


def to_toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """Tables as TOML. A key without a value becomes a comment."""
    without = "is not set" if prefix.startswith("model.") else "is decided when the run starts"
    lines = []
    tables = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{key}"
            body = to_toml(value, f"{name}.")
            tables.append(f"\n[{name}]\n{body}" if not body.startswith("\n[") else body)
        elif value is None:
            lines.append(f"# {key} {without}\n")
        else:
            lines.append(f"{key} = {_toml_value(value)}\n")
    return "".join(lines) + "".join(tables)


def print_config(resolved: Config, values: Values) -> str:
    """The text of `--print-config`: the sections this command obeys."""
    tree = resolved.model_dump(mode="json")
    shown = {name: tree[name] for name in values.command.sections}
    if values.on("json"):
        return json.dumps(shown, indent=2) + "\n"
    return to_toml(shown).lstrip("\n")


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        there = (f"{key} = {_toml_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(there) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _with_units(tree: Mapping[str, Any], source: str) -> Tree:
    result: Tree = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            result[key] = _with_units(value, source)
        elif isinstance(value, str) and key in _READERS:
            try:
                result[key] = _READERS[key](value)
            except ValueError as error:
                raise ConfigError(f"{source}: {key} '{one_line(value)}' is {error}.", "Mend that value.") from None
        else:
            result[key] = value
    return result


def _renamed(error: ConfigError, values: Values) -> ConfigError:
    """The error in the user's words: the key as the flag or variable that set it."""
    for flag in values.command.flags:
        given = values.given(flag.name)
        for key in flag.keys if given else ():
            assert given is not None
            if error.message.startswith(f"'{key}"):
                reason = error.message.partition(": ")[2] or error.message
                return ConfigError(f"{given.source} {one_line(given.raw)}: {reason}", flag.remedy(given.source))
            if key in error.message:
                return ConfigError(error.message.replace(key, given.source), error.remedy or flag.remedy(given.source))
    return ConfigError(error.message, error.remedy or "Change that value.")
