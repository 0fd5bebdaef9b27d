"""Tables of settings: read from TOML and dotted overrides, merged, and validated into a `Config`."""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from xlcli.config.attention import ATTENTIONS, shared_heads
from xlcli.config.base import BaseConfig
from xlcli.config.model import STACKS
from xlcli.config.position import POSITIONS
from xlcli.config.workflows import Config
from xlcli.errors import ConfigError, InvalidSettingError, ResourceError

S = TypeVar("S", bound=BaseConfig)
TOML_LIMIT = 2**20  # maximum size of a TOML file in bytes
DEPTH = 20  # maximum nesting depth of settings
Tree = dict[str, Any]  # a nested table, as read from TOML
UNIONS: Mapping[str, Mapping[str, type[BaseConfig]]] = {"attention": ATTENTIONS, "position": POSITIONS, "stack": STACKS}
"""Tables whose keys depend on their `kind`."""


def read_toml(path: str | Path) -> Tree:
    """Tables of a TOML file; `ConfigError` names what is wrong with it, `ResourceError` if the disk fails."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path is a str or pathlib.Path, not {type(path).__name__}.", "Pass the path of a TOML file.")
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(TOML_LIMIT + 1)
        if len(data) > TOML_LIMIT:
            raise ConfigError(f"{path} is larger than 1 MiB.", "A configuration file is short; check the path.")
        tree = tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        if error.errno == errno.EIO:
            raise ResourceError(f"cannot read {path}: {error.strerror}.", "Check the disk.") from None
        raise ConfigError(f"cannot read {path}: {error.strerror}.", "Check the path.") from None
    except (ValueError, RecursionError) as error:  # also a number of more than 4,300 digits
        raise ConfigError(f"{path} is not TOML: {error}.", "Correct that line.") from None
    _check_depth(str(path), tree)
    return tree


def parse_override(text: str) -> Tree:
    """`a.b=c` as a nested table. The value is read as TOML (`3`, `0.1`, `true`, `[1, 2]`), else as a plain string."""
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(name.isidentifier() for name in names):
        raise ConfigError(f"'{text}' is not of the form a.b=c.", "Type for example --set model.dim=256.")
    try:
        parsed: Any = tomllib.loads(f"value = {value.strip()}")["value"]
    except (ValueError, RecursionError) as error:  # a plain string, unless it was to be a list or a table
        parsed = value.strip()
        if parsed[:1] in ("[", "{"):
            raise ConfigError(
                f"'{parsed}' is not a TOML list or table: {error}.",
                'Quote it for the shell: --set \'model.attention.layers=["local", {kind = "lsh"}]\'.',
            ) from None
    for name in reversed(names):  # from the inside out
        parsed = {name: parsed}
    _check_depth(f"'{key[:80]}'", parsed)
    tree: Tree = parsed
    return tree


def _check_depth(name: str, value: Any, n_levels: int = DEPTH) -> None:
    """`ConfigError` if a value of the settings `name` nests deeper than this number of levels."""
    if n_levels < 0:
        raise ConfigError(f"{name} nests deeper than {DEPTH} levels.", "Check its keys and values.")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            _check_depth(name, inner, n_levels - 1)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Joins two tables; values of `above` win. If the `kind` of a table changes, it keeps only its shared heads."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            old_kind, new_kind = old.get("kind"), value.get("kind")
            has_both_kinds = old_kind is not None and new_kind is not None
            if key in UNIONS and has_both_kinds and old_kind != new_kind:
                old = shared_heads(old, str(new_kind))  # the other keys belong to the old kind
            result[key] = merge(old, value)
        else:
            result[key] = value
    return result


def make(*layers: Mapping[str, Any]) -> Config:
    """The configuration of these tables over the defaults, later over earlier ones; errors as of `change`."""
    return change(Config(), *layers)


def change(config: Config, *layers: Mapping[str, Any]) -> Config:
    """The configuration with these tables merged over it; `ConfigError` has the key at fault and the legal values."""
    # All of the model, because `merge` compares kinds; of other sections what was set, as `model_fields_set` tells.
    tree = config.model_dump(mode="json", exclude_unset=True, exclude={"model"})
    tree |= config.model_dump(mode="json", include={"model"})
    for layer in layers:
        tree = merge(tree, layer)
    return validate(Config, tree)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ."""
    keys = []
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            keys += differences(old, new, f"{prefix}{key}.")
        elif old != new:
            keys.append(f"{prefix}{key}")
    return keys


def table(field: FieldInfo) -> type[BaseConfig] | None:
    """The class of a field that is one table of settings; None for a value, and for a table of several kinds."""
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseConfig):
        return kind
    return None


def validate(kind: type[S], tree: Mapping[str, Any]) -> S:
    """`tree` as a section of this class; `ConfigError` names the first invalid key."""
    try:
        # From JSON, strict validation takes lists for tuples.
        return kind.model_validate_json(json.dumps(tree, default=_plain_value))
    except ValidationError as error:
        raise _explain(kind, tree, error) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the configuration holds a value of an unsupported type: {error}.", "Use numbers, strings, true or false."
        ) from None


