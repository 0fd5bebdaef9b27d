"""A disk that loses power: a recorded log of operations on files, and the folders that a crash may leave of it.

An operation is durable after `fsync` of its file (writes) or of its folder (names). Of all others since then a crash
keeps any subset in which an operation comes after the earlier ones on the same name; a write may be kept in part, and a
rename is atomic. No file system loses more, if the disk does not lie about `fsync`.
"""

import builtins
import io
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Operation(NamedTuple):
    """One change: `names` are the (folder, name) that it touches, `syncs` what makes it durable.

    A folder or file is a number, which stays the same when it is renamed.
    """

    kind: str
    names: tuple[tuple[int, str], ...] = ()
    syncs: int = -1
    offset: int = 0
    data: bytes = b""
    number: int = -1


@dataclass
class Tree:
    """Folders and files by number; 0 is the root."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> "Tree":
        tree = cls()
        numbers = {root: 0}
        for path in sorted(root.rglob("*")):
            numbers[path] = number = len(numbers)
            tree.folders[numbers[path.parent]][path.name] = number
            if path.is_dir():
                tree.folders[number] = {}
            else:
                tree.files[number] = bytearray(path.read_bytes())
        return tree

    def copy(self) -> "Tree":
        return Tree(
            {n: dict(names) for n, names in self.folders.items()}, {n: bytearray(d) for n, d in self.files.items()}
        )

    def apply(self, op: Operation) -> None:
        match op.kind:
            case "create":
                self._enter(*op.names[0], op.number)
                self.files.setdefault(op.number, bytearray())
            case "mkdir":
                self._enter(*op.names[0], op.number)
                self.folders.setdefault(op.number, {})
            case "remove":
                self.folders[op.names[0][0]].pop(op.names[0][1], None)
            case "rename":
                (source, old), (target, new) = op.names
                number = self.folders[source].pop(old)
                self._enter(target, new, number)
            case "truncate":
                del self.files.setdefault(op.number, bytearray())[op.offset :]
            case "write":
                content = self.files.setdefault(op.number, bytearray())
                content.extend(bytes(max(0, op.offset - len(content))))
                content[op.offset : op.offset + len(op.data)] = op.data

    def _enter(self, folder: int, name: str, number: int) -> None:
        self.folders.setdefault(folder, {})[name] = number

    def paths(self, folder: int = 0, prefix: str = "") -> dict[str, bytes | None]:
        """Content of every file that can be reached, None for a folder."""
        found: dict[str, bytes | None] = {}
        for name, number in self.folders.get(folder, {}).items():
            if number in self.folders:
                found[prefix + name] = None
                found |= self.paths(number, f"{prefix}{name}/")
            else:
                found[prefix + name] = bytes(self.files[number])
        return found

    def write(self, root: Path) -> None:
        for name, content in self.paths().items():
            if content is None:
                (root / name).mkdir()
            else:
                (root / name).write_bytes(content)


class Recorder:
    """Records the operations below `root` that are made through `os`, while it is installed.

    Attributes:
        before: The tree at the start.
        log: The operations, and `said` entries of the caller.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.before = Tree.of(self.root)
        self.now = self.before.copy()
        self.log: list[Operation] = []
        self.next_number = 1 + max([0, *self.before.folders, *self.before.files])

    def say(self, text: str) -> None:
        """Notes that the user was told something."""
        self.log.append(Operation("said", data=text.encode()))

    def install(self, replace: Callable[[object, str, object], None]) -> None:
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "ftruncate", "mkdir", "rename")}
        real |= {name: getattr(os, name) for name in ("unlink", "rmdir", "replace")}
        opened = io.open

        def open_(path, flags, mode=0o777, *, dir_fd=None):
            place = self._place(path, dir_fd)
            existed = place and place[1] in self.now.folders.get(place[0], {})
            descriptor = real["open"](path, flags, mode, dir_fd=dir_fd)
            if place and not existed and flags & os.O_CREAT:
                self._add("create", (place,), syncs=place[0], number=self._new())
            elif place and flags & os.O_TRUNC:
                number = self.now.folders[place[0]][place[1]]
                self._add("truncate", syncs=number, number=number)
            return descriptor

        def write(descriptor, data):
            count = real["write"](descriptor, data)
            if (number := self._number(descriptor)) is not None:
                offset = os.lseek(descriptor, 0, os.SEEK_CUR) - count
                self._add("write", syncs=number, number=number, offset=offset, data=bytes(data)[:count])
            return count

        def fsync(descriptor):
            real["fsync"](descriptor)
            if (number := self._number(descriptor)) is not None:
                self._add("sync", number=number)

        def mkdir(path, mode=0o777, *, dir_fd=None):
            place = self._place(path, dir_fd)
            real["mkdir"](path, mode, dir_fd=dir_fd)
            if place:
                self._add("mkdir", (place,), syncs=place[0], number=self._new())

        def move(name):
            def moved(source, target, **kwargs):
                places = self._place(source, None), self._place(target, None)
                real[name](source, target, **kwargs)
                if all(places):
                    self._add("rename", places, syncs=places[1][0])

            return moved

        def remove(name):
            def removed(path, *, dir_fd=None):
                place = self._place(path, dir_fd)
                real[name](path, dir_fd=dir_fd)
                if place:
                    self._add("remove", (place,), syncs=place[0])

            return removed

        def open_file(file, mode="r", *args, **kwargs):
            place = None if isinstance(file, int) else self._place(file, None)
            assert not place or not set(mode) & set("wax"), f"{file} is written without os.write"
            return opened(file, mode, *args, **kwargs)

        for name, function in {
            "open": open_, "write": write, "fsync": fsync, "mkdir": mkdir, "rename": move("rename"),
            "replace": move("replace"), "unlink": remove("unlink"), "rmdir": remove("rmdir"),
        }.items():  # fmt: skip
            replace(os, name, function)
        replace(io, "open", open_file)
        replace(builtins, "open", open_file)

    def _add(self, kind: str, names: tuple = (), **values) -> None:
        op = Operation(kind, names, **values)
        self.now.apply(op)
        self.log.append(op)

    def _new(self) -> int:
        self.next_number += 1
        return self.next_number

    def _place(self, path, dir_fd) -> tuple[int, str] | None:
        """Number of the folder and name of a path; None outside the root."""
        start = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        full = start / os.fsdecode(path)
        number = self._walk(full.parent)
        return None if number is None else (number, full.name)

    def _number(self, descriptor: int) -> int | None:
        """Number of an open file or folder; None outside the root."""
        return self._walk(Path(f"/proc/self/fd/{descriptor}").readlink())

    def _walk(self, path: Path) -> int | None:
        if not path.is_relative_to(self.root):
            return None
        number = 0
        for part in path.relative_to(self.root).parts:
            number = self.now.folders.get(number, {}).get(part)
            if number is None:
                return None
        return number


