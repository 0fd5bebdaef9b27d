"""The score of a model is the same number, of a named text, wherever it is printed."""

import json
from pathlib import Path

import pytest
from programs import TEXT

from xlcli.presets import models_folder
from xlcli.store.layout import read_config

SMALL = (
    "--set", "model.dim=16", "--set", "model.n_layers=1", "--set", "model.attention.n_heads=2", "--segment-len", "16",
    "--mem-len", "24", "--batch-size", "2", "--tokenizer", "bytes", "--threads", "1", "--preset", "tiny",
    "--max-steps", "2", "--valid", "held.txt",
)  # fmt: skip


@pytest.mark.parametrize("limit", [None, 300])
def test_table_record_end_of_training_and_eval_agree(run, monkeypatch, limit):
    if limit:
        monkeypatch.setattr("xlcli.training.validation.SCORED_BYTES", limit)
    Path("corpus.txt").write_bytes(TEXT * 40)
    Path("held.txt").write_bytes(TEXT[::-1] * 20)
    n_bytes = 20 * len(TEXT)
    scored = {"bytes": limit or n_bytes, "of_bytes": n_bytes, "mem_len": 24}
    words = f"{'first 300 of ' if limit else ''}{n_bytes} bytes of validation text, memory 24"
    ended = run("train", "corpus.txt", *SMALL)
    assert ended.code == 0, ended.err
    record = json.loads(Path("models/corpus/record.json").read_text())
    assert record["scored"] == scored
    score = record["bits_per_byte"]
    said = ended.out.decode()
    assert f"valid     {score:.4f} bits per byte" in said
    assert f"\n          of the {words}\n" in said
    evaluated = json.loads(run("eval", "--json", *(("--limit", str(limit)) if limit else ())).out)
    assert (evaluated["bits_per_byte"], evaluated["bytes"], evaluated["mem_len"]) == (score, scored["bytes"], 24)
    (listed,) = json.loads(run("models", "--json").out)["local"]
    assert (listed["bits_per_byte"], listed["scored"]) == (score, scored)
    table = run("models").out.decode()
    assert f" {score:.3f}{'*' if limit else ' '}" in table
    assert "validation text, memory as in training" in table
    assert ("\n* of its beginning" in table) == bool(limit)
    assert f"{score:.4f} bits per byte of the {words}\n" in run("models", "show", "corpus").out.decode()
    events = [json.loads(line) for line in run("train", "corpus.txt", *SMALL, "--overwrite", "--json").out.splitlines()]
    assert (events[-1]["bits_per_byte"], events[-1]["scored"]) == (score, scored)


def test_a_copy_with_other_weights_has_no_score(run, model):
    record = {"bits_per_byte": 2.5, "scored": {"bytes": 5, "of_bytes": 9, "mem_len": 1}}
    (model / "record.json").write_text(json.dumps(record))
    assert run("models", "copy", "tiny", "models/small", "--weights", "int8").code == 0
    found = {each["name"]: each for each in json.loads(run("models", "--json").out)["local"]}
    assert found["tiny"]["scored"] == record["scored"]
    assert (found["small"]["bits_per_byte"], found["small"]["scored"]) == (None, None)


@pytest.mark.parametrize(
    "scored",
    [
        "all", [], {"bytes": 5}, {"bytes": "5", "of_bytes": 9, "mem_len": 1},
        {"bytes": 9, "of_bytes": 5, "mem_len": 1}, {"bytes": -1, "of_bytes": 5, "mem_len": 1},
        {"bytes": 5, "of_bytes": 10**300, "mem_len": 1}, {"bytes": 5, "of_bytes": 9, "mem_len": 10**300},
    ],
    ids=range(8),
)  # fmt: skip
def test_a_foreign_record_does_not_break_the_list(run, model, scored):
    (model / "record.json").write_text(json.dumps({"bits_per_byte": 2.5, "scored": scored}))
    (found,) = json.loads(run("models", "--json").out)["local"]
    assert (found["bits_per_byte"], found["scored"]) == (2.5, None)
    assert run("models").code == 0


def test_the_bundled_model_has_the_score_of_its_whole_validation_text():
    folder = models_folder() / "books"
    if not folder.is_dir():
        pytest.skip("this checkout holds no bundled model")
    record = json.loads((folder / "record.json").read_text())
    n_bytes = (folder / "valid.txt").stat().st_size
    assert record["scored"] == {"bytes": n_bytes, "of_bytes": n_bytes, "mem_len": read_config(folder).train.mem_len}
    assert f"{record['bits_per_byte']:.4f} bits per byte" in (folder / "README.md").read_text()
