"""A file that is followed: every byte once or a warning, whatever happens and wherever the reader begins again."""

import base64
import gzip
import math
import os
import shutil
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from rotated_logs import scenario
from variants import thinned

from tests.interfaces import needs
from xlcli.text import follow
from xlcli.text.documents import live_texts
from xlcli.text.follow import FilePosition, FollowedFile, LogPosition
from xlcli.text.json_rows import json_rows


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

    def restart(self, *, from_end=False, find=bytes.rfind, line_seconds=math.inf):
        self.followed = FollowedFile(self.path, self.position, self.notices.append, from_end=from_end)
        self.portions = self.followed.portions(find, line_seconds)

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
    assert log.read == b"one\ntwo\n"
    log.write(b"\n")
    log.take()
    assert log.read == log.text
    assert not log.notices


def test_a_line_that_is_too_long_comes_in_parts(log, monkeypatch):
    monkeypatch.setattr(follow, "LONGEST_LINE", 2 * follow.PORTION)
    log.write(b"x" * (5 * follow.PORTION))
    log.take()
    assert log.read == b"x" * (4 * follow.PORTION)


def test_unfinished_lines_are_read_if_asked(log):
    log.restart(line_seconds=-1)
    log.write(b"one\ntw")
    log.take()
    assert log.read == b"one\ntw"


@pytest.fixture
def quiet(monkeypatch):
    """Files that lost their names are complete as soon as nothing is added."""
    monkeypatch.setattr(follow, "QUIET_SECONDS", -1.0)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_rotated_file_is_read_to_its_end(log, quiet, restarts):
    log.write(lines(0, 20))
    log.take()
    for start in (20, 40, 60):
        log.write(lines(start, 20) + b"half a line, ")
        log.rotate()
        log.write(lines(start, 20))
        if restarts:
            log.restart()
        log.take()
    # A line ends with its file.
    assert log.read == log.text.replace(b"half a line, ", b"half a line, \n")
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
        file.write(b"after a long time\n")
        log.take()
    assert log.read == b"one\nlate\nnew\nlater\nhalf a line\nafter a long time\n"
    assert not log.notices


@needs("/proc/self/fd")
def test_a_rotated_file_is_closed_when_it_is_gone_or_another_one_follows(log, quiet):
    def names():
        return {Path(f"/proc/self/fd/{file.descriptor}").readlink().name for file in log.followed._files}

    for _ in range(3):
        log.write(b"one\n")
        log.take()
        log.rotate()
        log.write(b"two\n")
        log.take()
        assert names() == {"app.log", "app.log.1"}
    log.path.with_name("app.log.1").unlink()
    log.take()
    assert names() == {"app.log"}


def test_an_unfinished_line_is_ended_before_text_of_the_next_file(log):
    log.restart(line_seconds=-1)
    log.write(b"one\ntw")
    log.take()
    log.rotate()
    log.path.write_bytes(b"three\n")
    log.take()
    assert log.read == b"one\ntw\nthree\n"


def test_what_is_gone_is_reported_with_the_byte(log):
    log.write(lines(0, 20))
    log.take()
    n_read = len(log.read)
    os.truncate(log.path, 0)
    log.write(lines(20, 3))
    log.take()
    assert log.read == log.text
    assert [f"{n_read:,}" in notice for notice in log.notices] == [True]
    log.path.unlink()
    log.write(lines(40, 3))
    log.restart()
    log.take()
    assert log.read == log.text
    assert len(log.notices) == 2


@pytest.mark.parametrize("restarts", [False, True])
def test_a_copied_and_truncated_log_begins_again_with_one_warning(log, restarts):
    log.write(lines(0, 20))
    log.take()
    log.write(lines(20, 20))
    log.copy_and_truncate()
    log.write(lines(40, 60))
    if restarts:
        log.restart()
    log.take()
    assert log.read == lines(0, 20) + lines(40, 60)
    assert len(log.notices) == 1
    assert f"{len(lines(0, 20)):,}" in log.notices[0]


def test_a_copy_of_a_log_that_was_seen_empty_is_reported(log):
    log.take()
    log.write(lines(0, 20))
    log.copy_and_truncate()
    log.write(lines(20, 3))
    log.take()
    assert log.read == lines(20, 3)
    assert ["app.log.1" in notice for notice in log.notices] == [True]


@pytest.mark.parametrize("when", ["at once", "later"])
def test_packing_takes_nothing_from_an_open_file(log, when):
    """`compress` and `delaycompress` of logrotate, and no warning."""
    for start in range(0, 80, 20):
        log.write(lines(start, 20))
        log.take()
        log.write(lines(start + 100, 20))
        log.rotate()
        rotated = log.path.with_name("app.log.1" if when == "at once" else "app.log.2")
        if rotated.exists():
            packed = rotated.with_name(f"{rotated.name}.gz")
            packed.write_bytes(gzip.compress(rotated.read_bytes()))
            shutil.copystat(rotated, packed)
            rotated.unlink()
        log.write(lines(start + 200, 3))
        log.take()
        for old in log.path.parent.glob("app.log.*.gz"):
            old.rename(old.with_name(f"old-{start}-{old.name}"))
    assert log.read == log.text
    assert not log.notices


