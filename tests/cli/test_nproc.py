"""`--nproc`: several processes of one command, how they talk, what they print, and how they end."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import TEXT, command, environment

from tests.interfaces import needs
from xlcli.cli import launch
from xlcli.cli.launch import LOST, is_to_launch
from xlcli.cli.signals import LAUNCHER
from xlcli.errors import ConfigError, RankError
from xlcli.ranks import STORE

TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
PYTHON = sys.executable
SMALL = ["--preset", "tiny", "--tokenizer", "bytes", "--batch-size", "4", "--set", "model.dim=16"]


@pytest.fixture
def cpus(monkeypatch):
    """Sets the number of CPUs of this machine."""
    for name in ("WORLD_SIZE", "RANK", STORE, LAUNCHER):
        monkeypatch.delenv(name, raising=False)
    return lambda n: monkeypatch.setattr(launch, "cpu_limit", lambda: n)


def test_processes_are_started_once(cpus, monkeypatch):
    cpus(2)
    assert not is_to_launch(1)
    assert is_to_launch(2)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert not is_to_launch(2)
    with pytest.raises(ConfigError, match=r"nproc\D+3\D+2\b"):
        is_to_launch(3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--nproc", "0"], "--nproc"),
        (["train", "--nproc", "-2", "--dry-run"], "--nproc"),
        (["train", "corpus.txt", "--nproc", "64"], r"--nproc\D+64\D+4\b"),
        (["train", "corpus.txt", "--nproc", "3"], r"\b3\b"),
        (["train", "corpus.txt", "--nproc", "2", "--batch-size", "5"], r"\b4\D+6\b"),
        (["train", "corpus.txt", "--nproc", "2", "--set=train.grad_accum=3", "--preset", "tiny"], r"\b3\b"),
        (["train", "corpus.txt", "-o", "models/tiny", "--resume", "--nproc", "3"], r"\b3\b"),
        (["train", "corpus.txt", "-", "--nproc", "2"], "input"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_started(arguments, named, cpus, run, model, monkeypatch):
    cpus(4)
    Path("corpus.txt").write_bytes(TEXT * 20)
    monkeypatch.setattr(launch.subprocess, "Popen", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run(*arguments)
    assert (done.code, done.out) == (2, b"")
    assert re.search(named, done.err)


@pytest.fixture
def ended(cpus, monkeypatch, tmp_path):
    """Result of a launch whose processes execute this Python code, by rank."""
    cpus(3)

    def ended(*codes):
        program = tmp_path / "program"
        execute = f"exec({codes!r}[int(os.environ['RANK'])])"
        program.write_text(f"#!{PYTHON}\nimport os, signal, sys, time\n{execute}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return launch.launch([], len(codes))

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield ended
    for number, handler in before.items():
        signal.signal(number, handler)


WAIT = "time.sleep(60)"
LOSE = f"time.sleep(0.3); os._exit({LOST})"


def test_the_exit_code_of_processes_that_end(ended):
    assert ended("", "") == 0
    assert ended(WAIT, "sys.exit(3)") == 3
    assert ended(LOSE, "sys.exit(5)") == 5
    assert ended("time.sleep(0.4); sys.exit(3)", "sys.exit(4)", "time.sleep(0.2); sys.exit(5)") == 4


def test_a_process_that_is_killed_is_named(ended):
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RankError, match=r"\b1\D+3\b.*SIGKILL"):
        ended(LOSE, kill, WAIT)
    with pytest.raises(RankError, match=r"\b0\D+2\b.*SIGKILL"):
        ended(kill, LOSE)
    with pytest.raises(RankError, match=r"\b0\D+2\b.*lost"):
        ended(f"os._exit({LOST})", LOSE)


def test_signals_are_passed_on_and_a_second_interrupt_kills(ended):
    stop = "signal.signal(signal.{0}, lambda *_: os._exit(128 + signal.{0})); os.kill(os.getppid(), signal.{0}); "
    assert ended(stop.format("SIGTERM") + WAIT, stop.format("SIGTERM") + WAIT) == 128 + signal.SIGTERM
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    interrupt = (
        ignore + "time.sleep(0.5); [(os.kill(os.getppid(), signal.SIGINT), time.sleep(0.2)) for _ in range(2)]; "
    )
    started = time.monotonic()
    assert ended(interrupt + WAIT, ignore + WAIT) == 128 + signal.SIGINT
    assert time.monotonic() - started < 30


def test_a_reader_that_has_left_is_no_error(ended):
    assert ended("signal.signal(13, signal.SIG_DFL); os.kill(os.getpid(), 13)", LOSE) == 128 + signal.SIGPIPE


def test_processes_are_suspended_with_their_launcher(tmp_path):
    program = tmp_path / "program"
    count = "while True: time.sleep(0.05); print(i := i + 1, flush=True)"
    program.write_text(f"#!{PYTHON}\nimport time\ni = 0\n{count}\n")
    program.chmod(0o755)
    start = f"import sys; sys.executable = {str(program)!r}; from xlcli.cli.launch import launch; launch([], 2)"
    out = tmp_path / "out"
    with (
        out.open("wb") as file,
        subprocess.Popen([PYTHON, "-c", start], env=environment(), stdout=file, process_group=0) as launcher,
    ):

        def grows():
            time.sleep(0.3)
            before = out.stat().st_size
            time.sleep(1)
            return out.stat().st_size > before

        try:
            wait_for(grows)
            launcher.send_signal(signal.SIGTSTP)
            assert not grows()
            launcher.send_signal(signal.SIGCONT)
            assert grows()
        finally:
            launcher.send_signal(signal.SIGCONT)
            launcher.send_signal(signal.SIGTERM)


def wait_for(condition):
    """Waits until the condition holds, at most 30 seconds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline


