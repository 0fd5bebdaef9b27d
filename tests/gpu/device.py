"""The device under test: a CUDA device, or what GPU_TESTS_DEVICE names.

`simulated` is the device of simulated.py, and `cpu` proves the tests themselves.
"""

import os

import pytest
import torch
from variants import thinned

IS_SIMULATED = os.environ.get("GPU_TESTS_DEVICE") == "simulated"
DEVICE = torch.device("cuda" if IS_SIMULATED else os.environ.get("GPU_TESTS_DEVICE", "cuda"))
# Read by cuBLAS at its first use; deterministic matrix products require it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

only_cuda = pytest.mark.skipif(DEVICE.type != "cuda" or IS_SIMULATED, reason="needs a CUDA device")
marks = pytest.mark.gpu
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

no_cross_section = pytest.mark.exhaustive if IS_SIMULATED else pytest.mark.gpu

STRIDE = 29
"""Of so many variants `make test` tries one on the simulated device; a prime, so that all parts take turns."""


def cross_section(names, kept):
    """Parameters of a test: the names in `kept`, on the simulated device a part of them; others are exhaustive."""
    return thinned(names, kept[::STRIDE] if IS_SIMULATED else kept)
