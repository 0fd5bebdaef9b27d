"""A run that was stopped or killed anywhere and resumed is, to the bit, the run that never stopped."""

import itertools
import json
import os
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from short_runs import After, corpus, curve, go, of_kind, remains, small, train

from tests.variants import thinned
from xlcli.config import EvalConfig, RuntimeConfig
from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.evaluation import evaluate
from xlcli.events import Notice, Saved, Score, Step, Trained, Validation
from xlcli.files.tensors import digest, read_header, read_tensors, write_tensors
from xlcli.runtime import make_runtime
from xlcli.store.commit import latest
from xlcli.store.folder import load
from xlcli.store.layout import read_config_file
from xlcli.store.weights import decode, encode, stored_infos, weights

STEPS = 6
WAYS = list(itertools.product(("float32", "bfloat16"), ("muon", "adamw"), (1, 2), (0, 16), (0.0, 0.3)))


def _way(dtype, optimizer, grad_accum, mem_len, average_share, **budget):
    train = {"optimizer": optimizer, "grad_accum": grad_accum, "mem_len": mem_len, "average_share": average_share}
    return small(runtime={"dtype": dtype}, train=train | {"shuffle": grad_accum == 2} | budget)


@pytest.mark.parametrize("way", thinned(WAYS, WAYS[::11]), ids=lambda way: "-".join(map(str, way)))
def test_a_stop_after_any_step_changes_nothing(way):
    text, tree = corpus(), _way(*way)
    events = go(tree, text, "whole")
    assert [step.step for step in of_kind(events, Step)] == list(range(1, STEPS + 1))
    expected = remains("whole")
    for split in range(STEPS):
        folder = Path(f"split{split}")
        stopped = After(split).run(tree, text, folder)[-1]
        assert (stopped.step, stopped.stopped) == (split, True)
        assert (folder / "model.safetensors").exists() == (split > 0)
        go({}, text, folder, resume=True)
        assert remains(folder) == expected, split


BUDGETS = [{"max_tokens": STEPS * 64 - 5, "max_steps": None}, {"eval_every": None}]


@pytest.mark.parametrize("budget", thinned(BUDGETS, BUDGETS[:1]), ids=str)
def test_a_kill_after_any_event_changes_nothing(budget):
    text, tree = corpus(), _way("float32", "muon", 2, 16, 0.3, **budget)
    events = go(tree, text, "whole")
    expected = remains("whole")
    for end in range(1, len(events)):
        folder = Path(f"killed{end}")
        run = train(tree, [text], folder)
        for _ in range(end):
            next(run)
        run.close()
        begun = (folder / "config.json").exists()
        resumed = go(tree, text, folder, resume=begun)
        assert remains(folder) == expected, end
        steps = [step.step for step in of_kind(resumed, Step)]
        assert steps == list(range(STEPS + 1 - len(steps), STEPS + 1))


def test_a_run_stopped_again_and_again_is_the_same_too():
    text, tree = corpus(), _way("float32", "muon", 1, 16, 0.3)
    go(tree, text, "whole")
    After(1).run(tree, text, "often")
    for split in range(2, STEPS):
        After(split).run({}, text, "often", resume=True)
    go({}, text, "often", resume=True)
    assert remains("often") == remains("whole")


def test_an_interrupted_validation_is_made_up_for():
    text, tree = corpus(), small()
    go(tree, text, "whole")
    asked = []

    def stop():
        asked.append(None)
        return validating[0] and len(asked) > 0

    validating = [False]
    for event in train(tree, [text], Path("cut"), stop=stop):
        validating[0] = isinstance(event, Step) and event.step == 3
    assert not [row for row in curve("cut") if "validation_bits_per_byte" in row]
    facts = json.loads((Path("cut/checkpoints/step-00000003/state.json")).read_bytes())
    assert facts["validation_due"]
    go({}, text, "cut", resume=True)
    assert remains("cut") == remains("whole")


def test_the_curve_has_every_step_once():
    text, tree = corpus(), small(train={"max_steps": 9, "eval_every": 2})
    After(5).run(tree, text, "m")
    events = go({}, text, "m", resume=True)
    rows = curve("m")
    steps = [row["step"] for row in rows if "nats" in row]
    scored = [row["step"] for row in rows if "validation_bits_per_byte" in row]
    assert steps == list(range(1, 10))
    assert scored == [2, 4, 6, 8, 9]
    assert [v.step for v in of_kind(events, Validation)] == [6, 8, 9]


