"""The whole of `train`: what it makes of a text, when it stops, what it refuses, what it leaves."""

import errno
import gzip
import json
import math
import os
import re
import shlex
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from short_runs import PROSE, After, corpus, curve, go, of_kind, small, train

from xlcli import config
from xlcli.config import EvalConfig, RuntimeConfig
from xlcli.errors import BusyError, ConfigError, DataError, DivergedError, ResourceError, XLError
from xlcli.evaluation import evaluate
from xlcli.events import Notice, Plan, Progress, Saved, Score, Step, Trained, Validation
from xlcli.files import cache_folder
from xlcli.files.tensors import read_header, read_tensors
from xlcli.inference import InferenceSession
from xlcli.runtime import make_runtime
from xlcli.store.commit import latest
from xlcli.store.folder import load
from xlcli.store.layout import is_model, read_record
from xlcli.store.lock import lock
from xlcli.text.tokenizers import BytesTokenizer, SentencePieceTokenizer
from xlcli.training import loop, validation, workflow


def _finite(folder):
    point = latest(Path(folder) / "checkpoints").path
    files = [*point.glob("*.safetensors"), *Path(folder).glob("model.safetensors")]
    return all(bool(t.isfinite().all()) for file in files for t in read_tensors(file, expected=None)[0].values())


