"""The device under test: a CUDA device, or the CPU with `GPU_TESTS_DEVICE=cpu`, which proves the tests themselves."""

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("GPU_TESTS_DEVICE", "cuda"))
# Read by cuBLAS at its first use; deterministic matrix products require it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

only_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="measures the memory of a CUDA device")
marks = pytest.mark.gpu
if DEVICE.type == "cuda" and not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
