"""Every test runs in a folder of its own, away from the user's cache, home, settings and terminal."""

from __future__ import annotations

import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

# What started the tests may ignore signals (nohup, a job in the background), and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, signal.SIG_DFL)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles kernels once, before any test has a time limit: for several workers, all that tests use.

    Tests decode with three pairs of number types of weights and memory. The first has most of the parts of the others.
    """
    for name in ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[name] = f"{tempfile.gettempdir()}/xlcli-tests-{os.getuid()}/{name.lower()}"
    if hasattr(session.config, "workerinput"):
        return
    import numpy as np

    from xlcli.kernels import decode, mixture

    def compile_pair(*names: str) -> None:
        types = [np.empty(0, name) for name in names]
        if not decode.is_compiled(*types):
            decode.compile_kernel(*types, lambda: False)

    compile_pair("float32", "float32")
    if session.config.getoption("numprocesses", None):
        with ThreadPoolExecutor() as pool:
            started = [pool.submit(compile_pair, *pair) for pair in (("int8", "float32"), ("uint16", "int8"))]
            if not mixture.is_compiled():
                started.append(pool.submit(mixture.compile_kernels, lambda: False))
        for each in started:
            each.result()


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