def _files(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_run_leaves_a_model_that_scores_as_it_says():
    events = go(small(), corpus(), "m")
    assert [type(event) for event in events if not isinstance(event, Progress | Notice)] == [
        Plan, Step, Step, Saved, Step, Validation, Step, Saved, Step, Step, Validation, Saved, Trained,
    ]  # fmt: skip
    end = events[-1]
    runtime = make_runtime(RuntimeConfig(device="cpu", threads=1))
    score = of_kind(evaluate(load(Path("m")), None, EvalConfig(), runtime), Score)[0]
    assert end.bits_per_byte == score.bits_per_byte < 8.5
    assert (end.step, end.tokens, end.stopped) == (6, 6 * 64, False)
    record = read_record(Path("m"))
    assert record["bits_per_byte"] == end.bits_per_byte
    assert record["finished"]
    assert (record["corpus"], record["preset"], record["steps"]) == (corpus(), "tiny", 6)
    plan = events[0] if isinstance(events[0], Plan) else of_kind(events, Plan)[0]
    assert plan.train_bytes + plan.valid_bytes + plan.test_bytes == len(PROSE)
    assert (Path("m/valid.txt").stat().st_size, Path("m/test.txt").stat().st_size) == (
        plan.valid_bytes, plan.test_bytes,
    )  # fmt: skip


@pytest.mark.parametrize(("budget", "threads"), [({"max_time": 60.0, "max_steps": 1}, 1), ({"max_steps": 1}, 2)])
def test_a_time_budget_lets_the_load_choose_the_threads_of_the_run_alone(budget, threads, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("xlcli.runtime.cpu_limit", lambda: 2)
    monkeypatch.setattr("xlcli.runtime.parallel_loop_seconds", lambda threads, n_parts: 50.0 if threads > 1 else 1.0)
    torch.set_num_threads(2)
    events = train(small(runtime={"threads": None}, train=budget), [corpus()], Path("m"))
    used = [torch.get_num_threads() for event in events if isinstance(event, Plan | Step | Validation)]
    assert used == [threads] * 3
    assert torch.get_num_threads() == 2
    assert read_record(Path("m"))["runtime"]["threads"] is None


def test_nothing_said_is_all_decided():
    events = list(train({}, [corpus()], Path("m"), preset=None, dry_run=True))
    plan = of_kind(events, Plan)[0]
    assert (plan.preset, plan.tokenizer, plan.vocab_size) == ("tiny", "bytes", 256)
    assert re.fullmatch(r"600,000 tokens \(\d+ passes\) or [13]0 minutes", plan.budget)
    given = list(train({"train": {"max_time": 60.0}}, [corpus()], Path("m"), preset=None, dry_run=True))
    assert of_kind(given, Plan)[0].budget == "60 seconds"
    assert not Path("m").exists()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_dry_run_tokenizes_a_sample_of_a_long_text(suffix, monkeypatch):
    monkeypatch.setenv("XLCLI_CACHE", str(Path("cache").absolute()))
    data = b"".join(f"{i} foxes saw {i * i} dogs at {i % 97} o'clock.\n".encode() for i in range(100_000))
    path = Path(f"long.txt{suffix}")
    path.write_bytes(gzip.compress(data, 1) if suffix else data)
    settings = small(text={"tokenizer": "bytes"})
    plan = of_kind(train(settings, [str(path)], Path("m"), preset=None, dry_run=True), Plan)[0]
    assert plan.estimated
    assert plan.train_bytes + plan.valid_bytes + plan.test_bytes == len(data)
    assert plan.train_tokens == pytest.approx(plan.train_bytes, rel=1e-3)
    assert not Path("m").exists()
    assert not list(Path("cache").glob("*"))


def test_learning_a_vocabulary_shows_the_time(monkeypatch):
    real = BytesTokenizer.train

    def slow(*arguments):
        time.sleep(1.5)
        return real(*arguments)

    monkeypatch.setattr(BytesTokenizer, "train", slow)
    found = of_kind(train({}, [corpus()], Path("m"), preset=None, dry_run=True), Progress)
    assert [(event.stage, event.done, event.total, event.unit) for event in found][:1] == [
        (f"learning a vocabulary from {Path(corpus()).stat().st_size // 1000} kB", 0, None, "s")
    ]


def test_learning_a_vocabulary_can_be_stopped(monkeypatch):
    begun = []

    def endless(chunks, size):
        begun.append(size)
        while True:
            assert list(chunks)

    def forever(*arguments):
        while True:
            yield b"text"

    monkeypatch.setattr(SentencePieceTokenizer, "train", endless)
    monkeypatch.setattr("xlcli.text.corpus.Part.sample", forever)
    settings = small(text={"tokenizer": "sentencepiece"})
    events = list(train(settings, [corpus()], Path("m"), preset=None, stop=lambda: bool(begun)))
    assert "nothing" in events[-1].text


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_the_plan_has_the_size_of_the_weights(encoding):
    plan = of_kind(go(small(train={"weights": encoding}), corpus(), "m"), Plan)[0]
    data = Path("m/model.safetensors").read_bytes()
    assert plan.weights == encoding
    assert plan.weights_bytes == len(data) - 8 - int.from_bytes(data[:8], "little")


def test_a_short_text_is_noticed():
    for text, said in (("x", r"\b1 byte\b"), ("x" * 9_000, r"\bbytes\b")):
        events = go(small(train={"max_steps": 1}), corpus(text=text), "m", overwrite=True)
        assert any(re.search(f"{said}.*general", notice.text) for notice in of_kind(events, Notice))
    events = go(small(train={"max_steps": 1}), corpus(text="x" * 12_000), "m", overwrite=True)
    assert not any("general" in notice.text for notice in of_kind(events, Notice))


def test_the_best_weights_are_in_front():
    """With a rate that ruins what was learned, the weights kept are the earlier ones."""
    train_ = {"eval_every": 1, "lr": 0.3, "adam_lr": 0.3, "max_steps": 12, "warmup_steps": 0}
    events = go(small(train=train_), corpus(), "m")
    scores = {v.step: v.bits_per_byte for v in of_kind(events, Validation)}
    best = min(scores, key=lambda step: scores[step])
    assert [v.step for v in of_kind(events, Validation) if v.best][-1] == best
    assert events[-1].best_step == best
    assert read_header(Path("m/model.safetensors"))[1]["step"] == str(best)


def test_training_learns():
    text = corpus(text="abcdefgh" * 400)
    tree = small(train={"max_steps": 40, "lr": 0.03, "adam_lr": 0.02, "eval_every": None, "save_every": None})
    assert go(tree, text, "m")[-1].bits_per_byte < 2.0


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (b"x", None), (b"ab\n", None), (b"short of a segment", None), (b"one line " * 60, None),
        (b"x" + b"\n" * 500, None), (b"\0\xff\xfe" * 9, None),
    ],
)  # fmt: skip
def test_any_text_at_all_will_do(text, paths):
    binary = {"binary": b"\xff" in text}
    end = go(small(train={"max_steps": 2}, text=binary), corpus(text=text), "m")[-1]
    assert end.step == 2
    assert (end.bits_per_byte is None) == (not Path("m/valid.txt").exists())
    assert is_model(Path("m"))
    go({"train": {"max_steps": 3}}, corpus(text=text), "m", resume=True)


