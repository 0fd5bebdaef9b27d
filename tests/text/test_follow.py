"""A file that is followed: every byte once, whatever happens to the file and wherever the reader begins again."""

import dataclasses
import os
import random
import shutil
import time

import pytest

from xlcli.text import follow
from xlcli.text.documents import json_lines
from xlcli.text.follow import FollowedFile


class Log:
    """A log that is written and rotated, the text written to it, and a reader of it."""

    def __init__(self, folder):
        self.path = folder / "app.log"
        self.path.touch()
        self.text, self.read, self.notices = b"", b"", []
        self.position, self.time = None, time.time_ns()
        self.restart()

    def write(self, data):
        with self.path.open("ab") as file:
            file.write(data)
        self.text += data
        self.changed(self.path)

    def changed(self, path):
        """Gives a file a time of its own, since the file system counts milliseconds."""
        self.time += 10**9
        os.utime(path, ns=(self.time, self.time))

    def older(self):
        """Renames the rotated files, as the next one comes."""
        for number in range(9, 0, -1):
            if (old := self.path.with_name(f"{self.path.name}.{number}")).exists():
                old.rename(self.path.with_name(f"{self.path.name}.{number + 1}"))
        return self.path.with_name(f"{self.path.name}.1")

    def rotate(self):
        self.path.rename(self.older())
        self.path.touch()

    def copy_and_truncate(self):
        self.changed(shutil.copy(self.path, self.older()))
        os.truncate(self.path, 0)

    def restart(self, **options):
        self.followed = FollowedFile(self.path, self.position, self.notices.append)
        self.portions = self.followed.portions(**{"unfinished": False, "by_line": False} | options)

    def take(self, n=None):
        """Reads what there is, or n portions."""
        while n != 0 and (data := next(self.portions)) is not None:
            self.read += data
            self.position = self.followed.position
            n = None if n is None else n - 1


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path)


def lines(first, n):
    text = b"%d: the fox said %d, and went home, but the dog slept in the sun the whole day\n"
    return b"".join(text % (i, i * i) for i in range(first, first + n))


def test_lines_are_read_when_they_are_complete(log):
    log.take()
    assert log.read == b""
    log.write(b"one\ntw")
    log.take()
    assert log.read == b"one\n"
    log.write(b"o\n")
    log.take()
    assert log.read == b"one\ntwo\n"
    log.write(b"x" * (2 * follow.PORTION))
    log.take()
    assert log.read == log.text
    assert not log.notices


def test_unfinished_lines_are_read_if_asked(log):
    log.restart(unfinished=True)
    log.write(b"one\ntw")
    log.take()
    assert log.read == b"one\ntw"


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("rotate", ["rotate", "copy_and_truncate"])
def test_a_rotated_file_is_read_to_its_end(log, rotate, restarts):
    log.write(lines(0, 20))
    log.take()
    log.write(lines(20, 20) + b"half a line, ")
    for start in (40, 60, 80):
        getattr(log, rotate)()
        log.write(lines(start, 20))
    if restarts:
        log.restart()
    log.take()
    assert log.read == log.text
    assert not log.notices


def test_a_writer_that_still_has_the_old_file_is_waited_for(log):
    log.write(b"one\n")
    log.take()
    with log.path.open("ab", buffering=0) as file:
        log.rotate()
        log.take()
        file.write(b"late\n")
        log.take()
        file.write(b"later")
    log.path.write_bytes(b"new\n")
    log.take()
    assert log.read == b"one\nlate\nlaternew\n"


@pytest.mark.parametrize("name", ["app.log-20260131", "app.1.log", "app-20260131.log", "app.log.2026-01-31_00-00-00"])
def test_names_of_rotated_files(name, log):
    log.write(lines(0, 9))
    log.path.rename(log.path.with_name(name))
    log.write(lines(9, 9))
    for other in ("app.log.state", "app-1.log", "app-8080.log", "app.1", "app-20260101"):
        log.path.with_name(other).write_bytes(b"another file\n")
    log.position = None
    log.restart()
    log.take()
    assert log.read == lines(9, 9)
    log.position = dataclasses.replace(log.position, offset=0, tail=b"", inode=log.path.with_name(name).stat().st_ino)
    log.read = b""
    log.restart()
    log.take()
    assert log.read == log.text


def test_what_is_gone_is_reported(log):
    log.write(lines(0, 20))
    log.take()
    os.truncate(log.path, 0)
    log.write(lines(20, 3))
    log.take()
    assert log.read == log.text
    assert len(log.notices) == 1
    log.write(lines(30, 3))
    packed = log.path.with_name("app.log.1.gz")
    packed.write_bytes(b"packed")
    log.changed(packed)
    log.path.unlink()
    log.text = log.read
    log.write(lines(40, 3))
    log.restart()
    log.take()
    assert log.read == log.text
    assert len(log.notices) == 3


def test_lines_come_one_by_one_and_whole_if_asked(log):
    log.restart(by_line=True, unfinished=True)
    log.write(b'{"text": "a"}\n{"text": "b"}\n')
    assert next(log.portions) == b'{"text": "a"}\n'
    assert log.followed.position.offset == 14
    log.take()
    log.write(b'\n{"text": "%s"}\n{"te' % (b"c" * 3 * follow.PORTION))
    parts = [*iter(lambda: next(log.portions), None)]
    assert [len(part) for part in parts] == [1, 3 * follow.PORTION + 13]


def test_a_line_that_is_cut_by_a_rotation_does_not_spoil_the_next_one(log):
    log.restart(by_line=True)
    log.write(b'{"text": "a"}\n{"te')
    log.take()
    log.rotate()
    log.write(b'{"text": "b"}\n')
    skipped = []
    lines = iter(lambda: next(log.portions), None)
    assert b"".join(json_lines(lines, "log", ["text"], skipped.append)) == b"b\n"
    assert len(skipped) == 1


def test_copies_after_one_that_is_gone_are_read(log):
    log.write(lines(0, 9))
    log.take()
    log.copy_and_truncate()
    log.write(lines(9, 2))
    log.copy_and_truncate()
    log.path.with_name("app.log.2").unlink()
    log.write(lines(11, 2))
    log.take()
    assert log.read == log.text
    assert len(log.notices) == 1


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events(seed, log):
    draw, n = random.Random(seed), 0
    # A file that is truncated is recognized by some of its bytes.
    rotate, least = draw.choice([(log.rotate, 0), (log.copy_and_truncate, follow.SHORTEST_TAIL)])
    log.write(lines(0, 9))
    log.take()
    for _ in range(60):
        match draw.choice("wwwrtTs"):
            case "w":
                log.write(lines(1000 + n, draw.randrange(1, 9))[: draw.choice([None, None, -7])])
                n += 10
            case "r" if log.path.stat().st_size and log.followed.position.offset >= least:
                rotate()
            case "t":
                log.take()
            case "T":
                log.take(1)
            case "s":
                log.restart()
    log.write(b"end\n")
    log.take()
    assert log.read == log.text
    assert not log.notices
