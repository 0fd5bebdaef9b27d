import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xlcli.errors import BusyError, CheckpointError, ConfigError
from xlcli.store.lock import HOLDER, LOCK, lock

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
HOLD = """
import sys, time
from pathlib import Path
from xlcli.store.lock import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
RACE = """
import os, sys
from pathlib import Path
from xlcli.errors import BusyError
from xlcli.store.lock import lock
folder, won = Path(sys.argv[1]), 0
while won < 10:
    try:
        with lock(folder):
            os.close(os.open(folder / "only", os.O_CREAT | os.O_EXCL))
            (folder / "only").unlink()
            won += 1
    except BusyError:
        pass
print(won)
"""


def hold(folder: Path) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-c", HOLD, folder], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    return child


def note(folder: Path) -> dict:
    """What the holder of a lock has written."""
    return json.loads((folder / HOLDER).read_bytes())


def test_held_and_given_back(tmp_path):
    folder = tmp_path / "models" / "new"
    with lock(folder) as warning:
        assert warning == ""
        assert note(folder) == {"pid": os.getpid(), "host": socket.gethostname()}
    assert not (folder / HOLDER).exists()
    with lock(folder):
        pass


def test_the_error_names_the_holder_and_a_kill_frees_the_lock(tmp_path):
    with hold(tmp_path) as child:
        start = time.monotonic()
        with pytest.raises(BusyError) as caught, lock(tmp_path):
            pass
        assert time.monotonic() - start < 1
        assert str(child.pid) in caught.value.message
        assert socket.gethostname() in caught.value.message
        assert caught.value.exit_code == 5
        assert caught.value.remedy
        assert note(tmp_path)["pid"] == child.pid
        child.send_signal(signal.SIGKILL)
    assert note(tmp_path)["pid"] == child.pid
    with lock(tmp_path):
        assert note(tmp_path)["pid"] == os.getpid()


def test_twice_in_one_process(tmp_path):
    with lock(tmp_path):
        with pytest.raises(BusyError, match=str(os.getpid())), lock(tmp_path):
            pass
        assert (tmp_path / HOLDER).exists()


def test_an_error_inside_frees(tmp_path):
    with pytest.raises(KeyboardInterrupt), lock(tmp_path):
        raise KeyboardInterrupt
    with lock(tmp_path):
        pass


def test_a_new_folder_without_a_file_is_removed(tmp_path):
    with lock(tmp_path / "models" / "empty"):
        pass
    with lock(tmp_path / "models" / "kept"):
        (tmp_path / "models" / "kept" / "config.json").touch()
    (tmp_path / "models" / "mine").mkdir()
    with lock(tmp_path / "models" / "mine"):
        pass
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"kept", "mine"}
    with lock(tmp_path / "a" / "b" / "empty"):
        pass
    with pytest.raises(ConfigError), lock(tmp_path / "a" / "b" / ("x" * 300)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


@pytest.mark.parametrize("folder", ["", "new"])
def test_never_two_writers(tmp_path, folder):
    command = [sys.executable, "-c", RACE, tmp_path / folder]
    children = [subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    won = [int(child.communicate(timeout=120)[0]) for child in children]
    assert all(child.returncode == 0 for child in children)
    assert won == [10] * 4


@pytest.mark.parametrize(
    "text", ["", "{}", '{"pid": "1", "host": "x"}', '{"pid": -1, "host": "x"}', '{"pid": true, "host": "x"}', "\x1b[2J"]
)
def test_an_unreadable_holder_is_not_named(tmp_path, text):
    with lock(tmp_path):
        (tmp_path / HOLDER).write_text(text)
        with pytest.raises(BusyError, match="another process"), lock(tmp_path):
            pass


def test_a_hostile_host_name_is_shown_harmlessly(tmp_path):
    with lock(tmp_path):
        (tmp_path / HOLDER).write_text(json.dumps({"pid": 1, "host": "\x1b]52;c;x\x07"}))
        with pytest.raises(BusyError) as caught, lock(tmp_path):
            pass
    assert caught.value.message.isprintable()


def test_a_lock_removes_nothing(tmp_path):
    (tmp_path / f".tmp-xlcli-{'0' * 16}").touch()
    with lock(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {LOCK, HOLDER, f".tmp-xlcli-{'0' * 16}"}


def test_places_that_cannot_be_locked(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="inside"), lock(tmp_path / "file" / "inside"):
        pass
    (tmp_path / LOCK).symlink_to(tmp_path / "file")
    with pytest.raises(CheckpointError, match="symbolic"), lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    import filelock

    class Fallen(filelock.FileLock):
        def acquire(self, *args, **more):
            import warnings

            warnings.warn("flock not supported on this filesystem", stacklevel=1)
            return super().acquire(*args, **more)

    monkeypatch.setattr(filelock, "FileLock", Fallen)
    with lock(tmp_path) as warning:
        assert "locks" in warning
