"""A few cases of campaigns in every run of the tests, and a minute of every part in `make campaigns`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CAMPAIGNS = "kills", "services", "rotations", "crashes", "full_disks", "invocations", "mutations", "big_inputs"


def assert_all_survive(name, *options, folder, timeout):
    command = [sys.executable, str(HERE / f"{name}.py"), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(r"([\d,]+) tried, ([\d,]+) survived", done.stdout)
    assert counts
    assert all(tried == survived != "0" for tried, survived in counts)


@pytest.mark.parametrize(
    ("name", "part", "cases"),
    [
        ("services", "renames", 1),
        ("rotations", "follow", 20),
        ("crashes", "copy", 2),
        ("full_disks", "copy", 1),
    ],
)
def test_a_few_cases_survive(name, part, cases, tmp_path):
    assert_all_survive(name, part, "--cases", str(cases), folder=tmp_path, timeout=280)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_minute_of_every_part_survives(name, tmp_path):
    assert_all_survive(name, "--seconds", "60", folder=tmp_path, timeout=3500)
