"""Presets: TOML files of differences from the defaults, beside the bundled models. Never imports torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlcli import config
from xlcli.errors import ConfigError

AUTOMATIC = ("small", "short", "base", "tiny")  # training chooses among these by text size and device


@dataclass(frozen=True, slots=True)
class Preset:
    """A named configuration. `about` is one sentence on its size, purpose and cost."""

    name: str
    about: str
    path: Path


def models_folder() -> Path:
    """Folder of presets and bundled models: inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_models"
    return installed if installed.is_dir() else package.parent / "models"


def preset_names() -> list[str]:
    """Names of all presets, which are not read."""
    return sorted(path.stem for path in models_folder().glob("*.toml"))


def list_presets() -> tuple[Preset, ...]:
    """All presets, sorted by name."""
    paths = sorted(models_folder().glob("*.toml"), key=lambda path: path.stem)
    return tuple(Preset(path.stem, str(config.read_toml(path).get("about", "")), path) for path in paths)


def find_preset(name: str) -> Preset:
    """The preset of this name; `ConfigError` with similar names if there is none."""
    presets = {preset.name: preset for preset in list_presets()}
    if name in presets:
        return presets[name]
    near = difflib.get_close_matches(name, presets, n=3) or ["tiny", "small", "medium"]
    raise ConfigError(f"there is no preset '{name}'.", f"Try {' or '.join(near)}; 'xlcli models presets' lists all.")


def read_preset(name: str) -> config.Tree:
    """Tables of the preset; `ConfigError` with similar names if there is none."""
    tree = config.read_toml(find_preset(name).path)
    tree.pop("about", None)
    return tree


def configurations(settings: Mapping[str, Any], preset: str | None = None) -> dict[str, config.Config]:
    """The settings over the named preset, or over each automatic preset with which they are legal, by preset name.

    `ConfigError` if there is no such preset, or the settings are illegal with it, or with every automatic one.
    """
    configs: dict[str, config.Config] = {}
    refusals: list[ConfigError] = []
    names = AUTOMATIC if preset is None else (preset,)
    for name in names:
        tree = read_preset(name)
        try:
            configs[name] = config.make(tree, settings)
        except ConfigError as error:
            refusals.append(error)
    if not configs:
        raise refusals[0]
    return configs
