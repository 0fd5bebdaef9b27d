"""A run that does nothing but commit: `python committing.py FOLDER KEEP`. Says each step once it is durable."""

import hashlib
import sys
from pathlib import Path

from xlcli.files import write_atomic
from xlcli.store.commit import commit, latest, step_of
from xlcli.store.lock import clean

FILES = ("weights.safetensors", "optimizer.safetensors", "state.json")


def content(step: int, name: str) -> bytes:
    return hashlib.sha256(f"{step} {name}".encode()).digest() * 1500


def write(step: int):
    def fill(folder: Path) -> None:
        for name in FILES:
            write_atomic(folder / name, content(step, name))

    return fill


def is_whole(path: Path) -> bool:
    return all((path / name).read_bytes() == content(step_of(path), name) for name in FILES)


def main() -> None:
    folder, keep = Path(sys.argv[1]), int(sys.argv[2])
    clean(folder)
    found = latest(folder).path
    step = step_of(found) if found else 0
    print("ready", flush=True)
    while True:
        step += 1
        commit(folder, step, write(step), keep)
        print(step, flush=True)


if __name__ == "__main__":
    main()
