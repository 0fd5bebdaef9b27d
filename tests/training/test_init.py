"""Runs that start from the weights of a model: their start, their record, their resumption."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from short_runs import PROSE, After, corpus, curve, go, of_kind, remains, small

from xlcli import training
from xlcli.cli.run_report import trained_text
from xlcli.config import EvalConfig
from xlcli.errors import CheckpointError, ConfigError, DataError
from xlcli.evaluation import evaluate
from xlcli.events import Notice, Plan, Score, Step, Trained, Validation
from xlcli.files.tensors import read_header, read_tensors, write_tensors
from xlcli.store.commit import latest
from xlcli.store.folder import load, save_model
from xlcli.store.layout import is_model, read_record, write_record
from xlcli.store.origin import configurations
from xlcli.store.weights import weights
from xlcli.text.tokenizers import load_tokenizer

VERSE = "".join(f"O fox {i}, thy dog lies {'low' if i % 2 else 'high'} at dusk.\n" for i in range(80))
FREE = {"max_steps": 6, "eval_every": 3, "save_every": 2}
"""Settings that a model does not give to a run."""


def begin(init, paths, folder, *, stop=lambda: False, tree=None, **options):
    """The events of a run that starts from the model in `init`."""
    settings = {"train": FREE, "runtime": {"dtype": "float32", "threads": 1}} if tree is None else tree
    configs = configurations(settings, None, Path(init))
    return training.train([paths], Path(folder), configs, init=Path(init), stop=stop, **options)


@pytest.fixture
def base():
    """A trained model in the folder `base`."""
    go(small(), corpus(), "base")
    return Path("base")


def verse(**options):
    return corpus(text=VERSE, name="verse.txt", **options)


def test_a_run_starts_where_the_model_is(base):
    events = list(begin(base, verse(), "m"))
    first, *others = of_kind(events, Validation)
    assert (first.step, first.tokens, first.best) == (0, 0, True)
    assert events.index(first) < events.index(of_kind(events, Step)[0])
    point = Path("m/checkpoints/step-00000006")
    assert latest(Path("m/checkpoints")).path == point
    assert [v.step for v in others] == [3, 6]
    assert min(v.bits_per_byte for v in others) < first.bits_per_byte
    assert events[-1].step == 6
    assert events[-1].tokens == 6 * 64
    assert of_kind(events, Plan)[0].init == "base"


def test_first_score_is_that_of_the_model(base):
    """Independent of the validation in training: the evaluation of the model itself."""
    events = list(begin(base, verse(), "m", tree={"train": FREE | {"lr": 1e-9, "adam_lr": 1e-9}}))
    score = of_kind(evaluate(load(base), ["m/valid.txt"], EvalConfig(), _runtime()), Score)[0]
    assert of_kind(events, Validation)[0].bits_per_byte == pytest.approx(score.bits_per_byte, abs=2e-3)
    assert events[-1].bits_per_byte == pytest.approx(score.bits_per_byte, abs=1e-5)


def test_weights_and_vocabulary_are_copied_and_the_optimizer_is_new(base):
    stop = After(0)
    for event in begin(base, verse(), "m", stop=stop):
        stop.seen = 0 if isinstance(event, Validation) else stop.seen
    own, copied = (read_tensors(Path(f, "model.safetensors"), expected=None)[0] for f in ("base", "m"))
    assert own.keys() == copied.keys()
    assert all(torch.equal(own[name], copied[name]) for name in own)
    assert load_tokenizer(Path("m")).fingerprint == load_tokenizer(base).fingerprint
    point = Path("m/checkpoints/step-00000000")
    assert read_tensors(point / "optimizer.safetensors", expected=None)[0] == {}
    facts = json.loads((point / "state.json").read_bytes())
    assert (facts["step"], facts["tokens"], facts["n_read"]) == (0, 0, 0)
    config = json.loads(Path("m/config.json").read_bytes())
    assert config["model"] == json.loads((base / "config.json").read_bytes())["model"]
    assert config["adapted_from"] is None


def test_the_record_says_where_it_came_from(base):
    list(begin(base, verse(), "m"))
    list(begin("m", corpus(), "n"))
    one, two = read_record(Path("m")), read_record(Path("n"))
    name = {"model": "base", "weights": load(base).fingerprints["weights"], "tokens": 6 * 64}
    assert one["init"] == name | {"corpus": read_record(base)["corpus"]}
    assert two["init"]["model"] == "m"
    assert "init" not in read_record(base)
    assert (one["preset"], two["preset"]) == ("tiny", "tiny")


def test_a_start_that_nothing_improves_is_kept(base):
    ruin = FREE | {"lr": 2.0, "adam_lr": 2.0, "warmup_steps": 0}
    end = list(begin(base, verse(), "m", tree={"train": ruin, "runtime": {"dtype": "float32", "threads": 1}}))[-1]
    assert end.best_step == 0
    assert read_header(Path("m/model.safetensors"))[1]["step"] == "0"
    assert read_header(Path("m/model.safetensors"))[1]["sha256"] == load(base).fingerprints["weights"]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "words"])
def test_every_vocabulary(kind):
    go(small(text={"tokenizer": kind}), corpus(text=PROSE * 3), "base")
    end = list(begin("base", verse(), "m"))[-1]
    assert isinstance(end, Trained)
    assert end.step == 6
    assert load_tokenizer(Path("m")).kind == load(Path("m")).config.text.tokenizer == kind


@pytest.mark.parametrize("text", [b"x", b"ab\n", b"short of a segment", b"x" + b"\n" * 500, b"one line " * 60])
def test_any_length_of_text(text, base):
    assert list(begin(base, corpus(text=text, name="few.txt"), "m"))[-1].step == 6
    assert is_model(Path("m"))


@pytest.mark.parametrize("encoding", [torch.bfloat16, torch.float64])
def test_encodings_of_the_weights_do_not_matter(encoding, base):
    model = load(base)
    stored = {name: t.to(encoding) for name, t in weights(model.network).items()}
    save_model(Path("other"), model.config, stored, model.tokenizer, {})
    shutil.copy("base/valid.txt", "other/valid.txt")
    assert list(begin("other", verse(), "m"))[-1].step == 6
    assert {t.dtype for t in read_tensors(Path("m/model.safetensors"), expected=None)[0].values()} == {torch.float32}


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_a_stopped_run_ends_as_the_uninterrupted_one(step, base):
    text = verse()
    list(begin(base, text, "whole"))
    stop = After(step)
    for event in begin(base, text, "cut", stop=stop):
        if isinstance(event, Step | Plan):
            stop.seen = event.step if isinstance(event, Step) else event.resumed_at
    shutil.rmtree(base)  # a run that has begun does not need its origin
    go({}, text, "cut", resume=True, preset=None)
    assert remains("cut") == remains("whole")
    assert read_record(Path("cut"))["init"] == read_record(Path("whole"))["init"]


def test_a_kill_after_the_first_validation_leaves_its_row_once(base):
    text = verse()
    list(begin(base, text, "whole"))
    run = begin(base, text, "cut")
    while not isinstance(next(run), Validation):
        pass
    run.close()
    assert [row["step"] for row in curve("cut")] == [0]
    go({}, text, "cut", resume=True, preset=None)
    assert remains("cut") == remains("whole")


def test_a_resumed_run_accepts_the_name_of_its_origin_only(base):
    text = verse()
    go(small(), text, "alone")
    list(begin(base, text, "m"))
    more = {"train": {"max_steps": 7}}
    Path("link").symlink_to("base")
    for init in (None, "base", str(base.absolute()), "link"):
        assert go(more, text, "m", resume=True, preset=None, init=init)[-1].step == 7
    with pytest.raises(ConfigError, match=r"\bbase\b.*\balone\b"):
        go(more, text, "m", resume=True, preset=None, init="alone")
    with pytest.raises(ConfigError, match=r"\bscratch\b.*\bbase\b"):
        go(more, text, "alone", resume=True, preset=None, init="base")


def test_a_record_that_makes_no_sense_is_no_origin(base):
    list(begin(base, verse(), "m"))
    write_record(Path("m"), read_record(Path("m")) | {"init": ["base"]})
    assert go({"train": {"max_steps": 7}}, verse(), "m", resume=True, preset=None)[-1].step == 7


def test_a_model_is_not_trained_into_its_own_folder(base):
    before = (base / "model.safetensors").read_bytes()
    for options in ({}, {"overwrite": True}, {"dry_run": True}):
        with pytest.raises(ConfigError, match="starts"):
            list(begin(base, verse(), "./base", **options))
    assert (base / "model.safetensors").read_bytes() == before


def test_damaged_models_are_refused(base):
    tensors, metadata = read_tensors(base / "model.safetensors", expected=None)
    name = next(name for name, t in tensors.items() if t.is_floating_point())
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    kept = {key: value for key, value in metadata.items() if "sha256" not in key}
    write_tensors(base / "model.safetensors", tensors, kept)
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        list(begin(base, verse(), "m"))
    data = bytearray((base / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (base / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        list(begin(base, verse(), "m"))
    (base / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        list(begin(base, verse(), "m"))
    assert not Path("m").exists()


def test_text_that_is_not_utf8_has_a_remedy_that_works():
    text = corpus(text=PROSE.encode() + b"\xff" * 9, name="latin.txt")
    go(small(text={"tokenizer": "sentencepiece"}), corpus(text=PROSE * 3), "base")
    with pytest.raises(DataError, match="use binary"):
        list(begin("base", text, "m"))
    with pytest.raises(DataError, match="tokenizer bytes"):
        list(begin("base", text, "m", tree={"text": {"binary": True}}))


def test_a_dry_run_leaves_nothing(base):
    events = list(begin(base, verse(), "m", dry_run=True))
    assert of_kind(events, Plan)[0].parameters == sum(t.numel() for t in weights(load(base).network).values())
    assert not Path("m").exists()
    assert all(notice.level == "info" for notice in of_kind(events, Notice))


def test_a_dry_run_says_how_many_steps_fit_into_the_time(base):
    tree = {"train": {"max_time": 100.0}, "runtime": {"threads": 1}}
    *_, pace = of_kind(list(begin(base, verse(), "m", tree=tree, dry_run=True)), Notice)
    said = r"([\d,]+) tokens takes (\S+) s: about ([\d,]+) steps .* validations of about ([\d.e-]+) s"
    n_tokens, seconds, n_steps, validation = re.search(said, pace.text).groups()
    assert 0 < float(validation) < 100
    assert int(n_tokens) == 64
    assert float(seconds) * int(n_steps.replace(",", "")) == pytest.approx(100.0, rel=0.1)


def test_a_validation_that_takes_much_of_the_time_is_said_once(base):
    def said(max_time):
        tree = {"train": FREE | {"max_time": max_time}, "runtime": {"threads": 1}}
        notices = of_kind(list(begin(base, verse(), f"m{max_time}", tree=tree)), Notice)
        return [notice.text for notice in notices if "a validation takes" in notice.text]

    assert said(1000.0) == []
    [slow] = said(0.01)
    assert "budget of 0.01 s" in slow


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_the_plan_has_the_size_of_a_checkpoint(optimizer):
    train = {"optimizer": optimizer, "keep_checkpoints": 3}
    plan = of_kind(go(small(model={"dim": 128}, train=train), corpus(), "m"), Plan)[0]
    newest = latest(Path("m/checkpoints")).path
    assert plan.checkpoints == 3
    assert plan.checkpoint_bytes == pytest.approx(sum(path.stat().st_size for path in newest.iterdir()), rel=0.2)


def _runtime():
    from xlcli.config import RuntimeConfig
    from xlcli.runtime import make_runtime

    return make_runtime(RuntimeConfig(device="cpu", threads=1))


def test_the_weights_of_the_model_at_the_start_do_not_replace_another_one(base):
    text = verse()
    go(small(), corpus(text=PROSE[:900], name="other.txt"), "m")
    before, seen = Path("m/model.safetensors").read_bytes(), []
    begun = begin(base, text, "m", overwrite=True, stop=lambda: len(seen) > 0)
    seen.extend(event for event in begun if isinstance(event, Step))
    assert Path("m/model.safetensors").read_bytes() == before
    assert go({}, text, "m", resume=True, preset=None)[-1].step == 6
    # A run that no step improves ends with them.
    tree = {"train": FREE | {"lr": 1.0}, "text": {"valid": corpus()}, "runtime": {"dtype": "float32", "threads": 1}}
    noise = corpus(text="9z%Q+" * 500, name="noise.txt")
    end = list(begin(base, noise, "m", tree=tree, overwrite=True))[-1]
    assert (end.best_step, end.stopped) == (0, False)
    assert load(Path("m")).fingerprints["weights"] == load(base).fingerprints["weights"]
    assert not Path("m/.replacement").exists()


def test_the_end_tells_the_validations_before_and_after(base):
    """They are of one text by one reading, unlike the score; a run that is resumed still knows the first one."""
    stop = After(1)
    for event in begin(base, verse(), "m", stop=stop):
        stop.seen += isinstance(event, Step)
    *events, end = go({}, verse(), "m", resume=True)
    validations = [row for row in curve("m") if "validation_bits_per_byte" in row]
    assert len(validations) == 3
    assert not [event for event in of_kind(events, Validation) if event.step == 0]
    assert end.start_validation == validations[0]["validation_bits_per_byte"]
    assert end.best_validation == min(row["validation_bits_per_byte"] for row in validations)
    assert "comparable only with each other" in trained_text(end)
    assert "changed little" not in trained_text(end)
    assert "changed little" in trained_text(replace(end, best_validation=end.start_validation * 0.996))
    assert go(small(), corpus(), "new")[-1].start_validation is None
