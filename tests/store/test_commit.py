import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.interfaces import needs
from xlcli.errors import CheckpointError, ResourceError
from xlcli.store.commit import commit, latest, manifest, step_name, step_of, verify
from xlcli.store.lock import clean

sys.path.insert(0, str(Path(__file__).parent))
from committing import FILES, is_whole, write
from faults import Faults

MEMORY_DISK = Path("/dev/shm")
"""Where syncing costs nothing; killing a process loses nothing that was written, synced or not."""
HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}


def save(folder: Path, *steps: int, keep: int = 2) -> None:
    for step in steps:
        commit(folder, step, write(step), keep)


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


@pytest.fixture
def quick_path(place):
    if not MEMORY_DISK.is_dir():
        yield place
        return
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        yield Path(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_keeps_the_newest(place):
    save(place, 1, 2, 30, 400, keep=2)
    assert names(place) == ["LATEST", "step-00000030", "step-00000400"]
    assert (place / "LATEST").read_text() == "step-00000400\n"
    assert latest(place) == (place / "step-00000400", {})
    verify(place / "step-00000400")
    assert [*manifest(place / "step-00000400")] == sorted(FILES)


def test_keep_one_holds_two_while_saving(place):
    save(place, 1, keep=1)

    def fill(folder: Path) -> None:
        assert latest(place).path == place / step_name(1)
        write(2)(folder)

    commit(place, 2, fill, keep=1)
    assert names(place) == ["LATEST", "step-00000002"]


def test_nothing_there(place):
    assert latest(place) == (None, {})
    assert latest(place / "missing") == (None, {})
    clean(place / "missing")


def test_same_step_again_and_a_given_up_course(place):
    save(place, 1, 2, 3, 4, keep=4)
    save(place, 2, keep=4)
    assert names(place) == ["LATEST", "step-00000001", "step-00000002"]
    assert is_whole(latest(place).path)


def test_what_the_writer_raises_passes_and_leaves_nothing(place):
    save(place, 1)

    def fails(folder: Path) -> None:
        write(2)(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit(place, 2, fails, 2)
    assert names(place) == ["LATEST", "step-00000001"]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_modes_follow_the_umask(place, mask):
    old = os.umask(mask)
    try:
        save(place / "checkpoints", 1)
    finally:
        os.umask(old)
    found = [place / "checkpoints", *(place / "checkpoints").rglob("*")]
    for path in found:
        expected = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def _damages(path: Path) -> list[tuple[str, bytes | None]]:
    data = path.read_bytes()
    draw = random.Random(path.name)
    result: list[tuple[str, bytes | None]] = [("deleted", None), ("longer", data + b"\0"), ("empty", b"")]
    for place in draw.sample(range(len(data) - 1), 50):
        flipped = bytearray(data)
        flipped[place] ^= 1 << draw.randrange(8)
        result.append((f"bit at {place}", bytes(flipped)))
        result.append((f"cut at {place}", data[:place]))
    return result


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_every_damage_is_found_and_the_previous_used(place, name):
    save(place, 1, 2)
    path = place / step_name(2) / name
    whole = path.read_bytes()
    for what, damaged in _damages(path):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        found = latest(place)
        assert found.path == place / step_name(1), what
        assert [*found.rejected] == [place / step_name(2)], what
        assert name == "manifest.json" or name in found.rejected[place / step_name(2)], what
        path.write_bytes(whole)
    assert latest(place) == (place / step_name(2), {})


def test_a_linked_file_is_verified(place):
    save(place, 1, 2)
    path = place / step_name(2) / FILES[0]
    moved = place / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)
    assert latest(place) == (place / step_name(2), {})
    moved.write_bytes(b"x")
    assert latest(place).path == place / step_name(1)
    save(place, 3, 4, 5)
    assert moved.read_bytes() == b"x"


@pytest.mark.parametrize("instead", ["link", "folder", "fifo"])
def test_a_file_that_is_no_file_is_damage(place, instead):
    save(place, 1, 2)
    path = place / step_name(2) / FILES[0]
    path.unlink()
    if instead == "link":
        path.symlink_to("/dev/zero")
    elif instead == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    found = latest(place)
    assert found.path == place / step_name(1)
    assert len(found.rejected) == 1


def test_a_manifest_never_leads_outside(place):
    save(place, 1)
    manifest = place / step_name(1) / "manifest.json"
    for name in ("../LATEST", "/etc/passwd", ".hidden", "a/b", ""):
        manifest.write_text(json.dumps({"schema": 2, "files": {name: {"bytes": 14, "sha256": ""}}}))
        with pytest.raises(CheckpointError, match="entry"):
            verify(place / step_name(1))


def test_all_damaged(place):
    save(place, 1, 2)
    for step in (1, 2):
        (place / step_name(step) / FILES[1]).write_bytes(b"x")
    found = latest(place)
    assert found.path is None
    assert [*map(step_of, found.rejected)] == [2, 1]


def test_links_are_not_checkpoints(place):
    save(place / "real", 1)
    folder = place / "folder"
    folder.mkdir()
    (folder / step_name(5)).symlink_to(place / "real" / step_name(1))
    assert latest(folder) == (None, {})
    linked = place / "linked"
    linked.symlink_to(place / "real")
    assert latest(linked) == (None, {})
    with pytest.raises(CheckpointError, match="symbolic"):
        save(linked, 2)
    assert names(place / "real") == ["LATEST", step_name(1)]


ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EDQUOT": errno.EDQUOT, "EROFS": errno.EROFS}


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("name", ERRORS)
def test_every_call_failing_in_turn(quick_path, name, lasting):
    def strike() -> None:
        raise OSError(ERRORS[name], os.strerror(ERRORS[name]))

    at, failures = 0, 0
    while True:
        at += 1
        folder = quick_path / str(at)
        save(folder, 1, 2, keep=2)
        faults = Faults(at, strike, lasting)
        raised: bool | None = None
        with pytest.MonkeyPatch.context() as patch:
            faults.install(patch.setattr)
            try:
                save(folder, 3, keep=2)
            except ResourceError as error:
                raised = os.strerror(ERRORS[name]).lower() in error.message and bool(error.remedy)
        failures += bool(raised)
        found = latest(folder)
        assert found.path in (folder / step_name(2), folder / step_name(3)), f"call {at}"
        assert raised is not False, f"call {at}: a message without reason or remedy"
        assert raised or found.path == folder / step_name(3), f"call {at}: lost silently"
        assert not found.rejected
        assert is_whole(found.path)
        assert is_whole(folder / step_name(2)), f"call {at}"
        if not lasting and raised:
            assert not [left for left in names(folder) if left.startswith(".tmp-")], f"call {at}"
        save(folder, 4, keep=2)
        assert step_of(latest(folder).path) == 4
        assert not [left for left in names(folder) if left.startswith(".tmp-")]
        shutil.rmtree(folder)
        if faults.count < at:
            break
    assert at > 30
    assert failures > 20


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("mode", ["next", "again"])
def test_killed_at_every_call(quick_path, keep, mode):
    command = [sys.executable, str(HERE / "kill_each_call.py"), str(quick_path / "checkpoints"), str(keep), mode]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


@pytest.mark.parametrize("keep", [1, 3])
def test_kill_at_random_moments(quick_path, keep):
    folder = quick_path / "checkpoints"
    draw = random.Random(keep)
    durable = 0
    for _ in range(10):
        command = [sys.executable, str(HERE / "committing.py"), str(folder), str(keep)]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0.0, 0.1))
            child.send_signal(signal.SIGKILL)
            said = child.stdout.read().split("\n")[:-1]
        found = latest(folder)
        assert not found.rejected
        last = max([durable, *map(int, said)])
        durable = step_of(found.path) if found.path else 0
        assert last <= durable <= last + 1
        assert found.path is None or is_whole(found.path)
    assert durable > 10