def test_resuming_a_finished_run_repeats_nothing():
    text, tree = corpus(), small()
    done = go(tree, text, "m")[-1]
    before = remains("m")
    events = go({}, text, "m", resume=True)
    assert not of_kind(events, Step | Validation | Saved)
    again = of_kind(events, Trained)[0]
    assert (again.bits_per_byte, again.sample, again.stopped) == (done.bits_per_byte, done.sample, False)
    assert again.seconds == pytest.approx(done.seconds, abs=1e-3)
    assert remains("m") == before
    said = [event.text for event in of_kind(events, Notice) if "budget" in event.text]
    assert [re.findall(r"\d+", text) for text in said] == [["6", "6"]]
    assert "--max-steps" in said[0]


def test_a_spent_time_budget_is_reported():
    text = corpus()
    go(small(), text, "m")
    events = go({"train": {"max_time": 1e-9}}, text, "m", resume=True)
    assert not of_kind(events, Step)
    said = [event.text for event in of_kind(events, Notice) if "--max-time" in event.text]
    assert len(said) == 1


def test_a_larger_budget_goes_on():
    text = corpus()
    go(small(), text, "m")
    events = go({"train": {"max_steps": 8}}, text, "m", resume=True)
    assert [step.step for step in of_kind(events, Step)] == [7, 8]
    assert json.loads(Path("m/config.json").read_bytes())["train"]["max_steps"] == 8


def test_a_budget_given_anew_replaces_the_old_one():
    text = corpus()
    go(small(), text, "m")
    events = go({"train": {"max_tokens": 7 * 64}}, text, "m", resume=True)
    assert [step.step for step in of_kind(events, Step)] == [7]
    assert json.loads(Path("m/config.json").read_bytes())["train"]["max_steps"] is None


def test_the_best_weights_go_back_with_the_run():
    """A kill may come after a validation whose step is undone: the weights it kept are undone with it."""
    text, tree = corpus(), small(train={"eval_every": 3, "save_every": 5, "max_steps": 8})
    run = train(tree, [text], Path("m"))
    for event in run:
        if isinstance(event, Validation) and event.step == 6:
            break
    run.close()
    later = Path("m/model.safetensors").read_bytes()
    After(0).run({}, text, "m", resume=True)
    assert Path("m/model.safetensors").read_bytes() != later
    kept = latest(Path("m/checkpoints")).path
    assert kept.name == "step-00000005"
    assert Path("m/model.safetensors").read_bytes() == (kept / "best.safetensors").read_bytes()
    Path("m/model.safetensors").unlink()
    go({}, text, "m", resume=True)
    assert Path("m/model.safetensors").exists()


@pytest.mark.parametrize("encoding", thinned(["int8", "bfloat16"], ["int8"]))
def test_the_encoding_of_the_stored_weights_changes_nothing_else(encoding):
    text, tree = corpus(), small(train={"weights": encoding})
    go(small(), text, "plain")
    go(tree, text, "whole")
    plain, expected = remains("plain"), remains("whole")
    assert expected["tensors"].pop("best.safetensors") != plain["tensors"].pop("best.safetensors")
    assert (expected["tensors"], expected["curve"]) == (plain["tensors"], plain["curve"])
    assert stored(Path("whole")) == (encoding, rounded(load(Path("plain")), encoding))
    expected = remains("whole")
    for split in (2, 4):
        After(split).run(tree, text, f"split{split}")
        go({}, text, f"split{split}", resume=True)
        assert remains(f"split{split}") == expected, split


ENCODINGS = [("float32", "int8"), ("int8", "float32"), ("int8", "bfloat16")]


