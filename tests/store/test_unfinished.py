"""Only files and folders that xlcli wrote are recognized as unfinished and removed."""

import pytest

from xlcli.store.lock import clean

NAME = ".tmp-xlcli-0123456789abcdef"


@pytest.mark.parametrize(
    "content",
    [
        [],
        ["state.json", "weights.safetensors", "manifest.json", NAME],
        ["tensorboard/events.out.tfevents.1700000000.000000.host.1"],
        ["config.json", "checkpoints/LATEST", "checkpoints/step-00000001/state.json", f"checkpoints/{NAME}/state.json"],
    ],
)
def test_what_a_crash_left_is_removed(tmp_path, content):
    for name in content:
        path = tmp_path / NAME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / NAME).mkdir(exist_ok=True)
    (tmp_path / NAME.replace("0", "f")).touch()
    clean(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path",
    [
        ".tmp-20251231-2/thesis.txt",
        ".tmp-1-0123abcd",
        ".tmp-old-model-1/config.json",
        ".tmp-xlcli-1/config.json",
    ],
)
def test_what_the_user_wrote_stays(tmp_path, path):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("mine")
    clean(tmp_path)
    assert (tmp_path / path).read_text() == "mine"


def test_links_stay(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / NAME).symlink_to(tmp_path / "there")
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "config.json").symlink_to(tmp_path / "there")
    clean(tmp_path / "m")
    clean(tmp_path)
    assert (tmp_path / "m" / NAME).is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "there"]
