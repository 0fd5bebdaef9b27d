"""Every test runs in a folder of its own, away from the user's cache, home, settings and terminal."""

from __future__ import annotations

import os
import signal

import pytest

# What started the tests may ignore signals (nohup, a job in the background), and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _private_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path_factory.mktemp("machine")
    for name in [name for name in os.environ if name.startswith(("XLCLI_", "XDG_"))]:
        monkeypatch.delenv(name)
    for name in ("FORCE_COLOR", "COLUMNS", "LINES", "PYTHONWARNINGS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "work"):
        (machine / name).mkdir()
    monkeypatch.setenv("HOME", str(machine / "home"))
    monkeypatch.setenv("XLCLI_CACHE", str(machine / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(machine / "work")
