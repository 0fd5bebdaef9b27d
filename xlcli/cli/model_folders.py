"""Removal and renaming of models, for `xlcli models rm` and `xlcli models mv`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from xlcli.cli import quantities
from xlcli.errors import ConfigError

if TYPE_CHECKING:
    from xlcli.cli.render import Screen


def remove(names: Sequence[str], screen: Screen, *, yes: bool) -> None:
    """Removes models after a question, or `yes`: all of them, or none if one cannot be removed."""
    from xlcli.store import removal

    folders = list(dict.fromkeys(removal.own_model(name) for name in names))
    for folder in folders:
        removal.require_removable(folder)
    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise ConfigError("removing needs a yes, and standard input is no terminal.", "Add --yes.")
    with ExitStack() as locks:
        for folder in folders:
            if warning := locks.enter_context(removal.claimed(folder)):
                screen.say(warning, "warning")
        sizes = [_size(folder) for folder in folders]
        listed = ", ".join(f"{folder} ({quantities.size(size)})" for folder, size in zip(folders, sizes, strict=True))
        if not yes and not screen.confirm(f"Remove {listed}?"):
            screen.say("nothing was removed")
            return
        for folder in folders:
            removal.remove(folder)
    if screen.json:
        screen.object({"removed": folders, "bytes": sum(sizes)})
    screen.say(f"{listed} removed")


def rename(old: str, new: str, screen: Screen) -> None:
    """Renames a model. A plain new name is a name in the folder of the model."""
    from xlcli.store import removal

    folder = removal.own_model(old)
    if not new or new in (".", ".."):
        raise ConfigError(f"'{new}' is no name of a model.", "Type xlcli models mv OLD NEW.")
    target = folder.parent / new if Path(new).name == new else Path(new)
    with removal.claimed(folder) as warning:
        if warning:
            screen.say(warning, "warning")
        removal.move(folder, target)
    if screen.json:
        screen.object({"from": folder, "to": target})
    screen.say(f"{folder} is now {target}")


def _size(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
