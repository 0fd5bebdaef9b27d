"""Configuration of a command: options over `--set`, environment, file, preset and defaults. Never imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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

_LAYERS = "xlcli.settings"
"""Key of the layers of settings in the `meta` of a context."""


@dataclass(frozen=True)
class _Layer:
    """Settings of one source; `explain` makes an error that names a key in the way in which the source gave it."""

    tree: Tree
    explain: Callable[[InvalidSettingError], ConfigError]


def user_settings(context: typer.Context) -> Tree:
    """Settings of file, environment, `--set` and options, merged in this order; errors name the option."""
    file = context.params["config_file"]
    of_file = {} if file is None else config.read_toml(Path(file))
    of_file.pop("about", None)
    known = sorted(settings_of(context.info_name).items(), key=lambda item: item[1].option is not None)
    owners = {variable(name, each.option): name for name, each in known}  # of two settings, that with the option
    variables = {name: each for each, name in owners.items()}
    given = {name: value for name in variables if (value := os.environ.get(variables[name]))}
    layers = context.meta[_LAYERS] = [
        _Layer(of_file, lambda error: ConfigError(f"{file}: {error.message}", error.remedy)),
        _layer(context, variables, given),
        _Layer(_read_overrides(context), lambda error: error),
        _read_options(context),
    ]
    tree: Tree = {}
    for layer in layers:
        for section in SECTIONS[str(context.info_name)]:
            if not isinstance(value := layer.tree.get(section, {}), Mapping):
                raise ConfigError(f"'{section}' is {value!r}, but should be a table.", "Set one of its keys.")
        tree = config.merge(tree, layer.tree)
    return tree


@contextlib.contextmanager
def name_option_in_errors(context: typer.Context) -> Iterator[None]:
    """Context in which an `InvalidSettingError` names the key as the user gave it: option, variable, key, file."""
    try:
        yield
    except InvalidSettingError as error:
        layer = next((layer for layer in reversed(context.meta[_LAYERS]) if _has(layer.tree, error.key)), None)
        named = error if layer is None else layer.explain(error)
        raise ConfigError(named.message, named.remedy or "Change that value.") from None


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


def _read_options(context: typer.Context) -> _Layer:
    """Settings of the command line."""
    given = {name: value for name, value in context.params.items() if source(context, name) == "COMMANDLINE"}
    names = {param.name: spelling(context, param) for param in context.command.params}
    for name, value in given.items():
        if value == "":
            remedy = example(context, name, names[name]) or f"See xlcli {context.info_name} --help."
            raise ConfigError(f"{names[name]} was given an empty value.", remedy)
    known = settings_of(context.info_name)
    return _layer(context, names, {name: value for name, value in given.items() if name in known})


def _layer(context: typer.Context, names: Mapping[str, str], values: Mapping[str, Any]) -> _Layer:
    """The layer of these values of settings; `names` are the options or variables that gave them."""
    tree: Tree = {}
    for name, value in values.items():
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigError(f"{names[name]} '{one_line(text)}' is not UTF-8.", "Give a text in UTF-8.")
        tree.setdefault(settings_of(context.info_name)[name].section, {})[name] = value

    def explain(error: InvalidSettingError) -> ConfigError:
        name = error.key.split(".")[1]
        return ConfigError(f"{names[name]} {error.reason}.", error.remedy or example(context, name, names[name]))

    return _Layer(tree, explain)


def _has(tree: Any, key: str) -> bool:
    """True if a tree sets a dotted key, or a value in place of one of its tables."""
    for part in key.split("."):
        if not isinstance(tree, Mapping):
            return True
        if part not in tree:
            return False
        tree = tree[part]
    return True
