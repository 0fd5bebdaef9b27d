"""A model folder is removed as a whole, only if xlcli wrote all of it, and survives a kill at any call."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_lock import ENVIRONMENT, hold

from xlcli.errors import BusyError, CheckpointError, ConfigError
from xlcli.presets import models_folder
from xlcli.store.commit import commit, step_name
from xlcli.store.discover import bundled_models, find, local_models
from xlcli.store.removal import claimed, foreign_files, move, own_model, remove


@pytest.fixture
def model():
    """A model with checkpoints and everything else that a run leaves, in ./models."""
    folder = Path("models") / "mine"
    shutil.copytree(models_folder() / "books", folder, ignore=shutil.ignore_patterns("README.md", ".*"))
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n')
    for part in ("valid", "test"):
        (folder / f"{part}.documents").write_bytes(b"0\n")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out.tfevents.1700000000.000000.host.1").write_bytes(b"x")
    commit(folder / "checkpoints", step_name(7), lambda path: (path / "state.json").write_bytes(b"x"), 2)
    return folder


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".lock")
    }


def test_a_model_is_removed_with_its_checkpoints(model):
    with claimed(model):
        remove(model)
    assert list(Path("models").iterdir()) == []


def test_a_folder_with_nothing_but_a_lock_is_removed():
    folder = Path("models") / "stopped"
    folder.mkdir(parents=True)
    (folder / ".lock").touch()
    with claimed(own_model("stopped")):
        remove(folder)
    assert list(Path("models").iterdir()) == []
    folder.mkdir()
    for name in (".lock", "notes.txt"):
        (folder / name).touch()
    with pytest.raises(CheckpointError, match="not a model"):
        own_model("stopped")


@pytest.mark.parametrize(
    "place",
    [
        "notes.txt",
        ".hidden",
        "checkpoints/notes.txt",
        "checkpoints/step-00000007/x.py",
        "tensorboard/notes.txt",
        "tensorboard/events.out.profile",
    ],
)
def test_a_foreign_file_is_never_removed(model, place):
    (model / place).touch()
    before = contents(model)
    assert foreign_files(model) == [place]
    with claimed(model), pytest.raises(ConfigError, match=f"holds {place}, not written by xlcli"):
        remove(model)
    assert contents(model) == before


@pytest.mark.parametrize("place", [".tmp-20251231-2", ".tmp-xlcli-0123456789abcdef", "checkpoints/.tmp-1-0123abcd"])
def test_a_folder_of_the_user_with_a_temporary_name_stays(model, place):
    (model / place).mkdir()
    (model / place / "thesis.txt").write_text("mine")
    leftover = model / ".tmp-xlcli-aaaaaaaaaaaaaaaa"
    leftover.mkdir()
    (leftover / "config.json").touch()
    assert foreign_files(model) == [place]
    with claimed(model), pytest.raises(ConfigError, match="not written by xlcli"):
        remove(model)
    assert (model / place / "thesis.txt").read_text() == "mine"
    assert leftover.is_dir()
    shutil.rmtree(model / place)
    with claimed(model):
        remove(model)
    assert not model.exists()


def test_a_link_or_a_folder_in_place_of_a_file_is_foreign(model):
    (model / "valid.txt").unlink()
    (model / "valid.txt").symlink_to("/etc/passwd")
    (model / "record.json").unlink()
    (model / "record.json").mkdir()
    assert foreign_files(model) == ["record.json", "valid.txt"]


@pytest.mark.parametrize(
    "name", ["mine", "models/mine", "./models/mine", "models/mine/", "models/x/../mine", "ABSOLUTE"]
)
def test_names_and_paths_of_a_model(model, name):
    Path("models/x").mkdir()
    found = own_model(str(model.absolute()) if name == "ABSOLUTE" else name)
    assert found.samefile(model)


def test_a_damaged_model_and_a_run_without_weights_are_found(model):
    (model / "config.json").write_bytes(b"junk")
    assert own_model("mine") == model
    (model / "model.safetensors").unlink()
    assert own_model("mine") == model


@pytest.mark.parametrize("name", ["books", "../models/books", str(models_folder() / "books")])
def test_a_bundled_model_stays(name):
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        own_model(name)
    assert "is bundled with xlcli" in caught.value.message or name.startswith("..")


def test_the_bundled_model_stays_where_it_is_local_too(monkeypatch):
    monkeypatch.chdir(models_folder().parent)
    with pytest.raises(ConfigError, match="is bundled with xlcli"):
        own_model("books")
    assert "books" not in {model.name for model in local_models()}
    assert "books" in {model.name for model in bundled_models()}


def test_folders_that_are_no_models_of_the_user(model, monkeypatch):
    Path("models/foreign").mkdir()
    for name in ("config.json", "model.safetensors"):
        (Path("models/foreign") / name).write_bytes(b"{}")  # as of another program
    Path("link").symlink_to(model)
    monkeypatch.chdir(model / "checkpoints")
    for name, reason in (("../../foreign", "not a model of xlcli"), ("..", "contains the working folder")):
        with pytest.raises((ConfigError, CheckpointError), match=reason):
            own_model(name)
    monkeypatch.chdir(model.parents[0] if model.is_absolute() else "../../..")
    for name, reason in (("link", "symbolic link"), ("models", "not a model"), (".", "not a model"), ("x", "no model")):
        with pytest.raises((ConfigError, CheckpointError), match=reason):
            own_model(name)


def test_a_model_in_use_is_refused(model):
    with hold(model.absolute()) as child:
        with pytest.raises(BusyError) as caught, claimed(model):
            pass
        child.kill()
    assert caught.value.exit_code == 5
    assert "--out" not in caught.value.remedy


KILLED = """
import os, shutil
from pathlib import Path
from xlcli.store.removal import claimed, remove
shutil.rmtree = lambda path: os._exit(9)
with claimed(Path("models/mine")):
    remove(Path("models/mine"))
