"""A few cases of every campaign; its docstring says how to try more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("kills", 1),
        ("services", 2),
        ("rotations", 20),
        ("crashes", 2),
        ("full_disks", 1),
        ("invocations", 20),
        pytest.param("mutations", 30, marks=pytest.mark.exhaustive),
        pytest.param("big_inputs", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_all_survive(name, cases, tmp_path):
    command = [sys.executable, str(HERE / f"{name}.py"), "--cases", str(cases)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(r"(\d+) tried, (\d+) survived", done.stdout)
    assert counts
    assert all(tried == survived != "0" for tried, survived in counts)
