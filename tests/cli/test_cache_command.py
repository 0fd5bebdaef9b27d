import json
from pathlib import Path

import pytest
from programs import Terminal, command

TEXT = b"A text that is scored.\n" * 40


@pytest.fixture
def cached(run, model):
    """Token files of two texts."""
    for name in ("one.txt", "two.txt"):
        Path(name).write_bytes(name.encode() + TEXT)
        assert run("eval", "-m", "tiny", name, "--limit", "300").code == 0


def test_the_cache_is_listed(run, cached):
    text = run("cache").out.decode()
    tree = json.loads(run("cache", "--json").out)
    for name, entry in zip(("one.txt", "two.txt"), tree["files"], strict=True):
        assert entry["text"] == str(Path(name).absolute())
        assert Path(entry["path"]).stat().st_size == entry["bytes"]
        assert Path(entry["path"]).name in text
        assert (entry["text_bytes"], entry["tokens"], entry["tokenizer"]) == (300, 300, "bytes 256")
        assert str(Path(name).absolute()) in text
    assert tree["bytes"] == sum(entry["bytes"] for entry in tree["files"])
    assert "2 files" in text
    assert tree["folder"] in text


@pytest.mark.usefixtures("without_torch")
def test_an_empty_cache(run):
    assert b"0 files, 0 bytes of at most" in run("cache").out
    assert json.loads(run("cache", "--json").out)["files"] == []
    assert run("cache", "prune").code == 0


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_rows_fit_the_terminal(columns, run, cached):
    terminal = Terminal(command("cache"), columns=columns)
    assert terminal.finish() == 0
    rows = terminal.received.decode().split("\r\n")[:3]
    assert max(map(len, rows)) <= columns
    assert "text" in rows[0]


def test_files_are_removed_by_age_and_size(run, cached):
    size = json.loads(run("cache", "--json").out)["files"][0]["bytes"]
    assert json.loads(run("cache", "prune", "--json").out)["removed"] == []
    done = run("cache", "prune", "--max-size", str(size), "--json")
    assert [Path(entry["text"]).name for entry in json.loads(done.out)["removed"]] == ["one.txt"]
    assert json.loads(run("cache", "prune", "--older-than", "1h", "--json").out)["removed"] == []
    done = run("cache", "prune", "--older-than", "0s")
    assert done.err.startswith("1 file removed")
    assert json.loads(run("cache", "--json").out)["bytes"] == 0


def test_everything_is_removed(run, cached):
    assert run("cache", "prune", "--all").err == "2 files removed, 2.2 KiB; 0 files left, 0 bytes\n"


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--all"], "Type xlcli cache prune"),
        (["prune", "--all", "--max-size", "1k"], "Leave out the other option."),
        (["prnue"], "Did you mean xlcli cache prune?"),
        (["prune", "--older-than", "-1d"], "Try --older-than 30d."),
        (["prune", "--max-size", "-1"], "Try --max-size 2GiB."),
        (["prune", "--max-size", "much"], "Try --max-size 2GiB."),
    ],
)
def test_mistakes(run, arguments, message):
    done = run("cache", *arguments)
    assert (done.code, message in done.err) == (2, True), done.err


def test_a_file_of_an_older_version_is_not_called_damaged(run, cached):
    paths = [Path(entry["path"]) for entry in json.loads(run("cache", "--json").out)["files"]]
    old, damaged = paths
    old.write_bytes(b"xltoken1" + old.read_bytes()[8:])
    damaged.write_bytes(damaged.read_bytes()[:8] + bytes(504) + damaged.read_bytes()[512:])
    rows = run("cache").out.decode().splitlines()
    for path, problem in zip(paths, ("of another version", "damaged"), strict=True):
        assert problem in next(row for row in rows if path.name in row)
