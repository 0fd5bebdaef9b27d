import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faults import Faults
from test_lock import ENVIRONMENT

from xlcli.config import make
from xlcli.errors import CheckpointError, ConfigError, ResourceError
from xlcli.files import json_digest
from xlcli.model.build import build_model
from xlcli.store import folder as store
from xlcli.store.discover import find, local_models
from xlcli.store.folder import copy_model, new_folder
from xlcli.store.layout import CONFIG, WEIGHTS, is_model, read_record, write_record
from xlcli.store.weights import decode, encode, stored_infos
from xlcli.store.weights import weights as weights_of
from xlcli.text.tokenizers import BytesTokenizer

ENCODINGS = ("float32", "bfloat16", "int8")
RECORD = {"corpus": "x.txt", "bits_per_byte": 2.5, "preset": "tiny"}


@pytest.fixture
def config():
    return make({"model": {"dim": 16, "n_layers": 1, "attention": {"n_heads": 2}, "feedforward": {"ffn_dim": 24}}})


@pytest.fixture
def model(tmp_path, config):
    """A model with record, held-out texts, a card and a checkpoint."""
    folder = tmp_path / "models" / "m"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "README.md").touch()
    for name in ("valid", "test"):
        (folder / f"{name}.txt").write_bytes(name.encode() * 9)
    network = build_model(config.model, torch.Generator().manual_seed(0))
    store.save_model(folder, config, weights_of(network), BytesTokenizer(), {"step": "7"})
    write_record(folder, RECORD)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return weights_of(store.load(folder).network)


KILLED = """
import os
from pathlib import Path
from xlcli.store.folder import new_folder
with new_folder(Path("killed")) as folder:
    (folder / "config.json").touch()
    os._exit(9)
"""


def test_a_copy_removes_what_killed_ones_left(tmp_path, model):
    command = [sys.executable, "-c", KILLED]
    assert subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT).returncode == 9
    (left,) = set(tmp_path.iterdir()) - {model.parent}
    copy_model(model, tmp_path / "copy")
    assert (left / "config.json").exists()
    os.utime(left, (1e9, 1e9))
    copy_model(model, tmp_path / "another")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "copy", "models"]


@pytest.mark.parametrize("content", [[], [".lock"], [".lock", f".tmp-xlcli-{'0' * 16}"]])
def test_a_copy_removes_what_was_killed_at_its_beginning(tmp_path, model, content):
    left = tmp_path / f".tmp-xlcli-model-{'0' * 16}"
    left.mkdir()
    for name in content:
        (left / name).touch()
    copy_model(model, tmp_path / "early")
    assert left.exists()
    os.utime(left, (1e9, 1e9))
    copy_model(model, tmp_path / "copy")
    assert not left.exists()


def test_a_copy_leaves_those_that_are_being_made(tmp_path, model):
    with new_folder(tmp_path / "slow") as folder:
        (folder / "config.json").touch()
        copy_model(model, tmp_path / "copy")
        assert (folder / "config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "models", "slow"]
    assert [path.name for path in (tmp_path / "slow").iterdir()] == ["config.json"]


def test_a_copy_that_fails_leaves_no_folder(tmp_path):
    (tmp_path / "there").mkdir()
    for target in ("there/copy", "new/folder/copy"):
        with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / target):
            raise KeyboardInterrupt
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[]]


def test_two_copies_to_one_folder(tmp_path):
    late = new_folder(tmp_path / "copy")
    (late.__enter__() / "config.json").touch()
    with new_folder(tmp_path / "copy") as other:
        (other / "first").touch()
    with pytest.raises(ConfigError):
        late.__exit__(None, None, None)
    assert [path.name for path in tmp_path.rglob("*")] == ["copy", "first"]


