"""`--nproc`: several processes of one command, what they print, and how they end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import TEXT, command, environment

from xlcli.cli.launch import LOST, first_failure, is_to_launch
from xlcli.errors import ConfigError

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def variables(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    return lambda **changes: [monkeypatch.setenv(name, value) for name, value in changes.items()]


def test_processes_are_started_once(variables):
    assert not is_to_launch(None)
    assert not is_to_launch(1)
    assert is_to_launch(2)
    assert is_to_launch(1, max_restarts=1)
    with pytest.raises(ConfigError, match="--max-restarts needs --nproc"):
        is_to_launch(None, max_restarts=1)
    variables(TORCHELASTIC_RUN_ID="x")
    assert not is_to_launch(1, max_restarts=1)
    with pytest.raises(ConfigError, match=r"--nproc is 2, but 1 process has been started already\. Leave out --nproc"):
        is_to_launch(2)
    variables(**TORCHRUN)
    assert not is_to_launch(2)
    with pytest.raises(ConfigError, match="--nproc is 3, but 2 processes have been started already"):
        is_to_launch(3)


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        (["train", "--nproc", "0"], 1),
        (["train", "--nproc", "-2", "--dry-run"], 1),
        (["eval", "--nproc", "0"], 1),
        (["train", "--nproc", "2", "--max-restarts", "-1"], 0),
    ],
)
def test_too_few_processes_are_refused(arguments, least, run):
    done = run(*arguments)
    assert (done.code, done.out) == (2, b"")
    assert f"too small, at least {least} is needed" in done.err


@pytest.mark.parametrize(
    ("codes", "first"),
    [
        ({0: LOST, 1: -9}, (1, -9)),
        ({0: 3, 1: LOST}, (0, 3)),
        ({0: 3, 1: -9}, (1, -9)),
        ({0: LOST, 1: LOST}, (0, LOST)),
    ],
)
def test_the_failure_that_led_to_the_others(codes, first):
    assert first_failure(codes) == first


def test_a_process_ends_when_its_launcher_has_ended():
    program = """
import os, subprocess, sys, time
child = "import os, time; from xlcli.cli import launch; launch.PARENT_SECONDS = 0.05; launch.end_with_launcher(); "
child += "print(os.getpid(), flush=True); time.sleep(60)"
started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
print(int(started.stdout.readline()), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(TORCHELASTIC_RUN_ID="x"),
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    deadline = time.monotonic() + 10
    while is_running(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(int(done.stdout))


def is_running(pid):
    """Whether the process exists and is no zombie."""
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def test_another_process_names_itself_in_its_errors():
    done = subprocess.run(
        command("train", "missing.txt"),
        env=os.environ | TORCHRUN,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "rank 1: there is no file missing.txt. Check the path.\n"


@pytest.mark.slow
def test_two_processes_train_stop_and_score(run, model):
    """Training, SIGTERM, the files of the run, and an evaluation: each start costs seconds."""
    Path("corpus.txt").write_bytes(TEXT * 20)
    arguments = [
        "corpus.txt",
        "--preset",
        "tiny",
        "--tokenizer",
        "bytes",
        "--batch-size",
        "4",
        "-o",
        "trained",
        "--nproc",
        "2",
    ]
    started = subprocess.Popen(
        command("train", *arguments, "--max-steps", "5000", "--eval-every", "5000", "--set", "model.dim=16"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics, deadline = Path("trained/metrics.jsonl"), time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM, err
    assert out.count("Stopped and saved") == err.count("SIGTERM: stopping") == 1
    assert "torch" not in err
    assert "step 1 " in Path("trained/logs/rank-1.log").read_text()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    options = ["--json", "--batch-size", "4", "--segment-len", "16", "-m", "tiny"]
    done = subprocess.run(
        command("eval", *options, "--nproc", "2"), capture_output=True, text=True, timeout=120, check=True
    )
    found, alone = json.loads(done.stdout), json.loads(run("eval", *options).out)
    assert found["nats"] == pytest.approx(alone["nats"], rel=1e-7)
    assert found["batch_size"] == alone["batch_size"] == 4
