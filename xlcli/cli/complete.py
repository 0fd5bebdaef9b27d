"""Completion in shells of the names of models, presets and settings. Imports neither torch nor pydantic."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

_PLAIN = re.compile(r"[\w.+][\w.+-]*")


def models(incomplete: str) -> list[tuple[str, str]]:
    """Names of the models in `./models` and of the bundled ones. A path is left to the shell."""
    from xlcli.presets import models_folder

    bundled = sorted(path.parent.name for path in models_folder().glob("*/config.json"))
    return _beginning(incomplete, own_models(incomplete), ((name, "bundled") for name in bundled))


def own_models(incomplete: str) -> list[tuple[str, str]]:
    """Names of the models in `./models`, damaged ones too."""
    found = sorted(path.parent.name for path in Path("models").glob("*/config.json"))
    return _beginning(incomplete, ((name, "in ./models") for name in found if not name.startswith(".")))


def presets(incomplete: str) -> list[tuple[str, str]]:
    """Presets."""
    from xlcli.presets import models_folder

    return _beginning(incomplete, ((name, "") for name in sorted(path.stem for path in models_folder().glob("*.toml"))))


def devices(incomplete: str) -> list[tuple[str, str]]:
    """Devices."""
    return _beginning(incomplete, [("auto", ""), ("cpu", ""), ("cuda", "")])


def models_and_presets(incomplete: str) -> list[tuple[str, str]]:
    """Names of models, then of presets."""
    return _beginning(incomplete, models(incomplete), presets(incomplete))


def _beginning(incomplete: str, *groups: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Words that begin so, each once, with its description in the first group that holds it.

    One with a character that a shell may interpret is left out: zsh expands it on Tab.
    """
    found: dict[str, str] = {}
    for word, about in itertools.chain(*groups):
        if word.startswith(incomplete) and _PLAIN.fullmatch(word):
            found.setdefault(word, about)
    return list(found.items())