@needs("/proc/self/fd")
def test_order_of_syncs(place, monkeypatch):
    """Everything is on disk before the name that announces it."""
    log: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "write", "rename", "replace")}

    def where(path) -> str:
        return re.sub(r"\.tmp-xlcli-\w+", ".tmp", str(Path(path).relative_to(place)))

    def fsync(descriptor):
        log.append(("sync", where(Path(f"/proc/self/fd/{descriptor}").readlink())))
        real["fsync"](descriptor)

    def write_(descriptor, data):
        log.append(("write", where(Path(f"/proc/self/fd/{descriptor}").readlink())))
        return real["write"](descriptor, data)

    def move(name):
        def moved(source, target):
            log.append(("move", where(target)))
            real[name](source, target)

        return moved

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "write", write_)
    monkeypatch.setattr(os, "rename", move("rename"))
    monkeypatch.setattr(os, "replace", move("replace"))
    (place / "c").mkdir()
    save(place / "c", 1)
    monkeypatch.undo()

    temporary, final = "c/.tmp", f"c/{step_name(1)}"
    named = [log.index(("move", f"{temporary}/{name}")) for name in FILES]
    sealed = log.index(("move", f"{temporary}/manifest.json"))
    announced = log.index(("move", final))
    assert max(named) < sealed < announced
    assert ("sync", temporary) in log[sealed:announced]
    for i in (*named, sealed):
        written = max(k for k, (what, path) in enumerate(log[:i]) if what == "write" and path.startswith(temporary))
        assert log[written + 1 : i] == [("sync", log[written][1])]
    pointer = log.index(("move", "c/LATEST"))
    assert ("sync", "c") in log[announced:pointer]
    assert log[-1] == ("sync", "c")
