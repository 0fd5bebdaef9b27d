import json
import os
import re
from pathlib import Path

import pytest
import torch

from xlcli.config import make as make_config
from xlcli.errors import CheckpointError
from xlcli.files.tensors import write_tensors
from xlcli.store import discover
from xlcli.store.discover import bundled_models, choose, find, local_models
from xlcli.store.layout import read_config, write_config, write_record


def make(folder: Path, age: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    write_config(folder, make_config({}))
    tensors = {"a": torch.zeros(2, 3), "a:scale": torch.zeros(2), "b": torch.zeros(4)}
    write_tensors(folder / "model.safetensors", tensors, {"encoding": "int8"})
    os.utime(folder / "model.safetensors", (1e9 - age, 1e9 - age))
    return folder


@pytest.fixture
def bundled(tmp_path, monkeypatch):
    place = tmp_path / "bundled"
    monkeypatch.setattr(discover, "models_folder", lambda: place)
    return place


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    place = tmp_path / "cwd"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("XLCLI_MODEL", raising=False)
    return place


def choose_with(variable, name):
    """The choice with this value of the environment variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLCLI_MODEL", variable)
        return choose(name)


def test_order_of_choice(cwd, bundled):
    with pytest.raises(CheckpointError) as caught:
        find(None)
    assert "xlcli train" in caught.value.remedy
    books = make(bundled / "books")
    assert find(None) == books
    old, new = make(cwd / "models" / "old", age=100), make(cwd / "models" / "new")
    (cwd / "models" / "not-a-model").mkdir()
    (cwd / "models" / "file").touch()
    assert find(None) == new
    assert choose_with("old", None)[0] == old
    assert choose_with("old", "new")[0] == new
    assert find("books") == books
    assert choose_with("", None)[0] == new


def test_newest_is_that_of_the_newest_finished_training(cwd, bundled):
    books = make(bundled / "books")
    assert choose(None)[1].startswith("bundled")
    write_record(make(cwd / "models" / "older", age=9), {"finished": False})
    running = make(cwd / "models" / "running")
    write_record(running, {"finished": False})
    chosen, reason, passed_over = choose(None)
    assert (chosen, passed_over) == (books, [])
    assert "running" in reason
    done = make(cwd / "models" / "done", age=50)
    write_record(done, {"finished": True})
    chosen = choose(None)
    assert chosen == (done, "the newest in models/", [])
    imported = make(cwd / "models" / "imported", age=20)
    assert find(None) == imported, "it has no record"
    (running / "record.json").write_text("{torn")
    assert find(None) == running
    assert choose("done")[1] is None
    assert choose_with("done", None)[1] == "XLCLI_MODEL"


def test_names_and_folders(cwd, bundled, monkeypatch):
    here = make(cwd / "here")
    assert find("here") == here
    both = make(cwd / "models" / "here")
    assert find("here") == both
    assert find("./here") == cwd / "./here"
    (make(cwd / "above") / "inside").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(cwd / "models")
        assert find(str(here)) == here
        patch.chdir(cwd / "above" / "inside")
        assert find("..").resolve() == cwd / "above"
    make(bundled / "here")
    assert find("here") == both


def test_a_corpus_folder_of_the_same_name_does_not_hide_a_model(cwd, bundled):
    (cwd / "books").mkdir()
    model = make(bundled / "books")
    assert find("books") == model


def test_what_is_said_when_there_is_none(cwd, bundled):
    make(cwd / "models" / "shakespeare")
    make(bundled / "books")
    with pytest.raises(CheckpointError, match="shakspeare") as caught:
        find("shakspeare")
    assert "shakespeare" in caught.value.remedy
    with pytest.raises(CheckpointError, match="XLCLI_MODEL") as caught:
        choose_with("qqq", None)
    assert caught.value.remedy == "Available: shakespeare, books."
    for i in range(12):
        os.utime(make(cwd / "models" / f"m{i}") / "model.safetensors", (2e9 + i, 2e9 + i))
    with pytest.raises(CheckpointError) as caught:
        find("qqq")
    newest = ", ".join(f"m{i}" for i in reversed(range(12)))
    assert caught.value.remedy == f"Available: {newest} and 2 more (xlcli models)."
    (cwd / "models" / "young" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="young") as caught:
        find("young")
    assert "--resume" in caught.value.remedy
    (cwd / "text").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        find("text")
    write_config(cwd / "text", make_config({}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        find("./text")


def test_a_damaged_model_is_passed_over(cwd, bundled):
    books, good = make(bundled / "books"), make(cwd / "models" / "good", age=50)
    (make(cwd / "models" / "config") / "config.json").write_text("{torn")
    weights = make(cwd / "models" / "weights", age=9) / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    os.utime(weights, (1e9 - 9, 1e9 - 9))
    chosen, _, passed_over = choose(None)
    assert chosen == good
    assert [name in note for name, note in zip(("config", "weights"), passed_over, strict=True)] == [True, True]
    write_record(good, {"finished": False})
    assert choose(None)[0] == books
    assert choose("config")[0] == cwd / "models" / "config", "the error comes when it is read"


FOREIGN = {
    "a.gguf": b"GGUF\3\0\0\0",
    "model.pt": b"PK\3\4",
    "old.bin": b"\x80\2}q\0.",
    "model.safetensors": b"\2\0\0\0\0\0\0\0{}",
    "text.txt": b"text\n",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_is_not_a_model(cwd, bundled, name):
    make(bundled / "books")
    (cwd / name).write_bytes(FOREIGN[name])
    with pytest.raises(CheckpointError, match=r"file|checkpoint") as caught:
        find(name)
    assert (
        f"xlcli import {name}" if re.search("checkpoint|GGUF", caught.value.message) else "books"
    ) in caught.value.remedy
    make(cwd / "models" / "own")
    with pytest.raises(CheckpointError) as caught:
        find("models/own/model.safetensors")
    assert "-m models/own" in caught.value.remedy


def test_models_of_others_are_recognized(cwd, bundled):
    other = cwd / "models" / "gpt"
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    (other / "pytorch_model.bin").write_bytes(b"\x80\2")
    with pytest.raises(CheckpointError, match="Hugging Face"):
        find("gpt")
    write_tensors(other / "model.safetensors", {"a": torch.zeros(2)}, {})
    with pytest.raises(CheckpointError, match="Hugging Face"):
        read_config(find("gpt"))
    make(bundled / "books")
    assert "Hugging Face" in choose(None)[2][0]
    for name in ("gpt2", "hf:org/name", "org/name", "openai-community/gpt2", "transfo-xl-wt103"):
        with pytest.raises(CheckpointError, match="hub"):
            find(name)
    for name in ("boks", "models/name", "./org/name", "gp2"):
        with pytest.raises(CheckpointError) as caught:
            find(name)
        assert "hub" not in caught.value.message


@pytest.mark.parametrize(
    "name", ["", "x" * 5000, "a/" * 3000, "nul\0byte", "../" * 50 + "etc", "/dev/null", "~nobody", "\x1b[2J"]
)
def test_odd_names(cwd, bundled, name):
    with pytest.raises(CheckpointError):
        find(name)


def test_summaries(cwd, bundled):
    assert local_models() == bundled_models() == ()
    make(cwd / "models" / "old", age=100)
    new = make(cwd / "models" / "new")
    write_record(new, {"corpus": "tiny.txt", "bits_per_byte": 2.5})
    make(bundled / "books")
    found, old = local_models()
    assert (found.name, found.corpus, found.bits_per_byte, found.parameters) == ("new", "tiny.txt", 2.5, 10)
    assert (found.bundled, found.problem, found.modified, found.encoding) == (False, None, 1e9, "int8")
    assert found.bytes == (new / "model.safetensors").stat().st_size
    assert (old.name, old.corpus, old.bits_per_byte) == ("old", None, None)
    assert [(model.name, model.bundled) for model in bundled_models()] == [("books", True)]


def test_a_damaged_model_is_listed_with_its_problem(cwd, bundled):
    model = make(cwd / "models" / "new")
    (model / "model.safetensors").write_bytes(b"x")
    assert "model.safetensors" in local_models()[0].problem
    make(cwd / "models" / "other")
    (cwd / "models" / "other" / "record.json").write_text(json.dumps({"corpus": 1, "bits_per_byte": "low"}))
    odd = next(summary for summary in local_models() if summary.name == "other")
    assert (odd.corpus, odd.bits_per_byte, odd.problem) == (None, None, None)


@pytest.mark.parametrize("encoding", ["", "int4", "\x1b[2J"])
def test_an_unknown_encoding_is_not_shown(cwd, bundled, encoding):
    folder = make(cwd / "models" / "a")
    write_tensors(folder / "model.safetensors", {"a": torch.zeros(2)}, {"encoding": encoding})
    assert [(model.encoding, model.parameters) for model in local_models()] == [(None, 2)]


def test_an_unfinished_copy_is_not_a_model(cwd, bundled):
    make(cwd / "models" / ".tmp-xlcli-model-0")
    assert local_models() == ()


def test_a_record_with_an_endless_number_has_no_score(cwd, bundled):
    make(cwd / "models" / "a")
    record = cwd / "models" / "a" / "record.json"
    record.write_text('{"bits_per_byte": 1' + "0" * 400 + "}")
    [found] = local_models()
    assert found.bits_per_byte is None
    assert found.parameters == 10
