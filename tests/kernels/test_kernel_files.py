"""Files of compiled kernels: found again, compiled again where they are damaged, and not needed."""

import contextlib
import errno
import importlib.util
import os
import re
import resource
import sys
import time
from pathlib import Path

import pytest
from damages import damaged

from xlcli.config import OnlineConfig
from xlcli.errors import CheckpointError, ConfigError
from xlcli.files import open_regular
from xlcli.inference import compile_cache
from xlcli.kernels import mixture
from xlcli.kernels.files import KernelFiles, keep_parts

MODULE = """
import numba
from xlcli.kernels.files import KernelFiles

@numba.njit
def double(x):
    return 2 * x

files = KernelFiles(double)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the files."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def load(tmp_path):
    """Function that loads a module with a kernel and its files anew, as another process would."""
    path = tmp_path / "doubling.py"
    path.write_text(MODULE)

    def load():
        spec = importlib.util.spec_from_file_location("doubling", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_a_missing_file_is_written(load, folder):
    first = load()
    assert not first.files.has(1.0)
    assert first.double(1.0) == 2
    assert first.files.has(1.0)
    assert not first.files.has(1)
    assert load().files.has(2.0)
    [path] = folder.iterdir()
    path.unlink()
    assert not load().files.has(1.0)


@pytest.fixture
def kernel(load, folder):
    """Path of the file of a kernel, and its content."""
    load().double(1.0)
    [path] = folder.iterdir()
    return path, path.read_bytes()


def test_damaged_files_are_not_loaded(load, folder, kernel, monkeypatch):
    """Machine code is executed: nothing of a file is used before its checksum is known to match."""
    path, data = kernel
    load().double(1)
    [other] = set(folder.iterdir()) - {path}
    module = load()
    with monkeypatch.context() as patch:
        patch.setattr("pickle.loads", lambda data: pytest.fail("it was loaded"))
        for kind, content in damaged(data, other.read_bytes()):
            path.write_bytes(content)
            assert not module.files.has(1.0), kind
    path.write_bytes(data)
    assert module.files.has(1.0)


@pytest.mark.parametrize("n", [20, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_damaged_files_are_replaced(load, kernel, n):
    path, data = kernel
    for kind, content in damaged(data, data[::-1], n, seed=n):
        path.write_bytes(content)
        again = load()
        assert again.double(1.0) == 2, kind
        assert again.files.problem is None, kind
        assert load().files.has(1.0), kind


@pytest.mark.parametrize("mode", [0o000, 0o200])
def test_a_file_that_cannot_be_read_is_replaced(load, kernel, mode, monkeypatch):
    path, _ = kernel
    path.chmod(mode)
    if not os.geteuid():  # who can read all files
        monkeypatch.setattr("xlcli.files.open_regular", unreadable_at(mode))
    assert not load().files.has(1.0)
    again = load()
    assert again.double(1.0) == 2
    assert again.files.problem is None
    assert load().files.has(1.0)


def unreadable_at(mode):
    """`open_regular` for a user who is not root: a file of this mode cannot be read."""

    @contextlib.contextmanager
    def unless_unreadable(path):
        if path.exists() and path.stat().st_mode & 0o777 == mode:
            raise CheckpointError("permission denied", "")
        with open_regular(path) as found:
            yield found

    return unless_unreadable


@pytest.mark.parametrize("swap", ["folder", "pipe", "dangling"])
def test_what_is_no_file_is_not_read(load, kernel, swap):
    path, _ = kernel
    path.unlink()
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "dangling": lambda: path.symlink_to("nothing")}[swap]()
    again = load()
    assert not again.files.has(1.0)
    assert again.double(1.0) == 2
    if swap == "folder":
        assert "is a folder" in again.files.problem
    else:
        assert again.files.problem is None
        assert load().files.has(1.0)


def test_files_that_cannot_be_written_are_not_needed(load, folder, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    module = load()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert module.double(1.0) == 2
    assert module.files.has(1.0)
    assert "space" in module.files.problem
    assert list(folder.iterdir()) == []


def test_a_stop_ends_the_process_that_compiles(load, folder):
    module, began = load(), time.monotonic()
    module.files.program = lambda signature: f"open({str(folder / 'begun')!r}, 'w'); import time; time.sleep(60)"
    module.files.compile(1.0, stop=(folder / "begun").exists)
    assert time.monotonic() - began < 30
    assert not module.files.has(1.0)
    module.files.program = None
    module.files.compile(1.0, stop=lambda: False)
    assert load().files.has(1.0)


def test_the_parts_of_a_kernel_are_kept_as_soon_as_they_are_compiled(tmp_path, folder, monkeypatch):
    path = tmp_path / "parts.py"
    path.write_text(
        "import numba\n@numba.njit(no_cpython_wrapper=True)\ndef part(x):\n    return 2 * x\n"
        "@numba.njit\ndef whole(x):\n    return part(x) + 1\n"
    )
    spec = importlib.util.spec_from_file_location("xlcli.kernels.parts", path)
    kept, hits = [], []
    for _ in range(2):
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        keep_parts()
        with monkeypatch.context() as patch:
            if not kept:  # killed before the end
                patch.setattr(module.whole._cache, "save_overload", lambda *_: None)
            assert module.whole(1.0) == 3
        kept.append(sorted(path.name.partition(".")[0] for path in folder.iterdir()))
        hits.append([sum(kernel.stats.cache_hits.values()) for kernel in (module.part, module.whole)])
    assert kept == [["part"], ["part", "whole"]]
    assert hits == [[0, 0], [1, 0]]


def test_the_folder_is_in_the_cache(load, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    load().double(1.0)
    [path] = Path(os.environ["XLCLI_CACHE"], "kernels").iterdir()
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


def spoil_mode(path):
    path.chmod(path.stat().st_mode | 0o002)


def spoil_owner(path):
    os.chown(path, 12345, -1)


def spoil_link(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.parametrize("spoil", [spoil_mode, spoil_owner, spoil_link])
def test_a_file_that_others_can_write_is_neither_read_nor_replaced(load, folder, spoil):
    if spoil is spoil_owner and os.geteuid():
        pytest.skip("only root gives files away")
    load().double(1.0)
    [path] = folder.iterdir()
    spoil(path)
    before = path.lstat()
    module = load()
    for use in (module.files.has, module.double):
        with pytest.raises((ConfigError, CheckpointError), match=re.escape(str(path))):
            use(1.0)
    assert path.lstat() == before


def test_a_folder_that_others_can_write_is_refused(load, folder):
    load().double(1.0)
    folder.chmod(0o777)
    with pytest.raises(ConfigError) as caught:
        load()
    assert caught.value.exit_code == 2
    assert "NUMBA_CACHE_DIR" in caught.value.remedy


def test_a_kernel_is_compiled_again_when_its_constants_change(load, tmp_path):
    constants = tmp_path / "apart" / "constants.py"
    constants.parent.mkdir()
    constants.write_text("A = 1")
    kernel = load().double
    files = [KernelFiles(kernel, constants=[str(constants)])]
    assert kernel(1.0) == 2
    files.append(KernelFiles(load().double, constants=[str(constants)]))
    constants.write_text("A = 2")
    files.append(KernelFiles(load().double, constants=[str(constants)]))
    assert [each.has(1.0) for each in files] == [True, True, False]


def test_a_kernel_is_compiled_again_when_another_file_of_it_changes(tmp_path):
    kernel, part = tmp_path / "quadrupling.py", tmp_path / "doubled.py"
    kernel.write_text(
        "import doubled, numba\nfrom xlcli.kernels.files import KernelFiles\n"
        "@numba.njit\ndef quadruple(x):\n    return 2 * doubled.double(x)\n"
        "files = KernelFiles(quadruple)\n"
    )
    results = []
    for factor in (2, 2, 30):
        part.write_text(f"import numba\n@numba.njit\ndef double(x):\n    return {factor} * x\n")
        os.utime(part, (factor, factor))
        found = {}
        for name in ("doubled", "quadrupling"):
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            found[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found[name])
        results.append((found["quadrupling"].files.has(1.0), found["quadrupling"].quadruple(1.0)))
    del sys.modules["doubled"], sys.modules["quadrupling"]
    assert results == [(False, 4), (True, 4), (False, 60)]


def test_another_process_compiles(tmp_path, monkeypatch):
    """A compiled kernel may have other last bits than one from a file, so every process reads the file."""
    (tmp_path / "tripling.py").write_text(
        "import numba\nfrom xlcli.kernels.files import KernelFiles\n"
        "@numba.njit\ndef triple(x):\n    return 3 * x\n"
        "def compile_for(name):\n    files.program = None\n    triple.compile((getattr(numba, name),))\n"
        "def program(signature):\n    return f'import tripling; tripling.compile_for({str(signature[0])!r})'\n"
        "files = KernelFiles(triple, program)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("tripling")
    assert module.triple(2.0) == 6
    assert sum(module.triple.stats.cache_hits.values()) == 1
    module.files.program = lambda signature: "raise SystemExit(1)"
    assert module.triple(2) == 6
    assert sum(module.triple.stats.cache_hits.values()) == 1
    assert module.files.has(2)


@pytest.mark.parametrize("directly", [False, True])
@pytest.mark.parametrize("obstacle", ["folder", "full disk"])
def test_a_kernel_that_cannot_be_kept_is_compiled_once(load, folder, kernel, obstacle, directly):
    path, _ = kernel
    path.unlink()
    module = load()
    module.files.program = lambda signature: f"open({str(folder / 'begun')!r}, 'w')"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if obstacle == "folder":
        path.mkdir()
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        if directly:
            assert module.double(1.0) == 2
        else:
            assert module.files.compile(1.0, stop=lambda: False) == module.files.problem
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ("is a folder" if obstacle == "folder" else "too large") in module.files.problem
    assert not (folder / "begun").exists(), "another process compiled it, too"
    assert module.files.has(1.0)
    assert module.double(1.0) == 2


def test_a_stop_ends_the_compilation_of_the_context_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "is_compiled", lambda: False)
    began = time.monotonic()
    monkeypatch.setattr(mixture.FILES, "cache_path", tmp_path)
    notices = compile_cache(OnlineConfig(context_cache=9), lambda: time.monotonic() - began > 1)
    assert len(list(notices)) == 1
    assert time.monotonic() - began < 8
    assert not list(tmp_path.glob("read.*"))
    assert list(compile_cache(OnlineConfig(), lambda: False)) == []