def crash(recorder: Recorder, at: int, draw: random.Random | None, *, drop: bool = False) -> Tree:
    """The tree after a crash before operation `at` of the log.

    Args:
        recorder: A recorded log.
        at: Number of operations that were made.
        draw: Chooses which operations are kept that are not durable; None keeps all.
        drop: Keep none of them.
    """
    made = recorder.log[:at]
    synced: set[int] = set()
    needed: set[tuple[int, str]] = set()  # names of durable operations, which need the earlier ones on the same names
    durable = [False] * at
    for i in range(at - 1, -1, -1):
        if made[i].kind == "sync":
            synced.add(made[i].number)
        durable[i] = made[i].syncs in synced or not needed.isdisjoint(made[i].names)
        if durable[i]:
            needed.update(made[i].names)
    share = draw.choice((0.1, 0.5, 0.9, 0.97)) if draw else float(not drop)
    tree, lost = recorder.before.copy(), set()
    for op, is_durable in zip(made, durable, strict=True):
        if op.kind in ("sync", "said"):
            continue
        kept = is_durable or (draw.random() < share if draw else not drop)
        if kept and lost.isdisjoint(op.names):
            if op.kind == "write" and not is_durable and draw and draw.random() < 0.2:
                op = op._replace(data=op.data[: draw.randrange(len(op.data) + 1)])
            tree.apply(op)
        else:
            lost.update(op.names)
    return tree
