"""Runs read short pieces, end with a short sample and use one thread."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from xlcli.text import loaders
from xlcli.training import validation


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(validation, "SAMPLE_TOKENS", 3)
    monkeypatch.setattr(loaders, "PIECE_LEN", 24)
    torch.set_num_threads(1)
