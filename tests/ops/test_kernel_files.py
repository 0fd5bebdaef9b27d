"""Files of compiled kernels: found again, compiled again where they are damaged, and not needed."""

import importlib.util

import pytest

pytest.importorskip("numba")

MODULE = """
import numba
from xlcli.ops.kernel_files import KernelFiles

@numba.njit
def double(x):
    return 2 * x

files = KernelFiles(double)
"""


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


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("size", [None, 0, 20])
def test_missing_and_incomplete_files_are_replaced(load, tmp_path, suffix, size):
    first = load()
    assert not first.files.has(1.0)
    assert first.double(1.0) == 2
    assert first.files.has(1.0)
    assert not first.files.has(1)
    assert load().files.has(2.0)
    [path] = tmp_path.rglob(f"*.{suffix}")
    path.unlink() if size is None else path.write_bytes(path.read_bytes()[:size])
    damaged = load()
    assert not damaged.files.has(1.0)
    assert damaged.double(1.0) == 2
    assert damaged.files.problem is None
    assert load().files.has(1.0)


def test_files_that_cannot_be_written_are_not_needed(load, tmp_path):
    load().double(1.0)
    [path] = tmp_path.rglob("*.nbi")
    path.unlink()
    path.mkdir()
    module = load()
    assert not module.files.has(1.0)
    assert module.double(1.0) == 2
    assert module.files.has(1.0)
    assert path.name in module.files.problem
