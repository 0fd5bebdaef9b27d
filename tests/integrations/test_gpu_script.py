"""benchmarks/gpu.sh on the CPU, in small: every stage ends well and leaves its results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"


def run(*arguments):
    done = subprocess.run(
        [SCRIPT, *arguments, "--smoke"], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_figures(tmp_path):
    run(tmp_path)
    figures = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    names = {figure["name"].partition("-")[0] for figure in figures}
    assert names == {"quantize", "profile", "train", "decode", "eval"}
    for figure in figures:
        assert all(row["tokens_per_second"] > 0 for row in figure.get("sweep", []))
    assert (tmp_path / "stream.jsonl").read_text()
    assert (tmp_path / "tests.txt").read_text()
    assert json.loads((tmp_path / "torchrun/record.json").read_text())["steps"] == 20
    assert 'failures="0"' in (tmp_path / "tests.xml").read_text()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_training(tmp_path):
    run("train", tmp_path)
    parts = sorted(tmp_path.glob("weights.*"))
    (tmp_path / "all.tar").write_bytes(b"".join(part.read_bytes() for part in parts))
    subprocess.run(["tar", "-xf", "all.tar"], cwd=tmp_path, check=True)
    assert max(part.stat().st_size for part in parts) <= 15_000_000
    assert json.loads((tmp_path / "small" / "config.json").read_text())["weights"]["encoding"] == "int8"


@pytest.mark.exhaustive
def test_ends_when_its_time_is_over(tmp_path):
    done = subprocess.run(
        [SCRIPT, tmp_path, "--smoke", "--minutes", "0.05", "--only", "figures,torchrun"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1
    assert (tmp_path / "results.tar.gz").exists()