@pytest.mark.parametrize("settings", [{"binary": True}, {"tokenizer": "bytes"}])
def test_data_that_is_no_text_is_refused_unless_it_is_meant(settings):
    for data in (b"\0\1\2" * 99, b"Z\xfcrich " * 99, b"PK\x03\x04 a zip archive" * 9):
        with pytest.raises(DataError, match="use binary"):
            go({"train": {"max_steps": 1}, "model": {"dim": 8}}, corpus(text=data), "refused")
        assert not is_model(Path("refused"))
        go(small(train={"max_steps": 1}, text=settings), corpus(text=data), "m")
        go({"train": {"max_steps": 2}}, corpus(text=data), "m", resume=True)
        shutil.rmtree("m")


def test_no_text_is_refused_and_leaves_no_model():
    for text, said in ((b"", "empty"), (b" \n" * 500, "white space")):
        with pytest.raises(DataError, match=said):
            go(small(), corpus(text=text), "m")
    assert not Path("m/config.json").exists()


def test_without_held_out_text_the_latest_weights_are_kept():
    tree = small(text={"valid": 0.0, "test": 0.0}, train={"eval_every": 2, "max_steps": 5})
    events = go(tree, corpus(), "m")
    assert not of_kind(events, Validation)
    assert events[-1].bits_per_byte is None
    assert events[-1].best_step == 5
    assert read_header(Path("m/model.safetensors"))[1]["step"] == "5"
    assert not Path("m/valid.txt").exists()


def test_training_and_evaluation_share_tokens():
    go(small(), corpus(), "m")
    assert len(list(cache_folder().iterdir())) == 2, "the final evaluation reads the tokens of validation"
    runtime = make_runtime(RuntimeConfig(device="cpu", threads=1))
    list(evaluate(load(Path("m")), None, EvalConfig(), runtime))
    assert len(list(cache_folder().iterdir())) == 2


def test_skipped_files_of_folders_are_named():
    for folder, text in (("texts", PROSE), ("held", PROSE[::-1])):
        Path(folder).mkdir()
        corpus(folder, text)
        Path(folder, "picture.png").write_bytes(b"\x89PNG\0")
    events = go(small(text={"valid": "held"}), "texts", "m")
    warnings = [event.text for event in of_kind(events, Notice) if event.level == "warning"]
    assert [re.findall(r"\S+\.png", text) for text in warnings] == [["texts/picture.png"], ["held/picture.png"]]


TEXTS = {"train": PROSE, "valid": PROSE.upper(), "test": PROSE[::-1]}


@pytest.fixture
def data():
    """A folder with a training, a validation and a test text."""
    Path("data").mkdir()
    for name, text in TEXTS.items():
        corpus("data", text, name)
    return "data"


def test_held_out_files_of_the_folder_are_not_trained_on(data):
    tree = small(text={"valid": "data/valid", "test": "data/test"})
    events = After(3).run(tree, data, "m") + go({}, data, "m", resume=True)
    for plan in of_kind(events, Plan):
        assert plan.left_out == ("data/test", "data/valid")
        assert (plan.train_bytes, plan.corpus) == (len(PROSE), "data/train")
    assert len(of_kind(events, Plan)) == 2
    assert Path("m/valid.txt").read_text() == TEXTS["valid"]
    assert Path("m/test.txt").read_text() == TEXTS["test"]
    alone = go(tree, "data/train", "alone")
    assert of_kind(alone, Plan)[0].left_out == ()
    assert curve("m") == curve("alone")


def test_a_text_is_not_held_out_from_itself(data):
    for tree in ({"valid": "data/train"}, {"test": "data/train"}, {"valid": "data/test", "test": "data/test"}):
        with pytest.raises(DataError, match=r"data/t.* only one of"):
            go(small(text=tree), "data/train", "m")
    assert not Path("m").exists()


@pytest.mark.parametrize(
    ("held_out", "named"),
    [
        ({"valid": "copy"}, [("copy", "data/train")]),
        ({"valid": 0.1, "test": "copy"}, [("copy", "data/train")]),
        ({"valid": "data/valid", "test": "copy"}, [("copy", "data/train")]),
        ({"valid": "copy", "test": "data/train"}, [("data/train", "copy")]),
        ({"valid": "data/valid", "test": "data/test"}, []),
        ({"valid": 0.1, "test": 0.1}, []),
    ],
)
def test_copies_of_held_out_text_are_named(data, held_out, named):
    shutil.copy("data/train", "copy")
    events = go(small(text=held_out), [data], "m", dry_run=True)
    warnings = [event.text for event in of_kind(events, Notice) if event.level == "warning"]
    assert len(warnings) == len(named)
    for warning, names in zip(warnings, named, strict=True):
        assert all(name in warning for name in names)


