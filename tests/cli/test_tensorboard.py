"""`train --tensorboard`, read by TensorBoard's own reader."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import TEXT, command, environment

from xlcli.cli.tensorboard import TAGS, EventFile
from xlcli.errors import XLError
from xlcli.events import Step, Validation
from xlcli.store.layout import append_metrics, read_metrics, trim_metrics

pytest.importorskip("tensorboard")
SMALL = (
    "--set", "model.dim=16", "--set", "model.n_layers=1", "--set", "model.attention.n_heads=2", "--segment-len", "16",
    "--mem-len", "16", "--batch-size", "2", "--tokenizer", "bytes", "--threads", "1", "--preset", "tiny",
    "--set=train.eval_every=2", "--set=train.save_every=3", "--tensorboard",
)  # fmt: skip
MODEL = Path("models/corpus")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def text():
    path = Path("corpus.txt")
    path.write_bytes(TEXT * 40)
    return path


def curves():
    """Steps and values of each tag that TensorBoard shows; the wall times are in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(MODEL / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    found = {}
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        assert [event.wall_time for event in events] == sorted(event.wall_time for event in events)
        found[tag] = [(event.step, event.value) for event in events]
    return found


def flat(curves):
    """Curves as rows of numbers."""
    return {tag: [number for point in curve for number in point] for tag, curve in curves.items()}


def check():
    """TensorBoard shows exactly the rows of metrics.jsonl, where tokens per second are rounded."""
    shown, rows = flat(curves()), read_metrics(MODEL)
    wanted = {tag: [(row["step"], row[key]) for row in rows if key in row] for key, tag in TAGS.items()}
    wanted = flat({tag: curve for tag, curve in wanted.items() if curve})
    assert shown.keys() == wanted.keys()
    for tag, values in wanted.items():
        assert shown[tag] == pytest.approx(values, rel=1e-6, abs=0.05 if "second" in tag else 0), tag


def test_a_run_a_resumed_run_and_a_replaced_run_show_every_step_once(run, text):
    assert run("train", text, "--max-steps", "5", *SMALL).code == 0
    check()
    assert [step for step, _ in curves()["train/bits_per_byte"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in curves()["validation/bits_per_byte"]] == [2, 4, 5]
    assert run("train", text, "--max-steps", "8", "--resume", *SMALL[:-1]).code == 0
    assert run("train", text, "--max-steps", "9", "--resume", *SMALL).code == 0
    check()
    assert [step for step, _ in curves()["train/learning_rate"]] == list(range(1, 10))
    assert run("train", text, "--max-steps", "2", "--overwrite", *SMALL).code == 0
    check()
    assert len(curves()["train/gradient_norm"]) == 2


def test_a_killed_run_leaves_a_readable_file_and_is_resumed_without_duplicates(run, text):
    arguments = command("train", text, "--max-steps", "100000", *SMALL, "-q")
    process = subprocess.Popen(arguments, env=environment(), stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not list(MODEL.glob("tensorboard/*")) or len(curves().get("validation/bits_per_byte", ())) < 3:
        assert time.monotonic() < end
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (file,) = MODEL.glob("tensorboard/*")
    with file.open("ab") as stream:
        stream.write(b"\x18\0\0\0")  # a record that the kill cut
    reached = curves()["train/bits_per_byte"][-1][0]
    assert reached >= 6
    time.sleep(1)  # TensorBoard reads files in the order of the seconds in which they began
    done = run("train", text, "--max-steps", str(reached + 3), "--resume", *SMALL)
    assert done.code == 0, done.err
    check()


def row(step, bits):
    """A row of metrics.jsonl."""
    return {"step": step, "tokens": 16 * step, "seconds": float(step), "bits_per_byte": bits}


def event(step, bits):
    """The event of this row."""
    return Step(step, 16 * step, float(step), 1.0, bits, 0.1, 1.0, 100.0, 0.1, 1.0, last_step=9)


@pytest.mark.parametrize("last", [3, 6])
def test_steps_after_a_roll_back_replace_earlier_ones(last):
    MODEL.mkdir(parents=True)
    file = EventFile(MODEL)
    for step in range(1, last + 1):
        append_metrics(MODEL, row(step, 8.0 - step))
        file.add(event(step, 8.0 - step))
    trim_metrics(MODEL, 2, validated=False)
    if last > 3:
        append_metrics(MODEL, {"step": 2, "validation_bits_per_byte": 5.5})
        file.add(Validation(2, 32, 5.5, 5.5, True))
    append_metrics(MODEL, row(3, 4.5))
    file.add(event(3, 4.5))
    file.close()
    assert curves()["train/bits_per_byte"] == [(1, 7.0), (2, 6.0), (3, 4.5)]
    assert curves().get("validation/bits_per_byte", [(2, 5.5)]) == [(2, 5.5)]


def test_damaged_rows_are_passed_over():
    MODEL.mkdir(parents=True)
    damaged = '{"step": 1, "nats": "x", "seconds": "y", "lr": 1e300}\n{"nats": 1.0}\n{"step": 2, "bits_per_byte": []}\n'
    (MODEL / "metrics.jsonl").write_text(damaged)
    append_metrics(MODEL, row(3, 4.5))
    file = EventFile(MODEL)
    file.add(event(3, 4.5))
    file.close()
    assert curves()["train/bits_per_byte"] == [(3, 4.5)]


def test_a_link_out_of_the_model_is_not_followed(tmp_path):
    MODEL.mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (MODEL / "tensorboard").symlink_to(elsewhere)
    append_metrics(MODEL, row(1, 5.0))
    with pytest.raises(XLError, match="link"):
        EventFile(MODEL).add(event(1, 5.0))
    assert list(elsewhere.iterdir()) == []


def test_a_missing_package_is_named_before_anything_is_loaded(run, text, without_torch, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run("train", text, *SMALL)
    assert done.code == 2
    assert "xlcli[tensorboard]" in done.err
    assert not MODEL.exists()


@pytest.mark.exhaustive
def test_it_is_imported_only_when_asked_for(text):
    code = (
        "import sys; from xlcli.__main__ import main; "
        f"main({['train', str(text), '--max-steps', '1', '-q', *SMALL[:-1]]!r}); "
        "sys.stderr.write(str([name for name in sys.modules if name.startswith('tensorboard')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=120, check=True)
    assert done.stderr.decode().endswith("[]")


FULL = """
import resource, sys, time
from test_tensorboard import MODEL, EventFile, append_metrics, event, row
from xlcli.errors import ResourceError
MODEL.mkdir(parents=True)
file = EventFile(MODEL)
append_metrics(MODEL, row(1, 8.0))
file.add(event(1, 8.0))
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    for step in range(2, 1000):
        file.add(event(step, 8.0))
        time.sleep(0.001)
except ResourceError:
    file.discard()
    sys.exit(4)
"""


def test_a_full_disk_is_an_error_of_xlcli_without_a_traceback():
    changes = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "cli")))}
    arguments = [sys.executable, "-c", FULL]
    done = subprocess.run(arguments, env=environment() | changes, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (4, b"")


def test_a_folder_that_cannot_be_made_is_an_error_of_xlcli():
    MODEL.mkdir(parents=True)
    (MODEL / "tensorboard").write_text("in the way")
    append_metrics(MODEL, row(1, 8.0))
    with pytest.raises(XLError, match="tensorboard"):
        EventFile(MODEL).add(event(1, 8.0))