@pytest.mark.parametrize("encodings", thinned(ENCODINGS, ENCODINGS[:2]), ids="-".join)
def test_a_resumed_run_may_store_its_weights_in_another_encoding(encodings):
    before, after = encodings
    text, tree = corpus(), small(train={"weights": before, "eval_every": 4})
    After(5).run(tree, text, "m")
    expected = rounded(load(Path("m")), after)
    After(0).run({"train": {"weights": after}}, text, "m", resume=True)
    assert stored(Path("m")) == (after, expected)
    kept = latest(Path("m/checkpoints")).path
    assert read_header(kept / "best.safetensors")[1]["encoding"] == before  # as if killed before its next checkpoint
    After(0).run({}, text, "m", resume=True)
    assert stored(Path("m")) == (after, expected)
    end = go({}, text, "m", resume=True)[-1]
    assert stored(Path("m"))[0] == after
    go(small(train={"weights": after, "eval_every": 4}), text, "whole")
    assert end.best_step == STEPS  # later than the change
    assert Path("m/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def test_weights_saved_before_any_validation_are_stored_in_another_encoding_too():
    text = corpus()
    After(2).run(small(), text, "m")
    expected = rounded(load(Path("m")), "int8")
    After(0).run({"train": {"weights": "int8"}}, text, "m", resume=True)
    assert stored(Path("m")) == ("int8", expected)


def test_a_finished_run_may_store_its_weights_in_another_encoding():
    text = corpus()
    go(small(), text, "m")
    expected = rounded(load(Path("m")), "int8")
    events = go({"train": {"weights": "int8"}}, text, "m", resume=True)
    assert not of_kind(events, Step)
    assert stored(Path("m")) == ("int8", expected)
    runtime = make_runtime(RuntimeConfig(device="cpu", threads=1))
    score = of_kind(evaluate(load(Path("m")), None, EvalConfig(), runtime), Score)[0]
    assert events[-1].bits_per_byte == score.bits_per_byte


def rounded(model, encoding):
    """Digest of the weights of a loaded model after they were stored in an encoding."""
    tensors = weights(model.network)
    return digest(decode(encode(tensors, stored_infos(tensors, encoding))))


def stored(folder):
    """Encoding of a model folder and digest of its weights."""
    assert read_header(folder / "model.safetensors")[1]["encoding"] == read_config_file(folder).encoding
    return read_config_file(folder).encoding, digest(weights(load(folder).network))


def test_a_damaged_checkpoint_is_skipped_with_a_notice():
    text, tree = corpus(), small(train={"keep_checkpoints": 3})
    go(tree, text, "whole")
    After(5).run(tree, text, "m")
    weights = Path("m/checkpoints/step-00000005/weights.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    events = go({}, text, "m", resume=True)
    assert any("skipped" in notice.text for notice in of_kind(events, Notice))
    assert of_kind(events, Step)[0].step == 5
    assert remains("m") == remains("whole")


def _damage(path):
    """Changes the last byte in place, as a bad sector does, so that every link to the file is damaged."""
    with Path(path).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


def test_checkpoints_and_model_share_nothing():
    go(small(train={"keep_checkpoints": 3}), corpus(), "m")
    files = [path for path in Path("m").rglob("*") if path.is_file() and not path.name.startswith(".lock")]
    assert {path.stat().st_nlink for path in files} == {1}
    assert sum(path.name == "best.safetensors" for path in files) == 2


@pytest.mark.parametrize("damaged", ["model.safetensors", "best.safetensors"])
def test_damage_to_one_copy_of_the_best_weights_changes_nothing(damaged):
    text = corpus()
    go(small(), text, "whole")
    After(5).run(small(), text, "m")
    point = latest(Path("m/checkpoints")).path
    _damage("m/model.safetensors" if damaged == "model.safetensors" else point / damaged)
    events = go({}, text, "m", resume=True)
    assert of_kind(events, Step)[0].step == 6
    assert remains("m") == remains("whole")


def test_when_the_best_weights_are_lost_the_present_ones_are_validated():
    text, tree = corpus(), small(train={"eval_every": 4, "keep_checkpoints": 1})
    After(5).run(tree, text, "m")
    _damage("m/model.safetensors")
    for path in Path("m/checkpoints").glob("step-*/best.safetensors"):
        _damage(path)
    events = go({}, text, "m", resume=True)
    warnings = [notice.text for notice in of_kind(events, Notice) if notice.level == "warning"]
    assert [re.findall(r"\d+", text) for text in warnings] == [["4", "5"]]
    assert next((v.step, v.best) for v in of_kind(events, Validation)) == (5, True)
    assert events[-1].step == 6
    load(Path("m"))


def test_a_model_that_cannot_be_read_does_not_stop_training():
    text, tree = corpus(), small(train={"max_steps": 9, "save_every": 1, "eval_every": 3})
    run = train(tree, [text], Path("m"))
    for event in run:
        if isinstance(event, Saved) and event.step == 3:
            Path("m/model.safetensors").unlink()
            Path("m/model.safetensors").symlink_to("/dev/null")
        if isinstance(event, Saved) and event.step == 4:
            assert not (event.folder / "best.safetensors").exists()
    assert event.step == 9
    load(Path("m"))


@pytest.mark.parametrize("name", ["weights", "optimizer", "memory", "random"])
def test_only_listed_files_are_read(name):
    text = corpus()
    After(3).run(small(), text, "m")
    point = latest(Path("m/checkpoints")).path
    _unlist(point, f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=f"'{name}.safetensors'"):
        go({}, text, "m", resume=True)


@pytest.mark.parametrize("kind", ["link", "fifo", "file"])
def test_best_weights_that_are_not_listed_are_not_read(kind):
    text = corpus()
    go(small(runtime={"seed": 1}), text, "other")
    After(5).run(small(), text, "m")
    expected, point = Path("m/model.safetensors").read_bytes(), latest(Path("m/checkpoints")).path
    _unlist(point, "best.safetensors")
    other, best = Path("other/model.safetensors").absolute(), point / "best.safetensors"
    best.unlink()
    {"link": lambda: best.symlink_to(other), "fifo": lambda: os.mkfifo(best), "file": lambda: shutil.copy(other, best)}[
        kind
    ]()
    After(0).run({}, text, "m", resume=True)
    assert Path("m/model.safetensors").read_bytes() == expected


def _unlist(point, name):
    manifest = json.loads((point / "manifest.json").read_bytes())
    manifest["files"].pop(name)
    (point / "manifest.json").write_text(json.dumps(manifest))


def test_a_validation_that_is_repeated_has_one_row():
    """Interrupted in a validation, resumed, and killed after this validation."""
    text, tree = corpus(), small()
    go(tree, text, "whole")
    validating = [False]
    for event in train(tree, [text], Path("m"), stop=lambda: validating[0]):
        validating[0] = isinstance(event, Step) and event.step == 3
    run = train({}, [text], Path("m"), resume=True)
    while not isinstance(next(run), Validation):
        pass
    run.close()
    go({}, text, "m", resume=True)
    assert remains("m") == remains("whole")


@pytest.mark.parametrize("record", ["", "{", '{"corpus": "a'])
def test_a_torn_record_is_named(record):
    """The model can be used without it; a run cannot be resumed, whose settings it holds."""
    text = corpus()
    After(4).run(small(), text, "m")
    Path("m/record.json").write_text(record)
    assert "record.json" in load(Path("m")).warnings[0]
    with pytest.raises(CheckpointError, match=r"record\.json"):
        go({}, text, "m", resume=True, preset=None)


@pytest.mark.parametrize("seed", [0, 7])
def test_without_its_record_a_run_has_the_default_seed(seed):
    text = corpus()
    After(4).run(small(runtime={"seed": seed}), text, "m")
    Path("m/record.json").unlink()
    if seed:
        with pytest.raises(CheckpointError, match="seed 7"):
            go({}, text, "m", resume=True, preset=None)
        return
    assert go({}, text, "m", resume=True, preset=None)[-1].step == 6
    assert json.loads(Path("m/record.json").read_bytes())["finished"]


def test_a_folder_with_its_own_models_is_resumed():
    corpus()
    go(small(), ".", "models/other")
    After(3).run(small(), ".", "models/m")
    assert go({}, ".", "models/m", resume=True)[-1].step == 6
    assert json.loads(Path("models/m/record.json").read_bytes())["corpus"] == "corpus.txt"
    with pytest.raises(DataError, match="models"):
        go(small(), "models", "elsewhere")


def test_when_all_are_damaged_it_says_so():
    text = corpus()
    After(3).run(small(), text, "m")
    for path in Path("m/checkpoints").glob("step-*/manifest.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match="overwrite"):
        go({}, text, "m", resume=True)


FACTS = (
    "step", "tokens", "seconds", "n_read", "best_bits", "best_step", "validated_step", "validation_due",
    "rollbacks", "stale", "plateau", "reserve", "limits", "lr",
    "corpus", "states", "seed", "threads", "processes", "device", "dtype", "torch", "processor",
)  # fmt: skip


def test_every_fact_is_needed():
    text = corpus()
    After(3).run(small(), text, "m")
    point = latest(Path("m/checkpoints")).path
    facts = json.loads((point / "state.json").read_bytes())
    assert set(facts) == {*FACTS, "schema"}
    for name in FACTS:
        _rewrite(point, {key: value for key, value in facts.items() if key != name})
        with pytest.raises(CheckpointError, match=rf"step-00000003\b.*{name}") as caught:
            go({}, text, "m", resume=True)
        assert caught.value.remedy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, r"seed\D+5\b"),
        ({"states": []}, "incomplete"),
        ({"states": [{"memory": "hidden"}]}, "unknown"),
        ({"states": 3}, "incomplete"),
        ({"step": "abc"}, r"\bstep\s.*'abc'"),
        ({"step": 1.5}, r"\bstep\s.*1\.5"),
        ({"step": 2**63}, r"\bstep\s.*9223372036854775808"),
        ({"tokens": {}}, r"\btokens\s.*{}"),
        ({"n_read": 10**400}, r"\bn_read\s.*1000"),
        ({"plateau": -1.0}, r"\bplateau\s.*-1\.0"),
        ({"seconds": "abc"}, r"\bseconds\s.*'abc'"),
        ({"best_bits": []}, r"\bbest_bits\s.*\[\]"),
        ({"corpus": []}, "incomplete"),
        ({"corpus": {"tokenizer": "0"}}, "tokenizer"),
    ],
)
def test_a_checkpoint_that_makes_no_sense_is_refused(change, message):
    text = corpus()
    After(3).run(small(), text, "m")
    point = latest(Path("m/checkpoints")).path
    _rewrite(point, json.loads((point / "state.json").read_bytes()) | change)
    with pytest.raises(CheckpointError, match=message) as caught:
        go({}, text, "m", resume=True)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "states",
    [{}, {"cpu": torch.zeros(9, dtype=torch.uint8)}, {"cpu": torch.zeros(5056)}, {"cpu": torch.get_rng_state()[:-1]}],
    ids=["missing", "too short", "of another type", "cut"],
)
def test_generator_states_that_make_no_sense_are_refused(states):
    text = corpus()
    After(3).run(small(), text, "m")
    point = latest(Path("m/checkpoints")).path
    write_tensors(point / "random.safetensors", states, {})
    _seal_again(point)
    with pytest.raises(CheckpointError, match="incomplete") as caught:
        go({}, text, "m", resume=True)
    assert caught.value.remedy