def test_processes_import_nothing_from_the_working_folder(ended, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    seen = tmp_path / "seen"
    assert ended(f"open({str(seen)!r}, 'w').write(repr(sys.argv) + os.environ['PYTHONPATH'])") == 0
    assert "'-P', '-m', 'xlcli'" in seen.read_text()
    assert "" not in seen.read_text().split("]")[1].split(os.pathsep)


@needs("/proc/self/stat")
def test_a_process_ends_when_its_launcher_has_ended():
    program = f"""
import os, subprocess, sys, time
child = "import os, time; from xlcli.cli.signals import end_with_launcher; end_with_launcher(); "
child += "print(os.getpid(), flush=True); time.sleep(60)"
variables = os.environ | {{{LAUNCHER!r}: str(os.getpid())}}
started = subprocess.Popen([sys.executable, "-c", child], env=variables, stdout=subprocess.PIPE)
print(int(started.stdout.readline()), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True, timeout=60, check=True
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
    assert re.match(r"xlcli: rank 1: .*missing\.txt", done.stderr)


def children(pid):
    """Numbers of the processes that this one has started."""
    return [int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()]


def listening(pids):
    """Addresses, in hexadecimal, at which these processes listen."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(str(link.readlink()))
            except OSError:  # closed
                continue
    rows = [row.split() for table in ("tcp", "tcp6") for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(launch.cpu_limit() < 2, reason="needs two CPUs")
def test_two_processes_choose_a_preset(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_bytes(TEXT * 20)
    arguments = ["train", "corpus.txt", "-o", "m", "--nproc", "2", "--max-steps", "1", "--set=runtime.timeout=60s"]
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("m/record.json").read_text())["preset"] == "tiny"


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux" or launch.cpu_limit() < 2, reason="needs /proc and two CPUs")
def test_two_processes_train_and_stop_and_listen_on_loopback_only(run, model):
    """Training, SIGTERM and the files of the run: each start costs seconds."""
    Path("corpus.txt").write_bytes(TEXT * 20)
    budget = ["--max-steps", "5000", "--set=train.eval_every=5000"]
    started = subprocess.Popen(
        command("train", "corpus.txt", *SMALL, *budget, "-o", "trained", "--nproc", "2"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics, deadline = Path("trained/metrics.jsonl"), time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = children(started.pid)
    variables = dict(part.partition("=")[::2] for part in Path(f"/proc/{ranks[0]}/environ").read_text().split("\0"))
    assert len(ranks) == 2
    addresses = listening([started.pid, *ranks])
    assert addresses
    assert addresses <= LOOPBACK
    assert stat.S_IMODE(Path(variables[STORE]).parent.stat().st_mode) == 0o700
    started.send_signal(signal.SIGTERM)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM, err
    assert out.count("Stopped") == err.count("SIGTERM") == 1
    assert "torch" not in err
    assert not Path(variables[STORE]).parent.exists()
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
