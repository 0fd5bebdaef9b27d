"""`kill -9` at random moments of a real run; `benchmarks/kill.py` does more of the same."""

import signal
import subprocess
import sys
import time
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
    _is_the_same_when_terminated(tmp_path, expected)


def _is_the_same_when_terminated(place, expected):
    text, folder = place / "text.txt", place / "terminated"
    with subprocess.Popen(kill.command(text, folder), stderr=subprocess.DEVNULL) as child:
        while kill.rows(folder) < 5:
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 128 + signal.SIGTERM
    subprocess.run(kill.command(text, folder, "--resume"), check=True, stdout=subprocess.DEVNULL)
    assert kill.remains(folder) == expected