def test_generator_states_are_tensors():
    After(3).run(small(), corpus(), "m")
    point = latest(Path("m/checkpoints")).path
    states, _ = read_tensors(point / "random.safetensors", expected=None)
    assert states["cpu"].dtype == torch.uint8
    assert states["cpu"].shape == torch.get_rng_state().shape


def test_the_runtime_of_the_run_is_kept():
    """It is not part of the model, so the record holds it: seed, number type and threads are those of the beginning."""
    text, tree = corpus(), small(runtime={"dtype": "bfloat16", "threads": 1, "seed": 7})
    go(tree, text, "whole")
    After(3).run(tree, text, "m")
    assert "runtime" not in json.loads(Path("m/config.json").read_bytes())
    assert json.loads(Path("m/record.json").read_bytes())["runtime"]["seed"] == 7
    events = go({}, text, "m", resume=True)
    assert not [notice for notice in of_kind(events, Notice) if notice.level == "warning"]
    assert remains("m") == remains("whole")


def test_changed_text_is_refused():
    text = corpus()
    After(3).run(small(), text, "m")
    changed = corpus(text="Q" + Path(text).read_text()[1:])
    with pytest.raises(CheckpointError, match="init m"):
        go({}, changed, "m", resume=True)


@pytest.mark.parametrize("part", ["valid", "test"])
def test_changed_held_out_text_is_refused(part):
    text, held = corpus(), corpus(name="held.txt", text=b"some other text to be held out\n" * 9)
    After(4).run(small(text={part: held}), text, "m")
    assert Path(f"m/{part}.txt").read_bytes() == Path(held).read_bytes()
    Path(held).write_bytes(b"quite another text to be held out\n" * 9)
    with pytest.raises(CheckpointError, match="held-out"):
        go({}, text, "m", resume=True)