def test_the_rest_of_a_file_that_was_packed_while_nobody_looked_is_reported(log):
    log.write(lines(0, 20))
    log.take()
    log.write(lines(20, 20))
    packed = log.path.with_name("app.log.1.gz")
    packed.write_bytes(gzip.compress(log.path.read_bytes()))
    shutil.copystat(log.path, packed)
    log.path.unlink()
    log.write(lines(40, 20))
    log.restart()
    log.take()
    assert log.read == lines(0, 20) + lines(40, 20)
    assert [f"{len(lines(0, 20)):,}" in notice for notice in log.notices] == [True]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("names", "is_renamed"),
    [
        (["app.log-20260102", "app.log-20260103"], True),
        (["app.log-20260102", "app.log-20260103"], False),
        (["app.log-20260103", "app.log-20260102"], True),
        (["app.log.2", "app.log.1"], True),
        (["app.log.older", "app.log.old"], True),
    ],
)
def test_a_file_that_came_between_is_read_if_dates_and_times_prove_it_or_else_reported(
    log, restarts, names, is_renamed
):
    log.write(lines(0, 20))
    log.take()
    for start, name in zip((20, 40), names, strict=True):
        if is_renamed:
            os.utime(log.path)
            time.sleep(0.02)  # the clock of the file system is coarse
        log.path.rename(log.path.with_name(name))
        log.write(lines(start, 20))
    if restarts:
        log.restart()
    log.take()
    if is_renamed and names == ["app.log-20260102", "app.log-20260103"]:
        assert log.read == log.text
        assert not log.notices
    else:
        assert log.read == lines(0, 20) + lines(40, 20)
        assert [names[1] in notice for notice in log.notices] == [True]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("name", ["app.log.3", "app.log-20251231", "app.log.3.gz", "app.1.log", "app-copy.log"])
def test_a_file_that_was_not_renamed_from_the_log_is_foreign(log, restarts, name, is_old):
    log.write(lines(0, 20))
    log.take()
    foreign = log.path.with_name(name)
    foreign.write_bytes(lines(1000, 20))
    if is_old:  # as after unpacking
        os.utime(foreign, ns=(10**18, 10**18))
    time.sleep(0.02)
    foreign.chmod(0o640)
    log.path.rename(log.path.with_name("app.log-20260101"))
    log.write(lines(20, 20))
    if restarts:
        log.restart()
    log.take()
    assert log.read == log.text


@pytest.mark.parametrize("name", ["app.log.1.gz", "app.log.old", "app2.log", "app.log.3", "other.log"])
def test_a_file_that_got_the_inode_of_one_that_was_seen_empty_is_foreign(log, name):
    log.write(lines(0, 3))
    log.rotate()
    log.write(lines(3, 3))
    foreign = log.path.with_name(name)
    foreign.write_bytes(lines(1000, 20))
    log.position = LogPosition(os.fsencode(log.path), (FilePosition(foreign.stat().st_ino),))
    log.restart()
    log.take()
    assert log.read == lines(3, 3)
    assert len(log.notices) == 1


def test_another_log_of_the_same_kind_is_no_reason_for_a_warning(log):
    other = log.path.with_name("app.2.log")
    for start in range(0, 60, 20):
        log.write(lines(start, 20))
        with other.open("ab") as file:
            file.write(b"of another log\n")
        log.take()
        log.rotate()
    log.take()
    assert log.read == log.text
    assert len(log.notices) <= 1  # it came with the first file


@pytest.mark.parametrize("switched", ["while it reads", "while it is stopped"])
def test_the_rest_of_the_old_target_of_a_link_is_read_or_reported(tmp_path, switched):
    for folder in ("1", "2", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "other/app.log").symlink_to(tmp_path / "1/app.log")
    log = Log(tmp_path / "other")
    log.write(lines(0, 20))
    log.take()
    log.write(lines(20, 20))
    log.path.unlink()
    log.path.symlink_to(tmp_path / "2/app.log")
    log.write(lines(40, 20))
    if switched == "while it is stopped":
        log.restart()
    log.take()
    missing = [line for line in log.text.splitlines() if line not in log.read.splitlines()]
    assert len(log.notices) == 1
    assert missing == ([] if switched == "while it reads" else lines(20, 20).splitlines())


def test_a_missing_file_is_reported_once(log, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: now[0])
    log.restart()
    log.path.unlink()
    for now[0] in (1.0, 4.0, 9.0, 20.0):
        log.take()
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
    log.restart(find=bytes.find)
    log.write(b'{"text": "a"}\n{"text": "b"}\n')
    assert next(log.portions) == b'{"text": "a"}\n'
    assert log.followed.position.files[-1].offset == 14
    log.take()
    log.write(b'\n{"text": "%s"}\n{"te' % (b"c" * 3 * follow.PORTION))
    parts = [*iter(lambda: next(log.portions), None)]
    assert [len(part) for part in parts] == [1, 3 * follow.PORTION + 13]


