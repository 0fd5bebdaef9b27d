"""Import and export of models of other programs. Imports no torch; `import_model` and `export_model` do."""

from __future__ import annotations

from pathlib import Path

from xlcli.files import read_json
from xlcli.interchange.format import Format as Format
from xlcli.interchange.source import CONFIG
from xlcli.interchange.source import Source as Source

_ALL: tuple[Format, ...] = ()
FORMATS = {each.name: each for each in _ALL}
"""Formats by name. A new format is added here."""


def find_format(path: Path) -> str | None:
    """The format of the model at `path`, a folder or file; None if it is of none that is known.

    Raises:
        CheckpointError: Its `config.json` is damaged.
    """
    folder = path if path.is_dir() else path.parent
    kind = read_json((folder / CONFIG).resolve()).get("model_type") if (folder / CONFIG).exists() else None
    return next((name for name, each in FORMATS.items() if kind in each.model_types), None)
