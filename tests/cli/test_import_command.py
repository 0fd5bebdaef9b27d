"""Commands `import` and `export`: what they print, and that an imported model works in all other commands."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import get_args

import pytest
from programs import TEXT

from xlcli.cli import options
from xlcli.events import Progress
from xlcli.interchange import FORMATS, import_model

SHAPE = {"position": {"kind": "rope"}, "attention": {"n_heads": 2, "n_kv_heads": 1}}


@pytest.fixture
def exported(untrained, run) -> Path:
    """A model in the format of Hugging Face, with the vocabulary of bytes."""
    untrained("made", **SHAPE)
    assert run("export", "made", "-o", "downloads/llama").code == 0
    return Path("downloads/llama")


def test_import_prints_what_was_mapped_and_the_next_commands(exported, run):
    done = run("import", exported)
    assert done.code == 0, done.err
    lines = done.out.decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if line.startswith("check")).endswith("(8.00 by chance)")
    assert {line.split()[0] for line in lines if line and not line.startswith(" ")} >= {"model", "weights", "check"}
    assert lines[-2:] == ["  xlcli eval FILE -m models/llama", "  xlcli generate -m models/llama"]
    assert Path("models/llama/config.json").read_bytes() == Path("models/made/config.json").read_bytes()
    again = run("import", exported)
    assert again.code == 2
    assert "models/llama" in again.err


def test_an_imported_model_whose_name_means_another_one_gets_its_path(exported, run):
    for name, is_other in (("made", True), ("new", False)):
        done = run("import", exported, "-o", name)
        assert done.code == 0, done.err
        word = f"./{name}" if is_other else name
        assert done.out.decode().splitlines()[-1] == f"  xlcli generate -m {word}"
        assert (f"-m {name} is the model in" in done.err) == is_other
        assert json.loads(run("models", "show", word, "--json").out)["folder"].endswith(name)


def test_json_is_one_object(exported, run):
    done = run("import", exported, "-o", "models/m", "--weights", "int8", "--json")
    found = json.loads(done.out)
    assert found["encoding"] == "int8"
    assert found["imported"]["format"] == "llama"
    assert found["config"]["model"]["attention"]["n_kv_heads"] == 1
    done = run("export", "m", "-o", "back", "--json")
    assert done.err.endswith("transformers gives other tokens to text that is not UTF-8 (tokenizer.json)\n")
    assert json.loads(done.out) == {"model": "m", "out": "back", "format": "llama"}


def test_an_imported_model_works_in_all_commands(exported, run):
    tree = json.loads((exported / "config.json").read_text())
    tree.pop("xlcli")  # as of another program: with its own window, and token ids for a vocabulary
    (exported / "config.json").write_text(json.dumps(tree | {"max_position_embeddings": 24}))
    shutil.rmtree(exported / "xlcli")
    (exported / "tokenizer.json").unlink()
    done = run("import", exported, "-o", "models/ids")
    assert done.code == 0
    assert "token ids" in done.out.decode()
    assert done.out.decode().endswith("xlcli generate -m models/ids\n")
    ids = " ".join(str(byte) for byte in TEXT[:200]).encode()
    Path("ids.txt").write_bytes(ids)
    for words in (
        ("models", "show", "ids"),
        ("models", "list"),
        ("eval", "ids.txt", "-m", "ids", "--adapt", "--limit", "64B"),
        ("stream", "ids.txt", "-m", "ids", "--emit", "stats"),
        ("generate", "1 2 3", "-m", "ids", "-n", "4"),
        ("generate", "-m", "ids", "-n", "4"),
        ("bench", "decode", "-m", "ids", "--seconds", "0.01"),
    ):
        done = run(*words)
        assert done.code == 0, (words, done.err)
    lines = ("--set", "train.shuffle=true", "--set", "train.line_share=1")
    done = run("train", "ids.txt", "--init", "ids", "-o", "lines", "--max-steps", "1", *lines)
    assert done.code == 2
    assert "train.line_share needs lines" in done.err


def test_training_says_that_it_starts_from_rounded_weights(exported, run):
    Path("text.txt").write_bytes(TEXT * 40)
    for encoding, is_rounded in (("int8", True), ("float32", False)):
        assert run("import", exported, "-o", f"models/{encoding}", "--weights", encoding).code == 0
        done = run("train", "text.txt", "--init", encoding, "--max-steps", "1", "-o", f"models/from-{encoding}")
        assert done.code == 0, done.err
        assert ("rounded" in done.err) == is_rounded
        assert ("--weights float32" in done.err) == is_rounded


def test_an_exported_vocabulary_comes_back(exported, run):
    assert run("import", exported).code == 0
    Path("text.txt").write_bytes(TEXT * 40)
    for words in (
        ("eval", "text.txt", "-m", "llama"),
        ("train", "text.txt", "--init", "llama", "--max-steps", "2", "-o", "models/tuned"),
    ):
        done = run(*words)
        assert done.code == 0, (words, done.err)
    record = json.loads(Path("models/tuned/record.json").read_text())
    assert record["init"]["model"] == "llama"


def test_a_folder_that_exists_is_refused_before_weights_are_read(exported, run, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("xlcli.store.folder.save_model", fail)
    monkeypatch.setattr("xlcli.store.folder.load", fail)
    assert run("import", exported, "-o", "models/made").code == 2
    assert run("export", "made", "-o", str(exported)).code == 2


def test_the_option_takes_the_formats_that_there_are():
    choices, _ = get_args(options.Format.__origin__)
    assert {*get_args(choices)} == FORMATS.keys()


def test_formats_to_import_and_export_are_those_of_the_page(exported, run):
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = dict(re.findall(r"^\| `(\S+)` \|.*\| yes \| (yes|no) \|$", page, re.MULTILINE))
    assert rows.keys() == FORMATS.keys()
    for name, is_written in rows.items():
        done = run("export", "made", "-o", "out", "--format", name)
        assert ("--format" not in done.err.splitlines()[0]) == (is_written == "yes")


def test_the_memory_of_a_model_with_learned_positions_is_refused_at_once(untrained, run):
    untrained("gpt", **{"position": {"kind": "learned", "max_len": 16, "overflow": "slide"}})
    Path("text.txt").write_bytes(TEXT * 40)
    for words in (("eval", "text.txt"), ("stream", "text.txt"), ("bench", "decode")):
        done = run(*words, "-m", "gpt", "--mem-len", "8")
        assert done.code == 2
        assert "mem" in done.err


def test_an_import_shows_how_far_it_is(exported, monkeypatch):
    monkeypatch.setattr("xlcli.events.PROGRESS_INTERVAL", 0.0)
    shown: list[Progress] = []
    import_model(exported, Path("models/m"), show=shown.append)
    written = [progress for progress in shown if progress.stage == "importing"]
    done = [progress.done for progress in written]
    assert done == sorted({*done})
    assert len(done) > 1
    assert done[-1] == written[-1].total
    assert any(progress.stage.startswith("checking") for progress in shown)


@pytest.mark.parametrize("is_large", [True, False])
def test_a_plan_counts_the_weights_as_they_are_in_ram(exported, run, is_large, monkeypatch):
    """Those of a large model stay as they are stored, and those of a small one become float32."""
    assert run("import", exported, "-o", "models/m", "--weights", "int8").code == 0
    size = Path("models/m/model.safetensors").stat().st_size
    monkeypatch.setattr("xlcli.cli.loading.SMALLEST_STORED", 1 if is_large else 2**25)
    monkeypatch.setattr("xlcli.cli.loading._FLOAT32_BYTES", 1000)  # the file of a tiny model is mostly header
    plan = json.loads(run("stream", "-m", "m", "--dry-run", "--json").out)
    assert plan["weights_bytes"] == (size if is_large else 1000 * plan["parameters"])
