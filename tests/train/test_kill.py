"""`kill -9` at random moments of a real run; `benchmarks/kill.py` does more of the same."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kill


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_as_the_untouched_one(tmp_path):
    moments, found, expected = kill.trial(tmp_path, kills=5, seed=1)
    assert len(moments) == 5
    assert {"checkpoint", "weights.safetensors", "optimizer.safetensors", "memory.safetensors", "model.safetensors"} < (
        expected.keys()
    )
    assert found == expected
