"""`--overwrite` keeps the old model until the new one has weights; a kill leaves one of the two."""

import errno
import os
from pathlib import Path

import pytest
from short_runs import PROSE, After, corpus, curve, go, of_kind, small, train

from xlcli.errors import ConfigError, DivergedError, ResourceError
from xlcli.events import Notice, Plan, Saved, Step, Trained, Validation
from xlcli.store import commit
from xlcli.store.folder import load
from xlcli.store.layout import is_model, read_config
from xlcli.store.lock import STAGED, clean

NEW = small(model={"n_layers": 1}, train={"max_steps": 7, "save_every": 1})


@pytest.fixture
def text():
    """A text of which `m` holds a model with two layers."""
    path = corpus()
    go(small(), path, "m")
    Path("m/mine.txt").write_text("mine")
    return path


def layers():
    return load(Path("m")).config.model.n_layers


def names():
    return sorted(path.name for path in Path("m").iterdir() if not path.name.startswith(".lock"))


def test_the_old_model_stays_until_the_new_one_has_weights(text):
    before, seen = names(), {}
    for event in train(NEW, [text], Path("m"), overwrite=True):
        assert is_model(Path("m"))
        seen[type(event), getattr(event, "step", 0)] = layers()
    assert [seen[kind, step] for kind, step in ((Plan, 0), (Step, 1), (Saved, 2), (Validation, 3), (Step, 4))] == [
        2, 2, 2, 1, 1,
    ]  # fmt: skip
    assert isinstance(event, Trained)
    assert event.folder == Path("m")
    assert names() == before
    go(NEW, text, "fresh")
    assert curve("m") == curve("fresh")
    assert Path("m/model.safetensors").read_bytes() == Path("fresh/model.safetensors").read_bytes()


@pytest.mark.parametrize("after", range(7))
def test_a_run_that_is_killed_can_be_resumed_and_the_old_model_read(text, after):
    run = train(NEW, [text], Path("m"), overwrite=True)
    while not (isinstance(event := next(run), Plan | Step) and getattr(event, "step", 0) == after):
        pass
    run.close()
    assert layers() == (1 if after >= 4 else 2)
    replaces = Path("m/.replacement/config.json").exists()
    assert replaces == (0 < after < 4)
    events = go({}, text, "m", resume=True)
    assert any("replace" in notice.text for notice in of_kind(events, Notice)) == replaces
    assert events[-1].step == (7 if after else 6)
    assert layers() == (1 if after else 2)
    go(NEW if after else small(), text, "fresh")
    assert curve("m") == curve("fresh")


def test_another_attempt_replaces_the_first(text):
    After(0).run(NEW, text, "m", overwrite=True)
    assert layers() == 2
    with pytest.raises(ConfigError, match="overwrite"):
        go(NEW, text, "m")
    assert go(NEW, text, "m", overwrite=True)[-1].step == 7
    assert layers() == 1
    assert ".replacement" not in names()


def test_a_run_that_diverges_leaves_the_old_model(text):
    tree = small(model={"n_layers": 1}, train={"lr": 1e18, "adam_lr": 1e18, "max_steps": 9})
    before = Path("m/model.safetensors").read_bytes()
    with pytest.raises(DivergedError):
        go(tree, text, "m", overwrite=True)
    assert Path("m/model.safetensors").read_bytes() == before
    assert layers() == 2
    assert go({"train": {"lr": 0.001, "adam_lr": 0.001}}, text, "m", resume=True)[-1].step == 9
    assert layers() == 1


@pytest.mark.parametrize("call", [0, 5, 20, 30])
def test_a_full_disk_leaves_the_old_model(text, call, monkeypatch):
    before = Path("m/model.safetensors").read_bytes()
    write, left = os.write, [call]

    def full(descriptor, data):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ResourceError, match="space"):
            go(NEW, text, "m", overwrite=True)
    assert Path("m/model.safetensors").read_bytes() == before
    assert layers() == 2
    assert go(NEW, text, "m", overwrite=True)[-1].step == 7


