"""Ends with 1 if this checkout, or its history since the version, has a file above 2 MB that is no bundled model.

    python tests/weight.py [FOLDER]

What was committed once stays in every full clone, even after it is deleted. A shallow clone has its last commits only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

MOST_BYTES = 2_000_000
BUNDLED = "models/books/"


def main(folder: Path) -> int:
    """Prints each file that is too large, with its size."""
    if not is_checkout(folder):
        print("git does not know this folder: no file is weighed")
        return 0
    sizes = sizes_since(folder, commit_of_version(folder))
    for path in git(folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0"):
        file = folder / path
        if path and file.is_file():
            sizes[path] = max(file.stat().st_size, sizes.get(path, 0))
    large = {path: size for path, size in sizes.items() if size > MOST_BYTES and not path.startswith(BUNDLED)}
    for path, size in sorted(large.items()):
        print(f"{path}: {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f}; keep it out of the history")
    return 1 if large else 0


def is_checkout(folder: Path) -> bool:
    """True if git is installed and its work tree begins here; a source distribution has none."""
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return False
    return subprocess.run(["git", "-C", folder, "status", "--short"], capture_output=True).returncode == 0


def commit_of_version(folder: Path) -> str | None:
    """The commit that gave the version of `pyproject.toml` its date in the changelog, or None if it is not here."""
    version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    heading = rf"^## {re.escape(version)} \([0-9]"
    commits = git(folder, "log", "--format=%H", "-G", heading, "--", "CHANGELOG.md").split()
    return commits[-1] if commits else None


def sizes_since(folder: Path, commit: str | None) -> dict[str, int]:
    """Size in bytes of the largest version of each file that a commit after `commit` has added or changed."""
    if commit is None:
        return {}
    objects = git(folder, "rev-list", "--objects", f"{commit}..HEAD")
    described = git(folder, "cat-file", "--batch-check=%(objecttype) %(objectsize) %(rest)", given=objects)
    sizes: dict[str, int] = {}
    for line in described.splitlines():
        kind, size, path = line.split(" ", 2)
        if kind == "blob":
            sizes[path] = max(int(size), sizes.get(path, 0))
    return sizes


def git(folder: Path, *arguments: str, given: str | None = None) -> str:
    """Output of a command of git."""
    done = subprocess.run(["git", "-C", folder, *arguments], input=given, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
