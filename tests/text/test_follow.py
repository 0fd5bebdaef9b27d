"""A file that is followed: every byte once, whatever happens to the file and wherever the reader begins again."""

import errno
import gzip
import os
import shutil
import time

import pytest
from rotated_logs import scenario
from variants import thinned

from xlcli.text import follow
from xlcli.text.follow import FollowedFile
from xlcli.text.json_rows import json_lines


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

    def restart(self, *, from_end=False, **options):
        self.followed = FollowedFile(self.path, self.position, self.notices.append, from_end=from_end)
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


@pytest.fixture
def quiet(monkeypatch):
    """Files that lost their names are closed as soon as nothing is added."""
    monkeypatch.setattr(follow, "QUIET_SECONDS", -1.0)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("rotate", ["rotate", "copy_and_truncate"])
def test_a_rotated_file_is_read_to_its_end(log, quiet, rotate, restarts):
    log.write(lines(0, 20))
    log.take()
    log.write(lines(20, 20) + b"half a line, ")
    for start in (40, 60, 80):
        getattr(log, rotate)()
        log.write(lines(start, 20))
    if restarts:
        log.restart()
    log.take()
    expected = log.text
    if rotate == "rotate":  # the line ends with its file; after a copy, the next file has the rest of it
        expected = expected.replace(b"half a line, ", b"half a line, \n")
    assert sorted(log.read.split(b"\n")) == sorted(expected.split(b"\n"))
    assert not log.notices


def test_a_writer_that_still_has_the_old_file_is_waited_for(log, monkeypatch):
    log.write(b"one\n")
    log.take()
    with log.path.open("ab", buffering=0) as file:
        log.rotate()
        log.take()
        file.write(b"late\n")
        log.take()
        log.path.write_bytes(b"new\n")
        log.take()
        file.write(b"later\nhalf")
        log.take()
        log.restart()
        log.take()
        assert log.read == b"one\nlate\nnew\nlater\n"
        monkeypatch.setattr(follow, "QUIET_SECONDS", -1.0)
        log.take()
        file.write(b" a line\n")
        log.take()
    assert log.read == b"one\nlate\nnew\nlater\nhalf\n a line\n"
    assert not log.notices


def test_an_unfinished_line_is_ended_before_text_of_the_next_file(log):
    log.restart(unfinished=True)
    log.write(b"one\ntw")
    log.take()
    log.rotate()
    log.path.write_bytes(b"three\n")
    log.take()
    assert log.read == b"one\ntw\nthree\n"


def test_what_is_gone_is_reported(log):
    log.write(lines(0, 20))
    log.take()
    os.truncate(log.path, 0)
    log.write(lines(20, 3))
    log.take()
    assert log.read == log.text
    assert len(log.notices) == 1
    log.path.unlink()
    log.write(lines(40, 3))
    log.restart()
    log.take()
    assert log.read == log.text
    assert len(log.notices) == 2


def test_a_file_that_was_packed_is_unpacked(log):
    log.write(lines(0, 20))
    log.take()
    log.write(lines(20, 20))
    for start in (40, 60):
        packed = log.path.with_name(f"app.log-202601{start}.gz")
        packed.write_bytes(gzip.compress(log.path.read_bytes()))
        shutil.copystat(log.path, packed)
        log.path.unlink()
        log.write(lines(start, 20))
    log.restart()
    log.take()
    assert log.read == log.text


def test_a_file_that_is_replaced_by_a_longer_copy_goes_on(log):
    log.write(lines(0, 20))
    log.take()
    log.write(lines(20, 20))
    shutil.copy(log.path, log.path.with_name("new"))
    log.path.with_name("new").rename(log.path)
    log.write(lines(40, 2))
    log.take()
    assert log.read == log.text
    assert not log.notices


def test_a_missing_file_is_reported_once(log, monkeypatch):
    times = iter([1.0, 4.0, 9.0, 20.0])
    monkeypatch.setattr(follow.time, "monotonic", lambda: next(times))
    log.path.unlink()
    for _ in range(4):
        log.take()
    monkeypatch.undo()
    assert len(log.notices) == 1
    log.write(lines(0, 2))
    log.take()
    assert log.read == log.text


def test_from_the_end(log):
    log.write(lines(0, 9) + b"unfin")
    log.restart(from_end=True)
    log.write(b"ished\n")
    log.take()
    assert log.read == b"unfinished\n"
    log.write(b"more\n")
    log.restart(from_end=True)
    log.take()
    assert log.read == b"unfinished\nmore\n"