@pytest.mark.parametrize("name", ["valid.txt", "metrics.jsonl", "checkpoints/step-00000006/state.json"])
def test_a_text_of_the_old_model_is_not_lost(text, name):
    before = Path("m", name).read_bytes()
    Path("link.txt").symlink_to(Path("m", name))
    for given in (f"m/{name}", "link.txt"):
        with pytest.raises(ConfigError, match=given):
            go(NEW, given, "m", overwrite=True)
        with pytest.raises(ConfigError, match=given):
            go(small(text={"valid": given}), text, "m", overwrite=True)
    assert Path("m", name).read_bytes() == before


def test_a_text_of_the_user_in_the_folder_is_kept(text):
    Path("m/mine.txt").write_text(PROSE)
    assert go(NEW, "m/mine.txt", "m", overwrite=True)[-1].step == 7
    assert Path("m/mine.txt").read_text() == PROSE


class Killed(BaseException):
    pass


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("has_old", [True, False])
def test_a_kill_at_every_call_of_the_exchange(has_old, has_weights, tmp_path, monkeypatch):
    """Afterwards the old model is whole, or `finish_replacement` puts the new run in its place."""
    at, is_finished = 0, False
    while not is_finished:
        at += 1
        folder = tmp_path / str(at)
        if has_old:
            fill(folder, "old", weights=True)
        fill(folder / STAGED, "new", weights=has_weights)
        calls = [0]

        def counted(call, calls=calls, at=at):
            def counting(*args, **more):
                calls[0] += 1
                if calls[0] == at:
                    raise Killed
                return call(*args, **more)

            return counting

        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "mkdir", "unlink", "rmdir", "fsync"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                commit.finish_replacement(folder)
                is_finished = True
            except Killed:
                pass
        assert commit.holds_run(folder) or commit.place_of_run(folder) != folder
        clean(folder)  # as a run does first
        commit.finish_replacement(folder)
        place = commit.place_of_run(folder)
        if has_old and not has_weights:
            assert place == folder / STAGED
            assert content(folder) == {"old"}
        else:
            assert place == folder
            assert content(folder) == {"new"}
            assert sorted(path.name for path in folder.iterdir()) == sorted(
                ["config.json", "tokenizer.json", "checkpoints", *(["model.safetensors"] if has_weights else [])]
            )
    assert at == 1 or at > 7


def fill(folder, mark, *, weights):
    """Files of a run, each with this mark; those of an old one include some that the new one lacks."""
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001" / "manifest.json").write_text(mark)
    (folder / "config.json").write_text(f'{{"schema": 2, "model": "{mark}", "sha256": ""}}')
    more = ["valid.txt", "tokenizer.words", "record.json"] if mark == "old" else ["tokenizer.json"]
    for name in [*more, *(["model.safetensors"] if weights else [])]:
        (folder / name).write_text(mark)


def content(folder):
    """Marks of all visible files."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".replacement" not in path.parts]
    return {"new" if "new" in path.read_text() else "old" for path in paths}


def test_the_plan_of_a_resumed_run_is_shown_without_writing(text):
    After(0).run(NEW, text, "m", overwrite=True)
    before = sorted(Path("m").rglob("*"))
    plan = of_kind(go({}, text, "m", resume=True, dry_run=True), Plan)[0]
    assert plan.folder == Path("m")
    assert sorted(Path("m").rglob("*")) == before
    assert read_config(Path("m/.replacement")).model.n_layers == 1


def test_a_run_does_not_replace_the_model_that_it_starts_from(text):
    for init in (Path("m"), Path("m/kept/5M")):
        with pytest.raises(ConfigError, match="starts from"):
            next(train(NEW, [text], Path("m"), init=init, overwrite=True))
    assert layers() == 2