def test_held_out_text_may_move():
    text, held = corpus(), corpus(name="held.txt", text=b"some other text to be held out\n" * 9)
    tree = small(text={"valid": held})
    go(tree, text, "whole")
    After(4).run(tree, text, "m")
    moved = str(shutil.move(held, "moved.txt"))
    go({"text": {"valid": moved}}, text, "m", resume=True)
    assert remains("m") == remains("whole")


def test_another_tokenizer_in_the_folder_is_refused():
    text = corpus()
    After(3).run(small(), text, "m")
    go(small(text={"tokenizer": "words"}), text, "other")
    for path in Path("other").glob("tokenizer.*"):
        shutil.copy(path, "m")
    with pytest.raises(CheckpointError):
        go({}, text, "m", resume=True)


def test_another_number_of_threads_is_reported():
    text = corpus()
    After(3).run(small(), text, "m")
    before = torch.get_num_threads()
    try:
        events = go({"runtime": {"threads": 2}}, text, "m", resume=True)
    finally:
        torch.set_num_threads(before)
    assert any(re.search(r"threads\b.*\b1\b.*\b2\b", notice.text) for notice in of_kind(events, Notice))


@pytest.mark.parametrize("change", [
    {"model": {"dim": 32}}, {"train": {"optimizer": "adamw"}}, {"train": {"grad_accum": 2}},
    {"train": {"segment_len": 8}}, {"runtime": {"seed": 1}}, {"text": {"tokenizer": "words"}},
])  # fmt: skip
def test_what_cannot_change_is_refused_by_name(change):
    text = corpus()
    After(1).run(small(), text, "m")
    section, inside = next(iter(change.items()))
    with pytest.raises(ConfigError, match=rf"{section}\.{next(iter(inside))}\b"):
        go(change, text, "m", resume=True)


