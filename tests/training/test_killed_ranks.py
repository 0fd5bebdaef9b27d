"""Runs whose processes are all killed, resumed on other numbers of processes, and equal to an uninterrupted one."""

import json
import signal
import time
from pathlib import Path

import pytest
from launching import outputs, start
from short_runs import corpus

from xlcli.files.tensors import read_tensors
from xlcli.store.commit import latest
from xlcli.store.layout import read_metrics

CALL = "import sys; sys.path[:0] = {path!r}; import ranked; ranked.command(*{arguments!r}, double=True)"
HERE = [str(Path(__file__).parent)]
STEPS = 50
SIZES = "dim=32", "n_layers=2", "attention.n_heads=2"
SHAPE = [part for size in SIZES for part in ("--set", f"model.{size}")]
SHAPE += ["--set", "train.segment_len=16", "--set", "train.mem_len=24", "--tokenizer", "bytes"]
BUDGET = ["--batch-size", "4", "--max-steps", str(STEPS), "--set=train.save_every=3", "--set=train.eval_every=20"]


def begin(size, *options):
    """Processes of a training command in float64."""
    arguments = ["train", "corpus.txt", *options, "--threads", "1", "--set=runtime.dtype=float32", "-q"]
    return start(size, CALL.format(path=HERE, arguments=arguments))


def finish(processes):
    results = outputs(processes, timeout=900)
    assert [code for code, *_ in results] == [0] * len(processes), results


def kill(processes, folder, step):
    """Kills all processes at once when step `step` is in the metrics; returns the last step in them."""
    while not (found := steps(folder)) or found[-1] < step:
        assert all(process.poll() is None for process in processes), outputs(processes)
        time.sleep(0.02)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    assert [code for code, *_ in outputs(processes)] == [-signal.SIGKILL] * len(processes)
    return steps(folder)[-1]


def steps(folder):
    if not (Path(folder) / "metrics.jsonl").exists():
        return []
    return [row["step"] for row in read_metrics(Path(folder)) if "nats" in row]


def newest(folder):
    """Weights and optimizer state of the newest checkpoint, and its facts."""
    point = latest(Path(folder) / "checkpoints").path
    tensors = {}
    for name in ("weights", "optimizer"):
        of_file, _ = read_tensors(point / f"{name}.safetensors", expected=None)
        tensors |= {f"{name} {key}": tensor for key, tensor in of_file.items()}
    return tensors, json.loads((point / "state.json").read_bytes())


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Folder with the run of one process."""
    place = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        corpus()
        finish(begin(1, "-o", "single", *SHAPE, *BUDGET))
    return place


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", [False, True])
def test_two_killed_processes_resume_as_one_and_as_four(shard, single, monkeypatch):
    monkeypatch.chdir(single)
    folder = f"killed-{shard}"
    divided = ["--set=runtime.shard=true"] if shard else []
    first = kill(begin(2, "-o", folder, *SHAPE, *BUDGET, *divided), folder, 10)
    second = kill(begin(1, "-o", folder, "--resume"), folder, first + 10)
    finish(begin(4, "-o", folder, "--resume", *divided))
    assert first < second < STEPS
    assert steps(folder) == list(range(1, STEPS + 1))
    (found, facts), (expected, others) = newest(folder), newest("single")
    assert found.keys() == expected.keys()
    for name in ("step", "tokens", "n_read", "best_step", "validated_step"):
        assert facts[name] == others[name], name
    largest = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    print(f"shard {shard}, killed after steps {first} and {second}: largest difference {largest:.1e}")
    assert largest < 1e-6