@pytest.mark.parametrize("first", thinned(range(0, 800, 50), range(0, 200, 50)))
def test_any_order_of_events(first, tmp_path):
    for seed in range(first, first + 50):
        assert (seed, scenario(seed, tmp_path / str(seed)).problem()) == (seed, None)
        shutil.rmtree(tmp_path / str(seed))


def test_lines_come_one_by_one_and_whole_if_asked(log):
    log.restart(by_line=True, unfinished=True)
    log.write(b'{"text": "a"}\n{"text": "b"}\n')
    assert next(log.portions) == b'{"text": "a"}\n'
    assert log.followed.position.files[-1].offset == 14
    log.take()
    log.write(b'\n{"text": "%s"}\n{"te' % (b"c" * 3 * follow.PORTION))
    parts = [*iter(lambda: next(log.portions), None)]
    assert [len(part) for part in parts] == [1, 3 * follow.PORTION + 13]


def test_a_line_that_is_cut_by_a_rotation_does_not_spoil_the_next_one(log, monkeypatch):
    log.restart(by_line=True)
    log.write(b'{"text": "a"}\n{"te')
    log.take()
    log.rotate()
    log.write(b'{"text": "b"}\n')
    monkeypatch.setattr(follow, "QUIET_SECONDS", -1.0)
    skipped = []
    lines = iter(lambda: next(log.portions), None)
    assert b"".join(json_lines(lines, "log", ["text"], skipped.append)) == b"b\n"
    assert len(skipped) == 1


@pytest.mark.parametrize("how", ["rotated", "seen empty", "removed", "unfinished", "packed", "copied"])
def test_a_line_that_was_cut_is_ended_after_a_restart_too(log, how):
    log.restart(unfinished=True)
    log.write(lines(0, 9) + b"tw")
    log.take()
    rest = b""
    if how == "unfinished":
        log.write(rest := b"o\n")
    elif how == "copied":
        log.write(rest := b"o\n")
        log.copy_and_truncate()
    elif how == "packed":
        log.write(rest := b"o\n")
        log.rotate()
        rotated = log.path.with_name("app.log.1")
        log.path.with_name("app.log.1.gz").write_bytes(gzip.compress(rotated.read_bytes()))
        rotated.unlink()
    elif how == "removed":
        log.path.unlink()
        log.path.touch()
    else:
        log.rotate()
    if how == "seen empty":
        log.take()
    with log.path.open("ab") as file:
        file.write(b"three\n")
    log.restart(unfinished=True)
    log.take()
    assert log.read == lines(0, 9) + b"tw" + (rest or b"\n") + b"three\n"


def test_a_log_that_cannot_be_opened_is_reported_once(log, monkeypatch):
    def refuse(entry):
        raise PermissionError(errno.EACCES, "Permission denied")

    log.write(b"one\n")
    log.take()
    log.rotate()
    monkeypatch.setattr(follow, "open_text", refuse)
    for _ in range(4):
        log.write(b"more\n")
        log.take()
    monkeypatch.undo()
    log.take()
    assert log.read == b"one\n" + b"more\n" * 4
    assert len(log.notices) == 1
    log.rotate()
    monkeypatch.setattr(follow, "open_text", refuse)
    log.take()
    assert len(log.notices) == 2


def test_an_empty_log_is_looked_at_once_a_second(log, monkeypatch):
    looks = []
    look = follow.Neighbors.look
    monkeypatch.setattr(follow.Neighbors, "look", lambda each: looks.append(1) or look(each))
    log.restart()
    began = len(looks)
    for _ in range(9):
        log.take()
    assert len(looks) <= began + 1
    log.write(b"one\n")
    log.take()
    assert log.read == b"one\n"


def test_lines_that_are_too_long_or_lack_a_key_are_skipped(monkeypatch):
    monkeypatch.setattr("xlcli.text.documents.LONGEST_LINE", 100)
    skipped = []
    rows = b'{"text": "a", "k": 1}\n' + b"\0" * 950 + b'\n{"text": "b"}\n{"text": "c", "k": 2}\n'
    rows += b'{"text": "d", "k": 3}' + b" " * 300 + b'{"text": "e", "k": 3}'
    portions = (rows[i : i + 30] for i in range(0, len(rows), 30))
    assert b"".join(json_lines(portions, "log", ["text"], skipped.append, "k")) == b"a\nc\nd\ne\n"
    assert [remark.split()[1] for remark in skipped] == ["2", "3"]
