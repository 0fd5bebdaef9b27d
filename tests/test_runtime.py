"""Device, number type, threads, compiler: chosen once, refused with a reason."""

import pytest
import torch

from xlcli import runtime
from xlcli.config import RuntimeConfig
from xlcli.errors import ConfigError
from xlcli.runtime import Runtime, make_runtime, peak_rss_bytes


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


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
def test_training_in_float16_is_refused(device):
    with pytest.raises(ConfigError, match=r"float16 is not supported: gradients .* Use --dtype bfloat16") as caught:
        make_runtime(RuntimeConfig(device=device, dtype="float16"), training=True)
    assert caught.value.exit_code == 2
    assert make_runtime(RuntimeConfig(device="cpu", dtype="float16")).dtype_name == "float16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"no CUDA device is available\. Use --device cpu"):
        make_runtime(RuntimeConfig(device="cuda"))
    assert make_runtime(RuntimeConfig()).device.type == "cpu"


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
    with pytest.raises(ConfigError, match=f"needs a C\\+\\+ compiler.*{compiler or 'clang'}.*Drop --compile"):
        make_runtime(RuntimeConfig(device="cpu", compile=True), training=True)
    make_runtime(RuntimeConfig(device="cpu", compile=True))


def test_autocast_is_on_only_where_it_does_something():
    weight = torch.nn.Linear(3, 3)
    x = torch.ones(1, 3)
    for dtype in (torch.float32, torch.bfloat16):
        with Runtime(torch.device("cpu"), dtype, 1).autocast():
            assert weight(x).dtype == dtype


def test_peak_memory_is_that_of_this_process():
    assert 2**26 < peak_rss_bytes() < 2**36