def test_the_same_command_resumes():
    text, tree = corpus(), small(text={"tokenizer": "auto"})
    After(3).run(tree, text, "m")
    assert json.loads(Path("m/config.json").read_bytes())["text"]["tokenizer"] == "bytes"
    go(tree, text, "m", resume=True)
    record = json.loads(Path("m/record.json").read_bytes())
    assert (record["preset"], record["finished"], record["steps"]) == ("tiny", True, STEPS)
    with pytest.raises(ConfigError, match="tiny"):
        list(train({}, [text], Path("m"), preset="small", resume=True))


def _rewrite(point, facts):
    (point / "state.json").write_text(json.dumps(facts))
    _seal_again(point)


def _seal_again(point):
    """Makes the manifest that of the files as they are now, which a checkpoint with right checksums has."""
    names = sorted(path.name for path in point.iterdir() if path.name != "manifest.json")
    files = {name: (point / name).read_bytes() for name in names}
    entries = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    (point / "manifest.json").write_text(json.dumps({"schema": 2, "files": entries}))


MISFITS = {
    "cut": lambda t: t[..., :-1], "empty": lambda t: t[:0], "of another type": lambda t: t.half(), "scalar": torch.sum,
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantity", "misfit"),
    [
        *itertools.product(("embedding.table.weight:exp_avg", ":momentum_buffer"), MISFITS),
        *itertools.product(("embedding.table.weight:step",), ("cut", "empty", "of another type")),
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_refused(quantity, misfit):
    text = corpus()
    After(3).run(small(), text, "m")
    point = latest(Path("m/checkpoints")).path
    tensors, _ = read_tensors(point / "optimizer.safetensors", expected=None)
    name = next(name for name in tensors if name.endswith(quantity))
    tensor = tensors[name]
    tensors[name] = MISFITS[misfit](tensor if tensor.ndim else torch.stack([tensor, tensor])).clone()
    write_tensors(point / "optimizer.safetensors", tensors, {})
    _seal_again(point)
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        go({}, text, "m", resume=True)


def test_a_memory_of_another_shape_is_refused():
    text = corpus()
    After(3).run(small(), text, "m")
    point = latest(Path("m/checkpoints")).path
    tensors, _ = read_tensors(point / "memory.safetensors", expected=None)
    tensors["0.0.h"] = tensors["0.0.h"][..., :-1].clone()
    write_tensors(point / "memory.safetensors", tensors, {})
    _seal_again(point)
    with pytest.raises(CheckpointError, match="memory"):
        go({}, text, "m", resume=True)
