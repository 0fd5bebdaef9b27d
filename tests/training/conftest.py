"""Runs end with a short sample, use one thread, and do not estimate their memory, which `test_memory.py` tests."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from xlcli.training import final, memory, workflow


@pytest.fixture(autouse=True)
def _small_endings(monkeypatch):
    monkeypatch.setattr(final, "SAMPLE_TOKENS", 3)
    estimates = SimpleNamespace(
        n_parameters=memory.n_parameters, memory_bytes=lambda config, runtime: 2**28, require=memory.require
    )
    monkeypatch.setattr(workflow, "memory", estimates)
    torch.set_num_threads(1)
