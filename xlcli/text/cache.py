"""The cache folder, which holds token files and the copy of standard input."""

from __future__ import annotations

import os
from pathlib import Path

from xlcli.errors import ResourceError


def cache_folder() -> Path:
    """`XLCLI_CACHE`, else `XDG_CACHE_HOME/xlcli`, else `~/.cache/xlcli`; created with mode 0700 if missing.

    Raises:
        ResourceError: It cannot be created or written.
    """
    given, base = os.environ.get("XLCLI_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(given) if given else (Path(base) if base else Path.home() / ".cache") / "xlcli"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError, ValueError) as error:
        raise ResourceError(f"the cache folder cannot be created: {error}.", _REMEDY) from None
    if not writable:
        raise ResourceError(f"the cache folder {folder} cannot be written.", _REMEDY)
    return folder


_REMEDY = "Set XLCLI_CACHE to a writable folder."
