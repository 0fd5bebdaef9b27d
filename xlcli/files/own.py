"""Folders and files that no other user can write: the cache folder, and those below it whose content is executed.

A group with the name of the user and without other members may write: systems with such groups set the umask 002.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from xlcli.errors import ConfigError, ResourceError
from xlcli.files.plain import open_regular

CACHE = "XLCLI_CACHE"
"""Environment variable of the cache folder."""


def cache_folder() -> Path:
    """`XLCLI_CACHE`, else `XDG_CACHE_HOME/xlcli`, else `~/.cache/xlcli`, as `own_folder`."""
    given, base = os.environ.get(CACHE), os.environ.get("XDG_CACHE_HOME")
    return own_folder(Path(given or os.path.join(base or "~/.cache", "xlcli")), CACHE)  # noqa: PTH118


def code_folder(name: str, variable: str) -> Path:
    """The folder in this environment variable, else the one of this name in the cache folder, as `own_folder`."""
    given = os.environ.get(variable)
    return own_folder(Path(given), variable) if given else own_folder(cache_folder() / name, CACHE)


def own_folder(folder: Path, variable: str) -> Path:
    """A folder without links in its path; it is made with mode 0700 if it is missing.

    The folders above it are checked, too, but for those above the home folder: who can replace that needs no cache.

    Args:
        folder: The folder.
        variable: Environment variable that chooses it.

    Raises:
        ConfigError: Another user owns or can write the folder, or one above it that is not sticky.
        ResourceError: The folder cannot be created or written.
    """
    remedy = f"Set {variable} to a folder that only you can write."
    try:
        folder = folder.expanduser()
        for each in (*reversed(folder.parents), folder):
            each.mkdir(mode=0o700, exist_ok=True)
        folder = folder.resolve()
        home = os.path.expanduser("~")  # noqa: PTH111
        above_home = Path(home).resolve().parents if os.path.isabs(home) else ()  # noqa: PTH117
        checked = [each for each in (*reversed(folder.parents), folder) if each not in above_home]
        statuses = [each.lstat() for each in checked]  # from above: below a folder that is safe, nothing is exchanged
        writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError, ValueError) as error:
        raise ResourceError(f"the cache folder cannot be created: {error}.", remedy) from None
    for each, status in zip(checked, statuses, strict=True):
        if not _is_own(status, may_be_sticky=each != folder):
            raise ConfigError(f"{folder} is not safe: {each} belongs to another user, or others can write it.", remedy)
    if not writable:
        raise ResourceError(f"the cache folder {folder} cannot be written.", remedy)
    return folder


def read_own(path: Path) -> bytes | None:
    """Content of a file; None if it is missing.

    Raises:
        ConfigError: Another user owns or can write it.
        CheckpointError: It is a link or no file, or cannot be read.
    """
    if not os.path.lexists(path):
        return None
    with open_regular(path) as (descriptor, status):
        if not _is_own(status):
            raise ConfigError(f"{path} belongs to another user, or others can write it.", "Remove it.")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()


def _is_own(status: os.stat_result, *, may_be_sticky: bool = False) -> bool:
    """Whether this user or root owns a file or folder, and no other user can write it, or replace what is in it."""
    if status.st_uid not in (os.geteuid(), 0):
        return False
    if may_be_sticky and status.st_mode & stat.S_ISVTX:
        return True
    others = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid))
    return not others


def _is_private(gid: int) -> bool:
    """Whether a group is that of this user alone."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
