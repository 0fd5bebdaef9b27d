"""Models are sent to and fetched from file systems of fsspec; a fetched model is checked as a stranger's."""

import json
import shutil
from pathlib import Path

import fsspec
import pytest
import torch

from xlcli.config import make
from xlcli.errors import CheckpointError, ConfigError, ResourceError
from xlcli.files import json_digest
from xlcli.model.build import build_model
from xlcli.store import remote
from xlcli.store.discover import local_models
from xlcli.store.folder import load, save_model, weights
from xlcli.store.records import write_record
from xlcli.text.tokenizers.bytes import BytesTokenizer


@pytest.fixture
def model():
    """A model with record, held-out texts, metrics and a checkpoint."""
    folder = Path("models") / "mine"
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    for name in ("valid", "test"):
        (folder / f"{name}.txt").write_bytes(name.encode() * 9)
    config = make({"model": {"dim": 16, "n_layers": 1, "attention": {"n_heads": 2}}})
    save_model(folder, config, weights(build_model(config.model)), BytesTokenizer(), {})
    write_record(folder, {"corpus": "x.txt"})
    return folder


@pytest.fixture(params=["folder", "file", "memory"])
def url(request):
    """A place for a model: a folder, and URLs."""
    yield {"folder": "far/mine", "file": Path("far/mine").absolute().as_uri(), "memory": "memory://far/mine"}[
        request.param
    ]
    fsspec.filesystem("memory").store.clear()


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_model_comes_back_as_it_was(model, url):
    sent = remote.push(model, url)
    assert sorted(sent) == ["config.json", "model.safetensors", "record.json", "tokenizer.json"]
    remote.pull(url, Path("models/back"))
    assert names("models/back") == sorted(sent)
    before, after = weights(load(model).network), weights(load(Path("models/back")).network)
    assert all(torch.equal(after[name], before[name]) for name in before)
    with pytest.raises(ConfigError, match="exists"):
        remote.pull(url, Path("models/back"))
    with pytest.raises(ConfigError, match="there is a config"):
        remote.push(model, url)


def test_held_out_text_is_sent_only_if_asked_for(model, url):
    assert {"valid.txt", "test.txt"} <= set(remote.push(model, url, with_text=True))
    remote.pull(url, Path("models/back"))
    assert load(Path("models/back")).held_out("valid").read_bytes() == b"valid" * 9


def reseal(path, **changes):
    tree = json.loads(path.read_text()) | changes
    tree["sha256"] = json_digest({key: value for key, value in tree.items() if key != "sha256"})
    path.write_text(json.dumps(tree))


DAMAGE = {
    "no weights": lambda far: (far / "model.safetensors").unlink(),
    "cut": lambda far: (far / "model.safetensors").write_bytes((far / "model.safetensors").read_bytes()[:-9]),
    "large": lambda far: (far / "config.json").write_bytes(b" " * (2**20 + 1)),
    "link": lambda far: ((far / "record.json").unlink(), (far / "record.json").symlink_to("/etc/passwd")),
    "folder": lambda far: ((far / "record.json").unlink(), (far / "record.json").mkdir()),
    "text": lambda far: (far / "valid.txt").write_bytes(b"other"),
    "schema": lambda far: reseal(far / "config.json", schema=99),
    "empty": lambda far: shutil.rmtree(far),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_strange_model_is_not_fetched(model, damage):
    remote.push(model, "far/mine", with_text=True)
    DAMAGE[damage](Path("far/mine"))
    with pytest.raises(CheckpointError):
        remote.pull("far/mine", Path("models/back"))
    assert names("models") == ["mine"]


def test_other_files_are_not_fetched(model):
    remote.push(model, "far/mine")
    for name in ("run.py", "model.pickle", ".lock"):
        Path("far/mine", name).write_bytes(b"x")
    remote.pull("far/mine", Path("models/back"))
    assert not {"run.py", "model.pickle", ".lock"} & set(names("models/back"))
    assert {summary.problem for summary in local_models()} == {None}


def test_a_file_that_grows_while_it_is_read(model, monkeypatch):
    remote.push(model, "memory://far/grows")
    files = fsspec.filesystem("memory")
    info = files.info
    monkeypatch.setattr(type(files), "info", lambda self, path, **_: info(path) | {"size": info(path)["size"] - 1})
    with pytest.raises(CheckpointError):
        remote.pull("memory://far/grows", Path("models/back"))
    assert names("models") == ["mine"]
    files.store.clear()


def test_a_disk_that_is_too_small_is_refused_first(model, monkeypatch):
    remote.push(model, "far/mine")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(ResourceError, match="the disk of models 100"):
        remote.pull("far/mine", Path("models/back"))


def test_a_push_that_fails_leaves_nothing_and_can_be_repeated(model, monkeypatch):
    files = type(fsspec.filesystem("memory"))
    put = files.put_file

    def fail(self, source, target, **options):
        put(self, source, target, **options)
        if target.endswith("model.safetensors"):
            raise PermissionError("quota")

    with monkeypatch.context() as patch:
        patch.setattr(files, "put_file", fail)
        with pytest.raises(CheckpointError, match="quota"):
            remote.push(model, "memory://far/mine")
    assert fsspec.filesystem("memory").store == {}
    assert remote.push(model, "memory://far/mine")
    fsspec.filesystem("memory").store.clear()


def test_a_place_that_cannot_be_reached(model):
    with pytest.raises(ConfigError, match="fsspec cannot reach nonsense://x/y: Protocol not known"):
        remote.push(model, "nonsense://x/y")
