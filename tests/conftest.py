"""Every test runs in a folder of its own, away from the user's cache, home, settings and terminal."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

# What started the tests may ignore signals (nohup, a job in the background), and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_DFL)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles the kernels of generation once, before any test has a time limit."""
    for name in ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[name] = f"{tempfile.gettempdir()}/xlcli-tests-{os.getuid()}/{name.lower()}"
    if hasattr(session.config, "workerinput"):
        return
    import torch

    from tests.toys import toy

    model = toy(dtype=torch.float32)
    with torch.inference_mode():
        model.decoder.logits(
            torch.zeros(1, 1, dtype=torch.int64), model.network.init_state(1, mem_len=4, segment_len=4)
        )


@pytest.fixture(autouse=True)
def _private_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path_factory.mktemp("machine")
    for name in [name for name in os.environ if name.startswith(("XLCLI_", "XDG_"))]:
        monkeypatch.delenv(name)
    for name in ("FORCE_COLOR", "COLUMNS", "LINES", "PYTHONSAFEPATH", "PYTHONWARNINGS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "work"):
        (machine / name).mkdir()
    monkeypatch.setenv("HOME", str(machine / "home"))
    monkeypatch.setenv("XLCLI_CACHE", str(machine / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.chdir(machine / "work")


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    """A file with the prose of the toys."""
    from tests.toys import PROSE

    path = tmp_path / "prose.txt"
    path.write_bytes(PROSE.encode())
    return path