def _plain_value(value: Any) -> Any:
    """A path as its text, a number or array of NumPy as number or list; `TypeError` for what no setting can be."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _explain(kind: type[BaseConfig], tree: Mapping[str, Any], error: ValidationError) -> ConfigError:
    """The error for the first fault that a validation of this tree found."""
    first = error.errors(include_url=False)[0]
    path = _path_in(tree, first["loc"])
    name = ".".join(path)
    value, details = first["input"], first.get("ctx", {})
    fault = details.get("error")
    if isinstance(fault, InvalidSettingError):
        # The check of a section names a key of the section alone, or any key with all its tables.
        key = fault.key if "." in fault.key else ".".join([*path, fault.key])
        return InvalidSettingError(key, fault.reason, fault.remedy)
    match first["type"]:
        case "value_error":
            return InvalidSettingError(name, f"is {value!r}: {fault}", "")
        case "json_invalid":
            return ConfigError("a setting is not valid UTF-8.", "Rename the file, or give the text in UTF-8.")
        case "extra_forbidden":
            return _unknown_key(kind, name, first["loc"], is_table=isinstance(value, Mapping))
        case "union_tag_invalid":
            return _no_choice(f"{name}.kind", value["kind"], f"one of {details['expected_tags']}")
        case "union_tag_not_found":
            return InvalidSettingError(f"{name}.kind", "is missing", "Set it as well.")
        case "literal_error":
            return _no_choice(name, value, details["expected"])
        case "dict_type" | "model_type":
            remedy = "Set one of its keys."
            if path[-1] in UNIONS:
                remedy = f"Type for example --set {name}.kind={value}."
            return InvalidSettingError(name, f"is {value!r}, but should be a table", remedy)
        case "tuple_type":
            return InvalidSettingError(name, f"is {value!r}, not a list", f"Type for example --set {name}=[{value}].")
    # Any other fault is told in the words of pydantic.
    reason = first["msg"].replace(" after validation", "").replace("Input should be", "it must be")
    return InvalidSettingError(name, f"is {value!r}: {reason[:1].lower() + reason[1:]}", "")


def _path_in(tree: Mapping[str, Any], loc: tuple[int | str, ...]) -> list[str]:
    """The keys that lead to a fault; pydantic puts names of validators, types and kinds between them in `loc`."""
    path: list[str] = []
    below: Any = tree
    for part in loc:
        if isinstance(below, Mapping):
            is_key = part in below
        else:
            is_key = isinstance(below, list) and part in range(len(below))
        if is_key:
            below = below[part]
            path.append(str(part))
    return path


def _no_choice(key: str, value: object, expected: str) -> ConfigError:
    """The error for a value that is not one of `expected`, a text such as `'a', 'b' or 'c'`."""
    choices = re.findall(r"'([^']*)'", expected)
    similar = difflib.get_close_matches(str(value).lower(), choices, n=1)
    remedy = f"Did you mean '{similar[0]}'?" if similar else "Use one of these."
    return InvalidSettingError(key, f"is {value!r}: it should be {expected}", remedy)


def _unknown_key(kind: type[BaseConfig], name: str, loc: tuple[int | str, ...], *, is_table: bool) -> ConfigError:
    """The error for a key that does not exist, or only in another kind of its table.

    It names those kinds, else a similar key. `is_table`: the unknown key is a table, and only tables are similar to it.
    """
    table, last = _table_of(name), _last_part(name)
    is_layer = re.search(r"\.layers\.\d+$", table) is not None  # the kinds of a layer are those of attention
    kinds = ATTENTIONS if is_layer else UNIONS.get(_last_part(table), {})
    owners = [owner for owner, section in kinds.items() if last in section.model_fields]
    if owners:
        reason = f"applies only to {' and '.join(owners)}, but {table}.kind is '{loc[-2]}'"
        return InvalidSettingError(name, reason, f"Set {table}.kind to {' or '.join(owners)}, or leave {name} out.")
    keys = _keys(kinds[str(loc[-2])], f"{table}.") if is_layer else _keys(kind)
    similar = _similar_key(name, [key for key, key_is_table in keys if key_is_table == is_table])
    section = name.partition(".")[0]
    command = section if section in ("eval", "generate", "stream", "bench") else "train"
    remedy = f"xlcli {command} --print-config lists the keys."
    if similar is not None:
        remedy = f"Did you mean '{similar}'?"
    return InvalidSettingError(name, "is an unknown key", remedy)


def _similar_key(name: str, known: Sequence[str]) -> str | None:
    """The key whose last part is most like that of `name`: of the same table if one is similar, else of any."""
    # If several tables have a key with that last part, it is the one whose whole name is most like `name`.
    of_same_table = [key for key in known if _table_of(key) == _table_of(name)]
    for candidates in (of_same_table, known):
        last_parts = [_last_part(key) for key in candidates]
        similar = difflib.get_close_matches(_last_part(name), last_parts, n=1, cutoff=0.5)
        if similar:
            alike = [key for key in candidates if _last_part(key) == similar[0]]
            return difflib.get_close_matches(name, alike, n=1, cutoff=0.0)[0]
    return None


def _table_of(key: str) -> str:
    return key.rpartition(".")[0]


def _last_part(key: str) -> str:
    return key.rpartition(".")[2]


def _keys(kind: type[BaseConfig], prefix: str = "") -> Iterable[tuple[str, bool]]:
    """Dotted keys of a section and of its tables, and whether each is a table."""
    for name, field in kind.model_fields.items():
        sections: list[type[BaseConfig]] = []
        only_section = table(field)
        if field.discriminator:
            sections = list(UNIONS[name].values())
        elif only_section is not None:
            sections = [only_section]
        yield prefix + name, bool(sections)
        for section in sections:
            yield from _keys(section, f"{prefix}{name}.")
