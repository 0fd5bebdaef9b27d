"""Tables in and out: TOML and dotted overrides are merged, validated and printed as JSON."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from xlcli.config.attention import ATTENTIONS, HEADS
from xlcli.config.base import BaseConfig
from xlcli.config.model import STACKS
from xlcli.config.position import POSITIONS
from xlcli.config.workflows import Config
from xlcli.errors import ConfigError

S = TypeVar("S", bound=BaseConfig)

Tree = dict[str, Any]
"""A nested table as TOML gives it."""


UNIONS: Mapping[str, Mapping[str, type[BaseConfig]]] = {
    "attention": ATTENTIONS,
    "position": POSITIONS,
    "stack": STACKS,
}
"""Tables whose keys depend on their `kind`."""


def read_toml(path: Path) -> Tree:
    """Tables of a TOML file; `ConfigError` with the line when it cannot be read."""
    try:
        if path.stat().st_size > 2**20:
            raise ConfigError(f"{path} is larger than 1 MiB.", "A configuration file is short; check the path.")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.", "Check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.", "Mend that line.") from None


def parse_override(text: str) -> Tree:
    """`a.b=c` as a nested table. The value is TOML (`3`, `0.1`, `true`, `[1, 2]`) or else a plain string."""
    key, equals, value = text.partition("=")
    if not equals or not all(part.isidentifier() for part in key.strip().split(".")):
        raise ConfigError(f"'{text}' is not of the form a.b=c.", "Type for example --set model.dim=256.")
    try:
        parsed: Any = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError as error:
        parsed = value.strip()
        if parsed[:1] in ("[", "{"):
            raise ConfigError(
                f"'{parsed}' is no list or table of TOML: {error}.",
                'Quote it for the shell: --set \'model.attention.layers=["local", {kind = "lsh"}]\'.',
            ) from None
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return parsed  # type: ignore[no-any-return]


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Tables of both, `above` winning.

    When the `kind` of one of `UNIONS` changes, it is replaced but for `HEADS`: its other keys meant other things.
    """
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            kinds = old.get("kind"), value.get("kind")
            if key in UNIONS and None not in kinds and kinds[0] != kinds[1]:
                old = {name: old[name] for name in HEADS if name in old}
            result[key] = merge(old, value)
        else:
            result[key] = value
    return result


def make(*layers: Mapping[str, Any]) -> Config:
    """Validated configuration from tables, later ones winning; `ConfigError` names the key and the legal values."""
    tree: Tree = Config().model_dump(mode="json")
    for layer in layers:
        tree = merge(tree, layer)
    return validate(Config, tree)


def validate(kind: type[S], tree: Mapping[str, Any]) -> S:
    """`tree` as a section of this kind, or `ConfigError` in one sentence."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(tree))
    except (TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise _explain(kind, error) from None
        raise ConfigError(
            f"the configuration holds a value of no legal type: {error}.", "Use numbers, texts, true or false."
        ) from None


def to_json(section: BaseConfig) -> str:
    """Canonical JSON of a section: sorted keys, one line end at the end."""
    return json.dumps(section.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"


def _explain(kind: type[BaseConfig], error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    where = _path(first["loc"])
    name, value = ".".join(where), first["input"]
    message = first["msg"].removeprefix("Value error, ").replace(" after validation", "").rstrip(".")
    match first["type"]:
        case "value_error":
            fact, _, advice = message.partition("; ")
            return ConfigError(f"{fact}.", f"{advice[0].upper()}{advice[1:]}." if advice else "")
        case "extra_forbidden":
            return _unknown_key(kind, name, first["loc"])
        case "union_tag_invalid":
            tags = first["ctx"]["expected_tags"]
            return _no_choice(f"{name}.kind", value["kind"], re.findall(r"'(.*?)'", tags))
        case "literal_error":
            return _no_choice(name, value, re.findall(r"'(.*?)'", first["ctx"]["expected"]))
        case "dict_type" | "model_type":
            remedy = f"Type for example --set {name}.kind={value}." if where[-1] in UNIONS else "Set one of its keys."
            return ConfigError(f"'{name}' is {value!r}, but should be a table.", remedy)
        case "tuple_type":
            return ConfigError(f"'{name}' is {value!r}, not a list.", f"Type for example --set {name}=[{value}].")
    return ConfigError(f"'{name}' is {value!r}: {message[:1].lower() + message[1:]}.", "Change that value.")


def _no_choice(name: str, value: object, choices: list[str]) -> ConfigError:
    """Of a value that is none of the legal ones."""
    near = difflib.get_close_matches(str(value).lower(), choices, n=1)
    quoted = [f"'{choice}'" for choice in choices]
    return ConfigError(
        f"'{name}' is {value!r}: it should be {', '.join(quoted[:-1])} or {quoted[-1]}.",
        f"Did you mean '{near[0]}'?" if near else "Take one of these.",
    )


def _unknown_key(kind: type[BaseConfig], name: str, loc: tuple[int | str, ...]) -> ConfigError:
    """Of a key that does not exist, or does in another kind of its table only."""
    table, _, last = name.rpartition(".")
    kinds = UNIONS.get(_LAYER.sub("", table).rpartition(".")[2], {})
    if others := [other for other, section in kinds.items() if last in section.model_fields]:
        return ConfigError(
            f"'{name}' belongs to {' and '.join(others)}, but '{table}.kind' is '{loc[-2]}'.",
            f"Set {table}.kind to {' or '.join(others)}, or leave '{name}' out.",
        )
    known = list(_keys(kinds[str(loc[-2])], f"{table}.") if _LAYER.search(table) else _keys(kind))
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or difflib.get_close_matches(
        last, [key.rpartition(".")[2] for key in known], n=1, cutoff=0.5
    )
    near = [next(key for key in known if key == near[0] or key.endswith("." + near[0]))] if near else []
    return ConfigError(
        f"unknown key '{name}'.", f"Did you mean '{near[0]}'?" if near else "See xlcli --print-config for the keys."
    )


def _path(loc: tuple[int | str, ...]) -> list[str]:
    """The names typed: without validators and types, and without the kind that follows a table with kinds."""
    names: list[str] = []
    for part in map(str, loc):
        follows_table = names[-1:] and (names[-1] in UNIONS or names[-1].isdigit())
        if not (_NO_KEY.match(part) or (follows_table and part in _TAGS)):
            names.append(part)
    return names


_NO_KEY = re.compile(r"(int|float|str)$|function-|constrained-|tuple\[")
_LAYER = re.compile(r"\.layers\.\d+$")
_TAGS = frozenset({*POSITIONS, *ATTENTIONS, *STACKS})


def _keys(kind: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in kind.model_fields.items():
        yield prefix + name
        for section in (field.annotation, *get_args(field.annotation)):
            if isinstance(section, type) and issubclass(section, BaseModel):
                yield from _keys(section, f"{prefix}{name}.")
