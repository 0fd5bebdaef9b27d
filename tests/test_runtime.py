"""Device, number type, threads, compiler: chosen once, refused with a reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xlcli import machine, runtime
from xlcli.config import RuntimeConfig
from xlcli.errors import ConfigError
from xlcli.ranks import Ranks
from xlcli.runtime import Runtime, make_runtime


@pytest.fixture(autouse=True)
def _settings_of_torch_are_put_back():
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(exact)


def test_evaluation_is_in_float32_and_training_in_what_is_fast(monkeypatch):
    for native, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(runtime, "has_bfloat16_units", lambda device, native=native: native)
        assert make_runtime(RuntimeConfig(device="cpu")).dtype == torch.float32
        assert make_runtime(RuntimeConfig(device="cpu"), training=True).dtype == dtype
        assert make_runtime(RuntimeConfig(device="cpu", dtype="bfloat16")).dtype == torch.bfloat16
        assert make_runtime(RuntimeConfig(device="cpu", dtype="float32"), training=True).dtype == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="device cpu"):
        make_runtime(RuntimeConfig(device="cuda"))
    assert make_runtime(RuntimeConfig()).device.type == "cpu"


def test_the_cuda_device_of_a_rank_is_the_current_one(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert make_runtime(RuntimeConfig(device="cuda")).device == torch.device("cuda")
    assert current == []
    ranks = Ranks(7, 8, 3, 4)
    assert make_runtime(RuntimeConfig(), ranks=ranks).device == torch.device("cuda", 3)
    assert make_runtime(RuntimeConfig(device="cuda:1")).device == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 3), torch.device("cuda", 1)]


def test_threads_are_set_and_told():
    assert make_runtime(RuntimeConfig(device="cpu", threads=2)).threads == torch.get_num_threads() == 2
    assert make_runtime(RuntimeConfig(device="cpu")).threads == 2


def test_deterministic_is_asked_of_torch(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    make_runtime(RuntimeConfig(device="cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
    make_runtime(RuntimeConfig(device="cpu", deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("compiler", [None, "no-such-compiler"])
def test_compiling_without_a_compiler_is_refused(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    else:
        monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=rf"{compiler or 'clang'}.*runtime\.compile"):
        make_runtime(RuntimeConfig(device="cpu", compile=True), training=True)
    make_runtime(RuntimeConfig(device="cpu", compile=True))


def test_autocast_is_on_only_where_it_does_something():
    weight = torch.nn.Linear(3, 3)
    x = torch.ones(1, 3)
    for dtype in (torch.float32, torch.bfloat16):
        with Runtime(torch.device("cpu"), dtype, 1).autocast():
            assert weight(x).dtype == dtype


@pytest.fixture
def no_number_given(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(runtime, "cpu_limit", lambda: 8)
    torch.set_num_threads(3)
    return monkeypatch


@pytest.fixture
def busy(no_number_given):
    """A machine on which loops with two or more threads wait for a core."""
    no_number_given.setattr(runtime, "parallel_loop_seconds", lambda threads, n_parts: 1.0 if threads == 1 else 50.0)
    return no_number_given


@pytest.mark.usefixtures("busy")
def test_training_by_the_clock_begins_with_as_many_threads_as_find_idle_cores():
    for settings, options, threads in (
        ({}, {"training": True, "by_clock": True}, 1),
        ({}, {"training": True}, 3),
        ({}, {}, 3),
        ({"threads": 2}, {"training": True, "by_clock": True}, 2),
        ({"deterministic": True}, {"training": True, "by_clock": True}, 3),
    ):
        torch.set_num_threads(3)
        made = make_runtime(RuntimeConfig(device="cpu", **settings), **options)
        assert made.threads == torch.get_num_threads() == threads


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_in_the_environment_is_given(name, busy):
    busy.setenv(name, "3")
    assert make_runtime(RuntimeConfig(device="cpu"), training=True, by_clock=True).threads == 3


@pytest.mark.parametrize(("limit", "fastest"), [(1, 1), (2, 1), (2, 2), (6, 5), (64, 63), (64, 4)])
def test_the_number_of_threads_with_the_shortest_loops(limit, fastest, monkeypatch):
    monkeypatch.setattr(runtime, "parallel_loop_seconds", lambda threads, n_parts: abs(threads - fastest))
    assert runtime.fastest_threads(limit) == fastest


def test_a_single_slow_loop_counts(monkeypatch):
    loops = iter([2.0, 2.0, 2.0, 1.0, 1.0, 50.0])
    monkeypatch.setattr(runtime, "parallel_loop_seconds", lambda threads, n_parts: next(loops))
    assert runtime.fastest_threads(2) == 1


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (8, 3)])
def test_training_uses_no_more_threads_than_cpus(cpus, threads, no_number_given):
    no_number_given.setattr(runtime, "cpu_limit", lambda: cpus)
    made = make_runtime(RuntimeConfig(device="cpu"), training=True)
    assert made.threads == torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("table", "files", "limit"),
    [
        ("0::/\n", {}, 8),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("1:cpu,cpuacct:/docker/x\n0::/\n", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("1:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_cpus_are_limited_by_cgroups(table, files, limit, tmp_path, monkeypatch):
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert runtime.cpu_limit() == 8
    for name, content in {"proc/self/cgroup": table, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert runtime.cpu_limit() == limit
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda process: {3}, raising=False)
    assert runtime.cpu_limit() == 1


def test_a_parallel_loop_is_measured_without_changing_the_threads():
    torch.set_num_threads(1)
    assert 0.0 < runtime.parallel_loop_seconds(2, 2) < 60.0
    assert torch.get_num_threads() == 1


def test_the_compiler_is_imported_only_to_compile():
    """Its import takes longer than a short generation."""
    code = (
        "import sys, xlcli.api; from xlcli.config import ModelConfig; from xlcli.model.build import build_on_meta; "
        "build_on_meta(ModelConfig()); print({'torch._dynamo', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"set()\n"


def test_training_makes_no_folder_of_compiled_code_that_others_may_have_made(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("XLCLI_CACHE", str(tmp_path / "cache"))
    runtime.make_runtime(RuntimeConfig(), training=True)
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path / "cache", 0o700)
    runtime.make_runtime(RuntimeConfig(), training=True)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