@pytest.mark.parametrize("content", [[], ["config.json"], [".lock", "config.json"], ["thesis.txt"]])
def test_a_copy_leaves_folders_of_the_user(tmp_path, model, content):
    names = [".tmp-copy-2025", ".tmp-removed-4000000", f".tmp-xlcli-model-{'0' * 16}", f".tmp-xlcli-{'0' * 16}"]
    for name in names:
        (tmp_path / name).mkdir()
        for file in content:
            (tmp_path / name / file).touch()
    copy_model(model, tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "copy", "models"])
    assert all(len(list((tmp_path / name).iterdir())) == len(content) for name in names)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_copy(tmp_path, model, encoding):
    target = tmp_path / "elsewhere" / "copy"
    copy_model(model, target, encoding)
    assert sorted(path.name for path in target.iterdir()) == [
        CONFIG, WEIGHTS, "record.json", "test.txt", "tokenizer.json", "valid.txt",
    ]  # fmt: skip
    for name in ("test.txt", "tokenizer.json", "valid.txt"):
        assert (target / name).read_bytes() == (model / name).read_bytes()
    before, after = (json.loads((folder / CONFIG).read_text()) for folder in (model, target))
    assert after.pop("weights") == {"encoding": encoding}
    assert {**before, "weights": None, "sha256": None} == {**after, "weights": None, "sha256": None}
    was, now = store.load(model), store.load(target)
    assert {name for name in was.fingerprints if was.fingerprints[name] != now.fingerprints[name]} == (
        set() if encoding == "float32" else {"weights"}
    )
    expected = decode(encode(weights_of(was.network), stored_infos(weights_of(was.network), encoding)))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(target).items())
    if encoding == "float32":
        assert (target / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()
    assert now.held_out("valid") == target / "valid.txt"


def test_the_score_stays_only_if_no_weight_changes(tmp_path, model):
    last = model
    for i, (encoding, changes) in enumerate(
        [
            ("float32", False),
            ("bfloat16", True),
            ("float32", False),
            ("int8", True),
            ("int8", False),
            ("float32", False),
        ]
    ):
        write_record(last, RECORD)
        copy = tmp_path / str(i)
        copy_model(last, copy, encoding)
        assert all(torch.equal(a, b) for a, b in zip(tensors(last).values(), tensors(copy).values(), strict=True)) == (
            not changes
        )
        assert read_record(copy) == {
            key: value for key, value in RECORD.items() if key != "bits_per_byte" or not changes
        }
        last = copy


def test_the_encoding_stays_by_default(tmp_path, model):
    copy_model(model, tmp_path / "small", "int8")
    copy_model(tmp_path / "small", tmp_path / "again")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "small" / name).read_bytes()


def test_a_model_section_of_another_release_keeps_its_fingerprint(tmp_path, model, config):
    """It was written before there was a key `init_std`, whose default has the same value."""
    weights = tensors(model)
    tree = json.loads((model / CONFIG).read_text())
    del tree["model"]["init_std"], tree["sha256"]
    tree["sha256"] = json_digest(tree)
    (model / CONFIG).write_text(json.dumps(tree))
    store.save_model(model, config, weights, BytesTokenizer(), {})
    copy_model(model, tmp_path / "copy", "int8")
    assert store.load(tmp_path / "copy").fingerprints["config"] == store.load(model).fingerprints["config"]
    assert "init_std" not in json.loads((tmp_path / "copy" / CONFIG).read_text())["model"]


def test_a_model_without_record_or_held_out_text(tmp_path, model):
    for name in ("record.json", "valid.txt", "test.txt"):
        (model / name).unlink()
    copy_model(model, tmp_path / "copy", "int8")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [CONFIG, WEIGHTS, "tokenizer.json"]


def test_what_exists_is_never_replaced(tmp_path, model):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "folder", "link", "models/m"):
        with pytest.raises(ConfigError, match=rf"/{name}\b"):
            copy_model(model, tmp_path / name, "int8")
    assert not any((tmp_path / "folder").iterdir())


def test_a_damaged_model_is_not_copied(tmp_path, model):
    (model / "valid.txt").write_text("other")
    with pytest.raises(CheckpointError, match=r"valid\.txt"):
        copy_model(model, tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]


def test_a_model_that_an_encoding_cannot_represent(tmp_path, model, config):
    weights = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors(model).items()}
    store.save_model(model, config, weights, BytesTokenizer(), {})
    with pytest.raises(CheckpointError, match="int8"):
        copy_model(model, tmp_path / "copy", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models"]
    copy_model(model, tmp_path / "copy")
    assert read_record(tmp_path / "copy") == RECORD


def test_an_error_anywhere_leaves_nothing_or_all(tmp_path, model, monkeypatch):
    def full() -> None:
        raise OSError(28, "No space left on device")

    target, at, failures = tmp_path / "copy", 1, 0
    while True:
        faults = Faults(at, full)
        with monkeypatch.context() as patch:
            faults.install(patch.setattr)
            try:
                copy_model(model, target, "int8")
            except (ResourceError, CheckpointError):
                failures += 1
        if faults.count < at:
            break
        assert is_model(target) == target.exists()
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == (["copy", "models"] if target.exists() else ["models"]), at
        if target.exists():
            store.load(target)
            for path in target.iterdir():
                path.unlink()
            target.rmdir()
        at += 3
    assert failures > 10


def test_a_copy_that_was_killed_is_not_a_model(tmp_path, model, monkeypatch):
    """The process ends before the last call, and nothing is cleaned up."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(shutil, "rmtree", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            copy_model(model, model.parent / "copy", "int8")
    assert len(list(model.parent.iterdir())) == 2
    monkeypatch.chdir(tmp_path)
    assert [summary.name for summary in local_models()] == ["m"]
    with pytest.raises(CheckpointError, match="'copy'"):
        find("copy")