def test_a_line_that_is_cut_by_a_rotation_does_not_spoil_the_next_one(log, monkeypatch):
    log.restart(find=bytes.find)
    log.write(b'{"text": "a"}\n{"te')
    log.take()
    log.rotate()
    log.write(b'{"text": "b"}\n')
    monkeypatch.setattr(follow, "QUIET_SECONDS", -1.0)
    skipped = []
    lines = iter(lambda: next(log.portions), None)
    assert b"".join(live_texts(json_rows(lines), "log", ["text"], skipped.append)) == b"b\n"
    assert len(skipped) == 1


@pytest.mark.parametrize("how", ["rotated", "seen empty", "removed", "unfinished", "truncated"])
def test_a_line_that_was_cut_is_ended_after_a_restart_too(log, how):
    log.restart(line_seconds=-1)
    log.write(lines(0, 9) + b"tw")
    log.take()
    rest = b""
    if how == "unfinished":
        log.write(rest := b"o\n")
    elif how == "truncated":
        os.truncate(log.path, 0)
    elif how == "removed":
        log.path.unlink()
        log.path.touch()
    else:
        log.rotate()
    if how == "seen empty":
        log.take()
    with log.path.open("ab") as file:
        file.write(b"three\n")
    log.restart(line_seconds=-1)
    log.take()
    assert log.read == lines(0, 9) + b"tw" + (rest or b"\n") + b"three\n"


@pytest.fixture
def refuse(monkeypatch):
    """A function after which files of a name cannot be opened."""
    refused, real_open = set(), os.open

    def guarded(path, *arguments, **options):
        if Path(path).name in refused:
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *arguments, **options)

    monkeypatch.setattr(follow.os, "open", guarded)
    return refused.add


def test_a_log_that_cannot_be_opened_is_reported_once(log, refuse, monkeypatch):
    log.write(b"one\n")
    log.take()
    log.rotate()
    refuse("app.log")
    monkeypatch.setattr(follow, "WAIT_SECONDS", -1.0)
    log.restart()
    for _ in range(4):
        log.write(b"more\n")
        log.take()
    monkeypatch.undo()
    log.take()
    assert log.read == b"one\n" + b"more\n" * 4
    assert len(log.notices) == 1


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_a_name_that_no_longer_means_a_file_is_waited_for(log, monkeypatch, kind):
    log.write(b"one\n")
    log.take()
    log.rotate()
    log.path.unlink()
    if kind == "device":
        log.path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(log.path)
    else:
        log.path.mkdir()
    monkeypatch.setattr(follow, "WAIT_SECONDS", -1.0)
    log.restart()
    log.take()
    assert (log.read, len(log.notices)) == (b"one\n", 1)


@pytest.mark.parametrize("name", ["app.log.1", "app.log.2"])
def test_a_rotated_file_that_cannot_be_opened_is_named(log, refuse, name):
    log.write(b"one\n")
    log.take()
    log.rotate()
    log.write(b"two\n")
    log.rotate()
    log.write(b"three\n")
    refuse(name)
    log.restart()
    log.take()
    assert log.read == b"one\nthree\n"
    assert len(log.notices) == 1


@pytest.mark.parametrize("text", [b"", b"one\n"])
def test_the_folder_is_list_files_once_a_second(log, monkeypatch, text):
    looks = []
    listed = FollowedFile._list_files
    log.write(text)
    log.take()
    monkeypatch.setattr(FollowedFile, "_list_files", lambda each: looks.append(1) or listed(each))
    for _ in range(9):
        log.take()
    assert len(looks) <= 1
    log.write(b"more\n")
    log.take()
    assert log.read == log.text


def test_a_place_that_an_earlier_version_saved_is_found(log):
    log.write(lines(0, 20))
    log.take()
    (place,) = log.position.files
    of_file = {"device": 1, "inode": place.inode, "offset": place.offset, "tail": base64.b64encode(place.tail)}
    saved = {"path": base64.b64encode(log.position.path), "files": [of_file], "known": [of_file], "schemes": []}
    log.position = TypeAdapter(LogPosition).validate_python(saved)
    log.rotate()
    log.write(lines(20, 20))
    log.restart()
    log.take()
    assert log.read == log.text
    assert not log.notices


def test_lines_that_are_too_long_or_lack_a_key_are_skipped(monkeypatch):
    monkeypatch.setattr("xlcli.text.documents.LONGEST_LINE", 100)
    skipped = []
    rows = b'{"text": "a", "k": 1}\n' + b"\0" * 950 + b'\n{"text": "b"}\n{"text": "c", "k": 2}\n'
    rows += b'{"text": "d", "k": 3}' + b" " * 300 + b'{"text": "e", "k": 3}'
    portions = (rows[i : i + 30] for i in range(0, len(rows), 30))
    assert b"".join(live_texts(json_rows(portions), "log", ["text"], skipped.append, "k")) == b"a\nc\nd\ne\n"
    assert [remark.split()[1] for remark in skipped] == ["2", "3"]
