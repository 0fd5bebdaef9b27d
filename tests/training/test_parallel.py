"""Runs on several ranks: equal to those of one process, saved, resumed on another number of ranks, and killed."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from launching import outputs, start
from ranked import BUDGET, CASES, SAMPLE
from short_runs import corpus, curve, go, small

from xlcli import config
from xlcli.errors import ConfigError, InvalidSettingError
from xlcli.files.tensors import read_tensors
from xlcli.ranks import Ranks
from xlcli.store.commit import latest
from xlcli.training.parallel import announce_start, own_rows, wait_for_start

CALL = "import sys; sys.path[:0] = {path!r}; import ranked; ranked.{call}"
HERE = [str(Path(__file__).parent)]


def launch(size, call, timeout=200):
    """Exit code, stdout and stderr of each rank that makes this call of `ranked`."""
    return outputs(start(size, CALL.format(path=HERE, call=call)), timeout)


def compared(size, n_steps, *names):
    results = launch(size, f"compare({n_steps}, *{names!r})", timeout=3600)
    assert [code for code, *_ in results] == [0] * size, results[0][2][-3000:]
    return {(line["name"], line["shard"]): line for line in map(json.loads, results[0][1].splitlines())}


def assert_equal(line):
    for key, values in line["expected"].items():
        assert line["found"][key] == pytest.approx(values, rel=0, abs=1e-6), key


def largest(line, key):
    pairs = zip(line["found"][key], line["expected"][key], strict=True)
    return max(abs(found - expected) for found, expected in pairs)


@pytest.fixture(scope="module")
def sample():
    return compared(2, 4, *SAMPLE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("name", SAMPLE)
def test_steps_of_two_ranks_are_those_of_one_process(name, shard, sample):
    assert_equal(sample[name, shard])


@pytest.mark.exhaustive
def test_threads_of_a_failed_run_end_before_the_interpreter():
    results = launch(2, "fail()")
    assert [(code, out) for code, out, _ in results] == [(0, f"{sys.platform == 'linux'}\n")] * 2, results[0][2]


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("size", [2, 4])
def test_fifty_steps_of_every_stack_and_attention(size):
    lines = compared(size, 50)
    assert lines.keys() == {(name, shard) for name in CASES for shard in (False, True)}
    for key in ("nats", "norms", "weights"):
        difference, *where = max((largest(line, key), *case) for case, line in lines.items())
        print(f"{size} ranks, {len(lines)} cases: largest difference of {key} {difference:.1e} ({where})")
    for line in lines.values():
        assert_equal(line)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of the runs of two ranks, and of one process; and what the ranks printed."""
    place = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        corpus()
        results = launch(2, "save_and_resume()")
        assert [code for code, *_ in results] == [0, 0], results[0][2][-3000:]
        torch.set_num_threads(1)
        patch.setattr("xlcli.training.run.has_bfloat16_units", lambda device: False)
        patch.setattr("xlcli.text.loaders.PIECE_LEN", 24)
        go(small(train=BUDGET), "corpus.txt", "one")
    return place, [[json.loads(line) for line in out.splitlines()] for _, out, _ in results]


def newest(folder):
    """Tensors and facts of the newest checkpoint."""
    point = latest(folder / "checkpoints").path
    names = ("weights", "optimizer", "memory")
    return [read_tensors(point / f"{name}.safetensors", expected=None)[0] for name in names], json.loads(
        (point / "state.json").read_bytes()
    )


def assert_alike(folder, other):
    """Both runs differ by rounding in float32 only."""
    (found, facts), (expected, other_facts) = newest(folder), newest(other)
    for tensors, others in zip(found, expected, strict=True):
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert torch.allclose(tensor, others[name], rtol=0, atol=2e-5), name
    for name in ("step", "tokens", "n_read", "best_step", "validated_step", "states"):
        assert facts[name] == other_facts[name], name
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in other.iterdir())
    for name in ("128", "300"):
        found, expected = (
            read_tensors(run / "kept" / name / "model.safetensors", expected=None)[0] for run in (folder, other)
        )
        assert all(
            torch.allclose(found[key], expected[key], rtol=0, atol=2e-5) for key in found.keys() | expected.keys()
        )


@pytest.mark.parametrize("run", ["whole", "resumed"])
@pytest.mark.parametrize("shard", [False, True])
def test_files_of_two_ranks_are_those_of_one_process(run, shard, folders):
    place, _ = folders
    assert_alike(place / f"{run}-{shard}", place / "one")
    rows, expected = curve(place / f"{run}-{shard}"), curve(place / "one")
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for key in ("nats", "validation_bits_per_byte"):
        values = [row[key] for row in rows if key in row]
        assert values == pytest.approx([row[key] for row in expected if key in row], rel=1e-5)