"""


def test_a_killed_removal_leaves_no_half_model_and_is_finished_later(model):
    shutil.copytree(model, "models/other")
    done = subprocess.run([sys.executable, "-c", KILLED], env=ENVIRONMENT)
    assert done.returncode == 9
    assert [summary.name for summary in local_models()] == ["other"]
    assert any(path.name.startswith(".tmp-xlcli-model-") for path in Path("models").iterdir())
    with claimed(Path("models/other")):
        remove(Path("models/other"))
    assert list(Path("models").iterdir()) == []


def test_a_renamed_model_keeps_everything(model):
    (model / "notes.txt").write_bytes(b"mine")
    before = contents(model)
    with claimed(model):
        move(model, Path("models/new/name"))
    assert not model.exists()
    assert contents(Path("models/new/name")) == before
    assert find("models/new/name")
    assert not Path("models/new/name/.lock.json").exists()
    with claimed(Path("models/new/name")):
        pass


def test_a_model_is_not_moved_over_another_or_into_itself(model):
    Path("there").mkdir()
    with claimed(model):
        for target, reason in (("there", "exists"), ("models/mine", "exists"), ("models/mine/x", "inside")):
            with pytest.raises(ConfigError, match=reason):
                move(model, Path(target))
    assert find("mine")


@pytest.fixture
def elsewhere(tmp_path):
    """A folder on another file system."""
    folder = Path("/dev/shm") / f"xlcli-test-{os.getpid()}"
    if not folder.parent.is_dir() or folder.parent.stat().st_dev == Path().stat().st_dev:
        pytest.skip("there is no other file system")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_a_model_is_moved_to_another_disk(model, elsewhere):
    before = contents(model)
    (model / "notes.txt").touch()
    with claimed(model):
        with pytest.raises(ConfigError, match=r"notes\.txt"):
            move(model, elsewhere / "far")
        assert list(elsewhere.iterdir()) == []
        (model / "notes.txt").unlink()
        move(model, elsewhere / "far")
    assert list(Path("models").iterdir()) == []
    assert contents(elsewhere / "far") == before
    assert sorted(path.name for path in elsewhere.iterdir()) == ["far"]
