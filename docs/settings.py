"""Writes `settings.md`, beside this file, from the declarations of all settings: `python docs/settings.py`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package of this checkout, not an installed one

from xlcli.config import BaseConfig, Config, Option, tree

PAGE = Path(__file__).with_suffix(".md")
INTRODUCTION = """# Settings

All settings by section.
Set one by its key, as in `--set train.grad_clip=0.5`, or many in a file (`--config FILE.toml`).
Some have an option, and those outside `model` have a variable such as `XLCLI_GRAD_CLIP`.
In Python, the settings of `eval`, `generate` and `stream` are keyword arguments.
A preset replaces defaults (`xlcli models presets`).
Where the default is empty, the last column explains it.

`python docs/settings.py` writes this page.
"""
NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "array": "list"}
LARGE = 2**24


def page() -> str:
    """The text of the page."""
    sections = ((name, tree.table(field)) for name, field in Config.model_fields.items())
    return INTRODUCTION + "".join(section(name, kind) for name, kind in sections if kind is not None)


def section(heading: str, kind: type[BaseConfig]) -> str:
    """The table of a section, and those of the tables in it."""
    rows, below, schemas = "", "", kind.model_json_schema()["properties"]
    for name, field in kind.model_fields.items():
        table = tree.table(field)
        if field.discriminator is not None:
            tables = tree.UNIONS[name].items()
            below += "".join(section(f"{heading}.{name} of kind {tag}", each) for tag, each in tables)
        elif table is not None:
            below += section(f"{heading}.{name}", table)
        elif field.description:
            shown = (f"`{part.spellings[-1]}`" for part in field.metadata if isinstance(part, Option))
            unset = field.is_required() or field.default_factory is not None
            default = "" if unset or field.default in (None, ()) else f"`{field.default}`"
            cells = (f"`{name}`", values(schemas[name]), default, next(shown, ""), field.description)
            rows += f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    if not rows:
        return below
    head = "| key | value | default | option | meaning |\n| --- | --- | --- | --- | --- |\n"
    return f"\n## {heading}\n\n{head}{rows}{below}"


def values(schema: Mapping[str, Any]) -> str:
    """Values that a schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(values(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{choice}`" for choice in schema.get("enum", [schema.get("const")]))
    name = NAMES[schema["type"]]
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high = schema.get("maximum", schema.get("exclusiveMaximum", LARGE))
    if name not in ("integer", "number") or (low <= 1 and high >= LARGE):
        return name
    return f"{name}, {low:g} to {high:g}" if high < LARGE else f"{name}, at least {low:g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