@pytest.mark.parametrize("shard", [False, True])
def test_a_run_of_two_ranks_is_resumed_by_one(shard, folders, monkeypatch):
    place, _ = folders
    monkeypatch.chdir(place)
    monkeypatch.setattr("xlcli.training.run.has_bfloat16_units", lambda device: False)
    assert newest(place / f"stopped-{shard}")[1]["step"] == 3
    go({}, "corpus.txt", f"stopped-{shard}", resume=True)
    assert_alike(place / f"stopped-{shard}", place / "one")


def test_a_divided_run_continues_without_its_best_weights(folders):
    place, _ = folders
    assert_alike(place / "lost", place / "one")


def test_ranks_roll_back_together(folders):
    _, (first, second) = folders
    assert first == second
    notices, steps = first
    assert [re.findall(r"\d+", text)[1] for text in notices] == ["2"]
    assert steps == [1, 2, 3, 4, 3, 4, 5, 6]


def test_the_loss_of_a_rank_ends_the_others_and_the_run_is_resumed(prose):
    arguments = ["train", str(prose), "--preset", "tiny", "-o", "m", "--set", "train.segment_len=16"]
    arguments += ["--set", "train.mem_len=16", "--tokenizer", "bytes", "--threads", "1", "--batch-size", "4"]
    arguments += ["--max-steps", "6", "--set=train.save_every=2", "--set", "model.dim=32", "--set", "model.n_layers=1"]
    (code, _, error), (killed, _, _) = launch(2, f"command(*{arguments}, kill=5)")
    assert (code, killed) == (4, -9), error
    assert "lost" in error.splitlines()[-2] + error.splitlines()[-1]
    assert latest(Path("m/checkpoints")).path.name.endswith("4")
    go({}, str(prose), "m", resume=True)
    assert [row["step"] for row in curve("m") if "nats" in row] == [1, 2, 3, 4, 5, 6]


def test_an_illegal_setting_of_the_first_rank_is_an_error_of_the_others(monkeypatch):
    error, board = InvalidSettingError("train.lr", "is odd", "Give another."), {}
    monkeypatch.setattr(Ranks, "publish", lambda ranks, name, value: board.update({name: value}))
    monkeypatch.setattr(Ranks, "published", lambda ranks, name, stop: board[name])
    with pytest.raises(InvalidSettingError), announce_start(Ranks()):
        raise error
    with pytest.raises(ConfigError) as caught:
        wait_for_start(Ranks(), lambda: False)
    assert (str(caught.value), caught.value.is_of_first_rank) == (str(error), True)


def _settings(**sections):
    return config.make({"train": {"lr": 6e-3}}, small(**sections))


@pytest.mark.parametrize(
    ("size", "train", "nearest"),
    [
        (2, {"batch_size": 7}, r"\b6\b.*\b8\b"),
        (4, {"batch_size": 3}, r"batch_size=4\b"),
        (2, {"batch_size": 6, "grad_accum": 2}, r"\b4\b.*\b8\b"),
    ],
)
def test_a_batch_that_ranks_do_not_divide_is_refused(size, train, nearest):
    with pytest.raises(ConfigError, match=nearest):
        _settings(train=train).check_division(size)


ADAPTIVE = {"stack": {"kind": "universal", "n_steps": 3, "act": True}}
HASHED = {"attention": {"kind": "lsh", "n_heads": 2}, "position": {"kind": "sinusoidal"}}


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": ADAPTIVE}, "model.dropout"),
        ({"model": HASHED}, "model.dropout.attention"),
        ({"runtime": {"shard": True, "compile": True}}, "runtime.shard"),
        ({"runtime": {"shard": True}, "model": {"norm": {"placement": "rezero"}}}, "runtime.shard"),
    ],
)
def test_combinations_that_ranks_do_not_support_are_refused(sections, key):
    settings = _settings(**sections)
    settings.check_division(1)
    with pytest.raises(ConfigError) as caught:
        settings.check_division(2)
    assert caught.value.key == key


def test_each_rank_has_its_part_of_every_microbatch():
    settings = _settings(train={"batch_size": 8, "grad_accum": 2})
    assert own_rows(settings, Ranks()).tolist() == list(range(8))
    assert [own_rows(settings, Ranks(rank, 2)).tolist() for rank in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
