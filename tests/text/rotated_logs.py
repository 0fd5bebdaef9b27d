"""Scenarios of logs that are rotated, drawn at random: what a reader must have read at their end.

Every line is unique. A reader has each line of the log once, none twice, and none of another file. A line may be
missing only if a warning says so. There is no warning where files were only renamed, one between two looks.
"""

import dataclasses
import os
import random
import shutil
import time
import zlib
from collections import Counter
from pathlib import Path

import pytest

from xlcli.text import follow
from xlcli.text.follow import FollowedFile


class Clock:
    """Monotonic time that is set forward by hand."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@dataclasses.dataclass
class World:
    """A folder with a log, its writers, its rotation, other files, and a reader."""

    folder: Path
    draw: random.Random
    clock: Clock
    denied: set
    scheme: str = ""
    copies: bool = False
    packs: str = "never"
    keep: int = 99

    def __post_init__(self):
        self.folder.mkdir()
        self.log = self.path = self.folder / "app.log"
        self.stamp = 20260101
        self.lines, self.foreign, self.read, self.warnings = [], [], b"", []
        self.number, self.rotated = 0, []
        self.lossy = self.copies
        self.n_rotations = self.n_seen = self.n_seen_saved = 0
        if self.scheme == "link":
            (self.folder / "pods").mkdir()
            self.path = self.folder / "pods/0.log"
            self.log.symlink_to(self.path)
        if self.scheme == "today":
            self.path = self.folder / "app-20260101.log"
            self.log.symlink_to(self.path)
        if self.scheme == "olddir":
            (self.folder / "old").mkdir()
            for n in range(3):
                (self.folder / f"old/app.log-2025010{n}").write_text(f"older text {n} of the log, read long ago\n" * 3)
        self.path.touch()
        self.position, self.saved = None, 0
        self.restart()

    # What writers do

    def made(self, path):
        """A new file may be read, also if it has the number of one that was removed."""
        status = path.stat()
        self.denied.discard((status.st_dev, status.st_ino))

    def text(self):
        self.number += 1
        self.lines.append(
            f"{self.number}: {self.draw.random()} " + "the dog slept in the sun " * self.draw.randrange(5)
        )
        return f"{self.lines[-1]}\n".encode()

    def write(self):
        data = b"".join(self.text() for _ in range(self.draw.randrange(1, 9)))
        with self.path.open("ab") as file:
            file.write(data)

    def write_late(self):
        """A second writer adds to the file that was rotated last, as long as it is not packed."""
        if self.rotated and not self.copies and self.rotated[-1].suffix != ".gz" and self.rotated[-1].exists():
            with self.rotated[-1].open("ab") as file:
                file.write(self.text())

    def write_other(self):
        """Another program writes to a log beside this one, whose name looks rotated."""
        name = self.draw.choice(["app.99.log", "application.log", "app-error.log", "other.log", "app2.log"])
        line = f"foreign {len(self.foreign)} {self.draw.random()}"
        self.foreign.append(line)
        self.lossy |= name == "app.99.log" and self.scheme == "inner_numbers"
        with (self.folder / name).open("a") as file:
            file.write(line + "\n")

    def rotate_other(self):
        for path in self.folder.glob("app-error.log"):
            path.rename(path.with_name(f"app-error.log.{self.draw.randrange(1000)}"))

    def back_up(self):
        """Somebody copies the log."""
        if self.path.stat().st_size:
            shutil.copy(self.path, self.folder / self.draw.choice(["app.log.bak", "app.log.20251231", "app-copy.log"]))

    def set_clock(self):
        """The clock was wrong when files were written last."""
        for path in (self.path, *self.rotated[-1:]):
            if path.exists():
                now = time.time() + self.draw.choice([-86400, 86400])
                os.utime(path, (now, now))

    # What rotates

    def rotate(self):
        if not self.path.stat().st_size:
            return
        time.sleep(0.01)  # the clock of the file system is coarse
        self.n_rotations += 1
        self.lossy |= self.n_rotations - self.n_seen > 1
        self.stamp += 1
        to = getattr(self, f"to_{self.scheme}")()
        if self.scheme == "today":
            to.touch()
            self.made(to)
            self.log.unlink()
            self.log.symlink_to(to)
            self.rotated.append(self.path)
            self.path = to
        elif self.copies:
            shutil.copy(self.path, to)
            self.made(to)
            os.truncate(self.path, 0)
            self.rotated.append(to)
        else:
            self.path.rename(to)
            self.path.touch()
            self.made(self.path)
            self.rotated.append(to)
        self.pack()
        while len(self.rotated) > self.keep:
            self.rotated.pop(0).unlink()
            self.lossy = True

    def pack(self):
        at = {"never": None, "now": -1, "later": -2}[self.packs]
        if at is not None and len(self.rotated) >= -at and self.rotated[at].suffix != ".gz":
            path = self.rotated[at]
            packer = zlib.compressobj(wbits=31)
            packed = path.with_name(path.name + ".gz")
            packed.write_bytes(packer.compress(path.read_bytes()) + packer.flush())
            shutil.copystat(path, packed)
            path.unlink()
            self.rotated[at] = packed
            self.lossy = True
            self.made(packed)

    def shifted(self, name):
        """Renames the rotated files, as the next one comes, and returns the name of that."""
        for i, path in enumerate(self.rotated):
            number, suffix = len(self.rotated) - i + 1, ".gz" if path.suffix == ".gz" else ""
            self.rotated[i] = path.rename(path.with_name(name % number + suffix))
        return self.path.with_name(name % 1)

    def to_numbers(self):
        return self.shifted("app.log.%d")

    def to_inner_numbers(self):
        return self.shifted("app.%d.log")

    def to_rising_numbers(self):
        return self.path.with_name(f"app-01-31-2026-{self.stamp - 20260100}.log")

    def to_dates(self):
        return self.path.with_name(f"app.log-{self.stamp}")

    def to_dotted_dates(self):
        return self.path.with_name(f"app.log.2026-{self.stamp % 10000 // 100:02}-{self.stamp % 100:02}_00")

    def to_inner_dates(self):
        return self.path.with_name(f"app__{self.stamp}_00-00-00.log")

    def to_first_dates(self):
        return self.path.with_name(f"{self.stamp}-app.log")

    def to_old(self):
        old = self.path.with_name("app.log.old")
        if old.exists():
            self.rotated[-1] = old.rename(self.path.with_name("app.log.older"))
            if len(self.rotated) > 1:  # the third file is gone
                self.rotated = self.rotated[-1:]
                self.lossy = True
        return old

    def to_link(self):
        return self.path.with_name(f"0.log.{self.stamp}-082034")

    def to_olddir(self):
        return self.folder / "old" / f"app.log-{self.stamp}"

    def to_today(self):
        return self.folder / f"app-{self.stamp}.log"

    # What the reader meets

    def take(self):
        while (data := next(self.portions)) is not None:
            self.read += data
        self.n_seen = self.n_rotations

    def take_one(self):
        self.read += next(self.portions) or b""
        self.n_seen = self.n_rotations

    def save(self):
        self.position, self.saved, self.n_seen_saved = self.followed.position, len(self.read), self.n_seen

    def restart(self):
        """The reader is killed and begins again where it saved."""
        self.read, self.n_seen = self.read[: self.saved], self.n_seen_saved
        places = self.position.files if self.position else ()
        retired = places[:-1] if self.n_rotations == self.n_seen else places
        is_unread = any(not place.offset for place in retired)  # only its inode is known
        self.lossy |= is_unread or self.n_rotations - self.n_seen > 1
        self.followed = FollowedFile(self.log, self.position, self.warnings.append)
        self.portions = self.followed.portions(bytes.rfind)
        self.save()

    def stop(self):
        """The reader is stopped, and begins again."""
        self.save()
        self.restart()

    def deny(self):
        """A file loses the permission to be read."""
        path = self.draw.choice([self.path, *(() if self.copies else self.rotated[-2:])])
        if path.exists():
            status = path.stat()
            self.denied.add((status.st_dev, status.st_ino))
            self.lossy = True

    def allow(self):
        self.denied.clear()

    def wait(self):
        self.clock.now += self.draw.choice([0.1, 1, 100])
        self.take()

    def finish(self):
        self.allow()
        for _ in range(3):
            self.take()
            self.write()
            self.take()
            self.clock.now += 100
        self.take()

    def problem(self):
        """What is wrong with the text that was read; None if it is right."""
        found = Counter(self.read.decode().split("\n")[:-1])
        twice = [line for line, n in found.items() if n > 1]
        foreign = [line for line in found if line not in self.lines]
        missing = [line for line in self.lines if line not in found]
        if twice or foreign:
            return f"twice: {twice[:3]}, foreign: {foreign[:3]}, warnings: {self.warnings}"
        if self.lines[-1] in missing:
            return f"the last line is missing, warnings: {self.warnings}"
        if missing and not self.warnings:
            return f"missing without a warning: {missing[:3]}"
        # Files that might be parts of the log.
        others = ("app.log.bak", "app.log.20251231", "app-copy.log", "app.99.log", "app2.log")
        warnings = [warning for warning in self.warnings if not any(name in warning for name in others)]
        if not self.lossy and (missing or warnings):
            return f"nothing was lost, missing: {missing[:3]}, warnings: {self.warnings}"
        return None


SCHEMES = [name.removeprefix("to_") for name in vars(World) if name.startswith("to_")]
EVENTS = (
    "write write write write_late write_other rotate_other back_up set_clock "
    "rotate rotate take take take_one save stop restart wait"
)


def scenario(seed: int, folder: Path) -> World:
    """A world after a number of events and its end."""
    draw, clock, denied = random.Random(seed), Clock(), set()
    events = EVENTS.split() + ["deny", "allow"] * draw.randrange(2)
    real_open = os.open

    def guarded(path, *arguments, **options):
        descriptor = real_open(path, *arguments, **options)
        status = os.fstat(descriptor)
        if not arguments[0] & os.O_CREAT and (status.st_dev, status.st_ino) in denied:
            os.close(descriptor)
            raise PermissionError(13, "Permission denied", str(path))
        return descriptor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow.time, "monotonic", clock.monotonic)
        patch.setattr(follow.os, "open", guarded)
        scheme = draw.choice(SCHEMES)
        copies = draw.random() < 0.3 and scheme not in ("today", "old")
        packs, keep = draw.choice(["never", "now", "later"]), draw.choice([1, 3, 99])
        # A copy that is removed before the reader looks again leaves no trace.
        world = World(folder, draw, clock, denied, scheme, copies, packs, 99 if copies else keep)
        world.write()
        world.save()
        for _ in range(draw.randrange(60)):
            getattr(world, draw.choice(events))()
        world.finish()
    return world