def test_held_out_text_of_an_earlier_run_is_known(data):
    go(small(), "data/train", "m")
    events = go(small(text={"valid": "m/valid.txt"}), "data/train", "n", dry_run=True)
    assert ["m/valid.txt" in event.text for event in of_kind(events, Notice) if event.level == "warning"] == [True]


def test_held_out_text_may_be_a_folder():
    Path("held").mkdir()
    for name in ("a.txt", "b.txt"):
        corpus("held", name=name, text=f"{name}: the fox saw the lazy dog.\n" * 5)
    events = go(small(text={"valid": "held"}), corpus(), "m")
    both = Path("held/a.txt").read_bytes() + Path("held/b.txt").read_bytes()
    assert Path("m/valid.txt").read_bytes() == both
    assert of_kind(events, Plan)[0].valid_bytes == len(both)
    assert events[-1].bits_per_byte is not None
    assert not Path("m/test.txt").exists()


@pytest.mark.parametrize("kind", ["sentencepiece", "words"])
def test_other_vocabularies_train_and_resume(kind):
    text, tree = corpus(text=PROSE * 3), small(text={"tokenizer": kind})
    go(tree, text, "whole")
    After(3).run(tree, text, "m")
    go(tree, text, "m", resume=True)
    assert Path("m/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


def test_deterministic_kernels_are_enough_for_training():
    try:
        go(small(runtime={"deterministic": True}), corpus(), "exact")
    finally:
        torch.use_deterministic_algorithms(False)
    go(small(), corpus(), "m")
    assert Path("exact/model.safetensors").read_bytes() == Path("m/model.safetensors").read_bytes()


# Stopping


def _stop_at(kind, monkeypatch, tree=None, **options):
    """The events of a run that is asked to stop as soon as an event of this kind has come."""
    monkeypatch.setattr("xlcli.events.PROGRESS_INTERVAL", 0.0)
    seen, events = [], []
    for event in train(tree or small(), [corpus()], Path("m"), preset="tiny", stop=lambda: bool(seen), **options):
        events.append(event)
        if isinstance(event, Progress) and event.stage == kind:
            seen.append(event)
    return events


@pytest.mark.parametrize("stage", ["reading", "tokenizing"])
def test_a_stop_while_the_text_is_read_changes_nothing(stage, monkeypatch):
    events = _stop_at(stage, monkeypatch)
    assert isinstance(events[-1], Notice)
    assert "nothing" in events[-1].text
    assert not of_kind(events, Plan | Trained)
    assert not Path("m").exists()
    assert not list(Path(os.environ["XLCLI_CACHE"]).glob(".tmp-*"))
    assert go(small(), corpus(), "m")[-1].step == 6


@pytest.mark.parametrize("stage", ["reading", "tokenizing"])
def test_a_stop_while_the_text_is_read_again_changes_nothing(stage, monkeypatch):
    After(3).run(small(), corpus(), "m")
    shutil.rmtree(os.environ["XLCLI_CACHE"])
    before = _files("m")
    _stop_at(stage, monkeypatch, resume=True)
    assert _files("m") == before


def test_a_stop_before_the_first_step_can_be_resumed():
    events = After(0).run(small(), corpus(), "m")
    assert (events[-1].step, events[-1].stopped) == (0, True)
    assert not is_model(Path("m"))
    assert go({}, corpus(), "m", resume=True)[-1].step == 6


def test_a_stop_before_any_validation_leaves_a_model():
    events = After(2).run(small(), corpus(), "m")
    assert events[-1].stopped
    assert not of_kind(events, Validation)
    assert read_header(Path("m/model.safetensors"))[1]["step"] == "2"
    assert of_kind(evaluate(load(Path("m")), None, EvalConfig(), make_runtime(RuntimeConfig(device="cpu"))), Score)
    assert not read_record(Path("m"))["finished"]


def test_a_stop_before_any_validation_leaves_the_averages():
    After(2).run(small(train={"average_share": 0.5}), corpus(), "m")
    weights = read_tensors(Path("m/model.safetensors"), expected=None)[0]
    optimizer = read_tensors(latest(Path("m/checkpoints")).path / "optimizer.safetensors", expected=None)[0]
    for name, tensor in weights.items():
        assert torch.equal(tensor, optimizer[f"{name}:average"]), name


def test_a_stop_during_the_sample_leaves_a_finished_run(monkeypatch):
    recorded = []

    def interrupted(*_arguments, **_options):
        recorded.append(read_record(Path("m")))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(validation, "generate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            go(small(), corpus(), "m")
    assert recorded[0]["finished"]
    assert recorded[0]["bits_per_byte"] > 0
    assert go({}, corpus(), "m", resume=True)[-1].bits_per_byte == recorded[0]["bits_per_byte"]


@pytest.mark.parametrize("moment", ["last validation", "last score"])
def test_a_stop_at_the_end_can_be_resumed(moment):
    go(small(), corpus(), "whole")
    seen = []
    for event in train(small(), [corpus()], Path("m"), preset="tiny", stop=lambda: bool(seen)):
        if (isinstance(event, Step) and moment == "last validation" and event.step == 6) or (
            isinstance(event, Saved) and moment == "last score" and event.step == 6
        ):
            seen.append(event)
    assert event.stopped == (moment == "last validation")
    assert read_record(Path("m"))["finished"] == (moment == "last score")
    assert event.bits_per_byte is None
    end = go({}, corpus(), "m", resume=True)[-1]
    assert not end.stopped
    assert end.bits_per_byte == read_record(Path("whole"))["bits_per_byte"]
    assert curve("m") == curve("whole")


# Diverging


def _paste(remedy):
    """The arguments of the command in a remedy, as `train` takes them."""
    words = shlex.split(remedy.partition("xlcli train ")[2])
    assert words[1:4] == ["-o", "m", "--resume"]
    rates = {"lr": float(words[words.index("--lr") + 1])}
    if "--set" in words:
        key, _, value = words[words.index("--set") + 1].partition("=")
        rates[key.removeprefix("train.")] = float(value)
    return words[0], {"train": rates}


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("save_every", [1, 1000])
@pytest.mark.parametrize("held_out", [0.05, 0.0])
def test_a_run_that_diverges_poisons_nothing_and_its_remedy_works(optimizer, save_every, held_out):
    rates = {"lr": 1e18, "adam_lr": 1e18, "optimizer": optimizer, "save_every": save_every, "eval_every": 1}
    tree = small(train={**rates, "max_steps": 9}, text={"valid": held_out})
    with pytest.raises(DivergedError) as caught:
        go(tree, corpus(), "m")
    assert _finite("m")
    text, rates = _paste(caught.value.remedy)
    end = go(rates, text, "m", resume=True)[-1]
    assert end.step == 9
    assert _finite("m")
    rows = [row["step"] for row in curve("m") if "nats" in row]
    assert rows == list(range(1, 10))


@pytest.mark.parametrize("step", [2, 3, 6])
def test_a_gradient_that_is_no_number_stops_the_run(step, monkeypatch):
    from xlcli.training import run

    clip, calls = torch.nn.utils.get_total_norm, []

    def poisoned(*arguments):
        calls.append(None)
        return clip(*arguments) * (math.nan if len(calls) == step else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(run.torch.nn.utils, "get_total_norm", poisoned)
        with pytest.raises(DivergedError, match=rf"\b{step}\b") as caught:
            go(small(train={"on_divergence": "stop"}), corpus(), "m")
    assert _finite("m")
    assert [row["step"] for row in curve("m") if "nats" in row] == list(range(1, step))
    text, rates = _paste(caught.value.remedy)
    assert go(rates, text, "m", resume=True)[-1].step == 6


def test_held_out_text_without_a_score_stops_the_run(monkeypatch):
    def poisoned(run, held_out, stop):
        with torch.no_grad():
            next(iter(run.model.parameters())).fill_(math.nan)
        return validation_bits(run, held_out, stop)

    validation_bits = loop.validation_bits
    monkeypatch.setattr(loop, "validation_bits", poisoned)
    with pytest.raises(DivergedError, match=r"validation.*\b3\b"):
        go(small(), corpus(), "m")
    assert not is_model(Path("m"))
    assert _finite("m")


# Folders and disks


def test_one_writer_a_folder():
    run = train(small(), [corpus()], Path("m"), preset="tiny")
    while not isinstance(next(run), Step):
        pass
    for resume in (True, False):
        with pytest.raises(BusyError, match=str(os.getpid())):
            go(small(), corpus(), "m", resume=resume, overwrite=not resume)
    run.close()
    go({}, corpus(), "m", resume=True)


def test_a_model_is_not_lost_unasked():
    go(small(), corpus(), "m")
    with pytest.raises(ConfigError, match=r"resume.*overwrite"):
        go(small(), corpus(), "m")
    with pytest.raises(XLError, match="elsewhere"):
        go({}, corpus(), "elsewhere", resume=True)
    assert not Path("elsewhere").exists()


def test_a_model_is_overwritten_only_when_the_new_one_can_begin():
    go(small(), corpus(), "m")
    before = Path("m/model.safetensors").read_bytes()
    with pytest.raises(DataError):
        go(small(), corpus(name="empty.txt", text=b""), "m", overwrite=True)
    with pytest.raises(ConfigError):
        go(small(text={"vocab_size": 77}), corpus(), "m", overwrite=True)
    assert Path("m/model.safetensors").read_bytes() == before
    After(1).run(small(train={"max_steps": 3}), corpus(text=PROSE[:900]), "m", overwrite=True)
    assert Path("m/model.safetensors").read_bytes() == before
    assert go({}, corpus(text=PROSE[:900]), "m", resume=True)[-1].step == 3
    assert [row["step"] for row in curve("m") if "nats" in row] == [1, 2, 3]
    assert Path("m/model.safetensors").read_bytes() != before


def test_files_of_the_user_are_not_lost():
    text = corpus()
    Path("here").mkdir()
    for name in ("valid.txt", "metrics.jsonl", "record.json", "tokenizer.json", ".tmp-notes", ".lock", "config.json"):
        Path("here", name).write_text("mine")
        before = _files("here")
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=rf"{re.escape(name)}\."):
                go(small(), text, "here", overwrite=overwrite)
        with pytest.raises(XLError, match=r"\bhere\b"):
            go({}, text, "here", resume=True)
        assert _files("here") == before
        Path("here", name).unlink()
    for name in (".tmp-20251231-2", ".replacement"):
        folder = Path("here", name)
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
        with pytest.raises(ConfigError, match=rf"{re.escape(name)}\."):
            go(small(), text, "here")
        (folder / "thesis.txt").unlink()
        folder.rmdir()
    assert go(small(), text, "here")[-1].step == 6


def test_a_model_of_another_program_is_not_replaced():
    text, model = corpus(), Path("theirs")
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Other"], "model_type": "other"}')
    save_file({"a": torch.ones(1)}, model / "model.safetensors")
    before = _files(model)
    with pytest.raises(ConfigError, match="empty"):
        go(small(), text, model, overwrite=True)
    assert _files(model) == before


def test_a_damaged_model_can_be_replaced():
    text = corpus()
    go(small(), text, "m")
    Path("m/config.json").write_text("{")
    with pytest.raises(ConfigError, match="overwrite"):
        go(small(), text, "m")
    assert go(small(), text, "m", overwrite=True)[-1].step == 6
    load(Path("m"))


@pytest.mark.parametrize("call", ["layout.write_config", "write_held_out"])
def test_a_folder_left_by_a_kill_at_its_very_beginning_can_be_used(call, monkeypatch):
    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"xlcli.training.workflow.{call}", killed)
        with pytest.raises(KeyboardInterrupt):
            go(small(), corpus(), "m")
    assert len(list(Path("m").glob(".*/tokenizer.json"))) == 1
    with pytest.raises(XLError):
        go({}, corpus(), "m", resume=True)
    assert go(small(), corpus(), "m")[-1].step == 6
    assert not list(Path("m").glob(".*/"))


def test_a_model_without_checkpoints_is_not_begun_anew():
    go(small(), corpus(), "m")
    before = Path("m/model.safetensors").read_bytes()
    shutil.rmtree("m/checkpoints")
    with pytest.raises(XLError, match="checkpoint"):
        go({"train": {"max_steps": 9}}, corpus(), "m", resume=True)
    assert Path("m/model.safetensors").read_bytes() == before


@pytest.mark.parametrize("call", range(0, 12, 3))
def test_a_full_disk_at_a_checkpoint_loses_nothing(call, monkeypatch):
    text, tree = corpus(), small(train={"save_every": 1, "eval_every": 100})
    write, left = os.write, [call]

    def full(descriptor, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    run = train(tree, [text], Path("m"), preset="tiny")
    while not (isinstance(event := next(run), Saved) and event.step == 3):
        pass
    before = _files("m/checkpoints")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ResourceError, match="space") as caught:
            list(run)
    assert caught.value.remedy
    after = _files("m/checkpoints")
    assert all(after[path] == data for path, data in before.items())
    assert not list(Path("m").rglob(".tmp-*"))
    assert go({}, text, "m", resume=True)[-1].step == 6


def test_a_full_disk_at_the_lock_is_told():
    Path("m").write_text("a file")
    with pytest.raises(XLError):
        go(small(), corpus(), "m")


# Budgets in time


class Clock:
    """Stands in for `time`: advances by a hundredth of a second at every look."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        self.now += 0.01
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(workflow, "time", clock)
    return clock


@pytest.mark.usefixtures("clock")
def test_a_time_budget_is_spent_and_no_more():
    budget = {"max_steps": None, "max_time": 2.0, "eval_every": None, "save_every": 0.5, "warmup_steps": 0}
    events = go(small(train=budget), corpus(), "m")
    steps = of_kind(events, Step)
    assert 20 < len(steps) < 100  # the clock is looked at twice in each step
    assert steps[-2].fraction < 1.0 <= steps[-1].seconds / 2.0 + 0.05
    assert steps[0].lr > 0.9 * 6e-3
    assert steps[-1].lr < 0.1 * 6e-3
    assert len(of_kind(events, Saved)) in (4, 5)
    assert 5 <= len(of_kind(events, Validation)) <= 10
    assert events[-1].improves == (events[-1].best_step == events[-1].step)
    in_steps = go(small(train={"max_steps": 3, "max_time": 99.0}), corpus(), "m", overwrite=True)[-1]
    assert (in_steps.best_step == in_steps.step, in_steps.improves) == (True, False)


def spend(monkeypatch, clock, module, name, seconds):
    """Makes a function of a module take this time."""
    function = getattr(module, name)

    def slow(*args, **options):
        clock.now += seconds
        return function(*args, **options)

    monkeypatch.setattr(module, name, slow)


@pytest.mark.parametrize(("validating", "scoring"), [(1.0, 2.0), (0.2, 0.4)])
def test_a_time_budget_includes_the_last_validation_and_the_final_score(validating, scoring, clock, monkeypatch):
    """All of the validation text is validated and scored, and scoring a token takes twice the time."""
    spend(monkeypatch, clock, loop, "validation_bits", validating)
    spend(monkeypatch, clock, workflow, "final_evaluation", scoring)
    text, budget = corpus(), {"max_steps": None, "max_time": 20.0, "eval_every": 5.0}
    events = go(small(train=budget), text, "m")
    last_step = of_kind(events, Step)[-1]
    assert last_step.seconds == pytest.approx(20.0 - validating - scoring, abs=0.5)
    assert last_step.fraction == pytest.approx(1.0, abs=0.01)
    assert of_kind(events, Validation)[-1].step == last_step.step
    assert clock.now == pytest.approx(20.0, abs=0.7)
    assert events[-1].seconds == pytest.approx(20.0 - scoring, abs=0.5)
    events = go({}, text, "m", resume=True)
    assert not of_kind(events, Step)
    assert any("budget of 20 s" in notice.text for notice in of_kind(events, Notice))
    assert of_kind(go({"train": {"max_time": 30.0}}, text, "m", resume=True), Step)


def test_a_final_score_ends_when_the_time_is_over(clock, monkeypatch):
    """It is then of the beginning of the text; the run has finished."""

    def slow(model, paths, options, runtime, *, stop):
        def looks_later():
            clock.now += 0.3
            return stop()

        return evaluate(model, paths, options, runtime, stop=looks_later)

    monkeypatch.setattr(validation, "evaluate", slow)
    texts = {"valid": corpus(text=PROSE * 20, name="valid.txt")}
    end = go(small(train={"max_steps": 2, "max_time": 4.0}, text=texts), corpus(), "m")[-1]
    assert not end.stopped
    assert 0 < end.scored.bytes < end.scored.of_bytes == Path("valid.txt").stat().st_size
    assert read_record(Path("m"))["finished"]


def test_half_of_a_time_budget_is_for_training(clock, monkeypatch):
    spend(monkeypatch, clock, loop, "validation_bits", 8.0)
    events = go(small(train={"max_steps": None, "max_time": 40.0, "eval_every": 8.0}), corpus(), "m")
    assert of_kind(events, Step)[-1].seconds == pytest.approx(20.0, abs=0.5)


def test_time_is_estimated_by_the_tokens_of_validation_and_score(monkeypatch):
    monkeypatch.setattr(validation, "VALIDATION_TOKENS", 100)
    monkeypatch.setattr(validation, "SCORED_BYTES", 800)
    run = SimpleNamespace(config=config.make({"train": {"max_time": 1000.0}}))

    class Valid(list):
        n_bytes = 2000

    assert validation.seconds_at_end(run, Valid(range(1000)), 3.0) == 3.0 * (1 + 2 * 400 / 100)
    assert validation.seconds_at_end(run, Valid(range(50)), 3.0) == 3.0 * (1 + 2 * 20 / 50)
    assert validation.seconds_at_end(run, Valid(), 3.0) == 0.0
    run.config = config.make({"train": {"max_steps": 10}})
    assert validation.seconds_at_end(run, Valid(range(50)), 3.0) == 0.0


def test_a_pause_counts_for_no_budget(clock):
    pauses = []
    budget = {"max_steps": None, "max_time": 2.0, "eval_every": None, "save_every": 0.5, "warmup_steps": 0}
    events = []
    for event in train(small(train=budget), [corpus()], Path("m"), preset="tiny", paused=lambda: sum(pauses)):
        events.append(event)
        if isinstance(event, Step) and event.step in (3, 9):
            clock.now += 1000.0
            pauses.append(1000.0)
    steps = of_kind(events, Step)
    assert 20 < len(steps) < 100  # the clock is looked at twice in each step
    assert events[-1].seconds < 2.5
    assert max(step.eta_seconds for step in steps) < 2.5
    assert min(step.tokens_per_second for step in steps[9:]) > 100
    assert 5 <= len(of_kind(events, Validation)) <= 10


@pytest.mark.parametrize(("preparation", "counted"), [(5.0, 5.0), (5000.0, 10.0)])
def test_preparation_takes_at_most_a_tenth_of_a_time_budget(preparation, counted, clock, monkeypatch):
    def slow(*args, **options):
        clock.now += preparation
        return (yield from prepare_new(*args, **options))

    prepare_new = workflow.prepare_new
    monkeypatch.setattr(workflow, "prepare_new", slow)
    stop = After(1)
    events = stop.run(small(train={"max_steps": None, "max_time": 100.0}), corpus(), "m")
    assert of_kind(events, Step)[0].seconds == pytest.approx(counted, abs=1.0)


@pytest.mark.parametrize(
    ("budget", "least", "most"),
    [
        pytest.param({"max_time": 20.0}, 1, 3, marks=pytest.mark.exhaustive),
        pytest.param({"max_time": 20.0, "eval_every": 1.0}, 9, 20, marks=pytest.mark.exhaustive),
        ({"max_steps": 40, "max_time": 1000.0}, 10, 10),
        ({"max_tokens": 40 * 64, "max_time": 1000.0}, 10, 10),
    ],
)
def test_validation_takes_at_most_a_tenth_of_a_time_budget_unless_its_interval_is_given(
    budget, least, most, clock, monkeypatch
):
    def slow(run, valid, stop):
        clock.now += 1.0
        return validation_bits(run, valid, stop)

    validation_bits = loop.validation_bits
    monkeypatch.setattr(loop, "validation_bits", slow)
    unset = dict.fromkeys(("max_steps", "max_tokens", "eval_every", "save_every"))
    events = go(small(train=unset | budget), corpus(), "m")
    assert least <= len(of_kind(events, Validation)) <= most


def test_a_lock_is_given_back():
    go(small(), corpus(), "m")
    with lock(Path("m")) as warning:
        assert warning == ""
    assert json.loads(Path("m/config.json").read_bytes())["train"]["max_steps"] == 6


def test_the_sample_at_the_end_tells_of_kernels_that_are_compiled(monkeypatch):
    notice = Notice("compiling the kernels of generation")
    monkeypatch.setattr(InferenceSession, "compile", lambda *_: iter([notice]))
    events = go(small(train={"max_steps": 1}), corpus(), "m")
    assert notice in events[:-1]


def test_no_model_is_trained_in_float16():
    with pytest.raises(ConfigError, match="float16"):
        go(small(runtime={"dtype": "float16"}), corpus(), "m")
    assert not Path("m").exists()
