import json
import re

import pytest

from xlcli import bench as measure
from xlcli.errors import ResourceError

KEYS = {
    "task", "model", "parameters", "mem_len", "segment_len", "batch_size", "tokens", "tokens_per_second",
    "ms_per_token", "ms_per_token_p90", "ms_per_token_p99", "first_token_seconds", "prompt_tokens",
    "recompute_ms_per_token", "recompute_ratio", "peak_rss_bytes", "seconds", "device", "dtype", "threads",
    "weight_dtype", "memory_dtype", "calls", "kernels",
}  # fmt: skip
SHORT = ("--preset", "tiny", "--set", "model.dim=16", "--set", "model.n_layers=1", "--seconds", "0.02")


@pytest.mark.parametrize("task", ["decode", "eval", "train"])
def test_a_preset(task, run):
    result = run("bench", task, *SHORT, "--mem-len", "0,9", "--json")
    assert result.code == 0, result.err
    without, speed = json.loads(result.out)["sweep"]
    assert set(speed) == KEYS
    assert (speed["task"], speed["model"], without["mem_len"], speed["mem_len"]) == (task, "tiny", 0, 9)
    assert speed["ms_per_token"] <= speed["ms_per_token_p90"]
    assert (speed["ms_per_token_p99"] is None) == (speed["calls"] < 100)
    assert speed["tokens_per_second"] * speed["seconds"] == pytest.approx(speed["tokens"])
    assert (speed["recompute_ratio"] is None) == (task == "train")
    assert without["recompute_ratio"] is None
    if task != "train":
        assert speed["recompute_ratio"] == pytest.approx(speed["recompute_ms_per_token"] / speed["ms_per_token"])
    assert re.search(rf"\b{task}\b.*\btiny\b.*\b0, 9\b", result.err)


def test_a_model_as_a_table(run, model):
    text = run("bench", "decode", "--seconds", "0.02", "--mem-len", "5,9", "-v").out.decode()
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert text.startswith("decode of tiny, ")
    assert rows["memory"][1:] == ["5", "9"]
    assert {"tokens/s, mean", "ms per token, median", "first token", "recomputed, ms per token"} <= set(rows)
    assert max(map(len, text.splitlines())) <= 80


def test_many_lengths_are_several_tables(run, model):
    text = run("bench", "eval", "--seconds", "0.01", "--mem-len", "0,1,2,3,4,5,6").out.decode()
    assert [line.split()[1:] for line in text.splitlines() if line.startswith("memory")] == [[*"0123"], [*"456"]]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("options", "message"), [
    (("--preset", "tiny", "-m", "tiny"), "--preset"),
    (("--set", "model.dim=32"), "model.dim"),
    (("--preset", "tinny"), "'tinny'"),
    (("--mem-len", "-3"), "--mem-len"),
    (("--seconds", "0"), "--seconds"),
    (("--segment-len", "8"), "--segment-len"),
    (("--set=bench.n_steps=2",), "bench.n_steps"),
    (("--preset", "small-performer", "--set=bench.memory_dtype=int8"), "bench.memory_dtype"),
    (("--preset", "small", "--set=bench.n_hashes=2"), "bench.n_hashes"),
])  # fmt: skip
def test_mistakes(options, message, run, model):
    done = run("bench", "decode", *options)
    assert done.code == 2
    assert message in done.err


def test_train_settings_of_a_model_may_be_changed_to_measure_training(run, model):
    done = run("bench", "train", "--set", "train.batch_size=3", "--segment-len", "5", "--seconds", "0.02", "--json")
    speed = json.loads(done.out)
    assert (speed["batch_size"], speed["segment_len"], speed["mem_len"]) == (3, 5, 16)


def _first(done):
    assert done.code == 0, done.err
    made = json.loads(done.out)
    return made.get("sweep", [made])[0]


@pytest.mark.parametrize("task", ["decode", "eval"])
def test_peak_memory_is_that_of_the_task_without_the_comparison(task, run, monkeypatch):
    order, repeat = [], measure.Stopwatch.repeat

    def recorded(watch, call, stage, **options):
        order.append(stage)
        return repeat(watch, call, stage, **options)

    monkeypatch.setattr(measure.Stopwatch, "repeat", recorded)
    monkeypatch.setattr(measure, "peak_rss_bytes", lambda: order.append("peak") or 1)
    _first(run("bench", task, *SHORT, "--mem-len", "9", "--json"))
    assert order[-2:] == ["peak", "memory 9: recomputing the window"]


def test_a_comparison_that_does_not_fit_the_machine_is_left_out(run, monkeypatch):
    check = measure.check_memory

    def refuse(*args, segment_len=1, **more):
        if segment_len == 10:
            raise ResourceError("the memory needs 9 TB.")
        check(*args, segment_len=segment_len, **more)

    monkeypatch.setattr(measure, "check_memory", refuse)
    done = run("bench", "decode", *SHORT, "--mem-len", "9", "--json")
    assert _first(done)["recompute_ratio"] is None
    assert re.search(r"\b9\b.*recomputing.*\b9 TB\b", done.err)


@pytest.mark.parametrize("task", ["decode", "eval", "train"])
def test_memory_of_all_lengths_is_checked_before_the_first_measurement(task, run, monkeypatch):
    stages = []
    monkeypatch.setattr(measure.Stopwatch, "repeat", lambda watch, call, stage, **options: stages.append(stage))

    def refuse(configs, *_):
        if configs[0].train.mem_len > 9:
            raise ResourceError("the memory does not fit.")

    monkeypatch.setattr(measure.memory, "require", refuse)
    too_long = 12 if task == "train" else 2_000_000_000
    done = run("bench", task, *SHORT, "--mem-len", f"9,{too_long}")
    assert (done.code, stages) == (4, []), done.err
    assert "memory" in done.err


def test_a_batch_is_not_compared_with_recomputing(run):
    speed = _first(run("bench", "decode", *SHORT, "--mem-len", "9", "--batch-size", "4", "--json"))
    assert (speed["batch_size"], speed["recompute_ratio"]) == (4, None)


def test_the_configuration_of_a_model_is_printed(run, model):
    text = run("bench", "-m", model, "--print-config").out.decode()
    assert "dim = 16\n" in text, text
