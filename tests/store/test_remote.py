"""Models are sent to and fetched from file systems of fsspec; a fetched model is untrusted."""

import json
import shutil
import sys
from pathlib import Path

import fsspec
import pytest
import torch

from xlcli.config import make
from xlcli.errors import CheckpointError, ConfigError, ResourceError
from xlcli.files import json_digest
from xlcli.model.build import build_model
from xlcli.store import remote
from xlcli.store.copy import copy_model
from xlcli.store.discover import local_models
from xlcli.store.folder import load, save_model
from xlcli.store.layout import read_config, write_config
from xlcli.store.records import write_record
from xlcli.store.weights import weights
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
    """A remote location: a folder, and URLs."""
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
    with pytest.raises(ConfigError, match="there is a model at"):
        remote.push(model, url, force=True)


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
        with pytest.raises(ResourceError, match="quota"):
            remote.push(model, "memory://far/mine")
    assert fsspec.filesystem("memory").store == {}
    assert remote.push(model, "memory://far/mine")
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "valid.txt", "record.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"mine", b"{}"])
def test_a_push_replaces_no_file_that_it_did_not_write(model, name, content):
    path = Path("far", "mine", name)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for force in (False, True):
        with pytest.raises(ConfigError, match=f"there is a {name} at far/mine"):
            remote.push(model, "far/mine", with_text=True, force=force)
    assert names("far/mine") == [name]
    assert path.read_bytes() == content


def cut_after(name, n_bytes=0):
    """A `put_file` that writes the first bytes of a file of this name and then loses the connection for good."""
    files = type(fsspec.filesystem("memory"))
    put = files.put_file

    def fail(self, source, target, **options):
        if target.endswith(name):
            self.pipe_file(target, Path(source).read_bytes()[:n_bytes])
            raise ConnectionError("connection lost")
        put(self, source, target, **options)

    def rm_file(self, path):
        raise ConnectionError("connection lost")

    return {"put_file": fail, "rm_file": rm_file}


@pytest.mark.parametrize(("name", "n_bytes"), [("config.json", 0), ("tokenizer.json", 9), ("model.safetensors", 3000)])
def test_a_push_that_was_cut_is_replaced_with_force(model, monkeypatch, name, n_bytes):
    url = "memory://far/mine"
    files = fsspec.filesystem("memory")
    with monkeypatch.context() as patch:
        for method, replaced in cut_after(name, n_bytes).items():
            patch.setattr(type(files), method, replaced)
        with pytest.raises(ResourceError, match="connection lost"):
            remote.push(model, url, with_text=True)
    assert f"/far/mine/{name}" in files.store
    with pytest.raises(ConfigError, match=r"there is an unfinished push at memory://far/mine \(config.json.*--force"):
        remote.push(model, url)
    sent = remote.push(model, url, force=True)
    assert sorted(files.store) == sorted(f"/far/mine/{file}" for file in sent)  # the held-out text is removed
    remote.pull(url, Path("models/back"))
    files.store.clear()


@pytest.mark.parametrize("with_text", [False, True])
def test_a_model_of_separate_documents(model, with_text):
    for split in ("valid", "test"):
        (model / f"{split}.documents").write_text("0\n5\n")
    write_config(model, read_config(model))
    sent = remote.push(model, "far/mine", with_text=with_text)
    assert ("valid.documents" in sent, "test.documents" in sent) == (with_text, with_text)
    back = Path("models/back")
    remote.pull("far/mine", back)
    copy_model(back, Path("models/copy"))
    assert remote.push(back, "far/again", with_text=True) == sent
    for folder in (back, Path("models/copy")):
        assert load(folder).held_out_documents("test") == ([0, 5] if with_text else None)
    if with_text:
        Path("far/mine/test.documents").write_text("0\n6\n")
        with pytest.raises(CheckpointError, match="does not match its checksum"):
            remote.pull("far/mine", Path("models/third"))


def test_a_location_that_cannot_be_reached(model):
    with pytest.raises(ConfigError, match="fsspec cannot reach nonsense://x/y: Protocol not known"):
        remote.push(model, "nonsense://x/y")


def test_a_package_that_is_missing_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "paramiko", None)
    with pytest.raises(
        ConfigError, match=r'sftp://host/x needs a package .*"paramiko".* Install that package'
    ) as caught:
        remote.push(model, "sftp://me:secret@host/x")
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize(
    "action",
    [lambda url: remote.push(Path("models/mine"), url), lambda url: remote.pull(url, Path("models/back"))],
    ids=["push", "pull"],
)
def test_network_errors_are_explained_without_the_password(model, monkeypatch, action):
    def fail(self, path, **options):
        raise ConnectionError("no answer from memory://me:se%20cret@host/x for se cret")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", fail)
    with pytest.raises(ResourceError, match=r"^memory://host/x cannot be used: no answer") as caught:
        action("memory://me:se%20cret@host/x")
    assert "cret" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionError)
